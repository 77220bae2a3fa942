"""Connections to one Redis server, one pool per event loop, and what it refuses in our own words."""

import asyncio
import contextlib
import hashlib
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from functools import lru_cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from carrel.errors import (
    ConfigurationError,
    StorageError,
    StorageReadError,
    StorageUnavailable,
    StorageWriteError,
)

Call = Callable[..., Awaitable[Any]]

_POOL_SIZE = 16
_CONNECT_SECONDS = 5
_ANSWER_SECONDS = 60
"""How long a server may think about one command; a value of hundreds of megabytes takes a while."""


@lru_cache
def _script(name: str) -> tuple[str, str]:
    """The text of a script and the name by which the server remembers it."""
    folder = files("carrel.storage") / "redis_scripts"
    text = (folder / "prelude.lua").read_text("utf-8") + (folder / f"{name}.lua").read_text("utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class _Line:
    """The client of one event loop, and whether commands are under way on it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.closing = _closed_with_its_loop(self)
        self._commands = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextlib.contextmanager
    def command(self) -> Iterator[None]:
        self._commands += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._commands -= 1
            if not self._commands:
                self._quiet.set()

    async def end(self) -> None:
        """Disconnect when what is under way has its answer, or none for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._quiet.wait()
        await self.client.connection_pool.disconnect()


async def _closed_with_its_loop(line: _Line) -> AsyncGenerator[None]:
    """Disconnects when it is closed. A loop closes the generators begun on it before it ends: after that, its
    connections could be closed by nobody."""
    try:
        yield
    finally:
        await line.client.connection_pool.disconnect()


class RedisConnections:
    """Sends commands from whichever loop or thread; every failure comes out as a `StorageError`."""

    def __init__(self, url: str, prefix: str) -> None:
        try:
            import redis.asyncio  # noqa: PLC0415 -- an extra that may be missing, and slow to load
        except ImportError:
            raise ConfigurationError(
                "a RedisStore needs the redis package, which is not installed: pip install 'redis[hiredis]'"
            ) from None
        self._redis: Any = redis  # its own annotations are too patchy for the type checker
        self.prefix = prefix
        try:
            self._settings = settings = redis.asyncio.connection.parse_url(_unambiguous(url))
        except ValueError:
            # Its text may hold a piece of the password, so it is not passed on.
            raise ConfigurationError(
                "the Redis URL cannot be read; expected redis://[user:password@]host:port/db, rediss:// for TLS or"
                " unix:///path, and a password with special characters percent-encoded"
            ) from None
        self._tls = url.startswith("rediss://")
        self._password = str(settings.get("password") or "")
        self.address = str(settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}")
        self.place = f"{self.address}/{settings.get('db') or 0}"
        """Where the data is; without user and password, which may change."""
        self._guard = threading.Lock()
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}
        self._server: dict[str, str] | None = None

    def _client(self, **settings: Any) -> Any:
        # No retry: a command whose answer got lost may have been carried out, and an append must not come twice.
        retry = self._redis.asyncio.retry.Retry(self._redis.backoff.NoBackoff(), 0)
        ours = {"retry": retry, "protocol": 2, "decode_responses": False, "timeout": None}
        patience = {"socket_connect_timeout": _CONNECT_SECONDS, "socket_timeout": _ANSWER_SECONDS}
        sized = {"max_connections": _POOL_SIZE}
        known = patience | sized | self._settings | ours | settings
        pool = self._redis.asyncio.BlockingConnectionPool(**known)
        try:
            pool.make_connection()
        except TypeError as problem:
            named = [name for name in self._settings if f"'{name}'" in str(problem)]
            raise ConfigurationError(
                f"the Redis URL has an option that there is not: {named[0] if named else 'after the ?'}"
            ) from None
        client = self._redis.asyncio.Redis(connection_pool=pool)
        client.response_callbacks.clear()  # answers as the server gives them, in every version of the package
        return client

    async def _ready(self) -> _Line:
        loop = asyncio.get_running_loop()
        with self._guard:
            new = loop not in self._lines
            if new:
                for ended in [other for other in self._lines if other.is_closed()]:
                    del self._lines[ended]
                self._lines[loop] = _Line(self._client())
            line = self._lines[loop]
        if new:
            await anext(line.closing)
        if self._server is None:
            self._server = await self._checked(line)
        return line

    async def _checked(self, line: _Line) -> dict[str, str]:
        """What the server says about itself; refused when it is one that throws data away."""
        with line.command(), self._in_our_words("reading", "its settings"):
            try:
                server = _facts(await line.client.execute_command("INFO"))
            except self._redis.exceptions.NoPermissionError:
                return {}
        policy = server.get("maxmemory_policy", "")
        if policy.startswith("allkeys-") and server.get("maxmemory") != "0":
            raise ConfigurationError(
                f"the Redis server at {self.address} throws away keys when it is full (maxmemory-policy {policy});"
                " sessions would be lost: set maxmemory-policy to noeviction"
            )
        return server

    async def server(self) -> dict[str, str]:
        """The server's INFO as it was at first contact; empty where this user may not ask."""
        await self._ready()
        return self._server or {}

    async def run_id(self) -> str:
        """Another one after each restart of the server; empty where this user may not ask."""
        try:
            return _facts(await self.read("its run id", "INFO", "server")).get("run_id", "")
        except StorageReadError:
            return ""

    async def read(self, what: str, *command: Any) -> Any:
        """Send a command that changes nothing; `what` it reads is for the error message."""
        line = await self._ready()
        with line.command(), self._in_our_words("reading", what):
            return await self._read(line.client, lambda: line.client.execute_command(*command))

    async def _read(self, client: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        """Reading again does no harm, so a line that broke while it lay idle is worth a second try."""
        try:
            return await send()
        except self._redis.exceptions.ConnectionError:
            await client.connection_pool.disconnect(inuse_connections=False)
            return await send()

    async def write(self, what: str, *command: Any) -> Any:
        line = await self._ready()
        with line.command(), self._in_our_words("writing", what):
            return await line.client.execute_command(*command)

    async def run(self, name: str, what: str, key: str, *arguments: Any, then: tuple[Any, ...] = ()) -> Any:
        """Run a script; with `then`, also that command on the same connection: both answers, or the error of either."""
        text, sha = _script(name)
        # The one key that all scripts touch is declared; some servers run none without.
        rest = (1, f"{self.prefix}:state", self.prefix, key, *arguments)
        line = await self._ready()

        async def send() -> Any:
            try:
                return await self._sent(line.client, ("EVALSHA", sha, *rest), then)
            except self._redis.exceptions.NoScriptError:
                return await self._sent(line.client, ("EVAL", text, *rest), then)

        if name in ("folders", "changed", "piece"):
            with line.command(), self._in_our_words("reading", what):
                return await self._read(line.client, send)
        with line.command(), self._in_our_words("writing", what):
            return await send()

    async def _sent(self, client: Any, command: tuple[Any, ...], then: tuple[Any, ...]) -> Any:
        if not then:
            return await client.execute_command(*command)
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command(*command)
        pipeline.execute_command(*then)
        answers = await pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    @contextlib.asynccontextmanager
    async def alone(self, what: str) -> AsyncIterator[Call]:
        """A connection of one's own, for commands that wait for others."""
        await self._ready()
        client = self._client(max_connections=1, socket_timeout=_ANSWER_SECONDS)

        async def call(*command: Any) -> Any:
            # In a task of its own: the package may swallow a cancel, and would go on waiting for the answer.
            asking = asyncio.ensure_future(client.execute_command(*command))
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                await asyncio.wait([asking])
            finally:
                asking.cancel()
            with self._in_our_words("reading", what):
                return asking.result()

        try:
            yield call
        finally:
            await client.connection_pool.disconnect()

    async def close(self) -> None:
        """What others still ask gets its answer; who asks later has a connection made anew."""
        with self._guard:
            lines, self._lines = self._lines, {}
            self._server = None
        here = asyncio.get_running_loop()
        for loop, line in lines.items():
            if loop is here:
                await line.end()
                await line.closing.aclose()
            elif loop.is_running():
                there = asyncio.run_coroutine_threadsafe(line.end(), loop)
                # That loop may be at its end just now: then it answers no more, and closes its connections itself.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2 * _CONNECT_SECONDS):
                        await asyncio.wrap_future(there)

    @contextlib.contextmanager
    def _in_our_words(self, doing: str, what: str) -> Iterator[None]:
        known = self._redis.exceptions
        task = asyncio.current_task()
        cancelled = task.cancelling() if task is not None else 0
        try:
            yield
            # The package waits by `asyncio.wait_for`, which in Python 3.11 swallows a cancel that comes with an answer.
            if task is not None and task.cancelling() > cancelled:
                raise asyncio.CancelledError
        except (known.RedisError, OSError) as error:
            if isinstance(error, StorageError):
                raise
            said = self._scrubbed(str(error))
            # The traceback shows the cause too; not when the server quoted the password in it.
            raise self._told(error, doing, what, said) from (error if said == str(error) else None)

    def _scrubbed(self, text: str) -> str:
        return text.replace(self._password, "***") if self._password else text

    def _told(self, error: Exception, doing: str, what: str, said: str) -> StorageError:
        known = self._redis.exceptions
        server = f"the Redis server at {self.address}"
        failed = StorageWriteError if doing == "writing" else StorageReadError
        if isinstance(error, (known.AuthenticationError, known.AuthenticationWrongNumberOfArgsError)):
            return StorageUnavailable(f"{server} does not let us in: {said} Check user and password in the URL")
        # MASTERDOWN is a replica without its primary, BUSY a server with a script that does not end.
        if isinstance(error, known.BusyLoadingError) or said.startswith(("MASTERDOWN", "BUSY ")):
            return StorageUnavailable(f"{server} is not ready yet ({said}); try again in a while")
        if isinstance(error, (known.ConnectionError, known.TimeoutError, OSError)):
            hint = "; rediss:// speaks TLS: does the server?" if self._tls else ""
            if "CERTIFICATE_VERIFY_FAILED" in said:
                hint = "; ?ssl_ca_certs=FILE at the end of the URL names whom to trust"
            unsure = "; if it was sent already, it may have been written: look before you send it again"
            return StorageUnavailable(
                f"{server} does not answer while {doing} {what} ({said}){hint}{unsure if doing == 'writing' else ''}"
            )
        if isinstance(error, known.ReadOnlyError) or "READONLY" in said:
            return failed(f"{server} is a read-only replica, so {what} was not written; give the URL of the primary")
        if isinstance(error, known.OutOfMemoryError) or "OOM " in said:
            return failed(f"{server} is full, so {what} was not written; delete something or raise its maxmemory")
        if isinstance(error, known.NoPermissionError) or "can't run this command" in said:
            return failed(f"{server} does not allow {doing} {what} to this user: {said}")
        return failed(f"{server} refused {doing} {what}: {said}")


def _unambiguous(url: str) -> str:
    """The URL itself; ValueError where a part of it would be taken for another, and a password for a host."""
    parts = urlsplit(url)
    if parts.fragment or "#" in url or any("@" in part for part in (parts.path, parts.query)):
        raise ValueError("a password that is not percent-encoded")
    if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"/?\d*", parts.path):
        raise ValueError("a database is a number")
    return url


def _facts(info: bytes) -> dict[str, str]:
    lines = info.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
