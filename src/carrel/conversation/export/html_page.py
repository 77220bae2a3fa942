"""Export a session as one self-contained HTML page. Pure; the template only arranges what this module prepares."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from carrel.conversation.export import attachment_of, describe_event, indented_json, time_of
from carrel.conversation.log_entries import UNREADABLE, note_kind
from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    SessionData,
    blocks_of,
    meta_of,
    tool_result_text,
)
from carrel.conversation.replay import Numbered, visible_or_summarized_in
from carrel.conversation.usage import count_usage, tokens_of
from carrel.text import count_messages, neutralize_control_chars, parse_time, readable_time, single_line

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

SUMMARY_OPENING = "[Conversation Summary]"


@dataclass
class Item:
    """One element of the page."""

    kind: str
    """`message`, `mark` (an event between messages), `day`, or `set-aside` (messages that a rewind removed)."""
    seq: int = 0
    role: str = ""
    speaker: str = ""
    moment: str = ""
    """The ISO time."""
    time: str = ""
    """The time of day as shown."""
    detail: str = ""
    labels: list[str] = field(default_factory=list)
    pinned: bool = False
    continued: bool = False
    """Whether the speaker is the same as before, so that the name is not repeated."""
    parts: list["PagePart"] = field(default_factory=list)
    items: list["Item"] = field(default_factory=list)
    text: str = ""
    html: str = ""
    tone: str = ""


@dataclass
class Page:
    """What the template shows."""

    title: str
    facts: list[tuple[str, str]]
    labels: list[tuple[int, str]]
    problems: list[str]
    items: list[Item]


def items_of(entries: Sequence[Numbered], session: Mapping[str, Any], active: set[int] | None = None) -> list[Item]:
    """Return elements for some entries of a session; those that are not `active` are folded as set aside."""
    items = _Layout(entries, active, session.get("model")).items()
    for item in items:
        if item.kind == "set-aside":
            item.text = f"{count_messages(len(item.items))} set aside by a rewind"
    return _with_days(items, session.get("created_at"))


def page_of(data: SessionData, log: Sequence[Numbered] = ()) -> Page:
    """The page of the visible messages, or with the log of all entries in order."""
    entries = list(log) or [(0, message) for message in data["messages"]]
    items = items_of(entries, data["session"], visible_or_summarized_in(log) if log else None)
    return Page(
        title=single_line(data["session"].get("title") or "Untitled"),
        facts=_facts(data, entries, log),
        labels=[(item.seq, text) for item in _flat(items) for text in item.labels],
        problems=[single_line(problem) for problem in data.get("problems", [])],
        items=items,
    )


class _Layout:
    """Turns entries into elements of the page."""

    def __init__(self, entries: Sequence[Numbered], active: set[int] | None, usual_model: str | None) -> None:
        self._entries = entries
        self._active = active
        self._usual_model = usual_model
        self._pairs = Pairs(entry for _, entry in entries)
        self._labels: dict[int, list[str]] = {}
        self._pins: set[Any] = set()
        for seq, entry in entries:
            at = meta_of(entry).get("at_seq")
            if note_kind(entry) == "label":
                text = single_line(meta_of(entry).get("text") or "")
                self._labels.setdefault(at if type(at) is int else seq, []).append(text)
            elif note_kind(entry) == "pin":
                self._pins.add(at if type(at) is int else seq)

    def items(self) -> list[Item]:
        items: list[Item] = []
        for seq, entry in self._entries:
            item = _mark(seq, entry) or self._message(seq, entry)
            labels = self._labels.get(seq, []) if seq else []
            if item is None:
                # Results are shown with their calls above, and so are their labels.
                if items and labels:
                    last = items[-1].items[-1] if items[-1].items else items[-1]
                    last.labels = [*last.labels, *labels]
                continue
            item.labels, item.pinned = labels, bool(seq) and seq in self._pins
            if item.kind == "message" and self._active is not None and seq not in self._active:
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
        parts = [part for block in blocks if (part := _part(block, self._pairs)) is not None]
        if not parts and any(block.get("type") == "tool_result" for block in blocks):
            return None
        return Item(
            "message",
            seq,
            role=role if role in ("user", "assistant") else "other",
            speaker=single_line({"user": "User", "assistant": "Assistant"}.get(role, role)),
            moment=_iso_time(entry),
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
        return single_line(" · ".join([*(["added by the program"] if injected else []), *model, *counts]))


def _mark(seq: int, entry: ConversationMessage) -> Item | None:
    """The mark for an event; None for a message and for events that are not shown."""
    role, kind = entry.get("role"), note_kind(entry)
    is_summary = meta_of(entry).get("synthetic") and _text_of(entry).startswith(SUMMARY_OPENING)
    words = "Summary of earlier messages" if is_summary else describe_event(seq, entry)
    if words is None or kind not in (None, "fork"):
        return None
    if role == "compact" or is_summary:
        summary = _text_of(entry).removeprefix(SUMMARY_OPENING).strip()
        return Item("mark", seq, text=words, moment=_iso_time(entry), html=markdown_to_html(summary), tone="compact")
    tone = "error" if role == UNREADABLE else kind or "rewind"
    return Item("mark", seq, text=words, moment=_iso_time(entry), tone=tone)


def _facts(data: SessionData, entries: Sequence[Numbered], log: Sequence[Numbered]) -> list[tuple[str, str]]:
    session = data["session"]
    message_count = sum(entry.get("role") in ("user", "assistant") for _, entry in entries)
    # The log is preferred, since the metadata may be older.
    tokens = count_usage(log).total.total_tokens if log else session.get("total_tokens") or 0
    parent = session.get("parent_session_id")
    facts = {
        "Model": " · ".join(str(part) for part in (session.get("model"), session.get("provider")) if part),
        "Created": readable_time(session.get("created_at")),
        "Updated": readable_time(session.get("updated_at")),
        "Folder": session.get("cwd") or session.get("project_dir"),
        "Messages": f"{message_count:,}",
        "Tokens": f"{tokens:,}" if tokens else "",
        "Tags": ", ".join(map(str, session.get("tags") or [])),
        "Forked from" if session.get("forked_at_seq") else "Part of": parent,
        "Archived": readable_time(session.get("archived_at")),
        "Session": session.get("id"),
    }
    return [(name, single_line(value)) for name, value in facts.items() if value]


def _with_days(items: list[Item], created_at: object) -> list[Item]:
    """Add the times, and a line wherever a new day begins.

    Elements without a time at the start belong to the day on which the session was created."""
    placed: list[Item] = []
    created = parse_time(created_at) if items and not items[0].moment else None
    today = _day(created) if created is not None else ""
    for item in items:
        for one in [item, *item.items]:
            when = parse_time(one.moment)
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


def _iso_time(entry: ConversationMessage) -> str:
    when = time_of(entry)
    return when.isoformat(timespec="seconds") if when else ""


def to_html(data: SessionData, log: Sequence[Numbered] = ()) -> str:
    """A page that needs nothing else: no script, no other file, nothing fetched.

    It has the visible messages, or with the log all entries, in which rewound messages are folded."""
    return _template().render(page=page_of(data, log))


@lru_cache(maxsize=1)
def _template() -> "Template":
    # Jinja is loaded here, because only an export needs it and `import carrel` does not.
    return templates().get_template("page.html.j2")


def templates(package: str = "carrel.conversation.export") -> "Environment":
    """Return the templates of a package, and those of this one."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 -- see `_template`

    loaders = [PackageLoader(name, ".") for name in dict.fromkeys((package, "carrel.conversation.export"))]
    return Environment(loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined)


@dataclass
class Call:
    """A tool call with its result, if there is one."""

    name: str
    brief: str
    inputs: list[tuple[str, str]]
    state: str = "no result"
    output: str = ""
    for_model: str = ""
    """The text for the model, if it differs from the text for people."""
    parts: list["PagePart"] = field(default_factory=list)


@dataclass
class PagePart:
    """One block; `kind` says which of the other fields are used."""

    kind: str
    html: str = ""
    text: str = ""
    href: str = ""
    name: str = ""
    detail: str = ""
    call: Call | None = None


class Pairs:
    """Pairs each call with its result: the first real one after it, else a placeholder. Ids may be reused later."""

    def __init__(self, entries: Iterable[ConversationMessage]) -> None:
        self._results: dict[int, MessageBlock] = {}
        self._paired: set[int] = set()
        # Blocks are identified by `id()`; keeping them in a list keeps these ids unique.
        self._blocks = [block for entry in entries for block in blocks_of(entry)]
        open_calls: dict[str, MessageBlock] = {}
        for block in self._blocks:
            if block.get("type") == "tool_use":
                open_calls[str(block.get("id"))] = block
            elif block.get("type") == "tool_result":
                call = open_calls.get(str(block.get("tool_use_id")))
                if call is not None:
                    self._paired.add(id(block))
                    earlier = self._results.get(id(call))
                    if earlier is None or (meta_of(earlier).get("synthetic") and not meta_of(block).get("synthetic")):
                        self._results[id(call)] = block

    def result_of(self, call: MessageBlock) -> MessageBlock | None:
        return self._results.get(id(call))

    def has_call(self, result: MessageBlock) -> bool:
        return id(result) in self._paired


def _part(block: MessageBlock, pairs: Pairs) -> PagePart | None:
    """The block as shown on the page; None if nothing is shown, as for a result that is shown with its call."""
    kind = block.get("type")
    match kind:
        case "text" | "thinking":
            text = str(block.get("text") or "")
            return PagePart(kind, html=markdown_to_html(text)) if text.strip() else None
        case "image" | "document":
            return _attachment(block)
        case "tool_use":
            call = _call(block)
            result = pairs.result_of(block)
            return PagePart("call", call=_answered(call, result) if result is not None else call)
        case "tool_result":
            if pairs.has_call(block):
                return None
            call = Call(f"result of {single_line(block.get('tool_use_id') or 'an unknown call')}", "", [])
            return PagePart("call", call=_answered(call, block))
        case _:
            return _other(block)


def _other(block: MessageBlock) -> PagePart:
    """A block that only its provider understands, with its name there."""
    kind, value = block.get("type"), block.get("value")
    if kind == "native" and isinstance(value, dict):
        kind = f"{value.get('type') or next(iter(value), 'native')} ({block.get('provider')})"
    return PagePart("other", name=single_line(kind or "block"), text=indented_json(block))


def _attachment(block: MessageBlock) -> PagePart:
    found = attachment_of(block)
    return PagePart(found.kind, href=found.href, name=found.name, detail=found.detail)


def _call(block: MessageBlock) -> Call:
    value = block.get("input")
    fields = value.items() if isinstance(value, dict) else [("input", value)]
    inputs = [
        (single_line(name), neutralize_control_chars(value) if isinstance(value, str) else indented_json(value))
        for name, value in fields
    ]
    brief = next((single_line(value[:400])[:160] for _, value in inputs if value.strip()), "")
    return Call(single_line(block.get("name") or "tool"), brief, inputs)


def _answered(call: Call, result: MessageBlock) -> Call:
    for_model = neutralize_control_chars(tool_result_text(result))
    display = result.get("display_text")
    call.output = neutralize_control_chars(display) if isinstance(display, str) and display.strip() else for_model
    call.for_model = for_model if for_model.strip() and for_model.strip() != call.output.strip() else ""
    call.state = "interrupted" if meta_of(result).get("synthetic") else "error" if result.get("is_error") else "ok"
    content = result.get("content")
    for block in content if isinstance(content, list) else []:
        if not isinstance(block, dict):
            continue
        if block.get("type") in ("image", "document"):
            call.parts.append(_attachment(block))
        elif block.get("type") == "text":
            text = str(block.get("text") or "")
            if neutralize_control_chars(text) not in call.output:
                call.parts.append(PagePart("text", html=markdown_to_html(text)))
        else:
            call.parts.append(_other(block))
    return call


LONGEST_MARKDOWN = 256 * 1024
"""Longer text is shown as it is."""

_SAFE_LINK = re.compile(r"(?i)(https?://|mailto:)\S+")
_REL = "noopener noreferrer nofollow"


def markdown_to_html(text: str) -> str:
    """Markdown as HTML without active content: tags are shown as text, and links lead only to the web or to mail."""
    text = neutralize_control_chars(text)
    if len(text) > LONGEST_MARKDOWN:
        return f"<pre>{escape(text)}</pre>"
    # Again, since an entity (`&#x202e;`) becomes its character only here.
    return neutralize_control_chars(_markdown_reader().render(text))


@lru_cache(maxsize=1)
def _markdown_reader() -> "MarkdownIt":
    from markdown_it import MarkdownIt  # noqa: PLC0415 -- only an export needs it, `import carrel` does not

    reader = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    # A refused link stays in the text as it was written.
    reader.validateLink = lambda url: bool(_SAFE_LINK.fullmatch(url))  # type: ignore[method-assign]
    for kind, rule in (
        ("image", _image),
        ("link_open", _link_open),
        ("th_open", _cell_open),
        ("td_open", _cell_open),
        ("table_open", _table_open),
        ("table_close", _table_close),
    ):
        reader.add_render_rule(kind, rule)
    return reader


def _image(renderer: Any, tokens: "Sequence[Token]", index: int, options: Any, env: Any) -> str:
    # An external image would let its server see who reads the page, so it becomes a link.
    name = renderer.renderInlineAsText(tokens[index].children or [], options, env) or "image"
    source = str(tokens[index].attrs.get("src", ""))
    if not source:
        return f"[{escape(name)}]"
    return f'<a href="{escape(source)}" rel="{_REL}">[{escape(name)}]</a>'


def _link_open(renderer: Any, tokens: "Sequence[Token]", index: int, options: Any, env: Any) -> str:
    tokens[index].attrs["rel"] = _REL
    if not tokens[index].attrs.get("href"):
        # `[text]()` is not validated, and an empty link would lead to this page.
        tokens[index].attrs.pop("href", None)
    return str(renderer.renderToken(tokens, index, options, env))


def _cell_open(renderer: Any, tokens: "Sequence[Token]", index: int, options: Any, env: Any) -> str:
    align = str(tokens[index].attrs.pop("style", "")).removeprefix("text-align:")
    if align in ("right", "center"):
        tokens[index].attrs["class"] = align
    return str(renderer.renderToken(tokens, index, options, env))


def _table_open(renderer: Any, tokens: "Sequence[Token]", index: int, options: Any, env: Any) -> str:
    return '<div class="wide"><table>\n'


def _table_close(renderer: Any, tokens: "Sequence[Token]", index: int, options: Any, env: Any) -> str:
    return "</table></div>\n"
