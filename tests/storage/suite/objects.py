"""The suite, objects: what every kind of store promises of keys and of objects that are replaced whole."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from carrel.errors import KeyRefused
from carrel.storage.base import MISSING, Store
from tests.support.stores import Backend, in_a_thread

BAD_KEYS = [
    "",
    ".",
    "..",
    "/a",
    "a/",
    "a//b",
    "a/../b",
    "a/./b",
    "a\\b",
    "a\nb",
    "a\x00b",
    "a/\x7f",
    "a\ud800",
    "k" * 1025,
]


async def consumed(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


VERBS: dict[str, Callable[[Store, str], object]] = {
    "get": lambda store, key: store.get(key),
    "get_many": lambda store, key: store.get_many(["good", key]),
    "put": lambda store, key: store.put(key, b""),
    "delete": lambda store, key: store.delete(key),
    "stamp": lambda store, key: store.stamp(key),
    "stamps": lambda store, key: store.stamps(["good", key]),
    "copy from": lambda store, key: store.copy(key, "good"),
    "copy to": lambda store, key: store.copy("good", key),
    "copy_log from": lambda store, key: store.copy_log(key, "good", through=1),
    "copy_log to": lambda store, key: store.copy_log("good", key, through=1),
    "append": lambda store, key: store.append(key, [b"x"]),
    "read": lambda store, key: consumed(store.read(key)),
    "read from": lambda store, key: consumed(store.read(key, 2)),
    "read_back": lambda store, key: consumed(store.read_back(key)),
    "read_back before": lambda store, key: consumed(store.read_back(key, 2)),
    "incomplete_tail": lambda store, key: store.incomplete_tail(key),
    "watch": lambda store, key: consumed(store.watch(key)),
    "lock": lambda store, key: store.lock(key),
    "lock_owner": lambda store, key: store.lock_owner(key),
}
ALL_BELOW: dict[str, Callable[[Store, str], object]] = {
    "list": lambda store, key: store.list(key),
    "folders": lambda store, key: store.folders(key),
    "scan": lambda store, key: store.scan(key),
    "scan for names": lambda store, key: store.scan(key, ["x"]),
}
"""An empty prefix means everything there."""


@pytest.mark.parametrize("verb", [*VERBS, *ALL_BELOW])
async def test_a_key_that_is_no_plain_path_is_refused_by_every_verb(backend: Backend, verb: str) -> None:
    store = backend.open()
    await store.put("good", b"untouched")
    for key in BAD_KEYS if verb in VERBS else BAD_KEYS[1:]:
        with pytest.raises(KeyRefused):
            await (VERBS | ALL_BELOW)[verb](store, key)  # type: ignore[misc]
    assert await store.list() == ["good"]
    assert await store.get("good") == b"untouched"


async def test_keys_may_have_spaces_signs_and_any_alphabet(backend: Backend) -> None:
    store = backend.open()
    keys = sorted(["a b/c", "é/ü.json", "日本/語", "🙂", "[x]*?", "50%", "a:b", "(1)", "-", "~", "a..", "'\""])
    for key in keys:
        await store.put(key, key.encode())
    assert await store.list() == keys
    assert await store.get_many(keys) == [key.encode() for key in keys]


@pytest.mark.promise("any name in a key")
async def test_a_name_in_a_key_may_begin_with_a_dot_and_be_long(backend: Backend) -> None:
    store = backend.open()
    for key in (".hidden", "..a/...", "n" * 1024):
        await store.put(key, b"x")
        await store.append(f"{key[:1000]}.log", [b"x"])
    assert len(await store.list()) == 6


async def test_what_is_put_comes_back_as_it_was(backend: Backend) -> None:
    store = backend.open()
    for data in (b"", b"x", bytes(range(256)), b"\n\n", b"z" * 3_000_000):
        assert await store.put("o", data)
        assert await store.get("o") == data
        assert await backend.open().get("o") == data
    assert await store.get("other") is None


async def test_many_are_returned_in_the_order_of_the_keys(backend: Backend) -> None:
    store = backend.open()
    keys = [f"many/{number}" for number in range(700)]
    await asyncio.gather(*[store.put(key, key.encode()) for key in keys])
    keys_to_read = [*reversed(keys), "missing", keys[0], keys[0]]
    found = [*[key.encode() for key in reversed(keys)], None, b"many/0", b"many/0"]
    assert await store.get_many(keys_to_read) == found
    assert await store.get_many([]) == []


async def test_of_many_who_put_only_what_is_new_one_wins(backend: Backend) -> None:
    for turn in range(5):
        names = [f"{turn} {number}".encode() for number in range(20)]
        won = await asyncio.gather(*[backend.open().put(f"race/{turn}", name, expect=MISSING) for name in names])
        assert sum(stamp is not None for stamp in won) == 1
        winner = next(name for name, stamp in zip(names, won, strict=True) if stamp)
        assert await backend.open().get(f"race/{turn}") == winner


@pytest.mark.promise("between processes")
async def test_of_many_processes_that_put_only_what_is_new_one_wins(backend: Backend) -> None:
    others = [await backend.other("put_new", "race", str(number)) for number in range(3)]
    for other in others:
        assert await other.line() == "ready"
    for other in others:
        await other.send()
    won = [await other.line() for other in others]
    assert sorted(won) == ["False", "False", "True"]
    assert await backend.open().get("race") == str(won.index("True")).encode()


async def test_a_reader_sees_the_old_bytes_or_the_new_and_nothing_between(backend: Backend) -> None:
    size = 300_000
    await backend.open().put("o", b"a" * size)
    done = threading.Event()

    async def read() -> set[tuple[int, bytes]]:
        store, seen = backend.open(), set()
        while not done.is_set():
            data = await store.get("o")
            assert data is not None
            assert data == data[:1] * size
            seen.add((len(data), data[:1]))
            await asyncio.sleep(0)
        await backend.done_with(store)
        return seen

    async def write() -> None:
        store = backend.open()
        for turn in range(60):
            await store.put("o", (b"b", b"a")[turn % 2] * size)
            await asyncio.sleep(0)
        done.set()
        await backend.done_with(store)

    seen, _ = await asyncio.gather(in_a_thread(read), in_a_thread(write))
    assert seen <= {(size, b"a"), (size, b"b")}


async def test_list_gives_the_key_itself_and_what_is_below_it_in_order(backend: Backend) -> None:
    store = backend.open()
    beside = ["a!x", "a-b", "a.b", "a0", "ab", "b/a/c", "A/x"]
    below = ["a/b", "a/c/d", "a/c/e/f", "a/é", "a/~"]
    for key in [*beside, *below]:
        await store.put(key, b"")
    await store.append("a/log", [b"x"])
    below = sorted([*below, "a/log"])
    assert await store.list("a") == below
    assert await store.list("a/c") == ["a/c/d", "a/c/e/f"]
    assert await store.list("a/c/d") == ["a/c/d"]
    assert await store.list("a/lo") == []
    assert await store.list("c") == []
    assert await store.list() == sorted([*beside, *below])


async def test_folders_are_the_names_that_have_keys_below_them(backend: Backend) -> None:
    store = backend.open()
    for key in [
        "top",
        "s/1/meta",
        "s/1/log",
        "s/1/deep/er",
        "s/1!/x",
        "s/1.5/x",
        "s/10/x",
        "s/é/x",
        "s/leaf",
        "sx/1/y",
    ]:
        await store.put(key, b"")
    assert await store.folders() == ["s", "sx"]
    assert await store.folders("s") == sorted(["1", "1!", "1.5", "10", "é"])
    assert await store.folders("s/1") == ["deep"]
    assert await store.folders("s/leaf") == []
    assert await store.folders("nowhere") == []
    await store.delete("s/1/deep/er")
    assert await store.folders("s/1") == []


async def test_folders_are_found_among_many_keys(backend: Backend) -> None:
    store = backend.open()
    await asyncio.gather(*[store.put(f"s/{number:03}/{part}", b"") for number in range(60) for part in range(7)])
    await asyncio.gather(*[store.put(f"s/leaf{number}", b"") for number in range(130)])
    assert await store.folders("s") == [f"{number:03}" for number in range(60)]


@pytest.mark.promise("a key may also be a folder")
async def test_a_key_may_have_keys_below_it(backend: Backend) -> None:
    store = backend.open()
    await store.put("a", b"1")
    await store.put("a/b", b"2")
    assert await store.list("a") == ["a", "a/b"]
    assert await store.delete("a") is True
    assert await store.list() == []


async def test_delete_takes_everything_below_and_nothing_beside(backend: Backend) -> None:
    store = backend.open()
    for key in ["s/1/meta", "s/1/x/y", "s/1!", "s/10/meta", "s1"]:
        await store.put(key, b"x")
    await store.append("s/1/log", [b"x" * 50_000])
    assert await store.delete("s/1") is True
    assert await store.list() == sorted(["s/1!", "s/10/meta", "s1"])
    assert await store.get("s/1/meta") is None
    assert await store.stamp("s/1/log") is None
    assert await store.delete("s/1") is False
    assert await store.delete("s/1/meta") is False
    assert await store.delete("s1") is True


async def test_a_copy_has_the_bytes_and_outlives_its_source(backend: Backend) -> None:
    store = backend.open()
    data = bytes(range(256)) * 1000
    await store.put("a/blob", data)
    await store.copy("a/blob", "b/deep/blob")
    assert await store.get("b/deep/blob") == data
    assert await store.list() == ["a/blob", "b/deep/blob"]
    await store.delete("a")
    assert await backend.open().get("b/deep/blob") == data
    await store.copy("b/deep/blob", "a/blob")
    await store.copy("b/deep/blob", "a/blob")
    assert await store.get("a/blob") == data


async def test_a_copy_of_nothing_is_a_key_error_and_makes_nothing(backend: Backend) -> None:
    store = backend.open()
    with pytest.raises(KeyError):
        await store.copy("a", "b")
    assert await store.list() == []


async def test_a_stamp_stays_while_nothing_changes_and_differs_after_every_change(backend: Backend) -> None:
    store, other = backend.open(), backend.open()
    seen = []
    for data in (b"1234", b"5678", b"9", b"1234"):
        await store.put("o", data)
        stamp = await store.stamp("o")
        assert stamp is not None
        assert stamp.size == len(data)
        assert await other.stamp("o") == stamp
        seen.append(stamp)
    await store.delete("o")
    assert await store.stamp("o") is None
    await store.put("o", b"1234")
    stamp = await store.stamp("o")
    assert stamp
    seen.append(stamp)
    for turn in range(3):
        await store.append("log", [b"x" * turn])
        stamp = await store.stamp("log")
        assert stamp
        seen.append(stamp)
        assert await other.stamp("log") == seen[-1]
    assert len(set(seen)) == len(seen)


async def test_a_stamp_tells_when_the_key_was_written(backend: Backend) -> None:
    store = backend.open()
    before = time.time()
    await store.put("o", b"x")
    stamp = await store.stamp("o")
    assert stamp is not None
    assert before - 1 <= stamp.modified <= time.time() + 1  # a file system's clock ticks in steps


async def test_many_stamps_are_in_the_order_of_the_keys(backend: Backend) -> None:
    store = backend.open()
    for number in range(30):
        await store.put(f"o/{number}", b"x" * number)
    keys = [f"o/{number}" for number in range(29, -1, -1)]
    stamps = await store.stamps([*keys, "missing"])
    assert [stamp.size if stamp else None for stamp in stamps] == [*range(29, -1, -1), None]
    assert await store.stamps([]) == []


async def test_close_twice_is_harmless_and_the_store_can_be_used_again(backend: Backend) -> None:
    store = backend.open()
    await store.close()
    await store.put("o", b"x")
    await store.append("log", [b"1"])
    await store.close()
    await store.close()
    assert await store.get("o") == b"x"
    assert await store.append("log", [b"2"]) == 2
    assert await store.lock("l", wait=False)


async def test_one_store_is_used_from_several_threads_with_their_own_loops(backend: Backend) -> None:
    store = backend.open()

    async def work(number: int) -> None:
        for turn in range(20):
            await store.put(f"t/{number}", str(turn).encode())
            await store.append("log", [f"{number} {turn}".encode()])

    await asyncio.gather(work(0), *[in_a_thread(partial(work, number)) for number in range(1, 4)])
    assert await store.get_many([f"t/{number}" for number in range(4)]) == [b"19"] * 4
    records = [record async for block in store.read("log") for record in block.records]
    assert sorted(records) == sorted(f"{number} {turn}".encode() for number in range(4) for turn in range(20))
