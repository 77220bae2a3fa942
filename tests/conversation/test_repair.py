"""Every tool call gets its result, right after it; with literals."""

from hypothesis import given
from hypothesis import strategies as st

from carrel.conversation.messages import ConversationMessage, blocks_of, tool_calls_of, tool_results_of
from carrel.conversation.repair import INTERRUPTED, ToolOrder, interrupted_message, mend, unanswered
from tests.conversation.words import assistant, call, outline, result, user


def mended(*messages: ConversationMessage) -> list[str]:
    return outline(mend(messages).messages)


def test_a_whole_conversation_is_left_alone():
    whole = [user("go"), call("a"), result("a"), assistant("done")]
    assert mend(whole).messages == whole
    assert all(left is right for left, right in zip(mend(whole).messages, whole, strict=True))


def test_a_call_with_no_result_at_the_end():
    assert unanswered([user("go"), call("a", "b"), result("a")]) == ["b"]
    assert mended(user("go"), call("a")) == ["go", "call:a", "stand-in:a"]


def test_only_the_last_tool_loop_counts_as_unanswered():
    assert unanswered([call("old"), user("never mind"), call("a"), result("a")]) == []


def test_an_older_orphan_gets_its_stand_in_before_the_next_words():
    assert mended(call("a"), user("never mind")) == ["call:a", "stand-in:a never mind"]
    assert mended(call("a"), assistant("hm")) == ["call:a", "stand-in:a", "hm"]


def test_a_real_result_that_comes_later_beats_the_stand_in():
    log = [call("a"), interrupted_message(["a"]), assistant("sorry"), result("a")]
    assert mended(*log) == ["call:a", "result:a", "sorry"]


def test_a_stand_in_written_by_another_program_is_known_by_its_text():
    theirs = result("a", text="error: tool call was interrupted (no result recorded)", is_error=True)
    assert mended(call("a"), theirs, result("a")) == ["call:a", "result:a"]


def test_parallel_calls_with_results_in_several_messages():
    assert mended(call("a", "b"), result("b"), result("a"), user("x")) == ["call:a call:b", "result:b", "result:a", "x"]


def test_a_result_far_from_its_call_comes_to_it():
    assert mended(call("a"), assistant("wait"), result("a"), user("x")) == ["call:a", "result:a", "wait", "x"]


def test_a_doubled_result_is_shown_once():
    assert mended(call("a"), result("a"), user("x"), result("a")) == ["call:a", "result:a", "x"]


def test_a_result_without_a_call_becomes_text():
    assert mended(result("ghost"), user("x")) == ["[result of a tool call that is not in view]\nfound ghost", "x"]


def test_ids_that_a_model_uses_again():
    log = [call("1"), result("1"), call("1"), result("1"), call("1")]
    assert mended(*log) == ["call:1", "result:1", "call:1", "result:1", "call:1", "stand-in:1"]


def test_the_origins_tell_where_each_message_came_from():
    assert mend([call("a"), assistant("hm"), user("x")]).origins == [0, None, 1, 2]


def test_content_that_is_no_list_does_not_disturb():
    odd: list[ConversationMessage] = [
        {"role": "user", "content": "plain"},
        {"role": "user"},
        {"role": "x", "content": 5},
    ]
    assert mend(odd).messages == odd


def test_the_model_is_told_that_the_call_was_interrupted():
    block = blocks_of(interrupted_message(["a"]))[0]
    assert (block["model_text"], block["is_error"], block["tool_use_id"]) == (INTERRUPTED, True, "a")
    assert INTERRUPTED == "error: tool call was interrupted"


ids = st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)
anything = st.one_of(
    st.builds(lambda i: call(*i), ids),
    st.builds(lambda i: result(*i), ids),
    st.builds(lambda i: interrupted_message(i), ids),
    st.just(user("u")),
    st.just(assistant("t")),
)


@given(st.lists(anything, max_size=12))
def test_no_provider_refuses_what_comes_out(log: list[ConversationMessage]):
    messages = mend(log).messages
    for index, message in enumerate(messages):
        answers: list[str] = []
        for later in messages[index + 1 :]:
            if later["role"] != "user":
                break
            answers += tool_results_of(later)
        assert set(tool_calls_of(message)) <= set(answers), outline(messages)
        if message["role"] == "assistant":
            assert len(answers) == len(set(answers)) == len(set(tool_calls_of(message))), outline(messages)
    assert messages == mend(messages).messages
    if log and messages and not tool_calls_of(messages[0]):
        assert not (messages[0]["role"] == "user" and tool_results_of(messages[0]))


@given(st.lists(anything, max_size=12))
def test_nothing_real_is_lost(log: list[ConversationMessage]):
    def texts(messages: list[ConversationMessage]) -> set[str]:
        found = set()
        for message in messages:
            for block in blocks_of(message):
                found.add(str(block.get("text", "")).split("\n")[-1])
                if "interrupted" not in str(block.get("model_text", "")):
                    found.add(str(block.get("model_text", "")))
        return found - {""}

    assert texts(log) <= texts(mend(log).messages)


@given(st.lists(anything, max_size=12), st.integers(1, 5))
def test_what_is_told_to_be_in_order_needs_no_mending(log: list[ConversationMessage], size: int):
    order = ToolOrder()
    for start in range((len(log) - 1) // size * size, -1, -size):
        order.take(log[start : start + size])
    if order.whole():
        assert mend(log).messages == log


def test_an_ordinary_conversation_is_told_to_be_in_order():
    log = [user("go"), call("a", "b"), result("b", "a"), assistant("done"), call("a"), result("a")]
    for size in range(1, 7):
        order = ToolOrder()
        for start in range((len(log) - 1) // size * size, -1, -size):
            order.take(log[start : start + size])
        assert order.whole(), size
