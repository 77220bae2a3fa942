"""Temporary folders last as long as the process that made them, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.execution.processes import until

OWNER = """
import sys
from carrel.execution import scratch
folder = scratch.new_folder("kept")
(folder / "content").write_text("x")
print(scratch._janitor.pid, flush=True)
sys.stdin.read()
print((folder / "content").exists())
"""
FORKED = """
import os, sys, time
from carrel.execution import scratch
own = scratch.new_folder("own")
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        other = scratch.new_folder("other")
        time.sleep(0.5)
        os._exit(0 if other.exists() and own.exists() and other.parent != own.parent else 1)
    assert os.waitpid(pid, 0)[1] == 0
time.sleep(0.5)
assert own.exists()
"""
POOL = """
import multiprocessing, time
from carrel.execution import scratch
def work(number):
    folder = scratch.new_folder("other")
    time.sleep(0.3)
    return folder.exists(), str(folder.parent)
own = scratch.new_folder("own")
with multiprocessing.get_context("fork").Pool(2) as pool:
    found = pool.map(work, range(4), chunksize=1)
assert all(there for there, _ in found), found
assert str(own.parent) not in {parent for _, parent in found}
assert own.exists()
"""

WRITER = """
import itertools, sys, time
end = time.monotonic() + 2
try:
    for n in itertools.count():
        open(f"{sys.argv[1]}/{n}", "w").close()
        assert time.monotonic() < end
except (AssertionError, FileNotFoundError):
    pass
"""


def started(program: str, place: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(place)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def owner(place: Path) -> tuple[subprocess.Popen[str], int]:
    """A process with a folder below this place, and its janitor."""
    process = started(OWNER, place)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("program", [FORKED, POOL])
async def test_a_forked_child_has_folders_of_its_own(program: str, tmp_path: Path) -> None:
    process = started(program, tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == 0
    await until(lambda: not list(tmp_path.iterdir()))


async def test_a_killed_process_leaves_no_folder_though_something_still_writes_there(tmp_path: Path) -> None:
    process, _ = owner(tmp_path)
    (folder,) = tmp_path.glob("carrel-*/kept-*")
    writing = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)])
    await until(lambda: len(list(folder.iterdir())) > 10)
    process.kill()
    process.communicate()
    writing.wait()
    await until(lambda: not list(tmp_path.iterdir()))


async def test_what_was_killed_with_its_janitor_is_removed_by_the_next_start(tmp_path: Path) -> None:
    alive, _ = owner(tmp_path)
    (living,) = tmp_path.iterdir()
    killed, janitor = owner(tmp_path)
    (left,) = set(tmp_path.iterdir()) - {living}
    os.kill(janitor, signal.SIGKILL)
    killed.kill()
    killed.communicate()
    stranger = tmp_path / "carrel-stranger"
    stranger.mkdir()
    of_another_boot = tmp_path / "carrel-elsewhere"
    of_another_boot.mkdir()
    (of_another_boot / ".lock").write_text("another boot")
    assert left.exists()
    process = started(OWNER, tmp_path)
    await until(lambda: not left.exists())
    assert stranger.exists()
    assert of_another_boot.exists()
    assert process.communicate("")[0].endswith("True\n")
    assert alive.communicate("")[0] == "True\n"
    await until(lambda: set(tmp_path.iterdir()) == {stranger, of_another_boot})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has folders of another user")
async def test_folders_of_other_users_are_not_touched(tmp_path: Path) -> None:
    killed, janitor = owner(tmp_path)
    (left,) = tmp_path.iterdir()
    os.kill(janitor, signal.SIGKILL)
    killed.kill()
    killed.communicate()
    os.chown(left, 65534, 65534)
    process, _ = owner(tmp_path)
    process.communicate("")
    await until(lambda: list(tmp_path.iterdir()) == [left])
