"""Pure: content as the Anthropic Messages API writes it, in our blocks, whatever shape it is in."""

from typing import Any

from carrel.conversation.formats.anthropic import NAME, from_anthropic
from carrel.conversation.formats.turns import native_block
from carrel.conversation.messages import MessageBlock, text_block

_NEEDS = {"tool_use": ("id", "name"), "tool_result": ("tool_use_id",), "text": ("text",)}


def blocks_from(content: object) -> list[MessageBlock]:
    """The blocks of a message's content, which is text or a list; a block we do not know stays as it is."""
    if isinstance(content, str):
        return [text_block(content)] if content else []
    blocks: list[MessageBlock] = []
    for part in content if isinstance(content, list) else []:
        if isinstance(part, str):
            blocks.append(text_block(part))
        elif isinstance(part, dict):
            blocks += (
                from_anthropic({"role": "user", "content": [part]})[0]["content"] if _is_whole(part) else [_kept(part)]
            )
    return blocks


def _is_whole(part: dict[str, Any]) -> bool:
    """Whether a block, and all inside it, has what its kind needs."""
    needed = _NEEDS.get(str(part.get("type")), ())
    inner = part.get("content") if part.get("type") == "tool_result" else None
    return all(isinstance(part.get(name), str) for name in needed) and (
        not isinstance(inner, list) or all(isinstance(each, dict) and _is_whole(each) for each in inner)
    )


def _kept(part: dict[str, Any]) -> MessageBlock:
    return native_block(NAME, part)
