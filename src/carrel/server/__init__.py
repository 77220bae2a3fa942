"""The servers: HTTP and MCP. Each is loaded when it is first used, because its framework is slow to import."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from carrel.errors import MissingExtra

if TYPE_CHECKING:
    from carrel.server.app import serve as serve_http
    from carrel.server.app import serve_page as serve_page
    from carrel.server.auth import SCOPES as SCOPES
    from carrel.server.auth import ApiKey as ApiKey
    from carrel.server.auth import KeyScope as KeyScope
    from carrel.server.auth import open_keys as open_keys
    from carrel.server.mcp.http import serve_http as serve_mcp_http
    from carrel.server.mcp.server import serve_stdio as serve_mcp_stdio
    from carrel.server.settings import PAGE_MODES as PAGE_MODES
    from carrel.server.settings import RECORD_MODES as RECORD_MODES
    from carrel.server.settings import STORE_LOST_MODES as STORE_LOST_MODES
    from carrel.server.settings import ServerSettings as ServerSettings

__all__ = [
    "PAGE_MODES",
    "RECORD_MODES",
    "SCOPES",
    "STORE_LOST_MODES",
    "ApiKey",
    "KeyScope",
    "ServerSettings",
    "open_keys",
    "serve_http",
    "serve_mcp_http",
    "serve_mcp_stdio",
    "serve_page",
]

_MODULES = {
    "SCOPES": ("carrel.server.auth", "SCOPES"),
    "ApiKey": ("carrel.server.auth", "ApiKey"),
    "KeyScope": ("carrel.server.auth", "KeyScope"),
    "open_keys": ("carrel.server.auth", "open_keys"),
    "ServerSettings": ("carrel.server.settings", "ServerSettings"),
    "serve_http": ("carrel.server.app", "serve"),
    "serve_page": ("carrel.server.app", "serve_page"),
    "STORE_LOST_MODES": ("carrel.server.settings", "STORE_LOST_MODES"),
    "PAGE_MODES": ("carrel.server.settings", "PAGE_MODES"),
    "RECORD_MODES": ("carrel.server.settings", "RECORD_MODES"),
    "serve_mcp_http": ("carrel.server.mcp.http", "serve_http"),
    "serve_mcp_stdio": ("carrel.server.mcp.server", "serve_stdio"),
}

_EXTRAS = {
    "mcp": "mcp",
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "httptools", "sse_starlette", "prometheus_client"), "server"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'carrel.server' has no attribute {name!r}")
    module, attribute = _MODULES[name]
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as problem:
        package = (problem.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        extra = _EXTRAS[package]
        raise MissingExtra("the MCP server needs" if extra == "mcp" else "the server needs", extra) from None
