"""Following logs, hearing of changes and holding locks: what is special where the kernel tells of files."""

import asyncio
import contextlib
import gc
import os
from pathlib import Path

import pytest

from carrel.storage.file_store import FileStore
from carrel.storage.seam import process_name
from tests.storage.file_places import needs_namespaces, run, start
from tests.storage.suite import Listener, in_a_thread, until

KEY = "s/log.jsonl"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def inotify_instances() -> int:
    gc.collect()
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}") == "anon_inode:inotify"
    return count


# --- following a log ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inotify", [True, False])
async def test_what_any_program_writes_is_heard(tmp_path: Path, inotify: bool) -> None:
    store = FileStore(tmp_path / "store", inotify=inotify)
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


async def test_many_followers_share_one_line_to_the_kernel_and_leave_nothing_behind(store: FileStore) -> None:
    before = inotify_instances()
    listeners = [Listener(store, f"s{number % 10}/log") for number in range(300)]
    for number in range(10):
        await store.append(f"s{number}/log", [b"x"])
    for listener in listeners:
        assert await listener.next() == (1, b"x")
    assert inotify_instances() <= before + 1
    for listener in listeners:
        await listener.stop()
    await until(lambda: asyncio.sleep(0, inotify_instances() <= before), True)


def test_without_inotify_logs_are_followed_all_the_same_and_changes_are_unknown(tmp_path: Path) -> None:
    before = "echo 0 > /proc/sys/user/max_inotify_instances"
    needs_namespaces(before, tmp_path)
    said = run("do_without_inotify", tmp_path / "store", before=before)
    assert said == ["None", "(1, b'one')", "(2, b'two')", "ended"]


def test_with_too_few_watches_changes_are_unknown(tmp_path: Path) -> None:
    before = "echo 10 > /proc/sys/user/max_inotify_watches"
    needs_namespaces(before, tmp_path)
    said = run("do_without_inotify", tmp_path / "store", before=before)
    assert said == ["None", "(1, b'one')", "(2, b'two')", "ended"]


# --- changes --------------------------------------------------------------------------------------------------------


async def test_what_a_person_does_with_the_files_is_a_change(store: FileStore) -> None:
    await store.put("s/1/object", b"x")
    await store.put("s/2/object", b"x")
    cursor = (await store.changed("s")).cursor
    (store.root / "s/1/object").write_bytes(b"edited")
    (store.root / "s/2/object").unlink()
    (store.root / "s/3/deep/er").mkdir(parents=True)
    (store.root / "s/3/deep/er/object").write_bytes(b"x")
    (store.root / "s/3/.hidden").write_bytes(b"x")
    changes = await store.changed("s", cursor)
    assert changes.keys == {"s/1/object", "s/2/object", "s/3/deep/er/object"}
    with (store.root / "s/3/deep/er/object").open("ab") as file:
        file.write(b"more")
    assert (await store.changed("s", changes.cursor)).keys == {"s/3/deep/er/object"}


async def test_a_folder_moved_in_is_a_change_of_all_that_is_in_it(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "outside/below").mkdir(parents=True)
    (tmp_path / "outside/below/object").write_bytes(b"x")
    await store.put("s/1/object", b"x")
    cursor = (await store.changed("s")).cursor
    (tmp_path / "outside").rename(store.root / "s/2")
    changes = await store.changed("s", cursor)
    assert changes.keys == {"s/2/below/object"}
    await store.put("s/2/below/object", b"y")
    assert (await store.changed("s", changes.cursor)).keys == {"s/2/below/object"}


async def test_after_a_folder_was_taken_elsewhere_everything_has_to_be_looked_at_once(
    store: FileStore, tmp_path: Path
) -> None:
    await store.put("s/1/object", b"x")
    await store.put("s/2/object", b"x")
    cursor = (await store.changed("s")).cursor
    (store.root / "s/1").rename(tmp_path / "elsewhere")
    changes = await store.changed("s", cursor)
    assert changes.keys is None
    await store.put("s/2/object", b"y")
    assert (await store.changed("s", changes.cursor)).keys == {"s/2/object"}


async def test_when_the_whole_folder_comes_goes_and_comes_again_no_change_is_missed(store: FileStore) -> None:
    changes = await store.changed("s")
    await store.put("s/1/object", b"x")
    changes = await store.changed("s", changes.cursor)
    assert changes.keys is None
    await store.put("s/1/object", b"y")
    changes = await store.changed("s", changes.cursor)
    assert changes.keys == {"s/1/object"}
    await store.delete("s")
    changes = await store.changed("s", changes.cursor)
    assert changes.keys is None
    await store.put("s/2/object", b"x")
    assert (await store.changed("s", changes.cursor)).keys is None


async def test_more_changes_than_the_kernel_keeps_are_unknown_once(store: FileStore) -> None:
    await store.put("s/1/object", b"x")
    await store.put("s/2/object", b"x")
    cursor = (await store.changed("s")).cursor
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with (store.root / "s/1/object").open("ab", 0) as one, (store.root / "s/2/object").open("ab", 0) as two:
        for _ in range(most // 2 + 10):
            one.write(b"x")
            two.write(b"x")
    changes = await store.changed("s", cursor)
    assert changes.keys is None
    await store.put("s/2/object", b"y")
    assert (await store.changed("s", changes.cursor)).keys == {"s/2/object"}


async def test_an_older_cursor_may_be_asked_for_again(store: FileStore) -> None:
    await store.put("a", b"x")
    first = (await store.changed("")).cursor
    await store.put("b", b"x")
    second = (await store.changed("", first)).cursor
    await store.put("c", b"x")
    assert (await store.changed("", second)).keys == {"c"}
    assert (await store.changed("", first)).keys == {"b", "c"}


async def test_a_cursor_that_is_dropped_or_closed_leaves_nothing_behind(store: FileStore) -> None:
    before = inotify_instances()
    await store.put("a", b"x")
    changes = await store.changed("")
    assert inotify_instances() == before + 1
    await store.close()
    assert inotify_instances() == before
    changes = await store.changed("", changes.cursor)
    assert changes.keys is None
    assert inotify_instances() == before + 1
    del changes
    await asyncio.sleep(0)  # the step of the loop that brought it holds it until now
    assert inotify_instances() == before


async def test_changes_are_asked_for_in_several_threads(store: FileStore) -> None:
    await store.put("s/object", b"x")

    async def ask() -> int:
        changes, count = await store.changed("s"), 0
        for number in range(20):
            await store.put(f"s/{number}", b"x")
            changes = await store.changed("s", changes.cursor)
            count += changes.keys is None or f"s/{number}" in changes.keys
        return count

    assert await asyncio.gather(*(in_a_thread(ask) for _ in range(4))) == [20] * 4


# --- locks ----------------------------------------------------------------------------------------------------------


async def test_locks_leave_no_files_behind(store: FileStore) -> None:
    for key in ("a", "a/b", "x" * 250, "é/🙂", "a b"):
        lock = await store.lock(key)
        assert await store.holder(key) == process_name()
        assert await FileStore(store.root).holder(key) == process_name()
        assert lock is not None
        await lock.release()
        assert await store.holder(key) is None
    assert list((store.root / ".locks").iterdir()) == []


async def test_to_ask_for_the_holder_again_and_again_keeps_nobody_from_the_lock(store: FileStore) -> None:
    asking = True

    async def ask() -> None:
        while asking:
            await FileStore(store.root).holder("mine")
            await asyncio.sleep(0)

    async def locked() -> bool:
        lock = await store.lock("mine", wait=False)
        if lock is not None:
            await lock.release()
        return lock is not None

    curious = asyncio.ensure_future(in_a_thread(ask))
    try:
        for _ in range(300):
            # Who asks may be stopped by the machine while it looks; nobody is kept out for longer than that.
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
    assert await third.holder("mine") == process_name()
    await lock.release()


async def test_a_lock_does_not_live_on_in_a_forked_child(store: FileStore) -> None:
    child = await start("leave_child_behind", store.root)
    try:
        assert await child.line() == "parent is gone"
        lock = await asyncio.wait_for(store.lock("mine"), 30)
        assert lock is not None
        await lock.release()
        await child.tell()
    finally:
        await child.kill()
