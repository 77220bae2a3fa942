"""Pure: a session as the things that stand on a page, in reading order; the template only sets them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from carrel.conversation.entries import UNREADABLE, aside_of
from carrel.conversation.inert import inert_line
from carrel.conversation.messages import ConversationMessage, SessionData, blocks_of, meta_of
from carrel.conversation.page_parts import Pairs, Part, part_of
from carrel.conversation.prose import prose
from carrel.conversation.replay import Numbered, jump_of, kept_from, visible_after
from carrel.conversation.telling import day_and_time, event_words, messages, moment_of, parsed
from carrel.conversation.usage import count_usage, tokens_of

SUMMARY_OPENING = "[Conversation Summary]"


@dataclass
class Item:
    """One thing on the page."""

    kind: str
    """`message`, `mark` (between messages), `day`, or `set-aside` (messages that a rewind took out)."""
    seq: int = 0
    role: str = ""
    who: str = ""
    moment: str = ""
    time: str = ""
    detail: str = ""
    labels: list[str] = field(default_factory=list)
    pinned: bool = False
    continued: bool = False
    """Whether the same speaker goes on, so that the name need not stand again."""
    parts: list[Part] = field(default_factory=list)
    items: list["Item"] = field(default_factory=list)
    text: str = ""
    html: str = ""
    tone: str = ""


@dataclass
class Page:
    title: str
    facts: list[tuple[str, str]]
    labels: list[tuple[int, str]]
    problems: list[str]
    items: list[Item]


def page_of(data: SessionData, log: Sequence[Numbered] = ()) -> Page:
    """The page of what is visible; with the log, of everything that was said and done, in its order."""
    entries = list(log) or [(0, message) for message in data["messages"]]
    items = _Layout(entries, _told(log) if log else None, data["session"].get("model")).items()
    for item in items:
        if item.kind == "set-aside":
            item.text = f"{messages(len(item.items))} set aside by a rewind"
    return Page(
        title=inert_line(data["session"].get("title") or "Untitled"),
        facts=_facts(data, entries, log),
        labels=[(item.seq, text) for item in _flat(items) for text in item.labels],
        problems=[inert_line(problem) for problem in data.get("problems", [])],
        items=_with_days(items, data["session"].get("created_at")),
    )


def _told(log: Sequence[Numbered]) -> set[int]:
    """The entries that belong to the conversation as it stands, also those that a summary now stands for."""
    told = {seq for seq, _ in visible_after(log)}
    compact = _compact_in_effect(log, log[-1][0])
    while compact is not None:
        seq, entry = compact
        keep = kept_from(entry) or seq
        told |= {seq, *(before for before, _ in visible_after(log, seq - 1) if before < keep)}
        compact = _compact_in_effect(log, seq - 1)
    return told


def _compact_in_effect(log: Sequence[Numbered], until: int) -> Numbered | None:
    """The newest compact that counts right after entry `until`."""
    for seq, entry in reversed(log):
        if seq > until:
            continue
        if entry.get("role") == "compact":
            return seq, entry
        jump = jump_of(entry) if entry.get("role") == "rewind" and aside_of(entry) is None else None
        if jump is not None and jump < seq:
            until = jump
    return None


class _Layout:
    """Sets entries one after another."""

    def __init__(self, entries: Sequence[Numbered], told: set[int] | None, usual_model: str | None) -> None:
        self._entries = entries
        self._told = told
        self._usual_model = usual_model
        self._pairs = Pairs(entry for _, entry in entries)
        self._labels: dict[int, list[str]] = {}
        self._pins: set[Any] = set()
        for seq, entry in entries:
            at = meta_of(entry).get("at_seq")
            if aside_of(entry) == "label":
                text = inert_line(meta_of(entry).get("text") or "")
                self._labels.setdefault(at if type(at) is int else seq, []).append(text)
            elif aside_of(entry) == "pin":
                self._pins.add(at if type(at) is int else seq)

    def items(self) -> list[Item]:
        items: list[Item] = []
        for seq, entry in self._entries:
            item = _mark(seq, entry) or self._message(seq, entry)
            labels = self._labels.get(seq, []) if seq else []
            if item is None:
                # A message of results stands with the calls above it, and so does what is said about it.
                if items and labels:
                    last = items[-1].items[-1] if items[-1].items else items[-1]
                    last.labels = [*last.labels, *labels]
                continue
            item.labels, item.pinned = labels, bool(seq) and seq in self._pins
            if item.kind == "message" and self._told is not None and seq not in self._told:
                if not (items and items[-1].kind == "set-aside"):
                    items.append(Item("set-aside"))
                items[-1].items.append(item)
            else:
                items.append(item)
        for siblings in [items, *(item.items for item in items)]:
            for before, item in pairwise(siblings):
                item.continued = item.kind == before.kind == "message" and item.role == before.role == "assistant"
        return items

    def _message(self, seq: int, entry: ConversationMessage) -> Item | None:
        role, meta = str(entry.get("role") or ""), meta_of(entry)
        is_acknowledgement = role == "assistant" and meta.get("synthetic")
        if role in ("rewind", UNREADABLE) or is_acknowledgement:
            return None
        blocks = blocks_of(entry)
        parts = [part for block in blocks if (part := part_of(block, self._pairs)) is not None]
        if not parts and any(block.get("type") == "tool_result" for block in blocks):
            return None
        return Item(
            "message",
            seq,
            role=role if role in ("user", "assistant") else "other",
            who=inert_line({"user": "User", "assistant": "Assistant"}.get(role, role)),
            moment=_moment(entry),
            detail=self._detail(meta),
            parts=parts,
        )

    def _detail(self, meta: dict[str, Any]) -> str:
        spent = tokens_of(meta.get("usage"))
        counts = [
            f"{count:,} {word}" for count, word in ((spent.input_tokens, "in"), (spent.output_tokens, "out")) if count
        ]
        model = [str(meta["model"])] if meta.get("model") and meta["model"] != self._usual_model else []
        origin = meta.get("source")
        injected = isinstance(origin, dict) and origin.get("injected")
        return inert_line(" · ".join([*(["put in by the program"] if injected else []), *model, *counts]))


def _mark(seq: int, entry: ConversationMessage) -> Item | None:
    """The mark for an event; None for a message, and for events that have no place on the page."""
    role, kind = entry.get("role"), aside_of(entry)
    is_summary = meta_of(entry).get("synthetic") and _text_of(entry).startswith(SUMMARY_OPENING)
    words = "Summary of what was said before" if is_summary else event_words(seq, entry)
    if words is None or kind not in (None, "fork"):
        return None
    if role == "compact" or is_summary:
        summary = _text_of(entry).removeprefix(SUMMARY_OPENING).strip()
        return Item("mark", seq, text=words, moment=_moment(entry), html=prose(summary), tone="compact")
    tone = "error" if role == UNREADABLE else kind or "rewind"
    return Item("mark", seq, text=words, moment=_moment(entry), tone=tone)


def _facts(data: SessionData, entries: Sequence[Numbered], log: Sequence[Numbered]) -> list[tuple[str, str]]:
    session = data["session"]
    said = sum(entry.get("role") in ("user", "assistant") for _, entry in entries)
    # From the log where it is at hand: the metadata may be a step behind.
    tokens = count_usage(log).total.total_tokens if log else session.get("total_tokens") or 0
    parent = session.get("parent_session_id")
    facts = {
        "Model": " · ".join(str(part) for part in (session.get("model"), session.get("provider")) if part),
        "Begun": day_and_time(session.get("created_at")),
        "Last written": day_and_time(session.get("updated_at")),
        "Folder": session.get("cwd") or session.get("project_dir"),
        "Messages": f"{said:,}",
        "Tokens": f"{tokens:,}" if tokens else "",
        "Tags": ", ".join(map(str, session.get("tags") or [])),
        "Forked from" if session.get("forked_at_seq") else "Part of": parent,
        "Archived": day_and_time(session.get("archived_at")),
        "Session": session.get("id"),
    }
    return [(name, inert_line(value)) for name, value in facts.items() if value]


def _with_days(items: list[Item], begun: object) -> list[Item]:
    """The same with the times told, and a line wherever another day begins.

    What stands first and has no time was said on the day that the session was begun."""
    placed: list[Item] = []
    opened = parsed(begun) if items and not items[0].moment else None
    today = _day(opened) if opened is not None else ""
    for item in items:
        for one in [item, *item.items]:
            when = parsed(one.moment)
            if when is not None:
                one.time = f"{when:%H:%M}"
                if _day(when) != today:
                    today = _day(when)
                    placed.append(Item("day", text=today))
        placed.append(item)
    return placed


def _day(when: datetime) -> str:
    return f"{when.day} {when:%B %Y}"


def _flat(items: Iterable[Item]) -> Iterable[Item]:
    for item in items:
        yield item
        yield from item.items


def _text_of(entry: ConversationMessage) -> str:
    return "\n\n".join(str(block.get("text") or "") for block in blocks_of(entry) if block.get("type") == "text")


def _moment(entry: ConversationMessage) -> str:
    when = moment_of(entry)
    return when.isoformat(timespec="seconds") if when else ""
