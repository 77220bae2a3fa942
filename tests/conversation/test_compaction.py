"""When to compact, where to cut, and the report of what is removed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.conversation.compaction import (
    DEFAULT_COMPACT_THRESHOLD,
    choose_cut,
    estimate_tokens,
    pinned_text,
    report_of,
    should_compact,
    summary_and_usage,
)
from carrel.conversation.messages import ConversationMessage, image_block, tool_calls_of, tool_results_of
from carrel.errors import CompactRefused
from tests.support.messages import assistant, call, outline, result, user

TURNS = [
    user("one"),
    assistant("1"),
    user("two"),
    call("a"),
    result("a"),
    assistant("2"),
    user("three"),
    assistant("3"),
]


def numbered(messages: list[ConversationMessage]) -> list[tuple[int, ConversationMessage]]:
    return list(enumerate(messages, 1))


@pytest.mark.parametrize(
    ("usage", "window", "threshold", "answer"),
    [
        ({"input_tokens": 80}, 100, 0.8, True),
        ({"input_tokens": 79}, 100, 0.8, False),
        ({"prompt_tokens": 80}, 100, 0.8, True),
        ({"prompt_token_count": 80}, 100, 0.8, True),
        ({"input_tokens": 0, "prompt_tokens": 80}, 100, 0.8, True),
        ({}, 100, 0.8, False),
        (None, 100, 0.8, False),
        ({"input_tokens": 80}, None, 0.8, False),
        ({"input_tokens": 80}, 0, 0.8, False),
        ({"input_tokens": 80}, 100, 0, False),
        ({"input_tokens": 80}, 100, -1, False),
    ],
)
def test_when_to_compact(usage: Any, window: Any, threshold: float, answer: bool):
    assert should_compact(usage, window, threshold) is answer


def test_a_request_of_pictures_passes_the_byte_limit_first():
    assert should_compact({"input_tokens": 5}, 100, 0.8, request_bytes=30_000_000, byte_limit=32_000_000)
    assert not should_compact({"input_tokens": 5}, 100, 0.8, request_bytes=1000, byte_limit=32_000_000)
    assert DEFAULT_COMPACT_THRESHOLD == 0.8


def test_turns_are_counted_from_the_end():
    cut = choose_cut(numbered(TURNS), keep_turns=1)
    assert outline([message for _, message in cut.kept]) == ["three", "3"]
    assert len(choose_cut(numbered(TURNS), keep_turns=0).kept) == 0


def test_tokens_are_kept_up_to_the_limit_from_a_users_word_on():
    long = [user("a " * 2000), assistant("b " * 2000), user("c " * 200), assistant("d")]
    cut = choose_cut(numbered(long), keep_tokens=500)
    assert [seq for seq, _ in cut.kept] == [3, 4]


def test_a_long_tool_loop_is_cut_between_its_steps():
    loop = [user("go")] + [step for n in range(50) for step in (call(str(n)), result(str(n), text="word " * 100))]
    cut = choose_cut(numbered(loop), keep_tokens=2000)
    assert 0 < len(cut.kept) < len(loop)
    assert tool_calls_of(cut.kept[0][1])


def test_nothing_to_compact_is_an_error():
    for messages in ([], [user("a")]):
        with pytest.raises(CompactRefused, match="nothing to compact"):
            choose_cut(numbered(messages), keep_tokens=10_000)
    summary = [(0, user("[Conversation Summary]\n\nx")), (0, assistant("ok")), (5, user("a"))]
    with pytest.raises(CompactRefused):
        choose_cut(summary, keep_turns=1)


step = st.one_of(
    st.just([user("u " * 50)]),
    st.just([assistant("t " * 50)]),
    st.builds(lambda n: [call(str(n)), result(str(n))], st.integers(0, 99)),
    st.builds(lambda n: [call(f"{n}a", f"{n}b"), result(f"{n}b"), result(f"{n}a")], st.integers(0, 99)),
)


@given(st.lists(step, min_size=1, max_size=10), st.integers(0, 600), st.none() | st.integers(0, 5))
def test_a_call_and_its_result_are_never_parted(steps: list[Any], tokens: int, turns: int | None):
    messages = numbered([message for step in steps for message in step])
    try:
        cut = choose_cut(messages, keep_tokens=tokens, keep_turns=turns)
    except CompactRefused:
        return
    assert cut.summarized + cut.kept == messages
    waiting: set[str] = set()
    for _, message in cut.summarized:
        waiting |= set(tool_calls_of(message))
        waiting -= set(tool_results_of(message))
    assert not waiting


def test_the_report_says_what_left():
    report = report_of(numbered(TURNS))
    assert report["messages"] == 8
    assert report["tool_calls"] == 1
    assert report["tools"] == {"look": 1}
    assert report["files"] == ["a.txt"]
    assert report["tokens"] > 0
    assert report["bytes"] > 100


def test_an_image_costs_what_an_image_costs():
    picture = {"role": "user", "content": [image_block("QUJD" * 100_000, mime_type="image/png")]}
    assert 1000 < estimate_tokens(picture) < 3000


def test_what_was_pinned_stands_under_the_summary():
    assert "keep this" in pinned_text([(7, user("keep this"))])
    assert pinned_text([]) == ""


def test_a_summary_may_come_in_three_shapes():
    assert summary_and_usage(" text ") == ("text", None)
    assert summary_and_usage(("text", {"input_tokens": 1})) == ("text", {"input_tokens": 1})
    assert summary_and_usage(assistant("text", usage={"input_tokens": 1})) == ("text", {"input_tokens": 1})
    for nothing in ("", "  ", None, 5, assistant("")):
        with pytest.raises(CompactRefused, match="empty"):
            summary_and_usage(nothing)
