"""The metadata is the same fold of the log however it is reached."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carrel.conversation.log_entries import UNREADABLE, build_compact_event, build_note, build_rewind_event
from carrel.conversation.messages import ConversationMessage, SessionMeta, user_text_message
from carrel.conversation.session_state import (
    SessionState,
    decode_meta,
    encode_meta,
    has_counts,
    new_meta,
    position_of,
)
from tests.support.messages import assistant, call, result, user

_DATE = "2026-01-02T00:00:00+00:00"

_ENTRIES: list[ConversationMessage] = [
    user("hello"),
    user_text_message("again", meta={"continues": True}),
    user_text_message("put in", meta={"synthetic": True}),
    assistant("hi", usage={"total_tokens": 5}),
    {**assistant("dated"), "meta": {"created_at": _DATE, "model": "other", "provider": "p"}},
    call("t"),
    result("t"),
    build_rewind_event(1, created_at=_DATE),
    build_rewind_event(0, to_seq=0, created_at=_DATE),
    build_compact_event("sum", provider="p", model="m", compacted_count=1, usage={"total_tokens": 3}),
    build_note("meta", created_at=_DATE, set={"title": "Named", "tags": ["a"]}),
    build_note("meta", created_at=_DATE, set={"title": "New chat", "archived_at": _DATE}),
    build_note("meta", created_at=_DATE, set={"total_tokens": 50, "message_count": 7, "log_seq": 9, "id": "no"}),
    build_note("meta", created_at=_DATE, set={"tags": "no list"}),
    build_note("label", created_at=_DATE, text="one", at_seq=1),
    build_note("label", created_at=_DATE, text="two", at_seq=2),
    build_note("pin", created_at=_DATE, at_seq=2),
    build_note("pin", created_at=_DATE, at_seq=-1),
    build_note("usage", created_at=_DATE, usage={"total_tokens": 4}),
    build_note("fork", created_at=_DATE, parent_session_id="p", root_session_id="r", at_seq=3),
    {"role": UNREADABLE, "meta": {"reason": "no JSON"}},
]


def _created() -> SessionMeta:
    return new_meta("s", now="2026-01-01T00:00:00+00:00", model="m", provider="anthropic", cwd="/work")


def _size(entry: ConversationMessage) -> int:
    return len(repr(entry))


def _fold(state: SessionState, entries: list[ConversationMessage], start: int = 1) -> SessionState:
    for seq, entry in enumerate(entries, start):
        state.apply(seq, entry, _size(entry))
    return state


def _live() -> SessionState:
    state = SessionState(_created())
    state.reset()
    return state


def _stored(state: SessionState) -> SessionState:
    meta = decode_meta(encode_meta(state.meta), "s")
    assert meta is not None
    return SessionState(meta)


def _all_but_the_date(meta: SessionMeta) -> dict[str, Any]:
    return {name: value for name, value in meta.items() if name != "updated_at"}


sequences = st.lists(st.sampled_from(_ENTRIES), max_size=12)


@given(sequences, st.integers(0, 12))
def test_applied_one_by_one_from_a_stored_state_and_rebuilt_are_the_same(
    entries: list[ConversationMessage], place: int
):
    live = _fold(_live(), entries)
    resumed = _fold(_stored(_fold(_live(), entries[:place])), entries[place:], min(place, len(entries)) + 1)
    rebuilt = _fold(SessionState.first("s", _DATE, _created()), entries)
    assert resumed.meta == live.meta
    assert _all_but_the_date(rebuilt.meta) == _all_but_the_date(live.meta)
    assert live.last_seq == len(entries)
    assert live.log_bytes == sum(map(_size, entries))
    assert live.needs_recount == resumed.needs_recount == rebuilt.needs_recount


@given(sequences, st.integers(0, 12))
def test_entries_that_are_applied_again_change_nothing(entries: list[ConversationMessage], place: int):
    live = _fold(_live(), entries)
    before = _stored(live).meta
    _fold(live, entries[place:], place + 1)
    assert live.meta == before


@given(sequences)
def test_an_entry_after_a_gap_is_not_counted(entries: list[ConversationMessage]):
    state = _fold(_live(), entries, start=2)
    assert (state.last_seq, state.log_bytes, state.meta["message_count"], state.meta["total_tokens"]) == (0, 0, 0, 0)


def test_messages_are_counted_until_a_rewind():
    state = _fold(_live(), [user("hello"), assistant("hi"), user_text_message("more", meta={"continues": True})])
    assert (state.meta["message_count"], state.needs_recount, state.meta["title"]) == (2, False, "hello")
    assert position_of(state.meta) == (3, state.log_bytes)
    assert has_counts(state.meta, state.log_bytes)
    state.apply(4, build_rewind_event(1), 10)
    assert ("message_count" in state.meta, state.needs_recount) == (False, True)
    assert position_of(state.meta) is None


def test_metadata_of_another_program_is_not_counted():
    state = _fold(SessionState(_created()), [user("hello"), build_note("label", text="one", at_seq=1)])
    assert state.last_seq is None
    assert "message_count" not in state.meta
    assert [label["text"] for label in state.meta["labels"]] == ["one"]
    assert position_of(state.meta) is None


def test_what_no_program_set_follows_the_messages_when_it_is_rebuilt():
    dated = {**assistant("hi"), "meta": {"created_at": _DATE, "model": "other", "provider": "p"}}
    state = _fold(SessionState.first("s", "2026-05-05T00:00:00+00:00"), [dated])
    assert (state.meta["model"], state.meta["provider"], state.meta["created_at"]) == ("other", "p", _DATE)
    assert state.meta["updated_at"] == _DATE
    state.apply(2, user("undated"), 10)
    assert state.meta["updated_at"] == "2026-05-05T00:00:00+00:00"
