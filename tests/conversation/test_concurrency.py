"""Concurrent operations on one session: a write that is based on an earlier read does not ignore what came between."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from carrel.conversation import session_writer
from carrel.conversation.models.conversation import Conversation, ConversationStorage
from carrel.conversation.models.info import SessionInfo
from carrel.conversation.session_writer import call_key
from carrel.conversation.store import SessionStore
from carrel.errors import (
    CompactRefused,
    SessionNotFound,
    StorageReadError,
    StorageWriteError,
)
from carrel.storage.base import process_name
from carrel.storage.memory import MemoryStore
from tests.conversation.conftest import Reopen
from tests.support.messages import assistant, call, outline, result, user


async def shown(store: SessionStore, session_id: str = "s") -> list[str]:
    data = await store.load_session(session_id)
    assert data is not None
    return outline(data["messages"])


async def sums(messages: list[Any]) -> str:
    return "sum"


async def test_a_session_that_was_begun_anew_meanwhile_gets_no_summary_of_the_old_one(reopened: Reopen):
    store, other = reopened(), reopened()
    await store.append_many("s", [user("one"), user("two"), user("three")])

    async def slow(messages: list[Any]) -> str:
        await other.delete_session("s")
        await other.create_session(session_id="s")
        await other.append_message("s", user("anew"))
        return "sum"

    with pytest.raises((CompactRefused, SessionNotFound)):
        await store.compact("s", slow, keep_turns=1)
    assert await shown(reopened()) == ["anew"]


@pytest.mark.parametrize(
    "tail",
    [b"", b"{}", b'{"role":"user"}', b"5", b'"a"', b"null", b"{}\0\0", b"\0", b" ", b'{"a', b"{} ", b"\r", b"[1]"],
)
async def test_a_log_is_rewound_however_it_ends(tmp_path: Path, tail: bytes):
    async with SessionStore(tmp_path, embedder=False) as store:
        await store.append_many("s", [user("one"), user("two"), user("three")])
    with (tmp_path / "s/messages.jsonl").open("ab") as file:
        file.write(tail)
    async with SessionStore(tmp_path, embedder=False) as store, asyncio.timeout(60):
        await store.append_rewind("s", 1)
        assert await shown(store) == ["one"]


async def test_after_compacting_the_counts_are_known_without_reading_the_log(reopened: Reopen):
    store = reopened()
    await store.append_many("s", [user("one"), assistant("1", usage={"total_tokens": 5}), user("two")])
    await store.compact("s", sums, keep_turns=1)
    await store.append_message("s", user("three"))
    await store.close()
    [meta] = await reopened().list_sessions()
    assert (meta["message_count"], meta["total_tokens"], meta["log_seq"]) == (4, 5, 5)


async def test_concurrent_lists_are_all_complete(reopened: Reopen):
    store = reopened()
    for number in range(100):
        await store.append_message(f"s{number}", user("hello"))
    again = reopened()

    async def listed(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return len(await again.list_sessions())

    for _ in range(3):
        assert await asyncio.gather(*(listed(turns) for turns in range(0, 200, 5))) == [100] * 40


async def test_a_list_that_is_given_up_leaves_the_next_one_whole(reopened: Reopen):
    store = reopened()
    for number in range(100):
        await store.append_message(f"s{number}", user("hello"))
    for turns in range(0, 60, 3):
        again = reopened()
        await again.list_sessions()
        given_up = asyncio.create_task(again.list_sessions())
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert len(await again.list_sessions()) == 100


async def test_what_two_say_about_a_session_at_once_is_all_in_its_metadata(reopened: Reopen):
    stores = [reopened() for _ in range(3)]
    for store in stores:
        await store.append_message("s", user("hello"))
    for turn in range(5):
        await asyncio.gather(*(store.label("s", f"{turn}.{n}", at=1) for n, store in enumerate(stores)))
    await asyncio.gather(
        stores[0].rename("s", "Named"), stores[1].set_tags("s", ["red"]), stores[2].pin("s", 2), stores[1].pin("s", 1)
    )
    for store in stores:
        await store.close()
    meta = await reopened().read_meta("s")
    assert sorted(label["text"] for label in meta["labels"]) == [f"{turn}.{n}" for turn in range(5) for n in range(3)]
    assert (meta["title"], meta["tags"], meta["pins"]) == ("Named", ["red"], [1, 2])


async def test_what_could_not_be_written_to_the_metadata_is_written_with_the_next():
    class Full(MemoryStore):
        full = False

        async def put(self, key: str, data: bytes, **how: Any) -> Any:
            if self.full:
                raise StorageWriteError("the disk is full")
            return await super().put(key, data, **how)

    store = SessionStore(store=(disk := Full()), embedder=False)
    await store.append_message("s", user("hello"))
    await store.label("s", "first")
    disk.full = True
    with pytest.raises(StorageWriteError):
        await store.label("s", "kept")
    disk.full = False
    await store.rename("s", "Named")
    again = SessionStore(store=disk, embedder=False)
    assert [label["text"] for label in await again.labels("s")] == ["first", "kept"]


class Hooked(MemoryStore):
    """A store where something happens right after an append to a log was carried out, or with a write of metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.after_append: list[Callable[[], Awaitable[Any]]] = []
        self.slow_put = 0.0
        self.full = False

    async def append(self, key: str, records: Sequence[bytes], **how: Any) -> int:
        if self.full:
            raise StorageWriteError("the disk is full")
        seq = await super().append(key, records, **how)
        if key.endswith("messages.jsonl") and self.after_append:
            await self.after_append.pop()()
        return seq

    async def put(self, key: str, data: bytes, **how: Any) -> Any:
        done = await super().put(key, data, **how)
        await asyncio.sleep(self.slow_put)
        return done

    async def lock(self, key: str, *, wait: bool = True) -> Any:
        """Who does not get it hears of that last, as over a line of its own."""
        held = await super().lock(key, wait=wait)
        await asyncio.sleep(0.05 if held is None else 0)
        return held


@pytest.mark.parametrize("what", ["rename", "label", "rewind", "archive"])
@pytest.mark.parametrize("meanwhile", ["close", "delete"])
async def test_a_store_that_is_closed_or_a_session_deleted_meanwhile_costs_no_answer(what: str, meanwhile: str):
    store = SessionStore(store=(hooked := Hooked()), embedder=False)
    await store.append_many("s", [user("one"), user("two")])
    hooked.after_append = [store.close if meanwhile == "close" else lambda: store.delete_session("s")]
    do = {
        "rename": lambda: store.rename("s", "Named"),
        "label": lambda: store.label("s", "here"),
        "rewind": lambda: store.append_rewind("s", 1),
        "archive": lambda: store.archive("s"),
    }
    await do[what]()
    assert not hooked.after_append
    again = SessionStore(store=hooked, embedder=False)
    if meanwhile == "delete":
        assert await again.load_session("s") is None
    elif what == "rename":
        assert (await again.read_meta("s"))["title"] == "Named"


async def test_a_label_given_up_while_it_is_written_is_there_once():
    store = SessionStore(store=(hooked := Hooked()), embedder=False)
    await store.append_message("s", user("hello"))
    hooked.slow_put = 0.2
    giving_up = asyncio.ensure_future(store.label("s", "here"))
    while b"here" not in (await hooked.get("s/meta.json") or b""):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    giving_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await giving_up
    await store.rename("s", "Named")
    await store.close()
    meta = await SessionStore(store=hooked, embedder=False).read_meta("s")
    assert ([label["text"] for label in meta["labels"]], meta["title"]) == (["here"], "Named")


async def test_the_metadata_has_the_title_that_the_log_has_last():
    store, other = (SessionStore(store=hooked, embedder=False) for hooked in [Hooked()] * 2)
    hooked = store._logs.store
    assert isinstance(hooked, Hooked)
    await store.append_message("s", user("hello"))
    hooked.after_append = [lambda: other.rename("s", "Second")]
    await store.rename("s", "First")
    meta = await SessionStore(store=hooked, embedder=False).read_meta("s")
    await hooked.delete("s/meta.json")
    made_again = await SessionStore(store=hooked, embedder=False).read_meta("s")
    assert meta["title"] == made_again["title"] == "Second"


async def test_a_message_is_acknowledged_though_the_metadata_with_its_title_cannot_be_written():
    class NoRoom(Hooked):
        async def put(self, key: str, data: bytes, **how: Any) -> Any:
            if self.full:
                raise StorageWriteError("the disk is full")
            return await super().put(key, data, **how)

        async def append(self, key: str, records: Sequence[bytes], **how: Any) -> int:
            return await MemoryStore.append(self, key, records, **how)

    store = SessionStore(store=(disk := NoRoom()), embedder=False)
    await store.create_session(session_id="s")
    disk.full = True
    assert await store.append_message("s", user("hello")) == 1
    disk.full = False
    await store.append_message("s", user("again"))
    await store.close()
    assert (await SessionStore(store=disk, embedder=False).read_meta("s"))["title"] == "hello"


async def test_two_tool_calls_at_once_leave_no_hold_behind():
    store = SessionStore(store=(hooked := Hooked()), embedder=False)
    await store.append_message("s", user("hello"))
    await asyncio.gather(*(store.append_message("s", call(name)) for name in "ab"))
    assert await hooked.lock_owner(call_key("s", "a")) == await hooked.lock_owner(call_key("s", "b")) == process_name()
    await store.append_message("s", result("a"))
    await store.append_message("s", result("b"))
    assert await hooked.lock_owner(call_key("s", "a")) is await hooked.lock_owner(call_key("s", "b")) is None


async def test_a_tool_call_that_could_not_be_written_leaves_no_hold_behind():
    store = SessionStore(store=(hooked := Hooked()), embedder=False)
    await store.append_message("s", user("hello"))
    hooked.full = True
    with pytest.raises(StorageWriteError):
        await store.append_message("s", call("a"))
    assert await hooked.lock_owner(call_key("s", "a")) is None


async def test_a_tool_call_that_came_too_late_leaves_no_hold_behind_and_takes_none_from_another():
    store = SessionStore(store=(hooked := Hooked()), embedder=False)
    await store.append_message("s", user("hello"))
    assert (await store._logs.append("s", [call("late")], after=7))[0] == 0
    assert await hooked.lock_owner(call_key("s", "late")) is None

    async def too_late() -> None:
        assert (await store._logs.append("s", [call("late")], after=7))[0] == 0

    hooked.after_append = [too_late]
    await store.append_message("s", call("a"))
    assert await hooked.lock_owner(call_key("s", "a")) is not None
    await store.append_message("s", result("a"))
    assert await hooked.lock_owner(call_key("s", "a")) is None


async def test_who_cancels_every_task_does_not_keep_the_metadata_from_being_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_writer, "FLUSH_SECONDS", 0.05)
    store = SessionStore(store=(hooked := Hooked()), embedder=False)
    await store.append_message("s", user("hello"))
    await store.append_message("s", user("more"))
    store._logs.writers["s"]._flush_soon()  # its time has come, and its task has not begun
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()

    async def written() -> int:
        return int(json.loads(await hooked.get("s/meta.json") or b"{}")["log_seq"])

    for _ in range(3000):
        if await written() == 2:
            break
        await asyncio.sleep(0.01)
    assert await written() == 2


async def test_a_store_that_is_closed_while_all_tasks_are_cancelled_has_the_metadata_written():
    store = SessionStore(store=(hooked := Hooked()), embedder=False)
    await store.append_message("s", user("hello"))
    await store.append_message("s", user("more"))
    session = store._logs.writers["s"]
    session._flush_soon()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await store.close()
    assert json.loads(await hooked.get("s/meta.json") or b"{}")["log_seq"] == 2
    assert session._timer is None


def test_the_metadata_follows_in_the_next_loop_too(tmp_path: Path):
    store = SessionStore(tmp_path, embedder=False)

    async def say(*words: str) -> None:
        for word in words:
            await store.append_message("s", user(word))

    async def until_counted() -> None:
        await say("three")
        async with asyncio.timeout(30):
            while b'"message_count": 3' not in (tmp_path / "s/meta.json").read_bytes():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    asyncio.run(say("one", "two"))
    asyncio.run(until_counted())


async def test_no_metadata_is_written_when_the_store_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_writer, "FLUSH_SECONDS", 0.1)
    store = SessionStore(store=MemoryStore(), embedder=False)
    await store.append_message("s", user("hello"))
    await asyncio.sleep(0.05)
    await store.append_message("s", user("written a moment later"))
    monkeypatch.setattr(session_writer, "FLUSH_SECONDS", 0)
    await store.append_message("s", user("written at once"))
    flushed: list[str] = []

    async def flush(self: session_writer.SessionWriter) -> None:
        flushed.append(self.folder)

    await store.close()
    monkeypatch.setattr(session_writer.SessionWriter, "flush", flush)
    await asyncio.sleep(0.3)
    assert flushed == []


async def test_a_draft_keeps_what_it_was_given_when_its_first_message_could_not_be_written(
    monkeypatch: pytest.MonkeyPatch,
):
    store = SessionStore(store=(memory := MemoryStore()), embedder=False)
    draft = store.draft_session("Drafted", model="m")["session"]["id"]

    async def full(*_: Any, **__: Any) -> int:
        raise StorageWriteError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "put", full)
        patch.setattr(memory, "append", full)
        with pytest.raises(StorageWriteError):
            await store.append_message(draft, user("hello"))
    await store.append_message(draft, user("hello"))
    meta = await SessionStore(store=memory, embedder=False).read_meta(draft)
    assert (meta["title"], meta["model"]) == ("Drafted", "m")


async def test_the_last_change_is_that_of_the_last_writer(reopened: Reopen):
    dates = iter(f"2026-01-0{day}T00:00:00+00:00" for day in range(1, 9))
    store, other = (reopened(now=lambda: next(dates)) for _ in range(2))
    await store.create_session("Given", session_id="s")
    for each in (store, other, store, other):
        await each.append_message("s", user("hello"))
    await other.close()
    await store.close()
    assert (await reopened().read_meta("s"))["updated_at"] == "2026-01-05T00:00:00+00:00"


async def test_a_rewind_is_not_taken_back_when_others_have_gone_on_from_it(monkeypatch: pytest.MonkeyPatch):
    memory = MemoryStore()
    storage = ConversationStorage(SessionStore(store=memory, embedder=False))
    talk = Conversation(info=SessionInfo(id="s", project_dir="/project", working_dir="/project"))
    for word in ("one", "two"):
        talk.create_user_message(word)
    await storage.create(talk)
    other = SessionStore(store=memory, embedder=False)

    async def fails(*_: Any) -> None:
        await other.append_message("s", user("theirs"))
        raise StorageReadError("the disk is gone")

    monkeypatch.setattr(storage, "_reload", fails)
    with pytest.raises(StorageReadError):
        await storage.rewind(talk, to_seq=1)
    assert await shown(other) == ["one", "theirs"]
