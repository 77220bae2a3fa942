"""What is visible after any sequence of entries, with literals."""

import pytest

from carrel.conversation.log_entries import build_note
from carrel.conversation.messages import ConversationMessage, image_block
from carrel.conversation.replay import (
    BackwardReplay,
    apply_compact,
    apply_rewind,
    events_in,
    visible_after,
    visible_or_summarized_in,
)
from tests.support.messages import assistant, compact, outline, rewind, user

SUMMARY = ["(s)", "(ack)"]


def seen(*entries: ConversationMessage, after: int | None = None) -> list[str]:
    return outline([message for _, message in visible_after(list(enumerate(entries, 1)), after)])


def test_messages_are_visible_in_order():
    assert seen(user("hi"), assistant("hello")) == ["hi", "hello"]
    assert seen() == []


def test_the_newest_compact_replaces_all_before_it():
    assert seen(user("a"), compact("old"), user("b"), compact("s"), user("c")) == [*SUMMARY, "c"]


def test_a_rewind_cuts_what_is_visible_at_that_moment():
    assert seen(user("a"), user("b"), user("c"), rewind(1), user("d")) == ["a", "d"]
    assert seen(user("a"), rewind(0), user("b")) == ["b"]


def test_rewinds_apply_in_order():
    assert seen(user("a"), user("b"), rewind(1), user("c"), user("d"), rewind(2), user("e")) == ["a", "c", "e"]


def test_a_rewind_counts_the_summary_and_its_acknowledgement():
    assert seen(user("a"), compact("s"), user("b"), user("c"), rewind(3)) == [*SUMMARY, "b"]
    assert seen(user("a"), compact("s"), user("b"), rewind(1)) == ["(s)"]


def test_a_rewind_before_the_newest_compact_changes_nothing_after_it():
    assert seen(user("a"), user("b"), rewind(0), compact("s"), user("c")) == [*SUMMARY, "c"]


def test_a_rewind_past_the_end_cuts_nothing():
    assert seen(user("a"), rewind(99), user("b")) == ["a", "b"]


def test_asides_are_never_seen():
    assert seen(user("a"), build_note("label", text="x", at_seq=1), user("b")) == ["a", "b"]


def test_messages_kept_by_a_compact_follow_the_summary():
    assert seen(user("a"), user("b"), user("c"), compact("s", 2), user("d")) == [*SUMMARY, "b", "c", "d"]


def test_a_message_cut_before_the_compact_is_not_kept():
    assert seen(user("a"), user("b"), rewind(1), user("c"), compact("s", 2), user("d")) == [*SUMMARY, "c", "d"]
    assert seen(user("a"), user("b"), rewind(0), user("c"), compact("s", 2)) == [*SUMMARY, "c"]


def test_a_compact_that_keeps_from_before_another_compact_keeps_no_second_summary():
    assert seen(user("a"), compact("old"), user("b"), compact("s", 1)) == [*SUMMARY, "b"]


def test_a_chain_of_compacts_that_keep():
    log = [user("a"), user("b"), compact("old", 2), user("c"), compact("s", 2), user("d")]
    assert seen(*log) == [*SUMMARY, "b", "c", "d"]


def test_thousands_of_compacts_that_keep():
    log = [user("a")]
    for _ in range(3000):
        log += [compact("s", 1)]
    assert seen(*log) == [*SUMMARY, "a"]


def test_going_back_to_an_entry_before_a_compact_brings_the_original_back():
    log = [user("a"), user("b"), compact("s"), user("c"), rewind(seq=2), user("d")]
    assert seen(*log) == ["a", "b", "d"]


def test_going_back_to_an_entry_of_a_branch_that_was_left():
    log = [user("a"), user("b"), rewind(1), user("c"), rewind(seq=2), user("d")]
    assert seen(*log) == ["a", "b", "d"]


def test_going_back_to_the_very_beginning():
    assert seen(user("a"), user("b"), rewind(seq=0), user("c")) == ["c"]


def test_going_back_through_another_going_back():
    log = [user("a"), user("b"), rewind(seq=1), user("c"), rewind(seq=4), user("d")]
    assert seen(*log) == ["a", "c", "d"]


def test_what_was_visible_after_an_earlier_entry():
    log = [user("a"), user("b"), rewind(1), user("c")]
    assert [seen(*log, after=n) for n in range(5)] == [[], ["a"], ["a", "b"], ["a"], ["a", "c"]]


@pytest.mark.parametrize("odd", [None, "3", -1, 1.5, True, [], {}])
def test_a_rewind_to_an_invalid_place_cuts_nothing_and_is_reported(odd: object):
    event = {"role": "rewind", "meta": {"rewind_to": odd}}
    walk = BackwardReplay()
    walk.take(1, 2, events_in(1, [user("a"), event]))
    assert len(walk.shown()) == 1
    assert walk.problems == ["line 2 is a rewind to an invalid place; it changes nothing"]


@pytest.mark.parametrize("event", [{"role": "rewind"}, {"role": "rewind", "meta": {"created_at": "now"}}])
def test_a_rewind_that_does_not_say_where_to_removes_everything(event: dict[str, object]):
    assert seen(user("a"), event, user("b")) == ["b"]
    assert apply_rewind([user("a"), event, user("b")]) == [user("b")]


def test_unknown_roles_and_blocks_are_seen_as_they_are():
    odd = {"role": "moderator", "content": [{"type": "hologram", "text": "?"}]}
    assert visible_after([(1, odd)]) == [(1, odd)]


def test_a_line_that_cannot_be_read_is_left_out_and_reported():
    walk = BackwardReplay()
    walk.take(1, 3, [(2, {"role": "unreadable", "meta": {"reason": "no JSON"}})])
    assert list(walk.shown().seqs()) == [1, 3]
    assert walk.problems == ["line 2 is left out: no JSON"]


def test_reading_backwards_stops_at_the_newest_compact():
    walk = BackwardReplay()
    walk.take(10, 12, [(11, compact("s"))])
    assert walk.enough
    assert list(walk.shown().seqs()) == [0, 0, 12]


def test_reading_backwards_goes_on_to_what_the_compact_keeps():
    walk = BackwardReplay()
    walk.take(10, 12, [(11, compact("s", 8))])
    assert not walk.enough
    walk.take(1, 9, [])
    assert walk.enough
    assert list(walk.shown().seqs()) == [0, 0, 8, 9, 10, 12]


def stood_for(*entries: ConversationMessage) -> list[int]:
    return sorted(visible_or_summarized_in(list(enumerate(entries, 1))))


def test_what_is_summed_up_is_part_of_the_conversation():
    assert stood_for(user("a"), user("b"), compact("s", 2), user("c"), compact("t"), user("d")) == [1, 2, 4, 6]
    assert stood_for(user("a"), user("b"), rewind(1), compact("s"), user("c"), rewind(2)) == [1]


def test_what_was_rewound_is_no_part_of_it_nor_what_a_rewound_summary_stood_for():
    assert stood_for(user("a"), compact("s"), user("b"), rewind(0), user("c")) == [5]
    assert stood_for(user("a"), user("b"), compact("s"), user("c"), rewind(seq=1), user("d")) == [1, 6]
    assert stood_for(user("a"), compact("s"), user("b"), rewind(1), user("c")) == [1, 5]


def test_a_summary_has_the_files_that_were_pinned_beside_its_text():
    picture = image_block("QUJD", mime_type="image/png")
    event = compact("s")
    event["content"].append(picture)
    [(_, summary), _] = visible_after([(1, event)])
    assert summary["content"] == [{"type": "text", "text": "[Conversation Summary]\n\ns"}, picture]


def test_the_functions_of_the_format_on_plain_lists():
    assert outline(apply_compact([user("a"), compact("s"), user("b")])) == [*SUMMARY, "b"]
    assert outline(apply_rewind([user("a"), user("b"), rewind(1), user("c")])) == ["a", "c"]
    untouched = [user("a")]
    assert apply_compact(untouched) == untouched
    assert all(message["meta"]["synthetic"] for message in apply_compact([compact("s")]))


def test_a_summary_of_thousands_of_runs_stays_small():
    log: list[ConversationMessage] = []
    for _ in range(200):
        log += [user("x"), user("y"), rewind(1)]
    assert seen(*log) == ["x"]
