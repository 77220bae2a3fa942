"""Two sessions of one storage at the same time, in one process and in several."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from carrel import FileStorage, InProcessExecutor, RedisStorage, Session
from tests.support.wheels import build_wheel

from .conftest import ECHO, KINDS, SANDBOX, Storage, executor_of

OTHER = Path(__file__).parent / "session_process.py"
CONFINED = tuple(SANDBOX)
"""In one process there is one path to import from, for as long as a session uses it."""


async def both(storage_again: Storage) -> tuple[Session, Session]:
    return Session(storage_again(), InProcessExecutor()), Session(storage_again(), InProcessExecutor())


async def test_two_that_open_the_same_conversation_share_it(storage_again: Storage) -> None:
    for number in range(5):
        one, two = (Session(storage_again(), InProcessExecutor(), session_id=f"s{number}") for _ in range(2))
        first, again, other = await asyncio.gather(one.converse("One"), one.converse("Again"), two.converse("Two"))
        assert first is again
        assert (other.id, other.title) == (first.id, first.title)
        for session in (one, two):
            await session.close()


async def test_a_workflow_added_twice_has_both_versions_in_its_history(storage_again: Storage) -> None:
    one, two = await both(storage_again)
    sources = {number: f"def run():\n    return {number}  # {'.' * 5000}\n" for number in (1, 2)}
    async with one, two:
        for number in range(10):
            name = f"w{number}"
            await asyncio.gather(
                one.add_workflow(name, sources[1], "the first"), two.add_workflow(name, sources[2], "the second")
            )
            kept = await one.get_workflow(name)
            assert kept is not None
            assert (kept["source"], kept["description"]) in ((sources[1], "the first"), (sources[2], "the second"))
            assert (await two.run(f"workflows.{name}()")).value == (1 if kept["source"] == sources[1] else 2)
            assert len(await two.workflow_history(name)) == 2


@pytest.mark.parametrize("executor_kind", KINDS)
async def test_the_same_package_is_installed_once_and_listed_once(tmp_path: Path, executor_kind: str) -> None:
    wheels = tmp_path / "wheels"
    for name in ("shared-thing", "mine-alone", "yours-alone"):
        build_wheel(wheels, name, "1.0")
    settings: dict[str, Any] = {"wheelhouse": wheels, "base": tmp_path / "base"}
    async with (
        FileStorage(tmp_path / "base") as first,
        FileStorage(tmp_path / "base") as second,
        Session(first, executor_of(executor_kind, **settings)) as one,
        Session(second, executor_of(executor_kind, **settings)) as two,
    ):
        reports = await asyncio.gather(
            one.add_dep("shared-thing"),
            two.add_dep("shared-thing"),
            one.add_dep("mine-alone"),
            two.add_dep("yours-alone"),
        )
        assert [report["failed"] for report in reports] == [[]] * 4
        assert sorted(await one.list_deps()) == sorted(await two.list_deps())
        assert sorted(await one.list_deps()) == ["mine-alone", "shared-thing", "yours-alone"]
        code = "import shared_thing, mine_alone, yours_alone\nshared_thing.VERSION"
        for session in (one, two):
            result = await session.run(code)
            assert result.value == "1.0", result.error
    text = (tmp_path / "base" / "requirements.txt").read_text().split()
    assert sorted(text) == ["mine-alone", "shared-thing", "yours-alone"]


@pytest.mark.parametrize("executor_kind", CONFINED)
async def test_packages_of_one_base_are_not_those_of_another(tmp_path: Path, executor_kind: str) -> None:
    wheels = tmp_path / "wheels"
    build_wheel(wheels, "only-here", "1.0")
    build_wheel(wheels, "only-there", "1.0")
    async with (
        Session(FileStorage(tmp_path / "a"), executor_of(executor_kind, wheelhouse=wheels, base=tmp_path / "a")) as one,
        Session(FileStorage(tmp_path / "b"), executor_of(executor_kind, wheelhouse=wheels, base=tmp_path / "b")) as two,
    ):
        await one.add_dep("only-here")
        await two.add_dep("only-there")
        for session, there, missing in ((one, "only_here", "only_there"), (two, "only_there", "only_here")):
            assert (await session.run(f"import {there}")).is_ok
            result = await session.run(f"import {missing}")
            assert result.error_type == "ModuleNotFoundError"
            assert await session.list_deps() == [there.replace("_", "-")]


async def test_packages_of_a_base_leave_the_process_with_its_session(tmp_path: Path) -> None:
    build_wheel(tmp_path / "wheels", "only-for-now", "1.0")
    async with Session.inprocess(tmp_path / "a", wheelhouse=tmp_path / "wheels") as session:
        assert (await session.add_dep("only-for-now"))["failed"] == []
        assert (await session.run("import importlib.util as u\nu.find_spec('only_for_now') is not None")).value is True
    async with Session.inprocess(tmp_path / "b") as session:
        assert (await session.run("import only_for_now")).error_type == "ModuleNotFoundError"
        assert await session.list_deps() == []


# --- two machines -----------------------------------------------------------------------------------------------------


class Machine:
    """Another process with a session of its own: `await machine.run("code")`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, home: Path, *words: str) -> "Machine":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(OTHER),
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "CARREL_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])},
            limit=1 << 24,
        )
        return cls(process)

    async def run(self, code: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(code).encode() + b"\n")
        return json.loads(await asyncio.wait_for(self._process.stdout.readline(), 60))

    async def stop(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        assert await asyncio.wait_for(self._process.wait(), 60) == 0


@pytest.fixture(params=["redis", "file"])
async def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Two that share a Redis, or a folder."""
    wheels = tmp_path / "wheels"
    build_wheel(wheels, "shared-thing", "1.0")
    if request.param == "redis":
        place = ["redis", request.getfixturevalue("redis_url"), tmp_path.name]
        storage: Any = RedisStorage(place[1], place[2])
    else:
        place = ["file", str(tmp_path / "shared"), ""]
        storage = FileStorage(tmp_path / "shared")
    await storage.store.put("tools/echo.yaml", ECHO.encode())
    await storage.close()
    made = [await Machine.start(tmp_path / f"home{number}", *place, str(wheels)) for number in (1, 2)]
    yield made
    for machine in made:
        await machine.stop()


async def test_two_machines_see_each_others_changes_at_once(machines: list[Machine]) -> None:
    one, two = machines
    assert await one.run("workflows.create('seven', 'def run():\\n    return 7\\n', 'Gives seven')['name']") == "seven"
    assert await two.run("workflows.seven()") == 7
    assert await two.run("workflows.create('seven', 'def run():\\n    return 8\\n', 'Gives eight')['name']") == "seven"
    assert await one.run("(workflows.seven(), workflows.get('seven')['description'])") == [8, "Gives eight"]
    assert await one.run("artifacts.save('a/b.json', {'x': [1, None]}, 'Found')['name']") == "a/b.json"
    assert await two.run("artifacts.load('a/b.json')") == {"x": [1, None]}
    assert await two.run("artifacts.list()[0]['description']") == "Found"
    assert await two.run("artifacts.delete('a/b.json')") is None
    assert await one.run("artifacts.exists('a/b.json')") is False
    assert await one.run("deps.add('shared-thing')['installed']") != []
    assert await two.run("deps.list()") == ["shared-thing"]
    assert await two.run("deps.sync()['failed']") == []
    assert await two.run("import shared_thing\nshared_thing.VERSION") == "1.0"
    assert await two.run("tools.echo.say(words='hi')") == "hi\n"
    assert await two.run("workflows.delete('seven')") is True
    assert await one.run("'seven' in [w['name'] for w in workflows.list()]") is False


async def test_two_machines_write_the_same_at_once(machines: list[Machine]) -> None:
    write = """
for number in range(20):
    artifacts.save('same.txt', {letter!r} * 100_000, {letter!r})
    workflows.create('same', 'def run():\\n    return ' + repr({letter!r} * 3000) + '\\n', {letter!r})
"""
    done = await asyncio.gather(*[m.run(write.format(letter=letter)) for m, letter in zip(machines, "xy", strict=True)])
    assert done == [None, None]
    read = "(set(artifacts.load('same.txt')), len(artifacts.load('same.txt')), artifacts.list()[0]['description'],"
    read += " set(workflows.same()), len(workflows.same()), workflows.get('same')['description'])"
    seen = [await machine.run(read) for machine in machines]
    assert seen[0] == seen[1]
    letters, size, about, returned, length, reported = seen[0]
    assert (letters, size) == ([about], 100_000)
    assert (returned, length) == ([reported], 3000)
    assert len(await machines[0].run("workflows.history('same')")) >= 2
