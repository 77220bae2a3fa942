"""The list of packages, on every kind of store, with a real Python that has them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from carrel.errors import RequirementRefused, RuntimeDepsDisabledError
from carrel.execution.config import SubprocessConfig
from carrel.execution.packages import Packages, subprocess_packages
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.library.deps import Deps
from carrel.storage.base import Store
from carrel.storage.redis.store import RedisStore
from tests.support.lazy_module import LazyModule
from tests.support.stores import Place
from tests.support.wheels import build_wheel

redis = LazyModule("redis")

KEY = "requirements.txt"


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheelhouse")
    for version in ("1.0", "2.0"):
        build_wheel(folder, "red", version)
    build_wheel(folder, "blue", needs=("red<2",))
    build_wheel(folder, "green", needs=("red>=2",))
    build_wheel(folder, "broken", needs=("nowhere-to-be-had>=3",))
    build_wheel(folder, "more", extras={"red": "red"})
    return folder


@pytest.fixture
async def python(tmp_path: Path, wheelhouse: Path) -> AsyncIterator[Packages]:
    packages = await subprocess_packages(SubprocessConfig(base=tmp_path / "base", wheelhouse=wheelhouse))
    yield packages
    await packages.give_back()


async def text_in(store: Store) -> str:
    return ((await store.get(KEY)) or b"").decode()


async def test_a_package_is_added_listed_and_removed(place: Place, python: Packages) -> None:
    store = place.open()
    deps = Deps(store, python)
    assert await deps.list() == []
    added = await deps.add("red>=1")
    assert added == {"installed": ["red>=1"], "already_present": [], "failed": [], "message": ""}
    assert await deps.list() == ["red>=1"]
    assert await Deps(place.open(), python).list() == ["red>=1"]
    assert (await deps.add("red"))["already_present"] == ["red"]
    assert await text_in(store) == "red>=1\n"
    removed = await deps.remove("Red")
    assert removed == {"removed": ["red"], "not_found": [], "failed": [], "message": "", "removed_from_config": True}
    assert (await deps.list(), await deps.installed()) == ([], {})
    again = await deps.remove("red")
    assert again == {"removed": [], "not_found": ["red"], "failed": [], "message": "", "removed_from_config": False}


async def test_the_file_stays_as_a_person_wrote_it(place: Place, python: Packages) -> None:
    store = place.open()
    written = "# For the reports.\r\nred<2   # the old one, on purpose\r\n\r\n# and\r\nmore\r\n"
    await store.put(KEY, written.encode())
    deps = Deps(store, python)
    assert (await deps.add("red"))["installed"] == ["red"]
    assert await deps.installed() == {"red": "1.0"}, "the file says which"
    assert await text_in(store) == written
    await deps.add("blue")
    assert await text_in(store) == written + "blue\r\n"
    await deps.remove("more")
    assert await text_in(store) == written.replace("more\r\n", "blue\r\n")


async def test_one_that_cannot_be_had_changes_nothing_and_says_why(place: Place, python: Packages) -> None:
    store = place.open()
    deps = Deps(store, python)
    await deps.add("red<2")
    before = await text_in(store), await deps.installed()
    for requirement, said in (("broken", "nowhere-to-be-had"), ("green", "red"), ("red>=9", "red>=9")):
        report = await deps.add(requirement)
        assert (report["installed"], report["already_present"], report["failed"]) == ([], [], [requirement])
        assert said in report["message"]
        assert (await text_in(store), await deps.installed()) == before


async def test_one_that_does_not_go_with_the_needs_of_another_is_refused(place: Place, python: Packages) -> None:
    deps = Deps(place.open(), python)
    await deps.add("blue")
    report = await deps.add("green")
    assert report["failed"] == ["green"]
    assert "blue" in report["message"]
    assert (await deps.list(), await deps.installed()) == (["blue"], {"blue": "1.0", "red": "1.0"})
    assert (await deps.sync())["failed"] == []


async def test_one_on_the_list_that_cannot_be_had_here_keeps_no_other_out(place: Place, python: Packages) -> None:
    store = place.open()
    await store.put(KEY, b"broken\nred<2\n")
    deps = Deps(store, python)
    assert (await deps.add("more"))["installed"] == ["more"]
    assert (await deps.add("red"))["installed"] == ["red"]


async def test_another_version_takes_the_place_of_the_first(place: Place, python: Packages) -> None:
    deps = Deps(place.open(), python)
    await deps.add("red<2")
    assert (await deps.add("red==2.0"))["installed"] == ["red==2.0"]
    assert (await deps.list(), await deps.installed()) == (["red==2.0"], {"red": "2.0"})


async def test_sync_installs_what_the_file_names_and_says_which_it_could_not(place: Place, python: Packages) -> None:
    store = place.open()
    deps = Deps(store, python, allow_runtime=False)
    assert await deps.sync() == {"installed": [], "already_present": [], "failed": [], "message": ""}
    await store.put(KEY, b"red<2\nbroken\n-r other.txt\nmore[red]\ngreen\n")
    report = await deps.sync()
    assert report["installed"] == ["red<2", "more[red]"]
    assert report["failed"] == ["-r other.txt", "broken", "green"]
    assert "line 3" in report["message"]
    assert "nowhere-to-be-had" in report["message"]
    assert await deps.installed() == {"red": "1.0", "more": "1.0"}
    await store.put(KEY, b"red<2\nblue\n")
    report = await deps.sync()
    assert (report["installed"], report["already_present"], report["failed"]) == (["blue"], ["red<2"], [])
    assert (await deps.sync())["already_present"] == ["red<2", "blue"]


async def test_packages_may_be_fixed(place: Place, python: Packages) -> None:
    store = place.open()
    await store.put(KEY, b"red\n")
    deps = Deps(store, python, allow_runtime=False)
    for change in (deps.add("blue"), deps.remove("red")):
        with pytest.raises(RuntimeDepsDisabledError, match="allow_runtime_deps is off") as refused:
            await change
        assert isinstance(refused.value, PermissionError)
    assert await deps.list() == ["red"]
    assert (await deps.sync())["installed"] == ["red"]


async def test_a_requirement_that_is_refused_touches_nothing(place: Place, python: Packages) -> None:
    store = place.open()
    deps = Deps(store, python)
    for requirement in ("red; python_version > '3'", "--pre red", "./red", "red @ https://example.com/red.whl"):
        with pytest.raises(RequirementRefused):
            await deps.add(requirement)
    await store.put(KEY, b"\xff\xfe not text")
    with pytest.raises(RequirementRefused, match=r"requirements\.txt is no text in UTF-8"):
        await deps.add("red")
    assert await store.get(KEY) == b"\xff\xfe not text"


async def test_many_at_once_lose_nobodys_line(place: Place, python: Packages) -> None:
    lists = [Deps(place.open(), python) for _ in range(4)]
    reports = await asyncio.gather(*(deps.add(name) for deps in lists for name in ("red<2", "blue", "more")))
    assert [report["failed"] for report in reports] == [[]] * 12
    assert sorted(name for report in reports for name in report["installed"]).count("blue") == 1
    assert sorted(await lists[0].list()) == ["blue", "more", "red<2"]
    assert await text_in(place.open()) == "".join(f"{line}\n" for line in await lists[0].list())


class Meanwhile:
    """A Python in which something happens while it installs."""

    def __init__(self, happens: Callable[[], Awaitable[object]]) -> None:
        self._happens = happens
        self.asked: list[Sequence[str]] = []

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        self.asked.append(requirements)
        await self._happens()
        return dict.fromkeys(requirements, "1.0")

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        await self._happens()
        return list(names)

    async def installed(self) -> dict[str, str]:
        return {}


async def test_what_a_person_writes_while_a_package_is_installed_stays(place: Place) -> None:
    store = place.open()
    deps = Deps(store, Meanwhile(lambda: store.put(KEY, b"# mine\nblue\n")))
    await deps.add("red")
    assert await text_in(store) == "# mine\nblue\nred\n"
    assert (await deps.remove("blue"))["removed_from_config"] is True
    assert await text_in(store) == "# mine\n"


async def test_all_lines_of_a_package_say_which_version_a_bare_name_gets(place: Place) -> None:
    store, python = place.open(), Meanwhile(lambda: asyncio.sleep(0))
    await store.put(KEY, b"red>=1\nRed<2\n")
    await Deps(store, python).add("red")
    assert python.asked == [["red>=1", "Red<2"]]


async def test_what_a_line_says_besides_stays_with_it(place: Place) -> None:
    store, python = place.open(), Meanwhile(lambda: asyncio.sleep(0))
    await store.put(KEY, b"more==1.0 # pinned\n")
    deps = Deps(store, python)
    await deps.add("more[red]")
    assert await text_in(store) == "more[red]==1.0 # pinned\n"
    await deps.add("more==2.0")
    assert await text_in(store) == "more[red]==2.0 # pinned\n"
    assert python.asked == [["more[red]==1.0"], ["more[red]==2.0"]]


async def test_who_stands_still_while_another_adds_takes_nothing_away(redis_url: str) -> None:
    one, two = RedisStore(redis_url, prefix := f"t-{uuid.uuid4().hex}"), RedisStore(redis_url, prefix)

    async def another_adds() -> None:
        with redis.Redis.from_url(redis_url) as client:
            client.delete(f"{prefix}:lock:{KEY}")  # as if this process had been stopped for longer than it lives
        await Deps(two, Meanwhile(lambda: asyncio.sleep(0))).add("blue")

    await Deps(one, Meanwhile(another_adds)).add("red")
    assert sorted(await Deps(two, Meanwhile(another_adds)).list()) == ["blue", "red"]
    await one.delete(KEY)
    await one.close()
    await two.close()


@pytest.mark.promise("between processes")
async def test_two_machines_with_one_store_share_the_list(place: Place, tmp_path: Path, wheelhouse: Path) -> None:
    one, other = [
        await subprocess_packages(SubprocessConfig(base=tmp_path / name, wheelhouse=wheelhouse)) for name in "ab"
    ]
    here, there = Deps(place.open(), one), Deps(place.open(), other)
    await here.add("blue")
    assert await there.list() == ["blue"]
    assert await there.installed() == {}
    assert (await there.sync())["installed"] == ["blue"]
    await there.remove("blue")
    assert await here.list() == []
    assert "blue" in await here.installed()


async def test_code_inside_adds_and_imports_at_once(place: Place, tmp_path: Path, wheelhouse: Path) -> None:
    executor = SubprocessExecutor(SubprocessConfig(base=tmp_path / "base", wheelhouse=wheelhouse))
    executor.handlers["deps"] = Deps(place.open(), executor).handle
    async with executor:
        code = "said = deps.add('blue')\nimport blue\nsaid['installed'], blue.VERSION, deps.list()"
        result = await executor.run(code)
        assert (result.error, result.value) == (None, (["blue"], "1.0", ["blue"]))
        assert (await executor.run("deps.remove('blue')['removed']")).value == ["blue"]
        assert (await executor.run("deps.sync()['failed']")).value == []
        assert (await executor.run("deps.add('-e .')")).error_type == "RequirementRefused"
        assert (await executor.run("deps.add()")).error_type == "TypeError"
        assert (await executor.run("deps.upgrade('blue')")).error_type == "AttributeError"


async def test_what_a_run_left_behind_when_its_time_was_up_is_whole(tmp_path: Path, wheelhouse: Path) -> None:
    packages = await subprocess_packages(SubprocessConfig(base=tmp_path, wheelhouse=wheelhouse))
    install = asyncio.create_task(packages.install(["blue"]))
    await asyncio.sleep(0)
    install.cancel()
    with pytest.raises(asyncio.CancelledError):
        await install
    await packages.give_back()
    assert await packages.installed() in ({}, {"blue": "1.0", "red": "1.0"})
    assert (await packages.install(["blue"])) in ({}, {"blue": "1.0", "red": "1.0"})
