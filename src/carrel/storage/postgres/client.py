"""Connections to one Postgres database, used from threads, and its failures as storage errors."""

import asyncio
import contextlib
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any, cast

from carrel.errors import (
    ConfigurationError,
    MissingExtra,
    StorageError,
    StorageReadError,
    StorageUnavailable,
    StorageWriteError,
)
from carrel.storage.base import finish

VERSION = 2
"""The version of the tables: those of `schema.sql`, and a step `schema-N.sql` for each later one."""

_CONNECTIONS = 12
_CONNECT_SECONDS = 10
_ANSWER_SECONDS = 60
_MANY_DEADLOCKS = 10
_LISTEN_SECONDS = 1.0
_log = logging.getLogger("carrel.storage")


class PostgresClient:
    """Runs statements in threads, each with a connection of its own, so that any event loop or thread may call it."""

    def __init__(self, url: str, schema: str) -> None:
        try:
            import psycopg  # noqa: PLC0415 -- an extra that may be missing, and slow to load
        except ImportError:
            raise MissingExtra("a PostgresStorage needs", "postgres") from None
        self._psycopg: Any = psycopg
        self._schema = schema
        try:
            settings = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            # Its text may hold a piece of the password, so it is not passed on.
            raise ConfigurationError(
                "the Postgres URL cannot be read; expected postgresql://[user:password@]host:port/database, and a"
                " password with special characters percent-encoded"
            ) from None
        if not schema or len(schema.encode()) > 63 or "\0" in schema:
            raise ConfigurationError(f"{schema!r} is not the name of a Postgres schema: it has 1 to 63 bytes")
        defaults = {
            "connect_timeout": _CONNECT_SECONDS,
            "tcp_user_timeout": _ANSWER_SECONDS * 1000,
            "keepalives_idle": _ANSWER_SECONDS // 2,
            "application_name": "carrel",
        }
        self._settings: dict[str, Any] = defaults | settings
        self.address = f"{settings.get('host', 'localhost')}:{settings.get('port', 5432)}"
        self.place = f"{self.address}/{settings.get('dbname') or settings.get('user') or ''}"
        """The server and database, without user and password, which may change."""
        self.on_reset: Callable[[], None] = lambda: None
        """Called when everything begins anew."""
        self.reset()
        _clients.add(self)

    def reset(self) -> None:
        """Begin anew, as a forked child must: the connections and threads are its parent's."""
        self._guard = threading.Lock()
        self._idle: list[Any] = []
        self._is_prepared = False
        self._threads = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="carrel-postgres")
        self._listener: _Listener | None = None
        self.on_reset()

    @property
    def threads(self) -> ThreadPoolExecutor:
        """The threads in which statements run."""
        return self._threads

    def write_here(self, what: str, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Do the same as `write` in the thread that calls."""
        return self._run("writing", what, query, values)

    def listen(self, on_change: Callable[[str], None]) -> None:
        """Call this function in a thread with the key of each log of which another process says that it grew."""
        with self._guard:
            if self._listener is None or not self._listener.is_alive():
                self._listener = _Listener(self._connect_to_listen, on_change)
                self._listener.start()

    def _connect_to_listen(self) -> Any:
        connection = self._psycopg.connect(**self._settings, autocommit=True)
        connection.execute(self._psycopg.sql.SQL("LISTEN {}").format(self._psycopg.sql.Identifier(self.channel)))
        return connection

    @property
    def channel(self) -> str:
        """The name under which processes tell each other of logs that grew."""
        return f"carrel_{hashlib.sha256(self._schema.encode()).hexdigest()[:16]}"

    async def read(self, what: str, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query; `what` is for the error message."""
        return await finish(self._threads, self._run, "reading", what, query, values)

    async def write(self, what: str, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement that changes something, and return its rows."""
        return await finish(self._threads, self._run, "writing", what, query, values)

    def _run(self, doing: str, what: str, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._translated_errors(doing, what):
            tries = 0
            while True:
                connection, was_idle = self._take()
                try:
                    rows = connection.execute(query, values, binary=True).fetchall()
                except self._psycopg.errors.DeadlockDetected:
                    # The server took back all of it, so it can be done again.
                    self._give_back(connection)
                    tries += 1
                    if tries == _MANY_DEADLOCKS:
                        raise
                except self._psycopg.OperationalError:
                    is_broken = connection.broken
                    self._give_back(connection)
                    if not (is_broken and was_idle and doing == "reading"):
                        raise  # a write may have been carried out
                except BaseException:
                    self._give_back(connection)
                    raise
                else:
                    self._give_back(connection)
                    return cast(list[tuple[Any, ...]], rows)

    def _take(self) -> tuple[Any, bool]:
        with self._guard:
            if self._idle:
                return self._idle.pop(), True
        connection = self._psycopg.connect(**self._settings, autocommit=True)
        try:
            identifier = self._psycopg.sql.Identifier(self._schema)
            if not self._is_prepared:
                self._prepare(connection, identifier)
                self._is_prepared = True
            connection.execute(self._psycopg.sql.SQL("SET search_path TO {}").format(identifier))
            connection.execute(f"SET statement_timeout TO '{_ANSWER_SECONDS}s'")
        except BaseException:
            connection.close()
            raise
        return connection, False

    def _give_back(self, connection: Any) -> None:
        with self._guard:
            if not connection.closed:
                self._idle.append(connection)

    def _prepare(self, connection: Any, identifier: Any) -> None:
        """Make the tables and functions, or bring those of an earlier version up to date."""
        if connection.info.parameter_status("server_encoding") != "UTF8":
            raise ConfigurationError(f"the database {self.place} is not encoded in UTF8; create one that is")
        sql = self._psycopg.sql.SQL
        found = self._version(connection, identifier)
        if found < VERSION:
            with connection.transaction():
                # One process makes them, others wait here and then find them made.
                connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (self._schema,))
                connection.execute(sql("CREATE SCHEMA IF NOT EXISTS {}").format(identifier))
                connection.execute(sql("SET LOCAL search_path TO {}").format(identifier))
                found = self._version(connection, identifier)
                if not found:
                    connection.execute(_schema_text("schema.sql"))
                    connection.execute("CREATE TABLE about AS SELECT 1 AS version")
                    found = 1
                for step in range(found + 1, VERSION + 1):
                    connection.execute(_schema_text(f"schema-{step}.sql"))
                    connection.execute("UPDATE about SET version = %s", (step,))
                found = max(found, VERSION)
        if found > VERSION:
            raise ConfigurationError(
                f"the schema {self._schema!r} of {self.place} was made by a newer carrel (version {found} of its"
                f" tables, this one knows {VERSION}); update carrel"
            )

    def _version(self, connection: Any, identifier: Any) -> int:
        """Return the version of the tables, 0 without tables."""
        name = self._psycopg.sql.Identifier(self._schema, "about").as_string(connection)
        if connection.execute("SELECT to_regclass(%s)", (name,)).fetchone()[0] is None:
            return 0
        found = connection.execute(self._psycopg.sql.SQL("SELECT version FROM {}.about").format(identifier)).fetchone()
        return int(found[0])

    async def close(self) -> None:
        """Disconnect; later statements connect anew."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._guard:
            idle, self._idle = self._idle, []
            threads = self._threads
            listener, self._listener = self._listener, None
            self._threads = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="carrel-postgres")
        if listener is not None:
            listener.end()
        threads.shutdown()  # statements under way are finished
        with self._guard:
            idle, self._idle = [*idle, *self._idle], []
        for connection in idle:
            connection.close()

    @contextlib.contextmanager
    def _translated_errors(self, doing: str, what: str) -> Iterator[None]:
        """Raise every failure as a `StorageError`."""
        known = self._psycopg.errors
        server = f"the Postgres server at {self.address}"
        failed = StorageWriteError if doing == "writing" else StorageReadError
        try:
            yield
        except StorageError:
            raise
        except self._psycopg.Error as error:
            password = str(self._settings.get("password") or "")
            reason = str(error).strip().replace(password, "***") if password else str(error).strip()
            if isinstance(error, known.DiskFull):
                problem: StorageError = failed(f"{server} is full, so {what} was not written; make room on its disk")
            elif isinstance(error, known.ReadOnlySqlTransaction):
                problem = failed(f"{server} is read-only, so {what} was not written; give the URL of the primary")
            elif isinstance(error, known.InsufficientPrivilege):
                problem = failed(f"{server} does not allow {doing} {what} to this user: {reason}")
            elif isinstance(error, (self._psycopg.OperationalError, known.QueryCanceled)):
                unsure = "; it may have been written: check before you repeat it" if doing == "writing" else ""
                problem = StorageUnavailable(f"{server} does not answer while {doing} {what} ({reason}){unsure}")
            else:
                problem = failed(f"{server} refused {doing} {what}: {reason}")
            # The traceback shows the cause too, but not if the password is quoted in it.
            raise problem from (error if reason == str(error).strip() else None)


class _Listener(threading.Thread):
    """Receives what other processes tell, on a connection of its own, which it makes anew when it breaks."""

    def __init__(self, connect: Callable[[], Any], on_change: Callable[[str], None]) -> None:
        super().__init__(name="carrel-postgres-listen", daemon=True)
        self._connect = connect
        self._on_change = on_change
        self._ends = threading.Event()

    def run(self) -> None:
        while not self._ends.is_set():
            try:
                with self._connect() as connection:
                    while not self._ends.is_set():
                        for notice in connection.notifies(timeout=_LISTEN_SECONDS):
                            self._on_change(notice.payload)
            except Exception as problem:  # noqa: BLE001 -- whatever it is, watchers look by themselves meanwhile
                _log.warning("changes are noticed late: the listening connection broke: %s", problem)
                self._ends.wait(_LISTEN_SECONDS)

    def end(self) -> None:
        """End within a second; what comes meanwhile is still passed on."""
        self._ends.set()


def _schema_text(name: str) -> str:
    return (files("carrel.storage.postgres") / name).read_text("utf-8")


_clients: "weakref.WeakSet[PostgresClient]" = weakref.WeakSet()


def _reset_in_child() -> None:
    for client in [*_clients]:
        client.reset()


os.register_at_fork(after_in_child=_reset_in_child)
