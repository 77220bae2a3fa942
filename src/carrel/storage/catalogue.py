"""Documents found by their words and their meaning, in one SQLite file that may be thrown away at any time."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from carrel.storage.derived_file import DerivedFile

if TYPE_CHECKING:
    import sqlite3

VERSION = 1
SHELF = 40_000
"""About how many documents one table of words takes. New ones are put on the newest; a search begins there and stops
when it has enough, so the cost of a common word, or of a short beginning of words, does not grow with the whole."""

_HASH_BYTES = 64 * 1024 * 1024
_WORN = 2_000
_GAP = 100
_IDLE = 300
_FEW = 1000
_FEW_MATCHES = 50
_SPARE = 5

# Scripts that put no space between words: each character is a word of its own, and a word a phrase of them.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_MAY_BE_ODD = re.compile("[\u0e00-\u1cff\u2e80-\U0010ffff]")


class Document(NamedTuple):
    """One thing to be found: its number within its source, and its fields, in the order the catalogue was made with."""

    number: int
    fields: tuple[str, ...]


class Phrase(NamedTuple):
    """Words that stand next to each other; with `prefix` the last may go on."""

    words: tuple[str, ...]
    prefix: bool = False


class Found(NamedTuple):
    source: str
    number: int


class Source(NamedTuple):
    """What the catalogue knows about where documents come from."""

    version: int
    """Counts the updates; an update prepared from an older one is refused."""
    state: bytes
    """Whatever its owner wants to find again."""


class Held(NamedTuple):
    """What the catalogue holds at one moment."""

    edition: tuple[int, int]
    sources: dict[str, Source]
    vectors: list[tuple[Found, bytes]]


@dataclass
class Update:
    """What is new of one source."""

    source: str
    seen: int
    """The version this was prepared from; 0 when the source was not there."""
    state: bytes | None
    """None: the source is gone."""
    forget: bool = False
    """Drop the documents and vectors it has so far first."""
    documents: list[Document] = field(default_factory=list)
    vectors: dict[int, bytes | None] = field(default_factory=dict)
    """By number; None takes one away."""


class Catalogue:
    """Words and vectors of documents, and how far each source has been read.

    It holds no text, only what is needed to find one. Blocking; safe to use from any thread, and from several
    processes at once. Raises what a `DerivedFile` raises."""

    def __init__(self, path: Path | None, fields: Sequence[str], owner: str) -> None:
        """`owner` names who fills it and in which version; a file made for another is begun anew."""
        self._fields = tuple(fields)
        self.file = DerivedFile(path, f"catalogue {VERSION} {owner} {' '.join(fields)}", _TABLES)

    def close(self) -> None:
        """Twice is harmless, and it opens again when used."""
        self.file.close()

    # --- what is in it ----------------------------------------------------------------------------------------------

    def edition(self) -> tuple[int, int]:
        """Differs when another process has written since, or the file is another one."""
        with self.file.using() as connection:
            return self._edition(connection)

    def held(self, *, vectors: bool = True) -> Held:
        """All of it as it was at one moment, whoever writes meanwhile."""
        with self.file.using() as connection:
            connection.execute("BEGIN")
            try:
                return Held(self._edition(connection), _sources(connection), _vectors(connection) if vectors else [])
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _edition(self, connection: "sqlite3.Connection") -> tuple[int, int]:
        return self.file.openings, int(connection.execute("PRAGMA data_version").fetchone()[0])

    def worn(self) -> bool:
        """A good part of what it holds was forgotten meanwhile, and only making it anew gets rid of that."""
        with self.file.using() as connection:
            forgotten, following = _counter(connection, "forgotten"), _counter(connection, "next")
        return forgotten > max(_WORN, following // 4)

    # --- filling it -------------------------------------------------------------------------------------------------

    def write(self, updates: Sequence[Update]) -> list[str]:
        """Take all updates in one step; returns the sources of those refused because another writer was faster."""
        refused = []
        with self.file.using() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                for update in updates:
                    if not self._take(connection, update):
                        refused.append(update.source)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        return refused

    def _take(self, connection: "sqlite3.Connection", update: Update) -> bool:
        row = connection.execute("SELECT id, version FROM sources WHERE name = ?", (update.source,)).fetchone()
        source, version = row if row else (None, 0)
        if version != update.seen:
            return False
        if source is not None and (update.forget or update.state is None):
            held = connection.execute("SELECT sum(last - first + 1) FROM spans WHERE source = ?", (source,)).fetchone()
            _count(connection, "forgotten", held[0] or 0)
            connection.execute("DELETE FROM spans WHERE source = ?", (source,))
            connection.execute("DELETE FROM vectors WHERE source = ?", (source,))
        if update.state is None:
            connection.execute("DELETE FROM sources WHERE id = ?", (source,))
            return True
        if source is None:
            made = connection.execute("INSERT INTO sources (name, version, state) VALUES (?, 0, x'')", (update.source,))
            source = made.lastrowid
        connection.execute("UPDATE sources SET version = version + 1, state = ? WHERE id = ?", (update.state, source))
        if update.documents:
            self._shelve(connection, source, update.documents)
        for number, vector in update.vectors.items():
            if vector is None:
                connection.execute("DELETE FROM vectors WHERE source = ? AND number = ?", (source, number))
            else:
                connection.execute("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", (source, number, vector))
        return True

    def _shelve(self, connection: "sqlite3.Connection", source: int | None, documents: Sequence[Document]) -> None:
        """Give the documents the next numbers of all, so that a span tells whose they are."""
        shelf = self._newest_shelf(connection)
        marks = ", ".join("?" * (len(self._fields) + 1))
        for run in _runs(documents):
            first, lowest = _counter(connection, "next"), run[0].number
            last = first + run[-1].number - lowest
            connection.executemany(
                f"INSERT INTO words_{shelf} (rowid, {', '.join(self._fields)}) VALUES ({marks})",
                ((first + document.number - lowest, *map(indexable, document.fields)) for document in run),
            )
            connection.execute("INSERT INTO spans VALUES (?, ?, ?, ?)", (first, last, source, lowest))
            _count(connection, "next", last - first + 1)

    def _newest_shelf(self, connection: "sqlite3.Connection") -> int:
        following = _counter(connection, "next")
        number, first = next(iter(_shelves(connection)), (0, 0))
        if number and following - first < SHELF:
            return number
        number += 1
        connection.execute("INSERT INTO shelves VALUES (?, ?)", (number, following))
        connection.execute(
            f"CREATE VIRTUAL TABLE words_{number} USING fts5({', '.join(self._fields)}, content='', columnsize=0, "
            "tokenize='unicode61 remove_diacritics 2')"
        )
        # One batch is one segment: nothing is merged that was only just written.
        connection.execute(f"INSERT INTO words_{number} (words_{number}, rank) VALUES ('hashsize', {_HASH_BYTES})")
        return number

    # --- asking it --------------------------------------------------------------------------------------------------

    def find(
        self,
        phrases: Sequence[Phrase],
        *,
        fields: Iterable[str] = (),
        limit: int = 200,
        per_source: int = 4,
        scan: int = 4000,
    ) -> list[Found]:
        """Documents with all of the phrases, in these fields, the newest first.

        At most `limit`, at most `per_source` from each source, after looking at no more than `scan`."""
        asked = _expression(phrases, fields)
        found: list[Found] = []
        taken: dict[str, int] = {}
        looked = 0
        with self.file.using() as connection:
            for shelf, _ in _shelves(connection):
                below: int | None = _counter(connection, "next")
                while below is not None:
                    rows, below, idle = self._matches(connection, shelf, asked, below), None, 0
                    for name, number, first in rows:
                        looked += 1
                        idle += 1
                        if taken.setdefault(name, 0) < per_source:
                            taken[name] += 1
                            found.append(Found(name, number))
                            idle = 0
                        if len(found) >= limit or looked >= scan:
                            return found
                        if idle >= _IDLE:
                            # One source has a great many: go on before all that it was given at once.
                            below = first
                            break
        return found

    def weigh(
        self, weights: Mapping[Phrase, float], *, limit: int = 200, per_source: int = 4, each: int = 1000
    ) -> list[Found]:
        """Documents with some of the phrases, those first whose phrases weigh most together, then the newest.

        Of each phrase, only the `each` newest documents count."""
        total: dict[int, float] = {}
        found: list[Found] = []
        taken: dict[str, int] = {}
        with self.file.using() as connection:
            for phrase, weight in weights.items():
                for row in _newest_rows(connection, _expression([phrase]), each):
                    total[row] = total.get(row, 0.0) + weight
            for _, row in nlargest(_SPARE * limit, zip(total.values(), total, strict=True)):
                place = connection.execute(
                    "SELECT name, ? - first + offset FROM spans JOIN sources ON sources.id = source "
                    "WHERE first = (SELECT max(first) FROM spans WHERE first <= ?) AND ? <= last",
                    (row, row, row),
                ).fetchone()
                if place and taken.setdefault(place[0], 0) < per_source:
                    taken[place[0]] += 1
                    found.append(Found(*place))
                if len(found) >= limit:
                    break
        return found

    def _matches(
        self, connection: "sqlite3.Connection", shelf: int, asked: str, below: int
    ) -> Iterator[tuple[str, int, int]]:
        """Source, number and the beginning of the span, the newest first."""
        words = f"words_{shelf}"
        return connection.execute(
            f"SELECT name, {words}.rowid - first + offset, first FROM {words} "
            f"CROSS JOIN spans ON first = (SELECT max(first) FROM spans WHERE first <= {words}.rowid) "
            f"AND {words}.rowid <= last CROSS JOIN sources ON sources.id = source "
            f"WHERE {words} MATCH ? AND {words}.rowid < ? ORDER BY {words}.rowid DESC",
            (asked, below),
        )

    def share(self, phrase: Phrase, enough: int = 1000) -> float:
        """Roughly which part of the documents has this phrase, judged by the newest that do; above 0, at most 1."""
        asked = _expression([phrase])
        matches = 0
        with self.file.using() as connection:
            end = _counter(connection, "next")
            for shelf, first in _shelves(connection):
                count, lowest = connection.execute(
                    f"SELECT count(*), min(rowid) FROM (SELECT rowid FROM words_{shelf} "
                    f"WHERE words_{shelf} MATCH ? ORDER BY rowid DESC LIMIT ?)",
                    (asked, enough),
                ).fetchone()
                if 0 < count < _FEW_MATCHES:
                    # So few that those of forgotten documents would tell.
                    count = sum(1 for _ in self._matches(connection, shelf, asked, end))
                matches += count
                if matches >= enough:
                    return float(min(1.0, matches / (end - (lowest if count == enough else first))))
            total = end - _counter(connection, "forgotten")
        # Of a few documents nothing can be said about all the others.
        return min(1.0, (matches + 0.5) / max(total, _FEW))


_TABLES = (
    "CREATE TABLE about (made_for TEXT)",
    "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID",
    "INSERT INTO counters VALUES ('next', 1), ('forgotten', 0)",
    "CREATE TABLE sources (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, version INTEGER, state BLOB)",
    "CREATE TABLE shelves (number INTEGER PRIMARY KEY, first INTEGER)",
    "CREATE TABLE spans (first INTEGER PRIMARY KEY, last INTEGER, source INTEGER, offset INTEGER)",
    "CREATE INDEX spans_by_source ON spans (source)",
    "CREATE TABLE vectors (source INTEGER, number INTEGER, vector BLOB, PRIMARY KEY (source, number)) WITHOUT ROWID",
)


def indexable(text: str) -> str:
    """The text as it is indexed: a character of an unspaced script stands alone, and all can be written as UTF-8."""
    if text.isascii() or not _MAY_BE_ODD.search(text):
        return text
    unspaced, unknown = _odd_characters()
    return unspaced.sub(r" \1 ", unknown.sub(" ", text.encode("utf-8", "replace").decode("utf-8")))


@cache
def _odd_characters() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Those that stand alone; and those that SQLite's tables do not know and it takes for letters, as new emoji.

    Compiled when first needed, because classes as large as these take some milliseconds."""
    return re.compile(f"([{UNSPACED}])"), re.compile("[^\\w\\x00-\\uffff]+")


def _runs(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """The documents in order, parted where many numbers are missing between two."""
    ordered = sorted(documents, key=lambda document: document.number)
    start = 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index].number - ordered[index - 1].number > _GAP:
            yield ordered[start:index]
            start = index


def _expression(phrases: Sequence[Phrase], fields: Iterable[str] = ()) -> str:
    """In FTS5's own language; a word is letters and digits alone, so nothing in it can be taken for a command."""
    asked = " AND ".join(f'"{" ".join(phrase.words)}"{" *" if phrase.prefix else ""}' for phrase in phrases)
    limited = " ".join(fields)
    return f"{{{limited}}} : ({asked})" if limited else asked


def _sources(connection: "sqlite3.Connection") -> dict[str, Source]:
    rows = connection.execute("SELECT name, version, state FROM sources")
    return {name: Source(version, state) for name, version, state in rows}


def _vectors(connection: "sqlite3.Connection") -> list[tuple[Found, bytes]]:
    rows = connection.execute(
        "SELECT name, number, vector FROM vectors JOIN sources ON sources.id = source ORDER BY source, number"
    )
    return [(Found(name, number), vector) for name, number, vector in rows]


def _counter(connection: "sqlite3.Connection", name: str) -> int:
    return int(connection.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()[0])


def _count(connection: "sqlite3.Connection", name: str, more: int) -> None:
    connection.execute("UPDATE counters SET value = value + ? WHERE name = ?", (more, name))


def _newest_rows(connection: "sqlite3.Connection", asked: str, limit: int) -> list[int]:
    found: list[int] = []
    for shelf, _ in _shelves(connection):
        rows = connection.execute(
            f"SELECT rowid FROM words_{shelf} WHERE words_{shelf} MATCH ? ORDER BY rowid DESC LIMIT ?",
            (asked, limit - len(found)),
        )
        found += [row for (row,) in rows]
        if len(found) >= limit:
            break
    return found


def _shelves(connection: "sqlite3.Connection") -> list[tuple[int, int]]:
    """Number and first document of each table of words, the newest first."""
    return connection.execute("SELECT number, first FROM shelves ORDER BY number DESC").fetchall()
