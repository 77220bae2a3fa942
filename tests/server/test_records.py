"""Records of sessions in a store that breaks off at any step, and comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator

from carrel.errors import StorageUnavailable
from carrel.server.records import RecordStore, now
from carrel.storage.memory import MemoryStore
from carrel.wire.answers import Interaction, SessionRecord
from tests.support.step_store import StepStore


def a_record(**fields: object) -> SessionRecord:
    known = {"session_id": "s", "user_id": "ann", "status": "creating", "node": "n1", "dataset": "", "sample_id": ""}
    return SessionRecord.model_validate({**known, "expires_at": now(), "requested_at": now(), **fields})


async def broken_at_each_step() -> AsyncIterator[tuple[StepStore, RecordStore, list[bool]]]:
    """Yield stores that do not answer from a step on, each with a switch; until all steps have been tried."""
    first = 1
    while True:
        is_away = [False]

        async def step(number: int, what: str, is_away: list[bool] = is_away, first: int = first) -> None:
            if is_away[0] and number >= first:
                raise StorageUnavailable(f"away: {what}")

        store = StepStore(MemoryStore(), step)
        yield store, RecordStore(store, "n1"), is_away
        if len(store.steps) < first:
            return
        first += 1


async def test_a_session_that_could_not_be_written_can_be_created_again() -> None:
    tried = 0
    async for store, records, is_away in broken_at_each_step():
        record = a_record()
        is_away[0] = True
        try:
            await records.add_session(record)
        except StorageUnavailable:
            tried += 1
        else:
            break
        is_away[0] = False
        assert await records.get_session("s") is None
        await records.add_session(record)
        assert await records.get_session("s") == record
        assert [each.session_id for each in await records.sessions_left_live()] == ["s"]
        assert not records.has_unsaved
        assert store.steps
    assert tried >= 6


async def test_a_paused_session_that_could_not_be_reopened_is_paused() -> None:
    tried = 0
    async for _, records, is_away in broken_at_each_step():
        paused = a_record(status="closed", lifecycle="paused", durable=True)
        await records.add_session(a_record(durable=True))
        await records.save_session(paused)
        records.store.steps.clear()  # type: ignore[attr-defined]
        is_away[0] = True
        live = paused.model_copy(update={"status": "creating", "lifecycle": "live"})
        try:
            await records.reopen_session(live)
        except StorageUnavailable:
            tried += 1
        else:
            break
        is_away[0] = False
        await records.save_unsaved()
        assert await records.get_session("s") == paused
        assert await records.sessions_left_live() == []
        await records.reopen_session(live)
        assert await records.get_session("s") == live
    assert tried >= 6


async def test_commands_that_could_not_be_written_are_written_in_their_order() -> None:
    async for _, records, is_away in broken_at_each_step():
        begun = Interaction(interaction_id="i", session_id="s", created_at=now(), command="true")
        ended = begun.model_copy(update={"status": "completed", "exit_code": 0})
        await records.add_session(a_record())
        await records.add_operation(begun)
        records.store.steps.clear()  # type: ignore[attr-defined]
        is_away[0] = True
        await records.save_operation(ended)
        if not records.has_unsaved:
            return
        assert await records.get_operation("s", "i") == ended
        is_away[0] = False
        await records.save_unsaved()
        assert not records.has_unsaved
        fresh = RecordStore(records.store, "n1")
        assert await fresh.operations("s") == [ended]
    raise AssertionError("it always failed")


async def test_the_end_of_a_session_is_in_its_log_also_if_it_was_written_in_part() -> None:
    async for _, records, is_away in broken_at_each_step():
        await records.add_session(a_record())
        ended = a_record(status="closed", lifecycle="ended")
        records.store.steps.clear()  # type: ignore[attr-defined]
        is_away[0] = True
        await records.save_session(ended)
        if not records.has_unsaved:
            return
        is_away[0] = False
        # Its process is killed, and another one settles what it has left.
        other = RecordStore(records.store, "n1")
        left = await other.sessions_left_live()
        assert [each.status for each in left] in ([], ["creating"])
        if not left:
            events = [event async for _, event in other.events("s", 1, follow=False)]
            assert events[-1]["status"] == "closed"
            assert await other.store.list("server/live") == []
    raise AssertionError("it always failed")
