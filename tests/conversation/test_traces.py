"""Folders with a trace and no conversation: no session to show, and something to clean up."""

import asyncio
from datetime import timedelta

import pytest

from carrel import SessionNotFound, SessionStore, user_text_message
from carrel.storage.base import Store


def kept_by(store: SessionStore) -> Store:
    return store._logs.store


async def test_a_trace_alone_is_no_session_and_can_be_removed(store: SessionStore) -> None:
    await kept_by(store).append("abc1/trace.jsonl", [b"{}"])
    await store.append_message("abd2", user_text_message("hi"))
    assert await store.resolve_id("ab") == "abd2"
    for text in ("abc1", "abc"):
        with pytest.raises(SessionNotFound, match="no messages, only a trace"):
            await store.resolve_id(text)
        assert await store.resolve_id(text, traces=True) == "abc1"
    assert [meta["id"] for meta in await store.traces()] == ["abc1"]
    assert await store.delete_session("abc1")
    assert await store.traces() == []


async def test_prune_takes_traces_by_when_they_were_written(store: SessionStore) -> None:
    await kept_by(store).append("old/trace.jsonl", [b"{}"])
    assert await store.prune(timedelta(days=1), dry_run=False) == []
    await asyncio.sleep(0.05)
    found = await store.prune(timedelta(0), dry_run=False)
    assert [meta["id"] for meta in found] == ["old"]
    assert await store.traces() == []


async def test_a_session_that_has_a_trace_too_is_a_session(store: SessionStore) -> None:
    await store.append_message("a1", user_text_message("hi"))
    await kept_by(store).append("a1/trace.jsonl", [b"{}"])
    assert await store.traces() == []
    assert await store.resolve_id("a1") == "a1"
