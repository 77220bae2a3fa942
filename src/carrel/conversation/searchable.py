"""Pure: what of a log can be searched, and what must be remembered to go on reading it later."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import orjson

from carrel.conversation.entries import UNREADABLE, aside_of, decode
from carrel.conversation.messages import ConversationMessage, blocks_of, flatten_message_text, meta_of, tool_result_text
from carrel.conversation.metadata import DEFAULT_SESSION_TITLE, title_from
from carrel.conversation.replay import Backwards
from carrel.conversation.spill import MARK, blob_of, output_paths
from carrel.storage.catalogue import Document

FIELDS = ("title", "said", "did")
OWNER = "sessions-2"
"""Goes up when what is indexed, or what is remembered, changes."""

SAID_LIMIT = 32 * 1024
DID_LIMIT = 256 * 1024
"""Characters at each end of a text that are indexed; of what tools take and give, for each call and result."""

MEANING_LENGTH = 400
FIRST_MEANINGS = 4
LAST_MEANINGS = 12
"""How many messages of a session are found by meaning: what it set out to do, and what it did lately."""

_MARK = f'"{MARK}"'.encode()
_NONE: Mapping[int, ConversationMessage] = MappingProxyType({})

Texts = tuple[str, str]
"""What people and models said in an entry, and what was done with tools."""


def texts_of(entry: ConversationMessage) -> Texts:
    """All that can be searched in an entry, uncut; two empty texts when there is nothing."""
    role = entry.get("role")
    if role == UNREADABLE:
        return "", ""
    if role == "rewind":
        label = meta_of(entry).get("text") if aside_of(entry) == "label" else ""
        return (label if isinstance(label, str) else ""), ""
    said: list[str] = []
    did: list[str] = []
    for block in blocks_of(entry):
        kind = block.get("type")
        if kind == "tool_use":
            did += [str(block.get("name") or ""), *_strings(block.get("input"))]
        elif kind == "tool_result":
            did.append(tool_result_text(block))
        elif (file := blob_of(block) or block).get("type") in ("image", "document"):
            said.append(str(file.get("name") or ""))
        else:
            said.append(str(block.get("text") or ""))
    return "\n".join(filter(None, said)), "\n".join(filter(None, did))


def _strings(value: Any) -> list[str]:
    """The texts within a tool's input, whatever its shape."""
    found: list[str] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            waiting.extend(reversed(item.values()))
        elif isinstance(item, list):
            waiting.extend(reversed(item))
        elif isinstance(item, int | float) and not isinstance(item, bool):
            found.append(str(item))
    return found


def _ends(text: str, limit: int) -> str:
    return text if len(text) <= 2 * limit else f"{text[:limit]}\n{text[-limit:]}"


def bounded_texts(entry: ConversationMessage) -> Texts:
    """The same as far as it is indexed."""
    said, did = texts_of(entry)
    if len(did) > 2 * DID_LIMIT:
        # Each call and each result by itself, so that a long one does not hide the others.
        pieces = [texts_of({"role": entry.get("role"), "content": [block]})[1] for block in blocks_of(entry)]
        did = "\n".join(_ends(piece, DID_LIMIT) for piece in pieces if piece)
    return _ends(said, SAID_LIMIT), did


def meaning_of(entry: ConversationMessage) -> str:
    """The text by which an entry is found by meaning: what the user asked, a summary, a label; empty for all else."""
    if entry.get("role") not in ("user", "compact", "rewind"):
        return ""
    if entry.get("role") == "rewind":
        return texts_of(entry)[0][:MEANING_LENGTH]
    return flatten_message_text(entry, include_thinking=False)[:MEANING_LENGTH]


def digest(record: bytes) -> str:
    return blake2b(record, digest_size=8).hexdigest()


@dataclass
class Known:
    """What is remembered of a session: how far it was read, and what its hits need to be shown."""

    log: list[float] | None = None
    meta: list[float] | None = None
    """The stamps of the log and of `meta.json` when they were read."""
    next_seq: int = 1
    head: str = ""
    tail: str = ""
    """Digests of the first and the newest entry read: when they differ now, this is another log."""
    title: str = ""
    titled: bool = False
    """The title says more than the first message."""
    updated_at: str = ""
    archived: bool = False
    derived: dict[str, Any] = field(default_factory=dict)
    """What the log says about title and archiving, for when `meta.json` does not."""
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """The entries that are no messages, as far as they decide what is visible."""
    forks: list[tuple[str, int, int]] = field(default_factory=list)
    """Each fork on the way here: the parent, the entry of it that the fork was made at, the entry here that says so."""
    own_from: int = 1
    """The first entry that is indexed: a fork's earlier ones are found in its parent."""
    embedded_by: str = ""
    embedded_next: int = 1
    meanings: list[int] = field(default_factory=list)

    def encoded(self) -> bytes:
        try:
            return orjson.dumps(self)
        except TypeError:
            # Half a surrogate pair, in a title for example.
            return json.dumps(asdict(self)).encode("ascii")

    @classmethod
    def decoded(cls, state: bytes) -> "Known":
        try:
            return cls(**orjson.loads(state))
        except orjson.JSONDecodeError:
            return cls(**json.loads(state))

    def shows(self, seq: int) -> bool:
        """Is this entry part of the conversation as it is loaded now, or was it rewound or summed up?"""
        event = next((event for number, event in self.events if number == seq), None)
        if event is not None:
            return bool(event["role"] == "compact" or "aside" in event["meta"])
        walk = Backwards()
        walk.take(1, self.next_seq - 1, self.events)
        return seq == 0 or any(isinstance(piece, range) and seq in piece for piece in walk.shown().pieces)


class Reading:
    """One session's new entries, taken in order: the documents and the texts to embed that they make."""

    def __init__(self, known: Known, embed_from: int | None, outdated: Sequence[int] = ()) -> None:
        """`embed_from`: the first entry whose meaning is wanted, None when none is; `outdated`: whose vectors go."""
        self.known = known
        self.embed_from = embed_from
        self._outdated = list(outdated)
        self.documents: list[Document] = []
        self.size = 0
        self._meanings: list[tuple[int, str]] = []

    @property
    def start(self) -> int:
        """The entry to read from."""
        return self.known.next_seq if self.embed_from is None else min(self.known.next_seq, self.embed_from)

    def apart(self, first_seq: int, records: list[bytes]) -> dict[int, ConversationMessage]:
        """Of these, the entries whose long outputs lie beside the log, and have to be put back to be searched."""
        first = max(self.known.next_seq, self.known.own_from)
        marked = [seq for seq, record in enumerate(records, first_seq) if seq >= first and _MARK in record]
        entries = {seq: decode(records[seq - first_seq]) for seq in marked}
        return {seq: entry for seq, entry in entries.items() if output_paths(entry)}

    def take(self, first_seq: int, records: list[bytes], whole: Mapping[int, ConversationMessage] = _NONE) -> None:
        """Take in these entries; `whole` has those of them that were put together again."""
        known = self.known
        if first_seq == 1 and records:
            known.head = digest(records[0])
        for seq, record in enumerate(records, first_seq):
            self.size += len(record)
            entry = whole.get(seq) or decode(record)
            if seq >= known.next_seq:
                self._remember(seq, entry)
            if seq < known.own_from:
                continue
            if seq >= known.next_seq and any(texts := bounded_texts(entry)):
                self.documents.append(Document(seq, ("", *texts)))
                if seq in whole:
                    self.size += sum(map(len, texts))
            if self.embed_from is not None and seq >= self.embed_from and (text := meaning_of(entry)):
                self._meanings.append((seq, text))
        following = first_seq + len(records)
        if records and following > known.next_seq:
            known.next_seq = following
            known.tail = digest(records[-1])
        if self.embed_from is not None:
            known.embedded_next = max(known.embedded_next, following)

    def _remember(self, seq: int, entry: ConversationMessage) -> None:
        role, known, said = entry.get("role"), self.known, meta_of(entry)
        if role == "user":
            if "said_title" not in known.derived and (title := title_from(entry)):
                known.derived["said_title"] = title
        elif role in ("compact", "rewind", UNREADABLE):
            kept = {name: said[name] for name in ("keep_from_seq", "rewind_to", "to_seq", "aside") if name in said}
            known.events.append((seq, {"role": role, "meta": kept}))
            if aside_of(entry) == "meta" and isinstance(said.get("set"), dict):
                known.derived |= {k: v for k, v in said["set"].items() if k in ("title", "archived_at")}
            elif aside_of(entry) == "fork":
                parent, at = said.get("parent_session_id"), said.get("at_seq")
                if isinstance(parent, str) and type(at) is int:
                    known.forks.append((parent, at, seq))

    def leave_to_parent(self, present: set[str]) -> bool:
        """Leave out what a fork took over when its parent is there; True when that is new."""
        known = self.known
        if not known.forks or known.forks[-1][0] not in present or known.own_from == known.forks[-1][2]:
            return False
        own = known.own_from = known.forks[-1][2]
        self.documents = [document for document in self.documents if document.number >= own]
        self._meanings = [(seq, text) for seq, text in self._meanings if seq >= own]
        known.meanings = []
        return True

    def describe(self, title: str, updated_at: str, archived: bool) -> None:
        """What is known of the session as a whole; its title is found like a message of number 0."""
        known = self.known
        renamed, known.title = title != known.title, title
        known.updated_at, known.archived = updated_at, archived
        # A title that is only the beginning of what was said first is found there.
        said = known.derived.get("said_title")
        known.titled = title != DEFAULT_SESSION_TITLE and not (said and title.startswith(said))
        if known.titled and renamed:
            self.documents.insert(0, Document(0, (title, "", "")))
        if self.embed_from is not None and known.titled and (renamed or 0 not in known.meanings):
            self._meanings.insert(0, (0, title[:MEANING_LENGTH]))
        elif not known.titled and 0 in known.meanings:
            known.meanings.remove(0)
            self._outdated.append(0)

    def chosen(self) -> tuple[list[tuple[int, str]], dict[int, bytes | None]]:
        """The texts whose vectors are wanted, and the numbers of those that go."""
        known = self.known
        kept = kept_meanings([*known.meanings, *(number for number, _ in self._meanings)])
        gone: dict[int, bytes | None] = dict.fromkeys({*known.meanings, *self._outdated} - set(kept))
        known.meanings = kept
        return [(number, text) for number, text in self._meanings if number in kept], gone


def kept_meanings(numbers: list[int]) -> list[int]:
    """Of the entries that could be found by meaning, those that are: the first and the newest."""
    said = sorted({number for number in numbers if number})
    if len(said) > FIRST_MEANINGS + LAST_MEANINGS:
        said = said[:FIRST_MEANINGS] + said[-LAST_MEANINGS:]
    return [0, *said] if 0 in numbers else said


def own_parts(sessions: dict[str, Known]) -> dict[str, int]:
    """For each fork, from which entry on it is indexed, so that what forks share is found once.

    That is in the parent while it is there, else in the fork that took over most of it."""

    def within(name: str, parent: str, at: int) -> bool:
        origin = sessions.get(parent) if parent != name else None
        return origin is not None and origin.head == sessions[name].head and origin.next_seq > at

    parts: dict[str, int] = {}
    orphans: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name, known in sessions.items():
        if known.forks:
            parent, at, aside = known.forks[-1]
            parts[name] = aside
            if not within(name, parent, at):
                orphans.setdefault((parent, known.head), []).append((-at, name))
    for group in orphans.values():
        heir = min(group)[1]
        earlier = reversed(sessions[heir].forks[:-1])
        parts[heir] = next((aside for parent, at, aside in earlier if within(heir, parent, at)), 1)
    return parts
