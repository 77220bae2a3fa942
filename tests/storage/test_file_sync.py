"""Group commit: who waits together shares a sync, nobody is told too early, and a disk that fails is reported."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from carrel.errors import StorageWriteError
from carrel.storage.file_store import FileStore
from carrel.storage.group_sync import GroupSync, SyncedFile
from carrel.storage.sync_device import Device, device_of
from tests.storage.suite import in_a_thread


class SlowFile(SyncedFile):
    """A file on a disk that syncs when it is told to, and counts."""

    def __init__(self, path: Path, device: Device | None = None) -> None:
        super().__init__(os.open(path, os.O_WRONLY | os.O_CREAT), str(path), str(path.parent), device)
        self.begun = 0
        self.let_go = threading.Semaphore(0)

    def sync(self) -> None:
        self.begun += 1
        if not self.let_go.acquire(timeout=60):
            raise TimeoutError("nobody let it go")
        super().sync()


class SlowDevice(Device):
    """A file system that is synced as a whole when it is told to, and counts."""

    __slots__ = ("begun", "let_go")

    def __init__(self, folder: Path) -> None:
        super().__init__(os.open(folder, os.O_RDONLY))
        self.begun = 0
        self.let_go = threading.Semaphore(0)

    def sync(self) -> bool:
        self.begun += 1
        if not self.let_go.acquire(timeout=60):
            raise TimeoutError("nobody let it go")
        return super().sync()


class BrokenFile(SyncedFile):
    """A file of which the kernel says that it cannot be synced."""

    def __init__(self, device: Device | None = None) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        super().__init__(writing, "broken", "", device)


@pytest.fixture
def broken_device(tmp_path: Path) -> Device:
    """A file system whose sync as a whole fails."""
    device = Device(os.open(tmp_path, os.O_PATH))
    assert device.sync() is False
    return device


async def until(true: object) -> None:
    assert callable(true)
    for _ in range(6000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def synced(group: GroupSync, file: SyncedFile) -> None:
    await group.synced(file)


def waiting_for(group: GroupSync) -> int:
    """How many wait whom no thread serves yet."""
    return sum(len(waiters) for line in group._lines.values() for waiters in line.files.values())


async def test_two_hundred_who_wait_at_once_share_one_sync(tmp_path: Path) -> None:
    file, group = SlowFile(tmp_path / "log"), GroupSync()
    file.let_go.release()
    await asyncio.wait_for(asyncio.gather(*(group.synced(file) for _ in range(200))), 30)
    assert file.begun == 1


async def test_who_comes_while_a_sync_is_under_way_waits_for_the_next_one(tmp_path: Path) -> None:
    file, group = SlowFile(tmp_path / "log"), GroupSync()
    first = asyncio.ensure_future(group.synced(file))
    await until(lambda: file.begun == 1)
    later = [asyncio.ensure_future(group.synced(file)) for _ in range(50)]
    elsewhere = asyncio.ensure_future(in_a_thread(lambda: synced(group, file)))
    await until(lambda: waiting_for(group) == 51)
    try:
        assert file.begun == 1
        file.let_go.release()
        await asyncio.wait_for(first, 30)
        await until(lambda: file.begun == 2)
        assert not any(task.done() for task in [*later, elsewhere])
    finally:
        file.let_go.release(10)
    await asyncio.wait_for(asyncio.gather(*later, elsewhere), 30)
    assert file.begun == 2


async def test_a_slow_file_holds_up_no_other(tmp_path: Path) -> None:
    slow, quick, group = SlowFile(tmp_path / "slow"), SlowFile(tmp_path / "quick"), GroupSync()
    waiting = asyncio.ensure_future(group.synced(slow))
    await until(lambda: slow.begun == 1)
    quick.let_go.release()
    await asyncio.wait_for(group.synced(quick), 30)
    assert not waiting.done()
    slow.let_go.release()
    await asyncio.wait_for(waiting, 30)


async def test_a_sync_that_fails_is_an_error_for_each_who_waited_for_it(tmp_path: Path) -> None:
    file, group = BrokenFile(), GroupSync()
    answers = await asyncio.gather(*(group.synced(file) for _ in range(5)), return_exceptions=True)
    assert len({id(answer) for answer in answers}) == 5
    for answer in answers:
        assert isinstance(answer, StorageWriteError)
        assert "may not survive a power cut" in str(answer)


async def test_where_the_whole_cannot_be_synced_each_file_gets_its_own_answer(
    tmp_path: Path, broken_device: Device
) -> None:
    files: list[SyncedFile] = [SlowFile(tmp_path / f"log{number}", broken_device) for number in range(8)]
    for file in files:
        assert isinstance(file, SlowFile)
        file.let_go.release()
    broken, group = BrokenFile(broken_device), GroupSync()
    answers = await asyncio.wait_for(
        asyncio.gather(*(group.synced(file) for file in [*files, broken]), return_exceptions=True), 30
    )
    assert answers[:8] == [None] * 8
    assert isinstance(answers[8], StorageWriteError)


async def test_tasks_write_on_while_the_whole_is_synced_and_share_the_next_sync(tmp_path: Path) -> None:
    device, group = SlowDevice(tmp_path), GroupSync(lambda: True)
    files = [SlowFile(tmp_path / f"log{number}", device) for number in range(12)]
    first = [asyncio.ensure_future(group.synced(file)) for file in files[:6]]
    await until(lambda: device.begun == 1)
    later = [asyncio.ensure_future(group.synced(file)) for file in files]
    await until(lambda: waiting_for(group) == 12)
    try:
        assert device.begun == 1
        device.let_go.release()
        await asyncio.wait_for(asyncio.gather(*first), 30)
        await until(lambda: device.begun == 2)
        assert not any(task.done() for task in later)
    finally:
        device.let_go.release(10)
    await asyncio.wait_for(asyncio.gather(*first, *later), 30)
    assert device.begun == 2
    assert not any(file.begun for file in files)


async def test_where_a_sync_is_swift_it_begins_before_all_tasks_have_had_their_turn(tmp_path: Path) -> None:
    def has_begun(patience: float) -> bool:
        """Looked for without letting any other task go on."""
        until = time.monotonic() + patience
        while not device.begun and time.monotonic() < until:
            time.sleep(0.001)
        return device.begun == 1

    for swift in (True, False):
        device, group = SlowDevice(tmp_path), GroupSync(lambda: True)
        device.took(0.001, 0.002 if swift else 0.001)
        device.let_go.release(2)
        files = [SlowFile(tmp_path / f"log{number}", device) for number in range(4)]
        waiting = [asyncio.ensure_future(group.synced(file)) for file in files]
        # All four wait by now, and this turn is not over.
        assert has_begun(30 if swift else 0.1) is swift
        await asyncio.wait_for(asyncio.gather(*waiting), 30)
        assert device.begun == 1


def test_a_file_system_is_swift_as_long_as_it_mostly_takes_less_time_than_writing(tmp_path: Path) -> None:
    device = Device(os.open(tmp_path, os.O_RDONLY))
    assert not device.is_swift
    for _ in range(8):
        device.took(0.0003, 0.0006)
    device.took(0.0003, 0.0001)
    assert device.is_swift
    for _ in range(8):
        device.took(0.002, 0.0006)
    assert not device.is_swift


class BusyFile(SyncedFile):
    """A file that takes a moment each time."""

    def __init__(self, path: Path, device: Device | None = None) -> None:
        super().__init__(os.open(path, os.O_WRONLY | os.O_CREAT), str(path), str(path.parent), device)

    def sync(self) -> None:
        time.sleep(0.001)


@pytest.mark.parametrize("elsewhere", ["in another loop", "on another file system"])
async def test_many_who_come_again_and_again_keep_nobody_from_his_turn(tmp_path: Path, elsewhere: str) -> None:
    group, over, rounds = GroupSync(), threading.Event(), list[int]()

    async def again_and_again(file: SyncedFile) -> None:
        for done in range(300):
            await group.synced(file)
            if over.is_set():
                rounds.append(done)
                return

    async def many() -> None:
        await asyncio.gather(*(again_and_again(BusyFile(tmp_path / f"busy{number}")) for number in range(50)))

    other = elsewhere == "in another loop"
    busy = asyncio.ensure_future(in_a_thread(many) if other else many())
    await asyncio.sleep(0.1)
    device = None if other else Device(os.open(tmp_path, os.O_RDONLY))
    await asyncio.wait_for(group.synced(BusyFile(tmp_path / "one", device)), 60)
    over.set()
    await asyncio.wait_for(busy, 60)
    assert len(rounds) == 50, "he came last"


async def test_whatever_goes_wrong_in_a_sync_is_told_to_who_waits_and_costs_nobody_else(tmp_path: Path) -> None:
    class Faulty(Device):
        __slots__ = ()

        def sync(self) -> bool:
            raise MemoryError("no room")

    device, group = Faulty(os.open(tmp_path, os.O_RDONLY)), GroupSync(lambda: True)
    files = [BusyFile(tmp_path / f"log{number}", device) for number in range(4)]
    waiting = asyncio.gather(*map(group.synced, files), return_exceptions=True)
    for answer in await asyncio.wait_for(waiting, 30):
        assert isinstance(answer, StorageWriteError)
        assert "no room" in str(answer) or "Input/output" in str(answer)
    await asyncio.wait_for(group.synced(files[0]), 30)


async def test_of_two_file_systems_in_one_turn_the_slow_one_holds_up_nobody(tmp_path: Path) -> None:
    slow, group, alone = SlowDevice(tmp_path), GroupSync(lambda: True), BusyFile(tmp_path / "alone")
    waiting = [asyncio.ensure_future(group.synced(SlowFile(tmp_path / f"slow{n}", slow))) for n in range(4)]
    await asyncio.wait_for(group.synced(alone), 30)
    assert not any(task.done() for task in waiting)
    slow.let_go.release(4)
    await asyncio.wait_for(asyncio.gather(*waiting), 30)


async def test_a_file_system_that_is_slow_holds_up_no_other(tmp_path: Path) -> None:
    slow, quick, group = SlowDevice(tmp_path), SlowDevice(tmp_path), GroupSync(lambda: True)
    waiting = [asyncio.ensure_future(group.synced(SlowFile(tmp_path / f"slow{n}", slow))) for n in range(4)]
    await until(lambda: slow.begun == 1)
    alone = SlowFile(tmp_path / "alone")
    alone.let_go.release()
    quick.let_go.release(4)
    others = (group.synced(SlowFile(tmp_path / f"quick{n}", quick)) for n in range(4))
    await asyncio.wait_for(asyncio.gather(group.synced(alone), *others), 30)
    assert not any(task.done() for task in waiting)
    slow.let_go.release(4)
    await asyncio.wait_for(asyncio.gather(*waiting), 30)


async def test_a_file_system_is_synced_as_a_whole_only_where_that_is_known_to_be_sound(tmp_path: Path) -> None:
    assert Device(os.open(tmp_path, os.O_RDONLY)).sync() is True
    assert device_of("/proc", os.stat("/proc").st_dev) is None
    device = device_of(str(tmp_path), tmp_path.stat().st_dev)
    assert device is device_of(str(tmp_path), tmp_path.stat().st_dev)


async def test_who_gives_up_waiting_disturbs_nobody(tmp_path: Path) -> None:
    file, group = SlowFile(tmp_path / "log"), GroupSync()
    waiting = [asyncio.ensure_future(group.synced(file)) for _ in range(10)]
    await until(lambda: file.begun == 1)
    for task in waiting[:5]:
        task.cancel()
    file.let_go.release()
    answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [True] * 5 + [False] * 5


async def test_a_loop_that_ended_meanwhile_disturbs_nobody(tmp_path: Path) -> None:
    file, group = SlowFile(tmp_path / "log"), GroupSync()

    async def begin_and_leave() -> None:
        waiting = asyncio.ensure_future(group.synced(file))
        await until(lambda: file.begun == 1)
        waiting.cancel()

    await in_a_thread(begin_and_leave)
    waiting = asyncio.ensure_future(group.synced(file))
    file.let_go.release(2)
    await asyncio.wait_for(waiting, 30)


async def test_a_loop_that_was_closed_in_mid_turn_keeps_no_file_open(tmp_path: Path) -> None:
    group, files = GroupSync(), [SlowFile(tmp_path / f"log{number}") for number in range(2)]
    held = [weakref.ref(file) for file in files]

    def leave() -> None:
        loop = asyncio.new_event_loop()
        for file in files:
            loop.call_soon(lambda file=file: group.synced(file) and None)
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()

    await asyncio.to_thread(leave)
    files.clear()
    assert len(group._turns) == 1
    kept = SyncedFile(os.open(tmp_path, os.O_RDONLY), str(tmp_path), str(tmp_path))
    await asyncio.wait_for(group.synced(kept), 30)
    gc.collect()
    assert not group._turns
    assert not any(file() for file in held)


async def test_a_few_who_wait_for_a_swift_one_are_served_though_their_loop_never_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, device = GroupSync(), Device(os.open(tmp_path, os.O_RDONLY))
    device.took(0.001, 0.002)
    file = SyncedFile(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), str(tmp_path / "log"), str(tmp_path), device)
    monkeypatch.setattr(group, "_call", lambda: None)  # a thread that comes late: we are it
    first = group.synced(file)
    assert group._take() is None  # more may come before the turn ends
    await asyncio.sleep(0)
    second = group.synced(file)
    group._serve()
    await asyncio.wait_for(asyncio.gather(first, second), 30)


async def test_many_logs_and_many_appends_are_all_acknowledged(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")

    async def appender(number: int) -> list[int]:
        return [await store.append(f"s{number}/log", [b"x" * 300], sync=True) for _ in range(20)]

    assert await asyncio.gather(*(appender(number) for number in range(40))) == [list(range(1, 21))] * 40
    assert await asyncio.gather(*(store.append("s0/log", [b"x"], sync=True) for _ in range(200))) == list(
        range(21, 221)
    )


async def test_a_batch_that_is_synced_is_noted_before_and_whole_after(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    assert await store.append("s/log", [b"x" * 3000] * 10, sync=True) == 10
    assert await store.append("s/log", [b"x" * 3000] * 10, sync=True) == 20
    assert os.listdir(tmp_path / "store/s") == ["log"]
    assert (tmp_path / "store/s/log").stat().st_mode & 0o7777 == 0o600


def test_where_no_thread_can_be_had_the_loop_syncs_by_itself(tmp_path: Path) -> None:
    """In a process whose threads have no room for their stacks."""
    program = """
import asyncio, resource, sys, threading
from pathlib import Path
from carrel.storage.file_store import FileStore

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
