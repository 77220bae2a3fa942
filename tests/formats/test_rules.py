"""Rules of each provider and conventions of other programs that write the log, case by case."""

import copy
import json
import subprocess
import sys
from typing import Any

import pytest

from carrel.conversation.formats import PROVIDERS, from_provider, normalize_usage, to_provider
from carrel.conversation.formats.openai_chat import message_to_chat
from carrel.conversation.messages import (
    assistant_message,
    build_message,
    image_block,
    text_block,
    thinking_block,
    tool_result_block,
    tool_use_block,
    user_text_message,
)
from carrel.errors import FormatRefused
from tests.support.provider_shapes import check_request

PNG = image_block("iVBORw0KGgo=", mime_type="image/png")


def call(id_: str, name: str = "run", **fields: Any) -> dict[str, Any]:
    return tool_use_block(tool_id=id_, name=name, **fields)


def result(id_: str, text: str = "ok", **fields: Any) -> dict[str, Any]:
    return tool_result_block(tool_use_id=id_, model_text=text, **fields)


def made_by(maker: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return assistant_message(list(blocks), provider=maker)


def sent(messages: list[Any], provider: str) -> Any:
    payload = to_provider(messages, provider).payload
    check_request(payload, provider)
    return payload[{"openai_responses": "input", "gemini": "contents"}.get(provider, "messages")]


# --- one message on its own ------------------------------------------------------------------------------------------


def test_one_message_with_results_is_a_tool_message_each_and_then_its_words() -> None:
    message = build_message("user", [text_block("see"), result("a"), result("b", content=[text_block("ok"), PNG])])
    roles = [wire["role"] for wire in message_to_chat(message)]
    assert roles == ["tool", "tool", "user", "user"]
    assert message_to_chat(message)[0] == {"role": "tool", "tool_call_id": "a", "content": "ok"}


def test_one_message_with_calls_keeps_them_without_results() -> None:
    [wire] = message_to_chat(made_by("anthropic", text_block("I look."), call("a", input={"path": "ü"})))
    assert wire["content"] == "I look."
    assert wire["tool_calls"][0]["function"] == {"name": "run", "arguments": '{"path":"ü"}'}


def test_a_call_and_its_result_have_one_id_also_when_converted_apart() -> None:
    long = "call_" + "x" * 80
    [call_message] = message_to_chat(made_by("gemini", call(long)))
    [answered] = message_to_chat(build_message("user", [result(long)]))
    assert call_message["tool_calls"][0]["id"] == answered["tool_call_id"]
    assert len(answered["tool_call_id"]) <= 40


# --- calls and results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_id_used_again_in_a_later_turn_is_distinct(provider: str) -> None:
    messages = [
        user_text_message("go"),
        made_by("gemini", call("tool_call_0", "first")),
        build_message("user", [result("tool_call_0", "one")]),
        made_by("gemini", call("tool_call_0", "second")),
        build_message("user", [result("tool_call_0", "two")]),
    ]
    converted = to_provider(messages, provider)
    check_request(converted.payload, provider)
    assert not converted.dropped
    assert [note.what for note in converted.changed if note.what == "id"] == ["id"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_calls_made_side_by_side_stay_together_where_a_log_has_a_line_for_each(provider: str) -> None:
    messages = [
        user_text_message("go"),
        made_by("anthropic", text_block("both")),
        made_by("anthropic", call("a")),
        made_by("anthropic", call("b")),
        build_message("user", [result("a")]),
        build_message("user", [result("b")]),
        user_text_message("and?"),
    ]
    converted = to_provider(messages, provider)
    check_request(converted.payload, provider)
    assert not converted.dropped
    assert [note.what for note in converted.changed if note.what != "signature"] == []
    if provider == "anthropic":
        turns = [[block["type"] for block in turn["content"]] for turn in converted.payload["messages"]]
        assert turns == [["text"], ["text", "tool_use", "tool_use"], ["tool_result", "tool_result", "text"]]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_of_two_results_for_one_call_the_first_is_sent_and_the_other_reported(provider: str) -> None:
    messages = [user_text_message("go"), made_by("anthropic", call("a")), build_message("user", [result("a", "1")] * 2)]
    converted = to_provider(messages, provider)
    check_request(converted.payload, provider)
    assert [(note.message, note.block, note.what) for note in converted.dropped] == [(2, 1, "tool_result")]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_result_belongs_to_the_newest_call_of_its_id(provider: str) -> None:
    messages = [
        user_text_message("go"),
        made_by("anthropic", text_block("one"), call("a", "old")),
        user_text_message("never mind"),
        made_by("anthropic", call("a", "new")),
        build_message("user", [result("a")]),
    ]
    converted = to_provider(messages, provider)
    check_request(converted.payload, provider)
    assert [(note.message, note.block, note.what) for note in converted.dropped] == [(1, 1, "tool_use")]
    assert '"old"' not in json.dumps(converted.payload)


def test_what_the_model_reads_of_a_result_is_its_model_text() -> None:
    block = result("a", "short", display_text="long for people", content=[text_block("something else"), PNG])
    messages = [user_text_message("go"), made_by("anthropic", call("a")), build_message("user", [block])]
    content = sent(messages, "anthropic")[-1]["content"][0]["content"]
    assert [part.get("text", part["type"]) for part in content] == ["short", "image"]


def test_older_lines_with_plain_content_are_read() -> None:
    old = {"type": "tool_result", "tool_use_id": "a", "content": "plain"}
    messages = [user_text_message("go"), made_by("anthropic", call("a")), build_message("user", [old])]
    assert sent(messages, "openai_chat")[-1]["content"] == "plain"
    assert sent(messages, "anthropic")[-1]["content"][0]["content"] == "plain"


def test_anthropic_gets_the_image_of_a_failed_result_after_the_results() -> None:
    failed = result("a", "boom", is_error=True, content=[text_block("boom"), PNG])
    messages = [
        user_text_message("go"),
        made_by("anthropic", call("a"), call("b")),
        build_message("user", [failed, result("b"), text_block("hm")]),
    ]
    kinds = [block["type"] for block in sent(messages, "anthropic")[-1]["content"]]
    assert kinds == ["tool_result", "tool_result", "image", "text"]


@pytest.mark.parametrize("raw", ["{bad", "[1]", '"text"', "NaN", '{"n":NaN}'])
def test_arguments_that_are_no_object_survive_every_provider(raw: str) -> None:
    wire = {"id": "c", "type": "function", "function": {"name": "run", "arguments": raw}}
    messages = [
        user_text_message("go"),
        *from_provider([{"role": "assistant", "content": None, "tool_calls": [wire]}], "openai_chat"),
    ]
    for provider in PROVIDERS:
        messages = [messages[0], from_provider(to_provider(messages, provider).payload, provider)[-1]]
    assert sent(messages, "openai_chat")[-1]["tool_calls"][0]["function"]["arguments"] == raw


def test_arguments_keep_their_spelling_until_they_are_edited() -> None:
    block = call("c", input={"a": 1}, meta={"raw_arguments": '{ "a": 1 }'})
    assert message_to_chat(made_by("openai_chat", block))[0]["tool_calls"][0]["function"]["arguments"] == '{ "a": 1 }'
    block["input"] = {"a": 2}
    assert message_to_chat(made_by("openai_chat", block))[0]["tool_calls"][0]["function"]["arguments"] == '{"a":2}'


# --- thinking --------------------------------------------------------------------------------------------------------


def test_reasoning_goes_back_to_the_field_it_came_from() -> None:
    wire = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    [message] = from_provider(wire, "openai_chat")
    assert message["content"][0]["type"] == "thinking"
    assert to_provider([message], "openai_chat").payload["messages"] == [wire]


def test_reasoning_may_stand_in_a_line_of_its_own_before_its_item() -> None:
    thought = thinking_block("hm", meta={"native": {"id": "rs_1", "encrypted_content": "x"}})
    messages = [
        user_text_message("go"),
        made_by("openai_responses", thought),
        made_by("openai_responses", call("a")),
        build_message("user", [result("a")]),
    ]
    kinds = [item["type"] for item in sent(messages, "openai_responses")]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]


def test_without_its_reasoning_an_item_of_openai_goes_without_its_id() -> None:
    native = {"provider": "openai_responses", "native": {"id": "fc_1", "status": "completed"}}
    lost = thinking_block("no id was kept")
    messages = [
        user_text_message("go"),
        made_by("openai_responses", lost, call("a", meta=native)),
        build_message("user", [result("a")]),
    ]
    converted = to_provider(messages, "openai_responses")
    assert "id" not in converted.payload["input"][1]
    assert [note.what for note in converted.dropped] == ["thinking"]


def test_reasoning_that_led_to_nothing_stays_behind() -> None:
    thought = thinking_block("hm", meta={"native": {"id": "rs_1"}})
    messages = [user_text_message("go"), made_by("openai_responses", thought), user_text_message("hello?")]
    converted = to_provider(messages, "openai_responses")
    assert [item["role"] for item in converted.payload["input"]] == ["user", "user"]
    assert [note.what for note in converted.dropped] == ["thinking"]


def test_thinking_that_anthropic_never_signed_stays_behind() -> None:
    messages = [user_text_message("go"), made_by("anthropic", thinking_block("hm"), text_block("yes"))]
    converted = to_provider(messages, "anthropic")
    assert [block["type"] for block in converted.payload["messages"][1]["content"]] == ["text"]
    assert [note.what for note in converted.dropped] == ["thinking"]


def test_what_other_writers_of_the_log_keep_of_thinking_goes_back_too() -> None:
    whole = {"type": "thinking", "thinking": "hm", "signature": "s"}
    claude = thinking_block("hm", meta={"native": {"anthropic_block": whole}})
    assert (
        sent([user_text_message("go"), made_by("anthropic", claude, text_block("a"))], "anthropic")[1]["content"][0]
        == whole
    )

    part = {"function_call": {"name": "run", "args": {}}, "thought_signature": "c2ln"}
    google = call("tool_call_0", meta={"native": {"part": part}})
    call_message = [user_text_message("go"), made_by("google", google), build_message("user", [result("tool_call_0")])]
    assert sent(call_message, "gemini")[1]["parts"][0]["thoughtSignature"] == "c2ln"

    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "status": "completed"}
    openai = made_by("openai", thinking_block("", meta={"native": {"item_id": "rs_1"}}), text_block("a"))
    openai["meta"]["native"] = {"output_items": [item]}
    assert sent([user_text_message("go"), openai], "openai_responses")[1] == {
        key: value for key, value in item.items() if key != "status"
    }


def test_gemini_gets_a_placeholder_signature_for_foreign_calls_and_keeps_its_own() -> None:
    signed = call("b", meta={"provider": "gemini", "native": {"thoughtSignature": "c2ln"}})
    messages = [
        user_text_message("go"),
        made_by("anthropic", call("a"), call("a2")),
        build_message("user", [result("a"), result("a2")]),
        made_by("gemini", signed),
        build_message("user", [result("b")]),
    ]
    contents = sent(messages, "gemini")
    signatures = [part.get("thoughtSignature") for content in (contents[1], contents[3]) for part in content["parts"]]
    assert signatures == ["skip_thought_signature_validator", None, "c2ln"]


# --- system ----------------------------------------------------------------------------------------------------------


def test_a_system_message_goes_to_each_providers_place() -> None:
    messages = [build_message("system", [text_block("Be brief.")]), user_text_message("hi")]
    assert to_provider(messages, "anthropic").payload["system"] == [{"type": "text", "text": "Be brief."}]
    assert to_provider(messages, "openai_chat").payload["messages"][0] == {"role": "system", "content": "Be brief."}
    assert to_provider(messages, "openai_responses").payload["instructions"] == "Be brief."
    assert to_provider(messages, "gemini").payload["systemInstruction"] == {"parts": [{"text": "Be brief."}]}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_system_prompt_given_apart_comes_first(provider: str) -> None:
    messages = [build_message("system", [text_block("second")]), user_text_message("hi")]
    text = json.dumps(to_provider(messages, provider, system="the first").payload)
    alone = to_provider(messages[1:], provider, system="the first")
    check_request(alone.payload, provider)
    assert "the first" in text
    assert "second" in text
    assert "the first" in json.dumps(alone.payload)


# --- images and documents --------------------------------------------------------------------------------------------


def test_an_image_of_a_kind_that_a_provider_refuses_stays_behind() -> None:
    refused = {"image/gif": {"gemini"}, "image/svg+xml": set(PROVIDERS), "image/heic": set(PROVIDERS) - {"gemini"}}
    for kind, by in refused.items():
        messages = [build_message("user", [text_block("see"), image_block("aGk=", mime_type=kind)])]
        for provider in PROVIDERS:
            sent(messages, provider)
            dropped = [note.what for note in to_provider(messages, provider).dropped]
            assert dropped == (["image"] if provider in by else [])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_odd_base64_is_normalized_and_other_data_is_dropped(provider: str) -> None:
    wrapped = image_block("-_8\n", mime_type="image/jpg")
    messages = [build_message("user", [text_block("see"), wrapped])]
    assert sent(messages, provider) == sent(
        [build_message("user", [text_block("see"), image_block("+/8=", mime_type="image/jpeg")])], provider
    )
    broken = to_provider([build_message("user", [image_block("!", mime_type="image/png"), text_block("x")])], provider)
    assert [note.what for note in broken.dropped] == ["image"]


def test_documents_that_are_text_by_another_name_are_sent_as_text() -> None:
    document = {"type": "document", "data": "e30=", "mime_type": "application/json"}
    messages = [build_message("user", [document])]
    assert sent(messages, "anthropic")[0]["content"][0]["source"]["data"] == "{}"
    assert sent(messages, "gemini")[0]["parts"][0]["inlineData"]["mimeType"] == "text/plain"
    assert sent(messages, "openai_responses")[0]["content"][0]["filename"] == "document.txt"
    assert sent(messages, "openai_chat")[0]["content"][0]["file"]["filename"] == "document.txt"


# --- the rest --------------------------------------------------------------------------------------------------------


def test_usage_has_one_meaning_for_all() -> None:
    names = ["input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens"]
    counts = {
        "anthropic": {
            "input_tokens": 10,
            "cache_read_input_tokens": 60,
            "cache_creation_input_tokens": 30,
            "output_tokens": 50,
            "output_tokens_details": {"thinking_tokens": 20},
        },
        "openai_chat": {
            "prompt_tokens": 100,
            "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
            "completion_tokens": 50,
            "completion_tokens_details": {"reasoning_tokens": 20},
        },
        "openai_responses": {
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
            "output_tokens": 50,
            "output_tokens_details": {"reasoning_tokens": 20},
        },
    }
    for provider, usage in counts.items():
        count = normalize_usage(usage, provider)
        assert [count[name] for name in names] == [100, 50, 60, 30, 20]
        assert count["total_tokens"] == 150
    google = {"promptTokenCount": 90, "toolUsePromptTokenCount": 10, "cachedContentTokenCount": 60}
    count = normalize_usage(google | {"candidates_token_count": 30, "thoughtsTokenCount": 20}, "gemini")
    assert [count[name] for name in names] == [100, 50, 60, 0, 20]


def test_a_document_with_only_an_address_cannot_go_to_a_chat_completion() -> None:
    document = {"type": "document", "url": "https://example.org/a.pdf"}
    converted = to_provider([build_message("user", [text_block("read"), document])], "openai_chat")
    assert [note.what for note in converted.dropped] == ["document"]
    for provider in ("anthropic", "openai_responses", "gemini"):
        assert not to_provider([build_message("user", [document])], provider).dropped


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_address_that_holds_the_data_itself_is_taken_as_data(provider: str) -> None:
    inline = {"type": "image", "url": "data:image/png;base64,iVBORw0KGgo="}
    assert sent([build_message("user", [inline])], provider) == sent([build_message("user", [PNG])], provider)


def test_how_closely_to_look_at_an_image_is_for_openai_alone() -> None:
    messages = [build_message("user", [{**PNG, "meta": {"detail": "high"}}])]
    assert sent(messages, "openai_chat")[0]["content"][0]["image_url"]["detail"] == "high"
    assert sent(messages, "openai_responses")[0]["content"][0]["detail"] == "high"
    for provider in ("anthropic", "gemini"):
        assert [note.what for note in to_provider(messages, provider).dropped] == ["detail"]


def test_gemini_joins_the_texts_of_a_result_and_says_so() -> None:
    answer = result("a", "1\n2", content=[text_block("1"), text_block("2")])
    messages = [user_text_message("go"), made_by("gemini", call("a")), build_message("user", [answer])]
    assert sent(messages, "gemini")[-1]["parts"][0]["functionResponse"]["response"] == {"output": "1\n2"}
    assert [note.what for note in to_provider(messages, "gemini").changed] == ["tool_result"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_one_provider_alone_understands_is_not_sent_to_another(provider: str) -> None:
    for maker in PROVIDERS:
        block = {"type": "native", "provider": maker, "value": {"type": "mystery", "secret": "xyzzy"}}
        converted = to_provider([user_text_message("hi"), made_by(maker, block, text_block("a"))], provider)
        there = "xyzzy" in json.dumps(converted.payload)
        assert there == (maker == provider and provider != "openai_chat")
        assert there != bool([note for note in converted.dropped if note.block == 0])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_empty_conversation_is_an_empty_payload(provider: str) -> None:
    converted = to_provider([], provider)
    assert list(converted.payload.values()) == [[]]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_conversation_itself_is_never_edited(provider: str) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    messages = [build_message("system", [text_block("s", meta=hint)])]
    for number in range(6):
        messages.append(build_message("user", [text_block(f"q{number}", meta=hint)]))
        messages.append(made_by(provider, text_block("a "), call(f"c{number}", meta=hint)))
        messages.append(build_message("user", [result(f"c{number}", content=[text_block("ok"), PNG])]))
    before = copy.deepcopy(messages)
    to_provider(messages, provider)
    assert messages == before


@pytest.mark.parametrize("payload", [None, "text", 7, {"choices": 3}, [1], [{"role": "tool"}], {"messages": 5}])
def test_a_payload_of_another_shape_is_refused(payload: Any) -> None:
    with pytest.raises(FormatRefused, match="openai_chat"):
        from_provider(payload, "openai_chat")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("payload", [{}, [{}]])
def test_an_empty_object_is_refused(payload: Any, provider: str) -> None:
    with pytest.raises(FormatRefused, match=f"not a valid {provider} request or response"):
        from_provider(payload, provider)


def test_a_message_without_a_role_is_refused() -> None:
    with pytest.raises(FormatRefused, match="has no role"):
        from_provider({"error": {"type": "overloaded_error"}, "type": "error"}, "anthropic")


def test_an_unknown_provider_is_refused_by_name() -> None:
    with pytest.raises(FormatRefused, match="unknown provider 'acme'; known providers are anthropic, openai_chat"):
        to_provider([], "acme")
    with pytest.raises(FormatRefused, match="acme"):
        from_provider({}, "acme")


def test_aliases_of_providers_are_understood() -> None:
    messages = [user_text_message("hi")]
    for name, provider in (("openai", "openai_chat"), ("claude", "anthropic"), ("google", "gemini")):
        assert to_provider(messages, name) == to_provider(messages, provider)


def test_the_formats_need_no_sdk_of_any_provider() -> None:
    code = (
        "import sys, carrel.conversation.formats;"
        "print([name for name in ('anthropic', 'openai', 'google.genai') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_lone_surrogate_is_replaced_and_reported(provider: str) -> None:
    messages = [
        user_text_message("go"),
        made_by("anthropic", call("a", input={"path\udc80": ["x\ud800"]})),
        build_message("user", [result("a", "found\udcff")]),
    ]
    json.dumps(sent(messages, provider), ensure_ascii=False).encode()
    changed = {note[:3] for note in to_provider(messages, provider).changed}
    assert {(1, 0, "text"), (2, 0, "text")} <= changed


def test_a_text_that_only_carries_another_providers_signature_is_dropped() -> None:
    answer = {"candidates": [{"content": {"role": "model", "parts": [{"text": "", "thoughtSignature": "c2ln"}]}}]}
    messages = [user_text_message("go"), *from_provider(answer, "gemini"), user_text_message("and?")]
    assert [message["role"] for message in sent(messages, "openai_chat")] == ["user", "user"]
    assert sent(messages, "gemini")[1]["parts"] == [{"text": "", "thoughtSignature": "c2ln"}]


def test_a_tool_of_openai_that_was_never_run_stays_behind() -> None:
    call_message = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}
    answer = {"type": "shell_call_output", "call_id": "c", "output": []}
    native = [{"type": "native", "provider": "openai_responses", "value": value} for value in (call_message, answer)]
    head = [user_text_message("go"), made_by("openai_responses", native[0])]
    assert to_provider(head, "openai_responses").unanswered == ["c"]
    assert sent([*head, build_message("user", [native[1]])], "openai_responses")[1:] == [call_message, answer]
    assert len(sent([*head, user_text_message("no")], "openai_responses")) == 2
    assert len(sent([user_text_message("go"), build_message("user", [native[1]])], "openai_responses")) == 1


def test_a_search_of_anthropic_that_never_ended_stays_behind() -> None:
    def native(**value: Any) -> dict[str, Any]:
        return {"type": "native", "provider": "anthropic", "value": value}

    search = native(type="server_tool_use", id="srvtoolu_1", name="web_search", input={})
    found = native(type="web_search_tool_result", tool_use_id="srvtoolu_1", content=[])
    paused = [user_text_message("go"), made_by("anthropic", text_block("I look."), search)]
    assert len(sent(paused, "anthropic")[1]["content"]) == 2
    assert len(sent([*paused, user_text_message("no")], "anthropic")[1]["content"]) == 1
    went_on = [*paused, made_by("anthropic", found, text_block("Here.")), user_text_message("thanks")]
    assert len(sent(went_on, "anthropic")[1]["content"]) == 4
    orphan = to_provider([user_text_message("go"), made_by("anthropic", found, text_block("Here."))], "anthropic")
    assert [(note.message, note.block, note.what) for note in orphan.dropped] == [(1, 0, "native")]
    # A program of Anthropic's waits while the calls that it made are answered.
    program = [user_text_message("go"), made_by("anthropic", search, call("a")), build_message("user", [result("a")])]
    assert len(sent(program, "anthropic")[1]["content"]) == 2


def test_something_of_anthropics_without_a_type_is_sent_as_it_is() -> None:
    odd = {"type": "native", "provider": "anthropic", "value": {"x": 1}}
    converted = to_provider([user_text_message("go"), made_by("anthropic", odd)], "anthropic")
    assert converted.payload["messages"][1]["content"] == [{"x": 1}]
