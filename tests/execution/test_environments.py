"""Environments: made once however many want them, kept, and thrown away when that was asked for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from carrel.errors import EnvironmentFailed
from carrel.execution.environments import environment, host_environment
from carrel.execution.settings import SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real package, small, from here: nothing is fetched."""
    path = tmp_path_factory.mktemp("wheel") / "tiny_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tiny_thing.py", "ANSWER = 42\n")
        info = "tiny_thing-1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return str(path)


async def test_without_wishes_the_hosts_own_python_is_used(tmp_path: Path) -> None:
    assert await environment(tmp_path, None, (), cache=True) == host_environment()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["off", "required"])
async def test_a_package_is_there_and_first_on_the_path(tmp_path: Path, wheel: str, mode: str) -> None:
    config = SubprocessConfig(deps=(wheel,), base=tmp_path, sandbox=mode)  # type: ignore[arg-type]
    async with SubprocessExecutor(config) as executor:
        assert (await executor.run("import tiny_thing; tiny_thing.ANSWER")).value == 42
        assert (await executor.exec("python -c 'import tiny_thing; print(tiny_thing.ANSWER)'")).stdout == "42\n"
        made = await environment(tmp_path, None, (wheel,), cache=True)
        assert (await executor.run("import sys; sys.prefix")).value == str(Path(made.python).parent.parent)


async def test_code_cannot_change_the_environment_for_others(tmp_path: Path, wheel: str) -> None:
    config = SubprocessConfig(deps=(wheel,), base=tmp_path, sandbox="required")
    async with SubprocessExecutor(config) as executor:
        result = await executor.run("import tiny_thing; open(tiny_thing.__file__, 'w').write('ANSWER = 0')")
        assert result.error_type in ("OSError", "PermissionError")


async def test_it_is_kept_and_used_again(tmp_path: Path, wheel: str) -> None:
    first = await environment(tmp_path, None, (wheel,), cache=True)
    stamp = Path(first.python).lstat().st_mtime_ns
    assert await environment(tmp_path, None, (wheel,), cache=True) == first
    assert Path(first.python).lstat().st_mtime_ns == stamp


async def test_one_that_was_left_half_made_is_made_again(tmp_path: Path, wheel: str) -> None:
    first = await environment(tmp_path, None, (wheel,), cache=True)
    folder = Path(first.python).parent.parent
    (folder / "carrel-ready.json").unlink()
    (folder / "bin" / "python").unlink()
    assert await environment(tmp_path, None, (wheel,), cache=True) == first
    assert Path(first.python).exists()


MAKER = """
import asyncio, sys
from pathlib import Path
from carrel.execution.environments import environment
print(asyncio.run(environment(Path(sys.argv[1]), None, (sys.argv[2],), cache=True)).python)
"""


async def test_two_processes_and_ten_tasks_make_it_once(tmp_path: Path, wheel: str) -> None:
    others = [
        subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path), wheel], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    here = await asyncio.gather(*(environment(tmp_path, None, (wheel,), cache=True) for _ in range(10)))
    said = {(await asyncio.to_thread(other.communicate, None, 60))[0].strip() for other in others}
    assert said == {here[0].python}
    assert len(set(here)) == 1
    folders = [path for path in (tmp_path / "environments").iterdir() if path.is_dir()]
    assert len(folders) == 1


async def test_one_that_is_not_to_be_kept_goes_with_its_session(tmp_path: Path, wheel: str) -> None:
    config = SubprocessConfig(deps=(wheel,), base=tmp_path, cache_venv=False)
    async with SubprocessExecutor(config) as executor:
        prefix = (await executor.run("import sys, tiny_thing; sys.prefix")).value
        assert Path(prefix).is_dir()
    assert not Path(prefix).exists()
    assert list(tmp_path.iterdir()) == []


async def test_a_package_that_cannot_be_had_is_told_with_what_the_installer_said(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="no-such-file"):
        await environment(tmp_path, None, (str(tmp_path / "no-such-file-1.0-py3-none-any.whl"),), cache=True)
    with pytest.raises(EnvironmentFailed, match=r"2\.0"):
        await SubprocessExecutor(SubprocessConfig(python_version="2.0", base=tmp_path)).start()


async def test_modules_are_preloaded() -> None:
    async with SubprocessExecutor(SubprocessConfig(preload=("wave",))) as executor:
        assert (await executor.run("import sys; 'wave' in sys.modules")).value is True
    async with SubprocessExecutor() as executor:
        assert (await executor.run("import sys; 'wave' in sys.modules")).value is False
