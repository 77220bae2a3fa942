"""The fronts that other programs talk to; each is loaded when it is first asked for, because its framework is heavy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carrel.server.mcp import serve as serve_mcp

__all__ = ["serve_mcp"]

_FRONTS = {"serve_mcp": ("carrel.server.mcp", "serve")}


def __getattr__(name: str) -> Any:
    if name not in _FRONTS:
        raise AttributeError(f"module 'carrel.server' has no attribute {name!r}")
    room, word = _FRONTS[name]
    return getattr(import_module(room), word)
