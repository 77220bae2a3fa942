"""Reads a session's log from a Store: backwards for what is visible, forwards for everything."""

import bisect
import gc
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from carrel.conversation.entries import UNREADABLE, aside_of, decode, decode_all
from carrel.conversation.messages import ConversationMessage, SessionMeta, goes_on, meta_of
from carrel.conversation.metadata import DEFAULT_SESSION_TITLE, catch_up, later, title_from, when_written
from carrel.conversation.repair import ToolOrder
from carrel.conversation.replay import Backwards, Numbered, Shown, events_among
from carrel.conversation.spill import MARK, output_paths, paths_of, restore
from carrel.conversation.usage import total_after
from carrel.storage.base import Stamp, Store


class _Pause:
    """Parsing makes many objects and no garbage; the collector would walk them again and again.

    Nothing is awaited inside it, because it stops the collector for the whole process. Counted, because several
    threads may parse."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if self._readers == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._readers += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._readers -= 1
            if self._readers == 0 and self._was_on:
                gc.enable()


collector_paused = _Pause()

_MANY = 20_000


@dataclass
class View:
    """The visible part of a log, parsed."""

    shown: Shown
    messages: list[ConversationMessage]
    problems: list[str]
    last_seq: int = 0
    spilled: Sequence[int] = ()
    """The places of those messages that refer to files beside the log."""
    whole: bool = False
    """Whether every tool call is known to have its result right after it: there is nothing to mend."""

    @property
    def numbered(self) -> list[Numbered]:
        return list(zip(self.shown.seqs(), self.messages, strict=True))


class Outline(NamedTuple):
    """What is visible in a log, without any of its messages."""

    shown: Shown
    last_seq: int
    whole: bool
    """As in a `View`."""
    continued: frozenset[int]
    """The entries that go on with the message before them."""

    def messages(self, lines: int | None = None) -> int:
        """How many messages are visible, or are in the first so many lines."""
        if not self.continued:
            return len(self.shown) if lines is None else lines
        return sum(1 for seq in islice(self.shown.seqs(), lines) if seq not in self.continued)


class LogReading:
    """One session's log; never writes."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._key = f"{folder}/messages.jsonl"

    async def view(self, until: int | None = None) -> View:
        """What is visible now (or was right after entry `until`)."""
        walk = Backwards(until)
        blocks: list[tuple[int, list[ConversationMessage]]] = []
        order, plain = ToolOrder(), True
        last_seq, spilled = 0, list[int]()
        async for block in self._store.read_back(self._key):
            last_seq = max(last_seq, block.last_seq)
            with collector_paused:
                entries = decode_all(block)
                # All that must be known of each entry is looked at now, while it is in the processor's cache.
                if MARK in set().union(*entries):
                    spilled += [seq for seq, entry in enumerate(entries, block.first_seq) if MARK in entry]
                events = events_among(block.first_seq, entries)
                plain = plain and not events
                if plain:
                    order.take(entries)
                blocks.append((block.first_seq, entries))
                walk.take(block.first_seq, block.last_seq, events)
                if walk.enough:
                    break
        with collector_paused:
            shown = walk.shown()
            whole = plain and until is None and order.whole()
            messages, places = _materialize(shown, blocks[::-1]), _places(shown, sorted(spilled))
            view = View(shown, messages, walk.problems[::-1], last_seq, places, whole)
            if len(view.messages) > _MANY and not gc.get_freeze_count():
                # Straight to the oldest generation: these live on, and looking through them as young ones is dear.
                gc.freeze()
                gc.unfreeze()
        torn = await self._store.incomplete_tail(self._key)
        if torn:
            view.problems.append(
                f"the last line is torn ({len(torn)} bytes, never acknowledged); the next append sets it aside"
            )
        return view

    async def last_seq(self) -> int:
        async for block in self._store.read_back(self._key):
            return block.last_seq
        return 0

    async def shown(self) -> Shown:
        """Which entries are visible, without holding any of them."""
        return (await self.outline()).shown

    async def outline(self, until: int | None = None) -> Outline:
        """The same and more of it, now or as it was right after entry `until`; memory does not grow with the log."""
        walk, order, last_seq, plain = Backwards(until), ToolOrder(), 0, True
        continued: list[int] = []
        async for block in self._store.read_back(self._key):
            last_seq = max(last_seq, block.last_seq)
            entries = decode_all(block)
            events = events_among(block.first_seq, entries)
            plain = plain and not events
            if plain:
                order.take(entries)
            if b'"continues"' in block.array:
                continued += [seq for seq, entry in enumerate(entries, block.first_seq) if goes_on(entry)]
            walk.take(block.first_seq, block.last_seq, events)
            if walk.enough:
                break
        return Outline(walk.shown(), last_seq, plain and until is None and order.whole(), frozenset(continued))

    async def stood_for(self) -> Shown:
        """Which entries are visible or summed up in what is; what was rewound is not."""
        walk = Backwards(summed=True)
        async for block in self._store.read_back(self._key):
            walk.take(block.first_seq, block.last_seq, events_among(block.first_seq, decode_all(block)))
        return walk.stood_for()

    async def some(self, seqs: Iterable[int]) -> list[Numbered]:
        """These entries, whole; one that is not there is left out."""
        found: list[Numbered] = []
        for wanted in seqs:
            async for numbered in self.entries(wanted):
                found.append(numbered)
                break
        return found

    async def entries(self, from_seq: int = 1) -> AsyncIterator[Numbered]:
        """Every entry, whole; a line that is none comes with the role `unreadable`."""
        async for block in self._store.read(self._key, from_seq):
            for seq, record in enumerate(block.records, block.first_seq):
                yield seq, await self.entry(seq, record)

    async def caught_up(self, meta: SessionMeta, stamp: Stamp | None) -> SessionMeta:
        """The metadata with what the log says since: it is written a moment later, or never when that was cut off."""
        if stamp is not None and meta.get("log_bytes", stamp.size) != stamp.size:
            meta["updated_at"] = later(when_written(stamp), meta["updated_at"])
            _, news = await self.news(meta.get("log_seq", 0), entitling=meta["title"] == DEFAULT_SESSION_TITLE)
            catch_up(meta, news)
        return meta

    async def news(self, after: int, *, entitling: bool) -> tuple[int, list[Numbered]]:
        """The number of the last entry, and of those after `after` what tells of the session as a whole.

        That is the asides and, where one is wanted, the first message that gives a title."""
        last_seq, asides, first = 0, list[Numbered](), list[Numbered]()
        async for block in self._store.read_back(self._key):
            last_seq = max(last_seq, block.last_seq)
            if block.last_seq > after and (entitling or b'"aside"' in block.array):
                for seq, entry in zip(range(block.last_seq, after, -1), reversed(decode_all(block)), strict=False):
                    if aside_of(entry) is not None:
                        asides.append((seq, entry))
                    elif entitling and title_from(entry):
                        first = [(seq, entry)]
            if block.first_seq <= after + 1:
                break
        return last_seq, sorted([*asides, *first], key=itemgetter(0))

    async def tokens_spent(self) -> int:
        """All that was spent in a session, also on what is not visible any more."""
        total = 0
        async for block in self._store.read(self._key):
            for entry in decode_all(block):
                total = total_after(total, entry)
        return total

    async def live(self, from_seq: int = 1) -> AsyncIterator[Numbered]:
        """Every entry, and then each as it is appended."""
        async for seq, record in self._store.watch(self._key, from_seq):
            yield seq, await self.entry(seq, record)

    async def messages(self) -> AsyncIterator[ConversationMessage]:
        """The visible messages, one at a time."""
        for piece in (await self.shown()).pieces:
            if not isinstance(piece, range):
                yield await self._restored(piece, [])
                continue
            async for seq, entry in self.entries(piece.start):
                if seq >= piece.stop:
                    break
                yield entry

    async def entry(self, seq: int, record: bytes) -> ConversationMessage:
        entry = decode(record)
        if entry.get("role") == UNREADABLE:
            return {"role": UNREADABLE, "meta": {"line": seq, **meta_of(entry)}}
        return await self._restored(entry, []) if MARK in entry else entry

    async def with_outputs(self, entry: ConversationMessage) -> ConversationMessage:
        """The entry with its long outputs put back, and its pictures not; what is gone stays as the line has it."""
        paths = output_paths(entry)
        if not paths:
            return entry
        found = await self._store.get_many([f"{self._folder}/{path}" for path in paths])
        return restore(entry, {path: data for path, data in zip(paths, found, strict=True) if data is not None})

    async def whole(self, view: View) -> list[ConversationMessage]:
        """The messages with what was spilled put back; a file that is gone is added to the view's problems."""
        messages = list(view.messages) if view.spilled else view.messages
        for place in view.spilled:
            messages[place] = await self._restored(messages[place], view.problems)
        return messages

    async def _restored(self, message: ConversationMessage, problems: list[str]) -> ConversationMessage:
        paths = list(dict.fromkeys(paths_of(message)))
        if not paths:
            return message
        found = await self._store.get_many([f"{self._folder}/{path}" for path in paths])
        files = {path: data for path, data in zip(paths, found, strict=True) if data is not None}
        problems += [f"{path} is gone; the message shows what the log has of it" for path in paths if path not in files]
        return restore(message, files)


def _places(shown: Shown, spilled: Sequence[int]) -> list[int]:
    """Where the messages that refer to files stand among the visible ones, given the numbers of all such entries."""
    places: list[int] = []
    start = 0
    for piece in shown.pieces:
        if isinstance(piece, range):
            inside = spilled[bisect.bisect_left(spilled, piece.start) : bisect.bisect_left(spilled, piece.stop)]
            places += [start + seq - piece.start for seq in inside]
            start += len(piece)
        else:
            places += [start] if MARK in piece else []
            start += 1
    return places


def _materialize(shown: Shown, blocks: list[tuple[int, list[ConversationMessage]]]) -> list[ConversationMessage]:
    starts = [first for first, _ in blocks]
    found: list[ConversationMessage] = []
    for piece in shown.pieces:
        if not isinstance(piece, range):
            found.append(piece)
            continue
        seq = piece.start
        while seq < piece.stop:
            first, entries = blocks[bisect.bisect_right(starts, seq) - 1]
            stop = min(piece.stop, first + len(entries))
            found += entries[seq - first : stop - first]
            seq = stop
    return found
