"""The names of mycode-sdk 0.4.2: `import carrel.compat.mycode as mycode`."""

from carrel.compat import refuse_missing
from carrel.compat.mycode.messages import (
    ContentBlock,
    ConversationMessage,
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
from carrel.compat.mycode.session import SessionStore

__all__ = [
    "ContentBlock",
    "ConversationMessage",
    "SessionStore",
    "assistant_message",
    "build_message",
    "document_block",
    "flatten_message_text",
    "image_block",
    "text_block",
    "thinking_block",
    "tool_result_block",
    "tool_use_block",
    "user_text_message",
]

_NO_AGENT = "carrel calls no model; write the loop with an agent framework and keep its messages in a SessionStore"
_NO_TOOLS = "carrel has no agent loop that would call it; tools of a session are in carrel.Session"

__getattr__ = refuse_missing(
    __name__,
    dict.fromkeys(("Agent", "Event", "PersistCallback"), _NO_AGENT)
    | dict.fromkeys(
        (
            "DEFAULT_TOOL_SPECS",
            "ToolContext",
            "ToolExecutionResult",
            "ToolExecutor",
            "ToolSpec",
            "bash_tool",
            "cancel_all_tools",
            "edit_tool",
            "read_tool",
            "tool",
            "write_tool",
        ),
        _NO_TOOLS,
    ),
)
