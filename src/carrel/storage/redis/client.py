"""Connections to one Redis server: one client per event loop, and its failures as storage errors."""

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
    MissingExtra,
    StorageError,
    StorageReadError,
    StorageUnavailable,
    StorageWriteError,
)
from carrel.storage.base import Guard
from carrel.storage.server_parts import stamp_text

Call = Callable[..., Awaitable[Any]]

_POOL_SIZE = 16
_CONNECT_SECONDS = 5
_ANSWER_SECONDS = 60
"""How long a server may take for one command; a value of hundreds of megabytes takes a while."""


@lru_cache
def _script(name: str) -> tuple[str, str]:
    """Return the text of a script and the hash by which the server knows it."""
    folder = files("carrel.storage.redis") / "scripts"
    text = (folder / "prelude.lua").read_text("utf-8") + (folder / f"{name}.lua").read_text("utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class _LoopClient:
    """The client of one event loop, and how many of its commands are under way."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.closing = _close_with_loop(self)
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
        """Disconnect once the commands under way are answered, or have not been for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._quiet.wait()
        await self.client.connection_pool.disconnect()


async def _close_with_loop(line: _LoopClient) -> AsyncGenerator[None]:
    """Disconnect when this generator is closed, which its loop does before it ends: afterwards it would be too late."""
    try:
        yield
    finally:
        await line.client.connection_pool.disconnect()


class RedisClient:
    """Sends commands from any event loop or thread; every failure becomes a `StorageError`."""

    def __init__(self, url: str, prefix: str) -> None:
        try:
            import redis.asyncio  # noqa: PLC0415 -- an extra that may be missing, and slow to load
        except ImportError:
            raise MissingExtra("a RedisStorage needs", "redis") from None
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
        """The server and database, without user and password, which may change."""
        self._guard = threading.Lock()
        self._lines: dict[asyncio.AbstractEventLoop, _LoopClient] = {}
        self._server: dict[str, str] | None = None

    def _client(self, **settings: Any) -> Any:
        # No retry: a command whose answer got lost may have been carried out, and an append must not come twice.
        retry = self._redis.asyncio.retry.Retry(self._redis.backoff.NoBackoff(), 0)
        fixed = {"retry": retry, "protocol": 2, "decode_responses": False, "timeout": None}
        defaults = {"socket_connect_timeout": _CONNECT_SECONDS, "socket_timeout": _ANSWER_SECONDS}
        defaults["max_connections"] = _POOL_SIZE
        known = defaults | self._settings | fixed | settings
        pool = self._redis.asyncio.BlockingConnectionPool(**known)
        try:
            pool.make_connection()
        except TypeError as problem:
            named = [name for name in self._settings if f"'{name}'" in str(problem)]
            raise ConfigurationError(
                f"the Redis URL has an unknown option: {named[0] if named else 'after the ?'}"
            ) from None
        client = self._redis.asyncio.Redis(connection_pool=pool)
        client.response_callbacks.clear()  # raw answers, the same in every version of the package
        return client

    async def ready(self) -> _LoopClient:
        loop = asyncio.get_running_loop()
        with self._guard:
            new = loop not in self._lines
            if new:
                for ended in [other for other in self._lines if other.is_closed()]:
                    del self._lines[ended]
                self._lines[loop] = _LoopClient(self._client())
            line = self._lines[loop]
        if new:
            await anext(line.closing)
        if self._server is None:
            self._server = await self._check_server(line)
        return line

    async def _check_server(self, line: _LoopClient) -> dict[str, str]:
        """Return what the server says about itself; a server that may discard data is refused."""
        with line.command(), self.translated_errors("reading", "its settings"):
            try:
                server = _parse_info(await line.client.execute_command("INFO"))
            except self._redis.exceptions.NoPermissionError:
                return {}
        policy = server.get("maxmemory_policy", "")
        if policy.startswith("allkeys-") and server.get("maxmemory") != "0":
            raise ConfigurationError(
                f"the Redis server at {self.address} discards keys when it is full (maxmemory-policy {policy}),"
                " so sessions would be lost; set maxmemory-policy to noeviction"
            )
        return server

    async def server(self) -> dict[str, str]:
        """Return the server's INFO at the first contact; empty if this user may not read it."""
        await self.ready()
        return self._server or {}

    async def read(self, what: str, *command: Any) -> Any:
        """Send a command that changes nothing; `what` is for the error message."""
        line = await self.ready()
        with line.command(), self.translated_errors("reading", what):
            return await self._read(line.client, lambda: line.client.execute_command(*command))

    async def _read(self, client: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        """Read, and once more if the connection broke while it was idle: reading twice is harmless."""
        try:
            return await send()
        except self._redis.exceptions.ConnectionError:
            await client.connection_pool.disconnect(inuse_connections=False)
            return await send()

    async def write(self, what: str, *command: Any) -> Any:
        line = await self.ready()
        with line.command(), self.translated_errors("writing", what):
            return await line.client.execute_command(*command)

    async def run(
        self,
        name: str,
        what: str,
        key: str,
        *arguments: Any,
        guard: Guard | None = None,
        then: tuple[Any, ...] = (),
    ) -> Any:
        """Run a script; with `then`, also that command on the same connection, and return both answers."""
        text, sha = _script(name)
        # Some servers run no script that declares no key, so the one that all scripts use is declared.
        condition = (guard[0], stamp_text(guard[1])) if guard else ("", "")
        rest = (1, f"{self.prefix}:state", self.prefix, key, *condition, *arguments)
        line = await self.ready()

        async def send() -> Any:
            try:
                return await self._send(line.client, ("EVALSHA", sha, *rest), then)
            except self._redis.exceptions.NoScriptError:
                return await self._send(line.client, ("EVAL", text, *rest), then)

        if name in ("folders", "piece"):
            with line.command(), self.translated_errors("reading", what):
                return await self._read(line.client, send)
        with line.command(), self.translated_errors("writing", what):
            return await send()

    async def _send(self, client: Any, command: tuple[Any, ...], then: tuple[Any, ...]) -> Any:
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

    async def take(self, key: str, token: str, seconds: float) -> bool:
        return bool(await self.run("take", f"the lock {key!r}", key, token, round(seconds * 1000)))

    async def renew(self, key: str, token: str, seconds: float) -> bool:
        return await self._call_lock("reacquire", key, token, seconds)

    async def release(self, key: str, token: str) -> None:
        await self._call_lock("release", key, token, 1)

    async def _call_lock(self, method: str, key: str, token: str, seconds: float) -> bool:
        """Call a method of the package's own lock; False if it is not held with this token any more."""
        line = await self.ready()
        name = f"{self.prefix}:lock:{key}"
        lock = self._redis.asyncio.lock.Lock(line.client, name, timeout=seconds, thread_local=False)
        lock.local.token = token.encode()
        with line.command(), self.translated_errors("writing", f"the lock {key!r}"):
            try:
                await getattr(lock, method)()
            except self._redis.exceptions.LockError:
                return False
        return True

    @contextlib.asynccontextmanager
    async def dedicated_connection(self, what: str) -> AsyncIterator[Call]:
        """Give a connection of its own, for commands that block."""
        await self.ready()
        client = self._client(max_connections=1, socket_timeout=_ANSWER_SECONDS)

        async def call(*command: Any) -> Any:
            # In a task of its own: the package may swallow a cancellation and wait on for the answer.
            call_task = asyncio.ensure_future(client.execute_command(*command))
            call_task.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                await asyncio.wait([call_task])
            finally:
                call_task.cancel()
            with self.translated_errors("reading", what):
                return call_task.result()

        try:
            yield call
        finally:
            await client.connection_pool.disconnect()

    async def close(self) -> None:
        """Disconnect after the commands under way are answered; later commands connect anew."""
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
                # A loop that is ending does not answer any more, and closes its connections itself.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2 * _CONNECT_SECONDS):
                        await asyncio.wrap_future(there)

    @contextlib.contextmanager
    def translated_errors(self, doing: str, what: str) -> Iterator[None]:
        """Raise every failure as a `StorageError`; `doing` is "reading" or "writing"."""
        known = self._redis.exceptions
        task = asyncio.current_task()
        cancelled = task.cancelling() if task is not None else 0
        try:
            yield
            # The package uses `asyncio.wait_for`: in Python 3.11 it swallows a cancellation that comes with an answer.
            if task is not None and task.cancelling() > cancelled:
                raise asyncio.CancelledError
        except (known.RedisError, OSError) as error:
            if isinstance(error, StorageError):
                raise
            reason = self._without_password(str(error))
            # The traceback shows the cause too, but not if the server quoted the password in it.
            raise self._translate_error(error, doing, what, reason) from (error if reason == str(error) else None)

    def _without_password(self, text: str) -> str:
        return text.replace(self._password, "***") if self._password else text

    def _translate_error(self, error: Exception, doing: str, what: str, reason: str) -> StorageError:
        known = self._redis.exceptions
        server = f"the Redis server at {self.address}"
        failed = StorageWriteError if doing == "writing" else StorageReadError
        if isinstance(error, (known.AuthenticationError, known.AuthenticationWrongNumberOfArgsError)):
            return StorageUnavailable(f"{server} refuses this login: {reason} Check user and password in the URL")
        # MASTERDOWN is a replica without its primary, BUSY a server with a script that does not end.
        if isinstance(error, known.BusyLoadingError) or reason.startswith(("MASTERDOWN", "BUSY ")):
            return StorageUnavailable(f"{server} is not ready yet ({reason}); try again in a while")
        if isinstance(error, (known.ConnectionError, known.TimeoutError, OSError)):
            hint = "; rediss:// speaks TLS: does the server?" if self._tls else ""
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                hint = "; add ?ssl_ca_certs=FILE to the URL to name the trusted certificates"
            unsure = "; it may have been written: check before you repeat it"
            return StorageUnavailable(
                f"{server} does not answer while {doing} {what} ({reason}){hint}{unsure if doing == 'writing' else ''}"
            )
        if isinstance(error, known.ReadOnlyError) or "READONLY" in reason:
            return failed(f"{server} is a read-only replica, so {what} was not written; give the URL of the primary")
        if isinstance(error, known.OutOfMemoryError) or "OOM " in reason:
            return failed(f"{server} is full, so {what} was not written; delete something or raise its maxmemory")
        if isinstance(error, known.NoPermissionError) or "can't run this command" in reason:
            return failed(f"{server} does not allow {doing} {what} to this user: {reason}")
        return failed(f"{server} refused {doing} {what}: {reason}")


def _unambiguous(url: str) -> str:
    """Return the URL; ValueError if a part of it could be mistaken for another, as a password for a host."""
    parts = urlsplit(url)
    if parts.fragment or "#" in url or any("@" in part for part in (parts.path, parts.query)):
        raise ValueError("the password is not percent-encoded")
    if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"/?\d*", parts.path):
        raise ValueError("the database is not a number")
    return url


def _parse_info(info: bytes) -> dict[str, str]:
    lines = info.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
