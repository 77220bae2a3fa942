"""Pure: a session as JSON lines, as Markdown, or as one page of HTML."""

import json
import re
from base64 import b64decode
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from carrel.conversation.enclosed import enclosed, fenced
from carrel.conversation.entries import PAST_THE_END, UNREADABLE, encode
from carrel.conversation.inert import inert, inert_line
from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    SessionData,
    blocks_of,
    meta_of,
    tool_result_text,
)
from carrel.conversation.page import page_of
from carrel.conversation.page_parts import attachment, pretty
from carrel.conversation.replay import Numbered
from carrel.conversation.telling import day_and_time

if TYPE_CHECKING:
    from jinja2 import Template

_MARKS = re.compile(r"[\\\[\]<>`*&]|(?<![^\W_])_|_(?![^\W_])")
_WRITTEN = re.compile(r"application/(?:[\w.-]+\+)?(?:json|xml|yaml|toml|javascript|x-yaml|x-ndjson)")
"""Kinds of documents that are text, though they do not say so."""


def to_line(entry: ConversationMessage) -> str:
    """The entry as a line of a log again; with all of them, sequence numbers and what refers to them stay true.

    One that could not be read keeps its place as an aside that says so."""
    if entry.get("role") == UNREADABLE:
        entry = {"role": "rewind", "meta": {"rewind_to": PAST_THE_END, **meta_of(entry), "aside": UNREADABLE}}
    if not isinstance(entry.get("role"), str) or not entry.get("role"):
        return f"{json.dumps(entry)}\n"
    return f"{encode(entry).decode()}\n"


def to_html(data: SessionData, log: Sequence[Numbered] = ()) -> str:
    """One page that needs nothing else: no script, no file beside it, nothing fetched.

    Of what is visible; with the log, of everything that was said and done, with what was rewound folded away."""
    return _template().render(page=page_of(data, log))


@lru_cache(maxsize=1)
def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 -- only a page needs it, `import carrel` does not

    source = files("carrel.conversation").joinpath("page.html.j2").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    return environment.from_string(source)


def to_markdown(data: SessionData) -> str:
    """What is visible, for reading, for a wiki, or for handing to a model."""
    session = data["session"]
    facts = {
        "Session": session.get("id"),
        "Model": " · ".join(str(part) for part in (session.get("model"), session.get("provider")) if part),
        "Folder": session.get("cwd"),
        "Begun": day_and_time(session.get("created_at")),
        "Last written": day_and_time(session.get("updated_at")),
        "Tags": ", ".join(map(str, session.get("tags") or [])),
    }
    pieces = [f"# {_plain(session.get('title') or 'Untitled')}"]
    pieces.append("\n".join(f"- {name}: {_plain(value)}" for name, value in facts.items() if value))
    for problem in data.get("problems", []):
        pieces.append(f"> {_plain(problem)}")
    for message in data["messages"]:
        pieces += _said(message)
    return "\n\n".join(piece for piece in pieces if piece) + "\n"


def _said(message: ConversationMessage) -> list[str]:
    meta = meta_of(message)
    role = str(message.get("role") or "")
    blocks = blocks_of(message)
    who = {"user": "User", "assistant": "Assistant"}.get(role, role)
    if blocks and all(block.get("type") == "tool_result" for block in blocks):
        who = "Tool results" if len(blocks) > 1 else "Tool result"
    origin = meta.get("source")
    if isinstance(origin, dict) and origin.get("injected"):
        who = f"{who} (put in by the program)"
    when = day_and_time(meta.get("created_at") or meta.get("timestamp"))
    return [f"## {_plain(who)}" + (f", {_plain(when)}" if when else ""), *map(_block, blocks)]


def _block(block: MessageBlock) -> str:
    match block.get("type"):
        case "text":
            return enclosed(inert(block.get("text") or "").strip())
        case "thinking":
            text = enclosed(inert(block.get("text") or "").strip())
            return (
                "\n".join(["> *Thinking*", ">", *(f"> {line}".rstrip() for line in text.split("\n"))]) if text else ""
            )
        case "tool_use":
            name = _plain(block.get("name") or "tool")
            return f"**{name}** `{_id(block.get('id'))}`\n\n{fenced(pretty(block.get('input')), 'json')}"
        case "tool_result":
            outcome = "error from" if block.get("is_error") else "from"
            shown = block.get("display_text")
            text = shown if isinstance(shown, str) and shown.strip() else tool_result_text(block)
            content = block.get("content")
            parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
            more = [_block(part) for part in parts if not _is_in(part, text)]
            head = f"{outcome} `{_id(block.get('tool_use_id'))}`"
            return "\n\n".join([head, fenced(inert(text)), *filter(None, more)])
        case "image" | "document":
            return _attached(block)
        case _:
            return fenced(pretty(block), "json")


def _is_in(part: MessageBlock, text: str) -> bool:
    said = part.get("text")
    return part.get("type") == "text" and isinstance(said, str) and said.strip() in text


def _attached(block: MessageBlock) -> str:
    """An image to see, a document to read where it is text, and else to save: all of it is in the Markdown itself."""
    part = attachment(block)
    name = _plain(part.name)
    if part.kind == "image":
        return f"![{name}]({part.href})"
    if part.kind == "document":
        text = _text_of(block)
        return (
            f"[{name}]({part.href}) ({part.detail})"
            if text is None
            else f"**{name}** ({part.detail})\n\n{fenced(text)}"
        )
    return f"*[{name}: {part.detail}]*"


def _text_of(block: MessageBlock) -> str | None:
    """What a document says, where its kind is text and its bytes are."""
    mime = str(block.get("mime_type") or "").lower()
    if not mime.startswith("text/") and not _WRITTEN.fullmatch(mime):
        return None
    try:
        return inert(b64decode(str(block.get("data") or "")).decode("utf-8"))
    except ValueError:
        return None


def _plain(text: object) -> str:
    """A line that is no Markdown: a title, a name."""
    return _MARKS.sub(r"\\\g<0>", inert_line(text))


def _id(given: object) -> str:
    return inert_line(given or "?").replace("`", "'")
