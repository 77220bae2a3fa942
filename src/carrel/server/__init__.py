"""The fronts that other programs talk to; each is loaded when it is first asked for, because its framework is heavy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from carrel.errors import MissingExtra

if TYPE_CHECKING:
    from carrel.server.front_desk import Rules as Rules
    from carrel.server.keys import SCOPES as SCOPES
    from carrel.server.keys import KeyScope as KeyScope
    from carrel.server.keys import KnownKey as KnownKey
    from carrel.server.keys import opened_keys as opened_keys
    from carrel.server.mcp.http import serve_http as serve_mcp_http
    from carrel.server.mcp.server import serve_stdio as serve_mcp_stdio
    from carrel.server.serving import ServerSettings as ServerSettings
    from carrel.server.serving import serve as serve_http

__all__ = [
    "SCOPES",
    "KeyScope",
    "KnownKey",
    "Rules",
    "ServerSettings",
    "opened_keys",
    "serve_http",
    "serve_mcp_http",
    "serve_mcp_stdio",
]

_FRONTS = {
    "Rules": ("carrel.server.front_desk", "Rules"),
    "ServerSettings": ("carrel.server.serving", "ServerSettings"),
    "KeyScope": ("carrel.server.keys", "KeyScope"),
    "KnownKey": ("carrel.server.keys", "KnownKey"),
    "SCOPES": ("carrel.server.keys", "SCOPES"),
    "opened_keys": ("carrel.server.keys", "opened_keys"),
    "serve_http": ("carrel.server.serving", "serve"),
    "serve_mcp_http": ("carrel.server.mcp.http", "serve_http"),
    "serve_mcp_stdio": ("carrel.server.mcp.server", "serve_stdio"),
}

_EXTRA_OF = {
    "mcp": "mcp",
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "httptools", "prometheus_client"), "server"),
}


def __getattr__(name: str) -> Any:
    if name not in _FRONTS:
        raise AttributeError(f"module 'carrel.server' has no attribute {name!r}")
    module, attribute = _FRONTS[name]
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as problem:
        package = (problem.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        extra = _EXTRA_OF[package]
        raise MissingExtra("the MCP server needs" if extra == "mcp" else "the server needs", extra) from None
