"""Appending to files that others write too, that were torn, killed, cut, replaced or locked by others."""

import asyncio
import json
import os
import random
from pathlib import Path

import pytest

from carrel.storage.files.store import FileStore
from tests.support.file_store import run, start
from tests.support.stores import everything, everything_back, in_a_thread

KEY = "s/log.jsonl"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    (tmp_path / "store/s").mkdir(parents=True)
    return FileStore(tmp_path / "store")


def file_of(store: FileStore) -> Path:
    return store.root / KEY


# --- ends that are not whole ----------------------------------------------------------------------------------------

RECORD = json.dumps(
    {"role": "user", "content": 'Grüße, 世界 🙂 \\ "', "n": [1, {"a": None}]}, ensure_ascii=False
).encode()


@pytest.mark.parametrize("cut", range(len(RECORD) + 1))
async def test_a_record_torn_at_any_byte_is_set_aside_and_nothing_else_is_lost(store: FileStore, cut: int) -> None:
    torn, whole = RECORD[:cut], cut == len(RECORD)
    before = b'{"n": 1}\n\n' + torn
    file_of(store).write_bytes(before)
    records = [b'{"n": 1}', b"", *([torn] if whole else [])]
    assert await everything(store, KEY) == records
    assert await everything_back(store, KEY) == records
    assert await everything(store, KEY, 3) == records[2:]
    assert await everything_back(store, KEY, 3) == records[:2]
    assert await store.incomplete_tail(KEY) == (b"" if whole else torn)
    assert file_of(store).read_bytes() == before
    assert await store.append(KEY, [b'{"n": 2}']) == len(records) + 1
    assert file_of(store).read_bytes() == b"".join(record + b"\n" for record in [*records, b'{"n": 2}'])
    assert await store.incomplete_tail(KEY) == b""
    aside = store.root / "s/log.torn"
    assert (aside.read_bytes() if aside.exists() else b"") == (b"" if whole else torn)


async def test_torn_pieces_are_kept_apart(store: FileStore) -> None:
    for number in range(3):
        with file_of(store).open("ab") as file:
            file.write(b'{"piece": %d' % number)
        assert await store.append(KEY, [b"{}"]) == number + 1
    assert (store.root / "s/log.torn").read_bytes() == b'{"piece": 0\n{"piece": 1\n{"piece": 2'
    assert await store.list() == ["s/log.jsonl", "s/log.torn"]


@pytest.mark.parametrize(
    ("end", "records", "aside"),
    [
        (b"\0" * 5000, [], b"\0" * 5000),
        (b'{"n": 2}' + b"\0" * 5000, [b'{"n": 2}'], b""),
        (b'{"n": ' + b"\0" * 100, [], b'{"n": ' + b"\0" * 100),
        (b"12", [], b"12"),
        (b"tru", [], b"tru"),
        (b"true", [b"true"], b""),
        (b'"text', [], b'"text'),
        (b'"text"', [b'"text"'], b""),
        (b"[1, 2]", [b"[1, 2]"], b""),
        (b"   ", [], b"   "),
        (b"\xff\xfe}", [], b"\xff\xfe}"),
        (b"x" * 300_000, [], b"x" * 300_000),
    ],
)
async def test_what_a_crash_or_a_power_cut_can_leave_at_the_end(
    store: FileStore, end: bytes, records: list[bytes], aside: bytes
) -> None:
    file_of(store).write_bytes(b'{"n": 1}\n' + end)
    assert await everything(store, KEY) == [b'{"n": 1}', *records]
    assert await store.incomplete_tail(KEY) == aside
    assert await store.append(KEY, [b"{}"]) == 2 + len(records)
    assert await everything(store, KEY) == [b'{"n": 1}', *records, b"{}"]
    assert (store.root / "s/log.torn").exists() == bool(aside)
    if aside:
        assert (store.root / "s/log.torn").read_bytes() == aside


async def test_a_tail_torn_by_another_program_while_the_log_is_open_here_is_seen(store: FileStore) -> None:
    await store.append(KEY, [b"{}"])
    with file_of(store).open("ab") as file:
        file.write(b'{"whole": 1}\n{"torn')
    assert await store.append(KEY, [b"{}"]) == 3
    assert await everything(store, KEY) == [b"{}", b'{"whole": 1}', b"{}"]


# --- kills ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [50, 5_000, 500_000])
async def test_of_a_batch_that_is_killed_all_records_are_there_or_none(store: FileStore, size: int) -> None:
    for _ in range(6):
        before = len(await everything(store, KEY))
        other = await start("append_batches", store.root, str(size))
        acknowledged = int(await other.line())
        assert acknowledged == before + 10
        await asyncio.sleep(random.uniform(0, 0.02))
        await other.kill()
        records = await everything(store, KEY)
        assert len(records) >= acknowledged
        assert len(records) % 10 == 0
        assert set(records) == {b'"%s"' % (b"x" * size)}
        reopened = FileStore(store.root)
        assert await reopened.append(KEY, []) == len(records)
        assert await everything(reopened, KEY) == records
        await reopened.close()


async def test_a_batch_that_was_cut_is_hidden_from_readers_and_taken_back_by_the_next_append(store: FileStore) -> None:
    await store.append(KEY, [b'{"n": 1}'])
    await store.append(KEY, [b'"%s"' % (b"x" * 3000)] * 3)
    # As a kill between two pages leaves it: noted, marked, and only the first records there.
    size = file_of(store).stat().st_size
    inode = file_of(store).stat().st_ino
    (store.root / "s/.log.jsonl.batch").write_text(f"{inode} {size} {size + 9000}")
    file_of(store).chmod(0o1600)
    with file_of(store).open("ab") as file:
        file.write(b'{"batch": 1}\n{"batch": 2}\n{"bat')
    assert len(await everything(store, KEY)) == 4
    assert len(await everything_back(store, KEY)) == 4
    assert await store.incomplete_tail(KEY) == b'{"batch": 1}\n{"batch": 2}\n{"bat'
    assert await store.append(KEY, [b'{"n": 5}']) == 5
    assert len(await everything(store, KEY)) == 5
    assert (store.root / "s/log.torn").read_bytes() == b'{"batch": 1}\n{"batch": 2}\n{"bat'
    assert file_of(store).stat().st_mode & 0o7777 == 0o600
    assert sorted(os.listdir(store.root / "s")) == ["log.jsonl", "log.torn"]


async def test_a_note_of_a_batch_that_never_began_costs_no_record(store: FileStore) -> None:
    await store.append(KEY, [b'{"n": 1}'])
    found = file_of(store).stat()
    (store.root / "s/.log.jsonl.batch").write_text(f"{found.st_ino} {found.st_size} {found.st_size + 9000}")
    assert await store.append(KEY, [b'{"n": 2}']) == 2
    assert len(await everything(store, KEY)) == 2
    assert await FileStore(store.root).append(KEY, [b'{"n": 3}']) == 3


# --- others who lock, cut, replace and delete -----------------------------------------------------------------------


async def test_while_another_process_holds_the_log_others_go_on_and_the_order_stays(store: FileStore) -> None:
    await store.append(KEY, [b"0"])
    holder = await start("hold_file", store.root, KEY)
    assert await holder.line() == "locked"
    try:
        waiting = [asyncio.create_task(store.append(KEY, [b"%d" % number])) for number in range(1, 101)]
        assert await store.append("s/other.jsonl", [b"x"]) == 1
        assert not any(task.done() for task in waiting)
        await holder.send()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 30) == list(range(2, 102))
    finally:
        await holder.kill()
    assert await everything(store, KEY) == [b"%d" % number for number in range(101)]


async def test_an_append_that_is_cancelled_while_it_waits_writes_nothing_and_blocks_no_other(store: FileStore) -> None:
    await store.append(KEY, [b"0"])
    holder = await start("hold_file", store.root, KEY)
    assert await holder.line() == "locked"
    try:
        waiting = [asyncio.create_task(store.append(KEY, [b"%d" % number])) for number in range(1, 11)]
        await asyncio.sleep(0)
        for task in waiting[1::2]:
            task.cancel()
        await asyncio.sleep(0)
        await holder.send()
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    finally:
        await holder.kill()
    assert all(isinstance(result, asyncio.CancelledError) for result in results[1::2])
    records = await everything(store, KEY)
    assert set(records) >= {b"0", *(b"%d" % number for number in range(1, 11, 2))}
    # The first that was cancelled may have been under way already; none is there in part.
    assert set(records) <= {b"%d" % number for number in range(11)}
    assert await store.append(KEY, [b"11"]) == len(records) + 1
    assert await FileStore(store.root).append(KEY, [b"12"]) == len(records) + 2


async def test_appends_cancelled_at_any_moment_are_whole_or_not_there(store: FileStore) -> None:
    for number in range(200):
        task = asyncio.create_task(store.append(KEY, [b'{"n": %d}' % number], sync=number % 2 == 0))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    records = await everything(store, KEY)
    numbers = [json.loads(record)["n"] for record in records]
    assert numbers == sorted(set(numbers))
    assert await FileStore(store.root).append(KEY, [b"{}"]) == len(records) + 1


@pytest.mark.parametrize("by", ["this store", "another store"])
async def test_an_append_that_waited_while_the_log_was_deleted_does_not_bring_it_back(
    store: FileStore, by: str
) -> None:
    await store.append(KEY, [b"0"])
    deleting = store if by == "this store" else FileStore(store.root)
    holder = await start("hold_file", store.root, KEY)
    assert await holder.line() == "locked"
    try:
        waiting = asyncio.create_task(store.append(KEY, [b"1"]))
        await asyncio.sleep(0)
        assert await deleting.delete("s")
        if deleting is store:
            assert await store.append(KEY, [b"anew"]) == 1
        await holder.send()
        with pytest.raises(KeyError):
            await asyncio.wait_for(waiting, 30)
    finally:
        await holder.kill()
    assert await everything(store, KEY) == ([b"anew"] if deleting is store else [])


async def test_a_log_replaced_by_an_editor_is_continued_where_it_is_now(store: FileStore) -> None:
    await store.append(KEY, [b"1"] * 5)
    (store.root / "s/edited").write_bytes(b"a\nb\n")
    (store.root / "s/edited").replace(file_of(store))
    assert await store.append(KEY, [b"c"]) == 3
    file_of(store).write_bytes(b"")
    assert await store.append(KEY, [b"d"]) == 1
    await store.put(KEY, b"x\ny\n")
    assert await store.append(KEY, [b"z"]) == 3


async def test_two_programs_take_turns_line_by_line(store: FileStore) -> None:
    other = FileStore(store.root)
    for number in range(0, 400, 4):
        assert await store.append(KEY, [b"a"]) == number + 1
        assert await other.append(KEY, [b"b", b"c"]) == number + 3
        with file_of(store).open("ab") as file:
            file.write(b"foreign\n")
    assert len(await everything(store, KEY)) == 400


async def test_of_hundreds_of_logs_only_some_are_kept_open(store: FileStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for turn in (1, 2):
        for number in range(300):
            assert await store.append(f"s{number}/log", [b"x"], sync=number % 50 == 0) == turn
    assert len(os.listdir("/proc/self/fd")) - before < 140
    await store.close()
    assert len(os.listdir("/proc/self/fd")) - before < 5
    assert await store.append("s0/log", [b"x"]) == 3


def test_a_forked_child_and_its_parent_exclude_each_other_as_strangers_do(tmp_path: Path) -> None:
    assert run("append_with_child", tmp_path / "store", "500") == ["held by another process"]
    records = (tmp_path / "store/s/log.jsonl").read_bytes().split(b"\n")[:-1]
    assert sorted(records) == sorted(
        [b"before", *(f"{name} {number}".encode() for name in ("child", "parent") for number in range(500))]
    )


async def test_threads_with_loops_of_their_own_share_one_store_and_its_syncs(store: FileStore) -> None:
    async def work() -> list[int]:
        return await asyncio.gather(*(store.append(KEY, [b"x"], sync=True) for _ in range(100)))

    numbers = await asyncio.gather(*(in_a_thread(work) for _ in range(4)))
    assert sorted(number for some in numbers for number in some) == list(range(1, 401))
    assert all(some == sorted(some) for some in numbers)


async def test_a_copied_log_includes_a_last_record_without_newline(store: FileStore) -> None:
    await store.append(KEY, [b'{"n": 1}'])
    with file_of(store).open("ab") as file:
        file.write(b'{"n": 2}')
    assert await store.copy_log(KEY, "t/log", through=2, more=[b"end"]) == 3
    assert await everything(store, "t/log") == [b'{"n": 1}', b'{"n": 2}', b"end"]
    assert await store.copy_log(KEY, "t/alone", through=2) == 2
    assert await store.append("t/alone", [b"on"]) == 3
    with file_of(store).open("ab") as file:
        file.write(b'{"torn')
    with pytest.raises(KeyError):
        await store.copy_log(KEY, "t/torn", through=3)
