"""Between two stores: what each holds, where they differ, and copying from one to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from carrel.errors import ConfigurationError, StorageError, StorageUnavailable
from carrel.library.artifact_names import name_of, note_of
from carrel.storage.seam import Store

Kind = Literal["tools", "workflows", "skills", "artifacts", "deps", "sessions"]
KINDS: tuple[Kind, ...] = ("tools", "workflows", "skills", "artifacts", "deps", "sessions")
State = Literal["new", "same", "changed", "longer", "shorter", "apart", "missing"]
"""Of the source, as the target sees it. What is there in part, as one leaves it who is stopped half way, is `new`. A
session is `longer` when it goes on where the target's ends, and `apart` when both went on; what is `missing` is in the
target alone."""
MOVED: tuple[State, ...] = ("new", "longer")
"""What is copied without being told to overwrite."""

_HISTORY = "library/workflows/history.jsonl"
_RECORDS = 500
_BATCH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Thing:
    """What a person calls one thing: a file, an artifact with what is noted of it, a whole session."""

    kind: Kind
    name: str
    objects: tuple[str, ...] = ()
    """Keys, in the order in which they are copied: what refers to another comes after it."""
    logs: tuple[str, ...] = ()
    size: int = 0
    """Bytes, all together."""


@dataclass(frozen=True)
class Difference:
    """One thing, and how it stands between the two."""

    kind: Kind
    name: str
    state: State


@dataclass(frozen=True)
class Failure:
    """One thing that the target did not take, or that could not be read."""

    kind: Kind
    name: str
    why: str


@dataclass
class Moved:
    """What came of copying."""

    copied: list[Difference] = field(default_factory=list)
    same: int = 0
    kept: list[Difference] = field(default_factory=list)
    """What differs in the target and was left as it is there."""
    failed: list[Failure] = field(default_factory=list)


def kinds_named(names: Iterable[str] | None) -> tuple[Kind, ...]:
    """All, or those named; ConfigurationError names one that is unknown."""
    wanted = list(names or KINDS)
    unknown = [name for name in wanted if name not in KINDS]
    if unknown:
        raise ConfigurationError(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in wanted)


async def contents(store: Store, kinds: Sequence[Kind] = KINDS) -> list[Thing]:
    """What is there, by kind and name."""
    found: list[Thing] = []
    for kind in kinds:
        keys = _plain(await store.list("requirements.txt" if kind == "deps" else kind))
        if kind == "sessions":
            found += _sessions(keys)
        elif kind == "artifacts":
            notes = set(await store.list("library/artifacts"))
            found += [_artifact(key, notes) for key in keys]
        else:
            found += [Thing(kind, key.removeprefix(f"{kind}/"), (key,)) for key in keys]
    keys = [key for thing in found for key in (*thing.objects, *thing.logs)]
    sizes = iter([stamp.size if stamp is not None else 0 for stamp in await store.stamps(keys)])
    return [replace(thing, size=sum(next(sizes) for _ in (*thing.objects, *thing.logs))) for thing in found]


def _plain(keys: Iterable[str]) -> list[str]:
    """Without what Python leaves beside the files that it has read."""
    return [key for key in keys if "__pycache__" not in key.split("/")]


def _artifact(key: str, notes: set[str]) -> Thing:
    name = name_of(key.removeprefix("artifacts/"))
    note = f"library/artifacts/{note_of(name)}"
    return Thing("artifacts", name, (key, note) if note in notes else (key,))


def _sessions(keys: Sequence[str]) -> list[Thing]:
    """What a log refers to comes before it, and what is made from it after it."""
    found = []
    named: dict[str, list[str]] = {}
    for key in keys:
        named.setdefault(key.split("/")[1], []).append(key)
    for name, own in sorted(named.items()):
        logs = tuple(key for key in own if key.count("/") == 2 and key.endswith(".jsonl"))
        if f"sessions/{name}/messages.jsonl" in logs:
            objects = sorted((key for key in own if key not in logs), key=lambda key: (key.count("/") < 3, key))
            found.append(Thing("sessions", name, tuple(objects), logs))
    return found


async def differences(source: Store, target: Store, kinds: Sequence[Kind] = KINDS) -> list[Difference]:
    """Every thing that either holds, by kind and name."""
    there = {(thing.kind, thing.name): thing for thing in await contents(target, kinds)}
    here = await contents(source, kinds)
    found = [Difference(thing.kind, thing.name, await _state(source, target, thing)) for thing in here]
    known = {(thing.kind, thing.name) for thing in here}
    found += [Difference(kind, name, "missing") for kind, name in there if (kind, name) not in known]
    return sorted(found, key=lambda one: (KINDS.index(one.kind), one.name))


async def copy(source: Store, target: Store, kinds: Sequence[Kind] = KINDS, *, overwrite: bool = False) -> Moved:
    """Bring the source's things to the target; nothing is deleted there.

    A thing that the target has otherwise stays as it is, or with `overwrite` becomes the source's. Sessions are never
    overwritten: one that goes on here is continued there, and one that went on in both is left alone. One thing that
    cannot be copied is told, and costs no other. Whoever is stopped half way begins again, and it goes on there."""
    moved = Moved()
    for thing in await contents(source, kinds):
        try:
            await _moved(source, target, thing, moved, overwrite=overwrite)
        except StorageUnavailable:
            raise
        except StorageError as problem:
            moved.failed.append(Failure(thing.kind, thing.name, str(problem)))
    if "workflows" in kinds:
        await _continue_log(source, target, _HISTORY)
    return moved


async def _moved(source: Store, target: Store, thing: Thing, moved: Moved, *, overwrite: bool) -> None:
    state = await _state(source, target, thing)
    if state == "same":
        moved.same += 1
    elif state in MOVED or (overwrite and state == "changed"):
        if await _bring(source, target, thing):
            moved.copied.append(Difference(thing.kind, thing.name, state))
        else:
            moved.kept.append(Difference(thing.kind, thing.name, "apart"))
    else:
        moved.kept.append(Difference(thing.kind, thing.name, state))


async def carry_over(source: Store, target: Store) -> None:
    """What a session's library keeps, for its fork on another store; what was said and done there stays."""
    keys = [key for key in await source.list() if not key.startswith("sessions/")]
    for key, data in zip(keys, await source.get_many(keys), strict=True):
        if data is not None:
            await target.put(key, data)


async def _state(source: Store, target: Store, thing: Thing) -> State:
    if thing.logs:
        return await _state_of_logs(source, target, thing)
    there = await target.stamps(thing.objects)
    if there[0] is None:
        return "new"
    for key, stamp in zip(thing.objects, there, strict=True):
        if stamp is not None and not await _equal(source, target, key):
            return "changed"
    return "new" if None in there else "same"


async def _state_of_logs(source: Store, target: Store, thing: Thing) -> State:
    """The conversation decides, and where it is the same what is missing beside it; a trace is continued or left."""
    (main,) = (key for key in thing.logs if key.endswith("/messages.jsonl"))
    if await target.stamp(main) is None:
        return "new"
    theirs = _records(target, main)
    async for record in _records(source, main):
        other = await anext(theirs, None)
        if other is None:
            return "longer"
        if other != record:
            return "apart"
    if await anext(theirs, None) is not None:
        return "shorter"
    if None in await target.stamps(thing.objects):
        return "longer"
    here, there = await source.stamps(thing.logs), await target.stamps(thing.logs)
    for key, ours, its in zip(thing.logs, here, there, strict=True):
        if ours is not None and (its is None or its.size < ours.size) and await _goes_on(source, target, key):
            return "longer"
    return "same"


async def _goes_on(source: Store, target: Store, key: str) -> bool:
    """Whether the source's log goes on where the target's ends."""
    ours = _records(source, key)
    async for record in _records(target, key):
        if await anext(ours, None) != record:
            return False
    return await anext(ours, None) is not None


async def _records(store: Store, key: str) -> AsyncIterator[bytes]:
    async for block in store.read(key):
        for record in block.records:
            yield record


async def _equal(source: Store, target: Store, key: str) -> bool:
    ours, theirs = await source.stamp(key), await target.stamp(key)
    if ours is None or theirs is None or ours.size != theirs.size:
        return ours is None and theirs is None
    others, held = target.pieces(key), b""
    async for piece in source.pieces(key):
        while len(held) < len(piece) and (more := await anext(others, b"")):
            held += more
        if not held.startswith(piece):
            return False
        held = held[len(piece) :]
    return not held


async def _bring(source: Store, target: Store, thing: Thing) -> bool:
    """False when a session went on in the target meanwhile, and was left."""
    if not thing.logs:
        for key in thing.objects:
            await target.put_pieces(key, source.pieces(key))
        return True
    referred = [key for key in thing.objects if key.count("/") > 2]
    ours, theirs = await source.stamps(referred), await target.stamps(referred)
    for key, one, other in zip(referred, ours, theirs, strict=True):
        # They are written once, and named by what they hold or whose they are.
        if one is None or other is None or one.size != other.size:
            await target.put_pieces(key, source.pieces(key))
    main, *others = sorted(thing.logs, key=lambda key: not key.endswith("/messages.jsonl"))
    if not await _continue_log(source, target, main):
        return False
    await target.append(main, [])  # one in which nothing was said is there as well
    for key in others:
        await _continue_log(source, target, key)
    for key in thing.objects:
        if key not in referred:
            await target.put_pieces(key, source.pieces(key))
    return True


async def _continue_log(source: Store, target: Store, key: str) -> bool:
    """Append what the target has not; False when it went on in both, and nothing more is appended then."""
    while True:
        ours, count = _records(source, key), 0
        async for record in _records(target, key):
            if await anext(ours, None) != record:
                return False
            count += 1
        if await _appended(target, key, ours, count):
            return True


async def _appended(target: Store, key: str, records: AsyncIterator[bytes], count: int) -> bool:
    """Put them after the `count` that are there; False when somebody else did so meanwhile."""
    batch: list[bytes] = []
    weight = 0
    async for record in records:
        batch.append(record)
        weight += len(record)
        if len(batch) == _RECORDS or weight > _BATCH_BYTES:
            if not await target.append(key, batch, after=count):
                return False
            count += len(batch)
            batch, weight = [], 0
    return not batch or bool(await target.append(key, batch, after=count))
