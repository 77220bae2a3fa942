"""The sync pool: tasks that wait for a file share a sync, none returns too early, and a failing disk is reported."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

from carrel.errors import StorageWriteError
from carrel.storage.files.log_writer import SyncedFile, SyncPool, sync_pool
from carrel.storage.files.store import FileStore
from tests.support.stores import in_a_thread


class SlowFile(SyncedFile):
    """A file on a disk that syncs when it is allowed to, and counts."""

    def __init__(self, path: Path) -> None:
        super().__init__(os.open(path, os.O_WRONLY | os.O_CREAT), str(path), str(path.parent))
        self.begun = 0
        self.allowed = threading.Semaphore(0)

    def sync(self) -> None:
        self.begun += 1
        if not self.allowed.acquire(timeout=60):
            raise TimeoutError("the test never allowed this sync")
        super().sync()


class BrokenFile(SyncedFile):
    """A file that the kernel cannot sync."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        super().__init__(writing, "broken", "")


async def until(condition: object) -> None:
    assert callable(condition)
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def synced(pool: SyncPool, file: SyncedFile) -> None:
    await pool.synced(file)


async def test_two_hundred_tasks_that_wait_at_once_share_two_syncs(tmp_path: Path) -> None:
    file, pool = SlowFile(tmp_path / "log"), SyncPool()
    tasks = [asyncio.ensure_future(pool.synced(file)) for _ in range(200)]
    await asyncio.sleep(0)
    file.allowed.release(10)
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert file.begun <= 2


async def test_a_task_that_comes_during_a_sync_waits_for_the_next_one(tmp_path: Path) -> None:
    file, pool = SlowFile(tmp_path / "log"), SyncPool()
    first = asyncio.ensure_future(pool.synced(file))
    await until(lambda: file.begun == 1)
    later = [asyncio.ensure_future(pool.synced(file)) for _ in range(50)]
    other_loop = asyncio.ensure_future(in_a_thread(lambda: synced(pool, file)))
    await until(lambda: len(pool._waiting[file]) == 51)
    try:
        assert file.begun == 1
        file.allowed.release()
        await asyncio.wait_for(first, 30)
        await until(lambda: file.begun == 2)
        assert not any(task.done() for task in [*later, other_loop])
    finally:
        file.allowed.release(10)
    await asyncio.wait_for(asyncio.gather(*later, other_loop), 30)
    assert file.begun == 2


async def test_a_slow_file_does_not_delay_others(tmp_path: Path) -> None:
    slow, quick, pool = SlowFile(tmp_path / "slow"), SlowFile(tmp_path / "quick"), SyncPool()
    waiting = asyncio.ensure_future(pool.synced(slow))
    await until(lambda: slow.begun == 1)
    quick.allowed.release()
    await asyncio.wait_for(pool.synced(quick), 30)
    assert not waiting.done()
    slow.allowed.release()
    await asyncio.wait_for(waiting, 30)


async def test_each_task_gets_its_own_error_of_a_failed_sync() -> None:
    file, pool = BrokenFile(), SyncPool()
    answers = await asyncio.gather(*(pool.synced(file) for _ in range(5)), return_exceptions=True)
    assert len({id(answer) for answer in answers}) == 5
    for answer in answers:
        assert isinstance(answer, StorageWriteError)
        assert "may not survive a power cut" in str(answer)


async def test_a_cancelled_task_does_not_disturb_others(tmp_path: Path) -> None:
    file, pool = SlowFile(tmp_path / "log"), SyncPool()
    waiting = [asyncio.ensure_future(pool.synced(file)) for _ in range(10)]
    await until(lambda: file.begun == 1)
    for task in waiting[:5]:
        task.cancel()
    file.allowed.release(2)
    answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [True] * 5 + [False] * 5


async def test_a_loop_that_ended_does_not_disturb_others(tmp_path: Path) -> None:
    file, pool = SlowFile(tmp_path / "log"), SyncPool()

    async def begin_and_leave() -> None:
        waiting = asyncio.ensure_future(pool.synced(file))
        await until(lambda: file.begun == 1)
        waiting.cancel()

    await in_a_thread(begin_and_leave)
    waiting = asyncio.ensure_future(pool.synced(file))
    file.allowed.release(2)
    await asyncio.wait_for(waiting, 30)


async def test_many_logs_and_many_appends_are_all_acknowledged(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")

    async def appender(number: int) -> list[int]:
        return [await store.append(f"s{number}/log", [b"x" * 300], sync=True) for _ in range(20)]

    assert await asyncio.gather(*(appender(number) for number in range(40))) == [list(range(1, 21))] * 40
    assert await asyncio.gather(*(store.append("s0/log", [b"x"], sync=True) for _ in range(200))) == list(
        range(21, 221)
    )
    assert sync_pool._waiting == {}


async def test_a_batch_that_is_synced_is_noted_before_and_whole_after(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    assert await store.append("s/log", [b"x" * 3000] * 10, sync=True) == 10
    assert await store.append("s/log", [b"x" * 3000] * 10, sync=True) == 20
    assert os.listdir(tmp_path / "store/s") == ["log"]
    assert (tmp_path / "store/s/log").stat().st_mode & 0o7777 == 0o600


def test_without_threads_the_loop_syncs_by_itself(tmp_path: Path) -> None:
    """In a process whose threads have no room for their stacks."""
    program = """
import asyncio, resource, sys, threading
from pathlib import Path
from carrel.storage.files.store import FileStore

async def main():
    store = FileStore(Path(sys.argv[1]))
    await store.append("before", [b"0"])
    threading.stack_size(1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
    try:
        threading.Thread(target=print).start()
    except RuntimeError:
        print("no thread")
    await asyncio.gather(*(store.append(f"log{number % 5}", [b"1"], sync=True) for number in range(20)))
    print("written")

asyncio.run(asyncio.wait_for(main(), 60))
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["no thread", "written", ""], done.stderr
    assert [(tmp_path / f"log{number}").read_bytes() for number in range(5)] == [b"1\n" * 4] * 5
