"""A folder that is changed as a whole: in a copy, which takes its place when it is done."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from carrel.errors import EnvironmentFailed
from carrel.execution import scratch

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


@asynccontextmanager
async def changing(folder: Path, *, makes_room: bool = False) -> AsyncIterator[Path]:
    """The copy to work on, for whoever holds the folder's lock; EnvironmentFailed when there is no room for it.

    What `makes_room` gets the folder itself where there is none: else nothing could be removed from a full disk.
    Files are replaced and never written to: the two share them. When this fails, or its process is killed at any
    moment, the folder is as it was; what is left of a copy goes with the next one."""
    copy = folder.with_name(f"{folder.name}.new-{uuid.uuid4().hex}")
    try:
        try:
            await asyncio.to_thread(_begin, folder, copy)
        except OSError as problem:
            if not makes_room or problem.errno not in _NO_ROOM:
                raise
            await asyncio.to_thread(_remove, copy)
            yield folder
        else:
            yield copy
            await asyncio.to_thread(_put_in_place, copy, folder)
    except OSError as problem:
        raise EnvironmentFailed(f"{folder} could not be changed: {problem.strerror or problem}") from None
    finally:
        await asyncio.to_thread(_remove, copy)


def _begin(folder: Path, copy: Path) -> None:
    before = sorted(folder.parent.glob(f"{folder.name}.old-*"))
    if before and (not folder.exists() or not any(folder.iterdir())):
        with suppress(FileNotFoundError):
            folder.rmdir()
        before.pop().rename(folder)  # a process was killed between the two steps of `_put_in_place`
    for left in (*before, *folder.parent.glob(f"{folder.name}.new-*")):
        _remove(left)
    _link(str(folder), str(copy))


def _link(folder: str, copy: str) -> None:
    os.mkdir(copy)
    with os.scandir(folder) as entries:
        for entry in entries:
            there = os.path.join(copy, entry.name)
            if entry.is_dir(follow_symlinks=False):
                _link(entry.path, there)
                continue
            try:
                os.link(entry.path, there, follow_symlinks=False)
            except OSError as problem:
                if problem.errno not in _NO_LINKS:
                    raise
                shutil.copy2(entry.path, there, follow_symlinks=False)


def _put_in_place(copy: Path, folder: Path) -> None:
    # A process killed between the two steps leaves the old folder, which `_begin` then puts back.
    old = folder.with_name(f"{folder.name}.old-{copy.name[-32:]}")
    folder.rename(old)
    copy.rename(folder)
    _remove(old)


def _remove(folder: Path) -> None:
    # Whoever was killed may have left an uv that still writes there: then the next one removes the rest.
    with suppress(OSError):
        scratch.remove(folder)
