"""Reads a session's log from a Store: backwards for what is visible, forwards for everything."""

import bisect
import gc
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from carrel.conversation.entries import UNREADABLE, decode, decode_all
from carrel.conversation.messages import ConversationMessage, meta_of
from carrel.conversation.replay import Backwards, Numbered, Shown, events_among
from carrel.conversation.spill import may_be_spilled, paths_of, restore
from carrel.storage.seam import Block, Store


@contextmanager
def collector_paused() -> Iterator[None]:
    """Parsing makes many objects and no garbage; the collector would walk them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass
class View:
    """The visible part of a log, parsed."""

    numbered: list[Numbered]
    problems: list[str]
    last_seq: int = 0
    has_tools: bool = False
    spilled: set[int] = field(default_factory=set)
    """The entries that refer to files beside the log."""


class LogReading:
    """One session's log; never writes."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._key = f"{folder}/messages.jsonl"

    async def view(self, until: int | None = None) -> View:
        """What is visible now (or was right after entry `until`)."""
        walk = Backwards(until)
        view = View([], walk.problems)
        blocks: list[tuple[int, list[ConversationMessage]]] = []
        async for block in self._store.read_back(self._key):
            view.last_seq = max(view.last_seq, block.first_seq + len(block.records) - 1)
            with collector_paused():
                entries = decode_all(block.records)
            blocks.append((block.first_seq, entries))
            walk.take(block.first_seq, block.first_seq + len(entries) - 1, events_among(block.first_seq, entries))
            _note_features(view, block)
            if walk.enough:
                break
        view.numbered = _materialize(walk.shown(), blocks[::-1])
        view.problems.reverse()
        torn = await self._store.torn(self._key)
        if torn:
            view.problems.append(
                f"the last line is torn ({len(torn)} bytes, never acknowledged); the next append sets it aside"
            )
        return view

    async def shown(self) -> Shown:
        """Which entries are visible, without holding any of them."""
        walk = Backwards()
        async for block in self._store.read_back(self._key):
            events = events_among(block.first_seq, decode_all(block.records))
            walk.take(block.first_seq, block.first_seq + len(block.records) - 1, events)
            if walk.enough:
                break
        return walk.shown()

    async def entries(self, from_seq: int = 1) -> AsyncIterator[Numbered]:
        """Every entry, whole; a line that is none comes with the role `unreadable`."""
        async for block in self._store.read(self._key, from_seq):
            for seq, record in enumerate(block.records, block.first_seq):
                yield seq, await self.entry(seq, record)

    async def live(self, from_seq: int = 1) -> AsyncIterator[Numbered]:
        """Every entry, and then each as it is appended."""
        async for seq, record in self._store.watch(self._key, from_seq):
            yield seq, await self.entry(seq, record)

    async def messages(self) -> AsyncIterator[ConversationMessage]:
        """The visible messages, one at a time."""
        for piece in (await self.shown()).pieces:
            if not isinstance(piece, range):
                yield piece
                continue
            async for seq, entry in self.entries(piece.start):
                if seq >= piece.stop:
                    break
                yield entry

    async def entry(self, seq: int, record: bytes) -> ConversationMessage:
        entry = decode(record)
        if entry.get("role") == UNREADABLE:
            return {"role": UNREADABLE, "meta": {"line": seq, **meta_of(entry)}}
        if may_be_spilled(record):
            return (await self.whole([entry], []))[0]
        return entry

    async def whole(self, messages: Iterable[ConversationMessage], problems: list[str]) -> list[ConversationMessage]:
        """The messages with what was spilled put back; a file that is gone is reported."""
        restored = []
        for message in messages:
            paths = paths_of(message)
            found = await self._store.get_many([f"{self._folder}/{path}" for path in paths]) if paths else []
            files = {path: data for path, data in zip(paths, found, strict=True) if data is not None}
            problems += [
                f"{path} is gone; the message shows what the log has of it" for path in paths if path not in files
            ]
            restored.append(restore(message, files) if paths else message)
        return restored


def _note_features(view: View, block: Block) -> None:
    """Look at the raw bytes once, so that most logs need no second look at each message."""
    joined = b"\n".join(block.records)
    view.has_tools = view.has_tools or b'"tool_' in joined
    if may_be_spilled(joined):
        view.spilled.update(seq for seq, record in enumerate(block.records, block.first_seq) if may_be_spilled(record))


def _materialize(shown: Shown, blocks: list[tuple[int, list[ConversationMessage]]]) -> list[Numbered]:
    starts = [first for first, _ in blocks]
    found: list[Numbered] = []
    for piece in shown.pieces:
        if not isinstance(piece, range):
            found.append((0, piece))
            continue
        seq = piece.start
        while seq < piece.stop:
            first, entries = blocks[bisect.bisect_right(starts, seq) - 1]
            stop = min(piece.stop, first + len(entries))
            found += zip(range(seq, stop), entries[seq - first : stop - first], strict=True)
            seq = stop
    return found
