"""Open files, which a fork shares with the process that it came from, made its own."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from .native import holders

_MADE_ANEW = os.O_CREAT | os.O_EXCL | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
_TERMINALS = ("/dev/pts/", "/dev/ptmx", "/dev/tty")
_PIECE = 1 << 20
_WRITABLE_SHARED_ROWS = re.compile(rb"^[0-9a-f-]+ .w.s .*$", re.MULTILINE)
_SEMAPHORES = "/dev/shm/sem."
"""Locks of multiprocessing, which work in both processes; tqdm makes one."""


class Opened(NamedTuple):
    """A file or folder behind a descriptor."""

    path: str | None
    """None for one that has none any more."""
    inode: tuple[int, int]


def files_of(opened: dict[int, str], own: set[int]) -> dict[int, Opened]:
    """The files and folders that code has open."""
    found: dict[int, Opened] = {}
    for fd in opened.keys() - own:
        with contextlib.suppress(OSError):  # closed by now: that of the listing itself
            what = os.fstat(fd)
            if stat.S_ISREG(what.st_mode) or stat.S_ISDIR(what.st_mode):
                found[fd] = Opened(opened[fd] if _is_at(opened[fd], what) else None, (what.st_dev, what.st_ino))
    return found


def connections(opened: dict[int, str], own: set[int]) -> list[int]:
    """Descriptors of named pipes and terminals, by which two would speak to one."""
    named = [fd for fd, target in opened.items() if fd > 2 and fd not in own and target.startswith("/")]
    return [fd for fd in named if opened[fd].startswith(_TERMINALS) or _is_pipe(fd)]


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def make_own(files: dict[int, Opened]) -> None:
    """In the fork: open the files again at their places, and copy what no path leads to; OSError says what failed.

    The process that it was forked from must stand still meanwhile."""
    copies: dict[tuple[int, int], int] = {}
    for fd, file in files.items():
        try:
            _open_again(fd, file, copies)
        except OSError as problem:
            what = f"{file.path or 'a deleted file'} cannot be opened again: {problem}"
            raise OSError(problem.errno, f"{what}{holders([fd])}") from None


def _is_at(path: str, what: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), what)
    except (OSError, ValueError):
        return False


def _open_again(fd: int, file: Opened, copies: dict[tuple[int, int], int]) -> None:
    try:
        what = os.fstat(fd)
        flags, inherited = fcntl.fcntl(fd, fcntl.F_GETFL), os.get_inheritable(fd)
    except OSError as problem:
        if problem.errno == errno.EBADF:
            return  # Code that runs at a fork has closed it.
        raise
    if (what.st_dev, what.st_ino) != file.inode:
        return  # It has closed that file, and opened another.
    path, at = file.path, 0
    with contextlib.suppress(OSError):
        at = os.lseek(fd, 0, os.SEEK_CUR)
    if path is not None:
        new = os.open(path, (flags & ~_MADE_ANEW) | os.O_CLOEXEC)
    else:
        # Several descriptors of one file are of one copy.
        known = copies.get((what.st_dev, what.st_ino))
        new = os.open(f"/proc/self/fd/{known}", os.O_RDWR | os.O_CLOEXEC) if known is not None else _copy(fd, what)
        fcntl.fcntl(new, fcntl.F_SETFL, flags & (os.O_APPEND | os.O_NONBLOCK))
        copies[what.st_dev, what.st_ino] = fd
    try:
        if at:
            os.lseek(new, at, os.SEEK_SET)
        os.dup2(new, fd, inheritable=inherited)
    finally:
        os.close(new)


def _copy(fd: int, what: os.stat_result) -> int:
    """Of a file that has no path, in memory."""
    if stat.S_ISDIR(what.st_mode):
        raise OSError(2, "the folder is gone")
    source, new = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), -1
    try:
        new = os.memfd_create("copy")
        os.ftruncate(new, what.st_size)
        for start, end in _written_in(source):
            for at in range(start, end, _PIECE):
                os.pwrite(new, os.pread(source, min(_PIECE, end - at), at), at)
        os.fchmod(new, stat.S_IMODE(what.st_mode))
    except BaseException:
        if new >= 0:
            os.close(new)
        raise
    finally:
        os.close(source)
    return new


def _written_in(source: int) -> Iterator[tuple[int, int]]:
    """From where to where: a file may have a size that nobody could fill."""
    end = 0
    with contextlib.suppress(OSError):  # nothing more
        while True:
            start = os.lseek(source, end, os.SEEK_DATA)
            end = os.lseek(source, start, os.SEEK_HOLE)
            yield start, end


def shared_memory() -> str | None:
    """Why memory that this process shares forbids a fork, or None: both would go on writing to it."""
    with open("/proc/self/maps", "rb") as file:
        rows = [os.fsdecode(row).split(maxsplit=5) for row in _WRITABLE_SHARED_ROWS.findall(file.read())]
    names = [row[5] if len(row) > 5 else "anonymous" for row in rows]
    found = next((name for name in names if not name.startswith(_SEMAPHORES)), None)
    return None if found is None else f"shared memory cannot be copied into a fork ({found})"
