"""Running code: values, variables, output, errors, waiting."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import math
import uuid
from pathlib import PurePosixPath
from typing import Any

import pytest

from carrel.execution.executor import Executor
from tests.execution.conftest import Start


async def test_the_value_of_the_last_expression(executor: Executor) -> None:
    result = await executor.run("x = 20\nx + 22")
    assert (result.value, result.error, result.is_ok, result.state) == (42, None, True, "kept")
    assert result.duration > 0
    assert result.usage.max_rss_bytes > 0


async def test_without_a_last_expression_there_is_no_value(executor: Executor) -> None:
    assert (await executor.run("x = 1")).value is None
    assert (await executor.run("")).is_ok


async def test_variables_imports_and_functions_stay(executor: Executor) -> None:
    await executor.run("import math\ndef area(r): return math.pi * r ** 2\nclass Point: x = 3")
    result = await executor.run("round(area(2)), Point.x, __name__")
    assert result.value == (13, 3, "__main__")


VALUES = [
    None,
    True,
    10**60,
    -(2**53) - 1,
    1.5,
    math.inf,
    3 + 4j,
    "päron \0 \U0001f40d",
    b"\0\xff",
    [1, [2, ()]],
    (1, "a"),
    {"a": 1, "$": 2},
    {(1, 2): {3}, None: b"x"},
    frozenset({1, 2}),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
    datetime.date(2026, 1, 2),
    datetime.timedelta(days=-1, microseconds=3),
    decimal.Decimal("1.10"),
    uuid.UUID(int=7),
    PurePosixPath("/a/b"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
async def test_data_arrives_equal(executor: Executor, value: object) -> None:
    imports = "import datetime, uuid, decimal; from decimal import Decimal; from uuid import UUID\n"
    imports += "from pathlib import PurePosixPath; inf = float('inf')\n"
    result = await executor.run(f"{imports}{value!r}")
    assert result.error is None
    assert result.value == value
    assert type(result.value) is type(value)


async def test_what_is_no_data_arrives_as_its_repr(executor: Executor) -> None:
    result = await executor.run("class A:\n    def __repr__(self): return 'an A'\n[A(), 1]")
    assert result.value == ["an A", 1]


async def test_a_long_list_arrives_whole(executor: Executor) -> None:
    assert (await executor.run("list(range(100_000))")).value == list(range(100_000))


async def test_rich_forms_are_in_display(executor: Executor) -> None:
    code = "class T:\n    def _repr_html_(self): return '<b>t</b>'\nT()"
    assert {"text/html": "<b>t</b>"}.items() <= (await executor.run(code)).display[0].items()


async def test_output_of_both_streams(executor: Executor) -> None:
    result = await executor.run(
        "import sys\nprint('one')\nprint('two', file=sys.stderr)\nsys.stdout.write('three')\nNone"
    )
    assert (result.stdout, result.stderr) == ("one\nthree", "two\n")


@pytest.mark.promise("output below Python")
async def test_output_of_children_and_of_descriptors_comes_in_order(executor: Executor) -> None:
    result = await executor.run(
        "import os\nprint('a')\nos.system('echo b; echo c >&2')\nos.write(1, b'd\\n')\nprint('e')"
    )
    assert (result.stdout, result.stderr) == ("a\nb\nd\ne\n", "c\n")


async def test_an_error_shows_the_users_own_lines(executor: Executor) -> None:
    result = await executor.run("def f(n):\n    return 1 / n\nprint('before')\nf(0)")
    assert result.error_type == "ZeroDivisionError"
    assert result.error is not None
    assert "return 1 / n" in result.error
    assert "f(0)" in result.error
    assert "carrel" not in result.error
    assert (result.is_ok, result.stdout, result.value) == (False, "before\n", None)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("1 +", "SyntaxError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("quit()", "SystemExit"),
        ("exit()", "SystemExit"),
        ("raise StopIteration", "StopIteration"),
        ("raise SystemExit", "SystemExit"),
        ("class E(BaseException): pass\nraise E", "E"),
        ("raise asyncio_", "NameError"),
        ("raise SystemExit(10**5000)", "SystemExit"),
        ("raise SystemExit(-(10**30))", "SystemExit"),
        ("class Closed(Exception): pass\nraise Closed('mine')", "Closed"),
    ],
)
async def test_whatever_is_raised_is_a_result_and_the_session_goes_on(executor: Executor, code: str, name: str) -> None:
    await executor.run("kept = 5")
    result = await executor.run(code)
    assert (result.error_type, result.state) == (name, "kept")
    assert "Session is closed" not in (result.error or "")
    assert "carrel" not in f"{result.stderr}{result.error}"
    assert (await executor.run("kept")).value == 5


async def test_input_says_why_there_is_none(executor: Executor) -> None:
    result = await executor.run("input('5')")
    assert (result.error_type, result.stdout) == ("EOFError", "5")
    assert "input" in (result.error or "")


async def test_top_level_await_and_asyncio_run_both_work(executor: Executor) -> None:
    assert (await executor.run("import asyncio\nawait asyncio.sleep(0, 'a')")).value == "a"
    assert (await executor.run("asyncio.run(asyncio.sleep(0, 'b'))")).value == "b"
    code = "async def items():\n    yield 1\n    yield 2\n"
    code += "found = []\nasync for item in items():\n    found.append(item)\nfound"
    assert (await executor.run(code)).value == [1, 2]
    assert (await executor.run("await asyncio.gather(*[asyncio.sleep(0, n) for n in range(3)])")).value == [0, 1, 2]


async def test_reset_forgets_the_variables(executor: Executor) -> None:
    await executor.run("x = 1")
    await executor.reset()
    assert (await executor.run("x")).error_type == "NameError"


BREAKING = [
    "json = sys = print = None",
    "import sys; sys.stdout = None",
    "import sys; sys.stdout.close()",
    "__builtins__.clear() if isinstance(__builtins__, dict) else __builtins__.__dict__.clear()",
    "import builtins\nprint = len = None",
    "globals().clear()",
    "tools = 5",
    "import sys; sys.stdin = 1",
]


@pytest.mark.parametrize("code", BREAKING)
async def test_code_that_breaks_names_breaks_only_itself(start: Start, code: str, executor_kind: str) -> None:
    if executor_kind == "in-process" and "clear" in code and "builtins" in code:
        code = "__builtins__.clear()"  # Its builtins are a copy; the module's own would be the host's.
    executor, other = start(), start()
    await executor.run(code)
    assert (await other.run("print(len('abc'))\n1")).stdout == "3\n"
    await executor.reset()
    result = await executor.run("import json\nprint(json.dumps([1]))\nlen('ab')")
    assert (result.value, result.stdout, result.error) == (2, "[1]\n", None)


async def test_several_runs_at_once_queue_up_in_order(executor: Executor) -> None:
    await executor.run("seen = []")
    codes = [f"seen.append({n})\nprint({n})\n{n}" for n in range(20)]
    results = await asyncio.gather(*(executor.run(code) for code in codes))
    assert [(r.value, r.stdout) for r in results] == [(n, f"{n}\n") for n in range(20)]
    assert (await executor.run("seen")).value == list(range(20))


@pytest.mark.promise("output of threads")
async def test_output_of_threads_and_what_comes_late(executor: Executor) -> None:
    code = "import threading, time\nt = threading.Thread(target=print, args=('in time',)); t.start(); t.join()"
    assert (await executor.run(code)).stdout == "in time\n"
    late = "def say():\n    time.sleep(0.2)\n    print('late')\nthreading.Thread(target=say).start()"
    assert (await executor.run(late)).stdout == ""
    await asyncio.sleep(0.5)
    assert (await executor.run("1")).stdout == ""


async def test_after_close_there_is_a_result_that_says_so(executor: Executor) -> None:
    await executor.run("1")
    await executor.close()
    await executor.close()
    result = await executor.run("1")
    assert (result.error, result.error_type) == ("Session is closed", "Closed")


async def test_a_late_traceback_shows_the_lines_of_its_own_session(start: Start) -> None:
    one, other = start(), start()
    await one.run("def fail():\n    return 1 / 0  # mine")
    await other.run("def fail():\n    return 2 / 0  # another's")
    error = (await one.run("fail()")).error or ""
    assert 'File "<cell 1>", line 2, in fail' in error
    assert 'File "<cell 2>", line 1, in <module>' in error
    assert "# mine" in error
    wrong = (await other.run("x = (")).error or ""
    assert 'File "<cell 2>", line 1' in wrong
    nested = (
        await other.run("try:\n    fail()\nexcept ZeroDivisionError as first:\n    raise KeyError from first")
    ).error
    assert " of " not in (nested or "of nothing").replace("direct cause of", "")


async def test_a_task_may_be_begun_in_one_cell_and_awaited_in_another(executor: Executor) -> None:
    work = "import asyncio\nasync def work(n):\n    await asyncio.sleep(0.01)\n    return n\n"
    begun = await executor.run(work + "def begin(n): return asyncio.ensure_future(work(n))")
    assert begun.error is None
    begun = await executor.run("task = asyncio.create_task(work(5))\nboth = asyncio.gather(work(1), work(2))")
    assert (begun.error, begun.stderr) == (None, "")
    assert (await executor.run("await task, await both")).value == (5, [1, 2])
    assert (await executor.run("asyncio.get_running_loop().is_running()")).value is True
    assert (await executor.run("task = asyncio.create_task(work(7)); task.done()")).value is False
    assert (await executor.run("await asyncio.sleep(0.1); task.result()")).value == 7
    stopped = await executor.run("late = asyncio.create_task(work(8))\nwhile True: pass", timeout=0.5)
    assert (stopped.error_type, stopped.state) == ("Timeout", "kept")
    assert (await executor.run("await late")).value == 8


async def test_code_with_a_loop_of_its_own_keeps_it(executor: Executor) -> None:
    code = "import asyncio\nasync def main(): return await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2))\n"
    assert (await executor.run(code + "asyncio.run(main())")).value == [1, 2]
    own = "loop = asyncio.new_event_loop()\nloop.run_until_complete(loop.create_task(main()))"
    assert (await executor.run(own)).value == [1, 2]


@pytest.mark.promise("warnings of its own")
async def test_a_coroutine_that_is_never_awaited_is_warned_of(executor: Executor) -> None:
    result = await executor.run("async def f(): pass\nf()")
    assert "coroutine 'f' was never awaited" in result.stderr


@pytest.mark.parametrize(
    "code",
    ["input('? ')", "import sys; sys.stdin.readline()", "import sys; sys.stdin.read()", "import sys; list(sys.stdin)"],
)
async def test_code_has_no_standard_input(executor: Executor, code: str) -> None:
    result = await executor.run(code)
    assert result.error_type == "EOFError", result
    assert "no standard input" in (result.error or "")


async def test_a_debugger_has_no_standard_input(executor: Executor) -> None:
    result = await executor.run("kept = 1\nbreakpoint()\n2")
    assert result.error_type == "BdbQuit", result
    assert "print what you want to see" in (result.error or "")
    assert (await executor.run("kept")).value == 1


# --- variables --------------------------------------------------------------------------------------------------------


async def test_variables_are_listed_with_a_preview(start: Start) -> None:
    executor = start(handlers={"tools": no_answer})
    assert await executor.variables() == []
    await executor.run("import math; n = 5; words = ['a'] * 1000; _hidden = 1\nclass Thing: pass\nthing = Thing()")
    found = {one.name: one for one in await executor.variables()}
    assert list(found) == ["math", "n", "words", "Thing", "thing"]
    assert (found["n"].type, found["n"].preview, found["math"].type) == ("int", "5", "module")
    assert found["words"].size > 8000
    assert len(found["words"].preview) < 300
    assert found["thing"].type == "Thing"
    await executor.run("tools = 3")
    assert "tools" in [one.name for one in await executor.variables()]


async def test_a_repr_that_hangs_or_raises_is_no_hindrance(start: Start) -> None:
    executor = start()
    await executor.run(
        "import time\n"
        "class Bad:\n"
        "    def __repr__(self): raise ValueError('no')\n"
        "class Slow:\n"
        "    def __repr__(self):\n"
        "        while True: time.sleep(0.01)\n"
        "bad, slow, n = Bad(), Slow(), 5\n"
    )
    found = {one.name: one.preview for one in await asyncio.wait_for(executor.variables(), 60)}
    assert (found["n"], found["slow"]) == ("5", "")
    assert (await executor.run("n")).value == 5


async def test_variables_are_set_to_data(executor: Executor) -> None:
    data = {"n": 5, "text": "a", "raw": b"\0", "rows": [{"a": (1, 2)}, {3, 4}], "when": datetime.datetime(2026, 1, 2)}
    await executor.set_variables(data)
    assert (await executor.run("n, text, raw, rows, when")).value == tuple(data.values())
    with pytest.raises(TypeError, match="thing"):
        await executor.set_variables({"fine": 1, "thing": [object()]})
    with pytest.raises(ValueError, match="not the name"):
        await executor.set_variables({"a b": 1})
    assert (await executor.run("fine")).error_type == "NameError"


async def no_answer(name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """A handler that is never called here."""
