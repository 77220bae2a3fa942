"""Pure: what an MCP server answered as data, and lists of tools that are mended."""

from typing import Any

import pytest

from carrel.errors import ToolCallError
from carrel.library.tools.mcp import error_message, parse_result
from carrel.library.tools.mcp_connection import repair_tool_list

PICTURE = {"type": "image", "mimeType": "image/png", "data": "iVBORw=="}
AS_DATA = {"type": "image", "mime_type": "image/png", "data": b"\x89PNG"}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize(
    ("result", "value"),
    [
        ({"content": []}, None),
        ({"content": [text("plain")]}, "plain"),
        ({"content": [text(' {"a": [1, null]}')]}, {"a": [1, None]}),
        ({"content": [text("[1, 2]")]}, [1, 2]),
        ({"content": [text("{not json")]}, "{not json"),
        ({"content": [text("1.10")]}, "1.10"),
        ({"content": [text("[" * 100_000)]}, "[" * 100_000),
        ({"content": [text("a"), text('{"b": 1}')]}, ["a", {"b": 1}]),
        ({"content": [PICTURE]}, AS_DATA),
        ({"content": [text("see"), PICTURE]}, ["see", AS_DATA]),
        ({"content": [text('{"n": 1}')], "structuredContent": {"n": 1, "none": None}}, {"n": 1, "none": None}),
        ({"content": [text("1"), PICTURE], "structuredContent": {"n": 1}}, [{"n": 1}, AS_DATA]),
        ({"content": [], "structuredContent": {}}, {}),
        (
            {"content": [{"type": "resource", "resource": {"uri": "a://b", "blob": "AAE="}}]},
            {"type": "resource", "uri": "a://b", "data": b"\x00\x01"},
        ),
        (
            {"content": [{"type": "resource_link", "uri": "a://b", "name": "b", "mimeType": "text/css"}]},
            {"type": "resource_link", "uri": "a://b", "name": "b", "mime_type": "text/css"},
        ),
    ],
)
def test_values(result: dict[str, Any], value: Any) -> None:
    assert parse_result(result) == value


def test_invalid_base64() -> None:
    with pytest.raises(ToolCallError, match="not valid base64"):
        parse_result({"content": [{"type": "image", "mimeType": "image/png", "data": "%%%"}]})


def test_error_messages_are_short() -> None:
    assert error_message({"content": [text("no"), text("way")]}) == "no\nway"
    assert error_message({"content": [], "structuredContent": {"code": 7}}) == '{"code": 7}'
    assert "without a message" in error_message({"content": []})


def test_an_invalid_tool_does_not_affect_others() -> None:
    good = {
        "name": "good",
        "inputSchema": {"type": "object", "properties": {"a": {}}},
        "outputSchema": {"type": "object"},
    }
    sloppy = [{"name": "bare"}, {"name": "odd", "inputSchema": [], "outputSchema": 7}, {"description": "nameless"}, "x"]
    assert repair_tool_list({"tools": [good, *sloppy], "nextCursor": "2"}) == {
        "tools": [
            good,
            {"name": "bare", "inputSchema": {"type": "object"}},
            {"name": "odd", "inputSchema": {"type": "object"}},
        ],
        "nextCursor": "2",
    }
    assert repair_tool_list({"content": []}) == {"content": []}
