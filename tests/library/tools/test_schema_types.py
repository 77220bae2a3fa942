"""JSON Schemas of tools: as Python types, as docs of parameters, and bounded if they come from a server."""

import ast
import json
from typing import Any

import pytest

from carrel.library.tools.arguments import ArgumentValidator
from carrel.library.tools.schema_types import (
    DEEPEST,
    LONGEST_TEXT,
    WorkBudget,
    bounded_schema,
    python_type,
    tool_docs,
)
from carrel.library.tools.stubs import ToolStub, describe, group_stub, parameters_of, signature_of
from carrel.library.tools.tool import Tool


def test_repeated_descriptions_are_shown_once() -> None:
    properties = {"key": {"type": "string", "description": "Which."}}
    docs = [
        tool_docs(Tool(name="set", description=text, parameters={"properties": properties}))
        for text in ("Set.", "Set. Which. Now.")
    ]
    assert [one.parameters for one in docs] == [{"key": "Which."}, {}]


def objects(depth: int) -> dict[str, Any]:
    inner = objects(depth - 1) if depth else {"type": "integer", "description": "How many"}
    names = {f"a_name_that_takes_its_room_{depth}_{number}": {"type": "string"} for number in range(4)}
    return {"type": "object", "properties": {**names, "within": inner}, "required": ["within"]}


def test_parts_that_the_type_does_not_show_have_their_own_type() -> None:
    written = tool_docs(Tool(name="t", parameters={"properties": {"deep": objects(3)}})).parts
    assert written["deep", "within", "within"].startswith(": dict")
    assert written["deep", "within", "within", "a_name_that_takes_its_room_1_0"] == "?: str"
    assert written["deep", "within", "within", "within", "within"] == ": int # How many"


def test_descriptions_of_any_key() -> None:
    tags = {
        "type": "object",
        "propertyNames": {"description": "A tag"},
        "additionalProperties": {"description": "Its colour"},
    }
    assert tool_docs(Tool(name="t", parameters={"properties": {"tags": tags}})).parts == {
        ("tags", "*"): ": A tag; Its colour"
    }


def test_enums_that_are_too_long_for_a_type() -> None:
    some = {"enum": [f"k{number}" for number in range(30)], "description": "A key"}
    many = {"enum": [f"k{number}" for number in range(3000)]}
    docs = tool_docs(Tool(name="t", parameters={"properties": {"some": some, "many": many}})).parameters
    assert docs["some"].startswith('A key; One of "k0", "k1", ')
    assert docs["some"].endswith('"k29"')
    assert docs["many"].startswith('One of 3000: "k0", ')
    assert docs["many"].endswith(", …")


def test_a_description_of_all_parameters() -> None:
    parameters = {"properties": {"a": {"type": "string"}}, "description": "Either a or nothing."}
    assert tool_docs(Tool(name="t", description="Does it.", parameters=parameters)).description == (
        "Does it.",
        "Either a or nothing.",
    )


def test_names_with_line_breaks() -> None:
    deep = {"type": "object", "properties": {"a\nimport os": {"type": "string", "description": "Which"}}}
    tools = [Tool(name=f"s.t{number}", parameters={"properties": {"deep": deep}}) for number in range(9)]
    written = group_stub("s", [(ToolStub(tool), "all") for tool in tools])
    assert "  a import os: Which" in written
    assert not any(isinstance(node, ast.Import) for node in ast.walk(ast.parse(written)))


def test_parts_that_are_left_out_are_counted() -> None:
    wide = {"type": "object", "properties": {f"name_{number}": {"type": "string"} for number in range(230)}}
    found = tool_docs(Tool(name="t", description="Does it.", parameters={"properties": {"wide": wide}}))
    assert found.description == ("Does it.", "(Its parameters have 30 more parts, which are not shown.)")


# --- schemas of servers -----------------------------------------------------------------------------------------------


def two_properties(k: int) -> dict[str, Any]:
    before = {"$ref": f"#/$defs/d{k - 1}"}
    return {"type": "object", "properties": {"l": before, "r": before}, "description": f"level {k}"}


def either(k: int) -> dict[str, Any]:
    before = {"$ref": f"#/$defs/d{k - 1}"}
    return {"anyOf": [before, {"type": "array", "items": before}]}


def both(k: int) -> dict[str, Any]:
    before = {"allOf": [{"$ref": f"#/$defs/d{k - 1}"}, {"properties": {"x": {"$ref": f"#/$defs/d{k - 1}"}}}]}
    return {"allOf": [before, before]}


def doubling(level: Any, levels: int = 24) -> Tool:
    """A schema of two kilobytes that is a type of millions of parts."""
    defs = {"d0": {"type": "string"}} | {f"d{k}": level(k) for k in range(1, levels)}
    last = {"$ref": f"#/$defs/d{levels - 1}"}
    schema = {"type": "object", "properties": {"a": last, "b": last}, "$defs": defs}
    assert len(json.dumps(schema)) < 6000
    return Tool(name="odd.do", description="Do it", parameters=schema, returns=schema, positional=("a", "b"))


@pytest.mark.parametrize("level", [two_properties, either, both])
def test_a_small_schema_of_exponential_size_is_described(level: Any) -> None:
    tool = doubling(level)
    assert [one["name"] for one in parameters_of(tool)] == ["a", "b"]
    assert len(signature_of(tool)) < 10_000
    for docs in ("all", "line", "none"):
        assert "def do(a" in describe([tool], 100_000, docs=docs)


@pytest.mark.parametrize("level", [two_properties, either])
def test_a_type_uses_no_more_than_its_budget(level: Any) -> None:
    work = WorkBudget(1000)
    schema = doubling(level).parameters
    python_type(schema, schema, work=work)
    # Of parts that are too deep to be shown, no more are read than would fit.
    assert work.left >= 300
    for _ in range(100):
        python_type(schema, schema, work=work)
    assert python_type(schema, schema, work=work) == "Any"


def test_a_long_chain_of_references() -> None:
    defs = {f"d{k}": {"$ref": f"#/$defs/d{k + 1}"} for k in range(5000)}
    whole = {"$defs": {**defs, "d5000": {"type": "string"}}}
    assert python_type({"$ref": "#/$defs/d0"}, whole) == "dict"
    assert python_type({"$ref": "#/$defs/d4990"}, whole) == "str"


def test_arguments_are_validated_within_a_budget() -> None:
    ArgumentValidator(doubling(both)).validated({"a": "x"})
    deep: Any = 5
    for _ in range(11):
        deep = [deep]
    ArgumentValidator(doubling(either)).validated({"a": deep})


def test_regular_expressions_are_left_to_the_server() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^(a+)+$"},
            "pattern": {"type": "string", "description": "to look for"},
            "b": {"type": "array", "uniqueItems": True, "items": {"anyOf": [{"pattern": "(x*)*"}, {"type": "null"}]}},
            "c": {"patternProperties": {"(x*)*y": {}}, "additionalProperties": False},
        },
        "patternProperties": {"^x-": {"type": "string"}},
        "required": ["a"],
    }
    kept = bounded_schema(schema, WorkBudget())
    assert kept["properties"] == {
        "a": {"type": "string"},
        "pattern": {"type": "string", "description": "to look for"},
        "b": {"type": "array", "items": {"anyOf": [{}, {"type": "null"}]}},
        "c": {"additionalProperties": True},
    }
    validator = ArgumentValidator(Tool(name="t", parameters=kept))
    assert validator.validated({"a": "a" * 50 + "!", "x-more": "1"}) == {"a": "a" * 50 + "!", "x-more": "1"}


def test_depth_number_and_length_of_parts_are_bounded() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        deep = {"items": deep}
    assert str(bounded_schema(deep, WorkBudget())).count("items") == DEEPEST + 1
    wide = {"properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
    assert str(bounded_schema(wide, WorkBudget(100))).count("string") < 100
    short = bounded_schema({"description": "w " * 7_000_000, "default": "x" * 100_000}, WorkBudget())
    assert len(short["description"]) == LONGEST_TEXT + 1
    assert "default" not in short
    data = {"enum": ["a"], "default": {"pattern": "kept, because it is data"}}
    assert bounded_schema(data, WorkBudget()) == data
