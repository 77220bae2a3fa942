"""Faults: whatever dies, and whenever, there is an answer, the session goes on or says why not, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import ExecutorClosed, ForkRefused, WorkerLost, WorkspaceLost
from carrel.execution import connection
from carrel.execution.capabilities import probe
from carrel.execution.config import InProcessConfig, SubprocessConfig
from carrel.execution.connection import SpawnFailed
from carrel.execution.in_process import InProcessExecutor
from carrel.execution.sandbox_client import InitClient, ZygoteKey, Zygotes, shared
from carrel.execution.subprocess_executor import SubprocessExecutor
from tests.execution.conftest import Here
from tests.execution.processes import alive, descendants, groups_of, mounts, started, until, wait_gone

MODES = ("off", "required")


@pytest.fixture(params=MODES)
async def executor(request: pytest.FixtureRequest) -> AsyncIterator[SubprocessExecutor]:
    made = SubprocessExecutor(SubprocessConfig(sandbox=request.param, default_timeout=60))
    yield made
    await asyncio.wait_for(made.close(), 60)


def session_of(executor: SubprocessExecutor) -> Any:
    return executor._connection


async def run_and_freeze(executor: SubprocessExecutor, code: str) -> None:
    """Run code, and wait for the snapshot that has what it did."""
    await executor.run(code)
    await frozen(executor)


async def frozen(executor: SubprocessExecutor) -> None:
    """Wait for a snapshot that has all variables."""
    connection = session_of(executor)
    await until(lambda: connection.transport.has_snapshot and not connection._changed)


async def test_without_a_run_there_is_no_snapshot_and_nothing_to_lose(executor: SubprocessExecutor) -> None:
    await executor.start()
    await executor.exec(["true"])
    assert not session_of(executor).transport.has_snapshot
    os.kill(pid_of(session_of(executor).transport._worker_fd), signal.SIGKILL)
    await until(lambda: not session_of(executor).worker_alive)
    result = await executor.run("x = 5")
    assert (result.error, result.state) == (None, "kept")
    await frozen(executor)
    assert (await executor.run("x")).value == 5


async def test_the_worker_is_killed_while_it_starts(executor: SubprocessExecutor) -> None:
    zygote = shared.take(ZygoteKey(sys.executable))
    await asyncio.wrap_future(zygote.ready)
    before = descendants(zygote.pid)
    starting = asyncio.ensure_future(executor.start())
    while not starting.done():
        for pid in descendants(zygote.pid).keys() - before.keys():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        await asyncio.sleep(0)
    zygote.release()
    if starting.exception() is not None:
        assert isinstance(starting.exception(), SpawnFailed)
    await executor.run("1")
    assert (await executor.run("1 + 1")).value == 2


async def test_an_interrupt_that_came_right_before_a_system_call_ends_it(
    executor: SubprocessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python sees it only when the call ends, however long that takes; so another signal follows."""
    await executor.run("import signal, time")
    transport, sent = session_of(executor).transport, []
    plain = transport.signal

    def signalled(number: int) -> None:
        sent.append(number)
        if number != signal.SIGINT:
            plain(number)

    monkeypatch.setattr(transport, "signal", signalled)
    # As one that Python has received and not handled yet: it is seen when the sleep is disturbed.
    code = "signal.signal(signal.SIGWINCH, signal.default_int_handler)\ntime.sleep(60)"
    running = asyncio.create_task(executor.run(code))
    await asyncio.sleep(0.3)
    assert await executor.interrupt()
    assert (await running).error_type == "KeyboardInterrupt"
    assert sent[:2] == [signal.SIGINT, signal.SIGWINCH]


async def test_the_signal_that_follows_an_interrupt_means_nothing_by_itself(executor: SubprocessExecutor) -> None:
    result = await executor.run("import os, signal\nos.kill(os.getpid(), signal.SIGWINCH)\n'still here'")
    assert result.value == "still here"
    result = await executor.run("seen = []\n_ = signal.signal(signal.SIGWINCH, lambda *_: seen.append(1))")
    assert result.error is None
    assert (await executor.run("os.kill(os.getpid(), signal.SIGWINCH)\nlen(seen)")).value == 1


async def test_an_interrupt_right_after_the_start_is_not_lost(
    executor: SubprocessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where init, on a busy machine, names the worker long after that has begun to speak."""
    heard = InitClient._on_record

    def late(self: InitClient, record: dict[str, Any], fds: list[int]) -> None:
        if record.get("op") == "worker":
            asyncio.get_running_loop().call_later(0.3, heard, self, record, fds)
        else:
            heard(self, record, fds)

    monkeypatch.setattr(InitClient, "_on_record", late)
    await executor.start()
    running = asyncio.ensure_future(executor.run("while True: pass"))
    await asyncio.sleep(0.05)
    assert await executor.interrupt()
    assert (await asyncio.wait_for(running, 60)).error_type == "KeyboardInterrupt"


async def test_the_place_that_was_built_ahead_is_killed() -> None:
    """Whenever that happens, the next session starts."""
    zygote = shared.take(ZygoteKey(sys.executable))
    await asyncio.wrap_future(zygote.ready)
    killed = 0
    for _ in range(20):
        async with SubprocessExecutor(SubprocessConfig(sandbox="required")) as executor:
            assert (await executor.run("1 + 1")).value == 2
            own = {session_of(executor).transport.init.pid} | descendants(
                session_of(executor).transport.init.pid
            ).keys()
            await asyncio.sleep(0.05)
            for pid in descendants(zygote.pid).keys() - own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
    zygote.release()
    assert killed > 10


async def test_the_worker_is_killed_between_runs_and_nothing_is_lost(executor: SubprocessExecutor) -> None:
    await run_and_freeze(executor, "x = 5")
    session_of(executor).kill()
    await asyncio.sleep(0.1)
    result = await executor.run("x + 1")
    assert (result.value, result.error) == (6, None)


async def test_the_worker_is_killed_before_what_a_run_did_was_kept(executor: SubprocessExecutor) -> None:
    for _ in range(20):
        await run_and_freeze(executor, "x = 1\ny = len([x])")
        await executor.run("x = 2\ny = len([x])")
        session_of(executor).transport.signal(signal.SIGKILL)
        await until(lambda: not session_of(executor).worker_alive)
        result = await executor.run("x")
        # Where the machine paused in between, the fork was made in time.
        assert (result.state, result.value) in (("restored", 1), ("kept", 2))
        if result.state == "restored":
            assert "changes to the variables are gone" in result.state_reason
            assert (await executor.run("x")).state == "kept"
            return
    raise AssertionError("the fork was always made in time")


async def test_a_loss_is_reported_by_the_next_run_also_where_a_request_or_a_fork_met_the_end(
    executor: SubprocessExecutor,
) -> None:
    requests: list[Callable[[], Any]] = [executor.variables, lambda: executor.set_variables({"z": 1})]
    if executor.config.sandbox == "required":
        requests.append(executor.fork)
    for ask in requests:
        states = set()
        for _ in range(20):
            await run_and_freeze(executor, "x = 1\ny = len([x])")
            await executor.run("x = 2\ny = len([x])")
            forking = asyncio.ensure_future(ask())
            await asyncio.sleep(0)
            session_of(executor).transport.signal(signal.SIGKILL)
            with contextlib.suppress(WorkerLost, ForkRefused):
                made = await forking
                if isinstance(made, SubprocessExecutor):
                    await made.close()
            result = await executor.run("x")
            assert (result.state, result.value) in (("restored", 1), ("kept", 2))
            states.add(result.state)
            assert (await executor.run("x")).state == "kept"
            if "restored" in states:
                break
        assert "restored" in states, "the fork was always made in time"


@pytest.mark.slow
async def test_a_snapshot_that_does_not_go_on_costs_the_variables_and_not_the_files(
    executor: SubprocessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await executor.start()
    monkeypatch.setattr(connection, "READY", 10.0)
    await run_and_freeze(
        executor,
        "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(1000))\nopen('f', 'w').write('kept')",
    )
    result = await executor.run("os.kill(os.getpid(), 9)")
    assert (result.error_type, result.state) == ("Crashed", "lost")
    assert "did not continue" in result.state_reason
    assert (await executor.run("open('f').read()")).value == "kept"


async def test_there_is_one_snapshot_at_every_moment(executor: SubprocessExecutor) -> None:
    """The next is handed over before the last one goes: a kill in between would cost both."""
    for n in range(60):
        await run_and_freeze(executor, "x = 1\ny = len([x])")
        await executor.run("x = 2\ny = len([x])")
        end = time.monotonic() + 0.001 + n % 30 * 0.0001
        while time.monotonic() < end:  # not asleep, which would take longer than this
            pass
        session_of(executor).transport.signal(signal.SIGKILL)
        await until(lambda: not session_of(executor).worker_alive)
        result = await executor.run("x")
        assert (result.state, result.value) in (("restored", 1), ("kept", 2)), result.state_reason


async def test_the_worker_is_killed_while_it_runs(executor: SubprocessExecutor) -> None:
    executor.handlers["here"] = here = Here()
    await executor.run("x = 5")
    running = asyncio.ensure_future(executor.run("x = 6\nhere()\nwhile True: pass"))
    await here.came()
    os.kill(pid_of(session_of(executor).transport._worker_fd), signal.SIGKILL)
    result = await running
    assert (result.error_type, result.state) == ("Crashed", "restored")
    assert "SIGKILL" in (result.error or "")
    assert (await executor.run("x")).value == 5


async def test_the_worker_is_killed_in_a_host_call(executor: SubprocessExecutor) -> None:
    async def kill(name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        os.kill(pid_of(session_of(executor).transport._worker_fd), signal.SIGKILL)
        await asyncio.sleep(600)

    executor.handlers["kill"] = kill
    await executor.run("x = 5")
    result = await executor.run("kill()")
    assert (result.error_type, result.state) == ("Crashed", "restored")
    assert (await executor.run("x")).value == 5


async def test_the_worker_is_killed_beside_a_command(executor: SubprocessExecutor) -> None:
    await run_and_freeze(executor, "x = 5")
    begun = asyncio.Event()
    waits = "echo begun; while ! [ -e go ]; do sleep 0.01; done; echo done"
    running = asyncio.ensure_future(executor.exec(waits, on_output=lambda _: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    session_of(executor).kill()
    await until(lambda: not session_of(executor).worker_alive)
    assert (await executor.run("x")).value == 5
    await executor.write_file("go", "")
    assert (await running).stdout == "begun\ndone\n"


async def test_the_worker_is_killed_in_a_fork() -> None:
    async with SubprocessExecutor(SubprocessConfig(sandbox="required")) as executor:
        await run_and_freeze(executor, "x = 5")
        for pause in (0.0, 0.001, 0.003, 0.006, 0.01):
            forking = asyncio.ensure_future(executor.fork())
            await asyncio.sleep(pause)
            session_of(executor).kill()
            try:
                fork = await forking
                assert (await fork.run("x")).value == 5
                await fork.close()
            except ForkRefused:
                pass  # Refused because it died: that is the answer.
            assert (await executor.run("x")).value == 5
            await frozen(executor)


async def test_the_worker_is_killed_while_it_is_closed(executor: SubprocessExecutor) -> None:
    await executor.run("1")
    processes = descendants(session_of(executor).transport.init.pid)
    closing = asyncio.ensure_future(executor.close())
    session_of(executor).kill() if session_of(executor) else None
    await closing
    assert alive(processes) == []


async def test_closed_while_it_is_forked() -> None:
    for number in range(10):
        executor = SubprocessExecutor(SubprocessConfig(sandbox="required"))
        await executor.run("x = 5")
        forking = asyncio.ensure_future(executor.fork())
        await asyncio.sleep(number * 0.001)
        await executor.close()
        try:
            fork = await forking
        except (ExecutorClosed, ForkRefused):
            continue
        assert (await fork.run("x")).value == 5
        await fork.close()


FORGED_SNAPSHOT = """
import json, os, socket
pidfd, (ours, theirs) = os.pidfd_open({pid}), socket.socketpair()
body = json.dumps({{"op": "snapshot", "pid": {pid}, "covers": 1, "fds": 2}}).encode()
for name in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{{name}}") and os.readlink(f"/proc/self/fd/{{name}}").startswith("socket:"):
        end = socket.socket(fileno=os.dup(int(name)))
        if end not in (ours, theirs):
            try: socket.send_fds(end, [len(body).to_bytes(4, "big") + body], [theirs.fileno(), pidfd])
            except OSError: pass
theirs.close(), ours.close()
os._exit(1)
"""


async def test_a_worker_cannot_have_the_host_signal_a_process_of_its_choice() -> None:
    """Without a pid namespace it can open the pidfd of any process of its user."""
    with subprocess.Popen(["sleep", "60"]) as bystander:
        async with SubprocessExecutor(SubprocessConfig(sandbox="off")) as executor:
            await executor.run("x = 1")
            result = await executor.run(FORGED_SNAPSHOT.format(pid=bystander.pid))
            assert result.error_type == "Crashed"
            assert (await executor.run("1 + 1")).value == 2
        assert bystander.poll() is None
        bystander.kill()


async def test_the_snapshot_is_killed_too(executor: SubprocessExecutor) -> None:
    await run_and_freeze(executor, "x = 5")
    os.kill(pid_of(session_of(executor).transport._snapshot[1]), signal.SIGKILL)
    result = await executor.run("import os; os._exit(1)")
    assert result.state in ("restored", "lost")  # A new one may have been made before the code ran.
    assert (await executor.run("1 + 1")).value == 2


async def test_init_is_killed(executor: SubprocessExecutor) -> None:
    await executor.run("x = 5")
    init = session_of(executor).transport.init.pid
    processes = descendants(init)
    os.kill(init, signal.SIGKILL)
    assert await asyncio.to_thread(wait_gone, dict(list(processes.items())[:1])) == []
    result = await executor.run("x")
    assert (result.error_type, result.state) == ("Crashed", "lost")
    confined = executor.config.sandbox == "required"
    assert ("what was changed in its files is gone too" in result.state_reason) == confined
    assert ("died with all its processes" in executor.lost) == confined
    assert (await executor.run("1 + 1")).value == 2
    assert await asyncio.to_thread(wait_gone, processes) == []


async def test_init_is_killed_under_a_command() -> None:
    async with SubprocessExecutor(SubprocessConfig(sandbox="required")) as executor:
        await executor.write_file("made.txt", "here")
        begun = asyncio.Event()
        running = asyncio.ensure_future(executor.exec("echo begun; sleep 300", on_output=lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), 60)
        os.kill(session_of(executor).transport.init.pid, signal.SIGKILL)
        with pytest.raises(WorkspaceLost, match="what was changed in its files is gone"):
            await running
        with pytest.raises(FileNotFoundError):
            await executor.read_file("made.txt")
        assert executor.lost


async def test_a_worker_that_dies_takes_no_files_with_it(executor: SubprocessExecutor) -> None:
    await executor.write_file("made.txt", "here")
    session_of(executor).kill()
    with contextlib.suppress(WorkerLost):
        await executor.exec("true")
    assert await executor.read_file("made.txt") == b"here"
    assert executor.lost == ""


async def test_a_zygote_end_that_was_not_noticed_costs_the_next_start_nothing(
    executor: SubprocessExecutor,
) -> None:
    await executor.start()
    assert executor._connection
    zygote = executor._connection.transport.zygote
    assert zygote is not None
    zygote._control.socket.shutdown(socket.SHUT_WR)
    async with SubprocessExecutor(executor.config) as other:
        assert (await other.run("2")).value == 2
        assert other._connection
        assert other._connection.transport.zygote is not zygote


async def test_the_zygote_is_killed_and_the_next_start_makes_a_new_one(executor: SubprocessExecutor) -> None:
    await executor.run("x = 5")
    assert executor._connection
    zygote = executor._connection.transport.zygote
    assert zygote is not None
    sessions = descendants(zygote.pid)
    assert sessions
    os.kill(zygote.pid, signal.SIGKILL)
    assert await asyncio.to_thread(wait_gone, sessions) == []
    result = await executor.run("x")
    assert (result.error_type, result.state) == ("Crashed", "lost")
    assert (await executor.run("1 + 1")).value == 2
    async with SubprocessExecutor(executor.config) as other:
        assert (await other.run("2")).value == 2
        assert other._connection
        assert other._connection.transport.zygote is not zygote


async def test_an_unused_zygote_is_ended() -> None:
    zygotes = Zygotes(idle=0.2)
    zygote = zygotes.take(ZygoteKey(sys.executable))
    await asyncio.wrap_future(zygote.ready)
    began = {zygote.pid: started(zygote.pid) or ""}
    await asyncio.sleep(0.5)
    assert alive(began) == [zygote.pid]
    zygote.release()
    assert await asyncio.to_thread(wait_gone, began) == []
    other = zygotes.take(ZygoteKey(sys.executable))
    assert other is not zygote
    other.release()
    await asyncio.to_thread(zygotes.end_all)


async def test_a_zygote_that_does_not_read_blocks_nothing() -> None:
    zygotes = Zygotes()
    zygote = zygotes.take(ZygoteKey(sys.executable))
    await asyncio.wrap_future(zygote.ready)
    os.kill(zygote.pid, signal.SIGSTOP)
    requests = [zygote.spawn({"filler": "x" * 10_000}, []) for _ in range(500)]
    assert not any(request.done() for request in requests)
    for request in requests[1:]:
        request.cancel()
    os.kill(zygote.pid, signal.SIGCONT)
    with pytest.raises(SpawnFailed):
        await asyncio.wait_for(asyncio.wrap_future(requests[0]), 60)
    zygote.release()
    await asyncio.to_thread(zygotes.end_all)


async def test_a_zygote_that_does_not_read_can_be_ended() -> None:
    zygotes = Zygotes()
    zygote = zygotes.take(ZygoteKey(sys.executable))
    await asyncio.wrap_future(zygote.ready)
    os.kill(zygote.pid, signal.SIGSTOP)
    requests = [zygote.spawn({"filler": "x" * 10_000}, []) for _ in range(500)]
    await asyncio.wait_for(asyncio.to_thread(zygotes.end_all), 60)
    with pytest.raises(SpawnFailed):
        await asyncio.wait_for(asyncio.wrap_future(requests[-1]), 60)


async def test_the_event_loop_goes_on_while_a_workspace_is_read(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / f"{number}").write_text("x")
    executor = InProcessExecutor(InProcessConfig(workspace=tmp_path))
    starting, turns = asyncio.ensure_future(executor.start()), 0
    while not starting.done():
        await asyncio.sleep(0)
        turns += 1
    await executor.close()
    assert turns > 20


async def test_a_python_that_does_not_start_is_named() -> None:
    zygotes = Zygotes()
    zygote = zygotes.take(ZygoteKey("/usr/bin/false"))
    with pytest.raises(SpawnFailed, match="/usr/bin/false"):
        await asyncio.wrap_future(zygote.ready)


async def test_a_python_that_writes_much_while_it_starts(tmp_path: Path) -> None:
    python = tmp_path / "python"
    flood = "head -c 1000000 /dev/zero | tr '\\0' x >&2; echo the last line >&2"
    python.write_text(f'#!/bin/sh\n{flood}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    zygotes = Zygotes()
    zygote = zygotes.take(ZygoteKey(str(python)))
    found = await asyncio.wait_for(asyncio.wrap_future(zygote.ready), 30)
    assert found["pid"] == zygote.pid
    zygote.release()
    await asyncio.to_thread(zygotes.end_all)
    python.write_text(f"#!/bin/sh\n{flood}\n")
    with pytest.raises(SpawnFailed, match="the last line"):
        await asyncio.wait_for(asyncio.wrap_future(zygotes.take(ZygoteKey(str(python))).ready), 30)


ELSEWHERE = """
import asyncio, os, sys
from pathlib import Path
os.chdir(sys.argv[1])
from carrel.execution.config import SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor
async def main():
    async with SubprocessExecutor(SubprocessConfig(sandbox="required", workspace=Path("."))) as executor:
        print((await executor.run("open('f').read()")).value)
asyncio.run(main())
"""


def test_a_workspace_below_tmp_in_the_folder_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("given")
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("given\n", "")


HOST = """
import asyncio, sys
from carrel.execution.config import Limits, SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.execution.capabilities import probe
async def main():
    modes = ["required"] * 14 + ["off"] * 6
    held = any(part.name == "memory" and part.in_force for part in probe())
    limits = {"required": Limits(memory="4GiB" if held else None), "off": Limits()}
    executors = [SubprocessExecutor(SubprocessConfig(sandbox=mode, limits=limits[mode])) for mode in modes]
    await asyncio.gather(*(one.start() for one in executors))
    code = "import os\\nos.system('sleep 300 &')\\nprint('on', flush=True)\\nwhile True: pass"
    runs = [one.stream(code, timeout=600) for one in executors]
    await asyncio.gather(*(anext(run) for run in runs))
    print("ready", flush=True)
    await asyncio.gather(*(anext(run) for run in runs))
asyncio.run(main())
"""


def test_the_host_is_killed_while_twenty_sessions_run(tmp_path: Path) -> None:
    before = mounts()
    host = subprocess.Popen(
        [sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "ready\n"
    processes = descendants(host.pid)
    assert len(processes) > 60
    assert groups_of(set(processes)) or not any(part.name == "memory" and part.in_force for part in probe())
    assert any(tmp_path.iterdir())
    host.kill()
    host.wait()
    host.stdout.close()
    end = time.monotonic() + 60
    assert [named(pid) for pid in wait_gone(processes)] == []
    next_host = "from carrel.execution import temp_dirs; temp_dirs.remove_abandoned()"
    subprocess.run([sys.executable, "-c", next_host], check=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
    assert mounts() == before
    while groups_of(set(processes)) and time.monotonic() < end:
        time.sleep(0.01)
    assert groups_of(set(processes)) == []


def named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def pid_of(pidfd: int) -> int:
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("Pid:")))
