"""The suite, logs: what every kind of store promises of records that are only ever added."""

import asyncio
import json
import random
import tracemalloc
from functools import partial
from typing import Any

import pytest

from carrel.errors import StorageWriteError
from carrel.storage.base import MAX_RECORD, MISSING, Block
from tests.support.stores import Backend, everything, everything_back, in_a_thread


async def test_records_are_numbered_from_one_in_the_order_they_came(backend: Backend) -> None:
    store = backend.open()
    assert await store.append("log", [b"a"]) == 1
    assert await store.append("log", [b"b", b"c"]) == 3
    assert await backend.open().append("log", [b"d"], sync=True) == 4
    assert await everything(store, "log") == [b"a", b"b", b"c", b"d"]
    assert await store.append("other", [b"z"]) == 1


async def test_records_come_back_as_they_were(backend: Backend) -> None:
    store = backend.open()
    every_byte = bytes(set(range(256)) - {ord("\n")})
    records = [b"", b" ", every_byte, b"\xff\xfe", b"\r", b"x\r", b"\x00", "é🙂".encode(), b"", b"x" * 200_000, b""]
    assert await store.append("log", records) == len(records)
    assert await everything(store, "log") == records
    assert await everything_back(backend.open(), "log") == records
    assert await store.incomplete_tail("log") == b""


async def test_a_record_of_forty_megabytes_is_a_record_like_others(backend: Backend) -> None:
    store = backend.open()
    large = random.Random(1).randbytes(1_000_000).replace(b"\n", b" ") * 40
    assert await store.append("log", [b"before", large, b"after"]) == 3
    assert await everything(store, "log") == [b"before", large, b"after"]
    assert await everything(store, "log", 3) == [b"after"]
    assert await everything_back(store, "log", 3) == [b"before", large]


@pytest.mark.slow
async def test_the_longest_record_comes_back(backend: Backend) -> None:
    store = backend.open()
    longest = b"x" * MAX_RECORD
    assert await store.append("log", [longest]) == 1
    assert await store.append("log", [b"after"]) == 2
    assert await everything(store, "log") == [longest, b"after"]


async def test_what_cannot_be_one_record_is_refused_with_all_that_came_with_it(backend: Backend) -> None:
    store = backend.open()
    await store.append("log", [b"first"])
    for bad in (b"two\nlines", b"\n", bytes(MAX_RECORD + 1)):
        with pytest.raises(StorageWriteError):
            await store.append("log", [b"good", bad])
        with pytest.raises(StorageWriteError):
            await store.append("new", [bad])
    assert await everything(store, "log") == [b"first"]
    assert await store.list() == ["log"]


async def test_an_append_of_nothing_makes_an_empty_log_and_changes_no_other(backend: Backend) -> None:
    store = backend.open()
    assert await store.append("log", []) == 0
    assert await store.list() == ["log"]
    assert await everything(store, "log") == []
    assert await everything_back(store, "log") == []
    assert await store.append("log", [b"a"], create=False) == 1
    assert await store.append("log", []) == 1
    with pytest.raises(KeyError):
        await store.append("missing", [], create=False)


async def test_a_log_that_is_not_there_reads_as_nothing(backend: Backend) -> None:
    store = backend.open()
    for seq in (1, 2, 100):
        assert await everything(store, "none", seq) == []
        assert await everything_back(store, "none", seq) == []
    assert await everything_back(store, "none") == []
    assert await store.incomplete_tail("none") == b""
    assert await store.list() == []


async def test_without_create_a_missing_log_is_a_key_error_and_stays_missing(backend: Backend) -> None:
    store = backend.open()
    with pytest.raises(KeyError):
        await store.append("log", [b"x"], create=False)
    assert await store.list() == []
    await store.append("log", [b"x"])
    assert await store.append("log", [b"y"], create=False) == 2


async def test_an_append_after_a_number_is_made_only_while_that_is_the_last(backend: Backend) -> None:
    store, other = backend.open(), backend.open()
    assert await store.append("log", [b"a"], after=0) == 1
    assert await other.append("log", [b"b", b"c"], after=1) == 3
    for late in (0, 1, 2, 4):
        assert await store.append("log", [b"late"], after=late) == 0
        assert await store.append("log", [b"late"] * 300, after=late, sync=True) == 0
    assert await store.append("log", [b"d"], after=3, create=False, sync=True) == 4
    assert await everything(other, "log") == [b"a", b"b", b"c", b"d"]
    with pytest.raises(KeyError):
        await store.append("missing", [b"x"], after=1)
    assert await store.list() == ["log"]


async def test_of_many_that_append_after_the_same_number_one_does(backend: Backend) -> None:
    stores = [backend.open() for _ in range(4)]
    await stores[0].append("log", [b"first"])
    answers = await asyncio.gather(*(store.append("log", [b"%d" % n], after=1) for n in range(10) for store in stores))
    assert sorted(answers) == [0] * 39 + [2]
    assert len(await everything(stores[0], "log")) == 2


async def test_a_log_is_read_from_every_number_and_back_from_every_number(backend: Backend) -> None:
    store = backend.open()
    records = [f"record {number}".encode() for number in range(1, 41)]
    await store.append("log", records)
    for seq in range(1, 43):
        assert await everything(store, "log", seq) == records[seq - 1 :]
        assert await everything_back(store, "log", seq) == records[: seq - 1]
    assert await everything_back(store, "log", 1000) == records
    assert await everything_back(store, "log") == records


async def test_a_long_log_of_short_and_long_records_is_read_whole_from_both_ends(backend: Backend) -> None:
    store = backend.open()
    sizes = random.Random(7)
    records = [b"%d " % number + b"x" * sizes.choice([0, 10, 300, 300, 40_000]) for number in range(2000)]
    for start in range(0, len(records), 250):
        await store.append("log", records[start : start + 250])
    assert await everything(store, "log") == records
    assert await everything_back(store, "log") == records
    for seq in (2, 511, 512, 513, 514, 1024, 1025, 1999, 2000, 2001):
        assert await everything(store, "log", seq) == records[seq - 1 :]
        assert await everything_back(store, "log", seq) == records[: seq - 1]


@pytest.mark.promise("memory stays flat")
async def test_a_log_is_read_in_little_memory_however_long_it_is(backend: Backend) -> None:
    store = backend.open()
    for _ in range(20):
        await store.append("log", [b"x" * 1_000_000] * 4)
        await store.append("log", [b"y" * 10_000] * 50)
    for blocks in (store.read("log"), store.read_back("log"), store.watch("log")):
        tracemalloc.start()
        seen = 0
        async for block in blocks:
            seen += len(block.records) if isinstance(block, Block) else 1
            if seen == 20 * 54:
                break
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 30_000_000


async def test_two_hundred_appends_at_once_lose_and_mix_nothing(backend: Backend) -> None:
    store = backend.open()
    records = [f"record {number}".encode() for number in range(200)]
    numbers = await asyncio.gather(*[store.append("log", [record]) for record in records])
    assert sorted(numbers) == list(range(1, 201))
    kept = await everything(store, "log")
    assert [kept[number - 1] for number in numbers] == records


async def test_appends_of_several_records_stay_together(backend: Backend) -> None:
    stores = [backend.open() for _ in range(4)]
    batches = [[b"%d %d" % (batch, number) for number in range(5)] for batch in range(40)]
    numbers = await asyncio.gather(*[stores[at % 4].append("log", batch) for at, batch in enumerate(batches)])
    kept = await everything(stores[0], "log")
    assert len(kept) == 200
    for last, batch in zip(numbers, batches, strict=True):
        assert kept[last - 5 : last] == batch


async def test_threads_with_their_own_loops_append_to_one_log(backend: Backend) -> None:
    async def work(name: int) -> list[int]:
        store = backend.open()
        numbers = [await store.append("log", [b"%d %d" % (name, turn)]) for turn in range(30)]
        await backend.done_with(store)
        return numbers

    numbers = await asyncio.gather(*[in_a_thread(partial(work, name)) for name in range(4)])
    kept = await everything(backend.open(), "log")
    assert len(kept) == 120
    for name, its in enumerate(numbers):
        assert [kept[number - 1] for number in its] == [b"%d %d" % (name, turn) for turn in range(30)]


@pytest.mark.promise("between processes")
async def test_several_processes_append_to_one_log(backend: Backend) -> None:
    others = [await backend.other("append", "s/log", "100", f"process{name}") for name in range(3)]
    for other in others:
        assert await other.line() == "ready"
    for other in others:
        await other.send()
    kept_here = [await backend.open().append("s/log", [f"here {turn}".encode()]) for turn in range(50)]
    numbers = [json.loads(await other.line()) for other in others]
    kept = await everything(backend.open(), "s/log")
    assert len(kept) == 350
    assert sorted(sum(numbers, kept_here)) == list(range(1, 351))
    for name, its in enumerate(numbers):
        assert [kept[number - 1] for number in its] == [f"process{name} {turn}".encode() for turn in range(100)]


@pytest.mark.promise("between processes")
async def test_what_was_acknowledged_survives_a_kill(backend: Backend) -> None:
    other = await backend.other("append_forever", "log")
    acknowledged = [await other.line() for _ in range(50)]
    await other.kill()
    assert acknowledged == [str(number) for number in range(1, 51)]
    store = backend.open()
    last = await store.append("log", [b"after"])
    kept = await everything(store, "log")
    assert len(kept) == last > 50
    assert kept == [b"x" * 300] * (last - 1) + [b"after"]


async def test_a_log_made_anew_begins_at_one(backend: Backend) -> None:
    store = backend.open()
    await store.append("s/log", [b"old"] * 3)
    await store.append("s/log", [b"old" * 20_000])
    await store.delete("s")
    assert await everything(store, "s/log") == []
    with pytest.raises(KeyError):
        await store.append("s/log", [b"x"], create=False)
    assert await store.append("s/log", [b"new"]) == 1
    assert await everything(store, "s/log") == [b"new"]


async def test_a_delete_by_one_store_and_then_an_append_by_another_begins_anew(backend: Backend) -> None:
    one, other = backend.open(), backend.open()
    for turn in range(20):
        assert await one.append("s/log", [b"%d" % turn]) == 1
        assert await other.delete("s") is True


@pytest.mark.promise("a running append creates nothing")
async def test_an_append_under_way_never_brings_back_what_was_deleted(backend: Backend) -> None:
    await append_and_delete(backend, create=True)


async def test_an_append_that_must_not_create_never_brings_back_what_was_deleted(backend: Backend) -> None:
    await append_and_delete(backend, create=False)


async def append_and_delete(backend: Backend, *, create: bool) -> None:
    store, other = backend.open(), backend.open()
    for turn in range(15):
        await store.append("s/log", [b"first"])
        # More than there are connections or threads, so that some are still waiting when the delete is done.
        appends = [asyncio.create_task(store.append("s/log", [b"x" * 100 * turn], create=create)) for _ in range(100)]
        await asyncio.sleep(0)
        deleting = asyncio.create_task(other.delete("s"))
        answers = await asyncio.gather(*appends, return_exceptions=True)
        assert await deleting is True
        assert all(isinstance(answer, (int, KeyError)) for answer in answers), answers
        assert await store.list() == []
        assert await everything(store, "s/log") == []


@pytest.mark.promise("between processes")
async def test_a_process_that_appends_hears_that_its_log_was_deleted(backend: Backend) -> None:
    other = await backend.other("append_until_gone", "s/log")
    assert await other.line() == "began"
    store = backend.open()
    assert await store.delete("s") is True
    assert await other.line() == "gone"
    assert await store.list() == []


@pytest.mark.promise("between processes")
async def test_a_log_deleted_by_another_process_can_be_begun_anew(backend: Backend) -> None:
    store = backend.open()
    await store.append("s/log", [b"old"])
    other = await backend.other("delete", "s")
    assert await other.line() == "True"
    assert await other.line() == ""
    assert await store.append("s/log", [b"new"]) == 1


async def test_a_reader_in_the_middle_of_a_log_is_not_given_another_one(backend: Backend) -> None:
    store = backend.open()
    await store.append("log", [b"old %d" % number for number in range(3000)])
    seen: list[Any] = []
    async for block in store.read("log"):
        if not seen:
            await store.delete("log")
            await store.append("log", [b"new %d" % number for number in range(3000)])
        seen += block.records
    assert seen == [b"old %d" % number for number in range(len(seen))]


async def test_a_delete_with_an_expected_stamp_takes_nothing_that_came_since(backend: Backend) -> None:
    store, other = backend.open(), backend.open()
    await store.append("a/log", [b"1"])
    before = await store.stamp("a/log")
    await other.append("a/log", [b"2"])
    assert not await store.delete("a", expect=("a/log", before))
    assert not await store.delete("a", expect=("a/log", MISSING))
    assert await everything(other, "a/log") == [b"1", b"2"]
    assert await store.delete("a", expect=("a/log", await store.stamp("a/log")))
    assert await other.list() == []
    await store.put("a/object", b"x")
    assert not await store.delete("a", expect=("a/log", before))
    assert await store.delete("a", expect=("a/log", MISSING))
    assert await other.list() == []


async def test_of_deletes_with_an_expected_stamp_and_appends_at_once_nothing_acknowledged_is_lost(
    backend: Backend,
) -> None:
    store, other = backend.open(), backend.open()
    await store.append("a/log", [b"0"])
    acknowledged = []

    async def append() -> None:
        for number in range(1, 200):
            try:
                await other.append("a/log", [b"%d" % number], create=False)
            except KeyError:
                return
            acknowledged.append(number)
            await asyncio.sleep(0)

    appending = asyncio.create_task(append())
    while not appending.done():
        before, known = await store.stamp("a/log"), len(acknowledged)
        if await store.delete("a", expect=("a/log", before)):
            assert len(acknowledged) <= known + 1  # the stamp may include one that is not acknowledged yet
            break
        await asyncio.sleep(0)
    await appending
