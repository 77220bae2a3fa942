"""`carrel run`, and running code for other commands: output as it comes, the result as text or JSON."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import carrel
from carrel.cli.exit_codes import FAILED, WrongUsage, async_command, is_undecodable
from carrel.cli.options import Base, Json, chosen, python_in
from carrel.cli.output import print_json
from carrel.execution.config import Limits, size_in_bytes
from carrel.execution.executor import ExecutionResult, Output
from carrel.guest.worker import values
from carrel.text import neutralize_control_chars


@async_command
async def run(
    code: Annotated[str, typer.Argument(metavar="CODE|FILE|-", help="Python code, a file with it, or - to read it.")],
    timeout: Annotated[float, typer.Option(help="Seconds it may take; 0 for no limit.", min=0)] = 60.0,
    network: Annotated[bool, typer.Option("--network/--no-network", help="Whether it has the host's network.")] = True,
    workspace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, exists=True, help="A folder to work in; it is left as it is."),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Let it change the folder given by --workspace.")] = False,
    sandbox: Annotated[
        Literal["auto", "required", "off"] | None, typer.Option(help="Default: $CARREL_SANDBOX, else auto.")
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="The most memory it may use: 512MiB.")] = None,
    dep: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="A package it needs; again for more.")
    ] = None,
    python: Annotated[str | None, typer.Option(metavar="VERSION", help="The Python to run it in.")] = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Run Python code in a session of its own, sandboxed where this machine can, and print what comes of it."""
    text = source(code)
    session = carrel.Session.subprocess(
        chosen(base),
        timeout=timeout or None,
        sandbox=sandbox,
        network=network,
        workspace=workspace,
        workspace_mode="rw" if write else "overlay",
        limits=Limits(memory=size_in_bytes(memory) if memory else None),
        extra_deps=dep,
        python_version=python,
    )
    async with session:
        result = await session.run(text) if as_json else await shown(session, text)
    print_result(result, as_json)
    if failed(result):
        raise typer.Exit(FAILED)


def source(code: str) -> str:
    """What was typed, what the file holds, or what comes on standard input."""
    if code == "-" or ("\n" not in code and len(code) < 4096 and Path(code).is_file()):
        return python_in(code)
    if code.endswith(".py") and "\n" not in code and " " not in code:
        raise WrongUsage(f"there is no file {code}")
    if is_undecodable(code):
        raise WrongUsage(f"{code!r} is not text in UTF-8")
    return code


async def shown(session: "carrel.Session", code: str, timeout: float | None = None) -> ExecutionResult:
    """Run code and print what it writes as it comes."""
    result = ExecutionResult()
    async for item in session.stream(code, timeout):
        if isinstance(item, Output):
            write_stream(sys.stdout if item.stream == "stdout" else sys.stderr, item.text)
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
        print_json(as_data(result))
    elif failed(result):
        write_stream(sys.stderr, f"{result.error}\n")
    elif result.value is not None:
        write_stream(sys.stdout, f"{result.value!r}\n")


def write_stream(stream: Any, text: str) -> None:
    """Write text: to a terminal without control characters, to a pipe as it is."""
    stream.write(neutralize_control_chars(text) if stream.isatty() else text)
    stream.flush()


def as_data(result: ExecutionResult) -> dict[str, Any]:
    """The result as JSON; values that JSON has not are tagged as on the worker's line."""
    return {**asdict(result), "value": values.encode(result.value), "is_ok": result.is_ok}
