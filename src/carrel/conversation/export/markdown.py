"""Export a session as Markdown. Pure."""

import re
from base64 import b64decode

from carrel.conversation.export import attachment_of, indented_json
from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    SessionData,
    blocks_of,
    meta_of,
    tool_result_text,
)
from carrel.text import neutralize_control_chars, readable_time, single_line

_SYNTAX = re.compile(r"[\\\[\]<>`*&]|(?<![^\W_])_|_(?![^\W_])")
_TICKS = re.compile("`+")
_TEXT_TYPE = re.compile(r"application/(?:[\w.-]+\+)?(?:json|xml|yaml|toml|javascript|x-yaml|x-ndjson)")
"""Types of documents that are text, besides `text/…`."""


def to_markdown(data: SessionData) -> str:
    """The visible messages as Markdown, for reading, for a wiki, or as input for a model."""
    session = data["session"]
    facts = {
        "Session": session.get("id"),
        "Model": " · ".join(str(part) for part in (session.get("model"), session.get("provider")) if part),
        "Folder": session.get("cwd"),
        "Created": readable_time(session.get("created_at")),
        "Updated": readable_time(session.get("updated_at")),
        "Tags": ", ".join(map(str, session.get("tags") or [])),
    }
    sections = [f"# {_escaped(session.get('title') or 'Untitled')}"]
    sections.append("\n".join(f"- {name}: {_escaped(value)}" for name, value in facts.items() if value))
    for problem in data.get("problems", []):
        sections.append(f"> {_escaped(problem)}")
    for message in data["messages"]:
        sections += _message(message)
    return "\n\n".join(section for section in sections if section) + "\n"


def quote_markdown(text: str) -> str:
    """Markdown as a quote: it ends with its last line, whatever it opens, and its headings stay inside."""
    return "\n".join(f"> {line}".rstrip() for line in neutralize_control_chars(text).strip().split("\n"))


def _fenced(text: str, language: str = "") -> str:
    """A code block with a fence that is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + max(map(len, _TICKS.findall(text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _message(message: ConversationMessage) -> list[str]:
    meta = meta_of(message)
    role = str(message.get("role") or "")
    blocks = blocks_of(message)
    speaker = {"user": "User", "assistant": "Assistant"}.get(role, role)
    if blocks and all(block.get("type") == "tool_result" for block in blocks):
        speaker = "Tool results" if len(blocks) > 1 else "Tool result"
    source = meta.get("source")
    if isinstance(source, dict) and source.get("injected"):
        speaker = f"{speaker} (added by the program)"
    when = readable_time(meta.get("created_at") or meta.get("timestamp"))
    return [f"## {_escaped(speaker)}" + (f", {_escaped(when)}" if when else ""), *map(_block, blocks)]


def _block(block: MessageBlock) -> str:
    match block.get("type"):
        case "text":
            return quote_markdown(str(block.get("text"))) if str(block.get("text") or "").strip() else ""
        case "thinking":
            text = str(block.get("text") or "")
            return f"*Thinking:*\n\n{quote_markdown(text)}" if text.strip() else ""
        case "tool_use":
            name = _escaped(block.get("name") or "tool")
            return f"**{name}** `{_id(block.get('id'))}`\n\n{_fenced(indented_json(block.get('input')), 'json')}"
        case "tool_result":
            outcome = "error from" if block.get("is_error") else "from"
            display = block.get("display_text")
            text = display if isinstance(display, str) and display.strip() else tool_result_text(block)
            content = block.get("content")
            parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
            others = [_block(part) for part in parts if not _is_in(part, text)]
            head = f"{outcome} `{_id(block.get('tool_use_id'))}`"
            return "\n\n".join([head, _fenced(neutralize_control_chars(text)), *filter(None, others)])
        case "image" | "document":
            return _attachment(block)
        case _:
            return _fenced(indented_json(block), "json")


def _is_in(part: MessageBlock, text: str) -> bool:
    part_text = part.get("text")
    return part.get("type") == "text" and isinstance(part_text, str) and part_text.strip() in text


def _attachment(block: MessageBlock) -> str:
    """An image or a document as a data URL in the Markdown itself; a text document as its text."""
    found = attachment_of(block)
    name = _escaped(found.name)
    if found.kind == "image":
        return f"![{name}]({found.href})"
    if found.kind == "missing":
        return f"*[{name}: {found.detail}]*"
    text = _document_text(block)
    link = f"[{name}]({found.href}) ({found.detail})"
    return link if text is None else f"**{name}** ({found.detail})\n\n{_fenced(text)}"


def _document_text(block: MessageBlock) -> str | None:
    """The text of a document whose type and data are text."""
    mime = str(block.get("mime_type") or "").lower()
    if not mime.startswith("text/") and not _TEXT_TYPE.fullmatch(mime):
        return None
    try:
        return neutralize_control_chars(b64decode(str(block.get("data") or "")).decode("utf-8"))
    except ValueError:
        return None


def _escaped(text: object) -> str:
    """One line without Markdown syntax, for a title or a name."""
    return _SYNTAX.sub(r"\\\g<0>", single_line(text))


def _id(value: object) -> str:
    return single_line(value or "?").replace("`", "'")
