"""Code run in a session, and what comes of it shown: to a person as it comes, to a program as JSON."""

import sys
from dataclasses import asdict
from typing import Any

import carrel
from carrel.cli import show
from carrel.execution.executor import ExecutionResult, Output
from carrel.guest.worker import values
from carrel.text import neutralize_control_chars


async def shown(session: "carrel.Session", code: str, timeout: float | None = None) -> ExecutionResult:
    """Run code and print what it writes as it comes."""
    result = ExecutionResult()
    async for item in session.stream(code, timeout):
        if isinstance(item, Output):
            write(sys.stdout if item.stream == "stdout" else sys.stderr, item.text)
        else:
            result = item
    return result


_LEFT = ("SystemExit", "SystemExit: None", "SystemExit: 0")


def failed(result: ExecutionResult) -> bool:
    """Whether the code did not come to its end; one that ends with `sys.exit(0)`, as scripts do, has."""
    left = result.error_type == "SystemExit" and (result.error or "").endswith(tuple(f"\n{word}" for word in _LEFT))
    return result.error is not None and not left


def print_result(result: ExecutionResult, as_json: bool = False) -> None:
    if as_json:
        show.print_json(as_data(result))
    elif failed(result):
        write(sys.stderr, f"{result.error}\n")
    elif result.value is not None:
        write(sys.stdout, f"{result.value!r}\n")


def write(stream: Any, text: str) -> None:
    """To a terminal without what would act on it, to a pipe as it is."""
    stream.write(neutralize_control_chars(text) if stream.isatty() else text)
    stream.flush()


def as_data(result: ExecutionResult) -> dict[str, Any]:
    """The result as JSON; values that JSON has not are tagged as on the worker's line."""
    return {**asdict(result), "value": values.encode(result.value), "is_ok": result.is_ok}
