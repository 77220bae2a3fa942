"""The conversation in the words of each provider, and back: whole where the provider can say it, reported where not."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from carrel.conversation.formats import anthropic, gemini, openai_chat, openai_responses
from carrel.conversation.formats.echoes import plain
from carrel.conversation.formats.turns import Converted, Note
from carrel.conversation.messages import ConversationMessage
from carrel.errors import FormatRefused

__all__ = ["PROVIDERS", "Converted", "Note", "from_provider", "normalize_usage", "to_provider"]


class _Format(NamedTuple):
    to: Callable[..., Converted]
    back: Callable[[Any], list[ConversationMessage]]
    usage: Callable[[dict[str, Any]], dict[str, int]]


_FORMATS = {
    "anthropic": _Format(anthropic.to_anthropic, anthropic.from_anthropic, anthropic.usage_of),
    "openai_chat": _Format(openai_chat.to_openai_chat, openai_chat.from_openai_chat, openai_chat.usage_of),
    "openai_responses": _Format(
        openai_responses.to_openai_responses, openai_responses.from_openai_responses, openai_responses.usage_of
    ),
    "gemini": _Format(gemini.to_gemini, gemini.from_gemini, gemini.usage_of),
}
_ALSO = {"openai": "openai_chat", "claude": "anthropic", "google": "gemini"}

PROVIDERS = tuple(_FORMATS)


def to_provider(messages: Sequence[ConversationMessage], provider: str, *, system: str | None = None) -> Converted:
    """The part of a request that carries the conversation, and a report of what it does not say.

    Never raises for what a conversation may hold; `FormatRefused` for a provider nobody knows."""
    return _format(provider).to(messages, system=system)


def from_provider(payload: Any, provider: str) -> list[ConversationMessage]:
    """Our messages from a response or a request of that provider: a dict, a list of messages, or the SDK's object.

    `FormatRefused` when it has another shape."""
    known = _format(provider)
    payload = plain(payload)
    if not isinstance(payload, dict | list):
        raise FormatRefused(f"a {provider} payload is a dict or a list, not {type(payload).__name__}")
    if {} in (payload if isinstance(payload, list) else [payload]):
        raise FormatRefused(f"an empty object is no {provider} request or response; give it as the API has it")
    try:
        messages = known.back(payload)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatRefused(
            f"this is no {provider} request or response ({type(error).__name__}: {error}); give it as the API has it"
        ) from error
    if not all(message["role"] for message in messages):
        raise FormatRefused(f"this is no {provider} request or response: a message in it does not say whose it is")
    return messages


def normalize_usage(usage: dict[str, Any], provider: str) -> dict[str, int]:
    """A provider's count of tokens under our names; the input has what was cached in it, the output the thinking."""
    return _format(provider).usage(usage)


def _format(provider: str) -> _Format:
    known = _FORMATS.get(_ALSO.get(provider, provider))
    if known is None:
        raise FormatRefused(f"no format is known for {provider!r}; known are {', '.join(PROVIDERS)}")
    return known
