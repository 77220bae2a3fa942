"""A message of a conversation as a typed object, and the lines of the log that hold it."""

from collections.abc import Generator, Iterable
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import Field, ValidationInfo, field_validator

from carrel.conversation import formats
from carrel.conversation.entries import UNREADABLE
from carrel.conversation.formats.openai_chat import message_to_chat
from carrel.conversation.messages import (
    ConversationMessage,
    build_message,
    meta_of,
    text_block,
    tool_results_of,
    tool_use_block,
    user_text_message,
)
from carrel.conversation.metadata import date_of
from carrel.conversation.replay import Numbered
from carrel.conversation.session_info import now
from carrel.conversation.typed_parts import (
    ImagePart,
    MessagePart,
    Noticed,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    block_to_part,
    part_to_block,
)
from carrel.conversation.usage import tokens_of
from carrel.errors import FormatRefused

_EVENTS = ("compact", "rewind", UNREADABLE)
_AUTO = "auto"
_PLAIN = {"assistant": ("text", "tool_use"), "user": ("text", "image"), "system": ("text",)}
"""The kinds of blocks that a plain message of each role may have."""
_LISTS = ("messages", "input", "contents")
"""Under which name each provider's request has the conversation."""


_Added = TypeVar("_Added", TextPart, ImagePart, ToolCallPart, ToolResultPart)


class MessageRole(StrEnum):
    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"


_ROLES = frozenset(MessageRole)


class Message(Noticed):
    """One message. The results of an assistant's tool calls may stand in the same message as the calls.

    What `Conversation` hands out can be awaited: that writes the conversation, and gives the message back."""

    id: str = Field(default_factory=lambda: str(uuid4()))
    session_id: str
    is_foreign: bool = False
    """Whether the role is one that another program wrote into the log, and none of a `MessageRole`."""
    role: str = Field(json_schema_extra={"enum": list(MessageRole)})
    parts: list[MessagePart] = Field(default_factory=list)
    created_at: datetime = Field(default_factory=now)
    model: str | None = None
    provider: str | None = None
    usage: dict[str, Any] | None = None
    meta: dict[str, Any] = Field(default_factory=dict)
    """What else the line in the log says about the message."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """What else the line has that this format does not know."""

    @field_validator("role")
    @classmethod
    def _is_a_role(cls, role: str, info: ValidationInfo) -> str:
        if role not in _ROLES and not info.data.get("is_foreign"):
            raise ValueError(f"{role!r} is no role of a message: use user, assistant or system")
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
        """An image as base64 `data`, or at a `url`."""
        return self._add(
            ImagePart(id=self._next_part_id(), media_type=media_type, data=data, url=url, detail=detail),
        )

    def add_tool_call(
        self, tool_call_id: str, tool_name: str, arguments: dict[str, Any] | str | None = None
    ) -> ToolCallPart:
        """A call; `arguments` may be the JSON text that a model gives."""
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
        """The result of a call of this message, or of the message before it."""
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
        """The text parts, a line break between them."""
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
        """The message as the provider's API has it: openai, openai-responses, anthropic or gemini.

        A dict; a list of them where the API has several, as OpenAI has for a call and its result. `FormatRefused` for a
        system message in Gemini's: `to_provider` puts it where Gemini takes it, beside the conversation."""
        if self.role == "system" and provider in ("gemini", "google"):
            raise FormatRefused(
                "Gemini has no system messages: their text goes into systemInstruction, beside contents; to_provider "
                "makes both of a whole conversation"
            )
        lines = message_to_lines(self)
        if is_openai(provider):
            wires = [wire for line in lines for wire in message_to_chat(plain_shape(line))]
        else:
            wires = _alone(lines, provider)
        if not wires:
            return {"role": self.role, "content": self.get_text_content()}
        return wires[0] if len(wires) == 1 else wires

    def _next_part_id(self) -> str:
        taken = {part.id for part in self.parts}
        number = len(self.parts)
        while (id_ := usual_part_id(self.id, number)) in taken:
            number += 1
        return id_

    def _add(self, part: _Added) -> _Added:
        self.parts.append(part)
        self.touch()
        return part


def usual_part_id(message_id: str, place: int) -> str:
    return f"{message_id}-{place}"


def is_openai(provider: str) -> bool:
    """Whether a provider's name is that of OpenAI's chat completions."""
    return provider in ("openai", "openai_chat", "openai-chat")


def plain_shape(line: ConversationMessage) -> ConversationMessage:
    """A line with its texts joined, in front of its images, and the detail of each image.

    So that OpenAI's message is `{"role", "content": text}`, or has one text and then the images. A line with blocks of
    other kinds, or with what only one provider understands, stays as it is."""
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
    """The conversation in the provider's words; `FormatRefused` for a provider nobody knows."""
    payload = formats.to_provider(list(lines), provider.replace("-", "_")).payload
    said = next(payload[name] for name in _LISTS if name in payload)
    if isinstance(said, str):
        said = [{"type": "message", "role": "user", "content": said}]
    if "instructions" in payload:
        # The only one whose list can have what the system says; the others have a place beside it.
        words = {"type": "input_text", "text": payload["instructions"]}
        said = [{"type": "message", "role": "system", "content": [words]}, *said]
    found: list[dict[str, Any]] = said
    return found


def _alone(lines: list[ConversationMessage], provider: str) -> list[dict[str, Any]]:
    """One message in the words of a provider who wants to know what went before; that is made up and cut off again."""
    asked = [
        tool_use_block(tool_id=part.tool_call_id, name=part.tool_name or "tool")
        for part in (block_to_part(block, "") for block in lines[0].get("content") or [])
        if isinstance(part, ToolResultPart)
    ]
    if lines[0]["role"] == "assistant":
        before = [user_text_message("…")]
    elif asked:
        before = [user_text_message("…"), build_message("assistant", asked)]
    else:
        before = []
    return provider_messages([*before, *lines], provider)[len(provider_messages(before, provider)) :]


# --- the lines of the log -------------------------------------------------------------------------------------------


def message_to_lines(message: Message) -> list[ConversationMessage]:
    """The lines that hold a message. The log has results in the user's lines, so an assistant's message with
    results takes several; they share its id."""
    source: list[ConversationMessage] | None = getattr(message, "_source", None)
    if source is not None and _read_again(source, message) == [message]:
        return source
    groups: list[tuple[str, list[dict[str, Any]]]] = []
    for place, part in enumerate(message.parts):
        is_result = isinstance(part, ToolResultPart) and message.role == "assistant"
        role = "user" if is_result else message.role
        if not groups or groups[-1][0] != role:
            groups.append((role, []))
        groups[-1][1].append(part_to_block(part, usual_part_id(message.id, place)))
    groups = groups or [(message.role, [])]
    lines = [build_message(role, blocks, meta=_continued(role, message)) for role, blocks in groups]
    lines[0] = {**build_message(*groups[0], meta=_head(groups[0][0], message)), **message.extra}
    return lines


def _head(role: str, message: Message) -> dict[str, Any]:
    known = {"model": message.model, "provider": message.provider, "usage": message.usage}
    meta = {**message.meta, **{key: value for key, value in known.items() if value is not None}}
    if role != message.role:
        meta["spoken_by"] = message.role
    return {**meta, "id": message.id, "created_at": message.created_at.isoformat()}


def _continued(role: str, message: Message) -> dict[str, Any]:
    known = {"model": message.model, "provider": message.provider} if role == "assistant" else {}
    meta = {key: value for key, value in known.items() if value is not None}
    return {**meta, "id": message.id, "continues": True}


def _read_again(lines: list[ConversationMessage], message: Message) -> list[Message]:
    numbered = [(0, line) for line in lines]
    return lines_to_messages(numbered, session_id=message.session_id, since=message.created_at, usual_id=message.id)


def lines_to_messages(
    lines: Iterable[Numbered], *, session_id: str, since: datetime, usual_id: str | None = None
) -> list[Message]:
    """The messages in the visible lines of a log. One without an id is called by its sequence number, one without a
    date has that of the session."""
    messages: dict[str, Message] = {}
    for place, (seq, line) in enumerate(lines):
        meta = dict(meta_of(line))
        id_ = _taken_text(meta, "id") or usual_id or _usual_id(seq, line, place)
        known = messages.get(id_)
        if known is not None and meta.get("continues") is True:
            # Usually right after its first line, but another process may have come between.
            known._source.append(line)
            known.parts += _parts(line, id_, len(known.parts))
            continue
        if known is not None:
            id_ = f"{id_}-seq-{seq}"
        messages[id_] = _read_line(line, meta, id_, session_id, since)
    return list(messages.values())


def _usual_id(seq: int, line: ConversationMessage, place: int) -> str:
    results = tool_results_of(line) if not seq or meta_of(line).get("synthetic") else []
    if results:
        # They stand in for results that never came, and may not be in the log yet.
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
        created_at=_taken_date(meta) or since,
        model=_taken_text(meta, "model"),
        provider=_taken_text(meta, "provider"),
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
        block_to_part(block, usual_part_id(message_id, place))
        for place, block in enumerate(blocks if isinstance(blocks, list) else [], first)
    ]


def _taken_text(meta: dict[str, Any], key: str) -> str | None:
    value = meta.get(key)
    return meta.pop(key) if isinstance(value, str) and value else None


def _taken_date(meta: dict[str, Any]) -> datetime | None:
    date = date_of(meta.get("created_at"))
    if date is not None:
        del meta["created_at"]
    return date


# --- usage, counted once --------------------------------------------------------------------------------------------


def plus(one: Any, other: Any) -> Any:
    """The sum of two reports of usage, number by number; what is no number is the newer one's."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: plus(one.get(key), other.get(key)) for key in {**one, **other}}
    if _is_number(one) and _is_number(other):
        return one + other
    return one if other is None else other


def minus(one: Any, other: Any) -> Any:
    """What `plus` adds to `other` to get `one`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: minus(value, other.get(key)) for key, value in one.items() if value != other.get(key)}
    return one - other if _is_number(one) and _is_number(other) else one


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def usage_of(line: ConversationMessage) -> Any:
    """What a line says was spent: what it counts, and what an earlier line of the message counted."""
    meta = meta_of(line)
    return plus(meta.get("usage_before"), meta.get("usage"))


def without_counting_again(line: ConversationMessage, counted: Any) -> ConversationMessage:
    """A line that is written anew, with the usage that an earlier line counted beside that which is new."""
    if not counted:
        return line
    meta = {key: value for key, value in meta_of(line).items() if key not in ("usage", "usage_before")}
    usage = usage_of(line)
    if isinstance(usage, dict) and isinstance(counted, dict) and plus(counted, minus(usage, counted)) != usage:
        # What was counted before is in a provider's words, the sum in ours.
        counted = tokens_of(counted).model_dump(exclude_defaults=True)
    new = minus(usage, counted) if isinstance(usage, dict) else None
    return {**line, "meta": {**meta, **({"usage": new} if new else {}), "usage_before": counted}}
