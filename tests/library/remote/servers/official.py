"""An MCP server by the official SDK: `official.py stdio`, or `official.py http|sse PORT`."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, EmbeddedResource, TextContent, TextResourceContents
from pydantic import BaseModel

server = MCPServer("official")


class Point(BaseModel):
    x: int
    y: int


@server.tool()
def moved(point: Point, by: int = 1) -> Point:
    """Move a point."""
    return Point(x=point.x + by, y=point.y + by)


@server.tool(name="say-hello", structured_output=False)
def say_hello(name: str) -> str:
    """Greet."""
    return f"hello {name}"


@server.tool(structured_output=False)
def table() -> str:
    """A JSON text."""
    return '{"rows": [1, 2], "none": null}'


@server.tool(structured_output=False)
def picture() -> Image:
    """An image."""
    return Image(data=b"\x89PNG not really", format="png")


@server.tool(structured_output=False)
def letter() -> CallToolResult:
    """A text and a resource."""
    resource = TextResourceContents(uri="memo://1", mime_type="text/plain", text="dear reader")
    return CallToolResult(content=[TextContent(text="see below"), EmbeddedResource(resource=resource)])


@server.tool()
def broken() -> str:
    """Always fails."""
    raise ToolError("this tool is broken")


@server.tool(structured_output=False)
async def wait(seconds: float, mark: str = "") -> str:
    """Wait; leave a mark when that begins, and one when it is cancelled."""
    if mark:
        Path(f"{mark}.begun").touch()
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if mark:
            Path(mark).write_text("cancelled")
        raise
    return "waited"


@server.tool(structured_output=False)
async def count(to: int, ctx: Context[Any]) -> str:
    """Count, and tell how far it is."""
    for number in range(1, to + 1):
        await ctx.report_progress(number, to, f"at {number}")
    return "counted"


@server.tool(structured_output=False)
async def grow(ctx: Context[Any]) -> str:
    """Add a tool."""

    def grown() -> str:
        return "new"

    server.add_tool(grown)
    await ctx.notify_tools_changed()
    return "grown"


if __name__ == "__main__":
    kind, *port = sys.argv[1:]
    if kind == "stdio":
        server.run()
    elif kind == "sse":
        server.run("sse", port=int(port[0]))
    else:
        server.run("streamable-http", port=int(port[0]))
