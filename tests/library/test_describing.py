"""The lines of the page that a model is given."""

import ast

from carrel.library.describing import listed, workflow_line
from carrel.library.workflow_source import outline


def line_of(source: str) -> str:
    return workflow_line({"name": "go", **outline("go", source).as_data()})


def test_a_workflow_is_a_call_that_python_can_read() -> None:
    assert line_of('"""Add.\n\nUp."""\ndef run(a, b: int, c: str = "x"): ...') == (
        "workflows.go(a, b: int, c: str = 'x')  # Add."
    )
    taking_all = line_of("def run(a, *rest: str, b=None, **more): ...")
    assert taking_all == "workflows.go(a, *rest: str, b = None, **more)"
    ast.parse(f"def {taking_all.removeprefix('workflows.')}: ...")


def test_a_skill_that_has_no_run_is_read() -> None:
    skill = {"name": "pdf-forms", "kind": "instructions", "description": "Fill in forms\nslowly", "parameters": []}
    assert workflow_line(skill) == "skills.get('pdf-forms')['source']  # to be read: Fill in forms"


def test_a_part_says_how_to_see_what_it_has_no_room_for() -> None:
    assert listed("deps", [], "deps.list()", 100) == ""
    shown = listed("deps", ["one", "two", "three"], "deps.list()", 8)
    assert shown == "\n## deps\none\ntwo\n… and 1 more: deps.list()\n"
