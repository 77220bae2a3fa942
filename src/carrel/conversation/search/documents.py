"""The searchable texts of log entries, and what is remembered of a session so that its log is read only once. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from carrel.conversation.attachments import MARK, blob_of, output_paths
from carrel.conversation.log_entries import UNREADABLE, decode, note_kind
from carrel.conversation.messages import ConversationMessage, blocks_of, flatten_message_text, meta_of, tool_result_text
from carrel.conversation.replay import BackwardReplay
from carrel.conversation.session_state import DEFAULT_SESSION_TITLE, title_from
from carrel.storage.text_index import TextDocument

FIELDS = ("title", "text", "tools")
"""Fields of a document; `EntryTexts` explains the last two."""

CONTENT_ID = "sessions-4"
"""Counted up when what is indexed or remembered changes; an index with another id is built again."""

MAX_TEXT = 32 * 1024
MAX_TOOL_TEXT = 256 * 1024
"""Characters at each end of a text that are indexed; of tools, for each call and each result."""

EMBEDDED_LENGTH = 400
FIRST_EMBEDDED = 4
LAST_EMBEDDED = 12
"""How many messages of a session are found by meaning: its first ones, which set the task, and its newest."""

_MARK = f'"{MARK}"'.encode()
_NO_ENTRIES: Mapping[int, ConversationMessage] = MappingProxyType({})


class EntryTexts(NamedTuple):
    """The searchable texts of a log entry."""

    text: str
    """What the user and the model wrote."""
    tools: str
    """Names and arguments of tool calls, and their results."""


def entry_texts(entry: ConversationMessage) -> EntryTexts:
    """Return everything in an entry that can be searched, at full length."""
    role = entry.get("role")
    if role == UNREADABLE:
        return EntryTexts("", "")
    if role == "rewind":
        label = meta_of(entry).get("text") if note_kind(entry) == "label" else ""
        return EntryTexts(label if isinstance(label, str) else "", "")
    texts: list[str] = []
    tools: list[str] = []
    for block in blocks_of(entry):
        kind = block.get("type")
        if kind == "tool_use":
            tools += [str(block.get("name") or ""), *_strings(block.get("input"))]
        elif kind == "tool_result":
            tools.append(tool_result_text(block))
        elif (file := blob_of(block) or block).get("type") in ("image", "document"):
            texts.append(str(file.get("name") or ""))
        else:
            texts.append(str(block.get("text") or ""))
    return EntryTexts("\n".join(filter(None, texts)), "\n".join(filter(None, tools)))


def _strings(value: Any) -> list[str]:
    """Collect the strings and numbers within a tool's input, whatever its shape."""
    found: list[str] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            pending.extend(reversed(item.values()))
        elif isinstance(item, list):
            pending.extend(reversed(item))
        elif isinstance(item, int | float) and not isinstance(item, bool):
            found.append(str(item))
    return found


def _ends(text: str, limit: int) -> str:
    return text if len(text) <= 2 * limit else f"{text[:limit]}\n{text[-limit:]}"


def indexed_texts(entry: ConversationMessage) -> EntryTexts:
    """Return the texts of an entry as far as they are indexed: the middle of very long ones is left out."""
    text, tools = entry_texts(entry)
    if len(tools) > 2 * MAX_TOOL_TEXT:
        # Each call and each result by itself, so that a long one does not hide the others.
        pieces = [entry_texts({"role": entry.get("role"), "content": [block]}).tools for block in blocks_of(entry)]
        tools = "\n".join(_ends(piece, MAX_TOOL_TEXT) for piece in pieces if piece)
    return EntryTexts(_ends(text, MAX_TEXT), tools)


def text_to_embed(entry: ConversationMessage) -> str:
    """Return the text by which an entry is found by meaning: of user messages, summaries and labels, else empty."""
    if entry.get("role") not in ("user", "compact", "rewind"):
        return ""
    if entry.get("role") == "rewind":
        return entry_texts(entry).text[:EMBEDDED_LENGTH]
    return flatten_message_text(entry, include_thinking=False)[:EMBEDDED_LENGTH]


def digest(record: bytes) -> str:
    """Return a short hash of a line of the log."""
    return blake2b(record, digest_size=8).hexdigest()


@dataclass
class IndexedSession:
    """What the index remembers of a session: how far its log was read, and what its hits need to be shown."""

    log_stamp: list[float] | None = None
    meta_stamp: list[float] | None = None
    """Stamps of `messages.jsonl` and `meta.json` when they were read."""
    next_seq: int = 1
    first_digest: str = ""
    last_digest: str = ""
    """Digests of the first and the newest entry that was read; if they differ from the log's, it is another log."""
    title: str = ""
    title_indexed: bool = False
    """The title is a document of its own, with number 0, because it is not just the beginning of the first message."""
    updated_at: str = ""
    archived: bool = False
    log_title: str = ""
    log_archived: bool = False
    """Title and archiving according to the log, used when there is no `meta.json`."""
    first_text: str = ""
    """Beginning of the first user message, which is the title of a session without one."""
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """The entries that are no messages, as far as they decide which messages are visible."""
    forks: list[tuple[str, int]] = field(default_factory=list)
    """The parent of each fork in the session's history, and the last entry inherited from it."""
    embedded_by: str = ""
    embedded_next: int = 1
    embedded: list[int] = field(default_factory=list)
    """Name of the embedder, the first entry that it has not seen, and the entries that have a vector."""

    def encode(self) -> bytes:
        """Encode as JSON."""
        try:
            return orjson.dumps(self)
        except TypeError:
            # Half a surrogate pair, in a title for example.
            return json.dumps(asdict(self)).encode("ascii")

    @classmethod
    def decode(cls, state: bytes) -> "IndexedSession":
        """Decode what `encode` returned."""
        try:
            return cls(**orjson.loads(state))
        except orjson.JSONDecodeError:
            return cls(**json.loads(state))

    def is_visible(self, seq: int) -> bool:
        """Whether an entry is part of the conversation as it is loaded now: neither rewound nor summarized."""
        event = next((event for number, event in self.events if number == seq), None)
        if event is not None:
            return bool(event["role"] == "compact" or "aside" in event["meta"])
        walk = BackwardReplay()
        walk.take(1, self.next_seq - 1, self.events)
        return seq == 0 or any(isinstance(piece, range) and seq in piece for piece in walk.shown().pieces)


class DocumentBuilder:
    """Builds documents and texts to embed from new entries of one session, which are added in order."""

    def __init__(self, session: IndexedSession, embed_from: int | None, outdated: Sequence[int] = ()) -> None:
        """`embed_from`: first entry to embed, None without an embedder; `outdated`: entries with outdated vectors."""
        self.session = session
        self.embed_from = embed_from
        self._outdated = list(outdated)
        self.documents: list[TextDocument] = []
        self.size = 0
        self._to_embed: list[tuple[int, str]] = []

    @property
    def start(self) -> int:
        """Number of the entry to read from."""
        return self.session.next_seq if self.embed_from is None else min(self.session.next_seq, self.embed_from)

    def detached_outputs(self, first_seq: int, records: list[bytes]) -> dict[int, ConversationMessage]:
        """Return those of the new entries that refer to tool outputs stored beside the log."""
        first = self.session.next_seq
        marked = [seq for seq, record in enumerate(records, first_seq) if seq >= first and _MARK in record]
        entries = {seq: decode(records[seq - first_seq]) for seq in marked}
        return {seq: entry for seq, entry in entries.items() if output_paths(entry)}

    def add(
        self, first_seq: int, records: list[bytes], complete: Mapping[int, ConversationMessage] = _NO_ENTRIES
    ) -> None:
        """Add entries; `complete` has those with outputs that were read from beside the log."""
        session = self.session
        if first_seq == 1 and records:
            session.first_digest = digest(records[0])
        for seq, record in enumerate(records, first_seq):
            self.size += len(record)
            entry = complete.get(seq) or decode(record)
            if seq >= session.next_seq:
                self._remember(seq, entry)
                if any(texts := indexed_texts(entry)):
                    self.documents.append(TextDocument(seq, ("", *texts)))
                    if seq in complete:
                        self.size += sum(map(len, texts))
            if self.embed_from is not None and seq >= self.embed_from and (text := text_to_embed(entry)):
                self._to_embed.append((seq, text))
        next_seq = first_seq + len(records)
        if records and next_seq > session.next_seq:
            session.next_seq = next_seq
            session.last_digest = digest(records[-1])
        if self.embed_from is not None:
            session.embedded_next = max(session.embedded_next, next_seq)

    def _remember(self, seq: int, entry: ConversationMessage) -> None:
        role, session, meta = entry.get("role"), self.session, meta_of(entry)
        if role == "user":
            session.first_text = session.first_text or title_from(entry) or ""
        elif role in ("compact", "rewind", UNREADABLE):
            kept = {name: meta[name] for name in ("keep_from_seq", "rewind_to", "to_seq", "aside") if name in meta}
            session.events.append((seq, {"role": role, "meta": kept}))
            if note_kind(entry) == "meta" and isinstance(changes := meta.get("set"), dict):
                session.log_title = str(changes.get("title", session.log_title) or "")
                session.log_archived = bool(changes.get("archived_at", session.log_archived))
            elif note_kind(entry) == "fork":
                parent, at = meta.get("parent_session_id"), meta.get("at_seq")
                if isinstance(parent, str) and type(at) is int:
                    session.forks.append((parent, at))

    def describe(self, title: str, updated_at: str, archived: bool) -> None:
        """Set what is known of the session as a whole; its title becomes a document with number 0."""
        session = self.session
        renamed, session.title = title != session.title, title
        session.updated_at, session.archived = updated_at, archived
        # A title that is only the beginning of the first message is found there.
        is_first_text = bool(session.first_text) and title.startswith(session.first_text)
        session.title_indexed = title != DEFAULT_SESSION_TITLE and not is_first_text
        if session.title_indexed and renamed:
            self.documents.append(TextDocument(0, (title, "", "")))
        if self.embed_from is not None and session.title_indexed and (renamed or 0 not in session.embedded):
            self._to_embed.insert(0, (0, title[:EMBEDDED_LENGTH]))
        elif not session.title_indexed and 0 in session.embedded:
            session.embedded.remove(0)
            self._outdated.append(0)

    def vector_changes(self) -> tuple[list[tuple[int, str]], dict[int, bytes | None]]:
        """Return the texts to embed, and the entries to delete the vectors of, each mapped to None."""
        session = self.session
        kept = entries_to_embed([*session.embedded, *(number for number, _ in self._to_embed)])
        deleted: dict[int, bytes | None] = dict.fromkeys({*session.embedded, *self._outdated} - set(kept))
        session.embedded = kept
        return [(number, text) for number, text in self._to_embed if number in kept], deleted


def entries_to_embed(numbers: list[int]) -> list[int]:
    """Of the entries that could be found by meaning, return the first and the newest ones, and the title."""
    entries = sorted({number for number in numbers if number})
    if len(entries) > FIRST_EMBEDDED + LAST_EMBEDDED:
        entries = entries[:FIRST_EMBEDDED] + entries[-LAST_EMBEDDED:]
    return [0, *entries] if 0 in numbers else entries


_NO_SESSION = IndexedSession()


def is_found_in_parent(sessions: Mapping[str, IndexedSession], name: str, seq: int) -> bool:
    """Return whether an entry of a fork is found in a session that it was forked from, as long as that exists."""
    session = sessions.get(name, _NO_SESSION)
    for parent, at in session.forks:
        origin = sessions.get(parent) if parent != name else None
        if origin and 0 < seq <= at < origin.next_seq and origin.first_digest == session.first_digest:
            return True
    return False
