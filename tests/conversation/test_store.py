"""SessionStore as its users know it, on every backend."""

import asyncio
import base64
import json
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from carrel.conversation.log_entries import encode
from carrel.conversation.messages import (
    assistant_message,
    build_message,
    flatten_message_text,
    image_block,
    text_block,
    tool_result_block,
    user_text_message,
)
from carrel.conversation.store import SessionStore
from carrel.errors import (
    CompactRefused,
    ConfigurationError,
    MessageRefused,
    MetadataRefused,
    RewindRefused,
    SessionExists,
    SessionIdRefused,
    SessionNotFound,
)
from carrel.events import Event, bus
from carrel.storage.memory import MemoryStore
from tests.conversation.conftest import Reopen
from tests.support.messages import assistant, call, compact, outline, result, user


async def append(store: SessionStore, *messages: Any, session_id: str = "s") -> str:
    for message in messages:
        await store.append_message(session_id, message, provider="p", model="m", cwd="/tmp", api_base=None)
    return session_id


async def shown(store: SessionStore, session_id: str = "s") -> list[str]:
    data = await store.load_session(session_id)
    assert data is not None
    return outline(data["messages"])


# --- making and finding


async def test_a_session_is_made_with_its_metadata(store: SessionStore):
    data = await store.create_session("Trip", provider="openai", model="gpt", cwd="/tmp/x/..", api_base="http://a")
    meta = data["session"]
    assert data["messages"] == []
    assert (meta["title"], meta["provider"], meta["model"], meta["cwd"]) == ("Trip", "openai", "gpt", "/tmp")
    assert (meta["api_base"], meta["message_format_version"]) == ("http://a", 5)
    assert meta["created_at"] == meta["updated_at"]
    loaded = await store.load_session(meta["id"])
    assert loaded is not None
    assert loaded["session"] | {"updated_at": ""} == meta | {"updated_at": ""}


async def test_a_draft_is_nowhere_until_its_first_message(store: SessionStore, reopened: Reopen):
    draft = store.draft_session("x", provider="p", model="m", cwd=".", api_base=None)["session"]
    assert await store.load_session(draft["id"]) is None
    assert await store.list_sessions() == []
    await append(store, user("hi"), session_id=draft["id"])
    assert await shown(reopened(), draft["id"]) == ["hi"]


async def test_an_id_that_exists_is_a_clear_error(store: SessionStore, reopened: Reopen):
    await store.create_session(session_id="a")
    for again in (store, reopened()):
        with pytest.raises(SessionExists, match="session a exists"):
            await again.create_session(session_id="a")
    with pytest.raises(FileExistsError):
        await store.create_session(session_id="a")


async def test_of_ten_who_make_the_same_session_one_succeeds(reopened: Reopen):
    outcomes = await asyncio.gather(
        *(reopened().create_session(session_id="a", title=str(n)) for n in range(10)), return_exceptions=True
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["SessionExists"] * 9 + ["dict"]


@pytest.mark.parametrize(
    "bad",
    ["", ".", "..", "a/b", "../a", "/etc", "a\\b", "a\x00", "a\nb", ".hidden", "-x", "é", "a" * 129, None, 5, "a b"],
)
async def test_an_id_that_is_no_plain_name_is_refused_everywhere(store: SessionStore, bad: Any):
    for attempt in (
        lambda: store.create_session(session_id=bad or 0),  # type: ignore[arg-type]
        lambda: store.append_message(bad, user("x")),
        lambda: store.load_session(bad),
        lambda: store.delete_session(bad),
        lambda: store.append_rewind(bad, 0),
        lambda: store.fork_session(bad),
        lambda: store.read_meta(bad),
    ):
        with pytest.raises(SessionIdRefused):
            await attempt()
    assert await store.list_sessions() == []


async def test_an_unknown_session_is_none_or_a_clear_error(store: SessionStore):
    assert await store.load_session("unknown") is None
    assert store.load_session_sync("unknown") is None
    assert await store.delete_session("unknown") is False
    for attempt in (
        store.fork_session("unknown"),
        store.label("unknown", "x"),
        store.export("unknown"),
        store.usage("unknown"),
        store.rename("unknown", "x"),
    ):
        with pytest.raises(SessionNotFound, match="no session unknown"):
            await attempt
    with pytest.raises(KeyError):
        await store.read_meta("unknown")


async def test_the_list_is_newest_first_and_fresh(store: SessionStore, reopened: Reopen):
    other = reopened()
    for name in ("a", "b", "c"):
        await append(store, user(name), session_id=name)
    assert [meta["id"] for meta in await store.list_sessions()] == ["c", "b", "a"]
    assert [meta["id"] for meta in await other.list_sessions()] == ["c", "b", "a"]
    await append(other, user("again"), session_id="a")
    assert [meta["id"] for meta in await other.list_sessions()] == ["a", "c", "b"]
    await other.close()
    assert [meta["id"] for meta in await store.list_sessions()] == ["a", "c", "b"]
    await other.delete_session("c")
    assert [meta["id"] for meta in await store.list_sessions()] == ["a", "b"]
    latest = await store.latest_session()
    assert latest is not None
    assert latest["id"] == "a"


async def test_the_list_by_folder_and_archive(store: SessionStore):
    await store.create_session(session_id="a", cwd="/tmp/one")
    await store.create_session(session_id="b", cwd="/tmp/two/../two")
    assert [meta["id"] for meta in await store.list_sessions(cwd="/tmp/two")] == ["b"]
    assert await store.latest_session(cwd="/nowhere") is None
    await store.archive("a")
    assert [meta["id"] for meta in await store.list_sessions(archived=False)] == ["b"]
    assert [meta["id"] for meta in await store.list_sessions(archived=True)] == ["a"]
    await store.unarchive("a")
    assert len(await store.list_sessions(archived=False)) == 2


async def test_what_a_caller_does_to_a_list_stays_with_the_caller(store: SessionStore):
    await store.create_session("x", session_id="a")
    (await store.list_sessions())[0]["title"] = "changed"
    assert (await store.list_sessions())[0]["title"] == "x"


async def test_ids_by_their_beginning_or_last(store: SessionStore):
    with pytest.raises(SessionNotFound, match="no sessions yet"):
        await store.resolve_id("last")
    for name in ("alpha", "alps", "beta"):
        await store.create_session(session_id=name)
    assert await store.resolve_id("be") == "beta"
    assert await store.resolve_id("last") == "beta"
    assert await store.resolve_id("alpha") == "alpha"
    with pytest.raises(SessionNotFound, match="2 sessions begin with 'al'"):
        await store.resolve_id("al")
    for nothing in ("x", "", "../a"):
        with pytest.raises(SessionNotFound):
            await store.resolve_id(nothing)


async def test_the_title_comes_from_the_first_words_of_the_user(store: SessionStore, reopened: Reopen):
    await store.create_session("New chat", session_id="s")
    await append(store, assistant("hello"), user("  Please fix\nthe parser, " + "x" * 60), user("more"))
    title = "Please fix the parser, " + "x" * 25
    assert len(title) == 48
    assert (await store.read_meta("s"))["title"] == title
    assert (await reopened().read_meta("s"))["title"] == title
    await store.create_session("Mine", session_id="t")
    await append(store, user("hi"), session_id="t")
    assert (await store.read_meta("t"))["title"] == "Mine"


# --- writing and reading


async def test_messages_come_back_as_they_were(store: SessionStore, reopened: Reopen):
    messages = [
        user("hi"),
        assistant("hello", provider="p", model="m", usage={"input_tokens": 1}, native_meta={"x": [1, None]}),
        {"role": "moderator", "content": [{"type": "hologram"}], "extra": {"deep": [1.5, "é", "\x00"]}},
        {"role": "user", "content": "plain"},
    ]
    await append(store, *messages)
    for again in (store, reopened()):
        data = await again.load_session("s")
        assert data is not None
        assert data["messages"] == messages
        assert "problems" not in data
    assert store.load_session_sync("s") == await store.load_session("s")


async def test_every_entry_has_its_number(store: SessionStore):
    assert await store.append_message("s", user("a")) == 1
    assert await store.append_many("s", [user("b"), user("c")]) == 3
    assert await store.append_rewind("s", 1) == 4
    assert [seq async for seq, _ in store.iter_entries("s")] == [1, 2, 3, 4]
    assert [seq async for seq, _ in store.iter_entries("s", from_seq=3)] == [3, 4]


async def test_two_hundred_appends_at_once_lose_and_mix_nothing(store: SessionStore, reopened: Reopen):
    seqs = await asyncio.gather(*(store.append_message("s", user(str(n))) for n in range(200)))
    assert list(seqs) == list(range(1, 201))
    assert await shown(reopened()) == [str(n) for n in range(200)]


async def test_order_is_that_of_the_calls_also_with_large_messages_between(store: SessionStore):
    sizes = [10, 100_000, 10, 200_000, 10]
    messages = [
        build_message("user", [tool_result_block(tool_use_id=str(n), model_text=str(n) * s)])
        for n, s in enumerate(sizes)
    ]
    await asyncio.gather(*(store.append_message("s", message) for message in messages))
    assert [entry async for _, entry in store.iter_entries("s")] == messages


async def test_many_at_once_are_all_or_none(store: SessionStore):
    await append(store, user("a"))
    with pytest.raises(MessageRefused):
        await store.append_many("s", [user("b"), {"no": "role"}])
    assert await shown(store) == ["a"]


async def test_large_outputs_and_pictures_come_back_whole(store: SessionStore, reopened: Reopen):
    picture = base64.b64encode(bytes(100_000)).decode()
    message = build_message(
        "user",
        [tool_result_block(tool_use_id="t", model_text="x" * 60_000), image_block(picture, mime_type="image/png")],
    )
    await append(store, call("t"), message)
    for again in (store, reopened()):
        data = await again.load_session("s")
        assert data is not None
        assert data["messages"][1] == message
        assert [m async for m in again.iter_messages("s")][1] == message
        assert picture in await again.export("s")


async def test_a_conversation_one_message_at_a_time(store: SessionStore):
    await append(store, user("a"), user("b"), user("c"))
    await store.append_rewind("s", 2)
    await append(store, compact("sum", 2), user("d"))
    assert outline([message async for message in store.iter_messages("s")]) == ["(sum)", "(ack)", "b", "d"]
    assert outline([message async for message in store.iter_messages("s")]) == await shown(store)


async def test_following_a_session_while_another_writes(store: SessionStore, reopened: Reopen):
    await append(store, user("a"))
    other = reopened()
    seen: list[tuple[int, str]] = []
    began = asyncio.Event()

    async def follow() -> None:
        async for seq, entry in other.tail("s"):
            seen.append((seq, flatten_message_text(entry)))
            began.set()
            if len(seen) == 3:
                return

    task = asyncio.create_task(follow())
    await asyncio.wait_for(began.wait(), 60)
    await append(store, user("b"), user("c"))
    await asyncio.wait_for(task, 60)
    assert seen == [(1, "a"), (2, "b"), (3, "c")]


# --- going back


async def test_rewinding_to_a_number_of_messages(store: SessionStore, reopened: Reopen):
    await append(store, user("a"), user("b"), user("c"))
    await store.append_rewind("s", 1)
    await append(store, user("d"))
    assert await shown(reopened()) == ["a", "d"]


@pytest.mark.parametrize("place", [-1, 4, 1.0, "1", None, True])
async def test_a_rewind_to_nowhere_writes_nothing(store: SessionStore, place: Any):
    await append(store, user("a"), user("b"), user("c"))
    with pytest.raises(RewindRefused):
        await store.append_rewind("s", place)
    with pytest.raises(ValueError, match=r"to_seq|say where"):
        await store.append_rewind("s", to_seq=place)
    assert [seq async for seq, _ in store.iter_entries("s")] == [1, 2, 3]


async def test_what_a_compact_has_replaced_is_neither_read_nor_counted(tmp_path: Path):
    first, second = SessionStore(tmp_path, embedder=False), SessionStore(tmp_path, embedder=False)
    await append(first, user("a"), user("b"))
    await second.append_many("s", [user("x" * 1000) for _ in range(1000)])
    await append(first, user("c"), assistant("d"))

    async def summarize(messages: Any) -> str:
        return "sum"

    await first.compact("s", summarize, keep_turns=1)
    await first.close()
    await second.close()
    with (tmp_path / "s/messages.jsonl").open("r+b") as log:
        log.write(b"x" * 900_000)  # lines that are gone: counting them would give wrong numbers
    data = await SessionStore(tmp_path, embedder=False).load_session("s")
    assert data is not None
    assert outline(data["messages"]) == ["(sum)", "(ack)", "c", "d"]


async def test_rewinding_to_an_entry_before_a_compact_brings_the_originals_back(store: SessionStore):
    await append(store, user("a"), user("b"), compact("sum"), user("c"))
    assert await shown(store) == ["(sum)", "(ack)", "c"]
    await store.append_rewind("s", to_seq=2)
    assert await shown(store) == ["a", "b"]


async def test_clearing_shows_nothing_and_keeps_the_log(store: SessionStore):
    await append(store, user("a"))
    await store.clear_session("s")
    assert await shown(store) == []
    assert [flatten_message_text(entry) async for _, entry in store.iter_entries("s")] == ["a", ""]
    await append(store, user("b"))
    assert await shown(store) == ["b"]


async def test_deleting_removes_everything(store: SessionStore, reopened: Reopen):
    await append(store, user("a"))
    assert await store.delete_session("s") is True
    for again in (store, reopened()):
        assert await again.load_session("s") is None
        assert await again.list_sessions() == []
    await append(store, user("anew"))
    assert await shown(reopened()) == ["anew"]


async def test_a_session_deleted_by_another_does_not_come_back(store: SessionStore, reopened: Reopen):
    await append(store, user("a"))
    await reopened().delete_session("s")
    for _ in range(3):
        with pytest.raises(SessionNotFound, match="was deleted"):
            await append(store, user("b"))
    await store.close()
    assert await reopened().load_session("s") is None
    assert await reopened().list_sessions() == []
    await store.create_session(session_id="s")
    await append(store, user("c"))
    assert await shown(store) == ["c"]


# --- interrupted tool calls


async def test_an_interrupted_tool_call_is_repaired_once(store: SessionStore, reopened: Reopen):
    await append(store, user("go"), call("a", "b"), result("a"))
    await store.close()
    again = reopened()
    for _ in range(3):
        assert await shown(again) == ["go", "call:a call:b", "result:a", "stand-in:b"]
    assert [seq async for seq, _ in again.iter_entries("s")] == [1, 2, 3, 4]


async def test_a_real_result_that_comes_late_beats_the_stand_in(store: SessionStore):
    await append(store, user("go"), call("a"))
    assert await shown(store) == ["go", "call:a", "stand-in:a"]
    await append(store, user("well?"), result("a"))
    assert await shown(store) == ["go", "call:a", "result:a", "well?"]


async def test_rewind_counts_what_load_shows_also_with_repairs_in_view(store: SessionStore):
    await append(store, call("a"), assistant("hm"), user("x"))
    assert await shown(store) == ["call:a", "stand-in:a", "hm", "x"]
    await store.append_rewind("s", 3)
    assert await shown(store) == ["call:a", "stand-in:a", "hm"]


# --- branching, marks, metadata


async def test_a_fork_has_the_same_past_and_its_own_future(store: SessionStore, reopened: Reopen):
    await append(store, user("a"), assistant("b", usage={"total_tokens": 7}, model="m"), user("c"))
    fork = await store.fork_session("s", title="Branch")
    id_ = fork["session"]["id"]
    assert outline(fork["messages"]) == ["a", "b", "c"]
    await append(store, user("left"))
    await append(store, user("right"), session_id=id_)
    again = reopened()
    assert await shown(again) == ["a", "b", "c", "left"]
    assert await shown(again, id_) == ["a", "b", "c", "right"]
    meta = await again.read_meta(id_)
    assert (meta["parent_session_id"], meta["root_session_id"], meta["forked_at_seq"]) == ("s", "s", 3)
    assert (meta["title"], meta["model"], meta["cwd"]) == ("Branch", "m", "/tmp")
    assert [child["id"] for child in await again.children("s")] == [id_]
    assert (await again.usage("s")).total.total_tokens == 7
    assert (await again.usage(id_)).total.total_tokens == 0
    deeper = await again.fork_session(id_)
    assert deeper["session"]["root_session_id"] == "s"


async def test_a_fork_at_an_earlier_entry(store: SessionStore):
    await append(store, user("a"), user("b"), user("c"))
    assert outline((await store.fork_session("s", at=2))["messages"]) == ["a", "b"]
    assert (await store.fork_session("s", at=0))["messages"] == []
    for nowhere in (-1, 4, "2"):
        with pytest.raises(RewindRefused):
            await store.fork_session("s", at=nowhere)  # type: ignore[arg-type]
    assert len(await store.list_sessions()) == 3


async def test_a_fork_lives_on_when_its_parent_is_deleted(store: SessionStore, reopened: Reopen):
    big = build_message("user", [tool_result_block(tool_use_id="t", model_text="y" * 80_000)])
    await append(store, call("t"), big)
    fork = (await store.fork_session("s"))["session"]["id"]
    await store.delete_session("s")
    data = await reopened().load_session(fork)
    assert data is not None
    assert data["messages"][1] == big


async def test_labels_pins_tags_and_names_survive_lost_metadata(store: SessionStore, reopened: Reopen):
    await append(store, user("a"), user("b"))
    assert await store.label("s", "first", at=1) == 1
    assert await store.label("s", "here") == 3
    await store.pin("s", 2)
    await store.set_tags("s", ["x", "b", "x"])
    await store.rename("s", "Named")
    for nowhere in (0, 99):
        with pytest.raises(RewindRefused):
            await store.label("s", "?", at=nowhere)
    await store._logs.store.put("s/meta.json", b"[]")
    await store.close()
    again = reopened()
    assert [(label["text"], label["at_seq"]) for label in await again.labels("s")] == [("first", 1), ("here", 3)]
    meta = await again.read_meta("s")
    assert (meta["tags"], meta["title"], meta["pins"]) == (["b", "x"], "Named", [2])
    assert [listed["title"] for listed in await again.list_sessions()] == ["Named"]
    assert await shown(again) == ["a", "b"]


async def test_two_who_write_keep_what_the_other_set(store: SessionStore, reopened: Reopen):
    other = reopened()
    await append(store, user("a"))
    await append(other, user("b"))
    await other.rename("s", "Named by the other")
    await store.set_tags("s", ["mine"])
    await other.label("s", "theirs")
    await append(store, user("c"))
    await store.close()
    await other.close()
    meta = await reopened().read_meta("s")
    assert (meta["title"], meta["tags"], meta["labels"][0]["text"]) == ("Named by the other", ["mine"], "theirs")


@pytest.mark.parametrize("broken", [b"", b"[]", b"null", b"{", b'"x"', b"\xff", b'{"title": 5}', b'{"created_at": []}'])
async def test_broken_metadata_is_made_again_and_hides_no_other(store: SessionStore, reopened: Reopen, broken: bytes):
    await append(store, user("good"), session_id="good")
    await append(store, user("words of the user"), assistant("x", provider="openai", model="gpt"), session_id="bad")
    await store.close()
    await store._logs.store.put("bad/meta.json", broken)
    # As sessions of other programs are: all that is known is in the log.
    await store._logs.store.delete("bad/created.jsonl")
    again = reopened()
    assert {meta["id"]: meta["title"] for meta in await again.list_sessions()} == {
        "good": "good",
        "bad": "words of the user",
    }
    assert await shown(again, "bad") == ["words of the user", "x"]
    await append(again, user("more"), session_id="bad")
    meta = await reopened().read_meta("bad")
    assert (meta["provider"], meta["model"], meta["title"]) == ("openai", "gpt", "words of the user")


async def test_a_session_from_a_newer_version_is_refused_and_left_alone(store: SessionStore, reopened: Reopen):
    await append(store, user("a"))
    await store.close()
    future = b'{"id": "s", "message_format_version": 6, "title": "Future"}'
    await store._logs.store.put("s/meta.json", future)
    again = reopened()
    for attempt in (
        again.load_session("s"),
        again.append_message("s", user("b")),
        again.read_meta("s"),
        again.fork_session("s"),
    ):
        with pytest.raises(ValueError, match=r"format 6.*update carrel"):
            await attempt
    assert await again._logs.store.get("s/meta.json") == future
    assert [(meta["id"], meta["message_format_version"]) for meta in await again.list_sessions()] == [("s", 6)]


async def test_counts_are_kept_with_the_metadata(store: SessionStore, reopened: Reopen):
    await append(store, user("a"), assistant("b", usage={"input_tokens": 2, "output_tokens": 3}), user("c"))
    await store.close()
    for again in (store, reopened()):
        [meta] = await again.list_sessions(counts=True)
        assert (meta["message_count"], meta["total_tokens"]) == (3, 5)
    await store.append_rewind("s", 1)
    [meta] = await store.list_sessions(counts=True)
    assert (meta["message_count"], meta["total_tokens"]) == (1, 5)
    other = reopened()
    await append(other, user("d"))
    await append(store, user("e"))
    [meta] = await reopened().list_sessions(counts=True)
    assert meta["message_count"] == 3


@pytest.mark.parametrize("tags", ["red", [1], [None], [""], [" "]])
async def test_tags_that_are_no_texts_are_refused(store: SessionStore, tags: Any):
    await append(store, user("one"))
    with pytest.raises(MetadataRefused):
        await store.set_tags("s", tags)
    assert (await store.set_tags("s", ["red", "blue", "red"]))["tags"] == ["blue", "red"]


async def test_only_the_logs_of_those_that_are_shown_are_counted():
    read_from: set[str] = set()

    class Noting(MemoryStore):
        def read(self, key: str, from_seq: int = 1) -> Any:
            read_from.add(key)
            return super().read(key, from_seq)

    noting = Noting()
    for name in "abc":
        await noting.append(f"{name}/messages.jsonl", [encode(user(name))])
        await noting.put(f"{name}/meta.json", b'{"title": "by another program"}')
    store = SessionStore(store=noting, embedder=False)
    [meta] = await store.counted((await store.list_sessions())[:1])
    assert meta["message_count"] == 1
    assert read_from == {f"{meta['id']}/messages.jsonl"}


async def test_metadata_made_again_has_what_was_given(store: SessionStore, reopened: Reopen):
    given = {"provider": "openai", "model": "gpt", "cwd": "/proj", "api_base": "http://x"}
    made = (await store.create_session("My title", session_id="a", team="blue", **given))["session"]
    await store.append_message("a", user("first words"))
    await store.append_message("a", assistant("x", provider="other", model="another"))
    fork = (await store.fork_session("a", new_id="b"))["session"]
    await store.append_message("b", assistant("y", provider="other", model="another"))
    await store.close()
    for broken in (b"null", b"", b"{"):
        for id_, before in (("a", made), ("b", fork)):
            await store._logs.store.put(f"{id_}/meta.json", broken)
            again = reopened()
            (meta,) = [meta for meta in await again.list_sessions(cwd="/proj") if meta["id"] == id_]
            same = ("title", "created_at", *given)
            assert {name: value for name, value in meta.items() if name in same} == {
                name: value for name, value in before.items() if name in same
            }
            assert meta["updated_at"] == (await reopened().read_meta(id_))["updated_at"]
        assert dict(await again.read_meta("a"))["team"] == "blue"
    assert (await store.rename("a", "Renamed"))["title"] == "Renamed"
    await store._logs.store.put("a/meta.json", b"null")
    assert (await reopened().read_meta("a"))["title"] == "Renamed"


async def test_a_session_with_nothing_but_its_log_has_the_date_of_the_log(store: SessionStore, reopened: Reopen):
    await store._logs.store.append("a/messages.jsonl", [b'{"role":"user","content":"by another program"}'])
    stamp = await store._logs.store.stamp("a/messages.jsonl")
    assert stamp is not None
    written = datetime.fromtimestamp(stamp.modified, UTC).isoformat()
    for _ in range(2):
        (meta,) = await reopened(now=lambda: "2099-01-01T00:00:00+00:00").list_sessions()
        assert (meta["created_at"], meta["updated_at"]) == (written, written)
        assert meta["title"] == "by another program"


# --- compaction


async def test_compacting_with_the_users_own_function(store: SessionStore, reopened: Reopen):
    await append(store, user("one"), assistant("1"), user("two"), call("a"), result("a"), user("three"), assistant("3"))
    await store.pin("s", 1)
    given: list[list[str]] = []

    async def summarize(messages: list[Any]) -> Any:
        given.append(outline(messages))
        return "what we did", {"input_tokens": 9, "output_tokens": 1}

    entry = await store.compact("s", summarize, keep_turns=1)
    assert given == [["one", "1", "two", "call:a", "result:a"]]
    assert entry["meta"]["report"]["messages"] == 5
    assert entry["meta"]["compacted_count"] == 5
    for again in (store, reopened()):
        seen = await shown(again)
        assert seen[0].startswith("(what we did")
        assert "one" in seen[0]
        assert seen[1:] == ["(ack)", "three", "3"]
    assert (await store.usage("s")).total.total_tokens == 10
    assert "two" in await store.export("s", "jsonl")
    await store.append_rewind("s", to_seq=7)
    assert await shown(store) == ["one", "1", "two", "call:a", "result:a", "three", "3"]


async def test_messages_appended_during_a_summary_stay(store: SessionStore):
    await append(store, user("one"), assistant("1"))

    async def slow(messages: list[Any]) -> str:
        await append(store, user("meanwhile"))
        return "sum"

    await store.compact("s", slow, keep_turns=0)
    assert await shown(store) == ["(sum)", "(ack)", "meanwhile"]


async def test_a_summary_that_fails_changes_nothing(store: SessionStore):
    await append(store, user("one"), assistant("1"), user("two"))

    async def empty(messages: list[Any]) -> str:
        return " "

    async def broken(messages: list[Any]) -> str:
        raise OSError("no model")

    with pytest.raises(CompactRefused):
        await store.compact("s", empty, keep_turns=1)
    with pytest.raises(OSError, match="no model"):
        await store.compact("s", broken, keep_turns=1)
    assert await shown(store) == ["one", "1", "two"]


async def sums(messages: list[Any]) -> str:
    return "sum"


async def test_long_results_are_measured_whole_when_a_conversation_is_compacted(store: SessionStore):
    for name in "abcd":
        await append(store, user(name), call(name), result(name, text="word " * 40_000), assistant("done"))
    report = (await store.compact("s", sums, keep_tokens=60_000))["meta"]["report"]
    assert report["messages"] == 12
    assert report["tokens"] > 3 * 50_000
    assert 3 * 200_000 < report["bytes"] < 4 * 200_000
    assert (await shown(store))[2:] == ["d", "call:d", "result:d", "done"]


async def test_large_images_are_measured_whole_when_a_conversation_is_compacted(store: SessionStore):
    data = base64.b64encode(bytes(range(256)) * 300).decode()
    for _ in range(4):
        await append(store, build_message("user", [image_block(data, mime_type="image/png")]), assistant("seen"))
    report = (await store.compact("s", sums, keep_tokens=2000))["meta"]["report"]
    assert report["messages"] == 6
    assert report["bytes"] > 3 * len(data)


async def test_what_is_pinned_survives_every_compaction(store: SessionStore, reopened: Reopen):
    await append(store, user("the first rule"), assistant("1"), user("two"), assistant("2"))
    await store.pin("s", 1)
    for number in range(3):
        await store.compact("s", sums, keep_turns=0)
        await append(store, user(f"more {number}"), assistant("yes"))
        assert "the first rule" in (await shown(reopened()))[0]
    await store.pin("s", 3)
    await store.compact("s", sums, keep_turns=0)
    seen = await shown(store)
    assert seen[0].count("the first rule") == 1
    assert "two" in seen[0]


async def test_a_long_result_that_is_pinned_stays_whole(store: SessionStore):
    long = "head " + "x" * 60_000 + " middle " + "y" * 60_000
    await append(store, user("q"), call("a"), result("a", text=long), assistant("so"), user("next"))
    await store.pin("s", 3)
    await store.compact("s", sums, keep_turns=1)
    assert long in (await shown(store))[0]


@pytest.mark.parametrize("size", [100, 100_000])
async def test_an_image_that_is_pinned_stays_an_image(store: SessionStore, reopened: Reopen, size: int):
    picture = image_block(base64.b64encode(bytes(size)).decode(), mime_type="image/png", name="a.png")
    taken = tool_result_block(tool_use_id="a", model_text="taken", content=[text_block("taken"), picture])
    await append(store, call("a"), build_message("user", [taken]), build_message("user", [text_block("look"), picture]))
    await append(store, assistant("so"), user("next"))
    await store.pin("s", 2)
    await store.pin("s", 3)
    for _ in range(2):
        await store.compact("s", sums, keep_turns=0)
        await append(store, user("more"), assistant("yes"))
        data = await reopened().load_session("s")
        assert data is not None
        assert data["messages"][0]["content"][1:] == [picture]
        assert await anext(store.iter_messages("s")) == data["messages"][0]
    assert picture["data"] in await store.export("s", "html")


async def test_a_pin_does_not_bring_back_what_was_rewound(store: SessionStore):
    await append(store, user("keep"), user("wrong"))
    await store.pin("s", 1)
    await store.pin("s", 2)
    await store.append_rewind("s", 1)
    await append(store, user("right"))
    await store.compact("s", sums, keep_turns=0)
    assert "wrong" not in (await shown(store))[0]
    await append(store, user("more"))
    await store.compact("s", sums, keep_turns=0)
    assert "keep" in (await shown(store))[0]
    assert "wrong" not in (await shown(store))[0]


@pytest.mark.parametrize("change", ["rewind", "compact"])
async def test_a_summary_of_what_was_changed_meanwhile_is_not_written(store: SessionStore, change: str):
    await append(store, user("one"), assistant("1"), user("two"), assistant("2"))

    async def slow(messages: list[Any]) -> str:
        await store.label("s", "while it was written")
        if change == "rewind":
            await store.append_rewind("s", 0)
        else:
            await store.compact("s", sums, keep_turns=0)
        return "a late summary"

    with pytest.raises(CompactRefused, match="changed meanwhile"):
        await store.compact("s", slow, keep_turns=1)
    assert await shown(store) == ([] if change == "rewind" else ["(sum)", "(ack)"])


@pytest.mark.parametrize("wrong", [{"keep_turns": "x"}, {"keep_turns": -1}, {"keep_tokens": None}, {"keep_turns": 1.5}])
async def test_how_much_stays_is_a_whole_number(store: SessionStore, wrong: Any):
    await append(store, user("one"), assistant("1"))
    with pytest.raises(ConfigurationError, match="must be an integer of 0 or more"):
        await store.compact("s", sums, **wrong)


# --- the rest


async def test_redaction_comes_before_anything_is_written(reopened: Reopen):
    def redact(message: Any) -> Any:
        return build_message(message["role"], [text_block(flatten_message_text(message).replace("secret", "***"))])

    store = reopened(redact=redact)
    await store.append_message("s", user("the secret is out"))
    assert await shown(reopened()) == ["the *** is out"]
    assert "secret" not in str([await store._logs.store.get(key) for key in await store._logs.store.list()])
    assert (await store.read_meta("s"))["title"] == "the *** is out"


async def test_pruning_by_age(reopened: Reopen):
    clock = ["2026-01-01T00:00:00+00:00"]
    store = reopened(now=lambda: clock[0])
    for name in ("old", "named"):
        await append(store, user("x"), session_id=name)
    await store.label("named", "keep")
    clock[0] = "2026-03-01T00:00:00+00:00"
    await append(store, user("x"), session_id="new")
    assert [meta["id"] for meta in await store.prune(timedelta(days=30))] == ["old"]
    assert len(await store.list_sessions()) == 3
    await store.prune(timedelta(days=30), dry_run=False)
    assert {meta["id"] for meta in await store.list_sessions()} == {"named", "new"}
    await store.prune(timedelta(days=30), keep_labelled=False, dry_run=False)
    assert {meta["id"] for meta in await store.list_sessions()} == {"new"}


async def test_a_session_of_a_newer_format_is_never_pruned(reopened: Reopen, caplog: pytest.LogCaptureFixture):
    store = reopened()
    await append(store, user("from the future"), session_id="newer")
    await append(store, user("of today"), session_id="ours")
    await store.label("newer", "keep me")
    await store.close()
    files = store._logs.store
    raw = json.loads(await files.get("newer/meta.json") or b"") | {"message_format_version": 6}
    await files.put("newer/meta.json", json.dumps(raw).encode())
    await asyncio.sleep(0.01)
    store = reopened()
    for labelled in (True, False):
        pruned = await store.prune(timedelta(0), keep_labelled=labelled, dry_run=not labelled)
        assert [meta["id"] for meta in pruned] == (["ours"] if labelled else [])
        assert [meta["id"] for meta in await store.list_sessions()] == ["newer"]
    assert "a newer carrel wrote them: newer" in caplog.text


@pytest.mark.parametrize("wrong", ["30d", 0, 30, None, timedelta(days=-1)])
async def test_an_age_is_a_timedelta(store: SessionStore, wrong: Any):
    await append(store, user("a"))
    with pytest.raises(ConfigurationError, match="timedelta"):
        await store.prune(wrong, dry_run=False)
    assert await store.prune(timedelta.max, dry_run=False) == []
    assert await shown(store) == ["a"]


async def test_a_search_wants_a_text_and_a_number(store: SessionStore):
    with pytest.raises(ConfigurationError, match="limit is a whole number, not 'x'"):
        await store.search("a", limit="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="must be a text, not None"):
        await store.search(None)  # type: ignore[arg-type]


async def test_the_three_exports(store: SessionStore):
    await append(store, user("a <b>"), assistant_message([text_block("c")]))
    assert (await store.export("s")).count("\n") == 2
    assert "> a <b>" in await store.export("s", "markdown")
    assert "a &lt;b&gt;" in await store.export("s", "html")
    with pytest.raises(ConfigurationError, match="jsonl, markdown or html"):
        await store.export("s", "pdf")  # type: ignore[arg-type]


async def test_closing_twice_and_going_on(store: SessionStore, reopened: Reopen):
    await append(store, user("a"))
    await store.close()
    await store.close()
    await append(store, user("b"))
    assert await shown(reopened()) == ["a", "b"]


def test_bad_settings_are_refused():
    with pytest.raises(ConfigurationError, match="'os' or 'fsync'"):
        SessionStore("/tmp/x", durability="disk")  # type: ignore[arg-type]


async def test_an_old_programs_call_still_works(store: SessionStore):
    await store.append_message("s", user_text_message("hi"), provider="anthropic", model="m", cwd=".", api_base=None)
    assert await shown(store) == ["hi"]


async def test_subscribers_get_an_event_for_each_change(store: SessionStore):
    heard: list[tuple[str, dict[str, Any]]] = []
    forget = bus.subscribe_all(lambda event: heard.append((str(event.type), event.data)))
    try:
        await append(store, user("a"), user("b"))
        await store.append_rewind("s", 1)
        await store.label("s", "here")
        await store.rename("s", "Another title")
        await store.fork_session("s", new_id="f")
        await store.archive("s")
        await store.unarchive("s")
        await store.delete_session("s")
        await store.delete_session("s")
        await bus.publish(Event("test.end", {"session_id": "end"}))
    finally:
        forget()
    mine = [(kind, data) for kind, data in heard if data["session_id"] == "s"]
    assert [kind for kind, _ in mine] == [
        "session.created",
        "message.created",
        "session.updated",
        "message.created",
        "session.updated",
        "session.rewound",
        "session.labelled",
        "session.updated",
        "session.forked",
        "session.archived",
        "session.unarchived",
        "session.deleted",
    ]
    titles = [data["title"] for kind, data in mine if kind != "session.forked"]
    assert titles == ["a"] * 7 + ["Another title"] * 4
    assert [(data["role"], data["seq"]) for kind, data in mine if kind == "message.created"] == [
        ("user", 1),
        ("user", 2),
    ]


async def test_a_new_session_is_published_once(store: SessionStore):
    heard: list[tuple[str, str]] = []
    forget = bus.subscribe_all(lambda event: heard.append((str(event.type), event.data.get("title", ""))))
    try:
        await store.create_session("Made", session_id="m")
        await store.append_many("m", [user("a"), user("b")])
        draft = store.draft_session("Drafted")["session"]["id"]
        await store.append_message(draft, user("c"))
        await bus.publish(Event("test.end", {}))
    finally:
        forget()
    assert heard[:-1] == [
        ("session.created", "Made"),
        ("message.created", "Made"),
        ("message.created", "Made"),
        ("session.updated", "Made"),
        ("session.created", "Drafted"),
        ("message.created", "Drafted"),
        ("session.updated", "Drafted"),
    ]


async def test_going_back_and_exporting_do_not_hold_a_long_log(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=False) as store:
        long = [user_text_message(f"{number} " + "x" * 30_000) for number in range(1_500)]
        await store.append_many("a", long)
        del long
        tracemalloc.start()
        try:
            assert await store.append_rewind("a", 1_400) == 1_501
            assert await store.append_rewind("a", to_seq=1_300) == 1_502
            assert sum([len(line) async for line in store.export_lines("a")]) > 45_000_000
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        fork = await store.fork_session("a", 1_200, load=False)
        assert fork["messages"] == []
        assert fork["session"]["message_count"] == 1_200
        assert len([message async for message in store.iter_messages("a")]) == 1_300
        assert peak < 30_000_000
