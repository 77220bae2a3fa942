"""The blocks and messages of mycode, which are those of carrel."""

from typing import Any

from carrel.conversation import messages
from carrel.conversation.messages import (
    build_message,
    document_block,
    flatten_message_text,
    image_block,
    text_block,
    thinking_block,
    tool_use_block,
    user_text_message,
)

__all__ = [
    "ContentBlock",
    "ConversationMessage",
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

ContentBlock = dict[str, Any]
ConversationMessage = dict[str, Any]


def tool_result_block(
    *,
    tool_use_id: str,
    model_text: str,
    display_text: str,
    is_error: bool = False,
    content: list[ContentBlock] | None = None,
    meta: dict[str, Any] | None = None,
) -> ContentBlock:
    """Build the result of a tool call; empty content is left out."""
    return messages.tool_result_block(
        tool_use_id=tool_use_id,
        model_text=model_text,
        display_text=display_text,
        is_error=is_error,
        content=[dict(block) for block in content] if content else None,
        meta=meta,
    )


def assistant_message(
    blocks: list[ContentBlock],
    *,
    provider: str | None = None,
    model: str | None = None,
    provider_message_id: str | None = None,
    stop_reason: str | None = None,
    usage: Any = None,
    native_meta: dict[str, Any] | None = None,
) -> ConversationMessage:
    """Build a message of the assistant; of the empty values, only an empty usage is written."""
    message = messages.assistant_message(
        blocks,
        provider=provider,
        model=model,
        provider_message_id=provider_message_id,
        stop_reason=stop_reason,
        usage=usage,
        native_meta=native_meta,
    )
    if usage is not None:
        message.setdefault("meta", {})["usage"] = usage
    return message
