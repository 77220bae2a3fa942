"""Expressions in definitions: obeyed, and never for longer than a call may take."""

import asyncio
import re

import pytest

from carrel.errors import ConfigurationError, ToolCallError
from carrel.library.tools.patterns import Expressions, TooSlow, degree_of
from tests.library.tools.making import catalog, program

ECHO = "name: echo\ncommand: echo\nschema: {positional: [{name: v, pattern: '%s', %s}]}"


@pytest.mark.parametrize(
    ("pattern", "degree"),
    [
        ("^[^@]", 1),
        (r"^\w+$", 1),
        (r"\w+$", 2),
        (r"^[a-z]+-\d*(x|yz)?$", 3),
        (r"^\d{3}-\d{4}$", 1),
        ("^(a+)+$", None),
        (r"^[a-z]+(-[a-z]+)*$", None),
        ("^(ab|cd)*$", None),
        (r"^(a)\1$", None),
        ("^(?=x)x", None),
        ("^(?>a+)b", None),
    ],
)
def test_how_hard_an_expression_may_be_is_seen_beforehand(pattern: str, degree: int | None) -> None:
    assert degree_of(pattern) == degree


def test_hard_ones_say_the_same_as_ever() -> None:
    with Expressions(60) as expressions:
        for pattern in (r"^\w+$", r"^[a-z]+(-[a-z]+)*$", "^(ab|cd)*$", "ü{2,}"):
            for text in ("", "abc", "a-b-c", "abcd", "Größe üü", "x" * 3000, "a\nb"):
                assert expressions.found(pattern, text) == bool(re.search(pattern, text))


def test_one_that_would_not_end_is_given_up() -> None:
    with Expressions(0.3) as expressions, pytest.raises(TooSlow):
        expressions.found("^(a+)+$", "a" * 60 + "!")


async def test_the_loop_goes_on_while_one_is_tried() -> None:
    tools = catalog(ECHO % ("^(a+)+$", "required: true"))
    assert await tools.call("echo", {"v": "aaaa"}) == "aaaa\n"
    call = asyncio.create_task(tools.call("echo", {"v": "a" * 60 + "!"}))
    turns = 0
    while not call.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 5
    with pytest.raises(ToolCallError, match="takes too long to find out whether an argument matches"):
        await call


async def test_many_texts_are_tried_by_one_process() -> None:
    tools = catalog(
        "name: echo\ncommand: echo\n"
        "schema: {positional: [{name: v, type: array, items: {pattern: '^[a-z]+(-[a-z]+)*$'}}]}"
    )
    await tools.call("echo", {"v": [f"kebab-case-{'x' * (number % 7 + 1)}" for number in range(500)]})
    with pytest.raises(ToolCallError, match=r"v\[1\]: 'Not Kebab' does not match"):
        await tools.call("echo", {"v": ["fine", "Not Kebab"]})


def test_what_is_no_expression_is_said_when_the_definition_is_read() -> None:
    with pytest.raises(ConfigurationError, match="is no regular expression"):
        program(ECHO % ("(", "required: true"))
