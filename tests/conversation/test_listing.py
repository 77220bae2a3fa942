"""Lists of sessions: one that cannot be read hides no other, and dates are compared as dates."""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import orjson
import pytest

from carrel.conversation.models.conversation import ConversationStorage
from carrel.conversation.store import SessionStore
from carrel.errors import StorageReadError
from carrel.storage.base import Block
from carrel.storage.memory import MemoryStore
from tests.support.messages import user


class BadSectors(MemoryStore):
    """Some keys are there and cannot be read, as on a damaged disk or for want of permission."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: set[str] = set()

    def _look(self, key: str) -> None:
        if key in self.bad:
            raise StorageReadError(f"{key} could not be read: Input/output error")

    async def get(self, key: str) -> bytes | None:
        self._look(key)
        return await super().get(key)

    async def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        self._look(key)
        async for block in super().read(key, from_seq):
            yield block

    async def read_back(self, key: str, before_seq: int | None = None, **how: Any) -> AsyncIterator[Block]:
        self._look(key)
        async for block in super().read_back(key, before_seq, **how):
            yield block


async def ids(store: SessionStore, **how: Any) -> list[str]:
    return sorted(meta["id"] for meta in await store.list_sessions(**how))


@pytest.fixture
async def backend() -> BadSectors:
    backend = BadSectors()
    async with SessionStore(store=backend, embedder=False) as store:
        for name in ("a", "b"):
            await store.append_message(name, user(name))
    return backend


@pytest.mark.parametrize("file", ["meta.json", "messages.jsonl"])
async def test_a_session_that_cannot_be_read_fails_neither_a_search_nor_a_list_of_conversations(
    backend: BadSectors, file: str
):
    backend.bad = {f"a/{file}"}
    async with SessionStore(store=backend, embedder=False) as store:
        assert [hit.session_id for hit in await store.search("b")] == ["b"]
        assert [conversation.id for conversation in await ConversationStorage(store).list()] == ["b"]


@pytest.mark.parametrize("meta", [b"[]", b"", None])
async def test_a_log_that_cannot_be_read_hides_no_other_session(backend: BadSectors, meta: bytes | None) -> None:
    if meta is None:
        await backend.delete("a/meta.json")
    else:
        await backend.put("a/meta.json", meta)
    backend.bad.add("a/messages.jsonl")
    store = SessionStore(store=backend, embedder=False)
    for how in ({}, {"counts": True}):
        assert await ids(store, **how) == ["a", "b"]
    assert "could not be read" in {meta["id"]: meta["title"] for meta in await store.list_sessions()}["a"]
    assert [meta["id"] for meta in await store.prune(timedelta(0))] == ["b"], "what cannot be read is not deleted"
    assert len(await ConversationStorage(store).list_infos()) == 2
    with pytest.raises(StorageReadError):
        await store.read_meta("a")


async def test_a_log_that_is_ahead_of_its_metadata_and_cannot_be_read_is_listed(backend: BadSectors) -> None:
    await backend.append("a/messages.jsonl", [orjson.dumps(user("more"))])
    backend.bad.add("a/messages.jsonl")
    store = SessionStore(store=backend, embedder=False)
    titles = {meta["id"]: meta["title"] for meta in await store.list_sessions(counts=True)}
    assert titles == {"a": "a", "b": "b"}


async def test_metadata_that_cannot_be_read_hides_no_other_session(backend: BadSectors) -> None:
    backend.bad.add("a/meta.json")
    store = SessionStore(store=backend, embedder=False)
    assert await ids(store) == ["a", "b"]
    backend.bad.clear()
    assert {meta["title"] for meta in await SessionStore(store=backend, embedder=False).list_sessions()} == {"a", "b"}


@pytest.mark.parametrize("version", ["5", None, True, [5], {}])
async def test_an_odd_format_version_hides_no_other_session(backend: BadSectors, version: Any) -> None:
    meta = orjson.loads(await backend.get("a/meta.json") or b"")
    await backend.put("a/meta.json", orjson.dumps(meta | {"message_format_version": version}))
    store = SessionStore(store=backend, embedder=False)
    assert await ids(store, counts=True) == ["a", "b"]
    assert (await store.read_meta("a", counts=True))["message_format_version"] == 5
    assert len(await store.prune(timedelta(0))) == 2


async def change(backend: MemoryStore, session_id: str, **fields: Any) -> None:
    meta = orjson.loads(await backend.get(f"{session_id}/meta.json") or b"")
    await backend.put(f"{session_id}/meta.json", orjson.dumps(meta | fields))


async def test_dates_with_other_offsets_are_compared_as_dates(backend: BadSectors) -> None:
    moment = datetime.now(UTC)
    west = (moment - timedelta(minutes=1)).astimezone(timezone(timedelta(hours=-7)))
    east = (moment - timedelta(hours=2)).astimezone(timezone(timedelta(hours=9)))
    await change(backend, "a", updated_at=west.isoformat())
    await change(backend, "b", updated_at=east.isoformat())
    store = SessionStore(store=backend, embedder=False)
    assert [meta["id"] for meta in await store.list_sessions()] == ["a", "b"]
    assert [meta["id"] for meta in await store.prune(timedelta(hours=1))] == ["b"]
    latest = await store.latest_session()
    assert latest is not None
    assert latest["id"] == "a"


async def test_a_date_that_is_none_is_last_and_never_pruned(backend: BadSectors) -> None:
    await change(backend, "a", updated_at="yesterday")
    store = SessionStore(store=backend, embedder=False)
    assert [meta["id"] for meta in await store.list_sessions()] == ["b", "a"]
    assert [meta["id"] for meta in await store.prune(timedelta(0))] == ["b"]


async def test_garbage_is_collected_while_a_list_or_a_load_waits_for_storage() -> None:
    seen: list[bool] = []

    class Noting(MemoryStore):
        async def folders(self, prefix: str = "") -> list[str]:
            seen.append(gc.isenabled())
            return await super().folders(prefix)

        async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
            seen.append(gc.isenabled())
            return await super().get_many(keys)

        async def read_back(self, key: str, before_seq: int | None = None, **how: Any) -> AsyncIterator[Block]:
            seen.append(gc.isenabled())
            async for block in super().read_back(key, before_seq, **how):
                yield block

    store = SessionStore(store=Noting(), embedder=False)
    await store.append_message("a", user("x"))
    await store.list_sessions()
    await store.load_session("a")
    assert seen
    assert all(seen)


async def test_the_paths_of_a_store_with_a_prefix(tmp_path: Path) -> None:
    async with SessionStore(data_dir=tmp_path, prefix="p", embedder=False) as store:
        await store.append_message("a", user("x"))
    assert store.messages_path("a") == tmp_path / "p" / "a" / "messages.jsonl"
    assert store.messages_path("a").exists()
    assert store.meta_path("a").exists()


async def test_a_log_without_metadata_is_read_no_oftener_than_needed() -> None:
    reads: list[str] = []

    class Counting(MemoryStore):
        async def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
            reads.append(key)
            async for block in super().read(key, from_seq):
                yield block

    backend = Counting()
    async with SessionStore(store=backend, embedder=False) as store:
        await store.append_message("a", user("x"))
    await backend.delete("a/meta.json")
    reads.clear()
    data = await SessionStore(store=backend, embedder=False).load_session("a")
    assert data is not None
    assert data["session"]["title"] == "x"
    assert reads == ["a/messages.jsonl"]


async def test_appending_nothing_writes_nothing(backend: BadSectors) -> None:
    store = SessionStore(store=backend, embedder=False)
    before = await store.read_meta("a")
    assert await store.append_many("a", []) == 1
    assert await store.append_many("new", []) == 0
    assert await ids(store) == ["a", "b"]
    assert await store.read_meta("a") == before


async def test_broken_lines_that_make_whole_ones_together_are_reported(tmp_path: Path) -> None:
    """As many objects as lines, and yet no line is one."""
    folder = tmp_path / "a"
    folder.mkdir()
    lines = [
        b'{"role":"user","content":[]},{"role":"user","content":[]}',
        b'{"role":"user","content":["x"',
        b'"y"]}',
    ]
    (folder / "messages.jsonl").write_bytes(b"\n".join([*lines, b""]))
    data = await SessionStore(tmp_path, embedder=False).load_session("a")
    assert data is not None
    assert data["messages"] == []
    assert len(data["problems"]) == 3


async def test_what_a_store_remembers_does_not_grow_with_the_sessions_it_has_written() -> None:
    async with SessionStore(store=MemoryStore(), embedder=False) as store:
        for number in range(1200):
            await store.append_message(f"s{number}", user("x"))
        for number in range(1200, 1260):
            # Each is kept at hand until its metadata is written, a second later.
            await asyncio.sleep(0.1)
            await store.append_message(f"s{number}", user("x"))
            if len(store._logs.writers) <= 1000:
                break
        assert len(store._logs.writers) <= 1000
        await store.append_message("s0", user("y"))
        assert [seq async for seq, _ in store.iter_entries("s0")] == [1, 2]
        assert (await store.read_meta("s0", counts=True))["message_count"] == 2
        for number in range(1260):
            await store.delete_session(f"s{number}")
        assert not store._logs.writers
        assert not store._logs._incarnations
