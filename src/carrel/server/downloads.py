"""A sample's files as an archive, made once and kept beside them."""

from __future__ import annotations

import asyncio
import os
import tarfile
import tempfile
from pathlib import Path

from carrel.execution.environments import locked
from carrel.tasks.sample import Sample
from carrel.tasks.unpacking import prepared_files


async def archive_of(sample: Sample, cache: Path) -> Path:
    """A .tar.gz of what the sample's sessions begin with; FilesRefused when there is nothing to be had."""
    files = await prepared_files(sample, cache)
    archive = cache / "downloads" / f"{files.digest}.tar.gz"
    try:
        os.utime(archive)  # `prune` looks at when it was last used
    except FileNotFoundError:
        archive.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        async with locked(archive.with_suffix(".lock")):
            if not archive.is_file():
                await asyncio.to_thread(_pack, files.folder, archive)
    return archive


def _pack(folder: Path, archive: Path) -> None:
    handle, half = tempfile.mkstemp(dir=archive.parent, suffix=".half")
    try:
        with os.fdopen(handle, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz", compresslevel=5) as packed:
            for path in sorted(folder.iterdir()):
                packed.add(path, arcname=path.name, filter=_nobodys)
        os.replace(half, archive)
    except BaseException:
        os.unlink(half)
        raise


def _nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without who owns it here, and writable as files in a session are."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode |= 0o600 if not entry.isdir() else 0o700
    return entry
