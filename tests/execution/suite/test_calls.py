"""Calls from inside to the host, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from carrel.errors import SessionNotFound, ToolTimeoutError
from carrel.execution.executor import CallContext, Handler, Output, current_call
from tests.execution.conftest import Start


async def echo(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return [name, args, kwargs]


async def refuse(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if args[0] == "missing":
        raise SessionNotFound("there is no session abc")
    raise {"value": ValueError, "key": KeyError, "time": TimeoutError}[args[0]](f"no {args[0]}")


async def slow(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    await asyncio.sleep(args[0])
    return args[0]


HANDLERS: dict[str, Handler] = {"tools": echo, "refuse": refuse, "slow": slow}


async def test_a_call_has_its_name_and_its_arguments(start: Start) -> None:
    executor = start(handlers=HANDLERS)
    result = await executor.run("tools.curl.get('u', depth=2, data=b'x', when=(1, None))")
    assert result.value == ["tools.curl.get", ["u"], {"depth": 2, "data": b"x", "when": (1, None)}]


async def test_calls_in_parallel(start: Start) -> None:
    open_calls = 0
    all_open = asyncio.Event()

    async def together(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Answers none before all ten have asked: one after the other they would wait for ever."""
        nonlocal open_calls
        open_calls += 1
        if open_calls == 10:
            all_open.set()
        await all_open.wait()
        return args[0]

    executor = start(handlers={"together": together})
    code = "import asyncio\nawait asyncio.gather(*[together.call_async(n) for n in range(10)])"
    result = await executor.run(code, timeout=60)
    assert result.value == list(range(10))


@pytest.mark.parametrize(("word", "name"), [("value", "ValueError"), ("key", "KeyError"), ("time", "TimeoutError")])
async def test_an_error_of_the_host_has_its_class_inside(start: Start, word: str, name: str) -> None:
    executor = start(handlers=HANDLERS)
    result = await executor.run(f"try:\n    refuse({word!r})\nexcept {name} as e:\n    found = str(e)\nfound")
    assert result.error is None
    assert f"no {word}" in result.value


async def test_an_error_of_our_own_is_also_the_builtin(start: Start) -> None:
    executor = start(handlers=HANDLERS)
    code = "try:\n    refuse('missing')\nexcept KeyError as e:\n    found = type(e).__name__, str(e)\nfound"
    assert (await executor.run(code)).value == ("SessionNotFound", "there is no session abc")
    assert (await executor.run(code.replace("KeyError", "SessionNotFound"))).is_ok


async def test_an_error_of_our_own_keeps_its_parents_and_what_it_knows(start: Start) -> None:
    async def fail(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        problem = ToolTimeoutError("too slow")
        problem.exit_code = 7
        raise problem

    executor = start(handlers={"fail": fail})
    for name in ("ToolTimeoutError", "ToolCallError", "CarrelError", "TimeoutError", "RuntimeError"):
        result = await executor.run(f"try:\n    fail()\nexcept {name} as e:\n    found = str(e), e.exit_code\nfound")
        assert (result.error, result.value) == (None, ("too slow", 7))


async def test_a_name_without_a_handler(start: Start) -> None:
    executor = start(handlers={"tools.known": echo})
    assert (await executor.run("tools.known.x()")).is_ok
    result = await executor.run("tools.unknown()")
    assert result.error_type == "LookupError"
    assert "tools.unknown" in (result.error or "")


async def test_several_runs_with_calls_at_once_have_each_their_own_output(start: Start) -> None:
    executor = start(handlers=HANDLERS)
    codes = [f"print('before', {n})\nslow(0.01)\nprint('after', {n})\n{n}" for n in range(8)]
    results = await asyncio.gather(*(executor.run(code) for code in codes))
    assert [(r.value, r.stdout) for r in results] == [(n, f"before {n}\nafter {n}\n") for n in range(8)]


async def test_a_call_is_cancelled_with_its_run(start: Start) -> None:
    cancelled = asyncio.Event()

    async def hang(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    executor = start(handlers={"hang": hang})
    await executor.run("x = 0")
    result = await executor.run("x = 1\nhang()", timeout=1)
    assert (result.error_type, result.state) == ("Timeout", "kept")
    await asyncio.wait_for(cancelled.wait(), 60)
    assert (await executor.run("x")).value == 1


async def test_an_answer_that_is_no_data_arrives_as_its_repr(start: Start) -> None:
    async def odd(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return object

    executor = start(handlers={"odd": odd})
    assert (await executor.run("odd()")).value == "<class 'object'>"


async def test_code_that_assigns_the_name_breaks_only_itself(start: Start) -> None:
    executor = start(handlers=HANDLERS)
    await executor.run("tools = 5")
    await executor.reset()
    assert (await executor.run("tools.a()")).value == ["tools.a", [], {}]


async def test_calls_from_threads(start: Start) -> None:
    executor = start(handlers=HANDLERS)
    code = "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
    code += "    found = list(pool.map(lambda n: tools.t(n)[1], range(20)))\nfound"
    assert (await executor.run(code)).value == [[n] for n in range(20)]


async def test_a_handler_can_write_into_the_run_that_called(start: Start) -> None:
    kept: list[Callable[[str], None] | None] = []

    async def tell(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        call = current_call.get()
        assert call is not None
        write = call.write
        write(f"host: {args[0]} ü\n")
        kept.append(write)

    executor = start(handlers={"tell": tell})
    result = await executor.run("print('one')\ntell('two')\nprint('three')")
    assert result.stdout == "one\nhost: two ü\nthree\n"
    assert current_call.get() is None
    pieces = [item async for item in executor.stream("tell('early')\nprint('late')")]
    assert "".join(item.text for item in pieces if isinstance(item, Output)) == "host: early ü\nlate\n"
    write = kept[0]
    assert write is not None
    write("after its run\n")
    assert (await executor.run("tell('again')")).stdout == "host: again ü\n"


async def test_what_many_handlers_and_the_code_write_at_once_is_all_there(start: Start) -> None:
    async def tell(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        call = current_call.get()
        assert call is not None
        write = call.write
        for _ in range(200):
            write("h\n")
            await asyncio.sleep(0)

    executor = start(handlers={"tell": tell})
    code = "import asyncio\ntasks = [asyncio.ensure_future(tell.call_async()) for _ in range(5)]\n"
    code += "for _ in range(1000):\n    print('c')\n    await asyncio.sleep(0)\nfor task in tasks: await task"
    lines = (await executor.run(code)).stdout.splitlines()
    assert (lines.count("h"), lines.count("c"), len(lines)) == (1000, 1000, 2000)


async def test_a_handler_finds_the_executor_and_whether_its_call_is_active(start: Start) -> None:
    found: list[CallContext] = []

    async def look(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        call = current_call.get()
        assert call is not None
        found.append(call)
        return call.active

    executor = start(handlers={"look": look})
    assert (await executor.run("look()")).value is True
    assert found[0].executor is executor
    assert not found[0].active
