"""`carrel serve`, `carrel mcp` and `carrel keys`: sessions for other programs."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import webbrowser
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from carrel import server
from carrel.cli.exit_codes import WrongUsage
from carrel.cli.options import (
    SERVER,
    Base,
    CacheFolder,
    DatasetsFolder,
    Json,
    LogRequests,
    Network,
    SessionName,
    Timeout,
    command,
    existing_folder,
    group,
    open_session,
    parse_age,
    resolve_base,
)
from carrel.cli.output import Column, flush, is_terminal, print_json, print_table, print_text
from carrel.cli.session_states import settings_of_workspace
from carrel.execution.config import MODES
from carrel.storage.leases import LEASE_SECONDS

T = TypeVar("T", bound=str)

app = typer.Typer()
keys = group(
    "keys",
    "Keys of the users of the server. A running server notices changes within a second.",
    panel=SERVER,
    example="carrel keys list",
)

Store = Annotated[
    str | None,
    typer.Option(metavar="URL|DIR", help="Where keys, sessions and logs are kept. Default: the folder BASE/server."),
]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="The same as --store DIR.")]
UserName = Annotated[str, typer.Argument(metavar="NAME", help="The user's name; sessions belong to a user.")]


@command(app, "serve", panel=SERVER, example="carrel serve --port 8765")
async def serve(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="The port; 0 for any free one.", min=0, max=65535)] = 8765,
    base: Base = None,
    store: Store = None,
    data: Data = None,
    keys: Annotated[
        str | None, typer.Option(metavar="URL|DIR", help="Another store that has the keys. Default: --store.")
    ] = None,
    datasets: DatasetsFolder = None,
    cache: CacheFolder = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Tool files for sessions without a sample. Default: no tools.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(metavar="N", help="Maximum number of live sessions.", min=1)] = 200,
    prewarmed: Annotated[
        int, typer.Option(metavar="N", help="Executors started in advance for samples used repeatedly.", min=0)
    ] = 4,
    retention: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Delete records of sessions that ended this long ago: 30d. Default: never."),
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option(metavar="MODE", help="required, auto or off. Default: $CARREL_SANDBOX, else required.")
    ] = None,
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Allow sessions without a sample to request network access.")
    ] = False,
    page: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="The web page: read, act or off. Default: act on loopback, else read."),
    ] = None,
    record: Annotated[
        str,
        typer.Option(metavar="WHAT", help="What is recorded for the web page: variables, files, both or off."),
    ] = "both",
    join: Annotated[
        bool, typer.Option("--join", help="Become a node of the cluster that shares the store (Redis or Postgres).")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="With --join: where gateways reach this node. Default: its host and port."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --join: the name of the node. Default: host name and port.")
    ] = None,
    lease: Annotated[
        float, typer.Option(metavar="SECONDS", help="With --join: a node that is silent for so long is lost.", min=1)
    ] = LEASE_SECONDS,
    on_store_lost: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="With --join: what happens to the sessions when the store cannot be reached: freeze or end.",
        ),
    ] = "freeze",
    log_requests: LogRequests = False,
    as_json: Json = False,
) -> None:
    """Serve sessions over HTTP until Ctrl-C."""
    mode = _one_of("--sandbox", sandbox or os.environ.get("CARREL_SANDBOX") or "required", MODES)
    folder = resolve_base(base)
    if datasets is not None:
        existing_folder(datasets, "--datasets", must_exist=True)
    settings = server.ServerSettings(
        host=host,
        port=port,
        store=_server_store(base, store, data),
        keys=keys,
        datasets=datasets or folder / "datasets",
        demo=datasets is None,
        cache=cache or folder / "cache",
        tools=tools,
        sandbox=mode,
        network=allow_network,
        max_sessions=max_sessions,
        prewarmed=prewarmed,
        retention=parse_age(retention) if retention is not None else None,
        record=server.RECORD_MODES[_one_of("--record", record, tuple(server.RECORD_MODES))],
        page=_one_of("--page", page, server.PAGE_MODES) if page is not None else None,
        join=join,
        url=url,
        name=_node_name(name, port) if join else "main",
        lease=lease,
        on_store_lost=_one_of("--on-store-lost", on_store_lost, server.STORE_LOST_MODES),
        log_requests=log_requests,
    )

    def listening(url: str, key: str | None) -> None:
        if as_json:
            # On one line, so that the parent process can read it while the server runs.
            typer.echo(json.dumps({"url": url, "key": key}))
        else:
            print_text(f"Listening on {url}, sandbox: {mode}")
            if page != "off":
                print_text(f"Web page: {url.removesuffix('api/v1')}")
            if key is not None:
                print_text(f"Created the first key, which is printed only now: {key}")
            print_text("Ctrl-C stops the server and all sessions.", "dim")
        flush()

    await server.serve_http(settings, listening)


def _node_name(name: str | None, port: int) -> str:
    if name is None:
        return f"{re.sub(r'[^A-Za-z0-9_-]', '-', socket.gethostname())[:48]}-{port or secrets.token_hex(4)}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise WrongUsage(f"--name: {name!r} is not a name; use letters, digits and . _ -, at most 64")
    return name


def _one_of(option: str, text: str, choices: Sequence[T]) -> T:
    for choice in choices:
        if choice == text:
            return choice
    raise WrongUsage(f"{option}: {text!r} is not one of {', '.join(map(str, choices))}")


@command(app, "web", panel=SERVER, example="carrel web --port 8765")
async def web(
    port: Annotated[int, typer.Option(metavar="PORT", help="The port; 0 for any free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Show sessions and task runs in the browser, until Ctrl-C.

    They are those of the base folder. Only this machine can connect."""

    def listening(link: str) -> None:
        if as_json:
            typer.echo(json.dumps({"url": link}))
        else:
            print_text(f"Listening on {link.partition('/enter')[0]}")
            print_text(f"Open {link}")
            print_text("The link logs in once, within five minutes. Ctrl-C stops the page.", "dim")
        flush()
        if browser and not as_json and is_terminal():
            webbrowser.open(link)

    await server.serve_page(resolve_base(base, must_exist=True), port, listening)


@command(app, "mcp", panel=SERVER, example="carrel mcp --http 8765")
async def mcp(
    base: Base = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="[HOST:]PORT", help="Serve HTTP at /mcp. Default: standard input and output."),
    ] = None,
    runtime_deps: Annotated[
        bool, typer.Option("--runtime-deps/--no-runtime-deps", help="Allow installing and removing packages.")
    ] = True,
    timeout: Timeout = 60.0,
    network: Network = True,
    session_name: SessionName = None,
) -> None:
    """Serve one session over the Model Context Protocol.

    On standard input and output it serves one client and ends with it. Over HTTP all clients share the session until
    Ctrl-C, and only programs on this machine can connect unless HOST is given."""
    address = None if http is None else parse_address(http)
    settings: dict[str, Any] = {"timeout": timeout or None, "allow_runtime_deps": runtime_deps, "network": network}
    if session_name is not None:
        workspace, mode = settings_of_workspace(base, session_name, None, "overlay")
        settings |= {"session_id": session_name, "workspace": workspace, "workspace_mode": mode}
    async with open_session(base, must_exist=False, **settings) as session:
        await session.start()
        if address is None:
            await server.serve_mcp_stdio(session, runtime_deps=runtime_deps)
        else:
            await server.serve_mcp_http(session, *address, runtime_deps=runtime_deps, listening=_print_address)


def _print_address(url: str) -> None:
    print_text(f"Listening on {url}")
    print_text("Ctrl-C stops the server and its session.", "dim")
    flush()


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of `8765`, `127.0.0.1:8765` or `[::1]:8765`."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535 or "/" in host:
        raise WrongUsage(f"--http: {text!r} is not an address; write PORT or HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


# --- keys -----------------------------------------------------------------------------------------------------------


@command(keys, "add", example="carrel keys add ada --scope agent --expires 7d")
async def add_key(
    name: UserName,
    scope: Annotated[
        str,
        typer.Option(metavar="SCOPE", help="full; agent (no access to solutions and tests); or read (no changes)."),
    ] = "full",
    session: Annotated[str | None, typer.Option(metavar="ID", help="Allow access to this session only.")] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="AGE", help="How long it is valid: 7d. Default: no limit.")
    ] = None,
    base: Base = None,
    store: Store = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Create a key and print it.

    It cannot be printed again, because only its hash is stored."""
    lifetime = parse_age(expires) if expires is not None else None
    async with server.open_keys(_server_store(base, store, data)) as api_keys:
        limit = _one_of("--scope", scope, server.SCOPES)
        key = await api_keys.add(name, scope=limit, session=session, lifetime=lifetime)
    if as_json:
        print_json({"name": name, "key": key, "scope": scope, "session": session})
    else:
        typer.echo(key)


@command(keys, "list", example="carrel keys list")
async def list_keys(base: Base = None, store: Store = None, data: Data = None, as_json: Json = False) -> None:
    """Show the valid keys: users, scopes and expiry."""
    async with server.open_keys(_server_store(base, store, data)) as api_keys:
        found = await api_keys.list()
    if as_json:
        print_json([_key_data(key) for key in found])
        return
    rows = [
        (key.name, key.scope, key.session or "-", _minute(key.created_at), _minute(key.expires_at)) for key in found
    ]
    print_table([Column(title) for title in ("NAME", "SCOPE", "SESSION", "CREATED", "EXPIRES")], rows)


@command(keys, "revoke", example="carrel keys revoke ada")
async def revoke_keys(
    name: UserName,
    scope: Annotated[str | None, typer.Option(metavar="SCOPE", help="Only the key with this scope.")] = None,
    session: Annotated[str | None, typer.Option(metavar="ID", help="Only the key for this session.")] = None,
    base: Base = None,
    store: Store = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Revoke the keys of a user.

    A running server refuses them within a second."""
    async with server.open_keys(_server_store(base, store, data)) as api_keys:
        limit = _one_of("--scope", scope, server.SCOPES) if scope is not None else None
        revoked = await api_keys.revoke(name, scope=limit, session=session)
    if as_json:
        print_json({"name": name, "revoked": True, "keys": [_key_data(key) for key in revoked]})
    else:
        for key in revoked:
            print_text(f"Revoked the key of {key}.")


def _server_store(base: Path | None, store: str | None, data: Path | None) -> str | Path:
    """Return the store of a server: `--store`, or the folder of `--data`, else a folder of the base."""
    if store is not None and data is not None:
        raise WrongUsage("--data is the same as --store with a folder; give one of them")
    return store or data or resolve_base(base) / "server"


def _key_data(key: server.ApiKey) -> dict[str, Any]:
    expires = key.expires_at.isoformat() if key.expires_at is not None else None
    about = {"name": key.name, "created_at": key.created_at.isoformat(), "scope": key.scope}
    return {**about, "session": key.session, "expires_at": expires}


def _minute(moment: datetime | None) -> str:
    return moment.strftime("%Y-%m-%d %H:%M") if moment is not None else "-"
