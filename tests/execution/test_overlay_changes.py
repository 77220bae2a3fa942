"""Changes read from an overlay's upper layer are those that a listing of the whole workspace finds."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from carrel.execution import file_changes
from carrel.execution.commands_and_files import CommandsAndFiles
from carrel.execution.config import Mount, SubprocessConfig
from carrel.execution.executor import FileChange
from carrel.execution.subprocess_executor import SubprocessExecutor

WORK = """
import json, os, shutil, sys
for step in json.load(sys.stdin):
    try:
        match step:
            case ["write", path, text]: open(path, "w").write(text)
            case ["append", path, text]: open(path, "a").write(text)
            case ["remove", path] if os.path.isdir(path) and not os.path.islink(path): shutil.rmtree(path)
            case ["remove", path]: os.remove(path)
            case ["make", path]: os.mkdir(path)
            case ["move", path, to]: shutil.move(path, to)
            case ["rename", path, to]: os.rename(path, to)
            case ["copy", path, to]: shutil.copytree(path, to, symlinks=True)
            case ["link", path, to]: os.symlink(to, path)
            case ["twin", path, to]: os.link(path, to)
            case ["mode", path, mode] if not os.path.isdir(path): os.chmod(path, mode)
            case ["touch", path]: os.utime(path, (1, 1))
            case ["pipe", path]: os.mkfifo(path)
    except OSError:
        pass
"""

NAMES = st.sampled_from(
    ["a", "run.sh", "d", "d/b", "d/e", "d/e/c", "d/e/f", "to-d", "to-d/b", "to-a", "new", "new/b", "empty", "d/run.sh"]
)
TEXTS = st.sampled_from(["", "one\n", "two\n"])
STEPS = st.one_of(
    st.tuples(st.sampled_from(["write", "append"]), NAMES, TEXTS),
    st.tuples(st.sampled_from(["remove", "make", "touch", "pipe"]), NAMES),
    st.tuples(st.sampled_from(["move", "rename", "copy", "link", "twin"]), NAMES, NAMES),
    st.tuples(st.just("mode"), NAMES, st.sampled_from([0o600, 0o644, 0o755])),
)


def base_in(folder: Path) -> Path:
    (folder / "d" / "e").mkdir(parents=True)
    (folder / "empty").mkdir()
    for name in ("a", "run.sh", "d/b", "d/e/c"):
        (folder / name).write_text("one\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "to-d").symlink_to("d")
    (folder / "to-a").symlink_to("a")
    return folder


async def both(executor: SubprocessExecutor) -> tuple[list[FileChange], str]:
    """What the executor finds, which is what a listing finds."""
    before, now = await CommandsAndFiles._before_and_now(executor)
    listed = await file_changes.changes(before, now, executor.read_file)
    found = await executor.changed_files()
    assert found == listed
    diff = await executor.diff()
    assert diff == await file_changes.unified(before, now, executor.read_file)
    assert await executor.upper(Path(str(executor.config.workspace))) is not None
    return found, diff


async def compared(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as place:
        config = SubprocessConfig(sandbox="required", workspace=base_in(Path(place, "base")))
        async with SubprocessExecutor(config) as executor:
            at_first = await executor.checkpoint()
            half = len(steps) // 2
            await executor.exec(["python3", "-c", WORK], stdin=json.dumps(steps[:half]))
            await both(executor)
            fork = await executor.fork()
            async with fork:
                assert (await fork.exec(["python3", "-c", WORK], stdin=json.dumps(steps[half:]))).stderr == ""
                await both(fork)
            await executor.rewind(at_first)
            assert await both(executor) == ([], "")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example([("remove", "d"), ("make", "d"), ("write", "d/b", "one\n"), ("write", "d/e", "two\n")])
@example([("remove", "to-d"), ("make", "to-d"), ("write", "to-d/b", "two\n"), ("touch", "a")])
@example([("move", "d", "new"), ("mode", "run.sh", 0o644), ("remove", "a"), ("link", "a", "d/b")])
@example([("pipe", "new"), ("twin", "a", "d/run.sh"), ("remove", "empty"), ("write", "empty", "one\n")])
@example([("remove", "a"), ("make", "a"), ("remove", "a"), ("write", "a", "one\n")])
@given(st.lists(STEPS, max_size=12))
def test_the_same_changes_as_a_listing_finds(steps: list[Any]) -> None:
    asyncio.run(compared(steps))


async def test_a_large_workspace_is_not_listed_for_one_change(tmp_path: Path) -> None:
    for name in range(300):
        (tmp_path / f"{name}.txt").write_text("one\n")
    config = SubprocessConfig(sandbox="required", workspace=tmp_path)
    async with SubprocessExecutor(config) as executor:
        await executor.exec("echo two >> 7.txt; rm 8.txt; echo new > new.txt")
        before, now = await executor._before_and_now()
        assert (set(before.tree()), set(now)) == ({"7.txt", "8.txt"}, {"7.txt", "new.txt"})
        found = {change.path: change.kind for change in await executor.changed_files()}
        assert found == {"7.txt": "modified", "8.txt": "deleted", "new.txt": "added"}


async def test_what_is_mounted_into_the_workspace_is_seen(tmp_path: Path) -> None:
    base = base_in(tmp_path / "base")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "of-mount").write_text("one\n")
    mount = Mount(source=tmp_path / "data", at="/workspace/data")
    config = SubprocessConfig(sandbox="required", workspace=base, mounts=[mount])
    async with SubprocessExecutor(config) as executor:
        await executor.write_file("own", "one\n")
        assert [change.path for change in await executor.changed_files()] == ["data/of-mount", "own"]
