"""Environments: made once however many want them, kept, and thrown away when that was asked for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from carrel.errors import ConfigurationError, DependencyError, EnvironmentFailed
from carrel.execution import environments
from carrel.execution.config import SubprocessConfig
from carrel.execution.environments import host_environment, shared_environment
from carrel.execution.packages import subprocess_packages
from carrel.execution.subprocess_executor import SubprocessExecutor
from tests.support.wheels import build_wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real package, small, from here: nothing is fetched."""
    return str(build_wheel(tmp_path_factory.mktemp("wheel"), "tiny-thing", source="ANSWER = 42\n"))


async def test_without_wishes_the_hosts_own_python_is_used() -> None:
    packages = await subprocess_packages(SubprocessConfig())
    assert packages.environment == host_environment()
    folder = packages.added
    await packages.give_back()
    assert not folder.exists()


@pytest.mark.parametrize("mode", ["off", "required"])
async def test_a_package_is_there_and_first_on_the_path(tmp_path: Path, wheel: str, mode: str) -> None:
    config = SubprocessConfig(deps=[wheel], base=tmp_path, sandbox=mode)  # type: ignore[arg-type]
    async with SubprocessExecutor(config) as executor:
        assert (await executor.run("import tiny_thing; tiny_thing.ANSWER")).value == 42
        assert (await executor.exec("python -c 'import tiny_thing; print(tiny_thing.ANSWER)'")).stdout == "42\n"
        prefix = Path((await executor.run("import sys; sys.prefix")).value)
        assert prefix.parent == tmp_path / "environments"


async def test_the_hosts_packages_are_not_there(tmp_path: Path) -> None:
    async with SubprocessExecutor(SubprocessConfig(base=tmp_path)) as executor:
        assert (await executor.run("import pydantic")).error_type == "ModuleNotFoundError"
        assert (await executor.installed()) == {}


async def test_code_cannot_change_the_environment_for_others(tmp_path: Path, wheel: str) -> None:
    config = SubprocessConfig(deps=[wheel], base=tmp_path, sandbox="required")
    async with SubprocessExecutor(config) as executor:
        result = await executor.run("import tiny_thing; open(tiny_thing.__file__, 'w').write('ANSWER = 0')")
        assert result.error_type in ("OSError", "PermissionError")


async def test_it_is_kept_and_used_again(tmp_path: Path) -> None:
    first = await shared_environment(tmp_path, None, (), "empty")
    stamp = Path(first.python).lstat().st_mtime_ns
    assert await shared_environment(tmp_path, None, (), "empty") == first
    assert Path(first.python).lstat().st_mtime_ns == stamp


async def test_one_that_was_left_half_made_is_made_again(tmp_path: Path) -> None:
    first = await shared_environment(tmp_path, None, (), "empty")
    folder = Path(first.python).parent.parent
    (folder / "carrel-ready.json").unlink()
    (folder / "bin" / "python").unlink()
    second = await shared_environment(tmp_path, None, (), "empty")
    assert Path(second.python).exists()
    assert not folder.exists()


async def test_one_of_a_moved_base_is_made_again(tmp_path: Path, wheel: str) -> None:
    async with SubprocessExecutor(SubprocessConfig(deps=[wheel], base=tmp_path / "here")) as executor:
        assert (await executor.run("import tiny_thing")).is_ok
    (tmp_path / "here").rename(tmp_path / "there")
    async with SubprocessExecutor(SubprocessConfig(deps=[wheel], base=tmp_path / "there")) as executor:
        assert (await executor.run("import tiny_thing; tiny_thing.__file__")).value.startswith(str(tmp_path / "there"))


MAKER = """
import asyncio, sys
from carrel.execution.packages import subprocess_packages
from carrel.execution.config import SubprocessConfig
print(asyncio.run(subprocess_packages(SubprocessConfig(base=sys.argv[1], deps=[sys.argv[2]]))).environment.python)
"""


async def test_two_processes_and_ten_tasks_make_it_once(tmp_path: Path, wheel: str) -> None:
    others = [
        subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path), wheel], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    config = SubprocessConfig(base=tmp_path, deps=[wheel])
    here = await asyncio.gather(*(subprocess_packages(config) for _ in range(10)))
    printed = {(await asyncio.to_thread(other.communicate, None, 60))[0].strip() for other in others}
    assert printed == {here[0].environment.python}
    assert len({packages.environment for packages in here}) == 1
    assert len(list(tmp_path.glob("environments/python-*-*/pyvenv.cfg"))) == 1
    assert await here[0].installed() == {"tiny-thing": "1.0"}


async def test_requirements_of_the_settings_are_not_installed_twice(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    once = build_wheel(tmp_path_factory.mktemp("once"), "only-once")
    (tmp_path / "needs.txt").write_text(f"# what a person wrote\n{once}\n")
    config = SubprocessConfig(deps=[str(once)], deps_file=tmp_path / "needs.txt", base=tmp_path)
    async with SubprocessExecutor(config) as executor:
        assert (await executor.run("import only_once")).is_ok
    once.unlink()
    async with SubprocessExecutor(config) as executor:
        assert (await executor.run("import only_once")).is_ok
        with pytest.raises(DependencyError, match="only-once was not added here"):
            await executor.uninstall(["only-once"])
    (tmp_path / "needs.txt").write_text(f"{once}\n")
    with pytest.raises(EnvironmentFailed, match="only_once"):
        await SubprocessExecutor(config).start()


async def test_one_that_is_not_to_be_kept_goes_with_its_session(tmp_path: Path, wheel: str) -> None:
    config = SubprocessConfig(deps=[wheel], base=tmp_path, cache_venv=False)
    async with SubprocessExecutor(config) as executor:
        prefix = (await executor.run("import sys, tiny_thing; sys.prefix")).value
        assert Path(prefix).is_dir()
    assert not Path(prefix).exists()
    assert list(tmp_path.iterdir()) == []


async def test_one_that_is_not_to_be_kept_stays_for_its_forks(wheel: str) -> None:
    executor = SubprocessExecutor(SubprocessConfig(deps=[wheel], cache_venv=False, sandbox="required"))
    prefix = (await executor.run("import sys; sys.prefix")).value
    fork = await executor.fork()
    assert (await fork.run("import tiny_thing; tiny_thing.ANSWER")).value == 42
    await executor.close()
    assert Path(prefix).exists()
    await fork.close()
    assert not Path(prefix).exists()


async def test_a_virtualenv_where_a_person_wants_it(tmp_path: Path, wheel: str) -> None:
    place = tmp_path / "mine"
    async with SubprocessExecutor(SubprocessConfig(venv_path=str(place), deps=[wheel])) as executor:
        assert (await executor.run("import sys, tiny_thing; sys.prefix")).value == str(place)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("keep me")
    with pytest.raises(ConfigurationError, match="neither empty nor a virtualenv"):
        await SubprocessExecutor(SubprocessConfig(venv_path=tmp_path / "full")).start()
    assert (tmp_path / "full" / "letter.txt").read_text() == "keep me"
    with pytest.raises(ConfigurationError, match=r"2\.7 is wanted"):
        await SubprocessExecutor(SubprocessConfig(venv_path=place, python_version="2.7")).start()


async def test_a_virtualenv_that_a_person_has_made_is_used_as_it_is(tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=60)
    (place / "note.txt").write_text("still here")
    async with SubprocessExecutor(SubprocessConfig(venv_path=place)) as executor:
        assert (await executor.run("import sys; sys.prefix")).value == str(place)
    assert (place / "note.txt").exists()


async def test_a_package_that_cannot_be_installed_is_an_error_with_the_output_of_the_installer(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-file-1.0-py3-none-any.whl")
    with pytest.raises(EnvironmentFailed, match="no-such-file"):
        await subprocess_packages(SubprocessConfig(base=tmp_path, deps=[missing]))
    executor = SubprocessExecutor(SubprocessConfig(base=tmp_path, deps=[missing]))
    assert (await executor.run("1")).error_type == "EnvironmentFailed"
    await executor.close()


async def test_a_python_that_cannot_be_installed_is_an_error_with_the_output_of_the_installer(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"2\.0"):
        await SubprocessExecutor(SubprocessConfig(python_version="2.0", base=tmp_path)).start()


async def test_a_start_that_takes_too_long_is_given_up() -> None:
    executor = SubprocessExecutor(SubprocessConfig(startup_timeout=0.0))
    result = await executor.run("1")
    assert (result.error_type, "not ready within 0 s" in (result.error or "")) == ("SpawnFailed", True)
    await executor.close()


async def test_modules_are_preloaded() -> None:
    async with SubprocessExecutor(SubprocessConfig(preload=["wave"])) as executor:
        assert (await executor.run("import sys; 'wave' in sys.modules")).value is True
    async with SubprocessExecutor() as executor:
        assert (await executor.run("import sys; 'wave' in sys.modules")).value is False


async def test_a_folder_with_programs_that_cannot_be_found_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="divided by ':'"):
        await subprocess_packages(SubprocessConfig(base=tmp_path / "a:b"))
    assert not (tmp_path / "a:b" / "environments" / "bin").exists()


async def test_packages_are_there_and_no_links_to_what_uv_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_wheel(tmp_path / "wheels", "tiny-thing")
    monkeypatch.setenv("UV_LINK_MODE", "symlink")
    config = SubprocessConfig(base=tmp_path / "base", wheelhouse=tmp_path / "wheels", sandbox="required")
    async with SubprocessExecutor(config) as executor:
        await executor.install(["tiny-thing"])
        assert (await executor.run("import tiny_thing; tiny_thing.VERSION")).value == "1.0"


async def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    """A program that says it is an old one, which few machines still have."""
    with pytest.raises(EnvironmentFailed, match=r"has Python 3\.8\.1; 3\.9 is the oldest"):
        await environments._marked(old_python(tmp_path))


def old_python(folder: Path) -> Path:
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    facts = '{"folders": [], "packages": [], "version": [3, 8, 1]}'
    python.write_text(f"#!/bin/sh\necho '{facts}'\n")
    python.chmod(0o755)
    return folder


async def test_a_base_gets_a_virtualenv_when_its_settings_want_a_package(tmp_path: Path, wheel: str) -> None:
    async with SubprocessExecutor(SubprocessConfig(base=tmp_path)) as executor:
        before = (await executor.run("import sys; sys.prefix")).value
        assert (await executor.run("import pydantic")).error_type == "ModuleNotFoundError"
        await executor.install([wheel])
        assert (await executor.run("import tiny_thing; tiny_thing.ANSWER")).value == 42
    assert list(tmp_path.rglob("pyvenv.cfg")) == []
    async with SubprocessExecutor(SubprocessConfig(base=tmp_path / "other")) as executor:
        assert (await executor.run("import sys; sys.prefix")).value == before
        assert (await executor.run("import tiny_thing")).error_type == "ModuleNotFoundError"
    (needs := tmp_path / "needs.txt").write_text(wheel)
    async with SubprocessExecutor(SubprocessConfig(base=tmp_path, deps_file=needs)) as executor:
        assert (await executor.run("import sys; sys.prefix")).value.startswith(str(tmp_path / "environments"))
        assert (await executor.run("import tiny_thing; tiny_thing.ANSWER")).value == 42


async def test_packages_are_installed_with_pip_where_there_is_no_uv(tmp_path: Path, wheel: str) -> None:
    """In a Python that has carrel and no uv, which is not on PATH either."""
    script = f"""
import asyncio, sys
sys.modules["uv"] = None
from carrel.execution.config import SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor

async def main():
    for settings in ({{"deps": [{wheel!r}]}}, {{}}):
        base = {str(tmp_path)!r} + "/" + str(len(settings))
        async with SubprocessExecutor(SubprocessConfig(base=base, **settings)) as executor:
            if not settings:
                print(await executor.install([{wheel!r}]))
            print((await executor.run("import tiny_thing; tiny_thing.ANSWER")).value)
            if not settings:
                print(await executor.uninstall(["Tiny_Thing"]), await executor.installed())
asyncio.run(main())
"""
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "CARREL_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["42", "{'tiny-thing': '1.0'}", "42", "['tiny-thing'] {}"], done.stderr
