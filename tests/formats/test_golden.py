"""Each golden file is one conversation and one payload, as they must be."""

import json
from pathlib import Path
from typing import Any

import pytest

from carrel.conversation.formats import Converted, from_provider, to_provider
from tests.support.provider_shapes import check_request, check_response

FOLDER = Path(__file__).parent / "golden"
FILES = sorted(FOLDER.glob("*/*.json"))
REQUEST_KEYS = ("messages", "system", "input", "instructions", "contents", "systemInstruction")


def read(file: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return case


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


def report_of(converted: Converted) -> dict[str, Any]:
    places = {
        kind: [[note.message, note.block, note.what] for note in notes]
        for kind, notes in (("dropped", converted.dropped), ("changed", converted.changed))
    }
    return {**places, "unanswered": converted.unanswered}


@pytest.mark.parametrize("file", [file for file in FILES if read(file)["direction"] == "to"], ids=name_of)
def test_a_conversation_becomes_the_golden_payload(file: Path) -> None:
    case = read(file)
    converted = to_provider(case["messages"], file.parent.name, system=case.get("system"))
    assert converted.payload == case["payload"]
    assert report_of(converted) == {key: case[key] for key in ("dropped", "changed", "unanswered")}
    check_request(converted.payload, file.parent.name)


@pytest.mark.parametrize("file", [file for file in FILES if read(file)["direction"] == "from"], ids=name_of)
def test_a_golden_payload_becomes_messages_and_goes_back(file: Path) -> None:
    case, provider = read(file), file.parent.name
    messages = from_provider(case["payload"], provider)
    assert messages == case["messages"]
    again = to_provider(messages, provider)
    assert again.payload == case["again"]
    assert report_of(again) == {key: case[key] for key in ("dropped", "changed", "unanswered")}
    check_request(again.payload, provider)
    if set(case["payload"]) <= set(REQUEST_KEYS):
        assert again.payload == case["payload"]
    else:
        check_response(case["payload"], provider)


def test_every_provider_has_golden_files_for_both_ways() -> None:
    ways = {(file.parent.name, read(file)["direction"]) for file in FILES}
    providers = ("anthropic", "openai_chat", "openai_responses", "gemini")
    assert ways == {(provider, way) for provider in providers for way in ("to", "from")}


@pytest.mark.parametrize("file", [file for file in FILES if file.stem == "response"], ids=name_of)
def test_a_response_of_the_sdk_is_read_like_its_json(file: Path) -> None:
    payload, provider = read(file)["payload"], file.parent.name
    from_object = from_provider(check_response(payload, provider), provider)
    [ours], [expected] = from_object, from_provider(payload, provider)
    assert ours["content"] == expected["content"]
    assert {key: value for key, value in ours["meta"].items() if key != "native"} == {
        key: value for key, value in expected["meta"].items() if key != "native"
    }
