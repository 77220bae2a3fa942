"""What takes several steps is whole for everybody: cut off at any step, looked at in between, done by two at once."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from carrel import SessionStore, user_text_message
from carrel.errors import CarrelError, StorageUnavailable
from carrel.library.artifacts import ArtifactStore
from carrel.library.dependencies import Dependencies
from carrel.library.search import LibrarySearch
from carrel.library.store_sync import copy
from carrel.library.workflows import WorkflowLibrary
from carrel.storage.base import Store
from carrel.storage.files.store import FileStore
from carrel.storage.memory import MemoryStore
from tests.support.step_store import Another, Stepping, cut, until_it_waits
from tests.support.stores import Place

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SKILL = b"---\nname: x\ndescription: How to x\n---\nDo it.\n"


class Installed:
    """A Python that has what it is told to have."""

    def __init__(self, *names: str) -> None:
        self.there = dict.fromkeys(names, "1")

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        self.there |= dict.fromkeys(requirements, "1")
        return dict.fromkeys(requirements, "1")

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.there.pop(name, None)]

    async def installed(self) -> dict[str, str]:
        return self.there


class User:
    """One process with the library of a store."""

    def __init__(self, store: Any) -> None:
        self.store: Store = store
        self.artifacts = ArtifactStore(store, index=LibrarySearch(None, "a", None), now=lambda: NOW)
        self.workflows = WorkflowLibrary(store, index=LibrarySearch(None, "w", None), now=lambda: NOW)
        self.deps = Dependencies(store, Installed())


Do = Callable[[User], Awaitable[Any]]


async def nothing(user: User) -> None:
    """To begin with, nothing is there."""


# --- what is seen of it -----------------------------------------------------------------------------------------------


def without_times(found: Any) -> Any:
    if isinstance(found, list):
        return [without_times(one) for one in found]
    if isinstance(found, dict):
        return {name: without_times(one) for name, one in found.items() if name not in ("created_at", "updated_at")}
    return found


async def load(user: User) -> Any:
    try:
        value = await user.artifacts.load("x")
    except KeyError:
        return None
    return type(value).__name__, value


async def fetch(user: User) -> Any:
    try:
        return await user.artifacts.handle("artifacts.fetch", ["x"], {})
    except KeyError:
        return None


async def get(user: User) -> Any:
    return without_times(await user.artifacts.get("x"))


async def listed(user: User) -> Any:
    return without_times(await user.artifacts.list())


async def searched(user: User) -> Any:
    return without_times(await user.artifacts.search("x"))


ARTIFACTS: dict[str, Do] = {"load": load, "fetch": fetch, "get": get, "list": listed, "search": searched}


async def workflow(user: User) -> Any:
    return await user.workflows.get("x")


async def workflows(user: User) -> Any:
    return await user.workflows.list()


async def workflow_found(user: User) -> Any:
    return await user.workflows.search("x")


async def newest(user: User) -> Any:
    """The history says what is there now."""
    try:
        versions = await user.workflows.history("x")
    except KeyError:
        return None
    return versions[-1]["source"] if versions and versions[-1]["change"] != "removed" else None


async def called(user: User) -> Any:
    try:
        return (await user.workflows.begin("x"))["source"]
    except CarrelError as problem:
        return type(problem).__name__


WORKFLOWS: dict[str, Do] = {"get": workflow, "list": workflows, "search": workflow_found, "history": newest}


async def count_call(user: User) -> None:
    await user.workflows.begin("x")
    user.workflows.ended("x", 1.0, "no")
    await user.workflows.close()


async def requirements(user: User) -> Any:
    return await user.deps.list()


DEPS: dict[str, Do] = {"list": requirements}


async def talked(user: User) -> Any:
    sessions = SessionStore(store=user.store, prefix="sessions")
    found = await sessions.load_session("s")
    await sessions.close()
    return (found["session"]["title"], len(found["messages"])) if found is not None else None


async def titles(user: User) -> Any:
    sessions = SessionStore(store=user.store, prefix="sessions")
    found = [meta["title"] for meta in await sessions.list_sessions()]
    await sessions.close()
    return found


SESSIONS: dict[str, Do] = {"load": talked, "list": titles}


# --- what is done -----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    given: Do
    do: Do
    looks: dict[str, Do]
    then: Do | None = None
    """What somebody does after it; the same again where nothing is said."""


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def save(data: Any, description: str, **more: Any) -> Do:
    return lambda user: user.artifacts.save("x", data, description, **more)


def put(key: str, data: bytes) -> Do:
    return lambda user: user.store.put(key, data)


def after(*steps: Do) -> Do:
    async def do(user: User) -> None:
        for step in steps:
            await step(user)

    return do


def add(source: str, description: str = "") -> Do:
    return lambda user: user.workflows.add("x", source, description)


async def upload(user: User) -> None:
    number = await user.artifacts.handle("artifacts.begin_upload", ["x"], {"kind": "text", "description": "up"})
    try:
        await user.artifacts.handle("artifacts.upload", [number, b"[5"], {})
        await user.artifacts.handle("artifacts.upload", [number, b"]"], {})
        await user.artifacts.handle("artifacts.end_upload", [number], {})
    finally:
        await user.artifacts.handle("artifacts.drop_upload", [number], {})


def copied(*given: Do, overwrite: bool = True) -> Do:
    """Bring to the store what another has in which this was done."""

    async def do(user: User) -> None:
        source = MemoryStore()
        await after(*given)(User(source))
        await copy(source, user.store, overwrite=overwrite)

    return do


async def talk(user: User) -> None:
    sessions = SessionStore(store=user.store, prefix="sessions")
    await sessions.create_session("Stars", session_id="s")
    await sessions.append_message("s", user_text_message("hello"))
    await sessions.close()


ONE, TWO = "def run(): return 1\n", "def run(n): return 2\n"
skill = after(put("skills/x/SKILL.md", SKILL), put("skills/x/scripts/go.sh", b"echo"))
without_history = {"get": workflow, "list": workflows, "search": workflow_found}

ROWS: dict[str, Row] = {
    "save": Row(nothing, save([1], "data"), ARTIFACTS),
    "save again": Row(save("[1]", "text", metadata={"n": 1}), save([2], "data"), ARTIFACTS),
    "save the same bytes as another kind": Row(save("5", "text"), save(5, "data"), ARTIFACTS),
    "save twice": Row(after(save(b"1", "bytes"), save("[1]", "text")), save([2], "data"), ARTIFACTS),
    "save over a file put there by hand": Row(put("artifacts/x", b"[1]"), save(b"2", "bytes"), ARTIFACTS),
    "save over one edited by hand": Row(
        after(save([1], "data"), put("artifacts/x", b"[1, 2]")), save(b"2", "bytes"), ARTIFACTS
    ),
    "save in pieces": Row(
        save("[1]", "text"), lambda user: user.artifacts.save("x", pieces(b"1", b"2"), "bytes"), ARTIFACTS
    ),
    "upload": Row(save([1], "data"), upload, ARTIFACTS),
    "delete": Row(
        save([1], "data", metadata={"n": 1}), lambda user: user.artifacts.delete("x"), ARTIFACTS, save("[1]", "text")
    ),
    "add": Row(nothing, add(ONE, "first"), WORKFLOWS),
    "add again": Row(add(ONE, "first"), add(TWO, "second"), WORKFLOWS),
    "add over one written by hand": Row(put("workflows/x.py", ONE.encode()), add(TWO, "second"), WORKFLOWS),
    "add over one in skills": Row(put("skills/x.py", ONE.encode()), add(TWO, "second"), WORKFLOWS),
    "remove": Row(add(ONE, "first"), lambda user: user.workflows.remove("x"), WORKFLOWS),
    "add again what is called": Row(add(ONE), add(TWO), {"begin": called}),
    "remove what is called": Row(add(ONE), lambda user: user.workflows.remove("x"), {"begin": called}),
    "remove both": Row(
        after(put("skills/x.py", TWO.encode()), put("workflows/x.py", ONE.encode())),
        lambda user: user.workflows.remove("x"),
        WORKFLOWS,
    ),
    "remove a workflow and the skill behind it": Row(
        after(skill, put("workflows/x.py", ONE.encode())), lambda user: user.workflows.remove("x"), WORKFLOWS
    ),
    "remove a skill": Row(skill, lambda user: user.workflows.remove("x"), without_history),
    "count a use": Row(add(ONE), count_call, WORKFLOWS),
    "add a package": Row(put("requirements.txt", b"red\n"), lambda user: user.deps.add("blue"), DEPS),
    "remove a package": Row(put("requirements.txt", b"red\nblue\n"), lambda user: user.deps.remove("red"), DEPS),
    "copy an artifact": Row(nothing, copied(save(b"1", "bytes"), save("[1]", "text")), ARTIFACTS),
    "copy over an artifact": Row(save([1], "data"), copied(save("[1]", "text")), ARTIFACTS),
    "copy over one put there by hand": Row(put("artifacts/x", b"[1]"), copied(save(b"2", "bytes")), ARTIFACTS),
    "copy a person's file over an artifact": Row(save([1], "data"), copied(put("artifacts/x", b"[2]")), ARTIFACTS),
    "copy a workflow": Row(nothing, copied(add(ONE), add(TWO, "second")), without_history),
    "copy over a workflow": Row(add(ONE), copied(add(TWO, "second")), WORKFLOWS),
    "copy a skill": Row(nothing, copied(skill), without_history),
    "copy packages": Row(put("requirements.txt", b"red\n"), copied(put("requirements.txt", b"blue\n")), DEPS),
    "copy a session": Row(nothing, copied(talk), SESSIONS),
}


Seen = dict[str, Any]


async def seen(user: User, row: Row) -> Seen:
    return {name: await look(user) for name, look in row.looks.items()}


async def as_expected(row: Row) -> tuple[Seen, Seen, Seen]:
    """What is seen before, after it was done, and after what is done then."""
    store = MemoryStore()
    await row.given(User(store))
    states = [await seen(User(store), row)]
    for do in (row.do, row.then or row.do):
        await do(User(store))
        states.append(await seen(User(store), row))
    assert states[0] != states[1]
    return states[0], states[1], states[2]


every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


every_way = pytest.mark.parametrize("how", ["once", "killed", "cancelled"])


async def is_cut_off(row: Row, at: int, how: str, stores: tuple[Store, Store], states: Sequence[Seen]) -> bool:
    """Cut it off there, and look at what is left, also in another process; False when it has not so many steps."""
    old, new, newer = states
    store, other = stores
    await row.given(User(other))
    living = User(other)
    await seen(living, row)
    user: list[asyncio.Task[Any]] = []
    stepping = Stepping(store, cut(at, how, user))
    doing = User(stepping)
    user.append(asyncio.ensure_future(row.do(doing)))
    await asyncio.wait(user)
    user[0].cancelled() or user[0].exception()
    await doing.artifacts.close()
    await doing.workflows._counts.wait_until_saved()
    if len(stepping.steps) < at:
        user[0].result()
        return False
    if how == "killed":
        await stepping.die()
        doing = User(store)
    what = stepping.steps[at - 1]
    assert await stepping.held() == [], what
    for looking in (User(other), living, doing):
        now = await seen(looking, row)
        assert now in (old, new), what
    await (row.do if now == old else row.then or row.do)(doing)
    for looking in (User(other), living, doing):
        assert await seen(looking, row) == (new if now == old else newer), what
    return True


@every_row
@every_way
async def test_who_is_cut_off_leaves_the_old_or_the_new(row: Row, how: str) -> None:
    states = await as_expected(row)
    at = 1
    while await is_cut_off(row, at, how, (store := MemoryStore(), store), states):
        at += 1


@pytest.mark.parametrize(
    "name", ["save again", "save in pieces", "delete", "add again", "remove both", "copy a session"]
)
async def test_who_is_cut_off_leaves_the_old_or_the_new_in_every_kind_of_store(place: Place, name: str) -> None:
    states = await as_expected(ROWS[name])
    stores, at = (place.open(), place.open()), 1
    while await is_cut_off(ROWS[name], at, "killed", stores, states):
        at += 1
        for key in {key.partition("/")[0] for key in await stores[0].list()}:
            await stores[0].delete(key)


@every_row
async def test_who_looks_in_between_sees_the_old_or_the_new(row: Row) -> None:
    old, new, _ = await as_expected(row)
    store = MemoryStore()
    await row.given(User(store))
    living: dict[str, tuple[Stepping, User]] = {}
    waiting: dict[str, asyncio.Future[Any]] = {}

    async def look(number: int, what: str) -> None:
        if not what.startswith("after"):
            return  # nothing was written since
        for is_new in (True, False):
            at_once: Seen = {}
            for name, doing in row.looks.items():
                if name in waiting:
                    continue
                if is_new or name not in living:
                    reader = Stepping(store)
                    living[name] = reader, User(reader)
                reader, user = living[name]
                task = await until_it_waits(reader, doing(user))
                if task.done():
                    at_once[name] = task.result()
                else:
                    waiting[name] = task
            expected = [{name: state[name] for name in at_once} for state in (old, new)]
            assert at_once in expected, what

    await row.do(User(Stepping(store, look)))
    for name, task in waiting.items():
        assert await task in (old[name], new[name])


@every_row
@pytest.mark.parametrize("times", [1, 2])
async def test_what_is_done_while_one_looks_is_seen_whole_or_not(row: Row, times: int) -> None:
    states = (await as_expected(row))[: times + 1]
    for (name, look), is_living in itertools.product(row.looks.items(), (True, False)):
        for at in itertools.count(1):
            store = MemoryStore()
            await row.given(User(store))
            dos = (row.do, row.then or row.do)[:times]
            another = Another(store, at, *(lambda other, do=do: do(User(other)) for do in dos))
            reader = Stepping(store)
            user = User(reader)
            if is_living:
                await look(user)
            reader.begin(another.step)
            found = await look(user)
            if not another.doing:
                break
            await asyncio.gather(*another.doing)
            assert found in [state[name] for state in states], reader.steps[at - 1]


@pytest.mark.parametrize("how", ["once", "cancelled"])
@pytest.mark.parametrize("is_living", [True, False])
@pytest.mark.parametrize("name", ["add again", "remove both", "copy a skill", "save again"])
async def test_who_is_cut_off_while_looking_sees_all_the_next_time(name: str, is_living: bool, how: str) -> None:
    row = ROWS[name]
    _, new, _ = await as_expected(row)
    for look in row.looks.values():
        for at in itertools.count(1):
            store = MemoryStore()
            await row.given(User(store))
            stepping = Stepping(store)
            user = User(stepping)
            if is_living:
                await look(user)
            await row.do(User(store))
            task: list[asyncio.Task[Any]] = []
            stepping.begin(cut(at, how, task))
            task.append(asyncio.ensure_future(look(user)))
            await asyncio.wait(task)
            task[0].cancelled() or task[0].exception()
            if len(stepping.steps) < at:
                break
            assert await seen(user, row) == new, stepping.steps[-1]


@pytest.mark.parametrize("verb", ["add", "remove"])
async def test_what_is_listed_is_installed_also_where_one_is_cut_off(verb: str) -> None:
    for at in itertools.count(1):
        store, python = MemoryStore(), Installed("red")
        await store.put("requirements.txt", b"red\n")
        task: list[asyncio.Task[Any]] = []
        stepping = Stepping(store, cut(at, "once", task))
        deps = Dependencies(stepping, python)  # type: ignore[arg-type]
        task.append(asyncio.ensure_future(deps.add("blue") if verb == "add" else deps.remove("red")))
        await asyncio.wait(task)
        if len(stepping.steps) < at:
            break
        assert task[0].exception() is not None
        assert set(await Dependencies(store, python).list()) <= set(python.there), stepping.steps[at - 1]


async def test_what_is_written_down_for_the_next_process_costs_no_list() -> None:
    store = MemoryStore()
    for number in range(60):
        await store.put(f"workflows/w{number}.py", ONE.encode())

    async def step(number: int, what: str) -> None:
        if what == "before put library/workflows/outline.json":
            raise StorageUnavailable("not now")

    stepping = Stepping(store, step)
    assert len(await User(stepping).workflows.list()) == 60
    assert "before put library/workflows/outline.json" in stepping.steps


async def test_what_is_noted_of_a_file_stays_with_it_when_only_its_place_changes(tmp_path: Path) -> None:
    """As in the moment in which another takes its place, or when a backup gives it a second name."""
    store = FileStore(tmp_path)
    await save("[1]", "text")(User(store))

    async def step(number: int, what: str) -> None:
        if what == "before put artifacts/x":
            raise StorageUnavailable("cut off")

    with pytest.raises(StorageUnavailable):
        await save([2, 3], "data")(User(Stepping(store, step)))
    (tmp_path / "second").hardlink_to(tmp_path / "artifacts" / "x")
    found = await User(store).artifacts.get("x") or {}
    assert (found["description"], found["kind"], found["size"]) == ("text", "text", 3)
    assert await User(store).artifacts.list() == [found]


async def test_a_file_that_changed_under_its_stamp_is_read_anew() -> None:
    """As one that an editor writes in place within a tick of the clock."""
    for key, one, two in [
        ("workflows/x.py", ONE.encode(), TWO.encode()),
        ("skills/x/SKILL.md", SKILL, SKILL.replace(b"How to", b"Why")),
    ]:
        store = MemoryStore()
        await store.put(key, one)
        user = User(store)
        before = await workflow(user)
        store._kept[key].data = two  # type: ignore[union-attr]
        async with asyncio.timeout(60):
            found = await workflow(user)
        assert before != found == await workflow(User(store))


class Slow(LibrarySearch):
    """One that takes its time, in which somebody else does something."""

    meanwhile: Callable[[], Awaitable[Any]] | None = None

    async def search(self, query: str, limit: int = 10) -> list[Any]:
        if self.meanwhile is not None:
            doing, self.meanwhile = self.meanwhile, None
            await doing()
        return await super().search(query, limit)


async def test_two_searches_at_once_know_of_different_ones() -> None:
    store = MemoryStore()
    for room in (
        ArtifactStore(store, index=Slow(None, "a", None)),
        WorkflowLibrary(store, index=Slow(None, "w", None)),
    ):
        keep = room.save if isinstance(room, ArtifactStore) else room.add
        await keep("one", ONE, "about stars")

        async def later(room: Any = room, keep: Any = keep) -> None:
            await keep("other", ONE, "about stars too")
            assert {found["name"] for found in await room.search("stars")} == {"one", "other"}

        room._search.meanwhile = later  # type: ignore[attr-defined]
        assert [found["name"] for found in await room.search("stars")] == ["one"]


# --- two at once ------------------------------------------------------------------------------------------------------


async def everything(user: User) -> Any:
    found = await user.artifacts.list()
    return [(without_times(one), await user.artifacts.load(one["name"])) for one in found]


PAIRS: list[tuple[Do, dict[str, Do], dict[str, Do]]] = [
    (
        save([1], "data"),
        {
            "save text": save("[2]", "text"),
            "save data": save([2, 3], "more", metadata={"n": 1}),
            "save in pieces": lambda user: user.artifacts.save("x", pieces(b"1", b"2"), "bytes"),
            "upload": upload,
            "delete": lambda user: user.artifacts.delete("x"),
            "copy": copied(save("[4]", "copied")),
        },
        {"all": everything},
    ),
    (
        nothing,
        {
            "save a file": lambda user: user.artifacts.save("x", "file"),
            "save in a folder": lambda user: user.artifacts.save("x/y", "in it"),
            "delete": lambda user: user.artifacts.delete("x"),
        },
        {"all": everything},
    ),
    (
        add(ONE, "first"),
        {
            "add": add(TWO, "second"),
            "add another": add("def run(a, b): return 3\n", "third"),
            "remove": lambda user: user.workflows.remove("x"),
            "count": count_call,
        },
        WORKFLOWS,
    ),
    (
        put("requirements.txt", b"red\n"),
        {
            "add": lambda user: user.deps.add("blue"),
            "copy": copied(put("requirements.txt", b"green\n")),
            "add a version": lambda user: user.deps.add("red>=2"),
            "remove": lambda user: user.deps.remove("red"),
        },
        DEPS,
    ),
    (
        nothing,
        {
            "add": lambda user: user.deps.add("blue"),
            "copy": copied(put("requirements.txt", b"green\n"), overwrite=False),
        },
        DEPS,
    ),
    (
        nothing,
        {
            "save": save([1], "data"),
            "copy": copied(save("[1]", "text"), overwrite=False),
            "copy a folder": copied(lambda user: user.artifacts.save("x/y", "in it"), overwrite=False),
        },
        {"all": everything},
    ),
    (nothing, {"add": add(ONE, "first"), "copy": copied(add(TWO, "second"), overwrite=False)}, WORKFLOWS),
]


async def in_turn(given: Do, dos: Sequence[Do], row: Row) -> Seen:
    store = MemoryStore()
    await given(User(store))
    for do in dos:
        await asyncio.gather(do(User(store)), return_exceptions=True)
    return await seen(User(store), row)


@pytest.mark.parametrize(
    ("given", "one", "other", "looks"),
    [
        pytest.param(given, dos[one], dos[other], looks, id=f"{one}, {other}")
        for given, dos, looks in PAIRS
        for one, other in itertools.product(dos, dos)
    ],
)
async def test_of_two_at_once_each_is_done_whole(given: Do, one: Do, other: Do, looks: dict[str, Do]) -> None:
    row = Row(given, one, looks)
    either = [await in_turn(given, dos, row) for dos in ((one, other), (other, one))]
    for at in itertools.count(1):
        store = MemoryStore()
        await given(User(store))
        another = Another(store, at, lambda beside: other(User(beside)))
        stepping = Stepping(store, another.step)
        ended = await asyncio.gather(one(User(stepping)), return_exceptions=True)
        ended += await asyncio.gather(*another.doing, return_exceptions=True)
        if not another.doing:
            break
        assert [
            raised for raised in ended if isinstance(raised, Exception) and not isinstance(raised, CarrelError)
        ] == []
        assert await seen(User(store), row) in either, stepping.steps[at - 1]
