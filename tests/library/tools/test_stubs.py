"""Stubs are typed Python of limited length, for every tool of the public servers in bench/data."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.library.names import with_python_names
from carrel.library.tools.schema_types import python_type
from carrel.library.tools.stubs import ToolStub, describe, first_sentence, group_stub, parameters_of, signature_of
from carrel.library.tools.tool import Tool

PUBLIC = sorted((Path(__file__).parents[3] / "bench" / "data" / "mcp_tools").glob("*.json"))


def public(path: Path) -> list[Tool]:
    definitions = json.loads(path.read_text(encoding="utf-8"))["tools"]
    return [
        Tool(
            name=f"{path.stem}.{one['name']}",
            description=one.get("description", ""),
            parameters=parameters,
            positional=tuple(parameters["properties"]),
        )
        for one, parameters in ((one, with_python_names(one["inputSchema"])[0]) for one in definitions)
    ]


EVERYTHING = [tool for path in PUBLIC for tool in public(path)]
SOME = EVERYTHING[::5]


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string"}, "str"),
        ({"type": ["integer", "null"]}, "int | None"),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}}]}, "list[float] | None"),
        ({"enum": ["a", 1, None]}, "Literal['a', 1, None]"),
        ({"const": "x"}, "Literal['x']"),
        ({"oneOf": [{"const": "x"}, {"type": "null"}, {"const": "y"}]}, "Literal['x', 'y'] | None"),
        ({"type": "array"}, "list"),
        ({"type": "object"}, "dict"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "dict[str, int]"),
        (
            {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}, "required": ["a"]},
            "{'a': str, 'b?': bool}",
        ),
        ({"type": "string", "format": "binary"}, "bytes"),
        ({"$ref": "#/$defs/Color"}, "Literal['red', 'blue']"),
        (
            {"allOf": [{"$ref": "#/$defs/Named"}, {"properties": {"age": {"type": "integer"}}}]},
            "{'name': str, 'age?': int}",
        ),
        ({"$ref": "#/$defs/Tree"}, "{'children?': list[dict]}"),
        ({"$ref": "#/$defs/Missing"}, "Any"),
        ({}, "Any"),
        (True, "Any"),
        ({"type": 5, "enum": [], "anyOf": []}, "Any"),
    ],
)
def test_a_schema_as_a_python_type(schema: Any, written: str) -> None:
    whole = {
        "$defs": {
            "Color": {"enum": ["red", "blue"]},
            "Named": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            "Tree": {
                "type": "object",
                "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
            },
        }
    }
    assert python_type(schema, whole) == written


def test_deep_types_are_shortened() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for level in range(8):
        deep = {"type": "object", "properties": {f"level_{level}_{name}": deep for name in "abc"}}
    assert len(python_type(deep, longest=240)) <= 240
    assert python_type(deep, longest=10) == "dict"


CURL = Tool(
    name="curl",
    description="Make HTTP requests.\n\nWith all that is needed.",
    parameters={
        "type": "object",
        "properties": {
            "silent": {"type": "boolean", "description": "Say   nothing\nelse"},
            "url": {"type": "string", "description": "Where"},
            "max_time": {"type": "integer", "default": 30},
        },
        "required": ["url"],
    },
    positional=("url",),
    returns={"type": "string"},
)


def test_signature_and_parameters() -> None:
    assert signature_of(CURL) == "(url: str, *, silent: bool = None, max_time: int = 30) -> str"
    assert [(one["name"], one["required"], one["default"]) for one in parameters_of(CURL)] == [
        ("url", True, None),
        ("silent", False, None),
        ("max_time", False, 30),
    ]


def test_positional_and_required_parameters_come_first() -> None:
    properties = {name: {"type": "string"} for name in ("a", "b", "c", "d")}
    schema = {"type": "object", "properties": properties, "required": ["b", "d"]}
    assert signature_of(Tool(name="x", parameters=schema, positional=("a", "b", "c"))) == (
        "(b: str, a: str = None, c: str = None, *, d: str)"
    )
    assert signature_of(Tool(name="x", parameters=schema)) == "(*, b: str, d: str, a: str = None, c: str = None)"


def test_levels_of_docs() -> None:
    signature = "(url: str, *, silent: bool = None, max_time=30) -> str"
    assert ToolStub(CURL).text("curl", "none") == f"def curl{signature}: ..."
    assert ToolStub(CURL).text("curl", "line") == f'def curl{signature}: "Make HTTP requests"'
    assert ToolStub(CURL).text("curl", "all") == (
        "def curl(url: str, # Where\n *, silent: bool = None, # Say nothing else\n max_time=30) -> str: "
        '"""Make HTTP requests.\n With all that is needed."""'
    )


def test_parts_of_a_parameter_are_in_the_docstring() -> None:
    page = {"type": "object", "properties": {"size": {"description": "How many"}, "at": {"description": "Where"}}}
    query = {"type": "object", "description": "All", "properties": {"page": page, "text": {"description": "What"}}}
    tool = Tool(name="find", description="Find.", parameters={"type": "object", "properties": {"query": query}})
    _, written = ToolStub(tool).text("find", "all").split(" # All\n")
    assert written == (' ): """Find.\n query:\n  page:\n   size: How many\n   at: Where\n  text: What"""')


def hub(name: str, **parameters: dict[str, Any]) -> Tool:
    schema = {"type": "object", "properties": parameters, "required": [*parameters]}
    return Tool(name=f"hub.{name}", description=name, parameters=schema, positional=tuple(parameters))


REPO = {"type": "string", "description": "Which repository"}


def test_a_group_is_a_class() -> None:
    tools = [hub(name, repo=REPO) for name in ("get", "put")]
    assert group_stub("hub", [(ToolStub(tool), "all") for tool in tools]).splitlines() == [
        "class hub:",
        " def get(repo: str # Which repository",
        ' ): "get"',
        " def put(repo: str # Which repository",
        ' ): "put"',
    ]
    assert group_stub("hub", [(ToolStub(tools[0]), "line"), (ToolStub(tools[1]), "name")]).splitlines() == [
        "class hub:",
        ' def get(repo: str): "get"',
        " # and put",
    ]


def test_a_default_replaces_its_type() -> None:
    count = {"type": "integer", "default": 5}
    tool = Tool(name="hub.odd", parameters={"type": "object", "properties": {"n": count, "m": {"type": "number"}}})
    assert ToolStub(tool).text("odd", "all") == "def odd(*, n=5, m: float = None): ..."
    half = Tool(name="hub.half", parameters={"type": "object", "properties": {"n": {"type": "number", "default": 5}}})
    assert ToolStub(half).text("half", "all") == "def half(*, n: float = 5): ..."


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Adds. Then more.", "Adds"),
        ("Use e.g. this one", "Use e.g. this one"),
        ("Version 2.0 is out. Good", "Version 2.0 is out"),
        ("Retrieve a user\nError Responses:\n400: bad", "Retrieve a user"),
        ("A line that is as long as people make them in docstrings before\n they wrap. Yes", None),
        ("", ""),
    ],
)
def test_the_first_sentence(text: str, first: str | None) -> None:
    expected = "A line that is as long as people make them in docstrings before they wrap" if first is None else first
    assert first_sentence(text) == expected


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.stem)
@pytest.mark.parametrize("docs", ["all", "line", "none"])
def test_the_stubs_of_public_servers_are_python(path: Path, docs: Any) -> None:
    tools = public(path)
    [group] = ast.parse(group_stub(path.stem, [(ToolStub(tool), docs) for tool in tools])).body
    assert isinstance(group, ast.ClassDef)
    assert len([node for node in group.body if isinstance(node, ast.FunctionDef)]) == len(tools)


def descriptions(node: Any) -> list[str]:
    """Every description in a schema."""
    if isinstance(node, list):
        return [text for item in node for text in descriptions(item)]
    if not isinstance(node, dict):
        return []
    own = [node["description"]] if isinstance(node.get("description"), str) else []
    return own + [text for item in node.values() for text in descriptions(item)]


def closed(text: str) -> str:
    return "".join(text.split())


def read(stubs: str) -> str:
    """Return what a reader sees: the source with its comments, and the docstrings without their escapes."""
    docs = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(stubs)) if isinstance(node, ast.FunctionDef)]
    return closed("".join([stubs, *docs]).replace("'''", '"""'))


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.stem)
def test_all_prose_of_public_servers_is_in_their_stubs(path: Path) -> None:
    tools = public(path)
    written = read(group_stub(path.stem, [(ToolStub(tool), "all") for tool in tools]))
    for tool in tools:
        for text in (tool.description, *descriptions(tool.parameters)):
            assert [line for line in text.splitlines() if closed(line) not in written] == []


def named_within(schema: Any) -> Iterator[str]:
    """The names of all that lies in a parameter."""
    if not isinstance(schema, dict):
        return
    for name, inner in (schema.get("properties") or {}).items():
        yield name
        yield from named_within(inner)
    for word in ("items", "additionalProperties"):
        yield from named_within(schema.get(word))
    for word in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(word) or ():
            yield from named_within(choice)


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.stem)
def test_all_parts_of_parameters_are_named(path: Path) -> None:
    """A type that is too long is `dict` in the signature, and its parts are in the docstring."""
    for tool in public(path):
        written = ToolStub(tool).text("f", "all")
        for inner in tool.parameters["properties"].values():
            assert [name for name in named_within(inner) if name not in written] == []


def test_stubs_cost_a_fraction_of_the_json() -> None:
    """In characters, which any machine can count; bench/describing.py counts tokens."""
    assert len(EVERYTHING) > 100
    size = sum(
        len(json.dumps(json.loads(path.read_text(encoding="utf-8"))["tools"], ensure_ascii=False)) for path in PUBLIC
    )
    costs = {
        docs: sum(len(group_stub(path.stem, [(ToolStub(tool), docs) for tool in public(path)])) for path in PUBLIC)
        for docs in ("all", "line")
    }
    assert costs["all"] < 0.5 * size
    assert costs["line"] < 0.125 * size


@given(st.integers(0, 30_000), st.lists(st.sampled_from([tool.name for tool in SOME]), max_size=5, unique=True))
def test_a_page_is_python_and_not_too_long(limit: int, ranked: list[str]) -> None:
    page = describe(SOME, limit, ranked)
    assert len(page) <= limit
    if len(page) > 200:
        ast.parse(page)


def test_tools_that_match_the_task_are_first() -> None:
    page = describe(EVERYTHING, 8000, ["github.create_issue", "slack.slack_post_message"])
    assert page.splitlines()[2] == "class github:"
    assert "Create a new issue in a GitHub repository" in page
    assert "Post a new message to a Slack channel" in page
    assert page.endswith("tools.search('what for'), tools.list()\n")


def test_everything_is_shown_if_it_fits() -> None:
    few = EVERYTHING[:3]
    page = describe(few, 100_000)
    assert page.split("\n", 2)[2].strip() == group_stub(
        few[0].name.partition(".")[0], [(ToolStub(one), "all") for one in few]
    )


def test_descriptions_cannot_end_their_docstring() -> None:
    evil = Tool(
        name="a",
        description='end""" \nimport os\\',
        parameters={"type": "object", "properties": {"x": {"description": '"""\\"', "default": '"""'}}},
    )
    for docs in ("all", "line", "none"):
        [node] = ast.parse(ToolStub(evil).text("a", docs)).body
        assert isinstance(node, ast.FunctionDef)


def test_any_name_of_a_parameter() -> None:
    odd = Tool(name="a", parameters={"type": "object", "properties": {"x-y": {}, "class": {}, "1": {}}})
    ast.parse(ToolStub(odd).text("a", "none"))
