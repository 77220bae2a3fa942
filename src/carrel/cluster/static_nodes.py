"""Nodes at a list of URLs, which systemd, Kubernetes or a person starts: they are awaited, drained and ended here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx2

from carrel.cluster.nodes import Cluster, EngineNode
from carrel.errors import ConfigurationError, NodeNotFound

_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 5.0


class StaticNodes:
    """The nodes of a cluster that should be at these URLs. None is started here."""

    def __init__(self, cluster: Cluster, urls: Sequence[str], *, patience: float = 60.0) -> None:
        """`patience`: how many seconds `wanted` and `remove` wait for the nodes."""
        self._cluster = cluster
        self._urls = list(dict.fromkeys(map(_checked, urls)))
        self._patience = patience

    async def wanted(self, count: int | None) -> None:
        """Wait until the first `count` nodes of the list, or all, take sessions; drain the others.

        NodeNotFound names those that do not come."""
        if count is not None and count > len(self._urls):
            raise ConfigurationError(f"{count} nodes are wanted, but only {len(self._urls)} URLs are given")
        names = {node.where: node.name for node in await self.list()}
        for url in self._urls[count or len(self._urls) :]:
            if names[url]:
                await self.drain(names[url])
        for url in self._urls[:count]:
            if names[url]:
                with contextlib.suppress(NodeNotFound):
                    await self._cluster.undo_drain(names[url])
        until = time.monotonic() + self._patience
        while missing := await self._missing(self._urls[:count]):
            if time.monotonic() > until:
                raise NodeNotFound("; ".join(missing))
            await asyncio.sleep(_LOOK_SECONDS)

    async def _missing(self, urls: Sequence[str]) -> list[str]:
        """Return what is wrong with the nodes at these URLs."""
        problems = {
            "": "no node has joined from {0}; run `carrel serve --join --url {0} --store …` there",
            "unknown": "the node at {0} has a lease, but does not answer at this URL; correct its --url",
            "ended": "the node at {0} does not renew its lease; look at its log",
        }
        found = {node.where: node for node in await self.list()}
        states = [(url, found[url].state if found[url].name else "") for url in urls]
        return [problems[state].format(url) for url, state in states if state != "running"]

    async def list(self) -> list[EngineNode]:
        """Return a node for each URL, in their order; its name is empty if none has joined from there."""
        nodes = {info.url: info for info in await self._cluster.list()}

        async def look(url: str) -> EngineNode:
            if (info := nodes.get(url)) is None:
                return EngineNode("", url, "ended")
            if info.state == "overdue":
                return EngineNode(info.name, url, "ended")
            return EngineNode(info.name, url, "running" if await _answers(url) else "unknown")

        return await asyncio.gather(*map(look, self._urls))

    async def drain(self, name: str, until: float | None = None) -> None:
        """Let a node take no new sessions, and end when it is empty or at `until`."""
        await self._cluster.drain(name, until)

    async def remove(self, name: str) -> None:
        """End a node with its sessions; TimeoutError if it does not obey, for nothing else can reach its process."""
        with contextlib.suppress(NodeNotFound):
            await self.drain(name, 0.0)
        until = time.monotonic() + self._patience
        while await self._cluster.has(name):
            if time.monotonic() > until:
                raise TimeoutError(f"node {name} has not ended after {self._patience:g} s; end its process yourself")
            await asyncio.sleep(_LOOK_SECONDS)


def _checked(text: str) -> str:
    """Return the URL of a node as its lease has it; ConfigurationError if it is none."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") not in ("", "api/v1"):
        raise ConfigurationError(f"{text!r} is not the URL of a node; expected http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"


async def _answers(url: str) -> bool:
    """Return whether a node answers; one that is frozen or full does."""
    try:
        async with httpx2.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False) as http:
            await http.get(f"{url}/api/v1/health")
    except httpx2.TransportError:
        return False
    return True
