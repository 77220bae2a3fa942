"""`carrel mcp`: a session for an agent that speaks the Model Context Protocol."""

import re
from typing import Annotated

import typer

from carrel import server
from carrel.cli.exit_codes import WrongUsage, async_command
from carrel.cli.options import Base, opened
from carrel.cli.output import flush, print_text


@async_command
async def mcp(
    base: Base = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="[HOST:]PORT", help="Answer over HTTP at /mcp, not on stdin and stdout."),
    ] = None,
    runtime_deps: Annotated[
        bool, typer.Option("--runtime-deps/--no-runtime-deps", help="Whether packages may be added and removed.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Seconds code may take; 0 for no limit.", min=0)] = 60.0,
    network: Annotated[
        bool, typer.Option("--network/--no-network", help="Whether code has the host's network.")
    ] = True,
) -> None:
    """Serve one session to an MCP client.

    It ends when the client does. Over HTTP all clients share it, it ends with Ctrl-C, and only this machine is answered
    unless HOST says otherwise."""
    place = address(http) if http is not None else None
    settings = {"timeout": timeout or None, "allow_runtime_deps": runtime_deps, "network": network}
    async with opened(base, **settings) as session:
        if place is None:
            await server.serve_mcp_stdio(session, runtime_deps=runtime_deps)
        else:
            await server.serve_mcp_http(session, *place, runtime_deps=runtime_deps, listening=_listening)


def _listening(url: str) -> None:
    print_text(f"Listening on {url}")
    print_text("Ctrl-C ends it, with its session.", "dim")
    flush()


def address(text: str) -> tuple[str, int]:
    """`8765`, `127.0.0.1:8765`, `[::1]:8765`; 0 is a port that is free."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535 or "/" in host:
        raise WrongUsage(f"{text!r} is no address; write a port, or HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)
