"""The suite, conditions: writes that happen only if something is unchanged, copied logs, and scans."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from carrel.errors import GuardLost, StorageWriteError
from carrel.storage.base import MISSING, Stamp, guarded
from tests.support.stores import Backend, everything


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def test_a_put_returns_the_stamp_that_others_see(backend: Backend) -> None:
    store, other = backend.open(), backend.open()
    for data in (b"1", b"22", b"22"):
        stamp = await store.put("s/o", data)
        assert stamp is not None
        assert await other.stamp("s/o") == stamp
    stamp = await store.put_pieces("s/o", pieces(b"a", b"bc"))
    assert stamp is not None
    assert stamp.size == 3
    assert await other.stamp("s/o") == stamp


async def test_a_put_with_an_expected_stamp_replaces_only_that_version(backend: Backend) -> None:
    store, other = backend.open(), backend.open()
    first = await store.put("o", b"1")
    assert first is not None
    second = await other.put("o", b"2", expect=first)
    assert second is not None
    assert await store.put("o", b"3", expect=first) is None
    assert await store.put_pieces("o", pieces(b"3"), expect=first) is None
    assert await store.put("o", b"3", expect=MISSING) is None
    assert await store.get("o") == b"2"
    assert await store.put_pieces("o", pieces(b"4"), expect=second)
    await store.delete("o")
    assert await store.put("o", b"5", expect=second) is None
    assert await store.put_pieces("o", pieces(b"5"), expect=second) is None
    assert await store.list() == []
    assert await store.put_pieces("o", pieces(b"6"), expect=MISSING)
    assert await store.get("o") == b"6"


async def test_a_put_into_a_deleted_folder_with_an_expected_stamp_writes_nothing(backend: Backend) -> None:
    store = backend.open()
    stamp = await store.put("s/1/o", b"1")
    await store.delete("s")
    assert await store.put("s/1/o", b"2", expect=stamp) is None
    assert await store.list() == []


async def test_many_who_count_with_expected_stamps_lose_no_step(backend: Backend) -> None:
    await backend.open().put("count", b"0")

    async def count() -> None:
        store = backend.open()
        for _ in range(10):
            while True:
                stamp = await store.stamp("count")
                value = await store.get("count")
                assert value is not None
                if await store.put("count", b"%d" % (int(value) + 1), expect=stamp):
                    break

    await asyncio.gather(*(count() for _ in range(6)))
    assert await backend.open().get("count") == b"60"


async def test_a_delete_with_an_expected_stamp_removes_only_what_is_unchanged(backend: Backend) -> None:
    store = backend.open()
    await store.append("s/log", [b"1"])
    await store.put("s/o", b"1")
    old = await store.stamp("s/log")
    assert old is not None
    await store.append("s/log", [b"2"])
    assert await store.delete("s", expect=("s/log", old)) is False
    assert await store.delete("s", expect=("s/log", MISSING)) is False
    assert await store.list() == ["s/log", "s/o"]
    assert await store.delete("s", expect=("s/log", await store.stamp("s/log"))) is True
    assert await store.list() == []
    await store.put("s/o", b"1")
    assert await store.delete("s", expect=("s/log", MISSING)) is True
    stamp = await store.put("o", b"1")
    await store.put("o", b"2")
    assert await store.delete("o", expect=("o", stamp)) is False
    assert await store.delete("o", expect=("o", await store.stamp("o"))) is True


async def test_a_write_with_a_changed_guard_writes_nothing(backend: Backend) -> None:
    store = backend.open()
    old = await store.put("leases/node", b"1")
    assert old is not None
    await store.put("o", b"kept")
    await store.append("log", [b"kept"])
    await store.put("leases/node", b"2")
    for guard in (("leases/node", old), ("leases/none", old), ("none/at/all", old)):
        held = guarded(store, guard)
        for write in (
            held.put("o", b"x"),
            held.put("new/o", b"x"),
            held.put_pieces("o", pieces(b"x")),
            held.delete("o"),
            held.copy("o", "copy"),
            held.append("log", [b"x"]),
            held.append("new/log", [b"x"]),
            held.copy_log("log", "other", through=1),
        ):
            with pytest.raises(GuardLost, match=f"{guard[0]}"):
                await write
    assert await store.list() == ["leases/node", "log", "o"]
    assert await store.get("o") == b"kept"
    assert await everything(store, "log") == [b"kept"]


async def test_a_write_with_an_unchanged_guard_succeeds(backend: Backend) -> None:
    store = backend.open()
    stamp = await store.put("leases/node", b"1")
    assert stamp is not None
    held = guarded(store, ("leases/node", stamp))
    assert await held.put("s/o", b"x")
    assert await held.put_pieces("leases/beside", pieces(b"x"))
    assert await held.append("s/log", [b"1", b"2"]) == 2
    assert await held.append("s/log", [b"3"], after=2) == 3
    assert await held.append("s/log", [b"4"], after=2) == 0
    await held.copy("s/o", "s/copy")
    assert await held.copy_log("s/log", "t/log", through=2, more=[b"x"]) == 3
    assert await held.delete("s/copy") is True
    assert await held.list() == ["leases/beside", "leases/node", "s/log", "s/o", "t/log"]


async def test_guarded_writes_from_many_sides_stop_at_once_when_the_guard_changes(backend: Backend) -> None:
    store = backend.open()
    stamp = await store.put("leases/node", b"1")
    assert stamp is not None

    async def write(number: int) -> int:
        held, written = guarded(backend.open(), ("leases/node", stamp)), 0
        try:
            while True:
                await held.append(f"log{number}", [b"x"])
                written += 1
                await asyncio.sleep(0)
        except GuardLost:
            return written

    writing = [asyncio.create_task(write(number)) for number in range(3)]
    await asyncio.sleep(0.05)
    await store.put("leases/node", b"2")
    before = [len(await everything(store, f"log{number}")) for number in range(3)]
    assert await asyncio.gather(*writing) == before


async def test_a_copied_log_has_the_first_records_and_goes_on_by_itself(backend: Backend) -> None:
    store = backend.open()
    records = [b'{"n": %d, "text": "%s"}' % (number, b"x" * (number % 700)) for number in range(2000)]
    await store.append("a/log", records)
    for number, through in enumerate((1, 2, 777, 1999, 2000)):
        last = await store.copy_log("a/log", f"b/{number}", through=through, more=[b"end", b""])
        assert last == through + 2
        assert await everything(backend.open(), f"b/{number}") == [*records[:through], b"end", b""]
        assert await store.append(f"b/{number}", [b"on"]) == through + 3
    assert await store.copy_log("a/log", "b/none", through=0, more=[b"only"]) == 1
    assert await everything(store, "b/none") == [b"only"]
    assert await store.append("a/log", [b"more"]) == 2001
    await store.delete("a")
    assert len(await everything(store, "b/4")) == 2003


async def test_a_log_is_copied_only_from_what_is_there_and_to_what_is_not(backend: Backend) -> None:
    store = backend.open()
    await store.append("a", [b"1", b"2"])
    await store.put("o", b"x")
    for source, through in (("none", 1), ("none", 0), ("a", 3)):
        with pytest.raises(KeyError, match=source):
            await store.copy_log(source, "b", through=through)
    for target in ("o", "a"):
        with pytest.raises(StorageWriteError, match="exists already"):
            await store.copy_log("a", target, through=1)
    with pytest.raises(StorageWriteError, match="newline"):
        await store.copy_log("a", "b", through=1, more=[b"x\ny"])
    assert await store.list() == ["a", "o"]


async def test_of_many_who_copy_to_one_log_one_wins(backend: Backend) -> None:
    store = backend.open()
    await store.append("a", [b"1"])
    copies = [backend.open().copy_log("a", "b", through=1, more=[b"%d" % number]) for number in range(8)]
    results = await asyncio.gather(*copies, return_exceptions=True)
    assert sorted(isinstance(result, StorageWriteError) for result in results) == [False] + [True] * 7
    assert len(await everything(store, "b")) == 2


async def test_a_scan_gives_the_stamps_of_all_keys_below_a_prefix(backend: Backend) -> None:
    store = backend.open()
    assert await store.scan("s") == {}
    for key in ("s/1/meta", "s/1/deep/er", "s/2/meta", "s/top", "sx/1/meta"):
        await store.put(key, key.encode())
    await store.append("s/1/log", [b"x"])

    async def stamps(*keys: str) -> dict[str, Stamp | None]:
        return dict(zip(keys, await store.stamps(keys), strict=True))

    assert await store.scan("s") == await stamps("s/1/meta", "s/1/deep/er", "s/2/meta", "s/top", "s/1/log")
    assert await store.scan("") == await stamps(*await store.list())
    assert await store.scan("s", ["meta", "log"]) == await stamps("s/1/meta", "s/1/log", "s/2/meta")
    assert await store.scan("", ["top"]) == await stamps("s/top")
    assert await store.scan("nowhere") == await store.scan("nowhere", ["x"]) == {}
    before = await store.scan("s")
    await store.append("s/1/log", [b"x"])
    await store.delete("s/2")
    await store.put("s/3/meta", b"x")
    after = await backend.open().scan("s")
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == {
        "s/1/log",
        "s/2/meta",
        "s/3/meta",
    }
