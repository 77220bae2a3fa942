"""Definitions: what is right becomes typed, what is wrong is told by file, line and field."""

import pytest

from carrel.errors import ConfigurationError
from carrel.library.tools.definition_files import LONGEST, parse
from carrel.library.tools.definitions import (
    CliDefinition,
    HttpDefinition,
    McpDefinition,
    OpenApiDefinition,
    PythonDefinition,
)

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


def test_a_definition_of_each_kind_is_read() -> None:
    curl = parse(CURL.encode(), "tools/curl.yaml")
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
        assert isinstance(parse(data, "tools/x.yaml"), kind)


def test_a_command_is_split_into_words_and_read_by_no_shell() -> None:
    definition = parse(b"name: git\ncommand: git --no-pager -c 'core.editor=a b' $HOME", "x")
    assert isinstance(definition, CliDefinition)
    assert definition.words == ["git", "--no-pager", "-c", "core.editor=a b", "$HOME"]
    listed = parse(b"name: git\ncommand: [git, 'a b']", "x")
    assert isinstance(listed, CliDefinition)
    assert listed.words == ["git", "a b"]


def test_words_of_yaml_that_programs_are_called_are_words() -> None:
    yes = parse(b"name: yes\ncommand: yes\nschema: {options: {on: {default: 2024-01-01}, off: {type: bool}}}", "x")
    assert isinstance(yes, CliDefinition)
    assert yes.name == "yes"
    assert list(yes.options.options) == ["on", "off"]
    assert yes.options.options["on"].default == "2024-01-01"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "tools/a.yaml: one definition per file was expected, and there are none"),
        ("name: a\ncommand: b\n---\nname: c\ncommand: d\n", "one definition per file was expected, and there are 2"),
        ("- a\n- b", "tools/a.yaml: fields such as `name:` were expected, and there is a list"),
        ("name: a\ncommand: [b", "tools/a.yaml, line 3: no YAML"),
        ("name: a\ncommand: b\nname: c", "tools/a.yaml, line 3: no YAML: name stands twice"),
        ("name: a\nx: !!python/object/apply:os.system [ls]", "no YAML: could not determine a constructor"),
        ("name: a\n", "tools/a.yaml, line 1, command: is missing"),
        ("command: b\n", "tools/a.yaml, line 1, name: is missing"),
        (
            "name: a\ncommand: b\ntimout: 5\n",
            "tools/a.yaml, line 3, timout: nobody knows this field; did you mean timeout?",
        ),
        ("name: a\ncommand: b\nrecipes:\n  c: {parms: {}}\n", "recipes.c.parms: nobody knows this field; did you mean"),
        ("name: a\ntype: mcp\ncommand: b\nxyzzy: 5\n", "line 4, xyzzy: nobody knows this field"),
        ("name: a\n\ncommand: b\ntimeout: soon\n", "tools/a.yaml, line 4, timeout: should be a valid number"),
        ("name: a\ncommand: b\ntimeout: -1\n", "line 3, timeout: should be greater than 0, not -1"),
        ("name: a b\ncommand: b\n", "line 1, name: a name that Python code can write"),
        ("name: list\ncommand: b\n", "line 1, name: another name: tools.list is something else"),
        ("name: a\ntype: cil\ncommand: b\n", "line 2, type: 'cil' is no kind of tool; did you mean cli?"),
        ("name: a\ncommand: b\nenv: {PORT: 80}\n", "line 3, env.PORT: should be text, not 80"),
        ("name: a\ncommand: b\ntags: http\n", "line 3, tags: should be a list, not 'http'"),
        (
            "name: a\ncommand: b\nschema:\n  options: [x]\n",
            "schema.options: should be fields (`name: value`), not ['x']",
        ),
        ("name: a\ncommand: ''\n", "line 1, the definition: command names no program"),
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
            "two parameters are called max_time in Python",
        ),
        (
            "name: a\ncommand: b\nschema:\n  options: {n: {type: integer, default: many}}\n",
            "line 4, schema.options.n: the default 'many' is no integer",
        ),
        (
            "name: a\ncommand: b\nschema: {options: {fast: {type: boolean}}}\nrecipes:\n  go:\n    preset: {fats: 1}\n",
            "line 6, recipes.go.preset: the schema has no fats; did you mean fast?",
        ),
        (
            "name: a\ncommand: b\nschema: {options: {fast: {type: boolean}}}\nrecipes:\n  go: {preset: {fast: 1}}\n",
            "line 5, recipes.go.preset.fast: 1 is no boolean",
        ),
        (
            "name: a\ncommand: b\nschema: {positional: [{name: url, required: true}]}\nrecipes:\n  go: {}\n",
            "line 5, recipes.go: url is required and is neither in preset nor in params",
        ),
        ("name: a\ncommand: b\nrecipes: {call_async: {}}", "'call_async' is no name that Python code can call"),
        (
            "name: a\ncommand: b\nruns: sandbox\nenv:\n  OK: fine\n  KEY: 'x${TOKEN}'\n",
            "line 6, env.KEY: a secret would go into the sandbox",
        ),
        ("name: a\ntype: python\nmodule: ../x\n", "line 3, module: "),
        ("name: a\ntype: mcp\n", "command is needed with transport: stdio"),
    ],
)
def test_what_is_wrong_is_told_by_file_line_and_field(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse(text.encode(), "tools/a.yaml")
    assert str(raised.value).startswith("tools/a.yaml")
    assert told in str(raised.value)


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse(b"name: a\ncommand: b\ntags: 5\nrunss: sandbox\n", "tools/a.yaml")
    assert [line.split(":")[0] for line in str(raised.value).splitlines()] == [
        "tools/a.yaml, line 3, tags",
        "tools/a.yaml, line 4, runss",
    ]


def test_a_definition_beyond_reason_is_not_read() -> None:
    with pytest.raises(ConfigurationError, match="at most"):
        parse(b"#" * (LONGEST + 1), "tools/a.yaml")


def test_bytes_that_are_no_text_are_told() -> None:
    with pytest.raises(ConfigurationError, match=r"tools/a\.yaml"):
        parse(b"name: \xff\xfe", "tools/a.yaml")
