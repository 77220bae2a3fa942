"""Pure: what the session gave, as an answer of MCP that a client can take and a model can read."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from mcp.types import CallToolResult, ContentBlock, ImageContent, TextContent

from carrel.execution.executor import ExecutionResult
from carrel.guest.worker import values
from carrel.guest.worker.reprs import safe_repr

LONGEST = 40_000
"""Characters of one text; clients refuse what has many more."""
_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
}


def answer_of(result: ExecutionResult) -> CallToolResult:
    """What code printed, its value or its error, and its pictures."""
    stdout, stderr = cut(result.stdout), cut(result.stderr)
    error = cut(result.error) if result.error is not None else None
    texts = [stdout, stderr]
    if error is not None:
        texts.append(error)
    elif result.value is not None:
        texts.append(cut(result.value if isinstance(result.value, str) else _repr(result.value)))
    if result.state != "kept":
        texts.append(f"The variables are {result.state}: {result.state_reason}.")
    content: list[ContentBlock] = [TextContent(type="text", text=text) for text in texts if text]
    for bundle in result.display:
        content += _pictures(bundle)
    data = {
        "value": values.encode(result.value),
        "stdout": stdout,
        "stderr": stderr,
        "error": error,
        "error_type": result.error_type,
        "state": result.state,
        "state_reason": result.state_reason,
        "duration": result.duration,
    }
    return answered(content or [TextContent(type="text", text="(done)")], data, is_error=not result.is_ok)


def listed(lines: Iterable[str], data: list[dict[str, Any]], none: str) -> CallToolResult:
    """A line each for the model, and the data for a program."""
    text = cut("\n".join(lines)) or none
    return answered([TextContent(type="text", text=text)], {"result": values.encode(data)})


def answered(content: list[ContentBlock], data: Any, *, is_error: bool = False) -> CallToolResult:
    return CallToolResult(content=content, structured_content=data, is_error=is_error)


def fitted(answer: CallToolResult, largest: int, *, promised: bool = False) -> CallToolResult:
    """The answer as JSON can have it and in at most `largest` bytes, where what is left out is told.

    First goes what is for programs, unless that was `promised`, then pictures: the text is never the larger part."""
    if not answer.content:
        answer.content = [TextContent(type="text", text="(none)")]
    for block in answer.content:
        if isinstance(block, TextContent):
            block.text = written(block.text)
    data = answer.structured_content = _written_in(answer.structured_content)
    if _size(answer.model_dump()) <= largest:
        return answer
    for name, value in data.items() if data and not promised else ():
        if (size := _size(value)) > LONGEST * 4:
            why = f"it has {size:,} bytes, too many for an answer"
            data[name] = {values.TAG: "repr", "text": safe_repr(value, 1000), "why": why}
    over = _size(answer.model_dump()) - largest
    images = [(len(block.data), at) for at, block in enumerate(answer.content) if isinstance(block, ImageContent)]
    for size, at in sorted(images, reverse=True):
        if over <= 0:
            break
        over -= size
        told = f"(a picture of {size * 3 // 4000:,} kB was left out: an answer has no room for it; make it smaller)"
        answer.content[at] = TextContent(type="text", text=told)
    return answer


def written(text: str) -> str:
    """The text as UTF-8 can have it: half of a surrogate pair, which Python allows, is shown as its escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _written_in(data: Any) -> Any:
    match data:
        case str():
            return written(data)
        case dict():
            return {_written_in(key): _written_in(value) for key, value in data.items()}
        case list():
            return [_written_in(item) for item in data]
        case _:
            return data


def _size(data: Any) -> int:
    return len(json.dumps(data, ensure_ascii=False, default=str).encode())


def image_kind(data: bytes) -> str | None:
    """What kind of image the bytes are; None when they are none that clients show."""
    return next((kind for beginning, kind in _BEGINNINGS.items() if data.startswith(beginning)), None)


def as_text(data: Any) -> str:
    """Data as a model reads it best."""
    try:
        return orjson.dumps(data, option=orjson.OPT_INDENT_2).decode()
    except (TypeError, ValueError):
        return _repr(data)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:
        # Python itself refuses to write a number of thousands of digits.
        return safe_repr(value)


def cut(text: str) -> str:
    """The text in a bearable length: its beginning and its end."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n… {len(text) - LONGEST} characters left out …\n{text[-half:]}"


def _pictures(bundle: Mapping[str, Any]) -> list[ContentBlock]:
    return [
        ImageContent(type="image", data=data, mime_type=kind)
        for kind, data in bundle.items()
        if kind.startswith("image/") and kind != "image/svg+xml" and isinstance(data, str)
    ]
