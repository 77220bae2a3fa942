"""Bad input: whatever comes, there is a result, and the next run is as if nothing had been."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import ConfigurationError
from carrel.execution.config import ContainerConfig, InProcessConfig, SubprocessConfig
from carrel.execution.container_executor import ContainerExecutor
from carrel.execution.executor import ExecutionResult, Executor
from carrel.execution.in_process import InProcessExecutor
from carrel.execution.subprocess_executor import SubprocessExecutor
from tests.execution.conftest import Start

CODES = {
    "NUL bytes": "x = 1\0",
    "a lone surrogate": "'\ud800'",
    "deep nesting": "(" * 5000 + ")" * 5000,
    "deep recursion": "def f(): return f()\nf()",
    "surrogates in output": "print('\\ud800\\udfff')",
    "a repr that raises": "class A:\n    def __repr__(self): raise RuntimeError('no')\nA()",
    "a repr that is no text": "class A:\n    def __repr__(self): return 5\nA()",
    "a generator": "(x for x in range(3))",
    "itself": "a = []; a.append(a); a",
    "an error whose text raises": "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
    "a bad encoding line": "# coding: nonsense\n1",
    "only a comment": "# nothing",
    "tabs and spaces": "if 1:\n\tx = 1\n        y = 2",
    "an empty line of spaces": "   \n  ",
    "deep value": "v = []\nfor _ in range(100_000): v = [v]\nv",
}


@pytest.mark.parametrize("name", CODES)
async def test_a_result_comes_and_the_session_goes_on(executor: Executor, name: str) -> None:
    await executor.run("kept = 7")
    result = await executor.run(CODES[name], timeout=60)
    assert result.error_type != "Timeout"
    (result.error or "").encode("utf-8")
    result.stdout.encode("utf-8")
    assert (await executor.run("kept")).value == 7


async def test_paths_may_be_path_objects(executor: Executor) -> None:
    await executor.write_file(Path("sub") / "f", bytearray(b"one"))  # type: ignore[arg-type]
    await executor.str_replace(Path("sub/f"), "one", "two")
    assert await executor.read_file(Path("sub/f")) == b"two"
    assert [entry.name for entry in await executor.list_files(Path("sub"))] == ["f"]
    done = await executor.exec(["cat", Path("f")], cwd=Path("sub"), stdin=memoryview(b""), env={"A": 1})  # type: ignore[list-item, arg-type, dict-item]
    assert done.stdout == "two"


@pytest.mark.parametrize("data", [3, [1, 2], None, {"a": 1}, 1.5])
async def test_content_that_is_neither_text_nor_bytes(executor: Executor, data: Any) -> None:
    with pytest.raises(TypeError, match=r"data is a text \(str\) or bytes, and this is "):
        await executor.write_file("m", data)
    assert await executor.list_files() == []


async def test_what_is_no_path_no_command_and_no_time(executor: Executor) -> None:
    nothing: Any = None
    number: Any = 5
    for asking in (executor.read_file, executor.list_files):
        with pytest.raises(TypeError, match="path is a text"):
            await asking(nothing)
    with pytest.raises(TypeError, match="new is a text"):
        await executor.str_replace("f", "a", number)
    for command in (nothing, number, b"ls", {"ls"}):
        with pytest.raises(TypeError, match="command is a text for a shell"):
            await executor.exec(command)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a word of the command"):
        await executor.exec(["ls", nothing])
    with pytest.raises(ValueError, match="empty list"):
        await executor.exec([])
    for time in ("5", float("nan"), True):
        with pytest.raises(TypeError, match="timeout is a number of seconds"):
            await executor.exec("true", timeout=time)  # type: ignore[arg-type]
    for option in ({"cwd": 5}, {"env": ["A=1"]}, {"env": {"A": None}}, {"stdin": 5}):
        with pytest.raises(TypeError, match=next(iter(option))):
            await executor.exec("true", **option)
    assert (await executor.exec("echo on", timeout=float("inf"))).stdout == "on\n"


KINDS_OF_SETTINGS = {
    InProcessExecutor: InProcessConfig,
    SubprocessExecutor: SubprocessConfig,
    ContainerExecutor: ContainerConfig,
}


@pytest.mark.parametrize("executor_class", KINDS_OF_SETTINGS)
async def test_settings_of_another_kind_are_refused(executor_class: Any) -> None:
    own = KINDS_OF_SETTINGS[executor_class]
    others = [other() for other in KINDS_OF_SETTINGS.values() if other is not own]
    for wrong in (*others, {}, {"network": False}, "required", own, False):
        with pytest.raises(TypeError, match=rf"takes a {own.__name__}"):
            executor_class(wrong)
    with pytest.raises(TypeError, match="default_timeout"):
        executor_class({"default_timeout": 5})
    assert executor_class(None).config == own()


@pytest.mark.promise("memory of its own")
async def test_a_gigabyte_as_a_value(executor: Executor) -> None:
    result = await executor.run("'x' * 1_000_000_000", timeout=100)
    assert result.error is None
    assert str(result.value).startswith("'xxx")
    assert len(str(result.value)) < 40_000_000


async def test_code_longer_than_a_record(executor: Executor, executor_kind: str) -> None:
    result = await executor.run("#" + "x" * (65 * 1024 * 1024))
    assert result.is_ok if executor_kind == "in-process" else "is too long; at most" in (result.error or "")
    assert (await executor.run("1 + 1")).value == 2


@pytest.mark.parametrize(
    ("code", "timeout", "message"),
    [
        (b"1", None, "code is a text (str), and this is bytes"),
        (5, None, "and this is int"),
        (None, None, "and this is NoneType"),
        (["1"], None, "and this is list"),
        ("1", "a", "timeout is a number of seconds"),
        ("1", float("nan"), "timeout is a number of seconds"),
        ("1", True, "timeout is a number of seconds"),
        ("1", -1, "timeout is a number of seconds"),
        pytest.param("1", 10**5000, "timeout is a number of seconds", id="beyond all floats"),
    ],
)
async def test_what_is_no_code_or_no_time(executor: Executor, code: Any, timeout: Any, message: str) -> None:
    results = [await executor.run(code, timeout), *[item async for item in executor.stream(code, timeout)]]
    for result in results:
        assert isinstance(result, ExecutionResult)
        assert (result.error_type, result.state) == ("TypeError", "kept")
        assert message in (result.error or "")
    assert (await executor.run("1 + 1", float("inf"))).value == 2


@pytest.mark.parametrize("config", [SubprocessConfig, InProcessConfig])
@pytest.mark.parametrize("field", ["default_timeout", "grace"])
@pytest.mark.parametrize("value", ["x", "5", float("nan"), b"1", -1, -0.5])
def test_times_are_looked_at_when_they_are_set(config: Any, field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match="it is a number of seconds"):
        config(**{field: value})


async def test_answers_without_a_waiting_caller_are_not_logged(start: Start) -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    executor = start()
    await executor.run("#" + "x" * (65 * 1024 * 1024))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(executor.exec("sleep 600"), 0.2)
    waiting = asyncio.ensure_future(executor.run("import time\ntime.sleep(600)"))
    await asyncio.sleep(0.2)
    await executor.close()
    assert (await waiting).error_type == "Closed"
    gc.collect()
    await asyncio.sleep(0)
    assert logged == []
