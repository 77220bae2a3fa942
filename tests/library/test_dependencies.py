"""Dependencies in every store with real virtualenvs; requirements.txt, read and edited."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import DependencyError, RequirementRefused, RuntimeDepsDisabledError
from carrel.execution.config import SubprocessConfig
from carrel.execution.packages import Packages, subprocess_packages
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.library.dependencies import (
    Dependencies,
    package_name,
    parse_requirements,
    validate_requirement,
    with_requirement,
    without_requirement,
)
from carrel.storage.base import Store
from carrel.storage.redis.store import RedisStore
from tests.support.lazy_module import LazyModule
from tests.support.stores import Backend
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


async def test_add_list_and_remove(backend: Backend, python: Packages) -> None:
    store = backend.open()
    deps = Dependencies(store, python)
    assert await deps.list() == []
    added = await deps.add("red>=1")
    assert added == {"installed": ["red>=1"], "already_present": [], "failed": [], "message": ""}
    assert await deps.list() == ["red>=1"]
    assert await Dependencies(backend.open(), python).list() == ["red>=1"]
    assert (await deps.add("red"))["already_present"] == ["red"]
    assert await text_in(store) == "red>=1\n"
    removed = await deps.remove("Red")
    assert removed == {"removed": ["red"], "not_found": [], "failed": [], "message": "", "removed_from_config": True}
    assert (await deps.list(), await deps.installed()) == ([], {})
    again = await deps.remove("red")
    assert again == {"removed": [], "not_found": ["red"], "failed": [], "message": "", "removed_from_config": False}


async def test_other_lines_of_the_file_stay_as_they_are(backend: Backend, python: Packages) -> None:
    store = backend.open()
    written = "# For the reports.\r\nred<2   # the old one, on purpose\r\n\r\n# and\r\nmore\r\n"
    await store.put(KEY, written.encode())
    deps = Dependencies(store, python)
    assert (await deps.add("red"))["installed"] == ["red"]
    assert await deps.installed() == {"red": "1.0"}, "the file says which"
    assert await text_in(store) == written
    await deps.add("blue")
    assert await text_in(store) == written + "blue\r\n"
    await deps.remove("more")
    assert await text_in(store) == written.replace("more\r\n", "blue\r\n")


async def test_a_package_that_cannot_be_installed_changes_nothing(backend: Backend, python: Packages) -> None:
    store = backend.open()
    deps = Dependencies(store, python)
    await deps.add("red<2")
    before = await text_in(store), await deps.installed()
    for requirement, reason in (("broken", "nowhere-to-be-had"), ("green", "red"), ("red>=9", "red>=9")):
        report = await deps.add(requirement)
        assert (report["installed"], report["already_present"], report["failed"]) == ([], [], [requirement])
        assert reason in report["message"]
        assert (await text_in(store), await deps.installed()) == before


async def test_a_package_that_conflicts_with_another_fails(backend: Backend, python: Packages) -> None:
    deps = Dependencies(backend.open(), python)
    await deps.add("blue")
    report = await deps.add("green")
    assert report["failed"] == ["green"]
    assert "blue" in report["message"]
    assert (await deps.list(), await deps.installed()) == (["blue"], {"blue": "1.0", "red": "1.0"})
    assert (await deps.sync())["failed"] == []


async def test_a_package_that_cannot_be_installed_does_not_block_others(backend: Backend, python: Packages) -> None:
    store = backend.open()
    await store.put(KEY, b"broken\nred<2\n")
    deps = Dependencies(store, python)
    assert (await deps.add("more"))["installed"] == ["more"]
    assert (await deps.add("red"))["installed"] == ["red"]


async def test_another_version_replaces_the_first(backend: Backend, python: Packages) -> None:
    deps = Dependencies(backend.open(), python)
    await deps.add("red<2")
    assert (await deps.add("red==2.0"))["installed"] == ["red==2.0"]
    assert (await deps.list(), await deps.installed()) == (["red==2.0"], {"red": "2.0"})


async def test_sync_installs_what_is_listed_and_reports_failures(backend: Backend, python: Packages) -> None:
    store = backend.open()
    deps = Dependencies(store, python, allow_runtime=False)
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


async def test_changes_can_be_disabled(backend: Backend, python: Packages) -> None:
    store = backend.open()
    await store.put(KEY, b"red\n")
    deps = Dependencies(store, python, allow_runtime=False)
    for change in (deps.add("blue"), deps.remove("red")):
        with pytest.raises(RuntimeDepsDisabledError, match="allow_runtime_deps is off") as raised:
            await change
        assert isinstance(raised.value, PermissionError)
    assert await deps.list() == ["red"]
    assert (await deps.sync())["installed"] == ["red"]


async def test_an_invalid_requirement_changes_nothing(backend: Backend, python: Packages) -> None:
    store = backend.open()
    deps = Dependencies(store, python)
    for requirement in ("red; python_version > '3'", "--pre red", "./red", "red @ https://example.com/red.whl"):
        with pytest.raises(RequirementRefused):
            await deps.add(requirement)
    await store.put(KEY, b"\xff\xfe not text")
    with pytest.raises(RequirementRefused, match=r"requirements\.txt is not UTF-8 text"):
        await deps.add("red")
    assert await store.get(KEY) == b"\xff\xfe not text"


async def test_concurrent_additions_lose_no_line(backend: Backend, python: Packages) -> None:
    lists = [Dependencies(backend.open(), python) for _ in range(4)]
    reports = await asyncio.gather(*(deps.add(name) for deps in lists for name in ("red<2", "blue", "more")))
    assert [report["failed"] for report in reports] == [[]] * 12
    assert sorted(name for report in reports for name in report["installed"]).count("blue") == 1
    assert sorted(await lists[0].list()) == ["blue", "more", "red<2"]
    assert await text_in(backend.open()) == "".join(f"{line}\n" for line in await lists[0].list())


class InstallerWithCallback:
    """An installer that calls a function while it installs."""

    def __init__(self, callback: Callable[[], Awaitable[object]]) -> None:
        self._callback = callback
        self.requested: list[Sequence[str]] = []

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        self.requested.append(requirements)
        await self._callback()
        return dict.fromkeys(requirements, "1.0")

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        await self._callback()
        return list(names)

    async def installed(self) -> dict[str, str]:
        return {}


async def test_an_edit_by_hand_during_an_install_stays(backend: Backend) -> None:
    store = backend.open()
    deps = Dependencies(store, InstallerWithCallback(lambda: store.put(KEY, b"# mine\nblue\n")))
    await deps.add("red")
    assert await text_in(store) == "# mine\nblue\nred\n"
    assert (await deps.remove("blue"))["removed_from_config"] is True
    assert await text_in(store) == "# mine\n"


async def test_a_bare_name_is_installed_with_all_versions_of_the_file(backend: Backend) -> None:
    store, python = backend.open(), InstallerWithCallback(lambda: asyncio.sleep(0))
    await store.put(KEY, b"red>=1\nRed<2\n")
    await Dependencies(store, python).add("red")
    assert python.requested == [["red>=1", "Red<2"]]


async def test_comments_and_extras_of_a_line_stay(backend: Backend) -> None:
    store, python = backend.open(), InstallerWithCallback(lambda: asyncio.sleep(0))
    await store.put(KEY, b"more==1.0 # pinned\n")
    deps = Dependencies(store, python)
    await deps.add("more[red]")
    assert await text_in(store) == "more[red]==1.0 # pinned\n"
    await deps.add("more==2.0")
    assert await text_in(store) == "more[red]==2.0 # pinned\n"
    assert python.requested == [["more[red]==1.0"], ["more[red]==2.0"]]


async def test_an_expired_lock_loses_no_line(redis_url: str) -> None:
    one, two = RedisStore(redis_url, prefix := f"t-{uuid.uuid4().hex}"), RedisStore(redis_url, prefix)

    async def lose_the_lock() -> None:
        with redis.Redis.from_url(redis_url) as client:
            client.delete(f"{prefix}:lock:{KEY}")  # as if this process had been suspended longer than a lock lives
        await Dependencies(two, InstallerWithCallback(lambda: asyncio.sleep(0))).add("blue")

    await Dependencies(one, InstallerWithCallback(lose_the_lock)).add("red")
    assert sorted(await Dependencies(two, InstallerWithCallback(lose_the_lock)).list()) == ["blue", "red"]
    await one.delete(KEY)
    await one.close()
    await two.close()


@pytest.mark.promise("between processes")
async def test_two_machines_with_one_store_share_the_file(backend: Backend, tmp_path: Path, wheelhouse: Path) -> None:
    one, other = [
        await subprocess_packages(SubprocessConfig(base=tmp_path / name, wheelhouse=wheelhouse)) for name in "ab"
    ]
    here, there = Dependencies(backend.open(), one), Dependencies(backend.open(), other)
    await here.add("blue")
    assert await there.list() == ["blue"]
    assert await there.installed() == {}
    assert (await there.sync())["installed"] == ["blue"]
    await there.remove("blue")
    assert await here.list() == []
    assert "blue" in await here.installed()


async def test_code_adds_and_imports_at_once(backend: Backend, tmp_path: Path, wheelhouse: Path) -> None:
    executor = SubprocessExecutor(SubprocessConfig(base=tmp_path / "base", wheelhouse=wheelhouse))
    executor.handlers["deps"] = Dependencies(backend.open(), executor).handle
    async with executor:
        code = "report = deps.add('blue')\nimport blue\nreport['installed'], blue.VERSION, deps.list()"
        result = await executor.run(code)
        assert (result.error, result.value) == (None, (["blue"], "1.0", ["blue"]))
        assert (await executor.run("deps.remove('blue')['removed']")).value == ["blue"]
        assert (await executor.run("deps.sync()['failed']")).value == []
        assert (await executor.run("deps.add('-e .')")).error_type == "RequirementRefused"
        assert (await executor.run("deps.add()")).error_type == "TypeError"
        assert (await executor.run("deps.upgrade('blue')")).error_type == "AttributeError"


async def test_a_cancelled_install_is_complete_or_absent(tmp_path: Path, wheelhouse: Path) -> None:
    packages = await subprocess_packages(SubprocessConfig(base=tmp_path, wheelhouse=wheelhouse))
    install = asyncio.create_task(packages.install(["blue"]))
    await asyncio.sleep(0)
    install.cancel()
    with pytest.raises(asyncio.CancelledError):
        await install
    await packages.give_back()
    assert await packages.installed() in ({}, {"blue": "1.0", "red": "1.0"})
    assert (await packages.install(["blue"])) in ({}, {"blue": "1.0", "red": "1.0"})


# --- requirements.txt -------------------------------------------------------------------------------------------------

FILE = """# For the reports.

pandas>=2   # tables
Requests[socks] == 2.32.3

# drawing
matplotlib
"""


def test_requirements_are_read_in_order() -> None:
    assert [(line.first, line.text, line.name) for line in parse_requirements(FILE)] == [
        (2, "pandas>=2", "pandas"),
        (3, "Requests[socks] == 2.32.3", "requests"),
        (6, "matplotlib", "matplotlib"),
    ]
    assert parse_requirements("") == parse_requirements("# only a comment\n\n") == []


def test_a_requirement_may_continue_in_the_next_line() -> None:
    text = "pandas \\\n    >=2, \\\n    <3\nnumpy\n"
    assert [(line.first, line.after, line.name) for line in parse_requirements(text)] == [
        (0, 3, "pandas"),
        (3, 4, "numpy"),
    ]
    assert without_requirement(text, "pandas") == "numpy\n"
    assert with_requirement(text, "pandas==2.2") == "pandas==2.2\nnumpy\n"
    assert [line.text for line in parse_requirements("a\\\n")] == ["a\\"]


def test_invalid_lines_have_an_error_and_stay() -> None:
    text = "-r other.txt\nnumpy\nthing @ https://example.com/thing.whl\n"
    found = parse_requirements(text)
    assert [bool(line.error) for line in found] == [True, False, True]
    assert found[2].error.startswith("line 3: ")
    assert without_requirement(text, "numpy") == "-r other.txt\nthing @ https://example.com/thing.whl\n"


def test_passwords_in_addresses_are_not_shown() -> None:
    text = "--index-url https://me:s3cret@example.com/simple\nthing @ git+https://t0ken-s3cret@example.com/thing\nred\n"
    found = parse_requirements(text)
    assert "s3cret" not in str(found)
    assert found[0].text == "--index-url https://***@example.com/simple"
    assert with_requirement(text, "blue") == text + "blue\n"
    assert without_requirement(text, "red") == text.removesuffix("red\n")


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("", "the requirement is empty"),
        ("   ", "the requirement is empty"),
        ("--index-url=http://x", "options of the installer"),
        ("-e .", "options of the installer"),
        ("pandas --pre", "invalid requirement"),
        ("https://example.com/x.whl", "addresses and paths"),
        ("git+https://example.com/x", "addresses and paths"),
        ("./here", "addresses and paths"),
        ("/there/x", "addresses and paths"),
        ("~/x", "addresses and paths"),
        ("x-1.0-py3-none-any.whl", "addresses and paths"),
        ("x.tar.gz", "addresses and paths"),
        ("x.ZIP", "addresses and paths"),
        ("pandas @ https://example.com/x.whl", "addresses are not allowed"),
        ("pandas @ file:///x", "addresses are not allowed"),
        ("pandas; python_version > '3'", "conditions"),
        ("pandas\nnumpy", "control characters"),
        ("pandas\x00", "control characters"),
        ("pandas numpy", "invalid requirement 'pandas numpy'"),
        ("pandas>=", "invalid requirement"),
        ("pandas_ >= 1", "end with a letter or a digit"),
        ("pandas-", "invalid requirement"),
        ("pandas $(reboot)", "invalid requirement"),
        ("a" * 501, "longer than 500"),
        (5, "must be a str, not int"),
    ],
)
def test_invalid_requirements(requirement: str, message: str) -> None:
    with pytest.raises(RequirementRefused, match=message.replace("(", r"\(")) as raised:
        validate_requirement(requirement)
    assert isinstance(raised.value, ValueError | DependencyError)


@pytest.mark.parametrize("spelling", ["Foo.Bar_baz", "foo-bar-baz", "FOO__bar.baz>=1", " foo_bar-baz[x] "])
def test_names_are_normalized(spelling: str) -> None:
    assert package_name(spelling) == "foo-bar-baz"


def test_a_requirement_replaces_its_line_and_keeps_the_comment() -> None:
    assert with_requirement(FILE, "pandas==2.1") == FILE.replace("pandas>=2   #", "pandas==2.1   #")
    assert with_requirement(FILE, "PANDAS >=2.2").count("PANDAS >=2.2   # tables\n") == 1


def test_a_bare_name_does_not_change_the_line() -> None:
    assert with_requirement(FILE, "pandas") == with_requirement(FILE, "requests") == FILE
    assert with_requirement(FILE, "matplotlib>=3").endswith("# drawing\nmatplotlib>=3\n")


def test_a_new_requirement_is_the_last_line_with_the_files_line_end() -> None:
    assert with_requirement("", "numpy") == "numpy\n"
    assert with_requirement("a\r\nb", "numpy") == "a\r\nb\r\nnumpy\r\n"
    assert with_requirement("\ufeffpandas\n", "pandas<3") == "\ufeffpandas<3\n"
    assert with_requirement("# note", "numpy") == "# note\nnumpy\n"


def test_a_package_that_is_listed_twice() -> None:
    assert with_requirement("a>=1\nb\nA<9\n", "a==2") == "a==2\nb\n"
    assert without_requirement("a>=1\nb\nA<9\n", "a") == "b\n"


NAMES = st.sampled_from(["pandas", "numpy", "Foo.Bar", "foo-baz", "x1"])
REQUIREMENTS = st.builds(lambda name, rest: name + rest, NAMES, st.sampled_from(["", ">=1", "==2.0 ", "[x]<3"]))
LINES = st.one_of(
    REQUIREMENTS,
    st.builds(lambda requirement, note: f"{requirement} # {note}", REQUIREMENTS, st.text("ab #", max_size=5)),
    st.sampled_from(["", "   ", "# a note", "-r more.txt", "thing @ https://example.com/a.whl"]),
)
FILES = st.builds(lambda lines, end, last: end.join(lines) + last, st.lists(LINES), *[st.just("\n")] * 2)


def other_lines(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if not any(found.name == name for found in parse_requirements(line))]


@given(FILES, REQUIREMENTS)
def test_adding_keeps_other_lines(text: str, requirement: str) -> None:
    name = package_name(requirement)
    after = with_requirement(text, requirement)
    assert other_lines(after, name) == other_lines(text, name)
    assert sum(line.name == name for line in parse_requirements(after)) >= 1
    assert with_requirement(after, requirement) == after


@given(FILES, NAMES)
def test_removing_keeps_other_lines(text: str, package: str) -> None:
    name = package_name(package)
    after = without_requirement(text, name)
    assert not any(line.name == name for line in parse_requirements(after))
    assert after.splitlines() == other_lines(text, name)
