"""`carrel run`, and running code for other commands: output while it is written, the result as text or JSON."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import carrel
from carrel.cli.exit_codes import FAILED, WrongUsage, is_undecodable
from carrel.cli.options import RUN, Base, Json, Network, SessionName, Timeout, command, read_python, resolve_base
from carrel.cli.output import print_json
from carrel.cli.session_states import note_resumed, settings_of_workspace
from carrel.execution.config import Limits, size_in_bytes
from carrel.execution.executor import ExecutionResult, Output
from carrel.guest.worker import values
from carrel.text import neutralize_control_chars

app = typer.Typer()


@command(app, "run", panel=RUN, example='carrel run "sum(range(10))"')
async def run(
    code: Annotated[str, typer.Argument(metavar="CODE|FILE|-", help="Python code, a file, or - for standard input.")],
    timeout: Timeout = 60.0,
    network: Network = True,
    workspace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, exists=True, help="Folder to work in; it is not changed."),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Allow changes to the folder of --workspace.")] = False,
    sandbox: Annotated[
        Literal["auto", "required", "off"] | None, typer.Option(help="Default: $CARREL_SANDBOX, else auto.")
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory limit, such as 512MiB.")] = None,
    dep: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="A package to install; may be repeated.")
    ] = None,
    python: Annotated[str | None, typer.Option(metavar="VERSION", help="Python version, such as 3.12.")] = None,
    session_name: SessionName = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Run Python code in a sandboxed session and print the result.

    With --session, variables and files are there again the next time."""
    text = read_code(code)
    given = settings_of_workspace(base, session_name, workspace, "rw" if write else "overlay")
    session = carrel.Session.subprocess(
        resolve_base(base),
        timeout=timeout or None,
        sandbox=sandbox,
        network=network,
        workspace=given[0],
        workspace_mode=given[1],
        limits=Limits(memory=size_in_bytes(memory) if memory else None),
        extra_deps=dep,
        python_version=python,
        on_error="skip",
        session_id=session_name,
    )
    async with session:
        note_resumed(session)
        result = await session.run(text) if as_json else await run_printing(session, text)
    print_result(result, as_json)
    if has_failed(result):
        raise typer.Exit(FAILED)


def read_code(code: str) -> str:
    """Return the code itself, or the content of the file or of standard input that it names."""
    if code == "-" or ("\n" not in code and len(code) < 4096 and Path(code).is_file()):
        return read_python(code)
    if code.endswith(".py") and "\n" not in code and " " not in code:
        raise WrongUsage(f"there is no file {code}")
    if is_undecodable(code):
        raise WrongUsage(f"{code!r} is not text in UTF-8")
    return code


async def run_printing(session: "carrel.Session", code: str, timeout: float | None = None) -> ExecutionResult:
    """Run code and print its output while it is written."""
    result = ExecutionResult()
    async for item in session.stream(code, timeout):
        if isinstance(item, Output):
            write_stream(sys.stdout if item.stream == "stdout" else sys.stderr, item.text)
        else:
            result = item
    return result


_EXITS = ("SystemExit", "SystemExit: None", "SystemExit: 0")


def has_failed(result: ExecutionResult) -> bool:
    """Return whether the code raised; `sys.exit(0)`, with which scripts end, is not a failure."""
    exited = result.error_type == "SystemExit" and (result.error or "").endswith(tuple(f"\n{text}" for text in _EXITS))
    return result.error is not None and not exited


def print_result(result: ExecutionResult, as_json: bool = False) -> None:
    if as_json:
        # Values that JSON cannot express are tagged as in the worker's protocol.
        print_json({**asdict(result), "value": values.encode(result.value), "is_ok": result.is_ok})
    elif has_failed(result):
        write_stream(sys.stderr, f"{result.error}\n")
    elif result.value is not None:
        write_stream(sys.stdout, f"{result.value!r}\n")


def write_stream(stream: Any, text: str) -> None:
    """Write text: to a terminal without control characters, to a pipe as it is."""
    stream.write(neutralize_control_chars(text) if stream.isatty() else text)
    stream.flush()
