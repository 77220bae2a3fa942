"""The suite, pieces: objects that are too large to hold are written and read in parts, and seen whole or not at all."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from carrel.errors import KeyMissing, KeyRefused, StorageReadError, StorageWriteError
from tests.storage.suite.objects import BAD_KEYS
from tests.support.stores import Backend


async def in_pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def failing(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
    raise ZeroDivisionError("the source broke")


async def whole(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


@pytest.mark.parametrize(
    "pieces",
    [[], [b""], [b"one"], [b"a", b"", b"bc"], [bytes(range(256)) * 9000, b"end"], [b"x" * 3_000_000], [b"y"] * 50],
    ids=["none", "an empty one", "one", "with an empty one", "a large one", "a larger one", "many"],
)
async def test_what_was_put_in_pieces_is_there_whole(backend: Backend, pieces: list[bytes]) -> None:
    store, data = backend.open(), b"".join(pieces)
    stamp = await store.put_pieces("deep/o", in_pieces(*pieces))
    assert stamp is not None
    assert stamp.size == len(data)
    assert await store.get("deep/o") == data
    assert await whole(backend.open().pieces("deep/o")) == data
    stamp = await store.stamp("deep/o")
    assert stamp is not None
    assert stamp.size == len(data)
    assert await store.list() == ["deep/o"]


async def test_pieces_begin_at_start(backend: Backend) -> None:
    store, data = backend.open(), bytes(range(256)) * 12_000
    await store.put("o", data)
    for start in (0, 1, 1024 * 1024, 1024 * 1024 + 1, len(data) - 1, len(data), len(data) + 5):
        assert await whole(store.pieces("o", start)) == data[start:]


async def test_pieces_of_nothing_are_a_key_error(backend: Backend) -> None:
    with pytest.raises(KeyMissing):
        await whole(backend.open().pieces("missing"))


@pytest.mark.parametrize("before", [None, b"before"])
async def test_pieces_that_fail_leave_what_was_there(backend: Backend, before: bytes | None) -> None:
    store = backend.open()
    if before is not None:
        await store.put("o", before)
    with pytest.raises(ZeroDivisionError):
        await store.put_pieces("o", failing(b"half", b"x" * 100_000))
    assert await store.get("o") == before
    assert await store.list() == ([] if before is None else ["o"])


async def test_nothing_is_seen_before_the_last_piece_and_cancelling_writes_nothing(backend: Backend) -> None:
    store, sent = backend.open(), asyncio.Event()
    await store.put("o", b"before")

    async def hanging() -> AsyncIterator[bytes]:
        yield b"half"
        sent.set()
        await asyncio.Event().wait()

    putting = asyncio.create_task(store.put_pieces("o", hanging()))
    await asyncio.wait_for(sent.wait(), 30)
    assert await backend.open().get("o") == b"before"
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert await store.get("o") == b"before"
    assert await store.list() == ["o"]


async def test_of_two_who_put_pieces_at_once_one_wins_whole(backend: Backend) -> None:
    one, other = [b"1" * 200_000] * 8, [b"2" * 200_000] * 8
    for _ in range(3):
        putting = [backend.open().put_pieces("o", in_pieces(*pieces)) for pieces in (one, other)]
        await asyncio.gather(*putting)
        assert await backend.open().get("o") in (b"".join(one), b"".join(other))


async def test_a_reader_of_pieces_never_sees_two_versions(backend: Backend) -> None:
    store = backend.open()
    await store.put("o", b"a" * 3_000_000)
    reading = store.pieces("o")
    got = [await anext(reading)]
    await backend.open().put("o", b"b" * 3_000_000)
    try:
        got += [piece async for piece in reading]
    except StorageReadError:
        assert b"".join(got) == b"a" * len(b"".join(got))
    else:
        assert b"".join(got) == b"a" * 3_000_000


@pytest.mark.promise("a log is not an object")
async def test_a_log_is_not_replaced_by_pieces(backend: Backend) -> None:
    store = backend.open()
    await store.append("log", [b"x"])
    with pytest.raises(StorageWriteError):
        await store.put_pieces("log", in_pieces(b"y"))


async def test_a_key_that_is_no_plain_path_is_refused(backend: Backend) -> None:
    store = backend.open()
    for key in BAD_KEYS:
        with pytest.raises(KeyRefused):
            await store.put_pieces(key, in_pieces(b"x"))
        with pytest.raises(KeyRefused):
            await whole(store.pieces(key))
    assert await store.list() == []


@pytest.mark.promise("memory stays flat")
async def test_pieces_are_not_held(backend: Backend) -> None:
    store, piece, count = backend.open(), b"x" * 1_000_000, 60

    async def many() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield piece

    tracemalloc.start()
    try:
        stamp = await store.put_pieces("o", many())
        assert stamp is not None
        assert stamp.size == count * len(piece)
        size = 0
        async for got in store.pieces("o"):
            size += len(got)
        assert size == count * len(piece)
        assert tracemalloc.get_traced_memory()[1] < 15_000_000
    finally:
        tracemalloc.stop()
