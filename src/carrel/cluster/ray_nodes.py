"""Nodes that Ray places: one actor on each Ray node starts and watches one `carrel serve --join`.

Ray says only where a node may run. A node whose raylet dies goes on, because its lease says that it lives; a machine
that leaves takes its node with it, which gateways notice by the lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from carrel.cluster.nodes import Cluster, EngineNode
from carrel.errors import ConfigurationError, NodeNotFound

logger = logging.getLogger(__name__)

_NAMESPACE = "carrel"
_PREFIX = "carrel-node-"
"""Of the names of actors."""
_NODE = "ray-"
"""Of the names of nodes that Ray placed."""
_LAUNCHER = """
import subprocess, sys
with open(sys.argv[1], "ab") as log:
    settings = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
    print(subprocess.Popen(sys.argv[2:], **settings).pid)
"""
"""Starts a process that is no child of the actor: Ray kills the children of an actor that ends with its raylet."""
_CONNECT_SECONDS = 10.0
_END_SECONDS = 60.0
"""How long a node may take to end its sessions."""


class NodeRunner:
    """Runs in an actor on a Ray node: starts a node process there, and says whether it runs."""

    def __init__(self, name: str, words: Sequence[str], env: Mapping[str, str], folder: str) -> None:
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        Path(folder).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "carrel", "serve", "--join", "--name", name, "--host", host, "--port", "0"]
        launcher = [sys.executable, "-c", _LAUNCHER, str(Path(folder) / f"{name}.log"), *command, *words]
        done = subprocess.run(launcher, env={**os.environ, **env}, capture_output=True, text=True, check=True)
        self._process = os.pidfd_open(int(done.stdout))

    def is_running(self) -> bool:
        return not self._has_ended(0.0)

    def end(self, seconds: float) -> None:
        """End the node and its sessions; return when its process is dead."""
        for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)
            if self._has_ended(patience):
                return

    def _has_ended(self, seconds: float | None) -> bool:
        return bool(select.select([self._process], [], [], seconds)[0])


class RayNodes:
    """The nodes of a cluster on the machines of a Ray cluster."""

    def __init__(
        self, cluster: Cluster, words: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """`words` are options of `carrel serve`, among them the store; `folder` is for logs on each machine."""
        self._cluster = cluster
        self._words = list(words)
        self._env = dict(env or {})
        self._folder = str(folder)

    async def wanted(self, count: int | None) -> None:
        """Run a node on so many Ray nodes, with None on all of them; one whose process has ended is started anew."""
        places = [each["NodeID"] for each in await asyncio.to_thread(ray.nodes) if each["Alive"]]
        running = 0
        for place in sorted(places):
            name = _name(place)
            runner = await asyncio.to_thread(_runner, name)
            if runner is not None and not await _ask(runner.is_running.remote(), False):
                await asyncio.to_thread(ray.kill, runner)
                runner = None
            if runner is None and (count is None or running < count):
                logger.info("starting node %s", name)
                await asyncio.to_thread(self._start, name, place)
            running += runner is not None or count is None or running < count

    def _start(self, name: str, place: str) -> None:
        actor: Any = ray.remote(NodeRunner).options(
            name=_PREFIX + name,
            namespace=_NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=place, soft=False),
        )
        with contextlib.suppress(ValueError):  # another `carrel cluster up` has started it at the same moment
            actor.remote(name, self._words, self._env, self._folder)

    async def list(self) -> list[EngineNode]:
        """Return the nodes that were started and not removed, also those that lost their raylet and live."""
        names = set(await asyncio.to_thread(_actor_names))
        names |= {info.name for info in await self._cluster.list() if info.name.startswith(_NODE)}
        found = []
        for name in sorted(names):
            runner = await asyncio.to_thread(_runner, name)
            running = await _ask(runner.is_running.remote(), None) if runner is not None else None
            state = "unknown" if running is None else "running" if running else "ended"
            found.append(EngineNode(name, name.partition("-")[2], state))
        return found

    async def drain(self, name: str, until: float | None = None) -> None:
        """Let a node take no new sessions, and end when it is empty or at `until`."""
        await self._cluster.drain(name, until)

    async def remove(self, name: str) -> None:
        """End a node with its sessions, and its actor. Without its raylet, the node ends itself by the drain order."""
        runner = await asyncio.to_thread(_runner, name)
        if runner is not None:
            await _ask(runner.end.remote(_END_SECONDS), None)
            await asyncio.to_thread(ray.kill, runner)
        with contextlib.suppress(NodeNotFound):
            await self.drain(name, 0.0)
        async with asyncio.timeout(_END_SECONDS):
            while await self._cluster.has(name):  # noqa: ASYNC110 -- another process ends it
                await asyncio.sleep(0.2)


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[None]:
    """Connect to a Ray cluster: `auto` for the one of this machine, `local` for one that ends with this process."""
    settings: dict[str, Any] = {"namespace": _NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if address != "local":
        settings["address"] = address
    try:
        await _check_reachable(address)
        await asyncio.to_thread(ray.init, **settings)
    except ConnectionError as problem:
        raise ConfigurationError(
            f"--ray-address {address}: there is no Ray cluster ({problem}); start one with `ray start --head`"
        ) from None
    try:
        yield
    finally:
        await asyncio.to_thread(ray.shutdown)


async def _check_reachable(address: str) -> None:
    """Raise ConnectionError at once where Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(host, int(port))
        except (OSError, TimeoutError) as problem:
            raise ConnectionError(str(problem) or "no answer") from None
        writer.close()


def _name(place: str) -> str:
    return f"{_NODE}{place[:12]}"


def _actor_names() -> list[str]:
    found = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in found if each["namespace"] == _NAMESPACE]
    return sorted(name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))


def _runner(name: str) -> Any:
    """Return the actor of a node, or None if there is none."""
    try:
        return ray.get_actor(_PREFIX + name, namespace=_NAMESPACE)
    except ValueError:
        return None


async def _ask(answer: Any, otherwise: Any) -> Any:
    """Return what an actor answers; `otherwise` if it is dead or does not answer."""
    try:
        async with asyncio.timeout(_END_SECONDS + 10):
            return await asyncio.wrap_future(answer.future())
    except (RayError, TimeoutError):
        return otherwise
