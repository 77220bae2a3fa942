"""One session that takes all it can get: it hits its own limits, and the host and other sessions go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from carrel.execution.config import Limits, SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor

MIB = 1024 * 1024


async def test_a_hog_of_processors_beside_another_session() -> None:
    config = SubprocessConfig(sandbox="required")
    async with SubprocessExecutor(config) as hog, SubprocessExecutor(config) as other:
        await hog.exec("for n in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done")
        assert [(await other.run(f"{n} * 2")).value for n in range(20)] == [n * 2 for n in range(20)]
        assert (await other.exec("echo still here")).stdout == "still here\n"
        # And the hog itself can still be asked, and closed with all that it has started.
        assert (await hog.run("'here'")).value == "here"


async def test_filling_tmp_fills_only_its_own() -> None:
    before = set(os.listdir("/tmp"))
    async with SubprocessExecutor(SubprocessConfig(sandbox="required", limits=Limits(disk=8 * MIB))) as executor:
        for folder in ("/tmp", "/var/tmp", "/dev/shm", "/home/agent", "/workspace"):
            code = f"name = '{folder}/carrel-flood'\nopen(name, 'wb').write(b'x' * (9 << 20))"
            result = await executor.run(code)
            assert result.error_type == "OSError", folder
            await executor.run("import os; os.remove(name)")
    assert "carrel-flood" not in set(os.listdir("/tmp")) - before
    assert not Path("/dev/shm/carrel-flood").exists()


async def test_a_flood_of_zombies() -> None:
    async with SubprocessExecutor(SubprocessConfig(sandbox="required", limits=Limits(processes=60))) as executor:
        flood = (
            "import os\nmade = 0\ntry:\n    while True:\n        if os.fork() == 0: os._exit(0)\n        made += 1\n"
            "except BlockingIOError: pass\nmade"
        )
        made = (await executor.run(flood)).value
        assert 0 < made < 60
        assert (await executor.run("for _ in range(made): os.wait()", timeout=60)).is_ok
        assert (await executor.run("os.getpid() > 0")).value is True


async def test_a_flood_of_output_beside_another_session() -> None:
    config = SubprocessConfig(sandbox="required", output_limit=MIB)
    async with SubprocessExecutor(config) as flood, SubprocessExecutor(config) as other:
        await flood.exec("yes > /dev/null & yes >&2 & sleep 0.1")
        result = await flood.run("for n in range(200): print('x' * MIB)".replace("MIB", str(MIB)))
        assert len(result.stdout) < 2 * MIB
        assert "bytes left out" in result.stdout
        assert (await other.run("1 + 1")).stdout == ""


UNDER_WAY = """
import array, os, socket
kept, nothing, said = [], os.open("/dev/null", os.O_RDONLY), ""
numbers = array.array("i", [nothing] * 250)
try:
    while True:
        kept += socket.socketpair()
        for _ in range(20):
            kept[-1].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
except OSError as problem:
    said = problem.strerror
said
"""
BESIDE_IT = f"""
import asyncio, os, resource
from carrel.execution.config import SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
config = SubprocessConfig(sandbox="required")
async def main():
    async with SubprocessExecutor(config) as flood, SubprocessExecutor(config) as other:
        await other.run("x = 5")
        print((await flood.run({UNDER_WAY!r})).value)
        for n in range(5):
            kept = await other.run("x += 1; x")
            print(kept.value, kept.error)
            await asyncio.sleep(0.1)
        print((await other.exec("sleep 100 & echo here")).stdout.strip())
        async with SubprocessExecutor(config) as new:
            print((await new.run("'new'")).value)
        crashed = await other.run("import os; os._exit(1)")
        print(crashed.error_type, crashed.state, crashed.state_reason)
        print((await other.run("1 + 1")).value)
asyncio.run(main())
"""


def test_a_flood_of_descriptors_under_way_harms_no_other_session() -> None:
    """The kernel counts them for all processes of a user together."""
    done = subprocess.run([sys.executable, "-c", BESIDE_IT], capture_output=True, text=True, check=False, timeout=100)
    refused = "Too many references: cannot splice"
    assert done.stdout.splitlines() == [
        refused,
        *(f"{n} None" for n in range(6, 11)),
        "here",
        "new",
        f"Crashed lost it could not be passed to the host: {refused}",
        "2",
    ], done.stderr
