"""Pure: the content of a pi message in our blocks; what a provider has signed stays that provider's own."""

from typing import Any

import orjson

from carrel.conversation.formats.openai_responses import from_openai_responses
from carrel.conversation.formats.turns import keep_native, native_block
from carrel.conversation.importers.draft import text_of
from carrel.conversation.messages import MessageBlock, image_block, text_block, thinking_block, tool_use_block

KIND = "pi"

_FIELDS = ("reasoning_content", "reasoning")


def blocks_of_pi(content: object, api: str = "") -> list[MessageBlock]:
    """`api` is the way in which pi spoke to the model; it says what a signature means."""
    if isinstance(content, str):
        return [text_block(content)] if content else []
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return [block for part in parts if (block := _block(part, api)) is not None]


def call_id(id_: str, api: str) -> tuple[str, str]:
    """The id of a call, and that of its item where pi has put the two together."""
    call, _, item = id_.partition("|") if "responses" in api else (id_, "", "")
    return call or id_, item


def _block(part: dict[str, Any], api: str) -> MessageBlock | None:
    match part.get("type"):
        case "text":
            block = text_block(text_of(part.get("text"))) if part.get("text") else None
            return block and _with_thought(block, part.get("textSignature"), api)
        case "thinking":
            return _thinking(part, api)
        case "toolCall" if part.get("id") and part.get("name"):
            arguments = part.get("arguments")
            value = arguments if isinstance(arguments, dict) else {}
            id_, item = call_id(str(part["id"]), api)
            block = tool_use_block(tool_id=id_, name=str(part["name"]), input=value)
            keep_native(block, "openai_responses", {"id": item} if item else {})
            return _with_thought(block, part.get("thoughtSignature"), api)
        case "image" if isinstance(part.get("data"), str):
            return image_block(part["data"], mime_type=text_of(part.get("mimeType")))
    return native_block(KIND, part)


def _with_thought(block: MessageBlock, signature: object, api: str) -> MessageBlock:
    signed = isinstance(signature, str) and bool(signature) and api.startswith("google")
    return keep_native(block, "gemini", {"thoughtSignature": signature} if signed else {})


def _thinking(part: dict[str, Any], api: str) -> MessageBlock:
    text, signature = text_of(part.get("thinking")), text_of(part.get("thinkingSignature"))
    if not signature:
        return thinking_block(text)
    if part.get("redacted") is True and api.startswith("anthropic"):
        whole = {"type": "redacted_thinking", "data": signature}
        return keep_native(thinking_block(""), "anthropic", {"anthropic_block": whole})
    if "responses" in api and (item := _reasoning(signature)) is not None:
        return item
    if api.startswith("google"):
        return _with_thought(thinking_block(text), signature, api)
    if api == "openai-completions" and signature in _FIELDS:
        return keep_native(thinking_block(text), "openai_chat", {"reasoning_field": signature})
    return thinking_block(text, meta={"signature": signature})


def _reasoning(signature: str) -> MessageBlock | None:
    """OpenAI's reasoning, which pi keeps whole as the signature."""
    try:
        item = orjson.loads(signature)
        [message] = from_openai_responses([item]) if item.get("type") == "reasoning" else []
    except (AttributeError, TypeError, ValueError):
        return None
    block: MessageBlock = message["content"][0]
    return block
