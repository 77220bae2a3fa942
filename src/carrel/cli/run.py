"""`carrel run`: code, run once in a session of its own, its output as it comes."""

from pathlib import Path
from typing import Annotated, Literal

import typer

import carrel
from carrel.cli.asking import python_in
from carrel.cli.bases import Base, Json, chosen
from carrel.cli.ending import FAILED, WrongUsage, is_no_text, waits
from carrel.cli.running import failed, print_result, shown
from carrel.execution.config import Limits, size_in_bytes


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
    if is_no_text(code):
        raise WrongUsage(f"{code!r} is no text in UTF-8")
    return code
