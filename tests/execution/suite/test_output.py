"""Output: bounded, whole, streamed, and never in another caller's result."""

from __future__ import annotations

import asyncio

import pytest

from carrel.execution.executor import ExecutionResult, Executor, Output
from tests.execution.conftest import Here, Start


async def test_output_is_cut_in_the_middle_and_says_by_how_much(start: Start) -> None:
    executor = start(output_limit=1000)
    result = await executor.run("print('a' * 600 + 'b' * 600)")
    assert result.stdout.startswith("a" * 500 + "\n[… ")
    assert result.stdout.endswith("b" * 499 + "\n")
    assert "201 bytes left out" in result.stdout


async def test_a_hundred_megabytes_of_which_nothing_is_in_the_next_result(executor: Executor) -> None:
    result = await executor.run("for _ in range(100): print('x' * 999_999)", timeout=60)
    assert result.error is None
    assert 10_000_000 < len(result.stdout) < 11_000_000
    assert "89,514,240 bytes left out" in result.stdout
    assert (await executor.run("print('next')")).stdout == "next\n"


async def test_pieces_come_while_the_code_runs(start: Start) -> None:
    here = Here()
    code = "import sys\nprint('one', flush=True)\nhere.wait()\nprint('two', file=sys.stderr)\n3"
    items: list[Output | ExecutionResult] = []
    # The code goes on when its first piece has come.
    async for item in start(handlers={"here": here}).stream(code, timeout=60):
        items.append(item)
        here.go_on.set()
    assert (
        items[:2] == [Output("stdout", "one\n"), Output("stderr", "two\n")]
        or "".join(item.text for item in items[:-1] if isinstance(item, Output)) == "one\ntwo\n"
    )
    result = items[-1]
    assert isinstance(result, ExecutionResult)
    assert (result.value, result.stdout, result.stderr) == (3, "one\n", "two\n")


async def test_a_character_cut_in_two_comes_whole(executor: Executor) -> None:
    code = "import sys, time\nb = sys.stdout.buffer\n"
    code += "b.write(b'\\xc3'); b.flush(); time.sleep(0.1); b.write(b'\\xa9'); b.flush()"
    pieces = [item.text async for item in executor.stream(code) if isinstance(item, Output)]
    assert "".join(pieces) == "é"


async def test_a_slow_reader_gets_everything(executor: Executor) -> None:
    got = 0
    async for item in executor.stream("for n in range(30): print('x' * 999_999)", timeout=60):
        if isinstance(item, Output):
            got += len(item.text)
            await asyncio.sleep(0.001)
    assert got == 30_000_000


# In a thread the first interrupt may come while Python clears up, where it is reported and has no effect; the next has.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_leaving_the_stream_stops_the_code(executor: Executor) -> None:
    await executor.run("n = 0")
    stream = executor.stream("while True:\n    n += 1\n    print(n)")
    async for _ in stream:
        break
    await stream.aclose()
    first = (await executor.run("n")).value
    await asyncio.sleep(0.05)
    assert (await executor.run("n")).value == first > 0


@pytest.mark.promise("output below Python")
async def test_what_a_background_process_writes_is_in_no_later_result(executor: Executor) -> None:
    result = await executor.run(
        "import subprocess\np = subprocess.Popen(['sh', '-c', 'for i in 1 2 3 4 5; do echo tick; sleep 0.05; done'])"
    )
    assert result.error is None
    await executor.run("1")
    await asyncio.sleep(0.4)
    assert (await executor.run("print('mine')")).stdout == "mine\n"


@pytest.mark.promise("output below Python")
async def test_a_background_process_that_writes_during_the_next_run_is_not_in_it(executor: Executor) -> None:
    await executor.run(
        "import subprocess, time\np = subprocess.Popen(['sh', '-c', 'while sleep 0.02; do echo tick; done'])"
    )
    for n in range(3):
        assert (await executor.run(f"time.sleep(0.2); print({n})")).stdout == f"{n}\n"
    assert (await executor.run("p.kill(); p.wait(); print('end')")).stdout == "end\n"


@pytest.mark.promise("output of threads")
async def test_what_a_thread_prints_during_a_later_run_is_in_that_run(executor: Executor) -> None:
    code = "import threading\ngo, done = threading.Event(), threading.Event()\n"
    code += "def say():\n    go.wait()\n    print('from the thread')\n    done.set()\n"
    assert (await executor.run(code + "threading.Thread(target=say).start()")).stdout == ""
    assert (await executor.run("go.set(); done.wait(); print('mine')")).stdout == "from the thread\nmine\n"
    assert (await executor.run("print('after')")).stdout == "after\n"


@pytest.mark.promise("survives the end of its process")
async def test_output_is_whole_after_a_crash(executor: Executor) -> None:
    for n in range(3):
        await executor.run("import subprocess, os; subprocess.run(['true']); os._exit(1)")
        assert (await executor.run(f"print({n}); subprocess_ran = True")).stdout == f"{n}\n"
        assert (await executor.run(f"import os; os.system('echo {n}')")).stdout == f"{n}\n"
