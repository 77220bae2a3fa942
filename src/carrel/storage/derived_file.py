"""A SQLite file that holds nothing of its own: when it is missing, damaged or of another version, it begins empty."""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from carrel.errors import CatalogueBusy, CatalogueLost, ConfigurationError

if TYPE_CHECKING:
    import sqlite3

logger = logging.getLogger(__name__)

APPLICATION = 0x43415252
"""Written into the file, so that a database of another program is never taken for one of ours."""

LOCK_WAIT = 2.0


class DerivedFile:
    """A connection that puts itself right.

    `CatalogueLost` says that the file just began empty, and the caller must fill it again; `CatalogueBusy` that
    another process kept it for longer than one should wait. Where it cannot be written it lives in memory."""

    def __init__(self, path: Path | None, made_for: str, tables: Sequence[str]) -> None:
        """`made_for` is written into the file; one that says something else is begun anew."""
        self.openings = 0
        self._path = path
        self._made_for = made_for
        self._tables = tables
        self._guard = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._inode = 0

    @property
    def path(self) -> Path | None:
        """Where it is, or None when in memory."""
        return self._path

    def close(self) -> None:
        """Twice is harmless, and it opens again when used."""
        with self._guard:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def use_memory(self, problem: Exception) -> None:
        """Leave the file alone from now on."""
        with self._guard:
            self._go_to_memory(problem)

    def remake(self) -> None:
        """Begin empty."""
        with self._guard:
            self._begin_anew()

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """No two fill it at once, or each would read and write the same; `CatalogueBusy` at once where another does."""
        handle = self._claim()
        try:
            yield
        finally:
            if handle is not None:
                # A process forked meanwhile has the handle too, and closing ours alone would not let go.
                fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def _claim(self) -> int | None:
        if self._path is None:
            return None
        try:
            handle = os.open(self._path.with_name(f"{self._path.name}-filling"), os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise CatalogueBusy(f"the search catalogue {self._path} is being filled by another process") from None
        except BaseException:
            os.close(handle)
            raise
        return handle

    @contextlib.contextmanager
    def using(self) -> Iterator["sqlite3.Connection"]:
        import sqlite3  # noqa: PLC0415 - only who searches needs it

        with self._guard:
            try:
                yield self._opened()
            except sqlite3.DatabaseError as problem:
                self._recover(problem)

    def _recover(self, problem: "sqlite3.DatabaseError") -> None:
        """Put things right as far as possible, and tell the caller what it has to do."""
        import sqlite3  # noqa: PLC0415

        code = getattr(problem, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise CatalogueBusy(f"the search catalogue {self._path} is kept by another process: {problem}") from None
        if "no such module" in str(problem):
            raise ConfigurationError("searching needs SQLite with FTS5, which this Python was built without") from None
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "no such table" in str(problem):
            logger.warning("the search catalogue %s is damaged (%s); it is made anew", self._path, problem)
            self._begin_anew()
        elif code in (0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISUSE) or self._path is None:
            raise problem
        else:
            self._go_to_memory(problem)
        raise CatalogueLost(f"the search catalogue was begun anew: {problem}") from None

    def _go_to_memory(self, problem: Exception) -> None:
        logger.warning("the search catalogue %s cannot be kept (%s); it lives in memory now", self._path, problem)
        self.close()
        self._path = None

    def _opened(self) -> "sqlite3.Connection":
        if self._connection is not None and self._process == os.getpid():
            return self._connection
        # A connection must not be carried into a forked process, not even to be closed there.
        self._connection = None
        if self._path is not None:
            try:
                with _alone_in(self._path.parent):
                    return self._open_file(self._path)
            except OSError as problem:
                self._go_to_memory(problem)
        return self._connect(":memory:")

    def _open_file(self, path: Path) -> "sqlite3.Connection":
        if not path.exists():
            _unlink(path)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._inode = path.stat().st_ino
        return self._connect(str(path))

    def _connect(self, place: str) -> "sqlite3.Connection":
        import sqlite3  # noqa: PLC0415

        connection = sqlite3.connect(place, timeout=LOCK_WAIT, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(connection, place)
        except BaseException:
            connection.close()
            raise
        self._connection, self._process = connection, os.getpid()
        self.openings += 1
        return connection

    def _prepare(self, connection: "sqlite3.Connection", place: str) -> None:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if application != APPLICATION and not empty:
            raise PermissionError(f"{place} is a database of another program")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -32768")
        if not empty and _made_for(connection) == self._made_for:
            return
        connection.execute("BEGIN IMMEDIATE")
        if not empty:
            logger.info("the search catalogue %s is of another version; it is made anew", place)
            _drop_all(connection)
        for statement in self._tables:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute("INSERT INTO about VALUES (?)", (self._made_for,))
        connection.execute("COMMIT")

    def _begin_anew(self) -> None:
        self.close()
        if self._path is None:
            return
        try:
            with _alone_in(self._path.parent):
                # Another process may have found the same damage, and a new file is there already.
                if self._path.exists() and self._path.stat().st_ino == self._inode:
                    _unlink(self._path)
        except OSError as problem:
            self._go_to_memory(problem)


def _made_for(connection: "sqlite3.Connection") -> str | None:
    known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone()
    row = connection.execute("SELECT made_for FROM about").fetchone() if known else None
    return row[0] if row else None


def _drop_all(connection: "sqlite3.Connection") -> None:
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    virtual = connection.execute(f"{tables} AND sql LIKE 'CREATE VIRTUAL%'").fetchall()
    for rows in (virtual, None):
        for (name,) in rows if rows is not None else connection.execute(tables).fetchall():
            connection.execute(f'DROP TABLE "{name}"')


def _unlink(path: Path) -> None:
    """The file and what SQLite keeps beside it: a journal that is left over would be played into a new file."""
    for suffix in ("-wal", "-shm", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process opens or replaces a catalogue in this folder meanwhile."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
