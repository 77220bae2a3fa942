"""The suite, any order: whatever is done to a store, it answers as a few dicts would."""

import asyncio
from itertools import count
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carrel.errors import StorageWriteError
from carrel.storage.base import MISSING, Expected, Stamp, Store
from tests.support.stores import Backend, everything, everything_back

OBJECTS = ["o", "s/1/o", "s/1!/o", "s/10/deep/o", "s/2/o"]
LOGS = ["log", "s/1/log", "s/1!/log", "s/2/log"]
FOLDERS = ["s", "s/1", "s/1!", "s/2", "s/10", "none"]
data = st.binary(max_size=40)
record = st.binary(max_size=40).map(lambda text: text.replace(b"\n", b""))
objects, logs = st.sampled_from(OBJECTS), st.sampled_from(LOGS)
anything = st.sampled_from(OBJECTS + LOGS + FOLDERS)
expected = st.sampled_from(["any", "missing", "same", "old"])
step = st.one_of(
    st.tuples(st.just("put"), objects, data, expected),
    st.tuples(st.just("delete"), anything),
    st.tuples(st.just("copy"), objects, objects),
    st.tuples(st.just("copy_log"), logs, logs, st.integers(min_value=0, max_value=6), st.lists(record, max_size=2)),
    st.tuples(
        st.just("append"),
        logs,
        st.lists(record, max_size=4),
        st.booleans(),
        st.one_of(st.none(), st.integers(min_value=0, max_value=6)),
    ),
    st.tuples(st.just("reopen")),
)
numbers = count()


class Model:
    """The same methods on two dicts."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.logs: dict[str, list[bytes]] = {}

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(
            key for key in [*self.objects, *self.logs] if not prefix or key == prefix or key.startswith(prefix + "/")
        )

    def put(self, key: str, data: bytes, expect: str) -> bool:
        if (
            expect == "old"
            or (expect == "missing" and key in self.objects)
            or (expect == "same" and key not in self.objects)
        ):
            return False
        self.objects[key] = data
        return True

    def delete(self, key: str) -> bool:
        gone = self.keys(key)
        for name in gone:
            self.objects.pop(name, None)
            self.logs.pop(name, None)
        return bool(gone)

    def copy(self, source: str, target: str) -> str | None:
        if source not in self.objects:
            return "KeyError"
        self.objects[target] = self.objects[source]
        return None

    def copy_log(self, source: str, target: str, through: int, more: list[bytes]) -> int | str:
        if source not in self.logs or len(self.logs[source]) < through:
            return "KeyError"
        if target in self.logs:
            return "StorageWriteError"
        self.logs[target] = [*self.logs[source][:through], *more]
        return len(self.logs[target])

    def append(self, key: str, records: list[bytes], create: bool, after: int | None) -> int | str:
        if key not in self.logs and (after or not create):
            return "KeyError"
        if after not in (None, len(self.logs.get(key, []))):
            return 0
        self.logs.setdefault(key, []).extend(records)
        return len(self.logs[key])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(step, max_size=14))
def test_any_sequence_of_methods_gives_what_a_dict_would(backend: Backend, steps: list[tuple[Any, ...]]) -> None:
    # A root of its own for each example: what others left beside it must not be seen.
    asyncio.run(follow(backend, f"root{next(numbers)}", steps))


async def follow(backend: Backend, root: str, steps: list[tuple[Any, ...]]) -> None:
    store, model = backend.open(), Model()
    await store.put(f"{root}/first", b"")
    for method, *arguments in steps:
        if method == "reopen":
            await backend.done_with(store)
            store = backend.open()
        else:
            assert await call(store, root, method, arguments) == getattr(model, method)(*arguments)
    await compare(store, root, model)
    await backend.done_with(store)


async def call(store: Store, root: str, method: str, arguments: list[Any]) -> object:
    try:
        match method, arguments:
            case "put", [key, data, expect]:
                found = await store.stamp(f"{root}/{key}")
                old = Stamp(1, 1.0, 1)
                condition: dict[str, Expected] = {"any": None, "missing": MISSING, "same": found or old, "old": old}
                return await store.put(f"{root}/{key}", data, expect=condition[expect]) is not None
            case "copy", [source, target]:
                await store.copy(f"{root}/{source}", f"{root}/{target}")
                return None
            case "copy_log", [source, target, through, more]:
                return await store.copy_log(f"{root}/{source}", f"{root}/{target}", through=through, more=more)
            case "append", [key, records, create, after]:
                return await store.append(f"{root}/{key}", records, create=create, after=after)
        return await store.delete(f"{root}/{arguments[0]}")
    except KeyError:
        return "KeyError"
    except StorageWriteError:
        return "StorageWriteError"


async def compare(store: Store, root: str, model: Model) -> None:
    keys = [*model.keys(), "first"]
    assert await store.list(root) == sorted(f"{root}/{key}" for key in keys)
    assert await store.get_many([f"{root}/{key}" for key in OBJECTS]) == [model.objects.get(key) for key in OBJECTS]
    for key in LOGS:
        records = model.logs.get(key, [])
        assert await everything(store, f"{root}/{key}") == records
        assert await everything_back(store, f"{root}/{key}") == records
        assert await everything(store, f"{root}/{key}", 3) == records[2:]
        assert await everything_back(store, f"{root}/{key}", 3) == records[:2]
    for folder in FOLDERS:
        below = [key.removeprefix(folder + "/") for key in keys if key.startswith(folder + "/")]
        assert await store.folders(f"{root}/{folder}") == sorted({key.split("/")[0] for key in below if "/" in key})
    stamps = await store.stamps([f"{root}/{key}" for key in OBJECTS + LOGS])
    assert [stamp is not None for stamp in stamps] == [key in keys for key in OBJECTS + LOGS]
    scanned = await store.scan(root)
    assert scanned == {key: await store.stamp(key) for key in await store.list(root)}
