"""Many nodes behind one URL: the gateway, the choice of a node, and the settling of nodes that are lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from carrel.cluster.nodes import open_cluster
from carrel.errors import MissingExtra
from carrel.home import resolve_carrel_home

if TYPE_CHECKING:
    from carrel.cluster.ray_nodes import RayNodes

__all__ = ["open_cluster", "open_ray", "serve_gateway"]


@asynccontextmanager
async def open_ray(store: str, address: str, words: Sequence[str]) -> AsyncIterator[RayNodes]:
    """Connect to a Ray cluster that runs the nodes of a store; `words` are further options of `carrel serve`."""
    try:
        from carrel.cluster.ray_nodes import RayNodes, connect  # noqa: PLC0415 -- an extra, and slow to load
    except ModuleNotFoundError as problem:
        raise MissingExtra("nodes on Ray need", "ray") from problem
    async with open_cluster(store) as cluster, connect(address):
        yield RayNodes(cluster, ["--store", store, *words], resolve_carrel_home() / "nodes")


async def serve_gateway(
    store: str | Path | None, host: str, port: int, on_listening: Callable[[str], None], *, log_requests: bool = False
) -> None:
    """Serve a gateway until a signal; `on_listening` gets its URL."""
    try:
        from carrel.cluster.gateway import serve  # noqa: PLC0415 -- needs the extra `server`
        from carrel.server import ServerSettings  # noqa: PLC0415
    except ModuleNotFoundError as problem:
        raise MissingExtra("the gateway needs", "server") from problem
    settings = ServerSettings(host=host, port=port, store=store, log_requests=log_requests)
    await serve(settings, on_listening)
