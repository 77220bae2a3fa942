"""Read a session's log: backwards for what is visible, forwards for everything."""

import bisect
import gc
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from carrel.conversation.attachments import MARK, output_paths, paths_of, reattach
from carrel.conversation.log_entries import UNREADABLE, decode, decode_all
from carrel.conversation.messages import ConversationMessage, SessionMeta, is_continuation, meta_of
from carrel.conversation.replay import BackwardReplay, Numbered, VisibleEntries, events_in, without_texts
from carrel.conversation.session_state import (
    SessionState,
    has_counts,
    later,
    position_of,
    when_written,
)
from carrel.storage.base import Block, Stamp, Store


class _Pause:
    """Stops the garbage collector while entries are parsed, which creates many objects and no garbage.

    Loading 60,000 messages takes half the time. Never await inside it, because it affects the whole process. Nested
    uses and several threads are counted."""

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


@dataclass
class VisibleMessages:
    """The visible part of a log, parsed."""

    shown: VisibleEntries
    messages: list[ConversationMessage]
    problems: list[str]
    last_seq: int = 0
    detached: Sequence[int] = ()
    """The indexes of messages that refer to files beside the log."""

    @property
    def numbered(self) -> list[Numbered]:
        return list(zip(self.shown.seqs(), self.messages, strict=True))


class VisibleRange(NamedTuple):
    """Which entries of a log are visible, without the messages."""

    shown: VisibleEntries
    last_seq: int
    continued: frozenset[int]
    """The entries that continue the message before them."""

    def messages(self) -> int:
        """Return the number of visible messages."""
        return sum(1 for seq in self.shown.seqs() if seq not in self.continued) if self.continued else len(self.shown)


Hint = tuple[int, int] | None
"""A known position in a log: the number of an entry, and the byte at which it ends."""


def _sized(block: Block) -> Iterator[tuple[int, ConversationMessage, int]]:
    records = block.records
    for seq, entry in enumerate(decode_all(block), block.first_seq):
        yield seq, entry, len(records[seq - block.first_seq]) + 1


class SessionLogReader:
    """Reads the log of one session; never writes."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._key = f"{folder}/messages.jsonl"

    async def view(self, until: int | None = None, *, hint: Hint = None, texts: bool = True) -> VisibleMessages:
        """Return what is visible now (or was right after entry `until`); `hint` as in `Store.read_back`.

        Without `texts`, messages have only what `repair_messages` needs."""
        walk = BackwardReplay(until)
        blocks: list[tuple[int, list[ConversationMessage]]] = []
        last_seq, detached = 0, list[int]()
        async for block in self._store.read_back(self._key, hint=hint):
            last_seq = max(last_seq, block.last_seq)
            with collector_paused:
                entries = decode_all(block)
                # Each entry is examined now, while it is in the processor's cache.
                if MARK in set().union(*entries):
                    detached += [seq for seq, entry in enumerate(entries, block.first_seq) if MARK in entry]
                events = events_in(block.first_seq, entries)
                blocks.append((block.first_seq, entries if texts else list(map(without_texts, entries))))
                walk.take(block.first_seq, block.last_seq, events)
                if walk.enough:
                    break
        with collector_paused:
            shown = walk.shown()
            messages, places = _materialize(shown, blocks[::-1]), _places(shown, sorted(detached))
            view = VisibleMessages(shown, messages, walk.problems[::-1], last_seq, places)
        torn = await self._store.incomplete_tail(self._key)
        if torn:
            view.problems.append(
                f"the last line is torn ({len(torn)} bytes, never acknowledged); the next append sets it aside"
            )
        return view

    async def last_seq(self, *, hint: Hint = None) -> int:
        """Return the number of the last entry; `hint` as in `Store.read_back`."""
        async for block in self._store.read_back(self._key, hint=hint):
            return block.last_seq
        return 0

    async def visible_range(self, until: int | None = None, *, summed: bool = False) -> VisibleRange:
        """Return which entries are visible now, or were right after entry `until`, without keeping them in memory.

        With `summed`, also those that visible summaries replaced."""
        walk, last_seq = BackwardReplay(until, summed=summed), 0
        continued: list[int] = []
        async for block in self._store.read_back(self._key):
            last_seq = max(last_seq, block.last_seq)
            entries = decode_all(block)
            events = events_in(block.first_seq, entries)
            if b'"continues"' in block.array:
                continued += [seq for seq, entry in enumerate(entries, block.first_seq) if is_continuation(entry)]
            walk.take(block.first_seq, block.last_seq, events)
            if walk.enough:
                break
        return VisibleRange(walk.shown(), last_seq, frozenset(continued))

    async def read_entries(self, seqs: Iterable[int]) -> list[Numbered]:
        """Return these entries with their attachments; missing ones are left out."""
        found: list[Numbered] = []
        for wanted in seqs:
            async for numbered in self.entries(wanted):
                found.append(numbered)
                break
        return found

    async def entries(self, from_seq: int = 1) -> AsyncIterator[Numbered]:
        """Iterate over all entries with their attachments; an invalid line has the role `unreadable`."""
        async for block in self._store.read(self._key, from_seq):
            for seq, record in enumerate(block.records, block.first_seq):
                yield seq, await self.entry(seq, record)

    async def since(self, after: int, hint: Hint = None) -> AsyncIterator[tuple[int, ConversationMessage, int]]:
        """Iterate over the later entries without attachments, each with its size in bytes.

        The log is read backwards to there; `hint` as in `Store.read_back`."""
        blocks = list[Block]()
        if after:
            async for block in self._store.read_back(self._key, hint=hint):
                if block.last_seq > after:
                    blocks.append(block)
                if block.first_seq <= after + 1:
                    break
            for block in reversed(blocks):
                for found in _sized(block):
                    if found[0] > after:
                        yield found
            return
        async for block in self._store.read(self._key):
            for found in _sized(block):
                yield found

    async def caught_up(self, meta: SessionMeta, stamp: Stamp | None) -> SessionMeta:
        """Apply what later entries set to the metadata, without counting.

        `meta.json` is written up to a second after the entries, or not at all if the process was killed."""
        if stamp is not None and meta.get("log_bytes", stamp.size) != stamp.size:
            meta["updated_at"] = later(when_written(stamp), meta["updated_at"])
            state = SessionState(meta)
            async for seq, entry, _ in self.since(meta.get("log_seq", 0), position_of(meta)):
                state.note(seq, entry)
        return meta

    async def recount(self, state: SessionState) -> None:
        """Count the messages that were visible after the last entry that the state covers."""
        state.meta["message_count"] = (await self.visible_range(state.last_seq)).messages()

    async def count(self, meta: SessionMeta, stamp: Stamp | None) -> None:
        """Make the counts of messages and tokens exact, if the log is longer or shorter than what they cover."""
        if stamp is None or has_counts(meta, stamp.size):
            return
        if meta.get("log_bytes", stamp.size) != stamp.size:
            meta["updated_at"] = later(when_written(stamp), meta["updated_at"])
        state = SessionState(meta.copy())
        if position_of(meta) is None or state.log_bytes > stamp.size:
            state.reset()
        async for seq, entry, size in self.since(state.last_seq or 0, position_of(state.meta)):
            state.apply(seq, entry, size)
        if state.needs_recount:
            await self.recount(state)
        meta["message_count"], meta["total_tokens"] = state.meta["message_count"], state.meta["total_tokens"]

    async def live(self, from_seq: int = 1) -> AsyncIterator[Numbered]:
        """Iterate over all entries, and then over each one as it is appended."""
        async for seq, record in self._store.watch(self._key, from_seq):
            yield seq, await self.entry(seq, record)

    async def messages(self) -> AsyncIterator[ConversationMessage]:
        """Iterate over the visible messages."""
        for piece in (await self.visible_range()).shown.pieces:
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
        """Return the entry with its long outputs reattached, but not images; a missing file changes nothing."""
        paths = output_paths(entry)
        if not paths:
            return entry
        found = await self._store.get_many([f"{self._folder}/{path}" for path in paths])
        return reattach(entry, {path: data for path, data in zip(paths, found, strict=True) if data is not None})

    async def whole(self, view: VisibleMessages) -> list[ConversationMessage]:
        """Return the messages with their attachments; missing files are added to the view's problems."""
        messages = list(view.messages) if view.detached else view.messages
        for place in view.detached:
            messages[place] = await self._restored(messages[place], view.problems)
        return messages

    async def _restored(self, message: ConversationMessage, problems: list[str]) -> ConversationMessage:
        paths = list(dict.fromkeys(paths_of(message)))
        if not paths:
            return message
        found = await self._store.get_many([f"{self._folder}/{path}" for path in paths])
        files = {path: data for path, data in zip(paths, found, strict=True) if data is not None}
        problems += [f"{path} is gone; the message shows what the log has of it" for path in paths if path not in files]
        return reattach(message, files)


def _places(shown: VisibleEntries, detached: Sequence[int]) -> list[int]:
    """Return the indexes of visible messages that refer to files, given the numbers of all such entries."""
    places: list[int] = []
    start = 0
    for piece in shown.pieces:
        if isinstance(piece, range):
            inside = detached[bisect.bisect_left(detached, piece.start) : bisect.bisect_left(detached, piece.stop)]
            places += [start + seq - piece.start for seq in inside]
            start += len(piece)
        else:
            places += [start] if MARK in piece else []
            start += 1
    return places


def _materialize(
    shown: VisibleEntries, blocks: list[tuple[int, list[ConversationMessage]]]
) -> list[ConversationMessage]:
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
