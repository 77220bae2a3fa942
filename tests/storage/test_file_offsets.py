"""Sequence numbers and blocks of large log files."""

import os
import tracemalloc
from pathlib import Path

import pytest

from carrel.storage.base import MAX_RECORD
from carrel.storage.files.store import FileStore
from tests.support.stores import everything, everything_back

KEY = "s/log.jsonl"
LINE = b"x" * 999
MIB = 1024 * 1024


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    (tmp_path / "store/s").mkdir(parents=True)
    return FileStore(tmp_path / "store")


def bytes_read() -> int:
    """What this process has read through system calls so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


async def grown(store: FileStore, lines: int) -> None:
    """A log made by appends, in pieces."""
    for start in range(0, lines, 1000):
        await store.append(KEY, [LINE] * min(1000, lines - start))


async def last_number(store: FileStore) -> int:
    async for block in store.read_back(KEY):
        return block.first_seq + len(block.records) - 1
    return 0


async def test_a_hint_spares_counting_what_was_there_before(store: FileStore) -> None:
    await grown(store, 40_000)
    size = (store.root / KEY).stat().st_size
    await grown(store, 100)
    before = bytes_read()
    async for block in FileStore(store.root).read_back(KEY, hint=(40_000, size)):
        assert block.last_seq == 40_100
        break
    assert bytes_read() - before < MIB
    for wrong in ((40_000, size - 1), (40_000, size + 10**9), (7, 0)):
        async for block in FileStore(store.root).read_back(KEY, hint=wrong):
            assert block.last_seq == 40_100
            break


async def test_what_is_known_of_a_file_that_was_replaced_or_cut_is_not_used(store: FileStore) -> None:
    await grown(store, 5000)
    (store.root / "s/edited").write_bytes(b"short\n" * 100_000 + (LINE + b"\n") * 5000)
    (store.root / "s/edited").replace(store.root / KEY)
    assert await last_number(FileStore(store.root)) == 105_000
    assert await FileStore(store.root).append(KEY, [b"x"]) == 105_001
    assert await store.append(KEY, [b"x"]) == 105_002
    os.truncate(store.root / KEY, 600_000)
    assert await store.append(KEY, [b"x"]) == 100_001
    assert await FileStore(store.root).append(KEY, [LINE] * 5000) == 105_001
    assert await last_number(FileStore(store.root)) == 105_001


async def test_two_who_write_a_large_log_by_turns_agree_on_its_numbers(store: FileStore) -> None:
    stores = [store, FileStore(store.root)]
    for number in range(40):
        assert await stores[number % 2].append(KEY, [LINE] * 300) == (number + 1) * 300
    fresh = FileStore(store.root)
    assert await last_number(fresh) == 12_000
    for number in (1, 2, 2999, 6000, 11_999, 12_000):
        assert len(await everything(fresh, KEY, number)) == 12_001 - number
        assert len(await everything_back(fresh, KEY, number)) == number - 1


async def test_blank_lines_have_numbers_too(store: FileStore) -> None:
    (store.root / KEY).write_bytes(b"\n\n{}\n\r\n\n")
    assert await everything(store, KEY) == [b"", b"", b"{}", b"\r", b""]
    assert await everything_back(store, KEY) == [b"", b"", b"{}", b"\r", b""]
    assert await store.append(KEY, [b"", b"x"]) == 7


@pytest.mark.parametrize("size", [64 * 1024, 256 * 1024, MIB])
async def test_lines_that_end_just_where_a_block_ends(store: FileStore, size: int) -> None:
    for difference in (-2, -1, 0, 1, 2):
        lines = [b"a" * (size + difference), b"b", b"c" * (size - difference), b"", b"d" * (2 * size)]
        (store.root / KEY).write_bytes(b"".join(line + b"\n" for line in lines))
        assert await everything(store, KEY) == lines
        assert await everything_back(store, KEY) == lines
        for number in range(1, 7):
            assert await everything(store, KEY, number) == lines[number - 1 :]
            assert await everything_back(store, KEY, number) == lines[: number - 1]


async def test_of_a_line_too_long_to_be_a_record_the_beginning_is_given_without_holding_it(store: FileStore) -> None:
    with (store.root / KEY).open("wb") as file:
        file.write(b"before\n" + b"long ")
        file.seek(MAX_RECORD + 100, os.SEEK_CUR)  # NUL bytes that take no room on the disk
        file.write(b"\nafter\n")
    tracemalloc.start()
    expected = [b"before", b"long " + b"\0" * 1019, b"after"]
    assert await everything(store, KEY) == expected
    assert await everything_back(store, KEY) == expected
    assert await everything(store, KEY, 3) == [b"after"]
    assert await store.append(KEY, [b"x"]) == 4
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MIB


async def test_a_large_log_is_read_both_ways_in_little_memory(store: FileStore) -> None:
    (store.root / KEY).write_bytes((LINE + b"\n") * 60_000)
    tracemalloc.start()
    count = 0
    async for block in store.read(KEY):
        count += len(block.records)
    async for block in store.read_back(KEY):
        count += len(block.records)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 120_000
    assert peak < 8 * MIB
