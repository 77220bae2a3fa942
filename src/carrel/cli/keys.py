"""`carrel keys`: who may use the server."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from carrel import server
from carrel.cli.exit_codes import WrongUsage, async_command
from carrel.cli.options import duration, store_of
from carrel.cli.output import Column, print_json, print_table, print_text

app = typer.Typer(help="The keys of those who may use the server.", no_args_is_help=True, rich_markup_mode=None)

Store = Annotated[
    str | None, typer.Option(metavar="URL|DIR", help="The server's store. Default: the folder $CARREL_HOME/server.")
]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="The same as --store DIR.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the user; sessions belong to it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("add")
@async_command
async def add(
    name: Name,
    scope: Annotated[
        str,
        typer.Option(
            metavar="SCOPE",
            help="full; agent, which hides solutions and tests; or read, which changes nothing.",
        ),
    ] = "full",
    session: Annotated[str | None, typer.Option(metavar="ID", help="Limit the key to one session.")] = None,
    expires: Annotated[str | None, typer.Option(metavar="AGE", help="Refuse it after this time, as in 7d.")] = None,
    store: Store = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once: only its hash is kept."""
    lifetime = duration(expires) if expires is not None else None
    async with server.open_keys(store_of(store, data)) as keys:
        key = await keys.add(name, scope=_scope(scope), session=session, lifetime=lifetime)
    if as_json:
        print_json({"name": name, "key": key, "scope": scope, "session": session})
    else:
        typer.echo(key)


@app.command("list")
@async_command
async def list_keys(store: Store = None, data: Data = None, as_json: AsJson = False) -> None:
    """The valid keys: their names, and what they are limited to."""
    async with server.open_keys(store_of(store, data)) as keys:
        found = await keys.list()
    if as_json:
        print_json([_as_json(key) for key in found])
        return
    rows = [
        (key.name, key.scope, key.session or "-", _minute(key.created_at), _minute(key.expires_at)) for key in found
    ]
    print_table([Column(title) for title in ("NAME", "SCOPE", "SESSION", "MADE", "EXPIRES")], rows)


@app.command("revoke")
@async_command
async def revoke(
    name: Name,
    scope: Annotated[str | None, typer.Option(metavar="SCOPE", help="Only the key with this scope.")] = None,
    session: Annotated[str | None, typer.Option(metavar="ID", help="Only the key for this session.")] = None,
    store: Store = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a user's keys from now on; a server that runs does so within a second."""
    async with server.open_keys(store_of(store, data)) as keys:
        gone = await keys.revoke(name, scope=_scope(scope) if scope is not None else None, session=session)
    if as_json:
        print_json({"name": name, "revoked": True, "keys": [_as_json(key) for key in gone]})
    else:
        for key in gone:
            print_text(f"The key of {key} is refused from now on.")


def _scope(text: str) -> server.KeyScope:
    for scope in server.SCOPES:
        if scope == text:
            return scope
    raise WrongUsage(f"--scope is {text!r}; it can be {', '.join(server.SCOPES)}")


def _as_json(key: server.ApiKey) -> dict[str, Any]:
    expires = key.expires_at.isoformat() if key.expires_at is not None else None
    about = {"name": key.name, "created_at": key.created_at.isoformat(), "scope": key.scope}
    return {**about, "session": key.session, "expires_at": expires}


def _minute(moment: datetime | None) -> str:
    return moment.strftime("%Y-%m-%d %H:%M") if moment is not None else "-"
