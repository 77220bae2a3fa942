"""Between two stores: what each holds, where they differ, and copying from one to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from carrel.errors import ConfigurationError
from carrel.library.artifact_names import name_of, note_of
from carrel.storage.seam import Store

Kind = Literal["tools", "workflows", "skills", "artifacts", "deps", "sessions"]
KINDS: tuple[Kind, ...] = ("tools", "workflows", "skills", "artifacts", "deps", "sessions")
State = Literal["new", "same", "changed", "longer", "shorter", "apart", "missing"]
"""Of the source, as the target sees it. A session is `longer` when it goes on where the target's ends, and `apart` when
both went on; what is `missing` is in the target alone."""
MOVED: tuple[State, ...] = ("new", "longer")
"""What is copied without being told to overwrite."""

_HISTORY = "library/workflows/history.jsonl"
_RECORDS = 500


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


@dataclass
class Moved:
    """What came of copying."""

    copied: list[Difference] = field(default_factory=list)
    same: int = 0
    kept: list[Difference] = field(default_factory=list)
    """What differs in the target and was left as it is there."""


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
    return [await _weighed(store, thing) for thing in found]


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
    for name in sorted({key.split("/")[1] for key in keys}):
        own = [key for key in keys if key.startswith(f"sessions/{name}/")]
        logs = tuple(key for key in own if key.count("/") == 2 and key.endswith(".jsonl"))
        if f"sessions/{name}/messages.jsonl" in logs:
            objects = sorted((key for key in own if key not in logs), key=lambda key: (key.count("/") < 3, key))
            found.append(Thing("sessions", name, tuple(objects), logs))
    return found


async def _weighed(store: Store, thing: Thing) -> Thing:
    stamps = await store.stamps([*thing.objects, *thing.logs])
    size = sum(stamp.size for stamp in stamps if stamp is not None)
    return Thing(thing.kind, thing.name, thing.objects, thing.logs, size)


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
    overwritten: one that goes on here is continued there, and one that went on in both is left alone."""
    moved = Moved()
    for thing in await contents(source, kinds):
        state = await _state(source, target, thing)
        if state == "same":
            moved.same += 1
        elif state in MOVED or (overwrite and state == "changed"):
            await _bring(source, target, thing)
            moved.copied.append(Difference(thing.kind, thing.name, state))
        else:
            moved.kept.append(Difference(thing.kind, thing.name, state))
    if "workflows" in kinds and await target.stamp(_HISTORY) is None:
        await _continue_log(source, target, _HISTORY)
    return moved


async def carry_over(source: Store, target: Store) -> None:
    """What a session's library keeps, for its fork on another store; what was said and done there stays."""
    keys = [key for key in await source.list() if not key.startswith("sessions/")]
    for key, data in zip(keys, await source.get_many(keys), strict=True):
        if data is not None:
            await target.put(key, data)


async def _state(source: Store, target: Store, thing: Thing) -> State:
    if thing.logs:
        return await _state_of_logs(source, target, thing)
    if await target.stamp(thing.objects[0]) is None:
        return "new"
    for key in thing.objects:
        if not await _equal(source, target, key):
            return "changed"
    return "same"


async def _state_of_logs(source: Store, target: Store, thing: Thing) -> State:
    """The conversation decides; a trace beside it is continued or left."""
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
    return "same" if await anext(theirs, None) is None else "shorter"


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


async def _bring(source: Store, target: Store, thing: Thing) -> None:
    referred = [key for key in thing.objects if not thing.logs or key.count("/") > 2]
    for key in referred:
        await target.put_pieces(key, source.pieces(key))
    for key in thing.logs:
        await _continue_log(source, target, key)
    for key in thing.objects:
        if key not in referred:
            await target.put_pieces(key, source.pieces(key))


async def _continue_log(source: Store, target: Store, key: str) -> None:
    """Append what the target has not; a log that went on in both is left as it is."""
    ours = _records(source, key)
    async for record in _records(target, key):
        if await anext(ours, None) != record:
            return
    batch: list[bytes] = []
    async for record in ours:
        batch.append(record)
        if len(batch) == _RECORDS:
            await target.append(key, batch)
            batch = []
    if batch:
        await target.append(key, batch)
