"""The parts of a typed message, and their conversion from and to blocks of the log."""

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from carrel.conversation.messages import MessageBlock, meta_of, tool_result_text

_AUTO = "auto"


def new_part_id() -> str:
    return str(uuid4())


class ObservedModel(BaseModel):
    """A model that calls its observers when a field is assigned."""

    model_config = ConfigDict(protected_namespaces=(), populate_by_name=True)

    # Slots instead of fields: they are not serialized, and a copy does not have them.
    __slots__ = ("_on_change", "_save", "_source")
    if TYPE_CHECKING:
        _save: Callable[[], Awaitable[Any]]
        _source: Any
        _on_change: list[Callable[[], None]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)
            self.touch()

    def touch(self) -> None:
        """Report a change inside a dict or list; assigning a field reports itself."""
        for notify in getattr(self, "_on_change", ()):
            notify()


class BasePart(ObservedModel):
    """The fields of every part; `meta` and `extra` hold what else the block of the log has."""

    id: str = Field(default_factory=new_part_id)
    meta: dict[str, Any] = Field(default_factory=dict)
    extra: dict[str, Any] = Field(default_factory=dict)


class TextPart(BasePart):
    type: Literal["text"] = "text"
    content: str = Field(default="", validation_alias=AliasChoices("content", "text"))

    @property
    def text(self) -> str:
        return self.content


class ThinkingPart(BasePart):
    type: Literal["thinking"] = "thinking"
    content: str = ""


class ImagePart(BasePart):
    """An image as base64 `data`, or at a `url`."""

    type: Literal["image"] = "image"
    media_type: str
    data: str | None = None
    url: str | None = None
    detail: str = _AUTO
    name: str | None = None


def _arguments(value: Any) -> Any:
    """Parse JSON text, as models return it; validation reports everything that is not an object."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


class ToolCallPart(BasePart):
    type: Literal["tool_call"] = "tool_call"
    tool_call_id: str
    tool_name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)] = Field(default_factory=dict)


class ToolResultPart(BasePart):
    type: Literal["tool_result"] = "tool_result"
    tool_call_id: str
    tool_name: str = ""
    title: str = ""
    output: str = ""
    error: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def model_text(self) -> str:
        """The text that the model reads: the output, with the error before it."""
        if self.error is None:
            return self.output
        return f"Error: {self.error}\n{self.output}" if self.output else self.error


class OtherPart(BasePart):
    """A block without a part class of its own, such as a document; kept as it is."""

    type: str = "other"
    block: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _unknown_fields_are_the_block(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "block" in data:
            return data
        known = {key: value for key, value in data.items() if key in cls.model_fields}
        return {**known, "block": {key: value for key, value in data.items() if key not in known}}


_KNOWN = ("text", "thinking", "image", "tool_call", "tool_result")


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in _KNOWN else "other"


MessagePart = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ThinkingPart, Tag("thinking")]
    | Annotated[ImagePart, Tag("image")]
    | Annotated[ToolCallPart, Tag("tool_call")]
    | Annotated[ToolResultPart, Tag("tool_result")]
    | Annotated[OtherPart, Tag("other")],
    Discriminator(_kind),
]


def part_to_block(part: BasePart, default_id: str) -> MessageBlock:
    """Convert a part; its id is written only when it differs from the default one of its place."""
    source: MessageBlock | None = getattr(part, "_source", None)
    if source is not None and block_to_part(source, default_id) == part:
        return source
    block, meta = _block_and_meta(part)
    meta = {**part.meta, **meta, **({"id": part.id} if part.id != default_id else {})}
    return {**block, **part.extra, **({"meta": meta} if meta else {})}


def _block_and_meta(part: BasePart) -> tuple[MessageBlock, dict[str, Any]]:
    match part:
        case TextPart() | ThinkingPart():
            return {"type": part.type, "text": part.content}, {}
        case ImagePart():
            fields = {"data": part.data, "url": part.url, "mime_type": part.media_type or None, "name": part.name}
            given = {key: value for key, value in fields.items() if value is not None}
            return {"type": "image", **given}, {"detail": part.detail} if part.detail != _AUTO else {}
        case ToolCallPart():
            return {"type": "tool_use", "id": part.tool_call_id, "name": part.tool_name, "input": part.arguments}, {}
        case ToolResultPart():
            return _result_to_block(part)
        case OtherPart():
            return {"type": part.type, **part.block}, {}
    raise TypeError(f"invalid message part of type {type(part).__name__}; use a part class of carrel")


def _result_to_block(part: ToolResultPart) -> tuple[MessageBlock, dict[str, Any]]:
    text = part.model_text
    block = {
        "type": "tool_result",
        "tool_use_id": part.tool_call_id,
        "model_text": text,
        "display_text": text,
        "is_error": part.error is not None,
    }
    meta: dict[str, Any] = {"tool_name": part.tool_name, "title": part.title, "metadata": part.metadata}
    meta = {key: value for key, value in meta.items() if value}
    if part.error is not None and part.output:
        meta["error"] = part.error
    return block, meta


def block_to_part(block: Any, default_id: str) -> MessagePart:
    """Convert a block; one of an unexpected shape becomes an `OtherPart`."""
    if not isinstance(block, dict):
        return OtherPart(id=default_id, block={"value": block})
    meta = dict(meta_of(block))
    id_ = meta.pop("id", None)
    if isinstance(id_, str) and id_:
        default_id = id_
    elif id_ is not None:
        meta["id"] = id_
    part = _convert_block(block, default_id, meta)
    part._source = block
    return part


def _convert_block(block: MessageBlock, part_id: str, meta: dict[str, Any]) -> MessagePart:
    kind = block.get("type")
    match block:
        case {"type": "text" | "thinking", "text": str(text)}:
            part_class = TextPart if kind == "text" else ThinkingPart
            return part_class(id=part_id, content=text, meta=meta, extra=_rest(block, "text"))
        case {"type": "image"} if _are_strings(block, "data", "url", "mime_type", "name"):
            detail = meta.pop("detail", _AUTO)
            return ImagePart(
                id=part_id,
                media_type=block.get("mime_type") or "",
                data=block.get("data"),
                url=block.get("url"),
                name=block.get("name"),
                detail=detail if isinstance(detail, str) else _AUTO,
                meta=meta,
                extra=_rest(block, "data", "url", "mime_type", "name"),
            )
        case {"type": "tool_use", "id": str(id_), "name": str(name), "input": dict(arguments)}:
            return ToolCallPart(
                id=part_id,
                tool_call_id=id_,
                tool_name=name,
                arguments=arguments,
                meta=meta,
                extra=_rest(block, "id", "name", "input"),
            )
        case {"type": "tool_result", "tool_use_id": str(id_)}:
            return _block_to_result(block, id_, part_id, meta)
    if not isinstance(kind, str) or kind in _KNOWN:
        return OtherPart(
            id=part_id, block={"type": kind, **_rest(block)} if "type" in block else _rest(block), meta=meta
        )
    return OtherPart(id=part_id, type=kind, block=_rest(block), meta=meta)


def _block_to_result(block: MessageBlock, id_: str, part_id: str, meta: dict[str, Any]) -> ToolResultPart:
    text = tool_result_text(block)
    error, output = (text, "") if block.get("is_error") else (None, text)
    known = meta.pop("error", None)
    if isinstance(known, str) and text.startswith(f"Error: {known}\n"):
        error, output = known, text.removeprefix(f"Error: {known}\n")
    extra = _rest(block, "tool_use_id", "model_text", "is_error")
    if extra.get("display_text") == text:
        del extra["display_text"]
    name, title, metadata = (meta.pop(key, None) for key in ("tool_name", "title", "metadata"))
    return ToolResultPart(
        id=part_id,
        tool_call_id=id_,
        tool_name=name if isinstance(name, str) else "",
        title=title if isinstance(title, str) else "",
        output=output,
        error=error,
        metadata=metadata if isinstance(metadata, dict) else {},
        meta=meta,
        extra=extra,
    )


def _rest(block: MessageBlock, *known: str) -> dict[str, Any]:
    """The fields of a block that the part has no field for."""
    return {
        key: value
        for key, value in block.items()
        if key not in known and key != "type" and not (key == "meta" and isinstance(value, dict))
    }


def _are_strings(block: MessageBlock, *keys: str) -> bool:
    return all(isinstance(block.get(key), str | None) for key in keys)
