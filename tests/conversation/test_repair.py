"""Every tool call gets its result, right after it; with literals."""

from hypothesis import given
from hypothesis import strategies as st

from carrel.conversation.messages import ConversationMessage, blocks_of, tool_calls_of, tool_results_of
from carrel.conversation.replay import (
    INTERRUPTED,
    interrupted_message,
    is_well_formed,
    repair_messages,
    unanswered_calls,
    without_texts,
)
from tests.support.messages import assistant, call, outline, result, user


def mended(*messages: ConversationMessage) -> list[str]:
    return outline(repair_messages(messages).messages)


def test_a_whole_conversation_is_left_alone():
    whole = [user("go"), call("a"), result("a"), assistant("done")]
    assert repair_messages(whole).messages == whole
    assert all(left is right for left, right in zip(repair_messages(whole).messages, whole, strict=True))


def test_a_call_with_no_result_at_the_end():
    assert unanswered_calls([user("go"), call("a", "b"), result("a")]) == ["b"]
    assert mended(user("go"), call("a")) == ["go", "call:a", "stand-in:a"]


def test_only_the_last_tool_loop_counts_as_unanswered():
    assert unanswered_calls([call("old"), user("never mind"), call("a"), result("a")]) == []


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
    assert repair_messages([call("a"), assistant("hm"), user("x")]).origins == [0, None, 1, 2]


def test_content_that_is_no_list_does_not_disturb():
    odd: list[ConversationMessage] = [
        {"role": "user", "content": "plain"},
        {"role": "user"},
        {"role": "x", "content": 5},
    ]
    assert repair_messages(odd).messages == odd


def test_the_result_says_that_the_call_was_interrupted():
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
    messages = repair_messages(log).messages
    for index, message in enumerate(messages):
        answers: list[str] = []
        for later in messages[index + 1 :]:
            if later["role"] != "user":
                break
            answers += tool_results_of(later)
        assert set(tool_calls_of(message)) <= set(answers), outline(messages)
        if message["role"] == "assistant":
            assert len(answers) == len(set(answers)) == len(set(tool_calls_of(message))), outline(messages)
    assert messages == repair_messages(messages).messages
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

    assert texts(log) <= texts(repair_messages(log).messages)


@given(st.lists(anything, max_size=12))
def test_a_well_formed_conversation_is_not_changed(log: list[ConversationMessage]):
    if is_well_formed(log):
        assert repair_messages(log).messages == log


@given(st.lists(anything, max_size=12))
def test_the_repair_of_messages_without_texts_is_the_same(log: list[ConversationMessage]):
    assert repair_messages(list(map(without_texts, log))).origins == repair_messages(log).origins


def test_an_ordinary_conversation_is_well_formed():
    log = [user("go"), call("a", "b"), result("b", "a"), assistant("done"), call("a"), result("a")]
    assert is_well_formed(log)
    assert not is_well_formed(log[1:2])
    assert not is_well_formed(log[2:])
    assert not is_well_formed([call("a"), result("a", "b")])
    assert not is_well_formed([call("a"), result("a", "a")])
    assert not is_well_formed([call("a"), assistant("no"), result("a")])
    assert not is_well_formed([call("a", "a"), result("a", "a")])
