"""A typed message of a conversation, and its conversion from and to lines of the log."""

from collections.abc import Generator, Iterable
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import Field, ValidationInfo, field_validator

from carrel.conversation import formats
from carrel.conversation.formats.openai_chat import message_to_chat
from carrel.conversation.log_entries import UNREADABLE
from carrel.conversation.messages import (
    ConversationMessage,
    build_message,
    meta_of,
    text_block,
    tool_results_of,
    tool_use_block,
    user_text_message,
)
from carrel.conversation.models.info import now
from carrel.conversation.models.parts import (
    ImagePart,
    MessagePart,
    ObservedModel,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    block_to_part,
    part_to_block,
)
from carrel.conversation.replay import Numbered
from carrel.conversation.session_state import date_of
from carrel.conversation.usage import tokens_of
from carrel.errors import FormatRefused

_EVENTS = ("compact", "rewind", UNREADABLE)
_AUTO = "auto"
_PLAIN = {"assistant": ("text", "tool_use"), "user": ("text", "image"), "system": ("text",)}
"""The types of blocks that a plain message of each role may have."""
_LISTS = ("messages", "input", "contents")
"""The names under which the requests of the providers have the conversation."""


_Added = TypeVar("_Added", TextPart, ImagePart, ToolCallPart, ToolResultPart)


class MessageRole(StrEnum):
    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"


_ROLES = frozenset(MessageRole)


class Message(ObservedModel):
    """One message; an assistant's message may hold the results of its tool calls.

    Awaiting a message of a conversation writes the conversation and returns the message."""

    id: str = Field(default_factory=lambda: str(uuid4()))
    session_id: str
    is_foreign: bool = False
    """Whether another program wrote the message, with a role that is not a `MessageRole`."""
    role: str = Field(json_schema_extra={"enum": list(MessageRole)})
    parts: list[MessagePart] = Field(default_factory=list)
    created_at: datetime = Field(default_factory=now)
    model: str | None = None
    provider: str | None = None
    usage: dict[str, Any] | None = None
    meta: dict[str, Any] = Field(default_factory=dict)
    """The other metadata of the line in the log."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Fields of the line that this format does not know."""

    @field_validator("role")
    @classmethod
    def _is_a_role(cls, role: str, info: ValidationInfo) -> str:
        if role not in _ROLES and not info.data.get("is_foreign"):
            raise ValueError(f"invalid message role {role!r}: use user, assistant or system")
        return str(role)

    def __await__(self) -> Generator[Any, None, "Message"]:
        return self._saved().__await__()

    async def _saved(self) -> "Message":
        if hasattr(self, "_save"):
            await self._save()
        return self

    def add_text(self, content: str) -> TextPart:
        return self._add(TextPart(id=self._next_part_id(), content=content))

    def add_image(
        self, media_type: str, *, data: str | None = None, url: str | None = None, detail: str = "auto"
    ) -> ImagePart:
        """Add an image, as base64 `data` or with a `url`."""
        return self._add(
            ImagePart(id=self._next_part_id(), media_type=media_type, data=data, url=url, detail=detail),
        )

    def add_tool_call(
        self, tool_call_id: str, tool_name: str, arguments: dict[str, Any] | str | None = None
    ) -> ToolCallPart:
        """Add a call; `arguments` may be JSON text, as models return it."""
        given: Any = {} if arguments is None else arguments
        return self._add(
            ToolCallPart(id=self._next_part_id(), tool_call_id=tool_call_id, tool_name=tool_name, arguments=given or {})
        )

    def add_tool_result(
        self,
        tool_call_id: str,
        tool_name: str = "",
        title: str = "",
        output: str = "",
        error: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> ToolResultPart:
        """Add the result of a call of this message or of the message before it."""
        return self._add(
            ToolResultPart(
                id=self._next_part_id(),
                tool_call_id=tool_call_id,
                tool_name=tool_name,
                title=title,
                output=output,
                error=error,
                metadata=metadata or {},
            )
        )

    def get_text_content(self) -> str:
        """The text parts, joined by line breaks."""
        return "\n".join(part.content for part in self.parts if isinstance(part, TextPart))

    def get_images(self) -> list[ImagePart]:
        return [part for part in self.parts if isinstance(part, ImagePart)]

    def has_images(self) -> bool:
        return any(isinstance(part, ImagePart) for part in self.parts)

    def get_tool_calls(self) -> list[ToolCallPart]:
        return [part for part in self.parts if isinstance(part, ToolCallPart)]

    def get_tool_results(self) -> list[ToolResultPart]:
        return [part for part in self.parts if isinstance(part, ToolResultPart)]

    def to_llm_format(self, provider: str = "openai") -> dict[str, Any] | list[dict[str, Any]]:
        """The message for a provider's API: openai, openai-responses, anthropic or gemini.

        Returns a list of dicts where the API has several messages, as OpenAI for a call and its result.
        `FormatRefused` for a system message and Gemini, which has no such message."""
        if self.role == "system" and provider in ("gemini", "google"):
            raise FormatRefused(
                "Gemini has no system messages: their text goes into systemInstruction, beside contents; convert the "
                "whole conversation with to_provider"
            )
        lines = message_to_lines(self)
        if is_openai(provider):
            wires = [wire for line in lines for wire in message_to_chat(plain_shape(line))]
        else:
            wires = _convert_one(lines, provider)
        if not wires:
            return {"role": self.role, "content": self.get_text_content()}
        return wires[0] if len(wires) == 1 else wires

    def _next_part_id(self) -> str:
        taken = {part.id for part in self.parts}
        number = len(self.parts)
        while (id_ := default_part_id(self.id, number)) in taken:
            number += 1
        return id_

    def _add(self, part: _Added) -> _Added:
        self.parts.append(part)
        self.touch()
        return part


def default_part_id(message_id: str, place: int) -> str:
    return f"{message_id}-{place}"


def is_openai(provider: str) -> bool:
    """Whether the name stands for OpenAI's Chat Completions."""
    return provider in ("openai", "openai_chat", "openai-chat")


def plain_shape(line: ConversationMessage) -> ConversationMessage:
    """Join the texts of a line and put them before its images, each with its detail.

    OpenAI's message then is `{"role", "content": text}`, or one text followed by the images. A line with other blocks,
    or with fields for one provider only, is returned unchanged."""
    blocks, kinds = line.get("content"), _PLAIN.get(line["role"])
    if kinds is None or not isinstance(blocks, list):
        return line
    if not all(isinstance(block, dict) and block.get("type") in kinds for block in blocks):
        return line
    if any(meta_of(block).get("native") for block in blocks):
        return line
    text = "\n".join(str(block.get("text") or "") for block in blocks if block["type"] == "text")
    others = [
        {**block, "meta": {"detail": _AUTO, **meta_of(block)}} if block["type"] == "image" else block
        for block in blocks
        if block["type"] != "text"
    ]
    return {**line, "content": [*([text_block(text)] if text or not others else []), *others]}


def provider_messages(lines: Iterable[ConversationMessage], provider: str) -> list[dict[str, Any]]:
    """Convert lines to the messages of a provider; `FormatRefused` for an unknown provider."""
    payload = formats.to_provider(list(lines), provider.replace("-", "_")).payload
    messages: Any = next(payload[name] for name in _LISTS if name in payload)
    if isinstance(messages, str):
        messages = [{"type": "message", "role": "user", "content": messages}]
    if "instructions" in payload:
        # The only API with system messages in the list and beside it.
        text = {"type": "input_text", "text": payload["instructions"]}
        messages = [{"type": "message", "role": "system", "content": [text]}, *messages]
    found: list[dict[str, Any]] = messages
    return found


def _convert_one(lines: list[ConversationMessage], provider: str) -> list[dict[str, Any]]:
    """Convert one message for an API that expects others before it: these are made up and removed again."""
    calls = [
        tool_use_block(tool_id=part.tool_call_id, name=part.tool_name or "tool")
        for part in (block_to_part(block, "") for block in lines[0].get("content") or [])
        if isinstance(part, ToolResultPart)
    ]
    if lines[0]["role"] == "assistant":
        before = [user_text_message("…")]
    elif calls:
        before = [user_text_message("…"), build_message("assistant", calls)]
    else:
        before = []
    return provider_messages([*before, *lines], provider)[len(provider_messages(before, provider)) :]


# --- the lines of the log -------------------------------------------------------------------------------------------


def message_to_lines(message: Message) -> list[ConversationMessage]:
    """Convert a message to lines. Results are in user's lines, so an assistant's message with results becomes
    several lines with the same id."""
    source: list[ConversationMessage] | None = getattr(message, "_source", None)
    if source is not None and _messages_from(source, message) == [message]:
        return source
    groups: list[tuple[str, list[dict[str, Any]]]] = []
    for place, part in enumerate(message.parts):
        is_result = isinstance(part, ToolResultPart) and message.role == "assistant"
        role = "user" if is_result else message.role
        if not groups or groups[-1][0] != role:
            groups.append((role, []))
        groups[-1][1].append(part_to_block(part, default_part_id(message.id, place)))
    groups = groups or [(message.role, [])]
    lines = [build_message(role, blocks, meta=_continuing_meta(role, message)) for role, blocks in groups]
    lines[0] = {**build_message(*groups[0], meta=_first_meta(groups[0][0], message)), **message.extra}
    return lines


def _first_meta(role: str, message: Message) -> dict[str, Any]:
    known = {"model": message.model, "provider": message.provider, "usage": message.usage}
    meta = {**message.meta, **{key: value for key, value in known.items() if value is not None}}
    if role != message.role:
        meta["spoken_by"] = message.role
    return {**meta, "id": message.id, "created_at": message.created_at.isoformat()}


def _continuing_meta(role: str, message: Message) -> dict[str, Any]:
    known = {"model": message.model, "provider": message.provider} if role == "assistant" else {}
    meta = {key: value for key, value in known.items() if value is not None}
    return {**meta, "id": message.id, "continues": True}


def _messages_from(lines: list[ConversationMessage], message: Message) -> list[Message]:
    numbered = [(0, line) for line in lines]
    return lines_to_messages(numbered, session_id=message.session_id, since=message.created_at, default_id=message.id)


def lines_to_messages(
    lines: Iterable[Numbered], *, session_id: str, since: datetime, default_id: str | None = None
) -> list[Message]:
    """Convert visible lines to messages. A line without an id gets one from its sequence number, one without a date
    that of the session."""
    messages: dict[str, Message] = {}
    for place, (seq, line) in enumerate(lines):
        meta = dict(meta_of(line))
        id_ = _pop_text(meta, "id") or default_id or _default_id(seq, line, place)
        known = messages.get(id_)
        if known is not None and meta.get("continues") is True:
            # Usually it follows its first line; lines of other processes may be in between.
            known._source.append(line)
            known.parts += _parts(line, id_, len(known.parts))
            continue
        if known is not None:
            id_ = f"{id_}-seq-{seq}"
        messages[id_] = _read_line(line, meta, id_, session_id, since)
    return list(messages.values())


def _default_id(seq: int, line: ConversationMessage, place: int) -> str:
    results = tool_results_of(line) if not seq or meta_of(line).get("synthetic") else []
    if results:
        # Placeholders for results that never came; they may not be in the log yet.
        return "-".join(["results", *results])
    return f"seq-{seq}" if seq else f"summary-{place}"


def _read_line(line: ConversationMessage, meta: dict[str, Any], id_: str, session_id: str, since: datetime) -> Message:
    role = meta.pop("spoken_by", None) or line.get("role")
    role = role if isinstance(role, str) and role not in ("", *_EVENTS) else "unknown"
    usage = usage_of(line)
    meta = {key: value for key, value in meta.items() if key not in ("usage", "usage_before")}
    message = Message(
        id=id_,
        session_id=session_id,
        is_foreign=role not in _ROLES,
        role=role,
        parts=_parts(line, id_, 0),
        created_at=_pop_date(meta) or since,
        model=_pop_text(meta, "model"),
        provider=_pop_text(meta, "provider"),
        usage=usage if isinstance(usage, dict) else None,
        meta=meta,
        extra={key: value for key, value in line.items() if key not in ("role", "content", "meta")},
    )
    message._source = [line]
    return message


def _parts(line: ConversationMessage, message_id: str, first: int) -> list[MessagePart]:
    content = line.get("content")
    blocks = [text_block(content)] if isinstance(content, str) and content else content
    return [
        block_to_part(block, default_part_id(message_id, place))
        for place, block in enumerate(blocks if isinstance(blocks, list) else [], first)
    ]


def _pop_text(meta: dict[str, Any], key: str) -> str | None:
    value = meta.get(key)
    return meta.pop(key) if isinstance(value, str) and value else None


def _pop_date(meta: dict[str, Any]) -> datetime | None:
    date = date_of(meta.get("created_at"))
    if date is not None:
        del meta["created_at"]
    return date


# --- usage, counted once --------------------------------------------------------------------------------------------


def add_usage(one: Any, other: Any) -> Any:
    """Add two reports of usage, number by number; other values are those of the newer one."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: add_usage(one.get(key), other.get(key)) for key in {**one, **other}}
    if _is_number(one) and _is_number(other):
        return one + other
    return one if other is None else other


def subtract_usage(one: Any, other: Any) -> Any:
    """What `add_usage` must add to `other` to get `one`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: subtract_usage(value, other.get(key)) for key, value in one.items() if value != other.get(key)}
    return one - other if _is_number(one) and _is_number(other) else one


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def usage_of(line: ConversationMessage) -> Any:
    """The usage of a line, with what an earlier line of the message counted."""
    meta = meta_of(line)
    return add_usage(meta.get("usage_before"), meta.get("usage"))


def without_counting_again(line: ConversationMessage, counted: Any) -> ConversationMessage:
    """A line to be written again: its usage without what an earlier line counted, which it names separately."""
    if not counted:
        return line
    meta = {key: value for key, value in meta_of(line).items() if key not in ("usage", "usage_before")}
    usage = usage_of(line)
    if (
        isinstance(usage, dict)
        and isinstance(counted, dict)
        and add_usage(counted, subtract_usage(usage, counted)) != usage
    ):
        # The earlier usage has the names of a provider, the sum has ours.
        counted = tokens_of(counted).model_dump(exclude_defaults=True)
    new = subtract_usage(usage, counted) if isinstance(usage, dict) else None
    return {**line, "meta": {**meta, **({"usage": new} if new else {}), "usage_before": counted}}
