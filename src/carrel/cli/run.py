"""`carrel run`: code, run once in a session of its own, its output as it comes."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from carrel.cli import show
from carrel.cli.ending import FAILED, WrongUsage, waits
from carrel.conversation.inert import inert
from carrel.execution.executor import ExecutionResult, Output
from carrel.execution.settings import Limits, SubprocessConfig
from carrel.execution.sizes import size_in_bytes
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.worker import values


@waits
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
    base: Annotated[Path | None, typer.Option(metavar="DIR", help="Where environments are kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run Python code in a session of its own, sandboxed where this machine can, and print what comes of it."""
    config = SubprocessConfig(
        timeout=timeout or None,
        sandbox=sandbox,
        network=network,
        workspace=workspace,
        workspace_mode="rw" if write else "overlay",
        limits=Limits(memory=size_in_bytes(memory) if memory else None),
        deps=tuple(dep or ()),
        python_version=python,
        base=base,
    )
    text = source(code)
    async with SubprocessExecutor(config) as executor:
        result = await executor.run(text) if as_json else await _shown(executor, text)
    if as_json:
        show.print_json(as_data(result))
    elif result.error is not None:
        _write(sys.stderr, result.error + "\n")
    elif result.value is not None:
        _write(sys.stdout, f"{result.value!r}\n")
    if result.error is not None:
        raise typer.Exit(FAILED)


def source(code: str) -> str:
    """What was typed, what the file holds, or what comes on standard input."""
    if code == "-":
        return sys.stdin.read()
    if "\n" not in code and len(code) < 4096 and Path(code).is_file():
        try:
            return Path(code).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise WrongUsage(f"{code} is no text in UTF-8") from None
    if code.endswith(".py") and "\n" not in code and " " not in code:
        raise WrongUsage(f"there is no file {code}")
    return code


async def _shown(executor: SubprocessExecutor, code: str) -> ExecutionResult:
    async for item in executor.stream(code):
        if isinstance(item, Output):
            _write(sys.stdout if item.stream == "stdout" else sys.stderr, item.text)
        else:
            return item
    raise AssertionError("a stream ends with its result")


def _write(stream: Any, text: str) -> None:
    """To a terminal without what would act on it, to a pipe as it is."""
    stream.write(inert(text) if stream.isatty() else text)
    stream.flush()


def as_data(result: ExecutionResult) -> dict[str, Any]:
    """The result as JSON; values that JSON has not are tagged as on the worker's line."""
    return {**asdict(result), "value": values.encode(result.value), "is_ok": result.is_ok}
