"""The MCP server: one session as tools of the Model Context Protocol; `server` for stdio, `http` for HTTP."""

from carrel.server.mcp.server import SessionTools, make_server, serve_stdio

__all__ = ["SessionTools", "make_server", "serve_stdio"]
