"""A handler has a command run where the session's code runs, while that code waits for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from carrel.execution.executor import CommandResult, Executor, current_call
from tests.execution.conftest import Start


async def ran(words: Sequence[str], **settings: Any) -> CommandResult:
    call = current_call.get()
    assert call is not None
    return await call.executor.exec(words, keep_background=False, **settings)


class Beating:
    """A handler that runs a command which goes on and on, writing into the file `beat`; `begun` is set when it has."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def __call__(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        await ran(["/bin/sh", "-c", f"date > beat; echo begun; {BEATING}"], on_output=lambda _: self.begun.set())


BEATING = "while true; do date +%N > beat; sleep 0.02; done"


async def stands_still(executor: Executor) -> None:
    async with asyncio.timeout(60):
        while True:
            last = await executor.read_file("beat")
            await asyncio.sleep(0.2)
            if await executor.read_file("beat") == last:
                return


async def shell(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    ended = await ran(["/bin/sh", "-c", args[0]], **kwargs)
    return ended.exit_code, ended.stdout, ended.stderr, ended.timed_out


async def test_what_the_command_wrote_and_how_it_ended(start: Start) -> None:
    executor = start(handlers={"shell": shell})
    result = await executor.run("shell('echo out; echo err >&2; exit 3')")
    assert (result.error, result.value) == (None, (3, "out\n", "err\n", False))
    assert (await executor.run("shell('kill -9 $$')[0]")).value == 137


async def test_it_is_in_the_sessions_own_place(start: Start) -> None:
    executor = start(handlers={"shell": shell})
    await executor.write_file("notes/today.txt", "rain\n")
    assert (await executor.run("shell('cat today.txt', cwd='notes')")).value[1] == "rain\n"
    assert (await executor.run("shell('cat; echo $WORD', stdin=b'in ', env={'WORD': 'there'})")).value[
        1
    ] == "in there\n"
    assert (await executor.run("shell('echo x > made.txt')")).is_ok
    assert await executor.read_file("made.txt") == b"x\n"


async def test_several_commands_one_after_the_other_in_one_call(start: Start) -> None:
    async def thrice(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return [(await ran(["echo", str(number)])).stdout for number in range(3)]

    executor = start(handlers={"thrice": thrice})
    assert (await executor.run("thrice()")).value == ["0\n", "1\n", "2\n"]


async def test_a_gather_of_five_runs_five_at_once(start: Start) -> None:
    executor = start(handlers={"shell": shell})
    # Each waits for all the others: one after the other they would wait for ever.
    meet = "touch here-{n}; while [ $(ls | grep -c here-) -lt 5 ]; do sleep 0.01; done; echo {n}"
    code = (
        "import asyncio\n"
        f"await asyncio.gather(*[shell.call_async({meet!r}.format(n=n)) for n in range(5)], asyncio.sleep(0, 'loop'))"
    )
    result = await executor.run(code, timeout=60)
    assert result.error is None
    assert [answer[1] for answer in result.value[:5]] == [f"{n}\n" for n in range(5)]
    assert result.value[5] == "loop"


async def test_from_threads_of_the_code(start: Start) -> None:
    executor = start(handlers={"shell": shell})
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    found = list(pool.map(shell, [f'sleep 0.05; echo {n}' for n in range(8)]))\n"
        "[one[1] for one in found]"
    )
    assert (await executor.run(code, timeout=60)).value == [f"{n}\n" for n in range(8)]


async def test_a_program_that_is_not_there(start: Start) -> None:
    async def missing(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        await ran(["no-such-program"])

    executor = start(handlers={"missing": missing})
    result = await executor.run(
        "try:\n    missing()\nexcept FileNotFoundError as error:\n    found = str(error)\nfound"
    )
    assert "no-such-program" in result.value


async def test_when_its_time_is_up_all_of_it_is_gone(start: Start) -> None:
    executor = start(handlers={"shell": shell})
    code = f"shell('echo begun; sleep 60 & {BEATING}', timeout=2)"
    result = await executor.run(code, timeout=60)
    assert (result.error, result.value) == (None, (124, "begun\n", "", True))
    await stands_still(executor)


@pytest.mark.parametrize("how", ["beating()", "await beating.call_async()"])
async def test_an_interrupt_ends_the_command_and_keeps_the_variables(start: Start, how: str) -> None:
    beating = Beating()
    executor = start(handlers={"beating": beating, "shell": shell})
    run = asyncio.create_task(executor.run(f"x = 5\n{how}", timeout=60))
    await asyncio.wait_for(beating.begun.wait(), 60)
    assert await executor.interrupt()
    result = await run
    assert (result.error_type, result.state) == ("KeyboardInterrupt", "kept")
    await stands_still(executor)
    assert (await executor.run("x, shell('echo again')[1]")).value == (5, "again\n")


async def test_the_runs_own_time_limit_ends_the_command_too(start: Start) -> None:
    executor = start(handlers={"beating": Beating()})
    await executor.start()
    result = await executor.run("beating()", timeout=2)
    assert (result.error_type, result.state) == ("Timeout", "kept")
    await stands_still(executor)


async def test_a_handler_that_gives_up_takes_its_command_along(start: Start) -> None:
    beating = Beating()

    async def hasty(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        running = asyncio.ensure_future(beating(name, args, kwargs))
        try:
            async with asyncio.timeout(60):
                await beating.begun.wait()
            async with asyncio.timeout(0):
                await running
        finally:
            running.cancel()

    executor = start(handlers={"hasty": hasty, "shell": shell})
    code = "try:\n    hasty()\nexcept TimeoutError:\n    found = 'gave up'\nfound, shell('echo next')[1]"
    assert (await executor.run(code, timeout=60)).value == ("gave up", "next\n")
    await stands_still(executor)


async def test_what_it_leaves_in_its_group_does_not_go_on(start: Start) -> None:
    executor = start(handlers={"shell": shell})
    code = f"shell('({BEATING}) & while ! [ -s beat ]; do sleep 0.01; done')[0]"
    assert (await executor.run(code, timeout=60)).value == 0
    await stands_still(executor)


async def test_a_lot_of_output_and_a_lot_of_input(start: Start) -> None:
    async def flood(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        pieces: list[int] = []
        ended = await ran(
            ["head", "-c", "30000000", "/dev/zero"], on_output=lambda piece: pieces.append(len(piece.text))
        )
        back = await ran(["cat"], stdin=b"y" * 5_000_000, text=False)
        return ended.exit_code, sum(pieces), ended.truncated, back.exit_code, back.stdout == b"y" * 5_000_000

    executor = start(handlers={"flood": flood})
    assert (await executor.run("flood()", timeout=60)).value == (0, 30_000_000, True, 0, True)


@pytest.mark.promise("survives the end of its process")
async def test_a_session_is_still_restored_afterwards(start: Start) -> None:
    executor = start(handlers={"shell": shell})
    assert (await executor.run("x = 1\nshell('echo a')[1]")).value == "a\n"
    crashed = await executor.run("import os\nos.abort()")
    assert (crashed.error_type, crashed.state) == ("Crashed", "restored")
    assert (await executor.run("x, shell('echo b')[1]")).value == (1, "b\n")
