"""Copy tools, workflows, artifacts, requirements and sessions from one store to another, and compare two stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from carrel.errors import CarrelError, ConfigurationError, StorageUnavailable, StorageWriteError
from carrel.library.artifact_format import key_to_name, lock_key, record_key
from carrel.library.artifacts import ArtifactStore
from carrel.library.workflows.source import SKILL_FILE
from carrel.storage.base import Store, locked

Kind = Literal["tools", "workflows", "skills", "artifacts", "deps", "sessions"]
KINDS: tuple[Kind, ...] = ("tools", "workflows", "skills", "artifacts", "deps", "sessions")
State = Literal["new", "same", "changed", "longer", "shorter", "diverged", "missing"]
"""Of an item in the source, compared with the target. An item that was copied in part is `new`. A session is `longer`
if it continues after the target's end, and `diverged` if both continue differently; `missing` is only in the target."""
COPIED_STATES: tuple[State, ...] = ("new", "longer")
"""States that are copied without `overwrite`."""

_HISTORY = "library/workflows/history.jsonl"
_USAGE = "library/workflows/usage.json"
_BATCH_RECORDS = 500
_BATCH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class StoredItem:
    """What is copied as a whole: a file, an artifact with its record, a session."""

    kind: Kind
    name: str
    objects: tuple[str, ...] = ()
    """Keys in the order of copying: an object that refers to another comes after it."""
    logs: tuple[str, ...] = ()
    size: int = 0
    """Bytes of all objects and logs."""


@dataclass(frozen=True)
class Difference:
    """An item and its state."""

    kind: Kind
    name: str
    state: State


@dataclass(frozen=True)
class Failure:
    """An item that could not be copied."""

    kind: Kind
    name: str
    why: str


@dataclass
class CopyReport:
    """The result of `copy`."""

    copied: list[Difference] = field(default_factory=list)
    same: int = 0
    kept: list[Difference] = field(default_factory=list)
    """Items that are different in the target and were not overwritten."""
    failed: list[Failure] = field(default_factory=list)


def parse_kinds(names: Iterable[str] | None) -> tuple[Kind, ...]:
    """Return the kinds of these names, or all; ConfigurationError for an unknown one."""
    wanted = list(names or KINDS)
    unknown = [name for name in wanted if name not in KINDS]
    if unknown:
        raise ConfigurationError(f"there is no kind {unknown[0]!r}; use {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in wanted)


async def contents(store: Store, kinds: Sequence[Kind] = KINDS) -> list[StoredItem]:
    """Return the items of a store, by kind and name."""
    found: list[StoredItem] = []
    for kind in kinds:
        keys = await store.list("requirements.txt" if kind == "deps" else kind)
        keys = [key for key in keys if "__pycache__" not in key.split("/")]
        if kind == "sessions":
            found += _sessions(keys)
        elif kind == "artifacts":
            records = set(await store.list("library/artifacts"))
            found += [_artifact(key, records) for key in keys]
        else:
            found += [StoredItem(kind, key.removeprefix(f"{kind}/"), (key,)) for key in keys]
    keys = [key for item in found for key in (*item.objects, *item.logs)]
    sizes = iter([stamp.size if stamp is not None else 0 for stamp in await store.stamps(keys)])
    return [replace(item, size=sum(next(sizes) for _ in (*item.objects, *item.logs))) for item in found]


def _artifact(key: str, records: set[str]) -> StoredItem:
    name = key_to_name(key.removeprefix("artifacts/"))
    record = f"library/artifacts/{record_key(name)}"
    return StoredItem("artifacts", name, (key, record) if record in records else (key,))


def _sessions(keys: Sequence[str]) -> list[StoredItem]:
    found = []
    by_session: dict[str, list[str]] = {}
    for key in keys:
        by_session.setdefault(key.split("/")[1], []).append(key)
    for name, own in sorted(by_session.items()):
        logs = tuple(key for key in own if key.count("/") == 2 and key.endswith(".jsonl"))
        if f"sessions/{name}/messages.jsonl" in logs:
            # Deeper objects first: the log refers to them, and the others are made from it.
            objects = sorted((key for key in own if key not in logs), key=lambda key: (key.count("/") < 3, key))
            found.append(StoredItem("sessions", name, tuple(objects), logs))
    return found


async def differences(source: Store, target: Store, kinds: Sequence[Kind] = KINDS) -> list[Difference]:
    """Return the state of every item of both stores, by kind and name."""
    in_target = {(item.kind, item.name) for item in await contents(target, kinds)}
    in_source = await contents(source, kinds)
    found = [Difference(item.kind, item.name, await _state(source, target, item)) for item in in_source]
    known = {(item.kind, item.name) for item in in_source}
    found += [Difference(kind, name, "missing") for kind, name in in_target - known]
    return sorted(found, key=_by_name)


async def copy(source: Store, target: Store, kinds: Sequence[Kind] = KINDS, *, overwrite: bool = False) -> CopyReport:
    """Copy the items of the source to the target; nothing is deleted there.

    An item that is different in the target is kept, or replaced with `overwrite`. A session is never overwritten: one
    that is longer in the source is continued in the target, and one that has diverged is kept. An item that cannot be
    copied is reported, and the others are copied. A copy that was interrupted can be repeated."""
    report = CopyReport()
    if "workflows" in kinds:
        # Before the files: a session that finds a file first would start another history.
        with _report_failure(report, "workflows", "history"):
            await _continue_log(source, target, _HISTORY)
    for item in sorted(await contents(source, kinds), key=_copy_order):
        with _report_failure(report, item.kind, item.name):
            await _copy_item(source, target, item, report, overwrite=overwrite)
    report.copied.sort(key=_by_name)
    report.kept.sort(key=_by_name)
    return report


async def copy_library(source: Store, target: Store) -> None:
    """Copy everything but the sessions, for the fork of a session on another store."""
    report = await copy(source, target, [kind for kind in KINDS if kind != "sessions"], overwrite=True)
    for failure in report.failed:
        raise StorageWriteError(f"{failure.kind} {failure.name} could not be copied: {failure.why}")
    counts = await source.get(_USAGE)
    if counts is not None:
        await target.put(_USAGE, counts)


@contextmanager
def _report_failure(report: CopyReport, kind: Kind, name: str) -> Iterator[None]:
    try:
        yield
    except StorageUnavailable:
        raise
    except CarrelError as error:
        report.failed.append(Failure(kind, name, str(error)))


def _by_name(one: StoredItem | Difference) -> tuple[int, str]:
    return KINDS.index(one.kind), one.name


def _copy_order(item: StoredItem) -> tuple[int, bool, str]:
    """Tool definitions come after the files that they may name, and a SKILL.md after the rest of its folder."""
    last = (".yaml", ".yml") if item.kind == "tools" else SKILL_FILE
    return KINDS.index(item.kind), item.name.endswith(last), item.name


async def _copy_item(source: Store, target: Store, item: StoredItem, report: CopyReport, *, overwrite: bool) -> None:
    wanted = (*COPIED_STATES, "changed") if overwrite else COPIED_STATES
    state = await _state(source, target, item)
    if state in wanted:
        async with locked(target, _lock_key(item)):
            # Compared again, because it may have been written before the lock was acquired.
            state = await _state(source, target, item)
            if state in wanted and await _copy_data(source, target, item):
                report.copied.append(Difference(item.kind, item.name, state))
                return
            state = "diverged" if state in wanted else state
    if state == "same":
        report.same += 1
    else:
        report.kept.append(Difference(item.kind, item.name, state))


def _lock_key(item: StoredItem) -> str:
    """Return the key of the lock under which others write an item."""
    match item.kind:
        case "artifacts":
            return f"library/artifacts/{lock_key(item.name)}"
        case "workflows" | "skills":
            return "library/workflows"
        case "sessions":
            return f"sessions/{item.name}/life"
        case _:
            return item.objects[0]


# --- comparing --------------------------------------------------------------------------------------------------------


async def _state(source: Store, target: Store, item: StoredItem) -> State:
    if item.logs:
        return await _session_state(source, target, item)
    if item.kind == "artifacts":
        return await _artifact_state(source, target, item)
    (key,) = item.objects
    if await target.stamp(key) is None:
        return "new"
    return "same" if await _is_equal(source, target, key) else "changed"


async def _artifact_state(source: Store, target: Store, item: StoredItem) -> State:
    """Compare the data and what describes them; what describes earlier data is ignored."""
    if await target.stamp(item.objects[0]) is None:
        return "new"
    if not await _is_equal(source, target, item.objects[0]):
        return "changed"
    ours, theirs = [await ArtifactStore(store).record(item.name) for store in (source, target)]
    if ours is None or (theirs is not None and all(theirs.get(name) == value for name, value in ours.items())):
        return "same"
    return "changed" if theirs is not None else "new"


async def _session_state(source: Store, target: Store, item: StoredItem) -> State:
    """Compare the conversations; if they are the same, the objects and the other logs."""
    (main,) = (key for key in item.logs if key.endswith("/messages.jsonl"))
    if await target.stamp(main) is None:
        return "new"
    theirs = _records(target, main)
    async for record in _records(source, main):
        other = await anext(theirs, None)
        if other is None:
            return "longer"
        if other != record:
            return "diverged"
    if await anext(theirs, None) is not None:
        return "shorter"
    if None in await target.stamps(item.objects):
        return "longer"
    source_stamps, target_stamps = await source.stamps(item.logs), await target.stamps(item.logs)
    for key, ours, its in zip(item.logs, source_stamps, target_stamps, strict=True):
        if ours is not None and (its is None or its.size < ours.size) and await _is_continuation(source, target, key):
            return "longer"
    return "same"


async def _is_continuation(source: Store, target: Store, key: str) -> bool:
    """Whether the source's log begins with all of the target's and has more."""
    ours = _records(source, key)
    async for record in _records(target, key):
        if await anext(ours, None) != record:
            return False
    return await anext(ours, None) is not None


async def _records(store: Store, key: str) -> AsyncIterator[bytes]:
    async for block in store.read(key):
        for record in block.records:
            yield record


async def _is_equal(source: Store, target: Store, key: str) -> bool:
    ours, theirs = await source.stamp(key), await target.stamp(key)
    if ours is None or theirs is None or ours.size != theirs.size:
        return ours is None and theirs is None
    others, buffer = target.pieces(key), b""
    async for piece in source.pieces(key):
        while len(buffer) < len(piece) and (more := await anext(others, b"")):
            buffer += more
        if not buffer.startswith(piece):
            return False
        buffer = buffer[len(piece) :]
    return not buffer


# --- copying ----------------------------------------------------------------------------------------------------------


async def _copy_data(source: Store, target: Store, item: StoredItem) -> bool:
    """Return False if a session has been continued in the target meanwhile, and was not copied."""
    if item.kind == "artifacts":
        await ArtifactStore(target).copy_from(item.name, ArtifactStore(source))
        return True
    if not item.logs:
        await target.put_pieces(item.objects[0], source.pieces(item.objects[0]))
        return True
    referenced = [key for key in item.objects if key.count("/") > 2]
    ours, theirs = await source.stamps(referenced), await target.stamps(referenced)
    for key, one, other in zip(referenced, ours, theirs, strict=True):
        # They are written once, under names that are unique to their content or their owner.
        if one is None or other is None or one.size != other.size:
            await target.put_pieces(key, source.pieces(key))
    # created.jsonl first: without it, a reader would not know the session's title.
    for key in sorted(item.logs, key=lambda key: not key.endswith("/created.jsonl")):
        is_main = key.endswith("/messages.jsonl")
        if not await _continue_log(source, target, key) and is_main:
            return False
        if is_main:
            await target.append(key, [])  # makes the log of a session without messages
    for key in item.objects:
        if key not in referenced:
            await target.put_pieces(key, source.pieces(key))
    return True


async def _continue_log(source: Store, target: Store, key: str) -> bool:
    """Append the records that the target does not have; False, without appending more, if the logs have diverged."""
    while True:
        ours, count = _records(source, key), 0
        async for record in _records(target, key):
            if await anext(ours, None) != record:
                return False
            count += 1
        if await _append(target, key, ours, count):
            return True


async def _append(target: Store, key: str, records: AsyncIterator[bytes], count: int) -> bool:
    """Append records after the first `count`; False if another program has appended meanwhile."""
    batch: list[bytes] = []
    size = 0
    async for record in records:
        batch.append(record)
        size += len(record)
        if len(batch) == _BATCH_RECORDS or size > _BATCH_BYTES:
            if not await target.append(key, batch, after=count):
                return False
            count += len(batch)
            batch, size = [], 0
    return not batch or bool(await target.append(key, batch, after=count))
