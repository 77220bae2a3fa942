"""The messages of oats: those of carrel with fewer fields."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from carrel.compat.oats.core.id import generate_id
from carrel.compat.oats.date import utc
from carrel.conversation.models.message import Message as CarrelMessage
from carrel.conversation.models.parts import ImagePart as CarrelImage
from carrel.conversation.models.parts import TextPart as CarrelText
from carrel.conversation.models.parts import ToolCallPart as CarrelCall
from carrel.conversation.models.parts import ToolResultPart as CarrelResult

SESSION_KEY = "oats_session_id"
"""The metadata of a message that names another session than the one it is in."""


class TextPart(BaseModel):
    type: Literal["text"] = "text"
    id: str = Field(default_factory=generate_id)
    content: str


class ImagePart(BaseModel):
    """An image as base64 `data`, or at a `url`."""

    type: Literal["image"] = "image"
    id: str = Field(default_factory=generate_id)
    media_type: str
    data: str | None = None
    url: str | None = None
    detail: str = "auto"


class ToolCallPart(BaseModel):
    type: Literal["tool_call"] = "tool_call"
    id: str = Field(default_factory=generate_id)
    tool_call_id: str
    tool_name: str
    arguments: dict[str, Any]


class ToolResultPart(BaseModel):
    type: Literal["tool_result"] = "tool_result"
    id: str = Field(default_factory=generate_id)
    tool_call_id: str
    tool_name: str
    title: str
    output: str
    error: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


MessagePart = TextPart | ImagePart | ToolCallPart | ToolResultPart

_PARTS: dict[type, type[BaseModel]] = {
    CarrelText: TextPart,
    CarrelImage: ImagePart,
    CarrelCall: ToolCallPart,
    CarrelResult: ToolResultPart,
}
_FOR_MODEL: dict[str, tuple[type[BaseModel], ...]] = {
    "user": (TextPart, ImagePart),
    "assistant": (TextPart, ToolCallPart),
    "system": (TextPart,),
}
"""The parts that are sent to a model, by role."""


class Message(BaseModel):
    """One message with its parts."""

    id: str = Field(default_factory=generate_id)
    session_id: str
    role: Literal["user", "assistant", "system"]
    parts: list[MessagePart] = Field(default_factory=list)
    created_at: datetime = Field(default_factory=utc)
    model: str | None = None
    provider: str | None = None
    usage: dict[str, int] | None = None

    def add_text(self, content: str) -> TextPart:
        part = TextPart(content=content)
        self.parts.append(part)
        return part

    def add_image(
        self, media_type: str, *, data: str | None = None, url: str | None = None, detail: str = "auto"
    ) -> ImagePart:
        part = ImagePart(media_type=media_type, data=data, url=url, detail=detail)
        self.parts.append(part)
        return part

    def add_tool_call(self, tool_call_id: str, tool_name: str, arguments: dict[str, Any]) -> ToolCallPart:
        part = ToolCallPart(tool_call_id=tool_call_id, tool_name=tool_name, arguments=arguments)
        self.parts.append(part)
        return part

    def add_tool_result(
        self,
        tool_call_id: str,
        tool_name: str,
        title: str,
        output: str,
        error: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> ToolResultPart:
        part = ToolResultPart(
            tool_call_id=tool_call_id,
            tool_name=tool_name,
            title=title,
            output=output,
            error=error,
            metadata=metadata or {},
        )
        self.parts.append(part)
        return part

    def get_text_content(self) -> str:
        """Return the text parts, joined by line breaks."""
        return "\n".join(part.content for part in self.parts if isinstance(part, TextPart))

    def get_images(self) -> list[ImagePart]:
        return [part for part in self.parts if isinstance(part, ImagePart)]

    def has_images(self) -> bool:
        return bool(self.get_images())

    def get_tool_calls(self) -> list[ToolCallPart]:
        return [part for part in self.parts if isinstance(part, ToolCallPart)]

    def get_tool_results(self) -> list[ToolResultPart]:
        return [part for part in self.parts if isinstance(part, ToolResultPart)]

    def to_llm_format(self) -> dict[str, Any]:
        """Return the message for OpenAI's API; arguments of calls are JSON, results of tools are left out."""
        sent = [part for part in self.parts if isinstance(part, _FOR_MODEL[self.role])]
        wire: Any = to_carrel(self.model_copy(update={"parts": sent}), self.session_id).to_llm_format()
        return dict(wire)


def to_carrel(message: Message, session_id: str) -> CarrelMessage:
    """Convert a message of this session; carrel's has the same fields and more."""
    fields = message.model_dump()
    meta = {SESSION_KEY: message.session_id} if message.session_id != session_id else {}
    return CarrelMessage.model_validate(fields | {"session_id": session_id, "meta": meta})


def from_carrel(message: CarrelMessage) -> Message | None:
    """Convert a message from the log, without parts that have no class here; None for a role that has none."""
    if message.role not in _FOR_MODEL:
        return None
    parts = [_PARTS[type(part)].model_validate(part.model_dump()) for part in message.parts if type(part) in _PARTS]
    session_id = message.meta.get(SESSION_KEY, message.session_id)
    return Message.model_validate(message.model_dump(exclude={"parts"}) | {"parts": parts, "session_id": session_id})
