"""Nodes and gateways in processes of their own, as users start them, and a proxy that cuts off their store."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx

from tests.support.preloaded_python import ForkedProcess, preloaded_python
from tests.support.server_process import DEADLINE, descendants, is_alive

T = TypeVar("T")
LEASE = 5.0
"""Seconds; long enough for a busy machine."""


def wait_for(look: Callable[[], T], seconds: float = DEADLINE) -> T:
    """Return the first true value; the last one when the time is up is an error."""
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until, f"still {found!r} after {seconds} s"
        time.sleep(0.05)
    return found


class CarrelProcess:
    """A `carrel` program that prints one line of JSON when it listens."""

    def __init__(self, folder: Path, *words: object) -> None:
        self.folder = folder
        self._words = [str(word) for word in words]
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        self._env = {**os.environ, "CARREL_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        self._process: ForkedProcess | None = None
        self.url = ""

    def start(self) -> CarrelProcess:
        with (self.folder / "stderr").open("ab") as stderr:
            self._process = preloaded_python().start(
                ["-m", "carrel", *self._words, "--json"], self._env, stderr=stderr, session=True
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it did not start: {self._process.wait()} {self.stderr}"
        self.url = json.loads(line)["url"]
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        """End it, and return its exit code when all of its processes are gone."""
        if self._process is None:
            return 0
        family = descendants(self._process.pid)
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(how)
        code = self._process.wait(DEADLINE)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None
        wait_for(lambda: not [each for each in family if is_alive(each)])
        return code

    def kill(self) -> None:
        self.end(signal.SIGKILL)


class ClusterProcesses:
    """The processes of one cluster on a store."""

    def __init__(self, folder: Path, store: str) -> None:
        self.folder, self.store = folder, store
        self.nodes: dict[str, CarrelProcess] = {}
        self.gateways: list[CarrelProcess] = []
        env = {**os.environ, "CARREL_HOME": str(folder / "home")}
        folder.mkdir(parents=True, exist_ok=True)
        done = preloaded_python().run(["-m", "carrel", "keys", "add", "ada", "--store", store], env)
        assert done.returncode == 0, done.stderr
        self.key = done.stdout.strip()

    def add_node(self, name: str, *words: object, store: str | None = None, lease: float = LEASE) -> CarrelProcess:
        """Start a node; the datasets are those of the demo."""
        common = ["serve", "--join", "--port", 0, "--name", name, "--lease", lease, "--store", store or self.store]
        # The demo's files are unpacked once for all nodes.
        node = CarrelProcess(self.folder / name, *common, "--cache", self.folder / "cache", *words)
        self.nodes[name] = node
        return node.start()

    def add_gateway(self, *options: object, store: str | None = None, port: int = 0) -> CarrelProcess:
        """Start a gateway that sees all nodes that were started."""
        number = len(self.gateways)
        words = ["gateway", "--port", port, "--store", store or self.store, *options]
        gateway = CarrelProcess(self.folder / f"gateway-{number}", *words).start()
        self.gateways.append(gateway)
        with self.client(gateway) as client:
            wait_for(lambda: {node["name"] for node in nodes_of(client)} >= set(self.nodes))
        return gateway

    def client(self, to: CarrelProcess | None = None, key: str | None = None) -> httpx.Client:
        url = (to or self.gateways[0]).url
        return httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key or self.key}"}, timeout=DEADLINE, trust_env=False
        )

    def end(self) -> None:
        for process in [*self.gateways, *self.nodes.values()]:
            process.end(signal.SIGKILL if process.has_ended() else signal.SIGINT)


def nodes_of(client: httpx.Client) -> list[dict[str, Any]]:
    """Return the nodes that answer requests."""
    answer = client.get("/nodes")
    return [node for node in answer.json()["nodes"] if node["state"] == "ready"] if answer.status_code == 200 else []


class StoreProxy:
    """A TCP proxy in front of a store, in a thread of its own. What it does can be changed at any time.

    `pass`; `swallow`: take connections and bytes, and pass nothing on; `reset`: break all connections, and each new
    one; `delay`: pass everything on after `seconds`."""

    def __init__(self, port: int, *, seconds: float = 0.3) -> None:
        self._port = port
        self._seconds = seconds
        self._mode: Literal["pass", "swallow", "reset", "delay"] = "pass"
        self._loop = asyncio.new_event_loop()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def set(self, mode: Literal["pass", "swallow", "reset", "delay"]) -> None:
        asyncio.run_coroutine_threadsafe(self._set(mode), self._loop).result(30)

    async def _set(self, mode: Literal["pass", "swallow", "reset", "delay"]) -> None:
        self._mode = mode
        if mode == "swallow":
            self._flowing.clear()
        else:
            self._flowing.set()
        if mode == "reset":
            for pair in list(self._pairs):
                for writer in pair:
                    writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "reset":
            writer.transport.abort()
            return
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, requests)
        self._pairs.add(pair)
        await asyncio.gather(self._copy(reader, requests), self._copy(answers, writer), return_exceptions=True)
        self._pairs.discard(pair)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if self._mode == "delay":
                    await asyncio.sleep(self._seconds)
                await self._flowing.wait()
                target.write(data)
                await target.drain()
        finally:
            target.close()

    def close(self) -> None:
        self.set("reset")
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        # Their connections are broken, so they end by themselves; asyncio reports those that are cancelled as errors.
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=20)


@contextmanager
def store_proxy(port: int) -> Iterator[StoreProxy]:
    proxy = StoreProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
