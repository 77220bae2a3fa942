"""Watching logs that other programs write, and holding locks that are files."""

import asyncio
from pathlib import Path

import pytest

from carrel.storage.base import process_name
from carrel.storage.files.store import FileStore
from tests.support.file_store import start
from tests.support.stores import Listener, in_a_thread, until

KEY = "s/log.jsonl"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


# --- following a log ------------------------------------------------------------------------------------------------


async def test_what_any_program_writes_is_heard(store: FileStore) -> None:
    listener = Listener(store, KEY)
    await asyncio.sleep(0.05)
    (store.root / "s").mkdir(parents=True)
    with (store.root / KEY).open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert await listener.next() == (1, b"one")
        file.write(b"o\n\nfo")
        assert await listener.next() == (2, b"two")
        assert await listener.next() == (3, b"")
        file.write(b"ur")
        assert await store.append(KEY, [b"five"]) == 4
        assert await listener.next() == (4, b"five")
    assert (store.root / "s/log.torn").read_bytes() == b"four"
    (store.root / KEY).unlink()
    assert await listener.next() is None


async def test_a_record_that_lacks_only_its_newline_is_heard_once(store: FileStore) -> None:
    (store.root / "s").mkdir(parents=True)
    (store.root / KEY).write_bytes(b'{"n": 1}\n{"n": 2}')
    listener = Listener(store, KEY)
    assert await listener.next() == (1, b'{"n": 1}')
    assert await listener.next() == (2, b'{"n": 2}')
    assert await store.append(KEY, [b'{"n": 3}']) == 3
    assert await listener.next() == (3, b'{"n": 3}')
    await listener.stop()


async def test_what_was_written_before_the_log_was_deleted_is_still_heard(store: FileStore) -> None:
    await store.append(KEY, [b"1"])
    listener = Listener(store, KEY)
    assert await listener.next() == (1, b"1")
    await store.append(KEY, [b"2"])
    (store.root / "s").rename(store.root / "elsewhere")
    assert await listener.next() == (2, b"2")
    assert await listener.next() is None


async def test_a_batch_is_heard_when_it_is_complete(store: FileStore) -> None:
    await store.append(KEY, [b"1"])
    listener = Listener(store, KEY)
    assert await listener.next() == (1, b"1")
    file = store.root / KEY
    (store.root / "s/.log.jsonl.batch").write_text(f"{file.stat().st_ino} 2 {2 + 2 * 6}")
    file.chmod(0o1600)
    with file.open("ab", buffering=0) as batch:
        batch.write(b"first\n")
        await asyncio.sleep(0.05)
        batch.write(b"secon\n")
    assert await listener.next() == (2, b"first")
    assert await listener.next() == (3, b"secon")
    await listener.stop()


async def test_many_followers_hear_everything_and_leave_nothing_behind(store: FileStore) -> None:
    listeners = [Listener(store, f"s{number % 10}/log") for number in range(300)]
    for number in range(10):
        await store.append(f"s{number}/log", [b"x"])
    for listener in listeners:
        assert await listener.next() == (1, b"x")
    for listener in listeners:
        await listener.stop()
    assert store._watched._waiting == {}


# --- locks ----------------------------------------------------------------------------------------------------------


async def test_locks_leave_no_files_behind(store: FileStore) -> None:
    for key in ("a", "a/b", "x" * 250, "é/🙂", "a b"):
        lock = await store.lock(key)
        assert await store.lock_owner(key) == process_name()
        assert await FileStore(store.root).lock_owner(key) == process_name()
        assert lock is not None
        await lock.release()
        assert await store.lock_owner(key) is None
    assert list((store.root / ".locks").iterdir()) == []


async def test_reading_the_owner_repeatedly_delays_no_holder(store: FileStore) -> None:
    asking = True

    async def ask() -> None:
        while asking:
            await FileStore(store.root).lock_owner("mine")
            await asyncio.sleep(0)

    async def locked() -> bool:
        lock = await store.lock("mine", wait=False)
        if lock is not None:
            await lock.release()
        return lock is not None

    curious = asyncio.ensure_future(in_a_thread(ask))
    try:
        for _ in range(300):
            # A reader may be paused while it looks at the lock; nothing else delays the holder.
            await until(locked, True)
            await asyncio.sleep(0)
    finally:
        asking = False
        await curious


async def test_who_is_cancelled_while_another_process_has_the_lock_does_not_get_it_later(store: FileStore) -> None:
    other = FileStore(store.root)
    held = await other.lock("mine")
    assert held is not None
    waiting = [asyncio.create_task(store.lock("mine")) for _ in range(3)]
    await asyncio.sleep(0.05)
    waiting[0].cancel()
    waiting[1].cancel()
    await held.release()
    lock = await asyncio.wait_for(waiting[2], 30)
    assert lock is not None
    await lock.release()
    again = await asyncio.wait_for(other.lock("mine"), 30)
    assert again is not None
    await again.release()


async def test_who_waited_while_the_file_of_the_lock_was_removed_holds_the_lock_that_others_see(
    store: FileStore,
) -> None:
    held = await store.lock("mine")
    assert held is not None
    second, third = FileStore(store.root), FileStore(store.root)
    waiting = asyncio.create_task(second.lock("mine"))
    await asyncio.sleep(0.1)
    await held.release()
    lock = await asyncio.wait_for(waiting, 30)
    assert lock is not None
    assert await third.lock("mine", wait=False) is None
    assert await third.lock_owner("mine") == process_name()
    await lock.release()


async def test_a_lock_does_not_live_on_in_a_forked_child(store: FileStore) -> None:
    child = await start("leave_child_behind", store.root)
    try:
        assert await child.line() == "parent is gone"
        lock = await asyncio.wait_for(store.lock("mine"), 30)
        assert lock is not None
        await lock.release()
        await child.send()
    finally:
        await child.kill()
