"""Pure: what an MCP server answered, as data that code can go on with."""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from carrel.errors import ToolCallError


def value_of(result: Mapping[str, Any]) -> Any:
    """The value of a `tools/call` result (its JSON form).

    Structured content is the data itself, and the texts beside it say the same again. Otherwise a text that is a JSON
    object or array is that, another text is itself (also "1.10", which as a number would be another version), an image,
    sound or resource is a dict with its bytes, and several of these are a list."""
    blocks = [block for block in result.get("content") or () if isinstance(block, Mapping)]
    structured = result.get("structuredContent")
    if structured is not None:
        parts = [structured, *(_part(block) for block in blocks if block.get("type") != "text")]
    else:
        parts = [_part(block) for block in blocks]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts


def complaint_of(result: Mapping[str, Any]) -> str:
    """What a result that is an error says, in words, however long."""
    blocks: Sequence[Any] = result.get("content") or ()
    texts = [str(block.get("text", "")) for block in blocks if isinstance(block, Mapping)]
    said = "\n".join(text for text in texts if text).strip()
    if not said and result.get("structuredContent") is not None:
        said = json.dumps(result["structuredContent"], ensure_ascii=False)
    return said or "it failed, and the server did not say why"


def _part(block: Mapping[str, Any]) -> Any:
    match block.get("type"):
        case "text":
            return _text(str(block.get("text", "")))
        case "image" | "audio" as kind:
            return {"type": kind, "mime_type": block.get("mimeType"), "data": _bytes(block.get("data"))}
        case "resource":
            return _resource(block.get("resource"))
        case "resource_link":
            return {"type": "resource_link"} | _present(
                block, "uri", "name", "title", "description", "mimeType", "size"
            )
        case _:
            return dict(block)


def _resource(resource: Any) -> dict[str, Any]:
    if not isinstance(resource, Mapping):
        raise ToolCallError("the MCP server answered with a resource that has no content")
    part = {"type": "resource"} | _present(resource, "uri", "mimeType")
    if "blob" in resource:
        return part | {"data": _bytes(resource["blob"])}
    return part | {"text": str(resource.get("text", ""))}


def _present(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {("mime_type" if name == "mimeType" else name): given[name] for name in names if given.get(name) is not None}


def _text(text: str) -> Any:
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _bytes(data: Any) -> bytes:
    try:
        return base64.b64decode(str(data), validate=True)
    except (binascii.Error, ValueError):
        raise ToolCallError("the MCP server answered with an image or resource that is no base64") from None
