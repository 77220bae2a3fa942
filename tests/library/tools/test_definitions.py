"""Tool definitions: valid ones become models, wrong ones are errors with file, line and field; names in Python."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import ConfigurationError
from carrel.library.names import python_name, python_names
from carrel.library.tools.definition_files import LONGEST_FILE, ToolFiles, parse_definition, read_definitions
from carrel.library.tools.definitions import (
    CliDefinition,
    HttpDefinition,
    McpDefinition,
    OpenApiDefinition,
    PythonDefinition,
)
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from tests.support.stores import Backend
from tests.support.tools import callable_names

CURL = """\
name: curl
description: Make HTTP requests
command: curl
timeout: 60
tags: [http, network]
schema:
  options:
    silent: {type: boolean, short: s, description: Silent mode}
    header: {type: array, short: H}
    max-time: {type: integer}
  positional:
    - {name: url, type: string, required: true, description: URL to request}
recipes:
  get: {description: Simple GET, preset: {silent: true}, params: {url: {}}}
  slow: {preset: {silent: true}, params: {url: {}, max-time: {default: 30}}}
"""


def test_definitions_of_each_kind() -> None:
    curl = parse_definition(CURL.encode(), "tools/curl.yaml")
    assert isinstance(curl, CliDefinition)
    assert (curl.name, curl.words, curl.timeout, curl.tags) == ("curl", ["curl"], 60, ("http", "network"))
    assert list(curl.parameters) == ["url", "silent", "header", "max_time"]
    kinds = {
        b"name: time\ntype: mcp\ncommand: uvx\nargs: [mcp-server-time]\nenv: {TOKEN: '${TIME_TOKEN}'}": McpDefinition,
        b"name: hub\ntype: http\nbase_url: https://api.example.com\nendpoints: {get: {path: /x}}": HttpDefinition,
        b"name: shop\ntype: openapi\nspec: ./shop.json": OpenApiDefinition,
        b"name: stats\ntype: python\nmodule: my_tools.stats": PythonDefinition,
    }
    for data, kind in kinds.items():
        assert isinstance(parse_definition(data, "tools/x.yaml"), kind)


def test_commands_are_split_without_a_shell() -> None:
    definition = parse_definition(b"name: git\ncommand: git --no-pager -c 'core.editor=a b' $HOME", "x")
    assert isinstance(definition, CliDefinition)
    assert definition.words == ["git", "--no-pager", "-c", "core.editor=a b", "$HOME"]
    listed = parse_definition(b"name: git\ncommand: [git, 'a b']", "x")
    assert isinstance(listed, CliDefinition)
    assert listed.words == ["git", "a b"]


def test_names_that_yaml_reads_as_other_types() -> None:
    text = b"name: yes\ncommand: yes\nschema: {options: {on: {default: 2024-01-01}, off: {type: bool}}}"
    yes = parse_definition(text, "x")
    assert isinstance(yes, CliDefinition)
    assert yes.name == "yes"
    assert list(yes.options.options) == ["on", "off"]
    assert yes.options.options["on"].default == "2024-01-01"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "tools/a.yaml: expected fields such as `name:`, found nothing"),
        (
            "name: a\ncommand: b\n---\nname: c\ncommand: d\n",
            "line 3: this is not valid YAML: but found another",
        ),
        ("- a\n- b", "tools/a.yaml: expected fields such as `name:`, found a list"),
        ("name: a\ncommand: [b", "tools/a.yaml, line 2: this is not valid YAML: the bracket or quote that begins here"),
        ("name: a\ncommand: 'b\ntags: [x]\n", "line 2: this is not valid YAML: the bracket or quote that begins here"),
        ("name: a\ncommand: b\nschema:\n\toptions: {}\n", "line 4: this is not valid YAML: there is a tab"),
        ("name: a\n  b: c", "tools/a.yaml, line 2: this is not valid YAML: mapping values are not allowed"),
        ("name: a\ncommand: b\nname: c", "tools/a.yaml, line 3: the key name is in line 1 already"),
        pytest.param(f"name: {'[' * 200_000}", "tools/a.yaml, line 1: it is nested too deeply", id="deep"),
        ("name: a\nx: &x [*x]", "tools/a.yaml, line 2: an alias contains itself"),
        (
            "name: a\nx: !!python/object/apply:os.system [ls]",
            "this is not valid YAML: could not determine a constructor",
        ),
        ("name: a\n", "tools/a.yaml, line 1, command: is missing"),
        ("command: b\n", "tools/a.yaml, line 1, name: is missing"),
        (
            "name: a\ncommand: b\ntimout: 5\n",
            "tools/a.yaml, line 3, timout: unknown field; did you mean timeout?",
        ),
        ("name: a\ncommand: b\nrecipes:\n  c: {parms: {}}\n", "recipes.c.parms: unknown field; did you mean"),
        ("name: a\ntype: mcp\ncommand: b\nxyzzy: 5\n", "line 4, xyzzy: unknown field"),
        ("name: a\n\ncommand: b\ntimeout: soon\n", "tools/a.yaml, line 4, timeout: should be a number, not 'soon'"),
        ("name: a\ncommand: b\ntimeout: -1\n", "line 3, timeout: should be greater than 0, not -1"),
        ("name: a b\ncommand: b\n", "line 1, name: must be a Python name"),
        ("name: list\ncommand: b\n", "line 1, name: choose another name, because tools.list"),
        ("name: a\ntype: cil\ncommand: b\n", "line 2, type: unknown type 'cil'; did you mean cli?"),
        ("name: a\ncommand: b\nenv: {PORT: 80}\n", "line 3, env.PORT: should be text, not 80"),
        ("name: a\ncommand: b\ntags: http\n", "line 3, tags: should be a list, not 'http'"),
        (
            "name: a\ncommand: b\nschema:\n  options: [x]\n",
            "schema.options: should be fields (`name: value`), not ['x']",
        ),
        ("name: a\ncommand: ''\n", "line 1, the definition: command is empty"),
        ("name: a\ncommand: b 'c\n", "command cannot be split into words: No closing quotation"),
        (
            "name: a\ncommand: b\nschema:\n  options:\n    fast:\n      type: flag\n",
            "line 6, schema.options.fast.type: should be 'string', 'integer', 'number', 'boolean' or 'array', not",
        ),
        (
            "name: a\ncommand: b\nschema:\n  options:\n    fast: {type: boolean}\n    slow: {short: sl}\n",
            "line 6, schema.options.slow.short: ",
        ),
        (
            "name: a\ncommand: b\nschema:\n  positional:\n    - {name: x}\n    - {nam: y}\n",
            "line 6, schema.positional.1.name: is missing",
        ),
        (
            "name: a\ncommand: b\nschema: {options: {max-time: {}}, positional: [{name: max_time}]}\n",
            "two parameters have the name max_time in Python",
        ),
        (
            "name: a\ncommand: b\nschema:\n  options: {n: {type: integer, default: many}}\n",
            "line 4, schema.options.n: the default 'many' is not a valid integer",
        ),
        (
            "name: a\ncommand: b\nschema: {options: {fast: {type: boolean}}}\nrecipes:\n  go:\n    preset: {fats: 1}\n",
            "line 6, recipes.go.preset: the schema has no fats; did you mean fast?",
        ),
        (
            "name: a\ncommand: b\nschema: {options: {fast: {type: boolean}}}\nrecipes:\n  go: {preset: {fast: 1}}\n",
            "line 5, recipes.go.preset.fast: 1 is not a valid boolean",
        ),
        (
            "name: a\ncommand: b\nschema: {positional: [{name: url, required: true}]}\nrecipes:\n  go: {}\n",
            "line 5, recipes.go: url is required and is neither in preset nor in params",
        ),
        ("name: a\ncommand: b\nrecipes: {call_async: {}}", "'call_async' cannot be called from Python"),
        (
            "name: a\ncommand: b\nruns: sandbox\nenv:\n  OK: fine\n  KEY: 'x${TOKEN}'\n",
            "line 6, env.KEY: the secret would enter the sandbox",
        ),
        (
            "name: a\ncommand: b\nschema:\n  options: {x: {pattern: '(?=a)b'}}\n",
            "line 4, schema.options.x.pattern: '(?=a)b' is not a regular expression of the supported kind",
        ),
        ("name: a\ntype: python\nmodule: ../x\n", "line 3, module: "),
        ("name: a\ntype: mcp\n", "command is required with transport: stdio"),
    ],
)
def test_errors_name_file_line_and_field(text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_definition(text.encode(), "tools/a.yaml")
    assert str(raised.value).startswith("tools/a.yaml")
    assert expected in str(raised.value)


def test_all_errors_of_a_file_are_reported() -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_definition(b"name: a\ncommand: b\ntags: 5\nrunss: sandbox\n", "tools/a.yaml")
    assert [line.split(":")[0] for line in str(raised.value).splitlines()] == [
        "tools/a.yaml, line 3, tags",
        "tools/a.yaml, line 4, runss",
    ]


def test_a_huge_definition_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at most"):
        parse_definition(b"#" * (LONGEST_FILE + 1), "tools/a.yaml")


def test_definitions_that_are_not_text() -> None:
    with pytest.raises(ConfigurationError, match=r"tools/a\.yaml"):
        parse_definition(b"name: \xff\xfe", "tools/a.yaml")


ECHO = b"name: echo\ncommand: echo\nschema: {positional: [{name: text}]}\n"
SPEC = b"""\
openapi: 3.1.0
info: {title: Shop, version: "1"}
servers: [{url: "http://127.0.0.1:9"}]
paths: {/items: {get: {operationId: list_items, summary: What is sold, responses: {"200": {description: ok}}}}}
"""


async def test_all_files_below_tools_are_read(backend: Backend) -> None:
    store = backend.open()
    await store.put("tools/curl.yaml", CURL.encode())
    await store.put("tools/more/echo.yml", ECHO)
    await store.put("tools/notes.md", b"no tool")
    await store.put("other/x.yaml", b"name: x\ncommand: x")
    found = await read_definitions(store)
    assert {file: definition.name for file, definition in found.items()} == {
        "tools/curl.yaml": "curl",
        "tools/more/echo.yml": "echo",
    }


async def test_tools_from_a_store_can_be_called_and_are_shared(backend: Backend) -> None:
    await backend.open().put("tools/echo.yaml", ECHO)
    secrets = Secrets({})
    tools = ToolRegistry(files=[ToolFiles(backend.open(), secrets=secrets)], secrets=secrets)
    await tools.reload()
    assert await tools.call("echo", {"text": "a"}) == "a\n"
    await tools.close()


async def test_a_wrong_file_is_an_error_or_left_out(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    store = backend.open()
    await store.put("tools/echo.yaml", ECHO)
    await store.put("tools/bad.yaml", b"name: bad\ncomand: ls\n")
    with pytest.raises(ConfigurationError, match=r"tools/bad\.yaml, line 2, comand: unknown field"):
        await read_definitions(store)
    found = await read_definitions(store, on_error="skip")
    assert list(found) == ["tools/echo.yaml"]
    assert "left out a tool: tools/bad.yaml, line 1, command: is missing" in caplog.text


async def test_the_same_name_in_two_files(backend: Backend) -> None:
    store = backend.open()
    await store.put("tools/a.yaml", ECHO)
    await store.put("tools/b.yaml", ECHO + b"# other\n")
    with pytest.raises(ConfigurationError, match=r"tools/b\.yaml, name: echo is already defined in tools/a\.yaml"):
        await read_definitions(store)
    assert list(await read_definitions(store, on_error="skip")) == ["tools/a.yaml"]


async def test_an_edited_file_is_read_again(backend: Backend) -> None:
    store = backend.open()
    await store.put("tools/echo.yaml", ECHO)
    await read_definitions(store)
    await store.put("tools/echo.yaml", ECHO + b"description: Now with words\n")
    [definition] = (await read_definitions(store)).values()
    assert definition.description == "Now with words"


async def test_an_openapi_document_beside_its_definition(backend: Backend) -> None:
    store = backend.open()
    await store.put("tools/shop.yaml", b"name: shop\ntype: openapi\nspec: ./shop.openapi.yaml\n")
    await store.put("tools/shop.openapi.yaml", SPEC)
    secrets = Secrets({})
    tools = ToolRegistry(files=[ToolFiles(store, secrets=secrets)], secrets=secrets)
    await tools.reload()
    assert callable_names(await tools.list()) == ["shop.list_items"]
    await tools.close()


async def test_a_missing_document_affects_only_its_tool(backend: Backend) -> None:
    store = backend.open()
    await store.put("tools/shop.yaml", b"name: shop\ntype: openapi\nspec: ../../../etc/shop.json\n")
    await store.put("tools/echo.yaml", ECHO)
    secrets = Secrets({})
    tools = ToolRegistry(files=[ToolFiles(store, secrets=secrets)], secrets=secrets)
    await tools.reload()
    listed = await tools.list()
    assert [one["name"] for one in listed] == ["echo", "shop"]
    assert "shop cannot be used" in listed[1]["error"]
    await tools.close()


async def test_a_store_without_tools_has_none(backend: Backend) -> None:
    assert (await read_definitions(backend.open())) == {}


def test_python_names() -> None:
    assert [python_name(name) for name in ("max-time", "get", "class", "2fa", "a.b/c", "-", "größe")] == [
        "max_time",
        "get",
        "class_",
        "_2fa",
        "a_b_c",
        "_",
        "größe",
    ]


def test_valid_names_are_kept() -> None:
    assert python_names(["a-b", "a_b", "a.b", "a_b_2", "a_b"]) == {
        "a_b_3": "a-b",
        "a_b": "a_b",
        "a_b_4": "a.b",
        "a_b_2": "a_b_2",
        "a_b_5": "a_b",
    }


@given(st.lists(st.text(min_size=1)))
def test_every_name_has_a_python_name(names: list[str]) -> None:
    called = python_names(names)
    assert all(word.isidentifier() for word in called)
    assert sorted(called.values()) == sorted(names)
