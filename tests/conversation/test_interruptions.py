"""Operations that are killed, fail or run concurrently at any step leave the old state or the new one."""

import asyncio
import itertools
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.storage.base import Store
from carrel.storage.files.store import FileStore
from carrel.storage.redis.store import RedisStore
from tests.support.interruptions import NAMES, Cut, Laboratory

HALVES = ("append to a new one", "append to a draft", "import")
"""They make a session and then fill it: in between it is there and empty, and the next writer continues it."""
REPAIRED = ("call",)
"""A reader that finds an abandoned call answers it, so there is more than was written."""

TOGETHER = [
    ("append the first", "rename the empty one"),
    ("append the first", "append another first"),
    ("append the first", "delete the empty one"),
    ("append to a new one", "create"),
    ("append to a new one", "delete the new one"),
    ("append what is long", "delete"),
    ("call", "load"),
    ("rename", "append"),
    ("rename", "fork"),
    ("tag", "delete"),
    ("label", "prune"),
    ("prune", "append"),
    ("prune", "rename"),
    ("pin", "compact"),
    ("compact", "pin"),
    ("compact", "append"),
    ("compact", "compact"),
    ("compact", "rewind"),
    ("rewind", "compact"),
    ("rewind", "append many"),
    ("rewind", "delete"),
    ("fork", "append"),
    ("fork", "fork to the same name"),
    ("fork", "delete"),
    ("set", "archive"),
    ("import", "import"),
    ("import more", "import more"),
    ("import more", "rename"),
    ("load", "delete"),
    ("say, typed", "answer, typed"),
    ("answer, typed", "say, typed"),
    ("edit, typed", "say, typed"),
    ("edit, typed", "delete, typed"),
    ("entitle, typed", "answer, typed"),
]
"""Those that have gone wrong, and some more."""

KNOWN = {
    ("label", "label"): "both name the entry that was the last when they looked",
    ("fork", "rename"): "the title is that of the session now, also where an earlier moment of it is forked",
    ("fork", "set"): "the same with the model",
    ("clear", "prune"): "where all is gone there is nothing to clear",
    ("delete, typed", "delete, typed"): "the later one reports that there is none, and not by an error",
    **dict.fromkeys(
        [
            ("edit, typed", "cut, typed"),
            ("edit, typed", "rewind, typed"),
            ("cut, typed", "say, typed"),
            ("cut, typed", "answer, typed"),
            ("cut, typed", "edit, typed"),
        ],
        "who has the conversation from before merges: what both did is there",
    ),
}
"""Where it is neither one after the other nor an error, and why."""


@pytest.fixture
def laboratory(tmp_path: Path) -> Laboratory:
    return Laboratory(tmp_path / "imports")


@pytest.fixture(autouse=True)
async def killed_in_silence() -> None:
    """The tasks of a process that is killed end by that, and their results are not looked at."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)


@pytest.mark.parametrize(("how", "warm"), [("kill", False), ("fault", True)])
@pytest.mark.parametrize("operation", [name for name in NAMES if name not in (*HALVES, *REPAIRED)])
async def test_cut_off(laboratory: Laboratory, operation: str, how: Cut, warm: bool) -> None:
    assert await laboratory.cut_off(operation, how, warm=warm) == []


@pytest.mark.parametrize("operation", HALVES)
async def test_cut_off_half_way_the_next_writer_continues(laboratory: Laboratory, operation: str) -> None:
    problems = await laboratory.cut_off(operation, "kill", warm=False)
    assert [problem for problem in problems if "once more" in problem or "the log" in problem] == []


@pytest.mark.parametrize("operation", [name for name in NAMES if name not in (*HALVES, *REPAIRED)])
async def test_looked_at(laboratory: Laboratory, operation: str) -> None:
    assert await laboratory.looked_at(operation, warm=True) == []


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("one", "other"), TOGETHER)
async def test_with_another_at_work(laboratory: Laboratory, one: str, other: str, warm: bool) -> None:
    assert await laboratory.together(one, other, warm=warm) == []


@pytest.mark.parametrize("medium", ["file", "redis"])
@pytest.mark.parametrize(("one", "other"), [("append the first", "rename the empty one"), ("tag", "delete")])
async def test_with_another_at_work_elsewhere(
    tmp_path: Path, request: pytest.FixtureRequest, medium: str, one: str, other: str
) -> None:
    url = request.getfixturevalue("redis_url") if medium == "redis" else ""
    count = itertools.count()

    def backend() -> Callable[[], Store]:
        name = f"{uuid.uuid4().hex}-{next(count)}"
        return lambda: FileStore(tmp_path / name) if medium == "file" else RedisStore(url, name)

    assert await Laboratory(tmp_path / "imports", backend).together(one, other, warm=True) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("one", NAMES)
async def test_with_any_other_at_work(laboratory: Laboratory, one: str) -> None:
    problems = []
    for other, warm in itertools.product(NAMES, (False, True)):
        if (one, other) not in KNOWN:
            problems += await laboratory.together(one, other, warm=warm)
    assert problems == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("operation", [name for name in NAMES if name not in (*HALVES, *REPAIRED)])
async def test_cut_off_in_any_way(laboratory: Laboratory, operation: str) -> None:
    hows: tuple[Cut, ...] = ("kill", "fault", "fault after", "cancel")
    for how, warm in itertools.product(hows, (False, True)):
        assert await laboratory.cut_off(operation, how, warm=warm) == []
