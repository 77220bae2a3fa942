"""Damaged or malicious folders and messages affect only their own session."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from carrel.conversation.redaction import redact_secrets
from carrel.conversation.store import SessionStore
from carrel.errors import CarrelError, MetadataRefused, SessionNotFound
from tests.support.messages import outline, user

ASIDE = {"rewind_to": 9007199254740991, "created_at": "2026-01-01T00:00:00+00:00"}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    async with SessionStore(tmp_path / "sessions", embedder=False) as store:
        await store.append_message("good", user("hello"))
        yield store


def plant(store: SessionStore, *lines: Any, meta: bytes | None = None) -> Path:
    folder = store.session_dir("bad")
    folder.mkdir()
    (folder / "messages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if meta is not None:
        (folder / "meta.json").write_bytes(meta)
    return folder


async def all_is_well(store: SessionStore) -> list[str]:
    """Everything that looks at all sessions works, and the other session is untouched; what the bad one shows."""
    assert {meta["id"] for meta in await store.list_sessions(counts=True)} == {"good", "bad"}
    assert [hit.session_id for hit in await store.search("hello") if hit.session_id == "good"]
    data = await store.load_session("good")
    assert data is not None
    assert outline(data["messages"]) == ["hello"]
    bad = await store.load_session("bad")
    assert bad is not None
    for format in ("jsonl", "markdown", "html"):
        await store.export("bad", format)
    await store.usage("bad")
    await store.append_message("bad", user("more"))
    assert await store.delete_session("bad")
    return [str(message.get("content"))[:40] for message in bad["messages"]]


@pytest.mark.parametrize(
    "aside",
    [
        {"aside": "pin", "at_seq": []},
        {"aside": "pin", "at_seq": "x"},
        {"aside": "label", "text": {}, "at_seq": None},
        {"aside": "meta", "set": {"updated_at": 5, "id": "zz", "tags": 5, "title": None, "message_format_version": 99}},
        {"aside": "fork", "parent_session_id": 5, "at_seq": [], "created_at": {}},
        {"aside": []},
    ],
)
async def test_asides_of_the_wrong_kind(store: SessionStore, aside: dict[str, Any]):
    plant(store, user("x"), {"role": "rewind", "meta": ASIDE | aside}, {"role": "rewind", "meta": ASIDE | aside})
    assert len(await all_is_well(store)) == 1


@pytest.mark.parametrize(
    "meta",
    [
        {"labels": 5, "pins": 5, "tags": 5},
        {"message_count": "x", "total_tokens": [], "log_seq": "x", "log_bytes": 2},
        {"archived_at": 5, "parent_session_id": []},
    ],
)
async def test_metadata_of_the_wrong_kind(store: SessionStore, meta: dict[str, Any]):
    plant(store, user("x"), meta=json.dumps({"title": "t", **meta}).encode())
    assert len(await all_is_well(store)) == 1


@pytest.mark.parametrize(
    "path", ["blobs/../x", "tool-output/" + "a" * 400, "tool-output/\ud800", "blobs/", "/etc/passwd", 5]
)
async def test_references_that_lead_elsewhere(store: SessionStore, path: Any):
    blob = {"path": path, "bytes": 3, "sha256": "x", "encoding": "text", "block": {}}
    plant(store, {"role": "user", "spilled": 1, "content": [{"type": "text", "text": "x", "meta": {"blob": blob}}]})
    assert len(await all_is_well(store)) == 1


@pytest.mark.parametrize(
    "line",
    [
        {"role": "assistant", "content": [{"type": "tool_use", "id": [1], "name": "x", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": {}, "model_text": 5}]},
        {"role": "user", "content": [{"type": "text", "text": "hi \ud800 hello"}]},
        {"role": 5},
        {},
        {"role": "user", "content": 5, "meta": 5},
        {"role": "user", "content": [[], None, 5, {"type": []}]},
    ],
)
async def test_lines_of_odd_shapes(store: SessionStore, line: dict[str, Any]):
    plant(store, user("x"), line)
    await all_is_well(store)


async def test_a_pipe_in_the_place_of_a_note_is_not_waited_for(store: SessionStore):
    folder = plant(store, user("x"))
    os.chmod(folder / "messages.jsonl", 0o1600)
    os.mkfifo(folder / ".messages.jsonl.batch")
    assert await asyncio.wait_for(all_is_well(store), 30)


async def test_a_link_that_leads_to_itself_costs_only_its_session(store: SessionStore):
    folder = store.session_dir("bad")
    folder.mkdir()
    (folder / "messages.jsonl").symlink_to("messages.jsonl")
    assert "good" in {meta["id"] for meta in await store.list_sessions()}
    assert await store.search("hello")
    assert outline((await store.load_session("good") or {"messages": []})["messages"]) == ["hello"]


async def test_metadata_without_a_log_is_no_session(store: SessionStore):
    folder = store.session_dir("bad")
    folder.mkdir()
    (folder / "meta.json").write_bytes(b"")
    await store.append_message("bad", user("begun anew"))
    assert outline((await store.load_session("bad") or {"messages": []})["messages"]) == ["begun anew"]


async def test_a_session_that_another_made_again_can_be_written(store: SessionStore):
    async with SessionStore(store.data_dir, embedder=False) as other:
        await other.delete_session("good")
        with pytest.raises(SessionNotFound):
            await store.append_message("good", user("x"))
        await other.append_message("good", user("anew"))
        await store.append_message("good", user("both"))
        assert outline((await other.load_session("good") or {"messages": []})["messages"]) == ["anew", "both"]


async def test_whole_numbers_of_any_size_stay_whole(store: SessionStore):
    message = {"role": "user", "content": [{"type": "text", "text": "x", "n": 10**30}]}
    await store.append_many("good", [message, user("y")])
    data = await store.load_session("good")
    assert data is not None
    assert repr(data["messages"][1]) == repr(message)


async def test_a_draft_keeps_its_title(store: SessionStore):
    draft = store.draft_session("My title", model="m", cwd="/tmp")["session"]
    await store.append_message(draft["id"], user("first words"))
    meta = await store.read_meta(draft["id"])
    assert (meta["title"], meta["model"]) == ("My title", "m")


@pytest.mark.parametrize(
    "fields",
    [{"updated_at": 5}, {"message_format_version": 99}, {"id": "x"}, {"tags": 5}, {"note": object()}, {"title": 5}],
)
async def test_metadata_that_cannot_be_is_refused(store: SessionStore, fields: dict[str, Any]):
    with pytest.raises(MetadataRefused, match="nothing was written"):
        await store.update_meta("good", **fields)
    for attempt in (store.rename("good", " "), store.label("good", ""), store.create_session(5)):  # type: ignore[arg-type]
        with pytest.raises(CarrelError):
            await attempt
    assert [seq async for seq, _ in store.iter_entries("good")] == [1]


async def test_no_secret_gets_past_the_hook(tmp_path: Path):
    key = "sk-ant-api03-" + "Ab3dEf6hIj9kLm2nOp5qRs8tUv1wXy4z" * 3
    async with SessionStore(tmp_path, embedder=False, redact=redact_secrets) as store:
        await store.create_session(key, session_id="s", api_base=f"https://u:{key}@host", note=key)
        await store.append_message("s", user(f"data:text/plain;base64, {key}"))
        await store.append_message("s", {"role": "user", "text": key})
        await store.set_tags("s", [key])
        await store.label("s", key)
        await store.rename("s", key)
        await store.fork_session("s", title=key)
        draft = store.draft_session(key)["session"]["id"]
        await store.append_message(draft, user("x"), api_base=f"https://u:{key}@host")
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert leaks == []
