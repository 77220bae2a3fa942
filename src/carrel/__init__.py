"""A private place for every AI agent to work; the public names, each loaded when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from carrel.conversation.messages import (
        SessionData,
        SessionMeta,
        assistant_message,
        build_message,
        document_block,
        flatten_message_text,
        image_block,
        text_block,
        thinking_block,
        tool_result_block,
        tool_use_block,
        user_text_message,
    )
    from carrel.errors import (
        CarrelError,
        CompactRefused,
        ConfigurationError,
        ImportRefused,
        KeyRefused,
        MessageRefused,
        RewindRefused,
        SessionBusy,
        SessionError,
        SessionExists,
        SessionIdRefused,
        SessionNotFound,
        SessionTooNew,
        StorageError,
        StorageReadError,
        StorageUnavailable,
        StorageWriteError,
    )
    from carrel.home import resolve_carrel_home, resolve_sessions_dir

__all__ = [
    "CarrelError",
    "CompactRefused",
    "ConfigurationError",
    "ImportRefused",
    "KeyRefused",
    "MessageRefused",
    "RewindRefused",
    "SessionBusy",
    "SessionData",
    "SessionError",
    "SessionExists",
    "SessionIdRefused",
    "SessionMeta",
    "SessionNotFound",
    "SessionTooNew",
    "StorageError",
    "StorageReadError",
    "StorageUnavailable",
    "StorageWriteError",
    "__version__",
    "assistant_message",
    "build_message",
    "document_block",
    "flatten_message_text",
    "image_block",
    "resolve_carrel_home",
    "resolve_sessions_dir",
    "text_block",
    "thinking_block",
    "tool_result_block",
    "tool_use_block",
    "user_text_message",
]

_ROOMS = {
    "carrel.conversation.messages": """
        SessionData SessionMeta assistant_message build_message document_block flatten_message_text image_block
        text_block thinking_block tool_result_block tool_use_block user_text_message""",
    "carrel.errors": """
        CarrelError CompactRefused ConfigurationError ImportRefused KeyRefused MessageRefused RewindRefused
        SessionBusy SessionError SessionExists SessionIdRefused SessionNotFound SessionTooNew StorageError
        StorageReadError StorageUnavailable StorageWriteError""",
    "carrel.home": "resolve_carrel_home resolve_sessions_dir",
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'carrel' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(room), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
