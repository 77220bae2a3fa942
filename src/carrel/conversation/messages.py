"""Pure: the blocks and messages of a conversation, as the plain dicts that the log keeps."""

from collections.abc import Iterable
from typing import Any, NotRequired, TypedDict

MessageBlock = dict[str, Any]
ConversationMessage = dict[str, Any]


class SessionMeta(TypedDict, total=False):
    """The content of `meta.json`; readers ignore fields that they do not know."""

    id: str
    title: str
    provider: str
    model: str
    cwd: str
    api_base: str | None
    message_format_version: int
    created_at: str
    updated_at: str
    project_dir: str
    working_dir: str | None
    """The folder as the user wrote it, if that differs from the absolute path in `cwd`."""
    parent_session_id: str | None
    root_session_id: str | None
    forked_at_seq: int | None
    archived_at: str | None
    tags: list[str]
    labels: list[dict[str, Any]]
    pins: list[int]
    imported_from: dict[str, Any]
    """The source of an import: its `kind` and `source_id`, how many `entries` it had and their `digest`, and the log's
    last `seq` after the import."""
    message_count: int
    total_tokens: int
    log_seq: int
    """The last entry that `message_count` and `total_tokens` include."""
    log_bytes: int
    """The length of the log up to that entry; if the log is longer now, the counts are outdated."""


class SessionData(TypedDict):
    """The metadata and the visible messages of a session."""

    session: SessionMeta
    messages: list[ConversationMessage]
    problems: NotRequired[list[str]]
    """A sentence for each thing that could not be read; absent if there is none."""


def _block(kind: str, meta: dict[str, Any] | None, **fields: Any) -> MessageBlock:
    block: MessageBlock = {"type": kind, **fields}
    if meta:
        block["meta"] = dict(meta)
    return block


def text_block(text: str, *, meta: dict[str, Any] | None = None) -> MessageBlock:
    return _block("text", meta, text=text)


def thinking_block(text: str, *, meta: dict[str, Any] | None = None) -> MessageBlock:
    return _block("thinking", meta, text=text)


def image_block(
    data: str, *, mime_type: str, name: str | None = None, meta: dict[str, Any] | None = None
) -> MessageBlock:
    """`data` is base64."""
    return _block("image", meta, data=data, mime_type=mime_type, **({"name": name} if name else {}))


def document_block(
    data: str, *, mime_type: str, name: str | None = None, meta: dict[str, Any] | None = None
) -> MessageBlock:
    """`data` is base64."""
    return _block("document", meta, data=data, mime_type=mime_type, **({"name": name} if name else {}))


def tool_use_block(
    *, tool_id: str, name: str, input: dict[str, Any] | None = None, meta: dict[str, Any] | None = None
) -> MessageBlock:
    return _block("tool_use", meta, id=tool_id, name=name, input=dict(input or {}))


def tool_result_block(
    *,
    tool_use_id: str,
    model_text: str = "",
    display_text: str | None = None,
    is_error: bool = False,
    content: list[MessageBlock] | None = None,
    meta: dict[str, Any] | None = None,
) -> MessageBlock:
    """`model_text` is for the model, `display_text` (else the same) for people, `content` for more than text."""
    fields: dict[str, Any] = {
        "tool_use_id": tool_use_id,
        "model_text": model_text,
        "display_text": model_text if display_text is None else display_text,
        "is_error": is_error,
    }
    if content is not None:
        fields["content"] = content
    return _block("tool_result", meta, **fields)


def build_message(role: str, blocks: list[MessageBlock], *, meta: dict[str, Any] | None = None) -> ConversationMessage:
    message: ConversationMessage = {"role": role, "content": blocks}
    if meta:
        message["meta"] = dict(meta)
    return message


def user_text_message(text: str, *, meta: dict[str, Any] | None = None) -> ConversationMessage:
    """Return a message of the user with one text."""
    return build_message("user", [text_block(text)], meta=meta)


def assistant_message(
    blocks: list[MessageBlock],
    *,
    provider: str | None = None,
    model: str | None = None,
    provider_message_id: str | None = None,
    stop_reason: str | None = None,
    usage: Any = None,
    native_meta: dict[str, Any] | None = None,
) -> ConversationMessage:
    """Build a message of the assistant; None and empty values are left out of its meta."""
    native = {key: value for key, value in (native_meta or {}).items() if value is not None}
    known = {
        "provider": provider,
        "model": model,
        "provider_message_id": provider_message_id,
        "stop_reason": stop_reason,
        "usage": usage,
        "native": native,
    }
    return build_message(
        "assistant", blocks, meta={key: value for key, value in known.items() if value not in (None, "", {})}
    )


def blocks_of(message: ConversationMessage) -> list[MessageBlock]:
    """Return the blocks of a message: one text block for a plain string, none for invalid content."""
    content = message.get("content")
    if isinstance(content, str):
        return [text_block(content)] if content else []
    if isinstance(content, list):
        return [block for block in content if isinstance(block, dict)]
    return []


def is_continuation(message: ConversationMessage) -> bool:
    """Return whether a line continues the message of the line before it."""
    return bool(meta_of(message).get("continues"))


def meta_of(message: ConversationMessage) -> dict[str, Any]:
    meta = message.get("meta")
    return meta if isinstance(meta, dict) else {}


def flatten_message_text(message: ConversationMessage, *, include_thinking: bool = True) -> str:
    """Return the text of a message: its text blocks and, by default, thinking, without the texts of attached files."""
    kinds = ("text", "thinking") if include_thinking else ("text",)
    blocks = (block for block in blocks_of(message) if block.get("type") in kinds)
    texts = (str(block.get("text") or "").strip() for block in blocks if not meta_of(block).get("attachment"))
    return " ".join(text for text in texts if text)


def tool_calls_of(message: ConversationMessage) -> list[str]:
    """Return the ids of the tool calls in an assistant's message."""
    if message.get("role") != "assistant":
        return []
    return [str(block["id"]) for block in blocks_of(message) if block.get("type") == "tool_use" and block.get("id")]


def tool_results_of(message: ConversationMessage) -> list[str]:
    """Return the ids of the tool calls that a message has results for."""
    if message.get("role") != "user":
        return []
    return [
        str(block["tool_use_id"])
        for block in blocks_of(message)
        if block.get("type") == "tool_result" and block.get("tool_use_id")
    ]


def tool_result_text(block: MessageBlock) -> str:
    """Return the text of a tool result for the model; older lines have plain `content` instead of `model_text`."""
    if isinstance(block.get("model_text"), str):
        return str(block["model_text"])
    content = block.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Iterable):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict) and part.get("text"))
    return ""
