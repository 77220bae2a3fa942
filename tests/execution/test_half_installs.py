"""An install that ends half way, by a kill or on a full disk: what was there is there, and nothing is in pieces."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackagePath
from pathlib import Path

import pytest

from carrel.errors import DependencyError, EnvironmentFailed
from carrel.execution.config import SubprocessConfig
from carrel.execution.packages import Packages, subprocess_packages
from carrel.execution.subprocess_executor import SubprocessExecutor
from tests.support.wheels import build_wheel

FILES = 600


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packages of many files, in two versions each; the second needs the first."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        for name, needs in (("red", ()), ("blue", ("red",))):
            parts = {f"{name}_parts/p{number}.py": f"VERSION = {version!r}\n" for number in range(FILES)}
            build_wheel(folder, name, version, needs=needs, files=parts)
    return folder


def in_pieces(folders: Sequence[str]) -> list[str]:
    """What is wrong with the packages in these folders."""
    wrong, known = [], set()
    for found in importlib.metadata.distributions(path=list(folders)):
        name = found.metadata["Name"] if found.files is not None else str(found.locate_file(""))
        known.add(f"{name}_parts")
        files = found.files or [PackagePath("RECORD")]
        missing = [str(file) for file in files if not Path(str(found.locate_file(file))).exists()]
        wrong += [f"{name} misses {len(missing)} files"] if missing else []
        some = Path(str(found.locate_file(f"{name}_parts/p{FILES - 1}.py")))
        if not missing and some.parent.exists() and found.version not in some.read_text():
            wrong.append(f"{name} is mixed")
    for folder in folders:
        wrong += [f"{part.name} belongs to none" for part in Path(folder).glob("*_parts") if part.name not in known]
    return wrong


def killed_half_way(seconds: float, *words: object) -> None:
    """Start the installer, and kill it so long after it has begun; its uv may go on for a moment."""
    command = [sys.executable, "-m", "tests.execution.installer", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begins\n"
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def moments(times: int) -> list[float]:
    dice = random.Random(7)
    return [dice.uniform(0, 0.25) for _ in range(times)]


@pytest.mark.parametrize("times", [6, pytest.param(50, marks=pytest.mark.slow)])
async def test_who_is_killed_while_packages_are_added_leaves_them_whole(
    tmp_path: Path, wheels: Path, times: int
) -> None:
    packages = await subprocess_packages(SubprocessConfig(base=tmp_path, wheelhouse=wheels))
    await packages.install(["red==1.0"])
    for number, seconds in enumerate(moments(times)):
        wanted = ("blue==2.0", "red==2.0") if number % 2 else ("blue==1.0", "red==1.0")
        await asyncio.to_thread(killed_half_way, seconds, tmp_path, wheels, "add", *wanted)
        assert in_pieces([str(packages.added)]) == []
        assert "red" in await packages.installed()
    assert "blue" in await packages.install(["blue==2.0", "red==2.0"]) or "blue" in await packages.installed()
    assert in_pieces([str(packages.added)]) == []
    # What an uv was still writing to goes with a later change.
    until = time.monotonic() + 60
    for version in itertools.cycle(("1.0", "2.0")):
        left = [path.name for path in packages.added.parent.glob("added.*")]
        if left == ["added.lock"]:
            break
        assert time.monotonic() < until, left
        await packages.install([f"blue=={version}"])
    await packages.give_back()


@pytest.mark.parametrize("times", [4, pytest.param(30, marks=pytest.mark.slow)])
async def test_who_is_killed_while_the_settings_packages_are_put_in_is_made_good_at_the_next_start(
    tmp_path: Path, wheels: Path, times: int
) -> None:
    for number, seconds in enumerate(moments(times)):
        version = "2.0" if number % 2 else "1.0"
        deps = [f"red=={version}", f"blue=={version}"]
        await asyncio.to_thread(killed_half_way, seconds, tmp_path, wheels, "settings", *deps)
        packages = await subprocess_packages(SubprocessConfig(base=tmp_path, wheelhouse=wheels, deps=deps))
        assert in_pieces(packages.environment.packages) == []
        assert (await packages.installed()) == {"red": version, "blue": version}
        await packages.give_back()


async def test_settings_that_cannot_be_had_cost_those_before_nothing(tmp_path: Path, wheels: Path) -> None:
    shutil.copytree(wheels, house := tmp_path / "house")
    config = SubprocessConfig(base=tmp_path, wheelhouse=house, deps=["red==1.0"])
    await subprocess_packages(config)
    with pytest.raises(EnvironmentFailed, match="nowhere"):
        await subprocess_packages(SubprocessConfig(base=tmp_path, wheelhouse=house, deps=["nowhere"]))
    for wheel in house.iterdir():
        wheel.unlink()
    assert await (await subprocess_packages(config)).installed() == {"red": "1.0"}


async def test_settings_that_go_to_another_version_and_back_have_the_one_they_name(
    tmp_path: Path, wheels: Path
) -> None:
    for number, version in enumerate(("1.0", "2.0", "1.0")):
        for place in ({"base": tmp_path}, {"venv_path": tmp_path / "mine"}):
            config = SubprocessConfig(**place, wheelhouse=wheels, deps=[f"red=={version}"])  # type: ignore[arg-type]
            assert await (await subprocess_packages(config)).installed() == {"red": version}, (number, place)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one of the packages, and not for two."""
    if os.geteuid() != 0:
        pytest.skip("making a file system of its own needs root")
    (disk := tmp_path / "disk").mkdir()
    size = f"size=16m,nr_inodes={2 * FILES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "carrel-test", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


async def test_a_full_disk_changes_nothing_and_is_named(small_disk: Path, wheels: Path) -> None:
    packages = await subprocess_packages(SubprocessConfig(base=small_disk, wheelhouse=wheels))
    await packages.install(["red==1.0"])
    for change in (["red==2.0", "blue==2.0"], ["blue==1.0"]):
        with pytest.raises(DependencyError, match="No space left on device"):
            await packages.install(change)
        assert in_pieces([str(packages.added)]) == []
        assert await packages.installed() == {"red": "1.0"}
    assert await packages.uninstall(["red"]) == ["red"]
    assert await packages.installed() == {}


async def test_a_live_session_sees_each_change_whole(tmp_path: Path, wheels: Path) -> None:
    """Where the folder is its own, and where it is one that goes with the session."""
    for base in (tmp_path, None):
        async with SubprocessExecutor(SubprocessConfig(base=base, wheelhouse=wheels, sandbox="required")) as executor:
            assert (await executor.run("import os")).error is None
            for version in ("1.0", "2.0"):
                await executor.install([f"red=={version}"])
                code = "import importlib, red\nimportlib.reload(red).VERSION, len(os.listdir(PARTS))"
                place = f"PARTS = os.path.join(os.path.dirname(__import__('red').__file__), 'red_parts')\n{code}"
                assert (await executor.run(place)).value == (version, FILES)
            await executor.uninstall(["red"])
            assert (await executor.run("importlib.reload(red)")).error_type == "ModuleNotFoundError"


async def test_a_file_system_that_cannot_link_files_does_as_well(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_link(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse_link)
    packages: Packages = await subprocess_packages(SubprocessConfig(base=tmp_path, wheelhouse=wheels))
    await packages.install(["red==1.0"])
    await packages.install(["blue==1.0"])
    assert in_pieces([str(packages.added)]) == []
    # Killed between the two renames: the folder has gone aside, and its successor is not there yet.
    packages.added.rename(packages.added.with_name("added.old-1"))
    again = await subprocess_packages(SubprocessConfig(base=tmp_path, wheelhouse=wheels))
    await again.install(["blue==1.0"])
    assert await again.installed() == {"red": "1.0", "blue": "1.0"}
    assert [left.name for left in again.added.parent.glob("added.*")] == ["added.lock"]
