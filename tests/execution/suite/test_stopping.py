"""Stopping code: timeouts, interrupts, cancelled callers, closing; the variables survive."""

from __future__ import annotations

import asyncio
import random

import pytest

from carrel.execution.executor import Executor
from tests.execution.conftest import Here, Start


async def test_a_timeout_interrupts_and_keeps_the_variables(executor: Executor) -> None:
    await executor.run("x = 5")
    result = await executor.run("print('begun')\nx = 6\nwhile True: pass", timeout=1)
    assert (result.error_type, result.state, result.stdout) == ("Timeout", "kept", "begun\n")
    assert "1 s" in (result.error or "")
    assert (await executor.run("x")).value == 6


async def test_the_executors_own_timeout_holds_when_a_run_names_none(start: Start) -> None:
    executor = start(default_timeout=0.3)
    assert (await executor.run("while True: pass")).error_type == "Timeout"
    assert (await executor.run("1", timeout=60)).value == 1


async def test_no_timeout_at_all(start: Start) -> None:
    executor = start(default_timeout=None)
    assert (await executor.run("import time; time.sleep(0.2); 1")).value == 1
    assert (await executor.run("1", timeout=float("inf"))).value == 1


@pytest.mark.promise("stops anything")
async def test_sleeping_code_is_interrupted(executor: Executor) -> None:
    result = await executor.run("import time\ntime.sleep(60)", timeout=0.2)
    assert (result.error_type, result.state) == ("Timeout", "kept")


async def test_waiting_code_is_interrupted(executor: Executor) -> None:
    await executor.run("import asyncio")
    result = await executor.run("x = 1\nawait asyncio.sleep(60)", timeout=1)
    assert (result.error_type, result.state) == ("Timeout", "kept")
    assert (await executor.run("x")).value == 1
    assert (await executor.run("await asyncio.sleep(0, 2)")).value == 2


async def test_a_timeout_is_reported_whatever_the_code_raises_then(executor: Executor) -> None:
    code = "class Closed(Exception): pass\ntry:\n    while True: pass\nexcept KeyboardInterrupt:\n    raise Closed"
    result = await executor.run(code, timeout=1)
    assert (result.error_type, result.state) == ("Timeout", "kept")


@pytest.mark.promise("stops anything")
async def test_code_that_will_not_stop_is_killed_and_the_variables_are_restored(start: Start) -> None:
    executor = start(grace=0.3)
    await executor.run("x = 5")
    code = "import time\nx = 6\nwhile True:\n    try:\n"
    code += "        while True: time.sleep(0.01)\n    except BaseException: pass"
    result = await executor.run(code, timeout=1)
    assert (result.error_type, result.state) == ("Timeout", "restored")
    assert "killed" in (result.error or "")
    assert (await executor.run("x")).value == 5


async def test_interrupt_stops_the_code_and_keeps_the_variables(start: Start) -> None:
    here = Here()
    executor = start(handlers={"here": here})
    await executor.run("x = 5")
    assert await executor.interrupt() is False
    running = asyncio.ensure_future(executor.run("x = 6\nprint('on')\nhere()\nwhile True: pass"))
    await here.came()
    assert await executor.interrupt() is True
    result = await asyncio.wait_for(running, 60)
    assert (result.error_type, result.state, result.stdout) == ("KeyboardInterrupt", "kept", "on\n")
    assert (await executor.run("x")).value == 6


async def test_an_interrupt_is_not_lost_when_the_code_has_only_just_begun(executor: Executor) -> None:
    for number in range(30):
        # Something to freeze before the next one, which takes a moment.
        await executor.run(f"kept = {number}\nprint(kept)")
        running = asyncio.create_task(executor.run("import time\nwhile True: time.sleep(0.01)", timeout=60))
        for _ in range(100_000):
            if await executor.interrupt():
                break
            await asyncio.sleep(0)
        assert (await running).error_type == "KeyboardInterrupt"
        assert (await executor.run("kept")).value == number


async def test_code_may_catch_the_interrupt(start: Start) -> None:
    here = Here()
    executor = start(handlers={"here": here})
    code = "import time\ntry:\n    here()\n    while True: time.sleep(0.01)\n"
    code += "except KeyboardInterrupt:\n    caught = 'yes'\ncaught"
    running = asyncio.ensure_future(executor.run(code))
    await here.came()
    await executor.interrupt()
    assert (await asyncio.wait_for(running, 60)).value == "yes"


async def test_cancelling_the_caller_stops_the_code(start: Start) -> None:
    here = Here()
    executor = start(handlers={"here": here})
    await executor.run("n = 0")
    running = asyncio.ensure_future(executor.run("n += 1\nhere()\nwhile True: n += 1"))
    await here.came()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    first = (await executor.run("n")).value
    await asyncio.sleep(0.05)
    assert (await executor.run("n")).value == first > 0


async def test_a_caller_that_is_cancelled_twice_stops_the_code(start: Start) -> None:
    here = Here()
    executor = start(grace=0.5, handlers={"here": here})
    code = "import time\nn = 0\nwhile n < 3_000_000:\n    try:\n        here.once() if n == 0 else None\n"
    code += "        while True: n += 1; time.sleep(0.001)\n    except BaseException: n += 1"
    running = asyncio.ensure_future(executor.run(code))
    await here.came()
    running.cancel()
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await executor.run("1 + 1", timeout=20)).value == 2
    # It was killed, or left behind where nothing can be killed.
    assert (await executor.run("n")).error_type == "NameError"


async def test_a_caller_that_is_cancelled_twice_ends_the_command(executor: Executor) -> None:
    wrote = asyncio.Event()
    command = "trap '' TERM INT; echo here; sleep 400; touch over"
    running = asyncio.ensure_future(executor.exec(command, on_output=lambda output: wrote.set()))
    await asyncio.wait_for(wrote.wait(), 60)
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await asyncio.wait_for(executor.exec("echo on"), 60)).stdout == "on\n"
    async with asyncio.timeout(60):
        while await executor.processes():
            pass


async def test_a_cancelled_caller_in_the_queue_never_runs(start: Start) -> None:
    here = Here()
    executor = start(handlers={"here": here})
    first = asyncio.ensure_future(executor.run("here.wait(); ran = []"))
    second = asyncio.ensure_future(executor.run("ran.append(2)"))
    third = asyncio.ensure_future(executor.run("ran.append(3)"))
    await here.came()
    second.cancel()
    here.go_on.set()
    await asyncio.wait([first, second, third])
    assert (await executor.run("ran")).value == [3]


async def test_wait_for_works_as_a_timeout_too(executor: Executor) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(executor.run("while True: pass"), 0.2)
    assert (await executor.run("1 + 1")).value == 2


async def test_close_during_a_run_ends_it_with_a_result(start: Start) -> None:
    here = Here()
    executor = start(handlers={"here": here})
    running = asyncio.ensure_future(executor.run("here()\nwhile True: pass"))
    waiting = asyncio.ensure_future(executor.run("1"))
    await here.came()
    await asyncio.wait_for(executor.close(), 60)
    for result in (await running, await waiting):
        assert (result.error, result.error_type) == ("Session is closed", "Closed")


async def test_close_while_it_starts(start: Start) -> None:
    executor = start()
    running = asyncio.ensure_future(executor.run("1"))
    await asyncio.sleep(0)
    await executor.close()
    assert (await running).error_type in ("Closed", None)
    assert (await executor.run("1")).error_type == "Closed"


@pytest.mark.promise("survives the end of its process")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
async def test_a_crash_costs_the_run_and_not_the_session(executor: Executor, code: str, message: str) -> None:
    await executor.run("x = [1, 2]")
    for _ in range(2):
        result = await executor.run(f"x.append(3)\nprint('so far')\n{code}", timeout=60)
        assert (result.error_type, result.state, result.stdout) == ("Crashed", "restored", "so far\n")
        assert message in (result.error or "")
        assert (await executor.run("x")).value == [1, 2]


@pytest.mark.promise("survives the end of its process")
async def test_where_no_snapshot_could_be_kept_the_result_says_lost_and_why(executor: Executor) -> None:
    await executor.write_file("kept.txt", "files stay")
    await executor.run("import threading, time, os\nx = 5\nthreading.Thread(target=time.sleep, args=(60,)).start()")
    result = await executor.run("os._exit(1)")
    assert (result.error_type, result.state) == ("Crashed", "lost")
    assert "thread" in result.state_reason
    assert (await executor.run("x")).error_type == "NameError"
    assert await executor.read_file("kept.txt") == b"files stay"


@pytest.mark.promise("survives the end of its process")
async def test_killing_its_own_parent(executor: Executor) -> None:
    await executor.run("x = 5")
    await executor.run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nimport time; time.sleep(0.3)")
    result = await executor.run("1 + 1")
    assert result.value == 2


# As `pkill python` and `pkill -f python` go about it, run by a server that was started a while ago.
ALL_PYTHONS = """
import os, signal, subprocess, sys
other = subprocess.Popen(
    [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE
)
other.stdout.readline()  # a process has its name a moment after Popen has come back
ended = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        names = [open(f"/proc/{pid}/{file}").read() for file in ("comm", "cmdline")]
        if any("python" in name for name in names) and os.stat(f"/proc/{pid}").st_uid in (os.getuid(), 65534):
            os.kill(int(pid), signal.SIGTERM)
            ended.append(int(pid))
    except (OSError, ProcessLookupError):
        pass
ended == [other.pid], other.wait(60)
"""


@pytest.mark.promise("survives the end of its process")
@pytest.mark.promise("a file system of its own")
async def test_ending_all_programs_called_python_ends_none_of_the_sessions_own(executor: Executor) -> None:
    await executor.run("x = 5")
    result = await executor.run(ALL_PYTHONS)
    assert result.value == (True, -15), result
    assert result.state == "kept"
    assert (await executor.run("x")).value == 5


def stops_all(kind: str) -> str:
    """As a shell says it. Without a sandbox only the worker: all processes would be those of the machine."""
    return {"in-process": "kill -STOP $$", "subprocess": "kill -STOP $PPID"}.get(kind, "kill -STOP -1")


async def test_a_command_that_stops_all_processes_ends_when_its_time_is_up(
    executor: Executor, executor_kind: str
) -> None:
    await executor.run("x = 5")
    result = await executor.exec(f"echo on; {stops_all(executor_kind)}; sleep 600", timeout=2)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "on\n")
    assert await executor.processes() == []
    assert (await executor.run("x")).value == 5


@pytest.mark.promise("survives the end of its process")
async def test_a_command_that_stops_all_processes_for_ever_ends_when_its_time_is_up(
    executor: Executor, executor_kind: str
) -> None:
    await executor.run("x = 5")
    result = await executor.exec(f"while :; do {stops_all(executor_kind)}; done", timeout=1)
    assert (result.exit_code, result.timed_out) == (124, True)
    assert await executor.processes() == []
    assert (await executor.run("x")).value == 5


@pytest.mark.promise("survives the end of its process")
async def test_files_are_read_also_after_something_has_stopped_all_processes(
    executor: Executor, executor_kind: str
) -> None:
    await executor.write_file("kept.txt", "kept")
    # Its own shell has ended when it stops all others: a stopped one would be waited for.
    await executor.exec(f"(while ! [ -e go ]; do sleep 0.01; done; {stops_all(executor_kind)}; touch gone) &")
    await executor.write_file("go", "")
    await asyncio.sleep(0.2)
    assert await executor.read_file("kept.txt") == b"kept"


@pytest.mark.promise("survives the end of its process")
async def test_code_that_stops_all_processes_ends_when_its_time_is_up(start: Start, executor_kind: str) -> None:
    executor = start(grace=0.5)
    await executor.run("import subprocess\nx = 5")
    command = f"{stops_all(executor_kind)}; sleep 600"
    for _ in range(2):
        result = await executor.run(f"x = 6; subprocess.run({command!r}, shell=True)", timeout=0.5)
        assert result.error_type == "Timeout"
        # Where it was continued before the grace was over, the interrupt has reached it.
        assert (await executor.run("x")).value == {"restored": 5, "kept": 6}[result.state]
        await executor.run("x = 5")


@pytest.mark.promise("survives the end of its process")
@pytest.mark.promise("a file system of its own")
async def test_a_snapshot_that_the_code_has_stopped_is_continued(executor: Executor) -> None:
    await executor.run("import os, signal\nx = 5")
    result = await executor.run("x = 6; os.kill(-1, signal.SIGSTOP); os._exit(1)")
    assert (result.error_type, result.state) == ("Crashed", "restored")
    assert (await executor.run("x")).value == 5


async def sleepers(executor: Executor, tail: str) -> list[str]:
    """What sleeps for so long; the tail of the number tells one test's from another's on the same machine."""
    seen = (await executor.exec(f"ps ax -o args | grep '^sleep 44[.].{tail}$' | sort || true")).stdout
    return [line.removeprefix("sleep 44.").removesuffix(tail) for line in seen.splitlines()]


@pytest.mark.promise("ends what a stopped run has started")
async def test_what_a_stopped_run_had_started_goes_with_it(executor: Executor) -> None:
    tail = f"{random.randrange(10**6):06}"
    await executor.run(f"import subprocess, time; before = subprocess.Popen(['sleep', '44.1{tail}'])")
    await executor.exec(f"sleep 44.2{tail} & true")
    apart = f"apart = subprocess.Popen(['sleep', '44.3{tail}'], start_new_session=True)\n"
    result = await executor.run(apart + f"subprocess.run('sleep 44.4{tail}; true', shell=True)", timeout=0.5)
    assert (result.error_type, result.state) == ("Timeout", "kept")
    assert await sleepers(executor, tail) == ["1", "2", "3"]
    stubborn = f"subprocess.Popen(['sh', '-c', \"trap '' INT; sleep 44.5{tail}; true\"]); time.sleep(60)"
    running = asyncio.create_task(executor.run(stubborn))
    await asyncio.sleep(0.5)
    await executor.interrupt()
    assert (await running).error_type == "KeyboardInterrupt"
    assert await sleepers(executor, tail) == ["1", "2", "3"]
    assert (await executor.run("before.poll(), apart.poll()")).value == (None, None)


@pytest.mark.promise("ends what a stopped run has started")
async def test_what_a_killed_run_had_started_goes_with_it(start: Start) -> None:
    executor = start(grace=0.3)
    tail = f"{random.randrange(10**6):06}"
    await executor.run(f"import os, subprocess; before = subprocess.Popen(['sleep', '44.1{tail}'])")
    result = await executor.run(f"os.system('sleep 44.6{tail}; true')", timeout=0.3)
    assert (result.error_type, result.state) == ("Timeout", "restored")
    assert await sleepers(executor, tail) == ["1"]


@pytest.mark.promise("ends what a stopped run has started")
async def test_without_a_snapshot_all_that_code_had_started_goes_with_a_killed_run(start: Start) -> None:
    executor = start(grace=0.3)
    tail = f"{random.randrange(10**6):06}"
    threads = "import os, subprocess, threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
    await executor.run(threads + f"before = subprocess.Popen(['sleep', '44.1{tail}'])")
    await executor.exec(f"sleep 44.2{tail} & true")
    apart = f"apart = subprocess.Popen(['sleep', '44.3{tail}'], start_new_session=True)\n"
    result = await executor.run(apart + f"os.system('sleep 44.6{tail}; true')", timeout=0.3)
    assert (result.error_type, result.state) == ("Timeout", "lost")
    assert await sleepers(executor, tail) == ["2", "3"]  # those of a command, and of a kernel session of their own


@pytest.mark.promise("ends what a stopped run has started")
async def test_what_was_there_before_a_stopped_run_may_start_more_meanwhile(executor: Executor) -> None:
    tail = f"{random.randrange(10**6):06}"
    server = f"sh -c 'sleep 1; sleep 44.7{tail} & sleep 44.8{tail}; true'"
    await executor.run(f'import subprocess, time; server = subprocess.Popen("{server}", shell=True)')
    assert (await executor.run("subprocess.run(['sleep', '1.5']); time.sleep(60)", timeout=2)).error_type == "Timeout"
    assert await sleepers(executor, tail) == ["7", "8"]
