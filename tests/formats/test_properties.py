"""Properties for any conversation: SDK types accept the payload, all losses are reported, the rest comes back."""

import base64
import json
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carrel.conversation.formats import Converted, from_provider, to_provider
from carrel.conversation.messages import ConversationMessage, meta_of, text_block, tool_result_text
from tests.support.conversations import MAKERS, mark_of, orderly, wild
from tests.support.provider_payloads import requests
from tests.support.provider_shapes import check_request

settings.register_profile("formats", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("formats")
OWN = {
    "anthropic": {"anthropic"},
    "openai_chat": {"openai_chat", "openai"},
    "openai_responses": {"openai_responses", "openai"},
    "gemini": {"gemini", "google"},
}


UNSUPPORTED = {"anthropic": [], "openai_chat": ["is_error"], "openai_responses": ["is_error"], "gemini": ["name"]}


@pytest.mark.parametrize("provider", MAKERS)
@given(messages=wild(), system=st.none() | st.just("Be brief."))
def test_the_payload_is_valid_for_any_log(provider: str, messages: list[Any], system: str | None) -> None:
    converted = to_provider(messages, provider, system=system)
    check_request(converted.payload, provider)


@pytest.mark.parametrize("provider", MAKERS)
@given(messages=wild())
def test_what_is_not_in_the_payload_is_in_the_report(provider: str, messages: list[Any]) -> None:
    converted = to_provider(messages, provider)
    sent = json.dumps(converted.payload, ensure_ascii=False)
    reported = {(note.message, note.block) for note in converted.dropped}
    for index, message in enumerate(messages):
        if (index, None) in reported or not isinstance(message, dict):
            assert (index, None) in reported
            continue
        content = message["content"]
        blocks = content if isinstance(content, list) else [text_block(content)] if isinstance(content, str) else []
        for place, block in enumerate(blocks):
            assert contains(sent, block) or (index, place) in reported, (index, place, block)


@pytest.mark.parametrize("provider", MAKERS)
@given(messages=wild())
def test_thinking_goes_only_to_the_provider_that_made_it(provider: str, messages: list[Any]) -> None:
    sent = json.dumps(to_provider(messages, provider).payload)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message["content"], list):
            continue
        mine = meta_of(message).get("provider") in OWN[provider]
        for block in message["content"]:
            if isinstance(block, dict) and block.get("type") == "thinking":
                assert mine or block["text"] not in sent


@pytest.mark.parametrize("provider", MAKERS)
@given(data=st.data())
def test_a_providers_own_request_comes_back_as_it_was(provider: str, data: st.DataObject) -> None:
    payload = data.draw(requests(provider))
    check_request(payload, provider)
    kept = orjson.loads(orjson.dumps(from_provider(payload, provider)))
    converted = to_provider(kept, provider)
    assert converted.payload == payload
    assert not converted.dropped
    assert not converted.changed


@pytest.mark.parametrize("provider", MAKERS)
@given(data=st.data())
def test_a_conversation_comes_back_from_every_provider(provider: str, data: st.DataObject) -> None:
    messages = data.draw(orderly(media_in_results=provider != "openai_chat"))
    converted = to_provider(messages, provider)
    check_request(converted.payload, provider)
    back = from_provider(converted.payload, provider)
    assert essence(back, provider) == essence(without_dropped(messages, converted), provider)


@pytest.mark.parametrize("provider", MAKERS)
@given(messages=orderly())
def test_an_orderly_conversation_loses_only_what_the_provider_does_not_support(
    provider: str, messages: list[ConversationMessage]
) -> None:
    lost = {note.what for note in to_provider(messages, provider).dropped}
    assert lost <= {"thinking", *UNSUPPORTED[provider]}


def contains(sent: str, block: Any) -> bool:
    mark = mark_of(block)
    if mark is None:
        return isinstance(block, dict) and block.get("type") in ("text", "tool_result")
    data = isinstance(block, dict) and mark == block.get("data")
    return mark in sent or (data and base64.b64decode(mark).decode() in sent)


def without_dropped(messages: list[ConversationMessage], converted: Converted) -> list[ConversationMessage]:
    gone = {(note.message, note.block) for note in converted.dropped if note.what == "thinking"}
    return [
        {**message, "content": [b for place, b in enumerate(message["content"]) if (index, place) not in gone]}
        for index, message in enumerate(messages)
    ]


def essence(messages: list[ConversationMessage], provider: str) -> list[tuple[str, list[Any]]]:
    """The content by role, with consecutive messages of one role joined."""
    turns: list[tuple[str, list[Any]]] = []
    for message in messages:
        blocks = [_essence_of(block, provider) for block in message["content"]]
        if turns and turns[-1][0] == message["role"]:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message["role"], blocks))
    return turns


def _essence_of(block: dict[str, Any], provider: str) -> Any:
    meta = meta_of(block)
    match block["type"]:
        case "tool_use":
            return block["id"], block["name"], block["input"], meta.get("raw_arguments") if not block["input"] else None
        case "tool_result":
            failed = block["is_error"] and not provider.startswith("openai")
            media = [_essence_of(part, provider) for part in block.get("content") or [] if part["type"] != "text"]
            return block["tool_use_id"], tool_result_text(block), failed, media
        case "thinking":
            return block["text"], meta["native"]
        case _:
            unsupported = ("meta", *UNSUPPORTED[provider])
            return {key: value for key, value in block.items() if key not in unsupported}
