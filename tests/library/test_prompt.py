"""The lines of the page that describes a library to a model."""

import ast
from dataclasses import asdict

from carrel.library.prompt import section, workflow_line
from carrel.library.workflows.source import read_signature


def line_of(source: str) -> str:
    return workflow_line({"name": "go", **asdict(read_signature("go", source))})


def test_a_workflow_is_shown_as_a_call_in_python() -> None:
    assert line_of('"""Add.\n\nUp."""\ndef run(a, b: int, c: str = "x"): ...') == (
        "workflows.go(a, b: int, c: str = 'x')  # Add."
    )
    variadic = line_of("def run(a, *rest: str, b=None, **more): ...")
    assert variadic == "workflows.go(a, *rest: str, b = None, **more)"
    ast.parse(f"def {variadic.removeprefix('workflows.')}: ...")


def test_a_skill_is_shown_with_the_call_that_reads_it() -> None:
    skill = {"name": "pdf-forms", "kind": "instructions", "description": "Fill in forms\nslowly", "parameters": []}
    assert workflow_line(skill) == "skills.get('pdf-forms')['source']  # read it: Fill in forms"


def test_a_section_that_is_too_long_names_the_call_that_lists_the_rest() -> None:
    assert section("deps", [], "deps.list()", 100) == ""
    shown = section("deps", ["one", "two", "three"], "deps.list()", 8)
    assert shown == "\n## deps\none\ntwo\n… and 1 more: deps.list()\n"
