"""Packages that are added, used at once and removed while a session lives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from carrel.errors import DependencyError, ExecutorClosed
from carrel.execution.executor import Executor
from tests.execution.conftest import Start
from tests.execution.kinds import DIFFERENCES
from tests.support.wheels import build_wheel


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheelhouse")
    build_wheel(folder, "carrel-red", "1.0", source="def main(): print('red', VERSION)\n", script="main")
    build_wheel(folder, "carrel-red", "2.0", source="def main(): print('red', VERSION)\n", script="main")
    build_wheel(folder, "carrel-blue", "1.0", needs=("carrel-red<2",))
    build_wheel(folder, "carrel-odd.name_x", "1.0", extras={"red": "carrel-red"})
    build_wheel(folder, "carrel-broken", "1.0", needs=("carrel-nowhere>=3",))
    return folder


@pytest.fixture(params=["of a base", "without a base"])
def place(request: pytest.FixtureRequest, tmp_path: Path, wheelhouse: Path) -> dict[str, Path]:
    return {"wheelhouse": wheelhouse, **({"base": tmp_path} if request.param == "of a base" else {})}


async def value_of(executor: Executor, code: str) -> object:
    result = await executor.run(code)
    assert result.error is None
    return result.value


RED = "import importlib, sys; sys.modules.pop('carrel_red', None); import carrel_red; carrel_red.VERSION"


async def test_a_package_is_importable_at_once_and_gone_when_it_is_removed(
    start: Start, place: dict[str, Path]
) -> None:
    executor = start(**place)
    assert {"deps_install", "deps_uninstall"} <= executor.supported_capabilities()
    assert (await executor.run("x = 5\nimport carrel_red")).error_type == "ModuleNotFoundError"
    assert await executor.install(["carrel-red<2"]) == {"carrel-red": "1.0"}
    assert await value_of(executor, RED) == "1.0"
    assert await value_of(executor, "x") == 5
    assert (await executor.installed())["carrel-red"] == "1.0"
    assert await executor.install(["carrel-red"]) == {}
    assert await executor.install(["carrel-red>=2"]) == {"carrel-red": "2.0"}
    assert await value_of(executor, RED) == "2.0"
    assert await executor.uninstall(["carrel_RED", "carrel-blue"]) == ["carrel-red"]
    assert (await executor.run(RED)).error_type == "ModuleNotFoundError"
    assert "carrel-red" not in await executor.installed()


async def test_what_a_package_needs_comes_with_it(start: Start, place: dict[str, Path]) -> None:
    executor = start(**place)
    assert await executor.install(["carrel-blue"]) == {"carrel-blue": "1.0", "carrel-red": "1.0"}
    changed = await executor.install(["Carrel_Odd-Name.X[red]"])
    assert changed == {"carrel-odd-name-x": "1.0"}
    assert await value_of(executor, "import carrel_blue, carrel_red; carrel_red.VERSION") == "1.0"


async def test_a_module_that_is_called_like_one_of_pythons_hides_it_from_no_command(
    start: Start, tmp_path: Path
) -> None:
    broken = "raise ImportError('not the one you want')\n"
    build_wheel(tmp_path / "wheels", "carrel-hiding", files={"enum.py": broken, "pathlib.py": broken})
    executor = start(base=tmp_path / "base", wheelhouse=tmp_path / "wheels")
    await executor.install(["carrel-hiding"])
    result = await executor.exec("python3 -c 'import enum, pathlib, carrel_hiding; print(carrel_hiding.VERSION)'")
    assert (result.stdout, result.stderr) == ("1.0\n", "")


async def test_constraints_bound_what_is_chosen(start: Start, place: dict[str, Path]) -> None:
    executor = start(**place)
    assert await executor.install(["carrel-red"], ["carrel-red<2", "carrel-blue"]) == {"carrel-red": "1.0"}
    with pytest.raises(DependencyError, match="carrel-red"):
        await executor.install(["carrel-red>=2"], ["carrel-red<2"])


async def test_a_failed_install_changes_nothing_and_shows_the_output_of_the_installer(
    start: Start, place: dict[str, Path]
) -> None:
    executor = start(**place)
    await executor.install(["carrel-red<2"])
    before = await executor.installed()
    with pytest.raises(DependencyError, match="carrel-nowhere"):
        await executor.install(["carrel-broken", "carrel-red>=2"])
    assert await executor.installed() == before
    assert await value_of(executor, RED) == "1.0"


async def test_commands_have_it_too(start: Start, place: dict[str, Path]) -> None:
    executor = start(**place)
    await executor.start()
    await executor.install(["carrel-red"])
    assert (await executor.exec("python -c 'import carrel_red; print(carrel_red.VERSION)'")).stdout == "2.0\n"
    assert (await executor.exec("carrel-red")).stdout == "red 2.0\n"


async def test_a_handler_may_install_for_the_run_that_called_it(start: Start, place: dict[str, Path]) -> None:
    async def add(name: str, args: list[str], kwargs: dict[str, object]) -> object:
        return await executor.install(args)

    executor = start(handlers={"add": add}, **place)
    code = "try:\n    import carrel_blue\nexcept ImportError:\n    add('carrel-blue')\nimport carrel_blue\n"
    assert await value_of(executor, code + "carrel_blue.VERSION") == "1.0"


async def test_twice_at_once_is_once(start: Start, place: dict[str, Path]) -> None:
    executor = start(**place)
    done = await asyncio.gather(*(executor.install(["carrel-red"]) for _ in range(5)))
    assert sorted(map(len, done)) == [0, 0, 0, 0, 1]


async def test_packages_of_a_base_are_there_for_its_next_session_and_for_no_other(
    start: Start, executor_kind: str, tmp_path: Path, wheelhouse: Path
) -> None:
    one = start(base=tmp_path / "one", wheelhouse=wheelhouse)
    await one.install(["carrel-red"])
    await one.close()
    again, other = start(base=str(tmp_path / "one"), wheelhouse=wheelhouse), start(base=tmp_path / "two")
    assert (await other.run(RED)).error_type == "ModuleNotFoundError"
    assert await value_of(again, RED) == "2.0"
    if (executor_kind, "packages of its own") not in DIFFERENCES:
        assert (await other.run(RED)).error_type == "ModuleNotFoundError"


async def test_requirements_of_the_settings_are_there_from_the_start(
    start: Start, tmp_path: Path, wheelhouse: Path
) -> None:
    (tmp_path / "needs.txt").write_text("# by hand\ncarrel-red<2\n")
    settings = {"deps": ["carrel-blue"], "deps_file": str(tmp_path / "needs.txt"), "wheelhouse": str(wheelhouse)}
    executor = start(base=tmp_path, **settings)
    assert await value_of(executor, "import carrel_blue\n" + RED) == "1.0"


async def test_packages_may_be_fixed(start: Start, tmp_path: Path) -> None:
    executor = start(base=tmp_path, allow_runtime_deps=False)
    assert not {"deps_install", "deps_uninstall"} & executor.supported_capabilities()


async def test_what_a_shared_python_has_is_there_already_and_is_not_removed(start: Start, wheelhouse: Path) -> None:
    executor = start(wheelhouse=wheelhouse)
    assert "pytest" in await executor.installed()
    assert await executor.install(["pytest>=8"]) == {}
    with pytest.raises(DependencyError, match="pytest was not added here"):
        await executor.uninstall(["pytest"])


async def test_a_closed_one_installs_nothing(start: Start, place: dict[str, Path]) -> None:
    executor = start(**place)
    await executor.install(["carrel-red"])
    await executor.close()
    with pytest.raises(ExecutorClosed):
        await executor.install(["carrel-blue"])
