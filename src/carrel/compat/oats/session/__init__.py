"""Sessions of typed messages."""

from carrel.compat import refuse_missing
from carrel.compat.oats.session.message import Message, MessagePart, TextPart, ToolCallPart, ToolResultPart
from carrel.compat.oats.session.session import (
    Session,
    SessionInfo,
    SessionStorage,
    create_session,
    get_session,
    list_sessions,
)

__all__ = [
    "Message",
    "MessagePart",
    "Session",
    "SessionInfo",
    "SessionStorage",
    "TextPart",
    "ToolCallPart",
    "ToolResultPart",
    "create_session",
    "get_session",
    "list_sessions",
]

__getattr__ = refuse_missing(
    __name__, {"SessionProcessor": "carrel calls no model; write the loop with an agent framework"}
)
