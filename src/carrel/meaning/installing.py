"""Brings a model's weights into carrel's own folder: its packages alone, without the gigabytes they ask for."""

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from carrel.errors import EnvironmentFailed
from carrel.meaning import minilm, mpnet

MINILM = {
    f"{minilm.MODULE}/model/model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    f"{minilm.MODULE}/model/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
MPNET = {
    "model.safetensors": "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
    "tokenizer.json": "b8be2c30ba5dd723a6d5ee26d013da103d5408d92ddcb23747622f9e48f1d842",
}
"""SHA-256 of the two files that are read; the first is that of the weights as their authors published them."""

Uv = Callable[..., Awaitable[None]]
"""Runs uv with these words, and raises `EnvironmentFailed` with what it said."""


async def install_minilm(folder: Path, uv: Uv, digests: Mapping[str, str] = MINILM) -> None:
    """Make `folder` hold the package; all of it or nothing, however many try at once.

    Nothing of the package is ever run: it is no dependency, is not built here, and its code is not imported."""
    await _install(folder, uv, [minilm.REQUIREMENT], digests)


async def install_mpnet(folder: Path, uv: Uv, digests: Mapping[str, str] = MPNET) -> None:
    """The same for the larger one, whose weights are an archive in several packages."""
    await _install(folder, uv, [f"{part}=={mpnet.VERSION}" for part in mpnet.PARTS], digests, _put_together)


async def _install(
    folder: Path,
    uv: Uv,
    packages: Sequence[str],
    digests: Mapping[str, str],
    then: Callable[[Path, Mapping[str, str]], None] | None = None,
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        # What is kept here is not kept a second time among what uv has fetched before.
        bare = ("--no-deps", "--no-cache", "--only-binary", ":all:")
        await uv("pip", "install", "--quiet", *bare, "--target", str(fresh), *packages)
        # Its command, and what uv leaves of its own.
        shutil.rmtree(fresh / "bin", ignore_errors=True)
        (fresh / ".lock").unlink(missing_ok=True)
        if then is not None:
            then(fresh, digests)
        _check(fresh, digests, packages[0])
        _put_in_place(fresh, folder)
    except OSError as problem:
        raise EnvironmentFailed(
            f"{packages[0]} could not be put into {folder}: {problem}; nothing changed"
        ) from problem
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def remove_model(folder: Path) -> bool:
    """Take it away again, with what was left of an attempt that was killed; False when there was nothing."""
    there = [path for path in (folder, *folder.parent.glob(f"{folder.name}-*")) if path.is_dir()]
    for path in there:
        shutil.rmtree(path, ignore_errors=path != folder)
    return bool(there)


def _put_together(fresh: Path, wanted: Mapping[str, str]) -> None:
    """The wanted files out of the archive whose pieces the packages have; the packages go."""
    packages = list(fresh.iterdir())
    pieces = sorted(fresh.glob(f"*/input/{mpnet.PACKAGE}.zip.*"), key=lambda piece: piece.suffix)
    whole = fresh / f"{mpnet.PACKAGE}.zip"
    with open(whole, "wb") as archive:
        for piece in pieces:
            with open(piece, "rb") as file:
                shutil.copyfileobj(file, archive, 1024 * 1024)
            piece.unlink()
    try:
        with zipfile.ZipFile(whole) as archived:
            for name in wanted:
                with archived.open(f"{mpnet.PACKAGE}/{name}") as file, open(fresh / name, "wb") as out:
                    shutil.copyfileobj(file, out, 1024 * 1024)
    except (zipfile.BadZipFile, KeyError):
        pass  # what is missing now is told by the check
    for path in (whole, *packages):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check(folder: Path, digests: Mapping[str, str], package: str) -> None:
    for name, expected in digests.items():
        try:
            with open(folder / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            found = "missing"
        if found != expected:
            raise EnvironmentFailed(
                f"{package}: {name} is not the file it should be (sha256 {found}); nothing was installed. "
                "See where your package index takes it from."
            )


def _put_in_place(fresh: Path, folder: Path) -> None:
    try:
        os.rename(fresh, folder)
    except OSError:
        # Something stands there: an older one, or that of somebody who was quicker. Both are the same files.
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(fresh, folder)
