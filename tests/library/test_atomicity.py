"""Changes of several steps are atomic: if they fail at any step, for readers in between, and for two at once."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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
from tests.support.step_store import OtherUser, StepStore, fail_at, run_until_blocked
from tests.support.stores import Backend

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SKILL = b"---\nname: x\ndescription: How to x\n---\nDo it.\n"


class FakeInstaller:
    """An installer without a Python."""

    def __init__(self, *names: str) -> None:
        self.packages = dict.fromkeys(names, "1")

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        self.packages |= dict.fromkeys(requirements, "1")
        return dict.fromkeys(requirements, "1")

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.packages.pop(name, None)]

    async def installed(self) -> dict[str, str]:
        return self.packages


class User:
    """One process with the library of a store."""

    def __init__(self, store: Any) -> None:
        self.store: Store = store
        self.artifacts = ArtifactStore(store, index=LibrarySearch(None, "a", None), now=lambda: NOW)
        self.workflows = WorkflowLibrary(store, index=LibrarySearch(None, "w", None), now=lambda: NOW)
        self.deps = Dependencies(store, FakeInstaller())


Action = Callable[[User], Awaitable[Any]]


async def nothing(user: User) -> None:
    """Start with an empty store."""


# --- what readers see -------------------------------------------------------------------------------------------------


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


ARTIFACTS: dict[str, Action] = {"load": load, "fetch": fetch, "get": get, "list": listed, "search": searched}


async def workflow(user: User) -> Any:
    return await user.workflows.get("x")


async def workflows(user: User) -> Any:
    return await user.workflows.list()


async def workflow_found(user: User) -> Any:
    return await user.workflows.search("x")


async def newest(user: User) -> Any:
    """Return the last version in the history."""
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


WORKFLOWS: dict[str, Action] = {"get": workflow, "list": workflows, "search": workflow_found, "history": newest}


async def count_call(user: User) -> None:
    user.workflows.ended("x", 1.0, "no")
    await user.workflows.close()


async def requirements(user: User) -> Any:
    return await user.deps.list()


DEPS: dict[str, Action] = {"list": requirements}


async def conversation(user: User) -> Any:
    sessions = SessionStore(store=user.store, prefix="sessions")
    found = await sessions.load_session("s")
    await sessions.close()
    return (found["session"]["title"], len(found["messages"])) if found is not None else None


async def titles(user: User) -> Any:
    sessions = SessionStore(store=user.store, prefix="sessions")
    found = [meta["title"] for meta in await sessions.list_sessions()]
    await sessions.close()
    return found


SESSIONS: dict[str, Action] = {"load": conversation, "list": titles}


# --- what writers do --------------------------------------------------------------------------------------------------


@dataclass
class Row:
    setup: Action
    action: Action
    views: Mapping[str, Action]
    then: Action | None = None
    """What is done after it; without it, the same again."""


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def save(data: Any, description: str, **more: Any) -> Action:
    return lambda user: user.artifacts.save("x", data, description, **more)


def put(key: str, data: bytes) -> Action:
    return lambda user: user.store.put(key, data)


def after(*steps: Action) -> Action:
    async def action(user: User) -> None:
        for step in steps:
            await step(user)

    return action


def add(source: str, description: str = "") -> Action:
    return lambda user: user.workflows.add("x", source, description)


async def upload(user: User) -> None:
    number = await user.artifacts.handle("artifacts.begin_upload", ["x"], {"kind": "text", "description": "up"})
    try:
        await user.artifacts.handle("artifacts.upload", [number, b"[5"], {})
        await user.artifacts.handle("artifacts.upload", [number, b"]"], {})
        await user.artifacts.handle("artifacts.end_upload", [number], {})
    finally:
        await user.artifacts.handle("artifacts.drop_upload", [number], {})


def copied(*setup: Action, overwrite: bool = True) -> Action:
    """Copy a store in which these actions were done."""

    async def action(user: User) -> None:
        source = MemoryStore()
        await after(*setup)(User(source))
        await copy(source, user.store, overwrite=overwrite)

    return action


async def converse(user: User) -> None:
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
    "copy a session": Row(nothing, copied(converse), SESSIONS),
}


Views = dict[str, Any]


async def view(user: User, row: Row) -> Views:
    return {name: await read(user) for name, read in row.views.items()}


async def expected_views(row: Row) -> tuple[Views, Views, Views]:
    """What is seen before, after it was done, and after what is done then."""
    store = MemoryStore()
    await row.setup(User(store))
    states = [await view(User(store), row)]
    for action in (row.action, row.then or row.action):
        await action(User(store))
        states.append(await view(User(store), row))
    assert states[0] != states[1]
    return states[0], states[1], states[2]


every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


every_kind_of_failure = pytest.mark.parametrize("how", ["once", "killed", "cancelled"])


async def is_interrupted(row: Row, at: int, how: str, stores: tuple[Store, Store], states: Sequence[Views]) -> bool:
    """Let a change fail at a step, and check the store, also in another process; False if it has fewer steps."""
    old, new, newer = states
    store, other = stores
    await row.setup(User(other))
    warm = User(other)
    await view(warm, row)
    user: list[asyncio.Task[Any]] = []
    step_store = StepStore(store, fail_at(at, how, user))
    writer = User(step_store)
    user.append(asyncio.ensure_future(row.action(writer)))
    await asyncio.wait(user)
    user[0].cancelled() or user[0].exception()
    await writer.artifacts.close()
    await writer.workflows._counts.wait_until_saved()
    if len(step_store.steps) < at:
        user[0].result()
        return False
    if how == "killed":
        await step_store.release_locks()
        writer = User(store)
    what = step_store.steps[at - 1]
    assert await step_store.held_locks() == [], what
    for reader in (User(other), warm, writer):
        now = await view(reader, row)
        assert now in (old, new), what
    await (row.action if now == old else row.then or row.action)(writer)
    for reader in (User(other), warm, writer):
        assert await view(reader, row) == (new if now == old else newer), what
    return True


@every_row
@every_kind_of_failure
async def test_a_failed_change_leaves_the_old_or_the_new_state(row: Row, how: str) -> None:
    states = await expected_views(row)
    at = 1
    while await is_interrupted(row, at, how, (store := MemoryStore(), store), states):
        at += 1


@pytest.mark.parametrize(
    "name", ["save again", "save in pieces", "delete", "add again", "remove both", "copy a session"]
)
async def test_a_failed_change_leaves_the_old_or_the_new_state_in_every_store(backend: Backend, name: str) -> None:
    states = await expected_views(ROWS[name])
    stores, at = (backend.open(), backend.open()), 1
    while await is_interrupted(ROWS[name], at, "killed", stores, states):
        at += 1
        for key in {key.partition("/")[0] for key in await stores[0].list()}:
            await stores[0].delete(key)


@every_row
async def test_readers_during_a_change_see_the_old_or_the_new_state(row: Row) -> None:
    old, new, _ = await expected_views(row)
    store = MemoryStore()
    await row.setup(User(store))
    warm: dict[str, tuple[StepStore, User]] = {}
    waiting: dict[str, asyncio.Future[Any]] = {}

    async def read_all(number: int, what: str) -> None:
        if not what.startswith("after"):
            return  # nothing was written since
        for is_new in (True, False):
            at_once: Views = {}
            for name, read in row.views.items():
                if name in waiting:
                    continue
                if is_new or name not in warm:
                    reader = StepStore(store)
                    warm[name] = reader, User(reader)
                reader, user = warm[name]
                task = await run_until_blocked(reader, read(user))
                if task.done():
                    at_once[name] = task.result()
                else:
                    waiting[name] = task
            expected = [{name: state[name] for name in at_once} for state in (old, new)]
            assert at_once in expected, what

    await row.action(User(StepStore(store, read_all)))
    for name, task in waiting.items():
        assert await task in (old[name], new[name])


@every_row
@pytest.mark.parametrize("times", [1, 2])
async def test_a_change_during_a_read_is_seen_completely_or_not_at_all(row: Row, times: int) -> None:
    states = (await expected_views(row))[: times + 1]
    for (name, read), is_warm in itertools.product(row.views.items(), (True, False)):
        for at in itertools.count(1):
            store = MemoryStore()
            await row.setup(User(store))
            actions = (row.action, row.then or row.action)[:times]
            other = OtherUser(store, at, *(lambda other, action=action: action(User(other)) for action in actions))
            reader = StepStore(store)
            user = User(reader)
            if is_warm:
                await read(user)
            reader.restart(other.step)
            found = await read(user)
            if not other.tasks:
                break
            await asyncio.gather(*other.tasks)
            assert found in [state[name] for state in states], reader.steps[at - 1]


@pytest.mark.parametrize("how", ["once", "cancelled"])
@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("name", ["add again", "remove both", "copy a skill", "save again"])
async def test_a_failed_read_does_not_affect_the_next_one(name: str, is_warm: bool, how: str) -> None:
    row = ROWS[name]
    _, new, _ = await expected_views(row)
    for read in row.views.values():
        for at in itertools.count(1):
            store = MemoryStore()
            await row.setup(User(store))
            step_store = StepStore(store)
            user = User(step_store)
            if is_warm:
                await read(user)
            await row.action(User(store))
            task: list[asyncio.Task[Any]] = []
            step_store.restart(fail_at(at, how, task))
            task.append(asyncio.ensure_future(read(user)))
            await asyncio.wait(task)
            task[0].cancelled() or task[0].exception()
            if len(step_store.steps) < at:
                break
            assert await view(user, row) == new, step_store.steps[-1]


@pytest.mark.parametrize("verb", ["add", "remove"])
async def test_listed_packages_are_installed_also_after_a_failure(verb: str) -> None:
    for at in itertools.count(1):
        store, python = MemoryStore(), FakeInstaller("red")
        await store.put("requirements.txt", b"red\n")
        task: list[asyncio.Task[Any]] = []
        step_store = StepStore(store, fail_at(at, "once", task))
        deps = Dependencies(step_store, python)
        task.append(asyncio.ensure_future(deps.add("blue") if verb == "add" else deps.remove("red")))
        await asyncio.wait(task)
        if len(step_store.steps) < at:
            break
        assert task[0].exception() is not None
        assert set(await Dependencies(store, python).list()) <= set(python.packages), step_store.steps[at - 1]


async def test_a_description_stays_when_only_the_inode_changes(tmp_path: Path) -> None:
    """For example during a rename, or when a backup program makes a hard link."""
    store = FileStore(tmp_path)
    await save("[1]", "text")(User(store))

    async def step(number: int, what: str) -> None:
        if what == "before put artifacts/x":
            raise StorageUnavailable("not now")

    with pytest.raises(StorageUnavailable):
        await save([2, 3], "data")(User(StepStore(store, step)))
    (tmp_path / "second").hardlink_to(tmp_path / "artifacts" / "x")
    found = await User(store).artifacts.get("x") or {}
    assert (found["description"], found["kind"], found["size"]) == ("text", "text", 3)
    assert await User(store).artifacts.list() == [found]


async def test_a_file_that_changed_without_a_new_stamp_is_read_again() -> None:
    """For example one that an editor writes in place within a tick of the clock."""
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


class SlowSearch(LibrarySearch):
    """A search during which something else happens."""

    meanwhile: Callable[[], Awaitable[Any]] | None = None

    async def search(self, query: str, limit: int = 10) -> list[Any]:
        if self.meanwhile is not None:
            callback, self.meanwhile = self.meanwhile, None
            await callback()
        return await super().search(query, limit)


async def test_concurrent_searches_with_different_entries() -> None:
    store = MemoryStore()
    for library in (
        ArtifactStore(store, index=SlowSearch(None, "a", None)),
        WorkflowLibrary(store, index=SlowSearch(None, "w", None)),
    ):
        add_one = library.save if isinstance(library, ArtifactStore) else library.add
        await add_one("one", ONE, "about stars")

        async def later(library: Any = library, add_one: Any = add_one) -> None:
            await add_one("other", ONE, "about stars too")
            assert {found["name"] for found in await library.search("stars")} == {"one", "other"}

        library._search.meanwhile = later  # type: ignore[attr-defined]
        assert [found["name"] for found in await library.search("stars")] == ["one"]


# --- two at once ------------------------------------------------------------------------------------------------------


async def everything(user: User) -> Any:
    found = await user.artifacts.list()
    return [(without_times(one), await user.artifacts.load(one["name"])) for one in found]


PAIRS: list[tuple[Action, dict[str, Action], dict[str, Action]]] = [
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


async def one_after_the_other(setup: Action, actions: Sequence[Action], row: Row) -> Views:
    store = MemoryStore()
    await setup(User(store))
    for action in actions:
        await asyncio.gather(action(User(store)), return_exceptions=True)
    return await view(User(store), row)


@pytest.mark.parametrize(
    ("setup", "first", "second", "views"),
    [
        pytest.param(setup, actions[one], actions[two], views, id=f"{one}, {two}")
        for setup, actions, views in PAIRS
        for one, two in itertools.product(actions, actions)
    ],
)
async def test_two_concurrent_changes_have_the_result_of_one_after_the_other(
    setup: Action, first: Action, second: Action, views: dict[str, Action]
) -> None:
    row = Row(setup, first, views)
    either = [await one_after_the_other(setup, actions, row) for actions in ((first, second), (second, first))]
    for at in itertools.count(1):
        store = MemoryStore()
        await setup(User(store))
        other = OtherUser(store, at, lambda beside: second(User(beside)))
        step_store = StepStore(store, other.step)
        ended: list[Any] = list(await asyncio.gather(first(User(step_store)), return_exceptions=True))
        ended += await asyncio.gather(*other.tasks, return_exceptions=True)
        if not other.tasks:
            break
        assert [
            raised for raised in ended if isinstance(raised, Exception) and not isinstance(raised, CarrelError)
        ] == []
        assert await view(User(store), row) in either, step_store.steps[at - 1]
