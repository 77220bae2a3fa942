"""`carrel keys`: who may use the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carrel import server
from carrel.cli import show
from carrel.cli.ending import waits

app = typer.Typer(help="The keys of those who may use the server.", no_args_is_help=True, rich_markup_mode=None)

Data = Annotated[Path | None, typer.Option(metavar="DIR", help="The server's. Default: $CARREL_HOME/server.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the user; sessions belong to it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("add")
@waits
async def add(name: Name, data: Data = None, as_json: AsJson = False) -> None:
    """Make a key and print it, this once: only its hash is kept."""
    async with server.opened_keys(data) as keys:
        key = await keys.add(name)
    if as_json:
        show.print_json({"name": name, "key": key})
    else:
        typer.echo(key)


@app.command("list")
@waits
async def list_keys(data: Data = None, as_json: AsJson = False) -> None:
    """The names of those that are valid."""
    async with server.opened_keys(data) as keys:
        found = await keys.list()
    if as_json:
        show.print_json([{"name": key.name, "created_at": key.created_at.isoformat()} for key in found])
        return
    rows = [(key.name, key.created_at.strftime("%Y-%m-%d %H:%M")) for key in found]
    show.print_table([show.Column("NAME"), show.Column("MADE")], rows)


@app.command("revoke")
@waits
async def revoke(name: Name, data: Data = None, as_json: AsJson = False) -> None:
    """Refuse a key from now on; a server that runs does so within a second."""
    async with server.opened_keys(data) as keys:
        await keys.revoke(name)
    if as_json:
        show.print_json({"name": name, "revoked": True})
    else:
        show.say(f"The key of {name} is refused from now on.")
