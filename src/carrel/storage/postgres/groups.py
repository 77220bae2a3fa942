"""Appends of one process in groups: each group is one statement, so 64 writers are several times as fast as alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import groupby

_MAX_APPENDS = 256
_MAX_BYTES = 8 * 1024 * 1024
"""Of the records of one group, unless one append alone has more."""
_GROUPS = 2
"""Under way at a time: while one waits for the disk, the other is sent."""

Answer = tuple[str, int]
"""The outcome, and the number of the last record."""


@dataclass(eq=False)
class Append:
    """One append that waits for its group."""

    key: str
    records: Sequence[bytes]
    sync: bool
    create: bool
    after: int | None
    guard: tuple[str | None, str | None]
    answer: Future[Answer] = field(default_factory=Future)

    @property
    def size(self) -> int:
        return sum(map(len, self.records)) + 100

    def can_join(self, other: Append) -> bool:
        """Return whether the records can be appended together with those of the one before."""
        same = (self.key, self.create, self.guard) == (other.key, other.create, other.guard)
        return same and self.after is other.after is None and bool(self.records and other.records)


class AppendGroups:
    """Gathers the appends of all threads and loops, and sends them, two groups at a time.

    The appends to one log are sent in the order in which they came, never in two groups at once. The keys of a group
    are sorted, so that two processes do not wait for each other's locks in a circle."""

    def __init__(self, send: Callable[[list[list[Append]]], list[Answer]], threads: Callable[[], Executor]) -> None:
        """`send` gets lists of appends to be made as one, and returns an answer for each list."""
        self._send = send
        self._threads = threads
        self._guard = threading.Lock()
        self._waiting: deque[Append] = deque()
        self._busy: set[str] = set()
        """The keys of the groups under way."""
        self._workers = 0

    def add(self, append: Append) -> None:
        """Send an append with the next group; its `answer` is set from another thread."""
        with self._guard:
            self._waiting.append(append)
            if self._workers == _GROUPS:
                return
            self._workers += 1
        try:
            self._threads().submit(self._work)
        except BaseException:
            with self._guard:
                self._workers -= 1
            raise

    def withdraw(self, append: Append) -> bool:
        """Take an append back; False if it is under way or done."""
        with self._guard:
            if append not in self._waiting:
                return False
            self._waiting.remove(append)
            return True

    def _work(self) -> None:
        while group := self._take():
            try:
                self._make(group)
            finally:
                with self._guard:
                    self._busy -= {append.key for append in group}

    def _take(self) -> list[Append]:
        """Return the next group; without one, this worker has ended."""
        group: list[Append] = []
        left: deque[Append] = deque()
        size = 0
        with self._guard:
            while self._waiting and len(group) < _MAX_APPENDS and (not group or size < _MAX_BYTES):
                append = self._waiting.popleft()
                if append.key in self._busy:
                    left.append(append)
                    continue
                group.append(append)
                size += append.size
            self._waiting.extendleft(reversed(left))
            self._busy |= {append.key for append in group}
            if not group:
                self._workers -= 1
        return group

    def _make(self, group: list[Append]) -> None:
        joined: list[list[Append]] = []
        for _, same_key in groupby(sorted(group, key=lambda append: append.key), key=lambda append: append.key):
            for append in same_key:
                if joined and append.can_join(joined[-1][-1]):
                    joined[-1].append(append)
                else:
                    joined.append([append])
        try:
            answers = self._send(joined)
        except BaseException as problem:
            for append in group:
                append.answer.set_exception(problem)
            if not isinstance(problem, Exception):
                raise
            return
        for appends, (outcome, last) in zip(joined, answers, strict=True):
            for append in reversed(appends):
                append.answer.set_result((outcome, last))
                last -= len(append.records)
