"""A fork's open files, which it shares with the process that it came from, opened again for itself alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from .fork_checks import holders

_FLAGS_OF_NEW_FILES = os.O_CREAT | os.O_EXCL | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
_COPY_SIZE = 1 << 20


class OpenFile(NamedTuple):
    """A file or folder behind a descriptor."""

    path: str | None
    """None for one that was deleted."""
    inode: tuple[int, int]


def files_of(opened: dict[int, str], own: set[int]) -> dict[int, OpenFile]:
    """The files and folders that code has open, by descriptor."""
    found: dict[int, OpenFile] = {}
    for fd in opened.keys() - own:
        with contextlib.suppress(OSError):  # closed by now: that of the listing itself
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
                path = opened[fd] if _leads_to(opened[fd], status) else None
                found[fd] = OpenFile(path, (status.st_dev, status.st_ino))
    return found


def _leads_to(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), status)
    except (OSError, ValueError):
        return False


def reopen(files: dict[int, OpenFile]) -> None:
    """In the fork: open the files again at their paths, and copy those that were deleted; OSError says what failed.

    The process that it was forked from must stand still meanwhile."""
    copies: dict[tuple[int, int], int] = {}
    for fd, file in files.items():
        try:
            _reopen(fd, file, copies)
        except OSError as problem:
            what = f"{file.path or 'a deleted file'} cannot be opened again: {problem}"
            raise OSError(problem.errno, f"{what}{holders([fd])}") from None


def _reopen(fd: int, file: OpenFile, copies: dict[tuple[int, int], int]) -> None:
    try:
        status = os.fstat(fd)
        flags, inherited = fcntl.fcntl(fd, fcntl.F_GETFL), os.get_inheritable(fd)
    except OSError as problem:
        if problem.errno == errno.EBADF:
            return  # a hook of os.register_at_fork has closed it
        raise
    if (status.st_dev, status.st_ino) != file.inode:
        return  # such a hook has closed it, and opened another file
    position = 0
    with contextlib.suppress(OSError):
        position = os.lseek(fd, 0, os.SEEK_CUR)
    if file.path is not None:
        new = os.open(file.path, (flags & ~_FLAGS_OF_NEW_FILES) | os.O_CLOEXEC)
    else:
        # Several descriptors of one deleted file share one copy.
        copy = copies.get(file.inode)
        new = os.open(f"/proc/self/fd/{copy}", os.O_RDWR | os.O_CLOEXEC) if copy is not None else _copy(fd, status)
        fcntl.fcntl(new, fcntl.F_SETFL, flags & (os.O_APPEND | os.O_NONBLOCK))
        copies[file.inode] = fd
    try:
        if position:
            os.lseek(new, position, os.SEEK_SET)
        os.dup2(new, fd, inheritable=inherited)
    finally:
        os.close(new)


def _copy(fd: int, status: os.stat_result) -> int:
    """A copy in memory of a deleted file."""
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOENT, "the folder was deleted")
    source, new = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), -1
    try:
        new = os.memfd_create("copy")
        os.ftruncate(new, status.st_size)
        for start, end in _data_ranges(source):
            for position in range(start, end, _COPY_SIZE):
                os.pwrite(new, os.pread(source, min(_COPY_SIZE, end - position), position), position)
        os.fchmod(new, stat.S_IMODE(status.st_mode))
    except BaseException:
        if new >= 0:
            os.close(new)
        raise
    finally:
        os.close(source)
    return new


def _data_ranges(source: int) -> Iterator[tuple[int, int]]:
    """Where a file has data: one with holes may be larger than memory."""
    end = 0
    with contextlib.suppress(OSError):  # no more data
        while True:
            start = os.lseek(source, end, os.SEEK_DATA)
            end = os.lseek(source, start, os.SEEK_HOLE)
            yield start, end
