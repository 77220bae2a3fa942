"""Copying between two stores of any kind: all items arrive, and nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from carrel import SessionStore, user_text_message
from carrel.errors import ConfigurationError, StorageUnavailable
from carrel.library.artifacts import ArtifactStore
from carrel.library.store_sync import KINDS, Difference, contents, copy, copy_library, differences, parse_kinds
from carrel.library.workflows import WorkflowLibrary
from carrel.storage.base import Store
from carrel.storage.files.store import FileStore
from carrel.storage.memory import MemoryStore
from tests.support.step_store import OtherUser, StepStore, fail_at
from tests.support.stores import Backend, everything

BIG = bytes(range(256)) * 20_000
LONG_TEXT = "x" * 60_000


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[FileStore]:
    """A base with an item of every kind."""
    root = tmp_path / "base"
    for name, text in {
        "tools/curl.yaml": "name: curl\ncommand: curl\n",
        "tools/shop/shop.json": "{}",
        "workflows/add.py": "def run(a, b):\n    return a + b\n",
        "workflows/__pycache__/add.cpython-311.pyc": "compiled",
        "skills/pdf/SKILL.md": "---\nname: pdf\ndescription: Read PDFs\n---\n",
        "requirements.txt": "# by hand\npandas>=2\n",
        "environments/python-3.11/bin/python": "not for others",
        "letter.txt": "mine",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    store = FileStore(root)
    artifacts = ArtifactStore(store)
    await artifacts.save("reports/big", BIG, description="All bytes", metadata={"n": 1})
    await artifacts.save("data.jsonl", "1\n2\n3")
    await artifacts.save("none", None)
    sessions = SessionStore(store=store, prefix="sessions")
    await sessions.create_session("Stars", session_id="stars")
    for text in ("one", LONG_TEXT, "three"):
        await sessions.append_message("stars", user_text_message(text))
    yield store
    await artifacts.close()
    await sessions.close()
    await store.close()


def named(found: list[Difference]) -> list[str]:
    return [f"{one.state} {one.kind}/{one.name}" for one in found]


EVERYTHING = [
    "tools/curl.yaml",
    "tools/shop/shop.json",
    "workflows/add.py",
    "skills/pdf/SKILL.md",
    "artifacts/data.jsonl",
    "artifacts/none",
    "artifacts/reports/big",
    "deps/requirements.txt",
    "sessions/stars",
]


async def test_everything_is_copied_and_can_be_used(folder: FileStore, backend: Backend) -> None:
    target = backend.open()
    assert named(await differences(folder, target)) == [f"new {name}" for name in EVERYTHING]
    report = await copy(folder, target)
    assert (named(report.copied), report.kept, report.same) == ([f"new {name}" for name in EVERYTHING], [], 0)
    assert [f"{thing.kind}/{thing.name}" for thing in await contents(target)] == EVERYTHING
    artifacts = ArtifactStore(backend.open())
    assert (await artifacts.load("reports/big"), await artifacts.load("none")) == (BIG, None)
    assert await artifacts.load("data.jsonl") == "1\n2\n3"
    about = {one["name"]: one for one in await artifacts.list()}
    assert (about["reports/big"]["description"], about["reports/big"]["metadata"]) == ("All bytes", {"n": 1})
    workflows = WorkflowLibrary(backend.open())
    assert [one["name"] for one in await workflows.list()] == ["add", "pdf"]
    assert await target.get("requirements.txt") == b"# by hand\npandas>=2\n"
    sessions = SessionStore(store=backend.open(), prefix="sessions")
    loaded = await sessions.load_session("stars")
    assert loaded is not None
    assert (loaded["session"]["title"], len(loaded["messages"])) == ("Stars", 3)
    key = "sessions/stars/messages.jsonl"
    assert await everything(target, key) == await everything(folder, key)
    await sessions.append_message("stars", user_text_message("four"))
    assert await target.get("letter.txt") is None
    assert await target.list("environments") == []
    for closed in (artifacts, workflows, sessions):
        await closed.close()


async def test_copying_twice_and_back_changes_nothing(folder: FileStore, backend: Backend, tmp_path: Path) -> None:
    target = backend.open()
    await copy(folder, target)
    again = await copy(folder, target)
    assert (again.copied, again.kept, again.same) == ([], [], len(EVERYTHING))
    back = FileStore(tmp_path / "back")
    await copy(target, back)
    assert {one.state for one in await differences(folder, back)} == {"same"}
    written = {path.relative_to(tmp_path / "back") for path in (tmp_path / "back").rglob("*.*") if path.is_file()}
    assert Path("workflows/add.py") in written
    assert Path("sessions/stars/messages.jsonl") in written
    await back.close()


async def test_a_different_item_is_kept_without_overwrite(folder: FileStore, backend: Backend) -> None:
    target = backend.open()
    await copy(folder, target)
    await target.put("workflows/add.py", b"def run(): return 'theirs'\n")
    await target.put("workflows/only_there.py", b"def run(): return 1\n")
    await target.put("artifacts/reports/big", BIG[:-1] + b"?")
    found = [one for one in named(await differences(folder, target)) if not one.startswith("same")]
    assert found == ["changed workflows/add.py", "missing workflows/only_there.py", "changed artifacts/reports/big"]
    report = await copy(folder, target, parse_kinds(["workflows"]))
    assert (report.copied, named(report.kept)) == ([], ["changed workflows/add.py"])
    assert await target.get("workflows/add.py") == b"def run(): return 'theirs'\n"
    report = await copy(folder, target, overwrite=True)
    assert named(report.copied) == ["changed workflows/add.py", "changed artifacts/reports/big"]
    assert await target.get("artifacts/reports/big") == BIG
    assert await target.get("workflows/only_there.py") is not None


async def test_a_session_is_continued_and_never_overwritten(folder: FileStore, backend: Backend) -> None:
    target = backend.open()
    await copy(folder, target)
    sessions = SessionStore(store=folder, prefix="sessions")
    await sessions.append_message("stars", user_text_message("four"))
    assert named(await differences(folder, target, ["sessions"])) == ["longer sessions/stars"]
    assert named(await differences(target, folder, ["sessions"])) == ["shorter sessions/stars"]
    kept = await copy(target, folder, ["sessions"], overwrite=True)
    assert (kept.copied, named(kept.kept)) == ([], ["shorter sessions/stars"])
    assert named((await copy(folder, target, ["sessions"])).copied) == ["longer sessions/stars"]
    assert await texts(target) == await texts(folder)
    there = SessionStore(store=target, prefix="sessions")
    await there.append_message("stars", user_text_message("five, there"))
    await sessions.append_message("stars", user_text_message("five, here"))
    report = await copy(folder, target, ["sessions"], overwrite=True)
    assert (report.copied, named(report.kept)) == ([], ["diverged sessions/stars"])
    assert (await texts(target))[-1] == "five, there"
    await there.close()
    await sessions.close()


class Stopping:
    """A store that fails at one of its writes, before or after it is done."""

    def __init__(self, store: Store, writes: int) -> None:
        self._store, self._left = store, writes

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        if name not in ("put", "put_pieces", "append"):
            return verb

        async def counted(*words: Any, **more: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise StorageUnavailable("stopped")
            return await verb(*words, **more)

        return counted


async def test_an_interrupted_copy_can_be_repeated(folder: FileStore, backend: Backend) -> None:
    target = backend.open()
    workflows = WorkflowLibrary(folder)
    for number in range(3):
        await workflows.add("add", f"def run(a):\n    return {number}\n")
    await workflows.close()
    await folder.append("sessions/stars/trace.jsonl", [b"{}", b"{}"])
    for writes in itertools.count(1):
        for kind in ("artifacts", "library", "workflows", "sessions", "tools", "skills", "requirements.txt"):
            await target.delete(kind)
        try:
            await copy(folder, Stopping(target, writes))
            break
        except StorageUnavailable:
            pass
        again = await copy(folder, target)
        assert (again.kept, again.failed) == ([], [])
        assert {one.state for one in await differences(folder, target)} == {"same"}
        for key in ("library/workflows/history.jsonl", "sessions/stars/trace.jsonl", "sessions/stars/messages.jsonl"):
            assert await everything(target, key) == await everything(folder, key)
    assert writes > len(EVERYTHING)


async def test_readers_during_a_copy_do_not_change_the_history(folder: FileStore) -> None:
    workflows = WorkflowLibrary(folder)
    await workflows.add("add", "def run(a):\n    return 1\n")
    await workflows.add("sub", "def run(a):\n    return 2\n")
    target = MemoryStore()

    async def look(number: int, what: str) -> None:
        if number % 2 == 0 and not await target.lock_owner("library/workflows"):
            reader = WorkflowLibrary(target)
            assert [await reader.get(name) for name in ("add", "sub")]

    await copy(folder, StepStore(target, look))
    key = "library/workflows/history.jsonl"
    assert await everything(target, key) == await everything(folder, key)
    await workflows.close()


async def test_a_copy_can_be_repeated_after_the_source_failed() -> None:
    source = MemoryStore()
    for key in ("tools/a.yaml", "skills/x/SKILL.md", "skills/x/go.py", "requirements.txt", "artifacts/by hand"):
        await source.put(key, b"x")
    await source.put("artifacts/noted", b"x")
    await source.put("library/artifacts/noted.json", b'{"kind": "text", "description": "a person wrote this"}')
    await ArtifactStore(source).save("x", "[1]", "text")
    await WorkflowLibrary(source).add("add", "def run(a):\n    return 1\n")
    sessions = SessionStore(store=source, prefix="sessions")
    await sessions.create_session("Stars", session_id="stars")
    await sessions.append_message("stars", user_text_message("one"))
    await sessions.close()
    for at in itertools.count(1):
        target = MemoryStore()
        step_store = StepStore(source, fail_at(at, "once", []))
        try:
            await copy(step_store, target)
            break
        except StorageUnavailable:
            pass
        again = await copy(source, target)
        assert (again.kept, again.failed) == ([], [])
        found = await ArtifactStore(target).get("noted")
        assert (await ArtifactStore(target).load("x"), (found or {})["description"]) == ("[1]", "a person wrote this")
        assert await target.get("skills/x/SKILL.md") == b"x"
        assert await texts(target) == ["one"]


async def test_an_artifact_that_is_saved_during_the_copy_has_its_own_description() -> None:
    for at in itertools.count(1):
        source, target = MemoryStore(), MemoryStore()
        await ArtifactStore(source).save("x", "[1]", "text")
        other = OtherUser(source, at, lambda store: ArtifactStore(store).save("x", [2, 3], "data"))
        report = await copy(StepStore(source, other.step), target)
        if not other.tasks:
            break
        found = await ArtifactStore(target).get("x")
        if found is None:
            assert [failure.name for failure in report.failed] == ["x"]
            continue
        both = await ArtifactStore(target).load("x"), found["description"], found["kind"]
        assert both in [("[1]", "text", "text"), ([2, 3], "data", "json")]


async def test_items_are_copied_after_those_they_refer_to() -> None:
    source, target = MemoryStore(), MemoryStore()
    keys = ["skills/x/SKILL.md", "skills/x/go.py", "tools/a.yaml", "tools/b.json", "tools/c.yml"]
    for key in keys:
        await source.put(key, b"x")
    step_store = StepStore(target)
    report = await copy(source, step_store)
    written = [step.rpartition(" ")[2] for step in step_store.steps if step.startswith("after put_pieces")]
    assert written == ["tools/b.json", "tools/a.yaml", "tools/c.yml", "skills/x/go.py", "skills/x/SKILL.md"]
    assert [one.name for one in report.copied] == ["a.yaml", "b.json", "c.yml", "x/SKILL.md", "x/go.py"]


async def test_a_copied_library_is_independent(folder: FileStore, backend: Backend) -> None:
    workflows = WorkflowLibrary(folder)
    await workflows.add("add", "def run(a):\n    return 1\n")
    await workflows.begin("add")
    await workflows.close()
    target = backend.open()
    await copy_library(folder, target)
    assert await target.list("environments") + await target.list("sessions") == []
    theirs = WorkflowLibrary(target)
    await theirs.add("add", "def run(a):\n    return 2\n")
    assert [version["source"] for version in await theirs.history("add")][-1] == "def run(a):\n    return 2\n"
    assert len(await theirs.history("add")) == len(await workflows.history("add")) + 1
    assert (await theirs.get("add") or {})["usage"]["calls"] == 1
    assert await ArtifactStore(target).load("reports/big") == BIG
    for library in (workflows, theirs):
        await library.close()


async def test_concurrent_copies_copy_once(folder: FileStore, backend: Backend) -> None:
    key = "sessions/stars/messages.jsonl"
    await folder.append(key, [b'{"role":"user","content":[],"meta":{"n":%d}}' % number for number in range(3000)])
    targets = [backend.open() for _ in range(4)]
    report = await asyncio.gather(*(copy(folder, target) for target in targets))
    assert [one.failed for one in report] == [[]] * 4
    assert await everything(targets[0], key) == await everything(folder, key)
    assert {one.state for one in await differences(folder, targets[0])} == {"same"}


async def test_a_torn_last_line_is_not_a_difference(folder: FileStore, backend: Backend) -> None:
    target = backend.open()
    with (folder.root / "sessions/stars/messages.jsonl").open("ab") as log:
        log.write(b'{"role": "us')
    await copy(folder, target)
    assert {one.state for one in await differences(folder, target)} == {"same"}


async def test_a_session_without_messages_is_copied(tmp_path: Path, backend: Backend) -> None:
    here, target = FileStore(tmp_path / "here"), backend.open()
    sessions = SessionStore(store=here, prefix="sessions")
    await sessions.create_session("Quiet", session_id="quiet")
    assert named((await copy(here, target)).copied) == ["new sessions/quiet"]
    assert (await copy(here, target)).same == 1
    await sessions.close()


async def test_an_item_that_cannot_be_copied_does_not_stop_the_others(tmp_path: Path) -> None:
    source, target = MemoryStore(), FileStore(tmp_path)
    long = "x" * 300
    for key in ("artifacts/a", "artifacts/a/b", f"artifacts/{long}", "artifacts/c"):
        await source.put(key, key.encode())
    report = await copy(source, target)
    assert named(report.copied) == ["new artifacts/a", "new artifacts/c"]
    assert sorted(failure.name for failure in report.failed) == ["a/b", long]
    assert await target.get("artifacts/c") == b"artifacts/c"


async def test_files_with_invalid_names_do_not_stop_the_copy(
    folder: FileStore, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("back\\slash", "new\nline"):
        (folder.root / "artifacts" / name).write_text("x")
    (folder.root / "artifacts" / "away").symlink_to("/etc/passwd")
    os.mkfifo(folder.root / "artifacts" / "pipe")
    assert [f"{thing.kind}/{thing.name}" for thing in await contents(folder)] == EVERYTHING
    report = await copy(folder, backend.open())
    assert (len(report.copied), report.failed) == (len(EVERYTHING), [])
    assert all(f"artifacts/{name}" in caplog.text for name in ("back\\slash", "new\nline"))


async def texts(store: Store) -> list[str]:
    sessions = SessionStore(store=store, prefix="sessions")
    loaded = await sessions.load_session("stars")
    await sessions.close()
    assert loaded is not None
    return [message["content"][0]["text"] for message in loaded["messages"]]


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no kind 'recipes'; use tools, workflows"):
        parse_kinds(["recipes"])
    assert parse_kinds(None) == KINDS
    assert parse_kinds(["sessions", "tools"]) == ("tools", "sessions")
