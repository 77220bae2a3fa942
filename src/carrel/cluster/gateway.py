"""The gateway: one URL in front of all nodes. It keeps nothing, so any number of them can run side by side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import orjson
from prometheus_client import Counter, Gauge
from starlette.types import ASGIApp, Receive, Scope, Send

from carrel.cluster.connections import Connection, ConnectionBroken, NodeConnections, NotConnected
from carrel.cluster.directory import Directory
from carrel.cluster.edge import Edge
from carrel.cluster.nodes import choose
from carrel.cluster.reaper import reap
from carrel.errors import (
    ConfigurationError,
    NodeUncertain,
    NodeUnreachable,
    StorageError,
    StorageUnavailable,
    TooManySessions,
)
from carrel.server.app import uvicorn_config
from carrel.server.auth import ApiKey, ApiKeys, AuthMiddleware
from carrel.server.listener import Listener, bind, url_of
from carrel.server.middleware import BodyLimitMiddleware, HttpMetrics, request_id
from carrel.server.node import node_infos
from carrel.server.records import SESSION_ID, now, session_id_from
from carrel.server.responses import PREFIX, send_error, send_json
from carrel.server.settings import ServerSettings, open_storage
from carrel.session import FileStorage
from carrel.storage.base import Store
from carrel.storage.leases import Leases
from carrel.version import __version__
from carrel.wire.answers import Health, NodeInfo, NodeList

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often the gateway looks at the leases."""
_STORE_SECONDS = 5.0
"""How long a request waits for the store."""
_HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
_NOT_SENT = _HOP_BY_HOP | {b"content-length", b"expect", b"x-forwarded-for", b"x-forwarded-proto", b"x-request-id"}
_NOT_PASSED_ON = _HOP_BY_HOP | {b"date", b"server"}
_SAFE = ("GET", "HEAD", "OPTIONS")
_MAX_WHOLE = 64 * 1024
"""Bytes of an answer that is passed on as it comes."""
_MOVABLE = (b"TooManySessions", b"NodeUnreachable")
"""Refusals of a create after which another node can be tried: nothing was done."""


class GatewayMetrics(HttpMetrics):
    """The numbers of a gateway."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = Gauge("carrel_gateway_nodes", "Nodes by state", ["state"], registry=self._registry)
        self.slots = Gauge("carrel_gateway_free_slots", "Free slots of all nodes", registry=self._registry)
        self.sessions = Gauge("carrel_gateway_sessions", "Live sessions of all nodes", registry=self._registry)
        self.failures = Counter(
            "carrel_gateway_node_failures", "Requests that a node did not answer", ["kind"], registry=self._registry
        )
        self.lost = Counter("carrel_gateway_nodes_lost", "Nodes settled by this gateway", registry=self._registry)
        self.created = Counter("carrel_gateway_sessions_placed", "Sessions placed", ["node"], registry=self._registry)


@dataclass
class _Node:
    """A node as this gateway sees it."""

    info: NodeInfo
    connections: NodeConnections
    placed: int = 0
    """Sessions that this gateway placed there since the last renewal."""
    renewed_at: float = 0.0
    is_refusing: bool = False
    """It refused a connection since its last renewal."""

    @property
    def expected(self) -> NodeInfo:
        """Its info, with what was placed there since."""
        changes = {"sessions": self.info.sessions + self.placed, "free_slots": self.info.free_slots - self.placed}
        return self.info.model_copy(update=changes)


@dataclass
class _Request:
    """A request on its way to a node."""

    method: str
    path: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes | AsyncIterator[bytes]
    receive: Receive
    send: Send
    id: str
    state: dict[str, Any]
    """Of the ASGI scope, for what the edge says about the request."""
    has_key: bool = False
    """Whether the client sent an Idempotency-Key."""
    status: int = 0
    """Of the node's answer."""
    has_answer: bool = False
    """Whether the client has got the beginning of the answer."""


class NoAnswer(Exception):
    """The request could not be passed on; the client gets this error."""

    def __init__(self, status: int, kind: type[Exception], message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def _unreachable(message: str) -> NoAnswer:
    return NoAnswer(503, NodeUnreachable, f"{message}; nothing was done, repeat it")


class Gateway:
    """An ASGI app that passes requests on to the node that has the session, or chooses one for a new session."""

    def __init__(self, store: Store, *, random: Random | None = None) -> None:
        self._store = store
        self._leases = Leases(store)
        self._directory = Directory(store)
        self._random = random or Random()
        self._nodes: dict[str, _Node] = {}
        self._looker: asyncio.Task[None] | None = None
        self._reaping: dict[str, asyncio.Task[None]] = {}
        self.metrics = GatewayMetrics()

    def app(self, keys: ApiKeys, settings: ServerSettings) -> ASGIApp:
        """Return the app with everything around it: keys, rate limits, and the size of bodies."""
        limited = BodyLimitMiddleware(self._pass_on, settings.max_body)
        return Edge(AuthMiddleware(limited, keys, settings), self.metrics)

    # --- the nodes --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Look at the nodes from now on."""
        await self._look()
        self._looker = asyncio.create_task(self._look_regularly())

    async def close(self) -> None:
        """Stop looking, and close all connections."""
        tasks = [*filter(None, [self._looker]), *self._reaping.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for node in self._nodes.values():
            node.connections.close("the gateway ends")

    async def _look_regularly(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS * self._random.uniform(0.8, 1.2))
            try:
                await self._look()
            except (StorageError, ValueError) as problem:  # ValueError: a URL that no node of ours has written.
                logger.warning("the nodes are not known at the moment: %s", problem)

    async def _look(self) -> None:
        holders = await self._leases.look()
        infos = {info.name: info for info in node_infos(holders)}
        renewed = {holder.name: holder.renewed_at for holder in holders}
        for name in [name for name in self._nodes if name not in infos or infos[name].state == "overdue"]:
            # A lost node answers nothing any more; one that has left answers what it had begun.
            self._nodes.pop(name).connections.close(f"node {name} is lost", all_of_them=name in renewed)
        for name, info in infos.items():
            if info.state != "overdue":
                self._update(info, renewed[name])
        for holder in holders:
            if holder.is_overdue and holder.name not in self._reaping:
                self._reaping[holder.name] = asyncio.create_task(self._reap(holder.name))
        for state in ("ready", "draining", "frozen", "overdue"):
            self.metrics.nodes.labels(state).set(sum(info.state == state for info in infos.values()))
        self.metrics.slots.set(sum(node.info.free_slots for node in self._nodes.values()))
        self.metrics.sessions.set(sum(node.info.sessions for node in self._nodes.values()))

    def _update(self, info: NodeInfo, renewed_at: float) -> None:
        node = self._nodes.get(info.name)
        if node is None or node.connections.url != info.url:
            if node is not None:
                node.connections.close(f"node {info.name} has another URL")
            self._nodes[info.name] = _Node(info, NodeConnections(info.url), renewed_at=renewed_at)
        elif node.renewed_at != renewed_at:
            self._nodes[info.name] = _Node(info, node.connections, renewed_at=renewed_at)
        else:
            node.info = info

    async def _reap(self, name: str) -> None:
        try:
            if await reap(self._store, self._leases, name):
                self.metrics.lost.inc()
        except StorageError as problem:
            logger.warning("node %s is settled later: %s", name, problem)
        finally:
            del self._reaping[name]

    # --- requests ---------------------------------------------------------------------------------------------------

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self._read(scope, receive, send)
        if request is None:
            return
        try:
            await self._answer(request)
        except NoAnswer as problem:
            await self._refuse(request, problem)
        except (StorageError, TimeoutError) as problem:
            detail = f"the store of the cluster does not answer: {problem or 'no answer in time'}"
            await self._refuse(request, NoAnswer(503, StorageUnavailable, detail))

    async def _refuse(self, request: _Request, problem: NoAnswer) -> None:
        if request.has_answer:
            # Without its end: the client must not take it for a whole one.
            logger.warning("an answer was broken off: %s", problem)
            return
        headers = [(b"retry-after", b"1")] if problem.status in (503, 429) else []
        await send_error(request.send, problem.status, str(problem), problem.kind, headers)

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> _Request | None:
        method = scope["method"]
        key: ApiKey | None = scope.get("state", {}).get("key")
        given, has_key = b"", False
        headers: list[tuple[bytes, bytes]] = []
        for name, value in scope["headers"]:
            if name == b"idempotency-key":
                given, has_key = value, True
            if name not in _NOT_SENT:
                headers.append((name, value))
        if method == "POST" and key is not None and not given:
            # So that a repeat of this gateway's, or of another one's, is done once.
            given = uuid4().hex.encode()
            headers.append((b"idempotency-key", given))
        client: Any = scope.get("client")
        headers.append((b"x-request-id", scope["state"]["http_id"]))
        headers.append((b"x-forwarded-for", str(client[0] if client else "unknown").encode()))
        headers.append((b"x-forwarded-proto", scope.get("scheme", "http").encode()))
        body: bytes | AsyncIterator[bytes] = b""
        if method == "PUT":
            body = _pieces(receive)
        elif method not in ("GET", "HEAD"):
            whole = await _read_body(receive)
            if whole is None:
                return None
            body = whole
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope.get("query_string", b"")
        name = request_id(key, scope["path"], given) if method == "POST" and key is not None else ""
        target = raw_path + (b"?" + query if query else b"")
        return _Request(method, scope["path"], target, headers, body, receive, send, name, scope["state"], has_key)

    async def _answer(self, request: _Request) -> None:
        parts = request.path.removeprefix(PREFIX).strip("/").split("/")
        if request.path.startswith(PREFIX):
            if (own := {"health": self._health, "metrics": self._metrics, "nodes": self._list}.get(parts[0])) and (
                len(parts) == 1 and request.method in ("GET", "HEAD")
            ):
                await own(request.send)
            elif parts == ["sessions"] and request.method == "POST":
                await self._create(request)
            elif parts[0] == "sessions" and len(parts) > 1:
                if parts[2:] == ["fork"] and request.method == "POST":
                    await self._fork(request, parts[1])
                elif parts[2:] == ["resume"] and request.method == "POST":
                    await self._resume(request, parts[1])
                else:
                    await self._to_session(request, parts[1])
            else:
                await self._to_any(request)
        elif request.path.startswith("/s/"):
            await self._to_session(request, request.path.split("/")[2])
        else:
            await self._to_any(request)

    async def _health(self, send: Send) -> None:
        status = "healthy" if any(node.info.state == "ready" for node in self._nodes.values()) else "no_nodes"
        health = Health(service="carrel", status=status, timestamp=now().isoformat(), version=__version__)
        await send_json(send, 200, health.model_dump_json().encode())

    async def _metrics(self, send: Send) -> None:
        text = self.metrics.text()
        head = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8"), (b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": text})

    async def _list(self, send: Send) -> None:
        nodes = NodeList(nodes=node_infos(self._leases.holders()))
        await send_json(send, 200, nodes.model_dump_json().encode())

    # --- to which node ----------------------------------------------------------------------------------------------

    async def _create(self, request: _Request) -> None:
        assert isinstance(request.body, bytes)
        try:
            body = orjson.loads(request.body)
            body = body if isinstance(body, dict) else {}
        except ValueError:
            body = {}  # The node answers what is wrong with it.
        wanted = body.get("session_id")
        is_named = isinstance(wanted, str) and SESSION_ID.fullmatch(wanted) is not None
        session_id = str(wanted) if is_named else session_id_from(request.id)
        if is_named and not request.has_key:
            # A repeat is recognized by the id, and another create with it must be refused.
            request.headers = [pair for pair in request.headers if pair[0] != b"idempotency-key"]
        sample = f"{body.get('dataset')}/{body.get('sample_id')}" if body.get("dataset") else ""
        async with asyncio.timeout(_STORE_SECONDS):
            name = await self._directory.find(session_id)
            if name is None:
                name = await self._directory.assign(session_id, self._choose(sample, set()).info.name)
        tried: set[str] = set()
        while True:
            node = self._nodes.get(name)
            tried.add(name)
            problem: NoAnswer | None = None
            if node is None:
                if self._is_held(name):
                    raise _unreachable(f"node {name}, which was to create the session, does not answer")
                problem = _unreachable(f"node {name} has gone")
                if await self._directory.correct(session_id) is not None:
                    await self._to_any(request)  # It was created there; what is left of it is in the records.
                    return
            else:
                # Before the answer: others are placed meanwhile.
                node.placed += 1
                try:
                    if await self._forward(request, node, movable=len(tried) < 3):
                        node.placed -= request.status >= 300
                        self.metrics.created.labels(name).inc()
                        return
                    problem = self._full() if request.status == 429 else _unreachable(f"node {name} takes no sessions")
                except NotConnected:
                    problem = _unreachable(f"node {name} takes no connection")
            # This node has done nothing, so another one may. A session that exists stays where it is.
            try:
                other = self._choose(sample, tried)
            except NoAnswer as none_left:
                raise problem or none_left from None
            async with asyncio.timeout(_STORE_SECONDS):
                name = await self._directory.move(session_id, name, other.info.name)
            if name in tried:
                raise _unreachable(f"node {name} does not take the session")

    def _is_held(self, name: str) -> bool:
        """Return whether the lease of a node is there, though the node may be lost."""
        return name in self._reaping or any(holder.name == name for holder in self._leases.holders())

    def _choose(self, sample: str, tried: set[str]) -> _Node:
        there = [node for name, node in self._nodes.items() if name not in tried and not node.is_refusing]
        chosen = choose([node.expected for node in there], sample, self._random)
        if chosen is not None:
            return self._nodes[chosen.name]
        if ready := [node for node in there if node.info.state == "ready"]:
            if len(tried) < 2:  # Sessions may have ended since the last renewal.
                return self._random.choice(ready)
            raise self._full()
        raise _unreachable("no node of the cluster takes new sessions at the moment")

    def _full(self) -> NoAnswer:
        count = sum(node.info.sessions for node in self._nodes.values())
        return NoAnswer(429, TooManySessions, f"all nodes are full: {count} live sessions at the last renewal")

    async def _fork(self, request: _Request, parent: str) -> None:
        """A fork stays with its parent."""
        async with asyncio.timeout(_STORE_SECONDS):
            node = await self._directory.find(parent)
            if node is not None and SESSION_ID.fullmatch(parent):
                await self._directory.assign(session_id_from(request.id), node)
        await self._to_session(request, parent)

    async def _resume(self, request: _Request, session_id: str) -> None:
        """A session whose node has gone moves to another one, which is the same for all gateways."""
        async with asyncio.timeout(_STORE_SECONDS):
            name = await self._directory.find(session_id, self._nodes)
            # In the store: a node that has just come is not known here yet.
            if name is not None and name not in self._nodes and not await self._leases.is_taken(name):
                await self._directory.move(session_id, name, self._choose("", {name}).info.name)
        await self._to_session(request, session_id)

    async def _to_session(self, request: _Request, session_id: str) -> None:
        for is_last in (False, True):
            name = self._directory.known(session_id, self._nodes)
            if name is None:
                async with asyncio.timeout(_STORE_SECONDS):
                    name = await self._directory.find(session_id, self._nodes)
            if name is None or (name not in self._nodes and not self._is_held(name)):
                # It is not on any node: what is recorded of it can be read at each of them.
                await self._to_any(request)
                return
            node = self._nodes.get(name)
            if node is None:
                raise _unreachable(f"node {name}, which has session {session_id}, is being settled")
            try:
                if await self._forward(request, node, elsewhere=not is_last):
                    return
            except NotConnected:
                raise _unreachable(f"node {name}, which has session {session_id}, takes no connection") from None
            async with asyncio.timeout(_STORE_SECONDS):
                await self._directory.correct(session_id)

    async def _to_any(self, request: _Request) -> None:
        """Pass a request on that each node can answer from the store."""
        nodes = [node for node in self._nodes.values() if node.info.state != "frozen"]
        self._random.shuffle(nodes)
        nodes.sort(key=lambda node: node.is_refusing)
        problem: NoAnswer | None = None
        for node in nodes:
            try:
                if not await self._forward(request, node, elsewhere=True):
                    raise _unreachable("the node of the session is being settled")
                return
            except NotConnected:
                continue
            except NoAnswer as broken:
                if request.has_answer or request.method not in _SAFE:
                    raise
                problem = broken
        raise problem or _unreachable("no node of the cluster can be reached")

    # --- passing on -------------------------------------------------------------------------------------------------

    async def _forward(self, request: _Request, node: _Node, *, movable: bool = False, elsewhere: bool = False) -> bool:
        """Pass a request on, and its answer back; NotConnected if nothing was sent.

        False, and nothing is passed back, if the node refused a session that another node may take (`movable`), or
        has not got the session (`elsewhere`)."""
        fresh = False
        while True:
            try:
                connection = await node.connections.take(fresh=fresh)
                request.state["passed_to"] = f" by node {node.info.name}"
            except NotConnected:
                node.is_refusing = True
                self.metrics.failures.labels("refused").inc()
                raise
            try:
                await connection.request(request.method, request.target, request.headers, request.body)
                return await self._answer_back(request, connection, movable=movable, elsewhere=elsewhere)
            except ConnectionBroken as problem:
                if problem.was_idle and isinstance(request.body, bytes) and not request.has_answer:
                    fresh = True  # The node had closed it before: nothing was done.
                    continue
                self.metrics.failures.labels("broken").inc()
                message = (
                    f"node {node.info.name} broke off: {problem}; it may have been done, repeat it with the same key"
                )
                raise NoAnswer(502, NodeUncertain, message) from None
            finally:
                node.connections.give_back(connection)

    async def _answer_back(self, request: _Request, connection: Connection, *, movable: bool, elsewhere: bool) -> bool:
        status = request.status = connection.status
        headers = [pair for pair in connection.headers if pair[0] not in _NOT_PASSED_ON]
        may_move = (movable and status in (429, 503)) or (elsewhere and status == 421)
        if may_move or int(dict(headers).get(b"content-length", _MAX_WHOLE)) < _MAX_WHOLE:
            # Whole: if the node breaks off, the client gets an error, and not the beginning of an answer.
            body = await connection.read_all()
            if may_move and (status == 421 or any(code in body for code in _MOVABLE)):
                return False
            request.has_answer = True
            await request.send({"type": "http.response.start", "status": status, "headers": headers})
            await request.send({"type": "http.response.body", "body": body})
            return True
        request.has_answer = True
        await request.send({"type": "http.response.start", "status": status, "headers": headers})
        # A client that leaves a stream ends it at the node too: what runs for it is stopped.
        is_stream = not any(name == b"content-length" for name, _ in headers)
        leaving = asyncio.create_task(_wait_disconnect(request.receive, connection)) if is_stream else None
        try:
            while piece := await connection.next_piece():
                await request.send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            if leaving is not None:
                leaving.cancel()
        await request.send({"type": "http.response.body", "body": b""})
        return True


async def _wait_disconnect(receive: Receive, connection: Connection) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    connection.abort("the client has left")


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ConnectionBroken("the client has left")
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body, or None if the client has disconnected."""
    parts = []
    with contextlib.suppress(ConnectionBroken):
        async for piece in _pieces(receive):
            parts.append(piece)
        return b"".join(parts)
    return None


@asynccontextmanager
async def open_gateway(store: str | Path | None) -> AsyncIterator[tuple[Gateway, ApiKeys]]:
    """Open the store of a cluster, and a gateway that looks at its nodes."""
    storage = open_storage(store)
    if isinstance(storage, FileStorage):
        raise ConfigurationError("a gateway needs the store that its nodes share: redis://… or postgresql://…")
    gateway = Gateway(storage.store)
    try:
        await gateway.start()
        yield gateway, ApiKeys(storage.store)
    finally:
        await gateway.close()
        await storage.close()


async def serve(settings: ServerSettings, on_listening: Callable[[str], None]) -> None:
    """Serve a gateway until a signal; `on_listening` gets its URL."""
    async with open_gateway(settings.store) as (gateway, keys):
        app = gateway.app(keys, settings)

        async def end() -> None:
            """Nothing is kept here: what is under way is answered, and that is all."""

        with bind(settings.host, settings.port) as bound:
            url = url_of(bound, settings.host) + PREFIX
            config = uvicorn_config(app, log_requests=settings.log_requests)
            listener = Listener(config, on_listening=lambda: on_listening(url), on_end=end)
            await listener.serve(sockets=[bound])
