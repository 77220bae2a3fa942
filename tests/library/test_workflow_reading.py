"""Long sources are read in a process of their own, and say the same."""

import asyncio

import pytest

from carrel.errors import WorkflowSyntaxError, WorkflowValidationError
from carrel.library.workflow_reading import Outlines
from carrel.library.workflow_source import LARGEST, QUICK, outline
from carrel.library.workflows import WorkflowLibrary
from carrel.storage.memory import MemoryStore

RUN = '''\
"""A long one."""

async def run(text: str, times: int = 2, *more: "int", **rest) -> list[str]:
    """Say it.

    Args:
        text: What.
    """
    return [text] * times
'''


def long(source: str, size: int = QUICK) -> str:
    """Longer than that, and slow to read."""
    return source + "a;" * (size // 2) + "\n"


def test_a_long_source_says_the_same() -> None:
    with Outlines() as outlines:
        for description in ("", "Another"):
            assert outlines.read("x", long(RUN), description) == outline("x", RUN, description)


@pytest.mark.parametrize("source", ["def run(:\n    pass\n", "x = 1\n", "def run():\n    return '\ud800'\n"])
def test_a_long_source_is_refused_in_the_same_words(source: str) -> None:
    with pytest.raises(WorkflowValidationError) as here:
        outline("x", long(source))
    with Outlines() as outlines, pytest.raises(WorkflowValidationError) as there:
        outlines.read("x", long(source))
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)
    if isinstance(here.value, WorkflowSyntaxError):
        assert isinstance(there.value, WorkflowSyntaxError)
        assert (there.value.lineno, there.value.offset) == (here.value.lineno, here.value.offset)


def test_one_that_does_not_come_to_an_end_is_refused() -> None:
    with Outlines(seconds=0.0) as outlines, pytest.raises(WorkflowValidationError, match="took more than 0 s"):
        outlines.read("x", long(RUN))


def test_one_that_python_gives_up_on_is_refused_and_the_next_is_read() -> None:
    with Outlines() as outlines:
        outlines.read("x", long(RUN))
        process = outlines._process._process
        assert process is not None
        process.kill()
        process.wait()
        with pytest.raises(WorkflowValidationError, match=r"the source of x cannot be read: .*; make it shorter"):
            outlines.read("x", long(RUN))
        assert outlines.read("x", long(RUN)) == outline("x", RUN)


async def test_others_go_on_while_a_long_source_is_kept() -> None:
    library = WorkflowLibrary(MemoryStore())
    turns = 0
    keeping = asyncio.create_task(library.add("x", long(RUN, LARGEST - len(RUN) - 10)))
    while not keeping.done():
        await asyncio.wait([keeping], timeout=0.001)
        turns += 1
    assert (await keeping)["description"] == "A long one."
    # Read here it would stand still for nearly all of the time.
    assert turns > 20
