"""Many nodes behind one URL: the gateway, the choice of a node, and the settling of nodes that are lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from carrel import server
from carrel.cluster.nodes import Nodes, open_cluster
from carrel.cluster.static_nodes import StaticNodes
from carrel.errors import MissingExtra
from carrel.home import resolve_carrel_home

__all__ = ["Nodes", "open_cluster", "open_ray", "open_static", "serve_gateway"]


@asynccontextmanager
async def open_ray(store: str, address: str, words: Sequence[str]) -> AsyncIterator[Nodes]:
    """Connect to a Ray cluster that runs the nodes of a store; `words` are further options of `carrel serve`."""
    try:
        from carrel.cluster.ray_nodes import RayNodes, connect  # noqa: PLC0415 -- an extra, and slow to load
    except ModuleNotFoundError as problem:
        raise MissingExtra("nodes on Ray need", "ray") from problem
    async with open_cluster(store) as cluster, connect(address):
        yield RayNodes(cluster, ["--store", store, *words], resolve_carrel_home() / "nodes")


@asynccontextmanager
async def open_static(store: str, urls: Sequence[str]) -> AsyncIterator[Nodes]:
    """Open the nodes of a store that are at these URLs, without Ray."""
    async with open_cluster(store) as cluster:
        yield StaticNodes(cluster, urls)


async def serve_gateway(
    store: str | Path | None, host: str, port: int, on_listening: Callable[[str], None], *, log_requests: bool = False
) -> None:
    """Serve a gateway until a signal; `on_listening` gets its URL."""
    try:
        from carrel.cluster.gateway import serve  # noqa: PLC0415 -- needs the extra `server`
    except ModuleNotFoundError as problem:
        raise MissingExtra("the gateway needs", "server") from problem
    settings = server.ServerSettings(host=host, port=port, store=store, log_requests=log_requests)
    await serve(settings, on_listening)
