"""The index of sessions: it is derived from the logs, and damage, other processes and crashes change no answer."""

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from carrel.conversation.messages import (
    user_text_message,
)
from carrel.conversation.search.documents import CONTENT_ID, FIELDS
from carrel.conversation.store import SessionStore
from carrel.storage.text_index import TextIndex
from tests.support.search import FruitEmbedder, add_turns, places

QUESTIONS = ("apples", "about", "plums OR figs", '"about pears"', "fruit", "number1", "shared words", "zebra")


async def everything(store: SessionStore) -> list[list[dict[str, Any]]]:
    return [[hit.model_dump() for hit in await store.search(question, limit=30)] for question in QUESTIONS]


async def test_deleting_the_index_changes_no_answer(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    async with SessionStore(folder, embedder=FruitEmbedder()) as store:
        for number in range(6):
            await add_turns(
                store, f"s{number}", f"about apples number{number}", "shared words", f"about pears {number}"
            )
            await store.search("apples")
        await store.fork_session("s1", new_id="fork")
        await add_turns(store, "fork", "about plums", "about figs")
        await store.append_rewind("s2", 1)
        await store.search("pears")
        await add_turns(store, "s3", "about iron")
        await store.rename("s4", "A basket of fruit")
        await store.delete_session("s1")
        await store.archive("s5")
        await store.search("figs")
    async with SessionStore(folder, embedder=FruitEmbedder()) as store:
        before = await everything(store)
    assert before[0]
    for file in folder.glob(".catalogue*"):
        file.unlink()
    async with SessionStore(folder, embedder=FruitEmbedder()) as store:
        after = await everything(store)
    for question, old, new in zip(QUESTIONS, before, after, strict=True):
        assert new == old, question


async def test_deleting_the_index_of_an_open_store_changes_no_answer(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples")
    assert await store.search("apples")
    assert store.data_dir is not None
    for file in store.data_dir.glob(".catalogue*"):
        file.unlink()
    await add_turns(store, "b", "about apples")
    assert len(await store.search("apples")) == 2


@pytest.mark.parametrize("damage", [b"rubbish", b"SQLite format 3\x00" + b"\xff" * 5000])
async def test_a_damaged_index_is_built_again(tmp_path: Path, damage: bytes) -> None:
    async with SessionStore(tmp_path, embedder=False) as store:
        await add_turns(store, "a", "about apples")
        (tmp_path / ".catalogue.sqlite3").write_bytes(damage)
        assert places(await store.search("apples")) == [("a", 1)]


async def test_a_session_of_a_newer_format_does_not_hide_other_sessions(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples")
    await add_turns(store, "b", "about apples")
    await store._logs.store.put("a/meta.json", b'{"message_format_version": 99}')
    await store.close()
    assert places(await store.search("apples")) == [("b", 1)]


async def test_an_unreadable_log_does_not_hide_other_sessions(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples")
    await add_turns(store, "b", "about apples")
    assert len(await store.search("apples")) == 2
    await store.close()
    # A folder in the file's place: not even root can read it as a log.
    log = store.messages_path("a")
    log.unlink()
    log.mkdir()
    # Only the title of the first one is still found.
    assert sorted(places(await store.search("apples"))) == [("a", 0), ("b", 1)]
    await add_turns(store, "c", "about apples")
    assert sorted(places(await store.search("apples"))) == [("a", 0), ("b", 1), ("c", 1)]


async def test_an_index_with_an_unknown_state_is_built_again(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=False) as store:
        await add_turns(store, "a", "about apples")
        assert await store.search("apples")
    with sqlite3.connect(tmp_path / ".catalogue.sqlite3") as other:
        other.execute("UPDATE sources SET state = ?", (b'{"surprise": 1}',))
    other.close()
    async with SessionStore(tmp_path, embedder=False) as store:
        assert places(await store.search("apples")) == [("a", 1)]


async def test_an_index_with_many_deleted_messages_is_built_again(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=False) as store:
        await store.append_many("long", [user_text_message(f"secret {number}") for number in range(3000)])
        await add_turns(store, "a", "about apples")
        assert await store.search("secret")
        await store.delete_session("long")
        assert await store.search("secret") == []
        assert places(await store.search("apples")) == [("a", 1)]
    for file in tmp_path.glob(".catalogue*"):
        assert b"secret" not in file.read_bytes()


async def test_an_index_emptied_by_another_process_is_filled_again(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=False) as store:
        await add_turns(store, "a", "about apples")
        await add_turns(store, "b", "about apples")
        assert len(await store.search("apples")) == 2
        with sqlite3.connect(tmp_path / ".catalogue.sqlite3") as other:
            for table in ("sources", "documents", "vectors"):
                other.execute(f"DELETE FROM {table}")
        other.close()
        await add_turns(store, "c", "about apples")
        assert len(await store.search("apples")) == 3


async def test_search_works_while_another_process_locks_the_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SessionStore(tmp_path, embedder=False) as store:
        await add_turns(store, "a", "about apples")
        assert await store.search("apples")
        await add_turns(store, "b", "about apples")
        other = sqlite3.connect(tmp_path / ".catalogue.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with caplog.at_level(logging.WARNING):
            assert places(await store.search("apples")) == [("a", 1)]
        assert "locked by another process" in caplog.text
        other.execute("ROLLBACK")
        other.close()
        assert len(await store.search("apples")) == 2


async def test_no_session_is_indexed_by_two_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with SessionStore(tmp_path, embedder=False) as store:
        await add_turns(store, "a", "about ships")
        assert places(await store.search("ships")) == [("a", 1)]
        other = TextIndex(tmp_path / ".catalogue.sqlite3", FIELDS, CONTENT_ID)
        with other.file.write_lock():
            await add_turns(store, "b", "about ships too")
            assert places(await store.search("ships")) == [("a", 1)]
            assert "another process is updating" in caplog.text
            assert other.contents(vectors=False).sources.keys() == {"a"}
        assert sorted(places(await store.search("ships"))) == [("a", 1), ("b", 1)]
        other.close()


async def test_search_works_without_a_writable_index_file(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=False) as store:
        await add_turns(store, "a", "about apples")
        # A folder in the file's place: not even root can make the index there.
        (tmp_path / ".catalogue.sqlite3").mkdir()
        assert places(await store.search("apples")) == [("a", 1)]
        await add_turns(store, "b", "about apples")
        assert len(await store.search("apples")) == 2


SEARCHER = """
import asyncio, sys
from carrel.conversation.store import SessionStore
async def main():
    async with SessionStore(sys.argv[1], embedder=False) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        hits = await store.search("common", limit=500)
        print(len({hit.session_id for hit in hits}), flush=True)
asyncio.run(main())
"""


def searcher(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SEARCHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


async def fill(folder: Path, sessions: int, texts: int) -> None:
    async with SessionStore(folder, embedder=False) as store:
        for number in range(sessions):
            messages = [
                user_text_message(f"common words of {number} {turn} " + "padding " * 40) for turn in range(texts)
            ]
            await store.append_many(f"s{number}", messages)


async def test_processes_that_index_at_the_same_time_agree(tmp_path: Path) -> None:
    await fill(tmp_path, 120, 30)
    processes = [searcher(tmp_path) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, _ = await asyncio.to_thread(process.communicate, timeout=60)
        assert out.strip() == "120"
    with sqlite3.connect(tmp_path / ".catalogue.sqlite3") as connection:
        assert connection.execute("SELECT count(*) FROM sources").fetchone()[0] == 120
        # Each message is indexed once.
        assert connection.execute("SELECT count(*) FROM documents").fetchone()[0] == 120 * 30
    connection.close()


def _wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    while not file.exists() and process.poll() is None:
        time.sleep(0.002)


async def test_an_index_is_complete_after_a_killed_process(tmp_path: Path) -> None:
    await fill(tmp_path, 300, 60)
    process = searcher(tmp_path)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    process.stdin.write("go\n")
    process.stdin.flush()
    await asyncio.to_thread(_wait_for, tmp_path / ".catalogue.sqlite3-wal", process)
    os.kill(process.pid, 9)
    process.communicate()
    async with SessionStore(tmp_path, embedder=False) as store:
        hits = await store.search("common", limit=1000)
        assert len({hit.session_id for hit in hits}) == 300
        assert len(await store.search("words of 7 59", limit=1)) == 1


async def test_concurrent_searches(store: SessionStore) -> None:
    for number in range(20):
        await add_turns(store, f"s{number}", f"about apples {number}")
    answers = await asyncio.gather(*(store.search("apples", limit=50) for _ in range(10)))
    assert {len(answer) for answer in answers} == {20}
