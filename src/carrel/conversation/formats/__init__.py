"""Convert conversations to the request formats of providers and back, with a report of what cannot be sent."""

import base64
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from carrel.conversation.formats import anthropic, gemini, openai_chat, openai_responses
from carrel.conversation.formats.turns import (
    Converted,
    Note,
)
from carrel.conversation.messages import ConversationMessage
from carrel.conversation.usage import token_counts
from carrel.errors import FormatRefused

__all__ = ["PROVIDERS", "Converted", "Note", "from_provider", "normalize_usage", "to_provider"]


class _Format(NamedTuple):
    to: Callable[..., Converted]
    back: Callable[[Any], list[ConversationMessage]]


_FORMATS = {
    "anthropic": _Format(anthropic.to_anthropic, anthropic.from_anthropic),
    "openai_chat": _Format(openai_chat.to_openai_chat, openai_chat.from_openai_chat),
    "openai_responses": _Format(openai_responses.to_openai_responses, openai_responses.from_openai_responses),
    "gemini": _Format(gemini.to_gemini, gemini.from_gemini),
}
_ALSO = {"openai": "openai_chat", "claude": "anthropic", "google": "gemini"}

PROVIDERS = tuple(_FORMATS)


def to_provider(messages: Sequence[ConversationMessage], provider: str, *, system: str | None = None) -> Converted:
    """Convert messages to the part of a request that carries the conversation, with a report of differences.

    Never raises because of what a conversation contains; `FormatRefused` for an unknown provider."""
    return _format(provider).to(messages, system=system)


def from_provider(payload: Any, provider: str) -> list[ConversationMessage]:
    """Read messages from a response or a request of a provider: a dict, a list of messages, or an SDK object.

    `FormatRefused` if the payload has another shape."""
    known = _format(provider)
    payload = to_plain_data(payload)
    if not isinstance(payload, dict | list):
        raise FormatRefused(f"a {provider} payload is a dict or a list, not {type(payload).__name__}")
    if {} in (payload if isinstance(payload, list) else [payload]):
        raise FormatRefused(
            f"an empty object is not a valid {provider} request or response; pass the payload as the API returns it"
        )
    try:
        messages = known.back(payload)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatRefused(
            f"this is not a valid {provider} request or response ({type(error).__name__}: {error}); "
            "pass the payload as the API returns it"
        ) from error
    if not all(message["role"] for message in messages):
        raise FormatRefused(f"this is not a valid {provider} request or response: a message in it has no role")
    return messages


def normalize_usage(usage: dict[str, Any], provider: str) -> dict[str, int]:
    """Convert a provider's token counts to our names; input includes cached tokens, output includes thinking."""
    _format(provider)
    return token_counts(usage) or {}


def to_plain_data(value: Any) -> Any:
    """Convert SDK objects, also inside lists and dicts, to JSON data; bytes become base64."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
    match value:
        case dict():
            return {key: to_plain_data(inner) for key, inner in value.items()}
        case list() | tuple():
            return [to_plain_data(inner) for inner in value]
        case bytes():
            return base64.b64encode(value).decode("ascii")
    return value


def _format(provider: str) -> _Format:
    known = _FORMATS.get(_ALSO.get(provider, provider))
    if known is None:
        raise FormatRefused(f"unknown provider {provider!r}; known providers are {', '.join(PROVIDERS)}")
    return known
