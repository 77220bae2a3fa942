"""Results of MCP tools: text and pictures for the model, structured content for programs, within size limits."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from mcp.types import CallToolResult, ContentBlock, ImageContent, TextContent

from carrel.execution.executor import ExecutionResult
from carrel.guest.worker import values
from carrel.guest.worker.values import safe_repr
from carrel.text import escape_surrogates

MAX_TEXT = 40_000
"""Characters of one text; clients refuse much longer ones."""
_IMAGE_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
}


def run_result(result: ExecutionResult) -> CallToolResult:
    """Return what code printed, its value or its error, and its pictures."""
    stdout, stderr = cut_text(result.stdout), cut_text(result.stderr)
    error = cut_text(result.error) if result.error is not None else None
    texts = [stdout, stderr]
    if error is not None:
        texts.append(error)
    elif result.value is not None:
        texts.append(cut_text(result.value if isinstance(result.value, str) else _repr(result.value)))
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
    return tool_result(content or [TextContent(type="text", text="(done)")], data, is_error=not result.is_ok)


def list_result(lines: Iterable[str], data: list[dict[str, Any]], none: str) -> CallToolResult:
    """Return one line for each item for the model, and the data for programs."""
    text = cut_text("\n".join(lines)) or none
    return tool_result([TextContent(type="text", text=text)], {"result": values.encode(data)})


def tool_result(content: list[ContentBlock], data: Any, *, is_error: bool = False) -> CallToolResult:
    """Return a result with this content and, for programs, this data."""
    return CallToolResult(content=content, structured_content=data, is_error=is_error)


def fit_result(result: CallToolResult, max_bytes: int, *, keep_data: bool = False) -> CallToolResult:
    """Return the result as valid JSON of at most `max_bytes`; what is left out is replaced by a remark.

    Large values of the structured content are left out first (unless `keep_data`), then pictures; texts are short."""
    if not result.content:
        result.content = [TextContent(type="text", text="(none)")]
    for block in result.content:
        if isinstance(block, TextContent):
            block.text = escape_surrogates(block.text)
    data = result.structured_content = escape_surrogates(result.structured_content)
    if _size(result.model_dump()) <= max_bytes:
        return result
    for name, value in data.items() if data and not keep_data else ():
        if (size := _size(value)) > MAX_TEXT * 4:
            why = f"it has {size:,} bytes, too many for a result"
            data[name] = {values.TAG: "repr", "text": safe_repr(value, 1000), "why": why}
    over = _size(result.model_dump()) - max_bytes
    images = [(len(block.data), at) for at, block in enumerate(result.content) if isinstance(block, ImageContent)]
    for size, at in sorted(images, reverse=True):
        if over <= 0:
            break
        over -= size
        remark = f"(a picture of {size * 3 // 4000:,} kB was left out: it is too large for a result; make it smaller)"
        result.content[at] = TextContent(type="text", text=remark)
    return result


def _size(data: Any) -> int:
    return len(json.dumps(data, ensure_ascii=False, default=str).encode())


def image_type(data: bytes) -> str | None:
    """Return the MIME type of an image that clients can show, else None."""
    return next((kind for signature, kind in _IMAGE_SIGNATURES.items() if data.startswith(signature)), None)


def readable_text(data: Any) -> str:
    """Return data as indented JSON where possible, else as its repr."""
    try:
        return orjson.dumps(data, option=orjson.OPT_INDENT_2).decode()
    except (TypeError, ValueError):
        return _repr(data)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:
        # Python refuses to print integers with thousands of digits.
        return safe_repr(value)


def cut_text(text: str) -> str:
    """Return a text of limited length: its beginning and its end."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - MAX_TEXT} characters left out …\n{text[-half:]}"


def _pictures(bundle: Mapping[str, Any]) -> list[ContentBlock]:
    return [
        ImageContent(type="image", data=data, mime_type=kind)
        for kind, data in bundle.items()
        if kind.startswith("image/") and kind != "image/svg+xml" and isinstance(data, str)
    ]
