"""Typed messages: what they say in each provider's words, and that the log holds all of it."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from carrel.conversation.formats import from_provider
from carrel.conversation.messages import (
    ConversationMessage,
    build_message,
    document_block,
    image_block,
    text_block,
    thinking_block,
    tool_result_block,
    tool_use_block,
)
from carrel.conversation.models.conversation import Conversation
from carrel.conversation.models.info import SessionInfo
from carrel.conversation.models.message import (
    Message,
    MessageRole,
    add_usage,
    lines_to_messages,
    message_to_lines,
    provider_messages,
    subtract_usage,
    without_counting_again,
)
from carrel.conversation.models.parts import (
    ImagePart,
    MessagePart,
    OtherPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)
from carrel.errors import FormatRefused

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def read(lines: list[ConversationMessage]) -> list[Message]:
    return lines_to_messages(list(enumerate(lines, 1)), session_id="s", since=NOON)


def tool_turn() -> Message:
    message = Message(session_id="s", role="assistant", model="m", provider="openai", usage={"total_tokens": 9})
    message.add_text("Let me see.")
    message.add_tool_call("c1", "read", {"path": "a.txt"})
    message.add_tool_result("c1", "read", "a.txt", "42")
    message.add_tool_call("c2", "rm", {"path": "a.txt"})
    message.add_tool_result("c2", "rm", "a.txt", "half done", error="not allowed", metadata={"code": 1})
    message.add_text("It says 42.")
    return message


# --- what a program sees


def test_a_message_knows_its_parts() -> None:
    message = Message(session_id="s", role="user")
    message.add_text("Look")
    message.add_image("image/png", data="AAAA")
    message.add_image("image/png", url="https://example.com/a.png", detail="low")
    message.add_text("and tell")
    assert message.get_text_content() == "Look\nand tell"
    assert message.has_images()
    assert [(image.data, image.url, image.detail) for image in message.get_images()] == [
        ("AAAA", None, "auto"),
        (None, "https://example.com/a.png", "low"),
    ]
    turn = tool_turn()
    assert [(call.tool_call_id, call.tool_name, call.arguments) for call in turn.get_tool_calls()] == [
        ("c1", "read", {"path": "a.txt"}),
        ("c2", "rm", {"path": "a.txt"}),
    ]
    assert [(result.output, result.error) for result in turn.get_tool_results()] == [
        ("42", None),
        ("half done", "not allowed"),
    ]
    assert not turn.has_images()


def test_adding_gives_the_part_back_and_each_has_its_own_id() -> None:
    message = Message(session_id="s", role="assistant")
    parts = [message.add_text("a"), message.add_tool_call("c", "t"), message.add_tool_result("c", output="x")]
    assert message.parts == parts
    del message.parts[0]
    message.add_text("b")
    ids = [part.id for part in message.parts]
    assert len(set(ids)) == 3


def test_arguments_may_be_the_text_a_model_gives() -> None:
    message = Message(session_id="s", role="assistant")
    assert message.add_tool_call("c", "t", '{"a": 1}').arguments == {"a": 1}
    assert message.add_tool_call("c", "t", "").arguments == {}
    with pytest.raises(ValidationError, match="arguments"):
        message.add_tool_call("c", "t", "not JSON")


def test_a_text_part_may_be_given_text_or_content() -> None:
    assert TextPart(text="hi").content == "hi"
    assert TextPart(content="hi").text == "hi"


def test_a_role_of_another_kind_is_refused() -> None:
    assert Message(session_id="s", role=MessageRole.ASSISTANT).role == "assistant"
    for role in ("", "tool", "developer", "compact", "rewind", "unreadable"):
        with pytest.raises(ValidationError, match="invalid message role"):
            Message(session_id="s", role=role)


def test_required_fields_are_required() -> None:
    with pytest.raises(ValidationError, match="session_id"):
        Message(role="user")  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="media_type"):
        ImagePart(data="AAAA")  # type: ignore[call-arg]
    for folders in ({}, {"project_dir": "a"}, {"working_dir": "a"}):
        with pytest.raises(ValidationError, match="_dir"):
            SessionInfo(**folders)
    schema = Message.model_json_schema()
    assert set(schema["required"]) == {"session_id", "role"}
    assert schema["properties"]["role"]["enum"] == ["user", "assistant", "system"]
    assert set(SessionInfo.model_json_schema()["required"]) == {"project_dir", "working_dir"}


async def test_a_message_of_no_conversation_can_be_awaited_too() -> None:
    message = Message(session_id="s", role="user")
    assert await message is message


def test_json_and_back_is_the_same_message() -> None:
    message = tool_turn()
    message.parts.append(ThinkingPart(content="hm"))
    message.parts.append(OtherPart(type="document", block={"data": "AAAA", "mime_type": "application/pdf"}))
    message.add_image("image/png", url="https://example.com/a.png")
    assert Message.model_validate_json(message.model_dump_json()) == message
    assert Message.model_validate(message.model_dump()) == message
    assert Message.model_validate(message.model_dump(mode="json")) == message


def test_an_unknown_part_keeps_what_it_has() -> None:
    message = Message.model_validate(
        {"session_id": "s", "role": "user", "parts": [{"type": "sketch", "strokes": [1, 2]}]}
    )
    assert message.parts == [OtherPart(id=message.parts[0].id, type="sketch", block={"strokes": [1, 2]})]
    assert message_to_lines(message)[0]["content"][0]["strokes"] == [1, 2]


def test_the_schema_names_every_part() -> None:
    schema = Message.model_json_schema()
    assert set(schema["$defs"]) == {
        "TextPart",
        "ThinkingPart",
        "ImagePart",
        "ToolCallPart",
        "ToolResultPart",
        "OtherPart",
    }
    assert schema["properties"]["created_at"]["format"] == "date-time"


# --- in each provider's words


def test_a_user_message_for_openai_is_plain_text_or_parts() -> None:
    message = Message(session_id="s", role="user")
    message.add_text("Look")
    assert message.to_llm_format() == {"role": "user", "content": "Look"}
    message.add_image("image/png", data="AAAA", detail="high")
    assert message.to_llm_format("openai") == {
        "role": "user",
        "content": [
            {"type": "text", "text": "Look"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "high"}},
        ],
    }


def test_texts_are_joined_and_images_have_their_detail_for_openai() -> None:
    for role in ("user", "assistant", "system"):
        message = Message(session_id="s", role=role)
        message.add_text("one")
        message.add_text("two")
        assert message.to_llm_format() == {"role": role, "content": "one\ntwo"}
    message = Message(session_id="s", role="user")
    message.add_image("image/png", url="https://example.com/a.png")
    message.add_text("one")
    message.add_image("image/png", data="AAAA", detail="low")
    message.add_text("two")
    images = [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
    ]
    whole = {"role": "user", "content": [{"type": "text", "text": "one\ntwo"}, *images]}
    assert message.to_llm_format() == whole
    conversation = Conversation(info=SessionInfo(project_dir="p", working_dir="p"), messages=[message])
    assert conversation.get_messages_for_llm() == [whole]
    message.parts = [*message.get_images()]
    assert conversation.get_messages_for_llm() == [{"role": "user", "content": images}]


def test_a_request_has_every_message_and_no_call_without_its_result() -> None:
    conversation = Conversation(info=SessionInfo(project_dir="p", working_dir="p"))
    conversation.create_user_message("")
    answer = conversation.create_assistant_message()
    answer.add_tool_call("c1", "read", {"path": "a"})
    answer.add_tool_result("c1", "read", "a", "text of a")
    conversation.create_assistant_message().add_tool_call("c2", "read", {"path": "b"})
    conversation.create_user_message("And?")
    conversation.create_assistant_message()
    function = {"name": "read", "arguments": '{"path":"a"}'}
    assert conversation.get_messages_for_llm() == [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "text of a"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": ""},
    ]


def test_a_call_for_openai_has_its_arguments_as_json() -> None:
    message = Message(session_id="s", role="assistant")
    message.add_tool_call("c1", "read", {"path": 'it\'s "a"', "deep": {"n": [1, None, True]}})
    wire = message.to_llm_format()
    assert isinstance(wire, dict)
    call = wire["tool_calls"][0]
    assert (call["id"], call["type"], call["function"]["name"]) == ("c1", "function", "read")
    assert json.loads(call["function"]["arguments"]) == {"path": 'it\'s "a"', "deep": {"n": [1, None, True]}}


def test_results_follow_their_calls_for_openai() -> None:
    wires = tool_turn().to_llm_format()
    assert isinstance(wires, list)
    assert [wire["role"] for wire in wires] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert wires[1] == {"role": "tool", "tool_call_id": "c1", "content": "42"}
    assert wires[3] == {"role": "tool", "tool_call_id": "c2", "content": "Error: not allowed\nhalf done"}
    lone = Message(session_id="s", role="user")
    lone.add_tool_result("c1", "read", "a.txt", "42")
    assert lone.to_llm_format() == {"role": "tool", "tool_call_id": "c1", "content": "42"}


def test_a_system_and_an_empty_message_for_openai() -> None:
    message = Message(session_id="s", role="system")
    message.add_text("Be kind.")
    assert message.to_llm_format() == {"role": "system", "content": "Be kind."}
    assert Message(session_id="s", role="assistant").to_llm_format() == {"role": "assistant", "content": ""}


def test_a_turn_in_the_words_of_the_other_providers() -> None:
    turn = tool_turn()
    anthropic: Any = turn.to_llm_format("anthropic")
    assert [wire["role"] for wire in anthropic] == ["assistant", "user", "assistant", "user", "assistant"]
    assert anthropic[0]["content"][1] == {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a.txt"}}
    assert anthropic[1]["content"][0]["tool_use_id"] == "c1"
    responses: Any = turn.to_llm_format("openai-responses")
    assert [item["type"] for item in responses] == [
        "message",
        "function_call",
        "function_call_output",
        "function_call",
        "function_call_output",
        "message",
    ]
    gemini: Any = turn.to_llm_format("gemini")
    assert [wire["role"] for wire in gemini] == ["model", "user", "model", "user", "model"]
    assert gemini[1]["parts"][0]["functionResponse"]["name"] == "read"


def test_what_the_system_says_in_the_words_of_each_provider() -> None:
    system = Message(session_id="s", role="system")
    system.add_text("Be brief.")
    assert system.to_llm_format() == {"role": "system", "content": "Be brief."}
    item = {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]}
    assert system.to_llm_format("openai-responses") == item
    with pytest.raises(FormatRefused, match="systemInstruction"):
        system.to_llm_format("gemini")


def test_a_request_of_one_plain_text_is_a_list_too() -> None:
    lines = from_provider({"instructions": "Be brief.", "input": "hi"}, "openai_responses")
    assert [item["role"] for item in provider_messages(lines, "openai-responses")] == ["system", "user"]
    assert provider_messages(lines[1:], "openai-responses") == [{"type": "message", "role": "user", "content": "hi"}]


@pytest.mark.parametrize("provider", ["anthropic", "openai-responses", "gemini"])
def test_a_lone_result_and_a_lone_answer_bring_nothing_made_up_with_them(provider: str) -> None:
    result = Message(session_id="s", role="user")
    result.add_tool_result("c1", "read", "a.txt", "forty-two")
    assert "forty-two" in json.dumps(result.to_llm_format(provider))
    assert "…" not in json.dumps(result.to_llm_format(provider), ensure_ascii=False)
    answer = Message(session_id="s", role="assistant")
    answer.add_text("hello")
    wire = json.dumps(answer.to_llm_format(provider), ensure_ascii=False)
    assert "hello" in wire
    assert "…" not in wire
    assert "begins with" not in wire


def test_an_unknown_provider_is_a_clear_error() -> None:
    message = Message(session_id="s", role="user")
    message.add_text("hi")
    with pytest.raises(FormatRefused, match="smoke signals"):
        message.to_llm_format("smoke signals")


# --- the lines of the log


def test_a_message_with_calls_and_results_takes_lines_that_every_reader_of_the_log_understands() -> None:
    lines = message_to_lines(tool_turn())
    assert [line["role"] for line in lines] == ["assistant", "user", "assistant", "user", "assistant"]
    assert [block["type"] for block in lines[0]["content"]] == ["text", "tool_use"]
    assert lines[1]["content"][0]["model_text"] == "42"
    assert lines[3]["content"][0]["is_error"] is True
    assert {line["meta"]["id"] for line in lines} == {lines[0]["meta"]["id"]}
    assert [line["meta"].get("usage") for line in lines] == [{"total_tokens": 9}, None, None, None, None]


def test_the_lines_give_the_same_message_again() -> None:
    message = tool_turn()
    message.meta["mood"] = "fine"
    message.extra["sent"] = True
    assert read(message_to_lines(message)) == [message]


def test_results_alone_of_an_assistant_come_back_as_the_assistants() -> None:
    message = Message(session_id="s", role="assistant")
    message.add_tool_result("c1", "t", "T", "x")
    assert message_to_lines(message)[0]["role"] == "user"
    assert read(message_to_lines(message)) == [message]


def test_lines_cut_in_the_middle_of_a_message_are_still_read() -> None:
    lines = message_to_lines(tool_turn())
    assert len(read(lines[:2])) == 1
    rest = read(lines[1:])
    assert [part.type for message in rest for part in message.parts] == [
        "tool_result",
        "tool_call",
        "tool_result",
        "text",
    ]


FOREIGN: list[ConversationMessage] = [
    {"role": "user", "content": "plain words"},
    {"role": "user", "content": [], "meta": {}},
    {"role": "user"},
    {"role": "assistant", "content": None, "meta": None, "timestamp": 17},
    {"role": "tool", "content": [{"type": "text", "text": "an old role"}]},
    {"content": [{"type": "text", "text": "no role"}]},
    {"role": 7, "content": 7, "meta": 7},
    build_message("user", [text_block("hi", meta={"cache_control": {"type": "ephemeral"}}), {"text": "no type"}]),
    build_message("user", [{"type": "text"}, {"type": "text", "text": None}, {"type": "text", "text": "x", "more": 1}]),
    build_message("user", [{"type": "tool_call", "x": 1}, {"type": "other", "y": 2}, "bare", 5, None]),  # type: ignore[list-item]
    build_message("user", [image_block("AAAA", mime_type="image/png", name="a.png", meta={"detail": "low", "id": 3})]),
    build_message("user", [document_block("AAAA", mime_type="application/pdf"), {"type": "image", "data": 5}]),
    build_message(
        "assistant", [thinking_block("hm", meta={"native": {"signature": "x"}}), text_block("so", meta={"id": "p"})]
    ),
    build_message(
        "assistant", [tool_use_block(tool_id="c", name="t", input={"a": [1]}), {"type": "tool_use", "id": "c"}]
    ),
    build_message(
        "user", [tool_result_block(tool_use_id="c", model_text="a", display_text="b", content=[text_block("a")])]
    ),
    build_message(
        "user", [tool_result_block(tool_use_id="c", model_text="Error: x\ny", is_error=True, meta={"error": "z"})]
    ),
    build_message("user", [{"type": "tool_result", "tool_use_id": "c", "content": "old"}, {"type": "tool_result"}]),
    build_message("user", [text_block("hi")], meta={"id": "", "created_at": "yesterday", "usage": 5, "model": ["m"]}),
    build_message(
        "assistant", [text_block("hi")], meta={"usage": {"total_tokens": 1}, "usage_before": {"total_tokens": 2}}
    ),
]


@pytest.mark.parametrize("line", FOREIGN)
def test_a_line_that_another_program_wrote_is_written_again_as_it_was(line: ConversationMessage) -> None:
    (message,) = read([line])
    assert message_to_lines(message) == [line]


@pytest.mark.parametrize("line", FOREIGN)
def test_editing_one_part_of_it_leaves_the_other_blocks_as_they_were(line: ConversationMessage) -> None:
    (message,) = read([line])
    before = (
        [block for block in line.get("content") or [] if isinstance(block, dict)]
        if isinstance(line.get("content"), list)
        else []
    )
    message.add_text("added")
    (again,) = message_to_lines(message)
    assert again["content"][-1] == text_block("added")
    for block in before:
        assert block in again["content"]


@pytest.mark.parametrize("line", FOREIGN)
def test_it_goes_through_json_and_says_the_same_after_it(line: ConversationMessage) -> None:
    (message,) = read([line])
    copy = Message.model_validate_json(message.model_dump_json())
    assert copy == message
    # What stood in the place of an id or a date and was none is only in the line itself.
    message.meta = {key: value for key, value in message.meta.items() if key not in ("id", "created_at", "usage")}
    assert read(message_to_lines(copy)) == [message]


def test_a_message_without_an_id_is_called_by_its_line_and_dated_by_its_session() -> None:
    messages = lines_to_messages(
        [(3, build_message("user", [text_block("a")])), (5, build_message("user", [text_block("b")]))],
        session_id="s",
        since=NOON,
    )
    assert [(message.id, message.created_at) for message in messages] == [("seq-3", NOON), ("seq-5", NOON)]


def test_two_lines_with_one_id_are_two_messages() -> None:
    line = build_message("user", [text_block("a")], meta={"id": "x"})
    assert len({message.id for message in read([line, dict(line)])}) == 2


TEXTS = st.text(max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
DICTS = st.dictionaries(
    TEXTS.filter(lambda key: key not in ("id", "detail", "error", "tool_name", "title", "metadata")), VALUES, max_size=3
)
PARTS: st.SearchStrategy[MessagePart] = st.one_of(
    st.builds(TextPart, content=TEXTS, meta=DICTS),
    st.builds(ThinkingPart, content=TEXTS, meta=DICTS),
    st.builds(
        ImagePart, media_type=TEXTS, data=st.none() | TEXTS, url=st.none() | TEXTS, detail=TEXTS, name=st.none() | TEXTS
    ),
    st.builds(ToolCallPart, tool_call_id=TEXTS, tool_name=TEXTS, arguments=DICTS, meta=DICTS),
    st.builds(
        ToolResultPart,
        tool_call_id=TEXTS,
        tool_name=TEXTS,
        title=TEXTS,
        output=TEXTS,
        error=st.none() | TEXTS,
        metadata=DICTS,
        meta=DICTS,
    ),
    st.builds(
        OtherPart,
        type=st.sampled_from(["document", "native", "sketch"]),
        block=DICTS.filter(lambda b: "type" not in b and "meta" not in b),
    ),
)
MESSAGES = st.builds(
    Message,
    session_id=st.just("s"),
    role=st.sampled_from(["user", "assistant", "system"]),
    parts=st.lists(PARTS, max_size=6),
    model=st.none() | TEXTS.filter(bool),
    provider=st.none() | TEXTS.filter(bool),
    usage=st.none() | st.dictionaries(TEXTS, st.integers(), min_size=1, max_size=3),
)


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=5))
def test_any_messages_come_back_from_their_lines(messages: list[Message]) -> None:
    lines = [line for message in messages for line in message_to_lines(message)]
    assert read(json.loads(json.dumps(lines))) == messages


@settings(deadline=None)
@given(MESSAGES)
def test_any_message_goes_through_json(message: Message) -> None:
    assert Message.model_validate_json(message.model_dump_json()) == message


# --- usage is counted once


USAGES = st.recursive(
    st.dictionaries(TEXTS, st.integers(min_value=0, max_value=10**6), max_size=4),
    lambda inner: st.dictionaries(TEXTS, inner | st.integers(min_value=0, max_value=10**6), max_size=3),
    max_leaves=4,
)


@settings(deadline=None)
@given(USAGES, USAGES)
def test_added_usage_differs_from_earlier_usage(before: dict[str, Any], more: dict[str, Any]) -> None:
    total = add_usage(before, more)
    assert add_usage(before, subtract_usage(total, before)) == total


def test_a_line_written_anew_counts_only_what_is_new() -> None:
    first = {"total_tokens": 10, "details": {"cached": 4}}
    more = {"total_tokens": 15, "details": {"cached": 4}, "model": "m"}
    line = without_counting_again(build_message("assistant", [text_block("x")], meta={"usage": more}), first)
    assert line["meta"] == {"usage": {"total_tokens": 5, "model": "m"}, "usage_before": first}
    assert read([line])[0].usage == more
    again = without_counting_again(line, more)
    assert again["meta"] == {"usage_before": more}
    assert read([again])[0].usage == more
