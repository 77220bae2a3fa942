"""What a stranger's schema may say, and how large it may become."""

import json
from typing import Any

import pytest

from carrel.library.tools.arguments import ArgumentValidator
from carrel.library.tools.schema_types import DEEPEST, LONGEST_TEXT, SizeBudget, Work, bounded_schema, python_type
from carrel.library.tools.stubs import describe, parameters_of, signature_of
from carrel.library.tools.tool import Tool


def twice(k: int) -> dict[str, Any]:
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


@pytest.mark.parametrize("level", [twice, either, both])
def test_a_small_schema_that_doubles_with_each_step_is_told_all_the_same(level: Any) -> None:
    tool = doubling(level)
    assert [one["name"] for one in parameters_of(tool)] == ["a", "b"]
    assert len(signature_of(tool)) < 10_000
    for docs in ("all", "line", "none"):
        assert "def do(a" in describe([tool], 100_000, docs=docs)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [twice, either])
def test_a_type_costs_no_more_than_it_may(level: Any) -> None:
    work = Work(1000)
    schema = doubling(level).parameters
    python_type(schema, schema, work=work)
    # Of what is too deep to be shown, no more is looked at than would fit.
    assert work.left >= 300
    for _ in range(100):
        python_type(schema, schema, work=work)
    assert python_type(schema, schema, work=work) == "Any"


def test_a_chain_of_references_is_not_followed_for_ever() -> None:
    defs = {f"d{k}": {"$ref": f"#/$defs/d{k + 1}"} for k in range(5000)}
    whole = {"$defs": {**defs, "d5000": {"type": "string"}}}
    assert python_type({"$ref": "#/$defs/d0"}, whole) == "dict"
    assert python_type({"$ref": "#/$defs/d4990"}, whole) == "str"


def test_arguments_are_checked_without_going_all_the_ways() -> None:
    ArgumentValidator(doubling(both)).validated({"a": "x"})
    deep: Any = 5
    for _ in range(11):
        deep = [deep]
    ArgumentValidator(doubling(either)).validated({"a": deep})


def test_expressions_are_left_to_whoever_has_the_tool() -> None:
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
    kept = bounded_schema(schema, SizeBudget())
    assert kept["properties"] == {
        "a": {"type": "string"},
        "pattern": {"type": "string", "description": "to look for"},
        "b": {"type": "array", "items": {"anyOf": [{}, {"type": "null"}]}},
        "c": {"additionalProperties": True},
    }
    checker = ArgumentValidator(Tool(name="t", parameters=kept))
    assert checker.validated({"a": "a" * 50 + "!", "x-more": "1"}) == {"a": "a" * 50 + "!", "x-more": "1"}


def test_depth_number_and_length_are_bounded() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        deep = {"items": deep}
    assert str(bounded_schema(deep, SizeBudget())).count("items") == DEEPEST + 1
    wide = {"properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
    assert str(bounded_schema(wide, SizeBudget(100))).count("string") < 100
    said = bounded_schema({"description": "w " * 7_000_000, "default": "x" * 100_000}, SizeBudget())
    assert len(said["description"]) == LONGEST_TEXT + 1
    assert "default" not in said
    data = {"enum": ["a"], "default": {"pattern": "kept, for it is data"}}
    assert bounded_schema(data, SizeBudget()) == data
