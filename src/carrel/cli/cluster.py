"""`carrel gateway` and `carrel cluster`: many nodes behind one URL."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated

import typer

from carrel import cluster as clusters
from carrel.cli.exit_codes import WrongUsage
from carrel.cli.options import SERVER, Json, LogRequests, command, group, parse_age
from carrel.cli.output import Column, flush, print_json, print_table, print_text
from carrel.errors import ExecutionError
from carrel.wire.answers import NodeInfo

app = typer.Typer()
cluster = group(
    "cluster",
    "Nodes of a cluster. They are `carrel serve --join` processes that share a store.",
    panel=SERVER,
    example="carrel cluster status --store redis://127.0.0.1:6379/0",
)

_FOLLOW_SECONDS = 5.0

SharedStore = Annotated[
    str, typer.Option("--store", metavar="URL", help="The store that the nodes share: redis://… or postgresql://…")
]


@command(app, "gateway", panel=SERVER, example="carrel gateway --store redis://127.0.0.1:6379/0 --port 8700")
async def gateway(
    store: SharedStore,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="The port; 0 for any free one.", min=0, max=65535)] = 8700,
    log_requests: LogRequests = False,
    as_json: Json = False,
) -> None:
    """Serve one URL in front of all nodes of a cluster until Ctrl-C.

    A gateway keeps nothing, so any number of them can run."""

    def listening(url: str) -> None:
        if as_json:
            typer.echo(json.dumps({"url": url}))
        else:
            print_text(f"Listening on {url}")
            print_text("Ctrl-C stops the gateway; the nodes and their sessions go on.", "dim")
        flush()

    await clusters.serve_gateway(store, host, port, listening, log_requests=log_requests)


RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="The Ray cluster: auto (of this machine), HOST:PORT, or local: one that ends with this command. "
        "Default: auto, without --url.",
    ),
]


Urls = Annotated[
    list[str] | None,
    typer.Option("--url", metavar="URL", help="A node that something else than Ray starts; can be repeated."),
]


def _open_nodes(
    store: str, urls: list[str] | None, ray_address: str | None, words: Sequence[str] = ()
) -> AbstractAsyncContextManager[clusters.Nodes]:
    """Open the nodes at a list of URLs, or those on Ray."""
    if urls and ray_address is not None:
        raise WrongUsage("--url names nodes that Ray does not start; leave --ray-address out")
    return clusters.open_static(store, urls) if urls else clusters.open_ray(store, ray_address or "auto", words)


@command(cluster, "up", example="carrel cluster up --store redis://127.0.0.1:6379/0 --ray-address auto --nodes 3")
async def up(
    store: SharedStore,
    ray_address: RayAddress = None,
    urls: Urls = None,
    nodes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of nodes. Default: one on each Ray node, or at each --url.", min=1),
    ] = None,
    max_sessions: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of live sessions of a node on Ray.", min=1)
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Follow Ray nodes that come and go until Ctrl-C; always so with `local`."),
    ] = False,
) -> None:
    """Start nodes on Ray, or wait for those at a list of URLs.

    Each machine has carrel in the same version. A machine that leaves a Ray cluster takes its node with it; a node
    there that has ended is started again. Of the nodes at the URLs, those after the first N are drained."""
    if urls and (follow or max_sessions is not None):
        raise WrongUsage("--follow and --max-sessions are for nodes on Ray; nodes at a --url have options of their own")
    words = ["--max-sessions", str(max_sessions)] if max_sessions is not None else []
    async with _open_nodes(store, urls, ray_address, words) as engine, clusters.open_cluster(store) as found:
        await engine.wanted(nodes)
        started = {each.name for each in await engine.list() if each.state != "ended"}
        while not started <= {info.name for info in await found.list()}:
            for each in await engine.list():
                if each.name in started and each.state == "ended":
                    log = f"nodes/{each.name}.log in carrel's folder" if not urls else "its log"
                    raise ExecutionError(f"node {each.name} ended while it started; see {log} on its machine")
            await asyncio.sleep(0.5)
        print_text(f"{nodes if urls and nodes else len(started)} nodes run.")
        flush()
        while follow or ray_address == "local":
            await asyncio.sleep(_FOLLOW_SECONDS)
            await engine.wanted(nodes)


@command(cluster, "down", example="carrel cluster down --store redis://127.0.0.1:6379/0 --ray-address auto")
async def down(store: SharedStore, ray_address: RayAddress = None, urls: Urls = None) -> None:
    """End all nodes, with their sessions.

    They are those that `up` has started on Ray, or those at a list of URLs."""
    async with _open_nodes(store, urls, ray_address) as engine:
        ended = [each.name for each in await engine.list() if each.name]
        await asyncio.gather(*map(engine.remove, ended))
    print_text(f"{len(ended)} nodes were ended.")


@command(cluster, "status", example="carrel cluster status --store redis://127.0.0.1:6379/0")
async def status(
    store: SharedStore,
    watch: Annotated[bool, typer.Option("--watch", help="Print again every two seconds, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show the nodes: sessions, free slots, load, leases and versions."""
    async with clusters.open_cluster(store) as nodes:
        while True:
            found = await nodes.list()
            if as_json:
                print_json([info.model_dump(mode="json") for info in found])
            else:
                _print_nodes(found)
            flush()
            if not watch:
                return
            await asyncio.sleep(2)


def _print_nodes(found: list[NodeInfo]) -> None:
    columns = [Column(title) for title in ("NODE", "STATE", "SESSIONS", "FREE", "LOAD", "RENEWED", "VERSION", "URL")]
    rows = [
        (
            info.name,
            info.state,
            str(info.sessions),
            str(info.free_slots),
            f"{info.load:.2f}",
            f"{info.renewed_seconds_ago or 0:.1f} s ago",
            info.version,
            info.url,
        )
        for info in found
    ]
    if not rows:
        print_text("There is no node; `carrel serve --join --store URL` starts one.")
        return
    print_table(columns, rows)


@command(cluster, "drain", example="carrel cluster drain node-1 --store redis://127.0.0.1:6379/0")
async def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The name of the node.")],
    store: SharedStore,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="End what still runs after this time: 1h. Default: wait for its end."),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let the node take sessions again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the node has ended.")] = False,
) -> None:
    """Let a node end after its last session.

    It takes no new sessions."""
    if undo and (deadline is not None or wait):
        raise WrongUsage("--undo goes with neither --deadline nor")
    until = time.time() + parse_age(deadline).total_seconds() if deadline is not None else None
    async with clusters.open_cluster(store) as nodes:
        if undo:
            await nodes.undo_drain(node)
            print_text(f"Node {node} takes sessions again.")
            return
        await nodes.drain(node, until)
        print_text(f"Node {node} takes no new sessions, and ends after its last one.")
        flush()
        while wait and await nodes.has(node):  # noqa: ASYNC110 -- another process ends it
            await asyncio.sleep(0.5)
