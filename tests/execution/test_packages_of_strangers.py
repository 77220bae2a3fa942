"""What a package of code's own choice may do: run inside, and nothing on the host."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import DependencyError, EnvironmentFailed
from carrel.execution.config import SubprocessConfig
from carrel.execution.environments import output
from carrel.execution.subprocess_executor import SubprocessExecutor
from tests.support.stores import until
from tests.support.web_server import Answer, WebServer
from tests.support.wheels import build_wheel


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Where a package would leave a word, if it ran where this folder is seen."""
    return tmp_path / "it-ran-on-the-host"


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def write_source(folder: Path, setup: str) -> None:
    """A package that must be built, and what runs then."""
    files = {
        "setup.py": setup,
        "PKG-INFO": "Metadata-Version: 2.1\nName: from-source\nVersion: 1.0\n",
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'setup'\nbackend-path = ['.']\n",
    }
    with tarfile.open(folder / "from_source-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"from_source-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


async def test_what_it_wants_run_when_python_starts_runs_inside_only(tmp_path: Path, trace: Path) -> None:
    word = f"open({str(trace)!r}, 'w').write('here')"
    eager = f"import builtins; builtins.eager = True\nimport os; {word}\n"
    build_wheel(tmp_path / "wheels", "eager", files={"eager.pth": eager, "sitecustomize.py": word})
    config = SubprocessConfig(base=tmp_path / "base", wheelhouse=tmp_path / "wheels", sandbox="required")
    async with SubprocessExecutor(config) as executor:
        assert await executor.install(["eager"]) == {"eager": "1.0"}
    # Another preload list has another zygote: one that starts when the package is there.
    late = SubprocessConfig(**{**vars(config), "preload": ["wave"]})
    async with SubprocessExecutor(late) as executor:
        assert (await executor.run("eager, __import__('eager').VERSION")).error is None
        assert await executor.uninstall(["eager"]) == ["eager"]
    assert not trace.exists()
    # What the settings name is the author's own choice, and shows that it would have run.
    chosen = {**vars(config), "base": tmp_path / "other", "deps": ["eager"]}
    async with SubprocessExecutor(SubprocessConfig(**chosen)):
        assert trace.exists()


@pytest.mark.parametrize("mode", ["off", "required"])
async def test_modules_that_are_called_like_pythons_own_hide_none_of_them(tmp_path: Path, mode: str) -> None:
    broken = "raise ImportError('not the one you want')\n"
    names = ("enum.py", "pathlib.py", "asyncio/__init__.py", "encodings/__init__.py", "site.py", "carrel/__init__.py")
    build_wheel(tmp_path / "wheels", "pathlib", files=dict.fromkeys(names, broken))
    build_wheel(tmp_path / "wheels", "customizing", files={"sitecustomize.py": "import builtins; builtins.word = 5\n"})
    settings: dict[str, Any] = {"base": tmp_path / "base", "wheelhouse": tmp_path / "wheels", "sandbox": mode}
    async with SubprocessExecutor(SubprocessConfig(**settings)) as executor:
        await executor.install(["pathlib", "customizing"])
        command = "import asyncio, enum, pathlib, customizing; print(customizing.VERSION, word)"
        for _ in range(2):
            assert (await executor.run("import asyncio, enum, pathlib; pathlib.Path('/').name")).value == ""
            result = await executor.exec(f"python -c '{command}'")
            assert (result.stdout, result.stderr) == ("1.0 5\n", "")
            await executor.reset()
        assert "carrel" in (await executor.exec("python -c 'import carrel'")).stderr, "only what is Python's own"


async def test_one_that_wants_to_end_python_when_it_starts_does_not_cost_the_session(tmp_path: Path) -> None:
    build_wheel(tmp_path / "wheels", "ending", files={"ending.pth": "import sys; sys.exit(3)\n"})
    config = SubprocessConfig(base=tmp_path / "base", wheelhouse=tmp_path / "wheels")
    async with SubprocessExecutor(config) as executor:
        await executor.install(["ending"])
    async with SubprocessExecutor(config) as executor:
        assert (await executor.run("import ending; ending.VERSION")).value == "1.0"
        result = await executor.exec("python -c 'import ending; print(ending.VERSION)'")
        assert result.stdout == "1.0\n"
        assert "wanted to end Python" in result.stderr


async def test_it_is_not_built_from_source_unless_that_is_allowed(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "wheels").mkdir()
    write_source(tmp_path / "wheels", f"open({str(trace)!r}, 'w').write('here')\nraise SystemExit('built')")
    settings: dict[str, Any] = {"base": tmp_path / "base", "wheelhouse": tmp_path / "wheels"}
    executor = SubprocessExecutor(SubprocessConfig(**settings))
    with pytest.raises(DependencyError, match="from-source"):
        await executor.install(["from-source"])
    assert not trace.exists()
    await executor.close()
    executor = SubprocessExecutor(SubprocessConfig(**settings, allow_builds=True))
    with pytest.raises(DependencyError, match="built"):
        await executor.install(["from-source"])
    assert trace.exists()
    await executor.close()


async def test_a_build_that_hangs_ends_with_the_session_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    began = tmp_path / "began"
    backend = f"import os, time\nopen({str(began)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    write_source(tmp_path / "wheels", backend)
    executor = SubprocessExecutor(
        SubprocessConfig(base=tmp_path / "base", wheelhouse=tmp_path / "wheels", allow_builds=True, sandbox="off")
    )
    installing = asyncio.create_task(executor.install(["from-source"]))
    await until(lambda: asyncio.to_thread(lambda: began.exists() and began.read_text() != ""), True)
    installing.cancel()
    await executor.close()
    await asyncio.wait([installing])
    await until(lambda: asyncio.to_thread(lives, int(began.read_text())), False)
    assert [left.name for left in (tmp_path / "base").glob("environments/*/added.new-*")] == []


async def test_one_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(EnvironmentFailed, match=r"sleep did not end within 0\.01 minutes"):
        await output(["sleep", "1000"], longest=0.6)


async def test_the_source_is_set_by_the_hosts_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, other = WebServer(lambda request: Answer("", 404)), WebServer(lambda request: Answer("", 404))
    # Code may have written it, where the host's folder is a workspace that it can change.
    (tmp_path / "uv.toml").write_text(f'cache-dir = "{tmp_path}/planted"\nextra-index-url = ["{other.url}/simple"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"{index.url}/simple")
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    executor = SubprocessExecutor(SubprocessConfig(base="base", sandbox="off"))
    try:
        with pytest.raises(DependencyError, match="uv pip install failed: "):
            await executor.install(["nowhere-to-be-had"])
    finally:
        await executor.close()
        index.close()
        other.close()
    assert [request.path for request in index.requests] == ["/simple/nowhere-to-be-had/"]
    assert other.requests == []
    assert not (tmp_path / "planted").exists()


async def test_paths_that_the_author_names_are_those_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = build_wheel(tmp_path / "wheels", "own-thing").name
    monkeypatch.chdir(tmp_path)
    either: list[dict[str, Any]] = [{"base": "base"}, {"shared_in": "shared"}]
    for settings in either:
        config = SubprocessConfig(deps=[f"wheels/{name}"], sandbox="off", **settings)
        async with SubprocessExecutor(config) as executor:
            assert (await executor.run("import own_thing; own_thing.VERSION")).value == "1.0"
