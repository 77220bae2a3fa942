"""Full-text and vector index of documents in one SQLite file, which can be deleted at any time and is built again."""

import contextlib
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from carrel.errors import CatalogueBusy, CatalogueLost, ConfigurationError

if TYPE_CHECKING:
    import sqlite3

logger = logging.getLogger(__name__)

VERSION = 3
"""Version of the tables; a file with another version is built again."""

APPLICATION_ID = 0x43415252
"""Written into the file, so that a database of another program is never taken for an index."""

LOCK_WAIT = 2.0
"""Seconds to wait for another process that writes to the file."""

_HASH_BYTES = 64 * 1024 * 1024
_FORGOTTEN_MIN = 2_000  # fewer deleted documents are not worth a rebuild
_IDLE = 300  # matches in a row of sources that have enough already, before skipping a run of documents
_FREQUENCY_MIN_DOCUMENTS = 1000
_RECOUNT_BELOW = 50
_CANDIDATES_PER_RESULT = 5

# Scripts that put no space between words: each character is a word of its own, and a word a phrase of them.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_NEEDS_SPACING = re.compile("[\u0e00-\u1cff\u2e80-\U0010ffff]")


class TextDocument(NamedTuple):
    """A searchable text: its number within its source, and its fields in the order given to the index."""

    number: int
    fields: tuple[str, ...]


class Phrase(NamedTuple):
    """Words that stand next to each other; with `prefix`, the last one may be the beginning of a longer word."""

    words: tuple[str, ...]
    prefix: bool = False


class DocumentRef(NamedTuple):
    """Identifies a document: the name of its source and its number within it."""

    source: str
    number: int


Skip = Callable[[DocumentRef], bool]
"""Says which documents a search leaves out."""


class IndexContents(NamedTuple):
    """Everything in the index that is no text, read in one transaction."""

    generation: tuple[int, int]
    sources: dict[str, bytes]
    """The state of each source: data of the caller, returned unchanged."""
    vectors: list[tuple[DocumentRef, bytes]]


@dataclass
class SourceUpdate:
    """Changes of one source, written in one step."""

    source: str
    state: bytes | None
    """New state; None deletes the source."""
    replace: bool = False
    """First drop the documents and vectors that the source has so far."""
    documents: list[TextDocument] = field(default_factory=list)
    vectors: dict[int, bytes | None] = field(default_factory=dict)
    """By document number; None deletes the vector."""


class IndexFile:
    """A SQLite connection that recovers from missing, damaged and outdated files.

    Raises `CatalogueLost` when the file was just begun empty, so that the caller must fill it again, and
    `CatalogueBusy` when another process holds it longer than `LOCK_WAIT`. Where no file can be written, the index
    lives in memory. Safe to use from any thread."""

    def __init__(self, path: Path | None, format_id: str, tables: Sequence[str]) -> None:
        """Prepare to open `path` (None: in memory); a file with another `format_id` is begun again."""
        self.open_count = 0
        self._path = path
        self._format_id = format_id
        self._tables = tables
        self._mutex = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._inode = 0

    @property
    def path(self) -> Path | None:
        """Path of the file, None when the index is in memory."""
        return self._path

    def close(self) -> None:
        """Close the connection; the next use opens it again."""
        with self._mutex:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def use_memory(self, reason: Exception) -> None:
        """Stop using the file and continue with an empty index in memory."""
        with self._mutex:
            logger.warning("cannot use the search index %s (%s); keeping it in memory instead", self._path, reason)
            self.close()
            self._path = None

    def recreate(self) -> None:
        """Delete the file; the next use begins with an empty one."""
        with self._mutex:
            self.close()
            if self._path is None:
                return
            try:
                with _folder_lock(self._path.parent):
                    # Another process may have found the same damage and made a new file already.
                    if self._path.exists() and self._path.stat().st_ino == self._inode:
                        _unlink(self._path)
            except OSError as error:
                self.use_memory(error)

    @contextlib.contextmanager
    def write_lock(self) -> Iterator[None]:
        """Keep other processes from reading and indexing the same sources; raises `CatalogueBusy` without waiting."""
        handle = self._try_lock()
        try:
            yield
        finally:
            if handle is not None:
                # A process forked meanwhile shares the handle, so that closing it here would not release the lock.
                fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def _try_lock(self) -> int | None:
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
            raise CatalogueBusy(f"another process is updating the search index {self._path}") from None
        except BaseException:
            os.close(handle)
            raise
        return handle

    @contextlib.contextmanager
    def connection(self) -> Iterator["sqlite3.Connection"]:
        """Open the file if necessary and use its connection; errors of SQLite are recovered from and translated."""
        import sqlite3  # noqa: PLC0415 - needed only for searching

        with self._mutex:
            try:
                yield self._open()
            except sqlite3.DatabaseError as error:
                self._recover(error)

    def _recover(self, error: "sqlite3.DatabaseError") -> None:
        """Repair the file as far as possible and raise the error that says what the caller has to do."""
        import sqlite3  # noqa: PLC0415

        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise CatalogueBusy(f"the search index {self._path} is locked by another process: {error}") from None
        if "no such module" in str(error):
            raise ConfigurationError(
                "search needs SQLite with FTS5, which this Python was built without; use another build of Python"
            ) from None
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "no such table" in str(error):
            logger.warning("the search index %s is damaged (%s); building it again", self._path, error)
            self.recreate()
        elif code in (0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISUSE) or self._path is None:
            raise error
        else:
            self.use_memory(error)
        raise CatalogueLost(f"the search index was begun empty: {error}") from None

    def _open(self) -> "sqlite3.Connection":
        if self._connection is not None and self._process == os.getpid():
            return self._connection
        # A connection must not be used in a forked process, not even to close it.
        self._connection = None
        if self._path is not None:
            try:
                with _folder_lock(self._path.parent):
                    return self._open_file(self._path)
            except OSError as error:
                self.use_memory(error)
        return self._connect(":memory:")

    def _open_file(self, path: Path) -> "sqlite3.Connection":
        if not path.exists():
            _unlink(path)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._inode = path.stat().st_ino
        return self._connect(str(path))

    def _connect(self, location: str) -> "sqlite3.Connection":
        import sqlite3  # noqa: PLC0415

        connection = sqlite3.connect(location, timeout=LOCK_WAIT, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(connection, location)
        except BaseException:
            connection.close()
            raise
        self._connection, self._process = connection, os.getpid()
        self.open_count += 1
        return connection

    def _prepare(self, connection: "sqlite3.Connection", location: str) -> None:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if application != APPLICATION_ID and not empty:
            raise PermissionError(f"{location} is a database of another program")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -32768")
        if not empty and _format_id(connection) == self._format_id:
            return
        connection.execute("BEGIN IMMEDIATE")
        if not empty:
            logger.info("the search index %s has another version; building it again", location)
            _drop_all(connection)
        for statement in self._tables:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("INSERT INTO about VALUES (?)", (self._format_id,))
        connection.execute("COMMIT")


class TextIndex:
    """Words and vectors of documents, and the state of each source they come from.

    The texts themselves are not stored. All methods block; they are safe to use from any thread and from several
    processes at once, and raise what `IndexFile` raises."""

    def __init__(self, path: Path | None, fields: Sequence[str], content_id: str) -> None:
        """`content_id` names the kind of documents and its version; a file with other contents is begun again."""
        self._fields = tuple(fields)
        self.file = IndexFile(path, f"index {VERSION} {content_id} {' '.join(fields)}", _tables(self._fields))

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        self.file.close()

    # --- contents ---------------------------------------------------------------------------------------------------

    def generation(self) -> tuple[int, int]:
        """Return a value that differs after another process wrote to the file or replaced it."""
        with self.file.connection() as connection:
            return self._generation(connection)

    def contents(self, *, vectors: bool = True) -> IndexContents:
        """Read sources and vectors in one transaction."""
        with self._transaction("BEGIN") as connection:
            sources = dict(connection.execute("SELECT name, state FROM sources").fetchall())
            return IndexContents(self._generation(connection), sources, _vectors(connection) if vectors else [])

    def _generation(self, connection: "sqlite3.Connection") -> tuple[int, int]:
        return self.file.open_count, int(connection.execute("PRAGMA data_version").fetchone()[0])

    def needs_rebuild(self) -> bool:
        """Whether a quarter of the indexed words belong to deleted documents, which only a new file gets rid of."""
        with self.file.connection() as connection:
            forgotten, next_id = _counter(connection, "forgotten"), _counter(connection, "next")
        return forgotten > max(_FORGOTTEN_MIN, next_id // 4)

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, updates: Sequence[SourceUpdate]) -> None:
        """Write all updates in one transaction."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            for update in updates:
                self._apply(connection, update)

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator["sqlite3.Connection"]:
        with self.file.connection() as connection:
            connection.execute(begin)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _apply(self, connection: "sqlite3.Connection", update: SourceUpdate) -> None:
        row = connection.execute("SELECT id FROM sources WHERE name = ?", (update.source,)).fetchone()
        source = row[0] if row else None
        if source is not None and (update.replace or update.state is None):
            dropped = connection.execute("DELETE FROM documents WHERE source = ?", (source,)).rowcount
            _increment(connection, "forgotten", dropped)
            connection.execute("DELETE FROM vectors WHERE source = ?", (source,))
        if update.state is None:
            connection.execute("DELETE FROM sources WHERE id = ?", (source,))
            return
        if source is None:
            source = connection.execute("INSERT INTO sources (name) VALUES (?)", (update.source,)).lastrowid
        connection.execute("UPDATE sources SET state = ? WHERE id = ?", (update.state, source))
        self._insert(connection, source, update.documents)
        for number, vector in update.vectors.items():
            if vector is None:
                connection.execute("DELETE FROM vectors WHERE source = ? AND number = ?", (source, number))
            else:
                connection.execute("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", (source, number, vector))

    def _insert(self, connection: "sqlite3.Connection", source: int | None, documents: Sequence[TextDocument]) -> None:
        """Index the documents under the next ids; an id is never used twice, because old words are not removed."""
        first = _counter(connection, "next")
        numbered = list(enumerate(sorted(documents, key=lambda document: document.number), first))
        marks = ", ".join("?" * (len(self._fields) + 1))
        connection.executemany(
            f"INSERT INTO words (rowid, {', '.join(self._fields)}) VALUES ({marks})",
            ((id_, *map(indexable, document.fields)) for id_, document in numbered),
        )
        connection.executemany(
            "INSERT INTO documents VALUES (?, ?, ?)", ((id_, source, document.number) for id_, document in numbered)
        )
        _increment(connection, "next", len(numbered))

    # --- searching --------------------------------------------------------------------------------------------------

    def find_all(
        self,
        phrases: Sequence[Phrase],
        *,
        fields: Iterable[str] = (),
        limit: int = 200,
        per_source: int = 4,
        scan: int = 4000,
        skip: Skip = lambda _: False,
    ) -> list[DocumentRef]:
        """Return documents that have all of the phrases in these fields (in any, when none is given), newest first.

        At most `limit`, at most `per_source` of each source, after looking at no more than `scan` matches; one that
        `skip` accepts is left out with those before it that were written with it."""
        expression = _match_expression(phrases, fields)
        found: list[DocumentRef] = []
        taken: dict[int, int] = {}
        looked = 0
        with self.file.connection() as connection:
            below: int | None = _counter(connection, "next")
            while below is not None:
                rows, below, idle = _matches(connection, expression, below), None, 0
                for id_, source, name, number in rows:
                    looked += 1
                    idle += 1
                    is_skipped = skip(DocumentRef(name, number))
                    if not is_skipped and taken.setdefault(source, 0) < per_source:
                        taken[source] += 1
                        found.append(DocumentRef(name, number))
                        idle = 0
                    if len(found) >= limit or looked >= scan:
                        return found
                    if idle >= _IDLE or is_skipped:
                        # One source has many matches in a row: pass over the documents that were added with this one.
                        below = _start_of_run(connection, id_, source)
                        break
        return found

    def find_any(
        self,
        weights: Mapping[Phrase, float],
        *,
        limit: int = 200,
        per_source: int = 4,
        each: int = 1000,
        skip: Skip = lambda _: False,
    ) -> list[DocumentRef]:
        """Return documents that have some of the phrases, those with the greatest weight first, then the newest.

        Of each phrase, only the `each` newest documents count; those that `skip` accepts are left out."""
        total: dict[int, float] = {}
        found: list[DocumentRef] = []
        taken: dict[str, int] = {}
        with self.file.connection() as connection:
            for phrase, weight in weights.items():
                for id_ in _newest_ids(connection, phrase, each):
                    total[id_] = total.get(id_, 0.0) + weight
            for _, id_ in nlargest(_CANDIDATES_PER_RESULT * limit, zip(total.values(), total, strict=True)):
                row = connection.execute(
                    "SELECT name, number FROM documents JOIN sources ON sources.id = source WHERE documents.id = ?",
                    (id_,),
                ).fetchone()
                if row and taken.setdefault(row[0], 0) < per_source and not skip(DocumentRef(*row)):
                    taken[row[0]] += 1
                    found.append(DocumentRef(*row))
                if len(found) >= limit:
                    break
        return found

    def frequency(self, phrase: Phrase, enough: int = 1000) -> float:
        """Estimate the share of documents with this phrase from the newest that have it; above 0, at most 1."""
        with self.file.connection() as connection:
            end = _counter(connection, "next")
            ids = _newest_ids(connection, phrase, enough)
            if len(ids) >= enough:
                return len(ids) / (end - ids[-1])
            count = len(ids)
            if 0 < count < _RECOUNT_BELOW:
                # With so few matches, those of deleted documents would distort the result.
                count = sum(1 for _ in _matches(connection, _match_expression([phrase]), end))
            total = end - _counter(connection, "forgotten")
        # The fewer documents there are, the less they say about others.
        return min(1.0, (count + 0.5) / max(total, _FREQUENCY_MIN_DOCUMENTS))


def _tables(fields: Sequence[str]) -> tuple[str, ...]:
    return (
        "CREATE TABLE about (format TEXT)",
        "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID",
        "INSERT INTO counters VALUES ('next', 1), ('forgotten', 0)",
        "CREATE TABLE sources (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, state BLOB)",
        "CREATE TABLE documents (id INTEGER PRIMARY KEY, source INTEGER, number INTEGER)",
        "CREATE INDEX documents_by_source ON documents (source)",
        "CREATE TABLE vectors (source INTEGER, number INTEGER, vector BLOB, PRIMARY KEY(source, number)) WITHOUT ROWID",
        f"CREATE VIRTUAL TABLE words USING fts5({', '.join(fields)}, content='', columnsize=0, "
        "tokenize='unicode61 remove_diacritics 2')",
        # One batch becomes one segment: what was just written is not merged again.
        f"INSERT INTO words (words, rank) VALUES ('hashsize', {_HASH_BYTES})",
    )


def indexable(text: str) -> str:
    """Return the text as it is indexed: characters of unspaced scripts stand alone, and all can be written as UTF-8."""
    if text.isascii() or not _NEEDS_SPACING.search(text):
        return text
    unspaced, symbols = _special_characters()
    return unspaced.sub(r" \1 ", symbols.sub(" ", text.encode("utf-8", "replace").decode("utf-8")))


@cache
def _special_characters() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for characters that stand alone, and for new symbols and emoji, which SQLite takes for letters.

    Compiled when first needed, because classes as large as these take some milliseconds."""
    return re.compile(f"([{UNSPACED}])"), re.compile("[^\\w\\x00-\\uffff]+")


def _match_expression(phrases: Sequence[Phrase], fields: Iterable[str] = ()) -> str:
    """Build an FTS5 expression; words are letters and digits only, so that none of them is taken for an operator."""
    expression = " AND ".join(f'"{" ".join(phrase.words)}"{" *" if phrase.prefix else ""}' for phrase in phrases)
    columns = " ".join(fields)
    return f"{{{columns}}} : ({expression})" if columns else expression


def _matches(connection: "sqlite3.Connection", expression: str, below: int) -> Iterator[tuple[int, int, str, int]]:
    """Iterate over matching documents with ids below this one, newest first: id, source id, source name, number."""
    return connection.execute(
        "SELECT words.rowid, source, name, number FROM words CROSS JOIN documents ON documents.id = words.rowid "
        "CROSS JOIN sources ON sources.id = source WHERE words MATCH ? AND words.rowid < ? ORDER BY words.rowid DESC",
        (expression, below),
    )


def _newest_ids(connection: "sqlite3.Connection", phrase: Phrase, limit: int) -> list[int]:
    """Return the ids of the newest documents with this phrase, deleted ones included."""
    rows = connection.execute(
        "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rowid DESC LIMIT ?", (_match_expression([phrase]), limit)
    )
    return [id_ for (id_,) in rows]


def _start_of_run(connection: "sqlite3.Connection", id_: int, source: int) -> int:
    """Return the first id of the run of documents of this source that ends with `id_`."""
    before = connection.execute("SELECT max(id) FROM documents WHERE id < ? AND source <> ?", (id_, source)).fetchone()
    return (before[0] or 0) + 1


def _vectors(connection: "sqlite3.Connection") -> list[tuple[DocumentRef, bytes]]:
    rows = connection.execute(
        "SELECT name, number, vector FROM vectors JOIN sources ON sources.id = source ORDER BY source, number"
    )
    return [(DocumentRef(name, number), vector) for name, number, vector in rows]


def _counter(connection: "sqlite3.Connection", name: str) -> int:
    return int(connection.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()[0])


def _increment(connection: "sqlite3.Connection", name: str, by: int) -> None:
    connection.execute("UPDATE counters SET value = value + ? WHERE name = ?", (by, name))


def _format_id(connection: "sqlite3.Connection") -> str | None:
    table = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone()
    row = connection.execute("SELECT * FROM about").fetchone() if table else None
    return row[0] if row else None


def _drop_all(connection: "sqlite3.Connection") -> None:
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    virtual = connection.execute(f"{tables} AND sql LIKE 'CREATE VIRTUAL%'").fetchall()
    for rows in (virtual, None):
        for (name,) in rows if rows is not None else connection.execute(tables).fetchall():
            connection.execute(f'DROP TABLE "{name}"')


def _unlink(path: Path) -> None:
    """Delete the file and SQLite's files beside it: a leftover journal would be applied to a new file."""
    for suffix in ("-wal", "-shm", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from opening or replacing an index in this folder."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
