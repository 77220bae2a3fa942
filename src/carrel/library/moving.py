"""Between two stores: what each holds, where they differ, and copying from one to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from carrel.errors import CarrelError, ConfigurationError, StorageUnavailable, StorageWriteError
from carrel.library.artifact_names import lock_of, name_of, note_of
from carrel.library.artifacts import ArtifactStore
from carrel.library.skill_folders import FILE
from carrel.storage.base import Store

Kind = Literal["tools", "workflows", "skills", "artifacts", "deps", "sessions"]
KINDS: tuple[Kind, ...] = ("tools", "workflows", "skills", "artifacts", "deps", "sessions")
State = Literal["new", "same", "changed", "longer", "shorter", "apart", "missing"]
"""Of the source, as the target sees it. What is there in part, as one leaves it who is stopped half way, is `new`. A
session is `longer` when it goes on where the target's ends, and `apart` when both went on; what is `missing` is in the
target alone."""
MOVED: tuple[State, ...] = ("new", "longer")
"""What is copied without being told to overwrite."""

_HISTORY = "library/workflows/history.jsonl"
_USAGE = "library/workflows/usage.json"
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
    return sorted(found, key=_by_name)


async def copy(source: Store, target: Store, kinds: Sequence[Kind] = KINDS, *, overwrite: bool = False) -> Moved:
    """Bring the source's things to the target; nothing is deleted there.

    A thing that the target has otherwise stays as it is, or with `overwrite` becomes the source's. Sessions are never
    overwritten: one that goes on here is continued there, and one that went on in both is left alone. One thing that
    cannot be copied is told, and costs no other. Whoever is stopped half way begins again, and it goes on there."""
    moved = Moved()
    if "workflows" in kinds:
        # Before the files: whoever found them without it would note them as new, and then it is another history.
        with _telling(moved, "workflows", "history"):
            await _continue_log(source, target, _HISTORY)
    for thing in sorted(await contents(source, kinds), key=_refers):
        with _telling(moved, thing.kind, thing.name):
            await _moved(source, target, thing, moved, overwrite=overwrite)
    for differing in (moved.copied, moved.kept):
        differing.sort(key=_by_name)
    return moved


@contextmanager
def _telling(moved: Moved, kind: Kind, name: str) -> Iterator[None]:
    try:
        yield
    except StorageUnavailable:
        raise
    except CarrelError as problem:
        moved.failed.append(Failure(kind, name, str(problem)))


def _by_name(one: Thing | Difference) -> tuple[int, str]:
    return KINDS.index(one.kind), one.name


def _refers(thing: Thing) -> tuple[int, bool, str]:
    """The definition of a tool comes after what it may name, and a SKILL.md after what lies beside it."""
    last = (".yaml", ".yml") if thing.kind == "tools" else FILE
    return KINDS.index(thing.kind), thing.name.endswith(last), thing.name


async def _moved(source: Store, target: Store, thing: Thing, moved: Moved, *, overwrite: bool) -> None:
    wanted = (*MOVED, "changed") if overwrite else MOVED
    state = await _state(source, target, thing)
    if state in wanted:
        async with _alone(target, thing):
            # Looked at again: somebody may have written it meanwhile.
            state = await _state(source, target, thing)
            if state in wanted and await _bring(source, target, thing):
                moved.copied.append(Difference(thing.kind, thing.name, state))
                return
            state = "apart" if state in wanted else state
    if state == "same":
        moved.same += 1
    else:
        moved.kept.append(Difference(thing.kind, thing.name, state))


@asynccontextmanager
async def _alone(target: Store, thing: Thing) -> AsyncIterator[None]:
    """The lock under which others write it."""
    match thing.kind:
        case "artifacts":
            key = f"library/artifacts/{lock_of(thing.name)}"
        case "workflows" | "skills":
            key = "library/workflows"
        case "sessions":
            key = f"sessions/{thing.name}/life"
        case _:
            key = thing.objects[0]
    lock = await target.lock(key)
    assert lock is not None
    try:
        yield
    finally:
        await lock.release()


async def carry_over(source: Store, target: Store) -> None:
    """What a session's library keeps, for its fork on another store; what was said and done there stays."""
    moved = await copy(source, target, [kind for kind in KINDS if kind != "sessions"], overwrite=True)
    for failure in moved.failed:
        raise StorageWriteError(f"{failure.kind} {failure.name} could not be copied: {failure.why}")
    counts = await source.get(_USAGE)
    if counts is not None:
        await target.put(_USAGE, counts)


async def _state(source: Store, target: Store, thing: Thing) -> State:
    if thing.logs:
        return await _state_of_logs(source, target, thing)
    if thing.kind == "artifacts":
        return await _state_of_artifact(source, target, thing)
    (key,) = thing.objects
    if await target.stamp(key) is None:
        return "new"
    return "same" if await _equal(source, target, key) else "changed"


async def _state_of_artifact(source: Store, target: Store, thing: Thing) -> State:
    """What is noted of it counts as far as it says something of the data; what is noted of earlier ones does not."""
    if await target.stamp(thing.objects[0]) is None:
        return "new"
    if not await _equal(source, target, thing.objects[0]):
        return "changed"
    ours, theirs = [await ArtifactStore(store).noted(thing.name) for store in (source, target)]
    if ours is None or (theirs is not None and all(theirs.get(name) == said for name, said in ours.items())):
        return "same"
    return "changed" if theirs is not None else "new"


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
    if thing.kind == "artifacts":
        await ArtifactStore(target).take(thing.name, ArtifactStore(source))
        return True
    if not thing.logs:
        await target.put_pieces(thing.objects[0], source.pieces(thing.objects[0]))
        return True
    referred = [key for key in thing.objects if key.count("/") > 2]
    ours, theirs = await source.stamps(referred), await target.stamps(referred)
    for key, one, other in zip(referred, ours, theirs, strict=True):
        # They are written once, and named by what they hold or whose they are.
        if one is None or other is None or one.size != other.size:
            await target.put_pieces(key, source.pieces(key))
    # What was given when it was made comes first: without it, who looks meanwhile would not know its title.
    for key in sorted(thing.logs, key=lambda key: not key.endswith("/created.jsonl")):
        is_main = key.endswith("/messages.jsonl")
        if not await _continue_log(source, target, key) and is_main:
            return False
        if is_main:
            await target.append(key, [])  # one in which nothing was said is there as well
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
