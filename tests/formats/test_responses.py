"""Responses of the SDKs, in any dump of them, are kept and can be sent back to the same provider."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from carrel.conversation.formats import from_provider, to_provider
from carrel.conversation.messages import build_message, tool_result_block, user_text_message
from carrel.errors import FormatRefused
from tests.support.provider_shapes import anthropic, chat, google, responses
from tests.support.sdk_values import instance, kinds
from tests.support.strict_types import strict

DUMPS: dict[str, dict[str, Any]] = {
    "python": {},
    "json": {"mode": "json"},
    "unset": {"exclude_unset": True},
    "alias": {"by_alias": True},
    "none": {"mode": "json", "exclude_none": True},
}
CANNOT_BE_REPEATED = {
    # The types of the request take fewer values, or fewer fields, than those of the answer.
    "AdditionalTools",
    "ResponseComputerToolCallOutputItem",
    "ResponseCustomToolCallOutputItem",
    "ResponseToolSearchOutputItem",
    # An output goes only where its call is.
    "LocalShellCallOutput",
    "ResponseApplyPatchToolCallOutput",
    "ResponseFunctionShellToolCallOutput",
}


def dumps(answer: Any) -> Iterator[Any]:
    """The object itself and the usual dumps of it."""
    yield answer
    for options in DUMPS.values():
        yield answer.model_dump(warnings=False, **options)


def sent_back(answer: Any, provider: str) -> dict[str, Any]:
    """The request that follows a response; what the log keeps must be valid JSON."""
    kept = json.loads(json.dumps(from_provider(answer, provider)))
    converted = to_provider([user_text_message("q"), *kept], provider)
    assert not converted.dropped
    return converted.payload


def shapes(model: Any) -> Iterator[dict[str, Any]]:
    for choice in range(4):
        yield instance(model, full=True, choice=choice)
        yield instance(model, full=False, choice=choice)


def test_every_block_of_anthropic_comes_back() -> None:
    known = list(kinds(anthropic.ContentBlock))
    assert len(known) >= 12
    for kind in known:
        for block in shapes(kind):
            # A message with only thinking is not valid.
            content = [block, {"type": "text", "text": "x"}] if "thinking" in block["type"] else [block]
            if block["type"].endswith("_tool_result"):
                call = {"type": "server_tool_use", "id": block["tool_use_id"], "name": "web_search", "input": {}}
                content = [call, block]
            wire: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "model": "c", "content": content}
            wire |= {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
            for answer in dumps(anthropic.Message.model_validate(wire)):
                [_, echo] = sent_back(answer, "anthropic")["messages"]
                strict(list[anthropic.ContentBlockParam]).validate_python(echo["content"])
                assert [part["type"] for part in echo["content"]] == [part["type"] for part in content]


def test_every_item_of_openai_comes_back() -> None:
    known = [kind for kind in kinds(responses.ResponseOutputItem) if kind.__name__ not in CANNOT_BE_REPEATED]
    assert len(known) >= 20
    for kind in known:
        for item in shapes(kind):
            output = [item, instance(responses.ResponseOutputMessage, full=False)]
            wire = instance(responses.Response, full=False) | {"output": output}
            for answer in dumps(responses.Response.model_validate(wire)):
                echo = sent_back(answer, "openai_responses")["input"][1:]
                strict(list[responses.ResponseInputItemParam]).validate_python(echo)
                assert [each["type"] for each in echo] == [item["type"], "message"]


def test_every_message_of_a_chat_completion_comes_back() -> None:
    for wire in shapes(chat.ChatCompletion):
        completion = chat.ChatCompletion.model_validate(wire)
        for answer in [*dumps(completion), *dumps(completion.choices[0].message), [completion.choices[0].message]]:
            echo = sent_back(answer, "openai_chat")["messages"]
            strict(list[chat.ChatCompletionMessageParam]).validate_python(echo)


@pytest.mark.parametrize("field", ["text", "thought_signature", "inline_data", "file_data", "function_call"])
def test_every_part_of_gemini_comes_back(field: str) -> None:
    _part_comes_back(field)


def test_parts_of_gemini_that_are_no_block_of_ours_come_back() -> None:
    ours = ("text", "thought", "thought_signature", "inline_data", "file_data", "function_call", "function_response")
    others = [name for name in google.Part.model_fields if name not in ours]
    assert len(others) >= 8
    for name in others:
        _part_comes_back(name)


def _part_comes_back(field: str) -> None:
    name = google.Part.model_fields[field].alias or field
    wire: dict[str, Any] = {name: instance(google.Part, full=True)[name]}
    if field in ("thought_signature", "video_metadata", "media_resolution", "part_metadata"):
        wire["text"] = "x"
    if field == "inline_data":
        wire["inlineData"] = {"mimeType": "image/png", "data": "-_8="}
    content = {"role": "model", "parts": [wire, {"text": "after"}]}
    given = {"candidates": [{"content": content, "finishReason": "STOP"}], "modelVersion": "g", "responseId": "r"}
    response = google.GenerateContentResponse.model_validate_json(json.dumps(given))
    expected = response.candidates[0].content
    for answer in [*dumps(response), *dumps(expected), [expected]]:
        echo = sent_back(answer, "gemini")["contents"][1]
        assert google.Content.model_validate_json(json.dumps(echo)) == expected
        assert "_" not in "".join(echo["parts"][0])


def test_sdk_objects_inside_lists_are_read() -> None:
    """As in the guides of the providers: a response is appended to the next request."""
    block = anthropic.TextBlock(type="text", text="4")
    call = anthropic.ToolUseBlock(type="tool_use", id="t", name="add", input={})
    wire = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": [block, call]}]
    assert [part["type"] for part in from_provider(wire, "anthropic")[1]["content"]] == ["text", "tool_use"]

    message = chat.ChatCompletionMessage(role="assistant", content="4")
    assert from_provider([{"role": "user", "content": "2+2?"}, message], "openai_chat")[1]["content"][0]["text"] == "4"

    item = responses.ResponseFunctionToolCall(type="function_call", call_id="c", name="add", arguments="{}")
    assert from_provider({"input": [item]}, "openai_responses")[0]["content"][0]["id"] == "c"

    content = google.Content(role="model", parts=[google.Part(text="4")])
    assert from_provider({"contents": [content]}, "gemini")[0]["content"][0]["text"] == "4"


def test_what_a_client_put_together_from_a_stream_is_not_sent_back() -> None:
    function = {"name": "add", "arguments": "{}", "parsed_arguments": {}}
    calls = [{"id": "c", "type": "function", "index": 0, "function": function}]
    message = {"role": "assistant", "content": "{}", "parsed": {"a": 1}, "tool_calls": calls}
    [_, echo] = sent_back({"choices": [{"message": message}], "model": "m"}, "openai_chat")["messages"]
    strict(chat.ChatCompletionAssistantMessageParam).validate_python(echo)

    text = {"type": "output_text", "text": "{}", "annotations": [], "parsed": {"a": 1}}
    output = [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}]
    [_, item] = sent_back({"object": "response", "output": output}, "openai_responses")["input"]
    strict(responses.ResponseOutputMessageParam).validate_python(item)


def test_reasoning_that_a_server_wants_to_see_again_is_sent_again() -> None:
    details = [{"type": "reasoning.encrypted", "data": "x"}]
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "2 and 2"}]}
    content = [thought, {"type": "text", "text": "4"}]
    message = {"role": "assistant", "content": content, "reasoning_details": details, "thinking_blocks": details}
    answer = {"choices": [{"message": message}], "model": "m"}
    [_, echo] = sent_back(answer, "openai_chat")["messages"]
    assert echo == message
    assert from_provider(answer, "openai_chat")[0]["content"][0]["text"] == "2 and 2"


def test_a_call_that_openai_answered_itself_is_not_ours_to_answer() -> None:
    call_item = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = [call_item, {"type": "function_call_output", "call_id": "c", "output": "4"}]
    response = {"object": "response", "output": output}
    [message] = from_provider(response, "openai_responses")
    assert [block["type"] for block in message["content"]] == ["native", "native"]
    assert sent_back(response, "openai_responses")["input"][1:] == output


def test_the_result_of_a_call_that_a_program_made_goes_back_to_the_program() -> None:
    caller = {"type": "program", "caller_id": "p"}
    call_item = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "caller": caller}
    answered = [
        *from_provider([call_item], "openai_responses"),
        build_message("user", [tool_result_block(tool_use_id="c")]),
    ]
    assert to_provider(answered, "openai_responses").payload["input"][1]["caller"] == caller


def test_a_compacted_response_is_the_messages_it_keeps() -> None:
    kept = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    item = {"type": "compaction", "id": "cmp", "encrypted_content": "x"}
    messages = from_provider({"object": "response.compaction", "output": [kept, item]}, "openai_responses")
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert to_provider(messages, "openai_responses").payload["input"] == [kept, item]


def test_audio_is_its_transcript_for_others_and_its_id_for_its_server() -> None:
    audio = {"id": "audio_1", "data": "UklGRg==", "expires_at": 1, "transcript": "Hello."}
    answer = {"choices": [{"message": {"role": "assistant", "content": None, "audio": audio}}], "model": "m"}
    [_, echo] = sent_back(answer, "openai_chat")["messages"]
    assert echo == {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    messages = [user_text_message("q"), *from_provider(answer, "openai_chat")]
    assert to_provider(messages, "gemini").payload["contents"][1]["parts"] == [{"text": "Hello."}]


def test_the_pieces_of_a_stream_of_gemini_are_one_answer() -> None:
    def piece(*parts: dict[str, Any], **more: Any) -> Any:
        wire = {"candidates": [{"content": {"role": "model", "parts": list(parts)}}], "modelVersion": "g", **more}
        return google.GenerateContentResponse.model_validate_json(json.dumps(wire))

    call = {"functionCall": {"name": "look", "args": {}}, "thoughtSignature": "c2ln"}
    stream = [
        piece({"text": "Let me ", "thought": True}),
        piece({"text": "think.", "thought": True}, {"text": "I "}),
        piece({"text": "look."}, usageMetadata={"promptTokenCount": 3, "candidatesTokenCount": 1}),
        piece(call),
        piece({"text": ""}, usageMetadata={"promptTokenCount": 3, "candidatesTokenCount": 9}),
    ]
    [message] = from_provider(stream, "gemini")
    assert [block.get("text", block["type"]) for block in message["content"]] == [
        "Let me think.",
        "I look.",
        "tool_use",
    ]
    assert message["meta"]["usage"]["output_tokens"] == 9
    assert sent_back(stream, "gemini")["contents"][1]["parts"][-1] == call


def test_the_last_event_of_a_stream_of_responses_is_the_answer() -> None:
    text = {"type": "output_text", "text": "4", "annotations": []}
    output = [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}]
    event = {"type": "response.completed", "response": {"object": "response", "output": output}}
    assert from_provider(event, "openai_responses")[0]["content"][0]["text"] == "4"


@pytest.mark.parametrize(
    ("provider", "payload"),
    [
        ("openai_chat", {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "4"}}]}),
        ("openai_responses", {"type": "response.output_text.delta", "delta": "4"}),
        ("openai_responses", {"error": {"message": "overloaded"}}),
        ("anthropic", {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "4"}}),
        ("gemini", {"error": {"code": 503}}),
        ("gemini", [{"error": {"code": 503}}]),
    ],
)
def test_a_piece_of_a_stream_or_an_error_is_no_answer(provider: str, payload: Any) -> None:
    with pytest.raises(FormatRefused):
        from_provider(payload, provider)


def test_what_a_response_repeats_is_not_kept_and_all_else_is() -> None:
    wire = {"object": "response", "id": "r", "output": [], "tools": [{"type": "x"}], "instructions": "Be brief."}
    [message] = from_provider(
        wire | {"conversation": {"id": "c"}, "something_new": 1, "error": None}, "openai_responses"
    )
    assert message["meta"]["native"] == {"conversation": {"id": "c"}, "something_new": 1}
    whole = {"candidates": [{"content": {"parts": [{"text": "x"}]}, "avgLogprobs": -1}], "modelStatus": {"a": 1}}
    [message] = from_provider(whole | {"automatic_function_calling_history": [1], "parsed": 1}, "gemini")
    assert message["meta"]["native"] == {"modelStatus": {"a": 1}, "avgLogprobs": -1}
