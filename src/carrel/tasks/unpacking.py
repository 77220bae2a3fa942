"""A sample's files, unpacked once into a cache that all its sessions share through the overlay."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from carrel.errors import CarrelError, FilesRefused, StorageWriteError
from carrel.execution import temp_dirs
from carrel.execution.environments import locked
from carrel.tasks.archives import unpack_tar
from carrel.tasks.content import LEFT_OUT, Source, digest_of, looked_at
from carrel.tasks.git_past import GitReceipt, bundled_past, without_future
from carrel.tasks.holding import Hold
from carrel.tasks.sample import Sample
from carrel.tasks.tree_rules import Budget, every_entry, kind_of, refuse_unfit

LAYOUT = 1
"""Of the cache; another number makes everything anew."""
TREE, RECEIPT = "tree", "receipt.json"


class Receipt(BaseModel):
    """What a sample's files were made from, and what is no longer in them."""

    source: Literal["none", "folder", "archive", "bundle"]
    digest: str
    """Of the source as it was."""
    files: int
    bytes: int
    git: GitReceipt | None = None
    """None where the files have no git history."""


@dataclass(frozen=True)
class Files:
    """A folder that nobody writes to: what a session changes is kept apart by its overlay."""

    folder: Path
    receipt: Receipt
    digest: str
    """Of what is in the folder: the source and the base commit. The same files of two samples have the same one."""
    hold: Hold | None = field(default=None, compare=False)
    """Keeps the folder in the cache while this is there."""


async def prepared_files(sample: Sample, cache: Path) -> Files:
    """The sample's files as a session begins with them, made by the first who asks, in any process.

    FilesRefused says what is wrong with the source; StorageWriteError that there is no room. Either way, and when it
    is killed half way, nothing is left that could be taken for the files."""
    cache = cache.absolute()
    source = looked_at(sample.files.absolute() if sample.files is not None else None)
    if sample._known_content is None or sample._known_content[0] != source.path:
        sample._known_content = (source.path, await asyncio.to_thread(digest_of, source, cache))
    of_source = sample._known_content[1]
    base = sample.base_commit if source.kind != "none" else ""
    digest = hashlib.sha256(f"{LAYOUT}\0{source.kind}\0{of_source}\0{base}".encode()).hexdigest()[:32]
    folder = cache / "files" / digest
    hold = Hold(folder)
    try:
        found = _ready(folder, digest)
        if found is None:
            async with locked(folder.with_suffix(".lock")):
                found = _ready(folder, digest)
                if found is None:
                    await _made(source, of_source, base, folder)
                    found = _ready(folder, digest)
        if found is None:
            raise StorageWriteError(f"{folder} was removed while it was being made")
    except BaseException:
        hold.release()
        raise
    return replace(found, hold=hold)


def _ready(folder: Path, digest: str) -> Files | None:
    try:
        receipt = Receipt.model_validate_json((folder / RECEIPT).read_bytes())
    except (OSError, ValidationError):
        return None
    return Files(folder / TREE, receipt, digest)


async def _made(source: Source, of_source: str, base_commit: str, folder: Path) -> None:
    """In a thread, which is waited for also by one who is cancelled: the lock must outlast it."""
    budget = (
        Budget.for_packed(source.path) if source.path and source.kind != "folder" else Budget(source.path or folder)
    )
    work = asyncio.ensure_future(asyncio.to_thread(_make, source, of_source, base_commit, folder, budget))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        budget.given_up.set()
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):  # Asked again, it still has to wait.
                await asyncio.wait([work])
        work.exception()
        raise


def _make(source: Source, of_source: str, base_commit: str, folder: Path, budget: Budget) -> None:
    """Made beside its place and moved there whole; what a killed process left beside it is removed first."""
    making = folder.with_suffix(".making")
    temp_dirs.remove(making)
    tree, room = making / TREE, making / "room"
    try:
        tree.mkdir(parents=True)
        room.mkdir()
        bundled = None
        if source.path is not None and source.kind == "folder":
            _copy(source, tree, budget)
        elif source.path is not None and source.kind == "archive":
            unpack_tar(source.path, tree, budget)
        elif source.path is not None:
            bundled = bundled_past(source.path, room, budget)
        if digest_of(source, folder.parent.parent) != of_source:
            raise FilesRefused(f"{budget.what} was changed after it was first looked at; load the dataset again")
        refuse_unfit(tree, budget.what)
        git = without_future(tree, base_commit, room, budget, bundled)
        refuse_unfit(tree, budget.what)
        temp_dirs.remove(room)
        receipt = Receipt(source=source.kind, digest=of_source, files=0, bytes=0, git=git)
        for entry in every_entry(tree):
            about = entry.stat(follow_symlinks=False)
            receipt.files += not stat.S_ISDIR(about.st_mode)
            receipt.bytes += about.st_size if stat.S_ISREG(about.st_mode) else 0
        (making / RECEIPT).write_text(receipt.model_dump_json(), encoding="utf-8")
        temp_dirs.remove(folder)  # Without a receipt that can be read it is of no use to anybody.
        making.rename(folder)
    except CarrelError:
        raise
    except OSError as problem:
        raise StorageWriteError(f"{budget.what} could not be unpacked to {folder.parent}: {problem}") from problem
    finally:
        temp_dirs.remove(making)


def _copy(source: Source, tree: Path, budget: Budget) -> None:
    """A folder of the user's; links as links."""
    assert source.path is not None
    for entry in every_entry(source.path, LEFT_OUT):
        about = entry.stat(follow_symlinks=False)
        to = tree / os.path.relpath(entry.path, source.path)
        budget.add(files=1, data=about.st_size if stat.S_ISREG(about.st_mode) else 0)
        if stat.S_ISLNK(about.st_mode):
            os.symlink(os.readlink(entry.path), to)
        elif stat.S_ISDIR(about.st_mode):
            to.mkdir()
        elif stat.S_ISREG(about.st_mode):
            shutil.copyfile(entry.path, to, follow_symlinks=False)
            to.chmod(0o755 if about.st_mode & 0o111 else 0o644)
            os.utime(to, ns=(about.st_atime_ns, about.st_mtime_ns))
        else:
            raise FilesRefused(f"{budget.what}: {entry.name} is {kind_of(about.st_mode)}, and no file or folder")
