"""What is told of a tool: each thing once, and nothing that its signature says already."""

import ast
from typing import Any

import pytest

from carrel.library.tools.schema_types import told, without_signature
from carrel.library.tools.stubs import group_stub
from carrel.library.tools.tool import Tool


@pytest.mark.parametrize(
    ("prose", "default", "left"),
    [
        ("(Optional) Which one", None, "Which one"),
        ("Optional: which one", None, "which one"),
        ("Which one (optional)", None, "Which one"),
        ("Optional comment for this version", None, "Optional comment for this version"),
        ("How many (default: 10)", 10, "How many"),
        ("How many (default 10).", 10, "How many."),
        ("How many. Defaults to 10.", 10, "How many."),
        ("How many. Default: 10. No more than 99.", 10, "How many. No more than 99."),
        ("Default is 'all'.", "all", ""),
        ("Whether to look (default: false)", False, "Whether to look"),
        ("How many (default: 10)", None, "How many (default: 10)"),
        ("How many (default: 10)", 20, "How many (default: 10)"),
        ("How many (default: 10, at most 20)", 10, "How many (default: 10, at most 20)"),
        ("Defaults to 10 since most want it", 10, "Defaults to 10 since most want it"),
        ("By default 10", 10, "By default 10"),
        ("Which (default: " + "x" * 50 + ")", "x" * 50, "Which (default: " + "x" * 50 + ")"),
    ],
)
def test_what_a_signature_shows_is_not_said_again(prose: str, default: Any, left: str) -> None:
    assert without_signature(prose, required=False, default=default) == left


@pytest.mark.parametrize(
    ("prose", "left"),
    [("(required) Which", "Which"), ("(Optional) Which", "(Optional) Which"), ("Required by law", "Required by law")],
)
def test_of_a_required_parameter_only_that_it_is_required_goes(prose: str, left: str) -> None:
    assert without_signature(prose, required=True, default=None) == left


def tool(description: str, **said: str) -> Tool:
    names = ("key", "value", "wait")
    properties = {name: {"type": "string", **({"description": said[name]} if name in said else {})} for name in names}
    return Tool(
        name="set",
        description=description,
        parameters={"type": "object", "properties": properties, "required": ["key", "value"]},
    )


def test_a_list_of_arguments_goes_to_the_parameters() -> None:
    found = told(
        tool(
            """Set a value.

    Args:
        key (Str): Which one,
            in full.
        value (bytes): What.
        wait (str, optional): How long.

    Returns:
        A message.
    """
        )
    )
    assert found.about == ("Set a value.", "Returns: A message.")
    assert found.parameters == {"key": "Which one, in full.", "value": "(bytes) What.", "wait": "How long."}


@pytest.mark.parametrize(
    "body", ["key: Which.\n    context: Not a parameter.", "Look it up.", "key: One.\n    key: Two."]
)
def test_a_list_of_anything_else_stays_where_it_is(body: str) -> None:
    found = told(tool(f"Set.\nArgs:\n    {body}"))
    assert [line.strip() for line in found.about] == ["Set.", "Args:", *(line.strip() for line in body.splitlines())]
    assert found.parameters == {}


def test_what_is_said_twice_of_a_parameter_is_told_once() -> None:
    assert told(tool("Set.\nArgs:\n    key: Which.", key="Which. Any.")).parameters == {"key": "Which. Any."}
    assert told(tool("Set.\nArgs:\n    key: Which.", key="A name.")).parameters == {"key": "A name. Which."}
    assert told(tool("Set. Which. Now.", key="Which.")).parameters == {}


def test_lines_that_a_width_broke_are_whole_again() -> None:
    long = "A sentence that goes on for longer than a line may be, so that"
    assert told(tool(f"{long}\nit was broken.\nShort.\n\nNew.")).about == (f"{long} it was broken.", "Short.", "New.")
    assert told(tool(f"{long}\n- one\n- two")).about == (long, "- one", "- two")
    assert told(tool(f"{long}\nNote: this")).about == (long, "Note: this")
    assert told(tool(f"{long}\n\nNew.")).about == (long, "New.")


def test_all_types_that_an_argument_may_have_are_in_the_signature() -> None:
    value = {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}
    schema = {"type": "object", "properties": {"value": value}}
    for said, left in (("str, int", "What."), ("int, str, optional", "What."), ("str", "(str) What.")):
        one = Tool(name="set", description=f"Set.\nArgs:\n    value ({said}): What.", parameters=schema)
        assert told(one).parameters == {"value": left}


def objects(depth: int) -> dict[str, Any]:
    inner = objects(depth - 1) if depth else {"type": "integer", "description": "How many"}
    names = {f"a_name_that_takes_its_room_{depth}_{number}": {"type": "string"} for number in range(4)}
    return {"type": "object", "properties": {**names, "within": inner}, "required": ["within"]}


def test_what_a_type_has_no_room_for_is_told_below_with_its_own_type() -> None:
    written = told(Tool(name="t", parameters={"properties": {"deep": objects(3)}})).below
    assert written["deep", "within", "within"].startswith(": dict")
    assert written["deep", "within", "within", "a_name_that_takes_its_room_1_0"] == "?: str"
    assert written["deep", "within", "within", "within", "within"] == ": int # How many"


def test_what_is_said_of_any_name_in_an_open_object() -> None:
    tags = {
        "type": "object",
        "propertyNames": {"description": "A tag"},
        "additionalProperties": {"description": "Its colour"},
    }
    assert told(Tool(name="t", parameters={"properties": {"tags": tags}})).below == {
        ("tags", "*"): ": A tag; Its colour"
    }


def test_choices_that_are_too_many_for_a_type() -> None:
    some = {"enum": [f"k{number}" for number in range(30)], "description": "A key"}
    many = {"enum": [f"k{number}" for number in range(3000)]}
    said = told(Tool(name="t", parameters={"properties": {"some": some, "many": many}})).parameters
    assert said["some"].startswith('A key; One of "k0", "k1", ')
    assert said["some"].endswith('"k29"')
    assert said["many"].startswith('One of 3000: "k0", ')
    assert said["many"].endswith(", …")


def test_what_is_said_of_all_parameters_together() -> None:
    parameters = {"properties": {"a": {"type": "string"}}, "description": "Either a or nothing."}
    assert told(Tool(name="t", description="Does it.", parameters=parameters)).about == (
        "Does it.",
        "Either a or nothing.",
    )


def test_a_name_that_a_server_sends_stays_on_its_line() -> None:
    deep = {"type": "object", "properties": {"a\nimport os": {"type": "string", "description": "Which"}}}
    tools = [Tool(name=f"s.t{number}", parameters={"properties": {"deep": deep}}) for number in range(9)]
    written = group_stub("s", [(tool, "all") for tool in tools])
    assert "# a import os: Which" in written
    assert not any(isinstance(node, ast.Import) for node in ast.walk(ast.parse(written)))


def test_more_parts_than_are_told_are_counted() -> None:
    wide = {"type": "object", "properties": {f"name_{number}": {"type": "string"} for number in range(230)}}
    found = told(Tool(name="t", description="Does it.", parameters={"properties": {"wide": wide}}))
    assert found.about == ("Does it.", "(Its parameters have 30 more parts, which are not told here.)")
