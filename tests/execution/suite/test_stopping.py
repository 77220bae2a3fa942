"""Stopping code: timeouts, interrupts, cancelled callers, closing; the variables survive."""

from __future__ import annotations

import asyncio

import pytest

from carrel.execution.executor import Executor
from tests.execution.conftest import Start


async def test_a_timeout_interrupts_and_keeps_the_variables(executor: Executor) -> None:
    await executor.run("x = 5")
    result = await executor.run("print('begun')\nx = 6\nwhile True: pass", timeout=0.3)
    assert (result.error_type, result.state, result.stdout) == ("Timeout", "kept", "begun\n")
    assert "0.3 s" in (result.error or "")
    assert (await executor.run("x")).value == 6


async def test_the_executors_own_timeout_holds_when_a_run_names_none(start: Start) -> None:
    executor = start(default_timeout=0.3)
    assert (await executor.run("while True: pass")).error_type == "Timeout"
    assert (await executor.run("1")).value == 1


async def test_no_timeout_at_all(start: Start) -> None:
    executor = start(default_timeout=None)
    assert (await executor.run("import time; time.sleep(0.2); 1")).value == 1
    assert (await executor.run("1", timeout=float("inf"))).value == 1


@pytest.mark.promise("stops anything")
async def test_sleeping_code_is_interrupted(executor: Executor) -> None:
    result = await executor.run("import time\ntime.sleep(60)", timeout=0.2)
    assert (result.error_type, result.state) == ("Timeout", "kept")


async def test_waiting_code_is_interrupted(executor: Executor) -> None:
    result = await executor.run("import asyncio\nx = 1\nawait asyncio.sleep(60)", timeout=0.2)
    assert (result.error_type, result.state) == ("Timeout", "kept")
    assert (await executor.run("x")).value == 1
    assert (await executor.run("await asyncio.sleep(0, 2)")).value == 2


@pytest.mark.promise("stops anything")
async def test_code_that_will_not_stop_is_killed_and_the_variables_are_restored(start: Start) -> None:
    executor = start(grace=0.3)
    await executor.run("x = 5")
    code = "import time\nx = 6\nwhile True:\n    try:\n"
    code += "        while True: time.sleep(0.01)\n    except BaseException: pass"
    result = await executor.run(code, timeout=0.2)
    assert (result.error_type, result.state) == ("Timeout", "restored")
    assert "killed" in (result.error or "")
    assert (await executor.run("x")).value == 5


async def test_interrupt_stops_the_code_and_keeps_the_variables(executor: Executor) -> None:
    await executor.run("x = 5")
    assert await executor.interrupt() is False
    running = asyncio.ensure_future(executor.run("x = 6\nprint('on')\nwhile True: pass"))
    await asyncio.sleep(0.2)
    assert await executor.interrupt() is True
    result = await asyncio.wait_for(running, 10)
    assert (result.error_type, result.state, result.stdout) == ("KeyboardInterrupt", "kept", "on\n")
    assert (await executor.run("x")).value == 6


async def test_an_interrupt_is_not_lost_when_the_code_has_only_just_begun(executor: Executor) -> None:
    for number in range(30):
        # Something to freeze before the next one, which takes a moment.
        await executor.run(f"kept = {number}\nprint(kept)")
        running = asyncio.create_task(executor.run("import time\nwhile True: time.sleep(0.01)", timeout=30))
        for _ in range(100_000):
            if await executor.interrupt():
                break
            await asyncio.sleep(0)
        assert (await running).error_type == "KeyboardInterrupt"
        assert (await executor.run("kept")).value == number


async def test_code_may_catch_the_interrupt(executor: Executor) -> None:
    code = "import time\ntry:\n    while True: time.sleep(0.01)\nexcept KeyboardInterrupt:\n    caught = 'yes'\ncaught"
    running = asyncio.ensure_future(executor.run(code))
    await asyncio.sleep(0.2)
    await executor.interrupt()
    assert (await asyncio.wait_for(running, 10)).value == "yes"


async def test_cancelling_the_caller_stops_the_code(executor: Executor) -> None:
    await executor.run("n = 0")
    running = asyncio.ensure_future(executor.run("while True: n += 1"))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    first = (await executor.run("n")).value
    await asyncio.sleep(0.05)
    assert (await executor.run("n")).value == first > 0


async def test_a_cancelled_caller_in_the_queue_never_runs(executor: Executor) -> None:
    first = asyncio.ensure_future(executor.run("import time; time.sleep(0.2); ran = []"))
    second = asyncio.ensure_future(executor.run("ran.append(2)"))
    third = asyncio.ensure_future(executor.run("ran.append(3)"))
    await asyncio.sleep(0.05)
    second.cancel()
    await asyncio.wait([first, second, third])
    assert (await executor.run("ran")).value == [3]


async def test_wait_for_works_as_a_timeout_too(executor: Executor) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(executor.run("while True: pass"), 0.2)
    assert (await executor.run("1 + 1")).value == 2


async def test_close_during_a_run_ends_it_with_a_result(executor: Executor) -> None:
    await executor.start()
    running = asyncio.ensure_future(executor.run("while True: pass"))
    waiting = asyncio.ensure_future(executor.run("1"))
    await asyncio.sleep(0.2)
    await asyncio.wait_for(executor.close(), 10)
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
    ("code", "said"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
async def test_a_crash_costs_the_run_and_not_the_session(executor: Executor, code: str, said: str) -> None:
    await executor.run("x = [1, 2]")
    for _ in range(2):
        result = await executor.run(f"x.append(3)\nprint('so far')\n{code}", timeout=30)
        assert (result.error_type, result.state, result.stdout) == ("Crashed", "restored", "so far\n")
        assert said in (result.error or "")
        assert (await executor.run("x")).value == [1, 2]


@pytest.mark.promise("survives the end of its process")
async def test_where_no_frozen_fork_could_be_kept_the_result_says_lost_and_why(executor: Executor) -> None:
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
