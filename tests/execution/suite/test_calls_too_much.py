"""Calls that ask for too much: an argument, an answer or a number of calls that the line does not take at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from carrel.execution.host_calls import MOST_BYTES, MOST_OPEN, Calls
from carrel.execution.in_process import InProcessExecutor
from carrel.guest.worker.host_calls import MAX_CALLS
from tests.execution.conftest import Start

DEEP = "deep = []\nfor _ in range(300): deep = [deep]\n"


async def length(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return [len(value) for value in (*args, *kwargs.values())]


@pytest.mark.parametrize(
    ("call", "error_type", "named"),
    [
        ("tools.take('small', 'x' * 40_000_000)", "ToolCallError", "tools.take: argument 2 "),
        ("tools.take(text=b'x' * 40_000_000)", "ToolCallError", "tools.take: the argument text "),
        ("await tools.take.call_async(text='x' * 40_000_000)", "ToolCallError", "the argument text "),
        ("tools.take('x' * 20_000_000, 'y' * 20_000_000)", "ToolCallError", "all its arguments together "),
        (DEEP + "tools.take(1, deep)", "ToolCallError", "argument 2 cannot be given to the host: it is nested deeper"),
        (DEEP + "other.take(tree=deep)", "ValueError", "other.take: the argument tree "),
    ],
)
async def test_an_argument_that_cannot_cross_is_named(start: Start, call: str, error_type: str, named: str) -> None:
    executor = start(handlers={"tools": length, "other": length})
    await executor.run("kept = 7")
    result = await executor.run(call)
    assert result.error_type == error_type
    assert named in (result.error or "")
    assert result.state == "kept"
    assert (await executor.run("tools.take('four'), kept")).value == ([4], 7)


@pytest.mark.promise("survives the end of its process")
async def test_an_argument_that_grows_on_its_way_is_refused_too(start: Start) -> None:
    """Each of these characters is six in JSON."""
    executor = start(handlers={"tools": length})
    for call in ("tools.take('\\x01' * 20_000_000)", "await tools.take.call_async('\\x01' * 20_000_000)"):
        result = await executor.run(f"kept = 7\n{call}")
        assert (result.error_type, result.state) == ("ToolCallError", "kept")
        assert "is too long; at most" in (result.error or "")
    assert (await executor.run("tools.take('four'), kept")).value == ([4], 7)


@pytest.mark.parametrize(("name", "error_type"), [("tools", "ToolCallError"), ("artifacts", "ValueError")])
@pytest.mark.parametrize("answer", ["large", "deep", "many"])
async def test_an_answer_is_whole_or_an_error(start: Start, name: str, error_type: str, answer: str) -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    answers = {"large": "x" * 70_000_000, "deep": deep, "many": [{"metadata": "x" * 15_000_000}] * 3, "small": "ab"}

    async def give(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return answers[args[0]]

    executor = start(handlers={name: give})
    result = await executor.run(f"len({name}.list({answer!r}))")
    assert (result.value, result.error_type) == (None, error_type)
    assert f"{name}.list: what it returned cannot be given to the code" in (result.error or "")
    assert (await executor.run(f"len({name}.list('small'))")).value == 2


async def test_more_calls_than_the_host_takes_wait_for_their_turn(start: Start) -> None:
    now, most = 0, 0

    async def slow(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return args[0]

    executor = start(handlers={"slow": slow})
    count = 3 * MAX_CALLS
    code = f"import asyncio\nsum(await asyncio.gather(*[slow.call_async(n) for n in range({count})]))"
    result = await executor.run(code, timeout=100)
    assert (result.value, result.error) == (sum(range(count)), None)
    assert most > 1


@pytest.mark.promise("survives the end of its process")
async def test_code_that_does_not_await_gets_its_turn_among_those_that_wait(start: Start) -> None:
    """The loop stands meanwhile, so that no other task could take a turn that is given away."""
    started = 0
    all_started = asyncio.Event()

    async def slow(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal started
        started += 1
        if started == MAX_CALLS:
            all_started.set()
        if args[0] == "plain":
            return "plain"
        await all_started.wait()
        await asyncio.sleep(0.05)
        return 1

    executor = start(handlers={"slow": slow})
    code = (
        "import asyncio\n"
        f"tasks = [asyncio.ensure_future(slow.call_async(n)) for n in range({MAX_CALLS + 200})]\n"
        "await asyncio.sleep(0.1)\n"
        "plain = slow('plain')\n"
        "plain, sum(await asyncio.gather(*tasks))"
    )
    result = await executor.run(code, timeout=100)
    assert (result.value, result.error) == (("plain", MAX_CALLS + 200), None)


@pytest.mark.promise("survives the end of its process")
async def test_calls_that_were_given_up_take_nobodys_turn(start: Start) -> None:
    async def hang(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if args[0] == "hang":
            await asyncio.sleep(600)
        return args[0]

    executor = start(handlers={"hang": hang})
    code = (
        "import asyncio\n"
        f"tasks = [asyncio.ensure_future(hang.call_async('hang')) for n in range({2 * MAX_CALLS})]\n"
        "await asyncio.sleep(0.1)\n"
        "for task in tasks: task.cancel()\n"
        f"sum(await asyncio.gather(*[hang.call_async(1) for n in range({MAX_CALLS})]))"
    )
    assert (await executor.run(code, timeout=100)).value == MAX_CALLS
    left = (
        f"left = [asyncio.ensure_future(hang.call_async('hang')) for n in range({2 * MAX_CALLS})]\n"
        "await asyncio.sleep(0)"
    )
    assert (await executor.run(left, timeout=100)).error is None
    assert (await executor.run("hang(2), await hang.call_async(3)", timeout=100)).value == (2, 3)


@pytest.mark.promise("survives the end of its process")
async def test_large_arguments_wait_for_their_turn_too(start: Start) -> None:
    now, most = 0, 0
    five_started = asyncio.Event()

    async def slow(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal now, most
        now += len(args[0])
        most = max(most, now)
        if now == 100_000_000:
            five_started.set()
        await five_started.wait()
        await asyncio.sleep(0.5)
        now -= len(args[0])
        return 1

    executor = start(handlers={"slow": slow})
    code = "import asyncio\nx = 'x' * 20_000_000\nsum(await asyncio.gather(*[slow.call_async(x) for n in range(9)]))"
    result = await executor.run(code, timeout=100)
    assert (result.value, result.error) == (9, None)
    assert most == 100_000_000


async def test_the_host_refuses_what_no_worker_asks_at_once() -> None:
    async def hang(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        await asyncio.sleep(600)

    def call(number: int) -> dict[str, Any]:
        return {"op": "call", "call": number, "name": "hang.up", "arguments": {"args": [], "kwargs": {}}}

    for size, taken in ((MOST_BYTES // 4, 4), (0, MOST_OPEN), (MOST_BYTES * 2, 1)):
        sent: list[dict[str, Any]] = []
        calls = Calls({"hang": hang}, sent.append, print, InProcessExecutor())
        for number in range(taken + 3):
            calls.begin(call(number), size)
        assert [answer["call"] for answer in sent] == [taken, taken + 1, taken + 2]
        assert all("wait for the host already" in answer["error"]["message"] for answer in sent)
        calls.cancel()
        await asyncio.sleep(0.01)
        calls.begin(call(0), size)
        assert len(sent) == 3
        calls.cancel()
