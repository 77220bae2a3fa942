"""Temporary folders last as long as the process that made them, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.execution.processes import until

OWNER = """
import sys
from carrel.execution import temp_dirs
folder = temp_dirs.new_folder("kept")
(folder / "content").write_text("x")
print(folder, flush=True)
sys.stdin.read()
print((folder / "content").exists())
"""
FORKED = """
import os, sys, time
from carrel.execution import temp_dirs
own = temp_dirs.new_folder("own")
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        other = temp_dirs.new_folder("other")
        time.sleep(0.5)
        os._exit(0 if other.exists() and own.exists() and other.parent != own.parent else 1)
    assert os.waitpid(pid, 0)[1] == 0
time.sleep(0.5)
assert own.exists()
"""
POOL = """
import multiprocessing, time
from carrel.execution import temp_dirs
def work(number):
    folder = temp_dirs.new_folder("other")
    time.sleep(0.3)
    return folder.exists(), str(folder.parent)
own = temp_dirs.new_folder("own")
with multiprocessing.get_context("fork").Pool(2) as pool:
    found = pool.map(work, range(4), chunksize=1)
assert all(there for there, _ in found), found
assert str(own.parent) not in {parent for _, parent in found}
assert own.exists()
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


def owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder below this one, and its own folder there."""
    process = started(OWNER, parent)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip()).parent


@pytest.mark.parametrize("program", [FORKED, POOL])
async def test_a_forked_child_has_folders_of_its_own(program: str, tmp_path: Path) -> None:
    process = started(program, tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == 0


async def test_a_process_that_ends_removes_its_folder(tmp_path: Path) -> None:
    process, folder = owner(tmp_path)
    (folder / "read-only").mkdir(mode=0o500)
    process.communicate("")
    assert list(tmp_path.iterdir()) == []


async def test_the_folder_of_a_killed_process_is_removed_by_the_next_start(tmp_path: Path) -> None:
    alive, living = owner(tmp_path)
    killed, left = owner(tmp_path)
    killed.kill()
    killed.communicate()
    stranger = tmp_path / "carrel-stranger"
    stranger.mkdir()
    of_another_boot = tmp_path / "carrel-elsewhere"
    of_another_boot.mkdir()
    (of_another_boot / ".lock").write_text("another boot")
    assert left.exists()
    process, _ = owner(tmp_path)
    await until(lambda: not left.exists())
    assert living.exists()
    assert process.communicate("")[0] == "True\n"
    assert alive.communicate("")[0] == "True\n"
    assert set(tmp_path.iterdir()) == {stranger, of_another_boot}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has folders of another user")
async def test_folders_of_other_users_are_not_touched(tmp_path: Path) -> None:
    killed, left = owner(tmp_path)
    killed.kill()
    killed.communicate()
    os.chown(left, 65534, 65534)
    process, _ = owner(tmp_path)
    process.communicate("")
    assert list(tmp_path.iterdir()) == [left]
