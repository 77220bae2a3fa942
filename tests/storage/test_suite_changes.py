"""The suite, changes: what every kind of store tells about what was written and deleted."""

import asyncio

from tests.storage.suite import Place


async def test_the_first_call_knows_nothing_and_the_next_one_exactly_what_changed(place: Place) -> None:
    store = place.open()
    await store.put("s/1/meta", b"x")
    first = await store.changed("s")
    assert first.keys is None
    assert (await store.changed("s", first.cursor)).keys == set()
    await store.put("s/2/meta", b"x")
    await store.append("s/1/log", [b"1"])
    await store.put("elsewhere/meta", b"x")
    await store.put("sx", b"x")
    second = await store.changed("s", first.cursor)
    assert second.keys == {"s/2/meta", "s/1/log"}
    assert (await store.changed("s", second.cursor)).keys == set()
    assert (await store.changed("s", first.cursor)).keys == {"s/2/meta", "s/1/log"}


async def test_each_further_write_is_a_change(place: Place) -> None:
    store = place.open()
    await store.put("s/o", b"1")
    await store.append("s/log", [b"1"])
    cursor = (await store.changed("s")).cursor
    for turn in range(5):
        await store.put("s/o", b"1")
        changes = await store.changed("s", cursor)
        assert changes.keys == {"s/o"}, turn
        await store.append("s/log", [b"1"])
        changes = await store.changed("s", changes.cursor)
        assert changes.keys == {"s/log"}, turn
        cursor = changes.cursor


async def test_what_was_deleted_is_a_change_also_with_its_folder(place: Place) -> None:
    store = place.open()
    for key in ("s/1/meta", "s/1/deep/er", "s/2/meta"):
        await store.put(key, b"x")
    await store.append("s/1/log", [b"1"])
    cursor = (await store.changed("s")).cursor
    await store.delete("s/1")
    await store.put("s/3/meta", b"x")
    assert (await store.changed("s", cursor)).keys == {"s/1/meta", "s/1/deep/er", "s/1/log", "s/3/meta"}


async def test_a_copy_is_a_change_of_its_target(place: Place) -> None:
    store = place.open()
    await store.put("s/a", b"x")
    cursor = (await store.changed("s")).cursor
    await store.copy("s/a", "s/b")
    assert (await store.changed("s", cursor)).keys == {"s/b"}


async def test_what_changed_in_an_empty_store_is_known_too(place: Place) -> None:
    store = place.open()
    cursor = (await store.changed("")).cursor
    await store.put("a/b", b"x")
    await store.append("c/log", [b"x"])
    assert (await store.changed("", cursor)).keys in ({"a/b", "c/log"}, None)


async def test_another_store_on_the_same_place_is_heard_too(place: Place) -> None:
    store, other = place.open(), place.open()
    await store.put("s/1/meta", b"x")
    cursor = (await store.changed("s")).cursor
    await other.put("s/2/meta", b"x")
    await other.delete("s/1")
    assert (await store.changed("s", cursor)).keys == {"s/1/meta", "s/2/meta"}


async def test_reading_and_locking_change_nothing(place: Place) -> None:
    store = place.open()
    await store.put("s/o", b"x")
    await store.append("s/log", [b"x"])
    cursor = (await store.changed("s")).cursor
    await store.get("s/o")
    [block async for block in store.read("s/log")]
    [block async for block in store.read_back("s/log")]
    await store.torn("s/log")
    await store.stamps(await store.list("s"))
    await store.delete("s/none")
    await store.put("s/o", b"y", only_new=True)
    await store.put("s/none", b"y", only_existing=True)
    lock = await store.lock("s")
    assert lock
    await lock.release()
    assert (await store.changed("s", cursor)).keys == set()


async def test_of_many_writes_at_once_none_is_missed(place: Place) -> None:
    store, other = place.open(), place.open()
    await store.put("s/first", b"x")
    cursor = (await store.changed("s")).cursor
    heard: set[str] = set()
    written = {f"s/{number}/o" for number in range(100)}
    writing = asyncio.gather(*[other.put(key, b"x") for key in written])
    while True:
        ended = writing.done()
        changes = await store.changed("s", cursor)
        heard |= changes.keys if changes.keys is not None else set(await store.list("s")) - {"s/first"}
        cursor = changes.cursor
        if ended:
            break
        await asyncio.sleep(0)
    assert heard == written
