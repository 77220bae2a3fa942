"""Durable sessions in containers of a real engine: files in volumes, variables in the state folder."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from carrel import ConfigurationError, ContainerConfig, ContainerExecutor, FileStorage, Session
from carrel.errors import SandboxUnavailable
from carrel.execution.config import Limits
from carrel.execution.docker_engine import VOLUME_LABEL, Engine, connect
from carrel.execution.durable import volumes_of_state
from carrel.session.durable import delete_state, remove_volumes
from tests.support.real_docker import IMAGE

pytestmark = pytest.mark.real
STATE = "sessions/report/workspace-state"


@pytest.fixture
def engine(docker_engine: str) -> Engine:
    return connect(docker_engine)


@pytest.fixture
async def base(tmp_path: Path, engine: Engine) -> AsyncIterator[Path]:
    yield tmp_path / "base"
    await asyncio.to_thread(remove_volumes, "report", tmp_path / "base" / STATE)


def report(base: Path, engine: Engine, **settings: Any) -> Session:
    return Session.container(base, image=IMAGE, docker_host=engine.where, session_id="report", **settings)


def volumes(engine: Engine, base: Path) -> set[str]:
    found = engine._api.volumes(filters={"label": f"{VOLUME_LABEL}={base / STATE}"})["Volumes"]
    return {volume["Name"] for volume in found or ()}


async def test_files_and_variables_come_back(base: Path, engine: Engine, tmp_path: Path) -> None:
    workspace = tmp_path / "given"
    workspace.mkdir()
    for name in ("kept", "changed", "gone"):
        (workspace / name).write_text(f"{name}\n")
    async with report(base, engine, workspace=workspace) as session:
        assert session.resumed is None
        code = "import socket\nlarge = bytes(20_000_000)\na = [1]; b = {'same': a}\ndef twice(n): return 2 * n\n"
        result = await session.run(f"{code}jobs = [1, socket.socket()]")
        assert result.is_ok, result
        await session.execute_command("echo new > changed; rm gone; echo home > ~/.settings; chmod 700 kept")
        diff = await session.diff()
        assert "+new" in diff
        saved = await session.save()
        assert saved.missing == {"jobs": "jobs[1]: TypeError: cannot pickle 'socket' object"}
    async with Session.resume(base, "report") as session:
        assert session.resumed is not None
        assert (session.resumed.files, session.resumed.reason) == (True, "")
        assert set(session.resumed.variables) == {"socket", "large", "a", "b", "twice"}
        assert list(session.resumed.missing) == ["jobs"]
        result = await session.run("b['same'] is a, twice(len(large))")
        assert (result.value, result.state) == ((True, 40_000_000), "restored"), result
        assert (await session.execute_command("cat changed ~/.settings; ls")).stdout == "new\nhome\nchanged\nkept\n"
        assert await session.diff() == diff
    assert (workspace / "changed").read_text() == "changed\n"


async def test_variables_are_saved_in_the_worker_while_threads_run(base: Path, engine: Engine) -> None:
    async with report(base, engine) as session:
        await session.run("import threading, time; x = 5\nthreading.Thread(target=time.sleep, args=(600,)).start()")
        assert "x" in (await session.save()).variables
        assert (await session.run("x")).value == 5
        await session.run("x = 6")
    async with report(base, engine) as session:
        assert (await session.run("x")).value == 6


PROGRAM = """
import asyncio, sys
from carrel import Session

async def main():
    settings = dict(image=sys.argv[2], docker_host=sys.argv[3], session_id="report")
    async with Session.container(sys.argv[1], **settings) as session:
        await session.run("count = -1")
        number = 0
        while True:
            number += 1
            code = "open('new', 'w').write('{0}'); import os; os.rename('new', 'counter'); count = {0}"
            await session.run(code.format(number))
            print("run", number, flush=True)
            if number % 5 == 0:
                await session.save()
                print("save", number, flush=True)

asyncio.run(main())
"""


async def test_a_killed_host_loses_only_what_was_not_saved(base: Path, engine: Engine) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for _ in range(4):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(base), IMAGE, engine.where], stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        shown = [next(program.stdout).split() for _ in range(moments.randrange(1, 14))]
        await asyncio.sleep(moments.random() * 0.05)
        program.send_signal(signal.SIGKILL)
        shown += [line.split() for line in program.stdout if line.endswith("\n")]
        program.wait()
        ran = max((int(number) for what, number in shown if what == "run"), default=-1)
        saved = max((int(number) for what, number in shown if what == "save"), default=-1)
        async with report(base, engine) as session:
            assert session.resumed is not None
            assert session.resumed.files, session.resumed
            result = await session.run("int(open('counter').read()), globals().get('count', -1)")
            assert result.value is not None, result.error
            counter, count = result.value
            assert counter >= ran, shown
            assert saved <= count <= counter, shown
            await session.run("count = 0; import os; os.remove('counter')")


async def test_a_container_that_is_killed_loses_no_files(base: Path, engine: Engine) -> None:
    async with report(base, engine) as session:
        await session.run("x = 1; open('f', 'w').write('there')")
        await session.save()
        executor = session.executor
        assert isinstance(executor, ContainerExecutor)
        assert executor._connection is not None
        await asyncio.to_thread(engine._api.kill, executor._connection.transport._container)
        result = await session.run("x")
        result = result if result.is_ok else await session.run("x, open('f').read()")
        assert result.value in (1, (1, "there")), result
        assert await session.read_file("f") == b"there"
        assert executor.lost == ""


async def test_volumes_stay_until_the_session_is_deleted(base: Path, engine: Engine) -> None:
    async with report(base, engine) as session:
        await session.write_file("f", "there")
    with pytest.raises(ConfigurationError, match=r"in volumes of the container engine at .*open it as it was begun"):
        await Session.from_base(base, session_id="report").start()
    names = volumes(engine, base)
    assert names == set(volumes_of_state(base / STATE)[1])
    assert len(names) == 2
    engine.sweep(unused=-1)
    assert volumes(engine, base) == names
    words = [sys.executable, "-m", "carrel", "sessions", "delete", "report", "--yes", "--base", str(base)]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert volumes(engine, base) == set()
    assert not (base / "sessions" / "report").exists()


async def test_volumes_that_are_gone_are_reported(base: Path, engine: Engine) -> None:
    async with report(base, engine) as session:
        await session.run("x = 1; open('f', 'w').write('there')")
    for name in volumes(engine, base):
        engine.remove_volume(name)
    async with report(base, engine) as session:
        assert session.resumed is not None
        assert (session.resumed.files, "has no volume" in session.resumed.reason) == (False, True)
        assert (await session.run("x")).value == 1
        assert not await session.exists("f")
    async with report(base, engine) as session:
        assert session.resumed is not None
        assert (session.resumed.files, session.resumed.reason) == (True, "")


async def test_variables_are_not_loaded_into_a_weaker_container(base: Path, engine: Engine) -> None:
    async with report(base, engine) as session:
        await session.run("x = 1; open('f', 'w').write('there')")
    async with report(base, engine, network="none") as session:  # a name of a network, and not False
        assert session.resumed is not None
        assert (session.resumed.variables, session.resumed.files) == ([], True)
        assert "has the network now" in session.resumed.reason


async def test_a_session_that_fills_its_volume_is_stopped_and_can_delete_its_files(base: Path, engine: Engine) -> None:
    async with report(base, engine, limits=Limits(disk=20 << 20), timeout=200) as session:
        await session.run("x = 1")
        await session.save()
        fill = "import os, time\nos.mkdir('hidden'); os.chmod('hidden', 0o300)\n"
        fill += "for n in range(900):\n    open(f'hidden/{n}', 'wb').write(bytes(1 << 20)); time.sleep(0.2)"
        result = await session.run(fill)
        assert "limits.disk" in (result.error or ""), result
        assert (await session.run("x")).value == 1
        done = await session.execute_command("chmod 700 hidden; rm -r hidden; ls")
        assert (done.exit_code, done.stdout) == (0, "")


async def test_what_cannot_be_kept_says_why(tmp_path: Path, engine: Engine) -> None:
    nowhere = ContainerConfig(image=IMAGE, docker_host="unix:///nowhere/docker.sock")
    session = Session(FileStorage(tmp_path), ContainerExecutor(nowhere), session_id="report", persist=True)
    with pytest.raises(SandboxUnavailable, match="no container engine"):
        await session.start()
    await session.close()
    async with report(tmp_path / "base", engine) as session:
        await session.write_file("f", "there")
    manifest = tmp_path / "base" / STATE / "manifest.json"
    written = manifest.read_text()
    manifest.write_text(written.replace(engine.where, "unix:///nowhere/docker.sock"))
    with pytest.raises(SandboxUnavailable, match="could not be removed: no container engine"):
        await delete_state(FileStorage(tmp_path / "base"), "report")
    assert (tmp_path / "base" / STATE).exists()
    with pytest.raises(ConfigurationError, match="in volumes of the container engine at unix:///nowhere"):
        await report(tmp_path / "base", engine).start()
    manifest.write_text(written)
    await delete_state(FileStorage(tmp_path / "base"), "report")
    assert volumes(engine, tmp_path / "base") == set()
