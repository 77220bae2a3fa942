"""What a fork shares with whom it came from, open files and shared memory, made its own."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from .native import holders

_library = ctypes.PyDLL(None, use_errno=True)
_library.mmap.restype = _library.mremap.restype = ctypes.c_void_p
_library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_library.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_SHARED, _FIXED, _ANONYMOUS = 0x01, 0x10, 0x20
_READ_WRITE = 3
_TO_THERE = 3
"""MREMAP_MAYMOVE and MREMAP_FIXED."""
_MADE_ANEW = os.O_CREAT | os.O_EXCL | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
_TERMINALS = ("/dev/pts/", "/dev/ptmx", "/dev/tty")
_PIECE = 1 << 20
_NOTHING = bytes(_PIECE)
_LARGEST = 1 << 30
"""Bytes of shared memory without a name: nobody can tell how much of it is in use without using all of it."""
_GONE = " (deleted)"
_SHARED_ROWS = re.compile(rb"^[0-9a-f-]+ ...s .*$", re.MULTILINE)


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


def make_own(files: dict[int, Opened], *, memory: bool) -> None:
    """In the fork: open the files again at their places, and copy what no path leads to; OSError says what failed.

    Whoever it came from must stand still meanwhile; `memory`: it had some that was shared."""
    copies: dict[tuple[int, int], int] = {}
    for fd, file in files.items():
        try:
            _open_again(fd, file, copies)
        except OSError as problem:
            what = f"{file.path or 'a deleted file'} cannot be opened again: {problem}"
            raise OSError(problem.errno, f"{what}{holders([fd])}") from None
    for mapping in shared_memory() if memory else ():
        try:
            mapping.replace(copies)
        except OSError as problem:
            raise OSError(problem.errno, f"shared memory ({mapping.path}) cannot be copied: {problem}") from None


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


class Mapping:
    """Memory that several processes have together."""

    def __init__(self, line: str) -> None:
        addresses, perms, offset, device, number, *path = line.split(maxsplit=5)
        self.start, self.end = (int(each, 16) for each in addresses.split("-"))
        self.protection = ("r" in perms) + 2 * ("w" in perms) + 4 * ("x" in perms)
        self.offset = int(offset, 16)
        major, minor = (int(each, 16) for each in device.split(":"))
        self.file = os.makedev(major, minor), int(number)
        self.path = path[0].replace("\\012", "\n") if path else ""

    @property
    def size(self) -> int:
        return self.end - self.start

    def replace(self, copies: dict[tuple[int, int], int]) -> None:
        """Have at the same addresses what only this process has."""
        if self.file in copies:
            self._map(copies[self.file])
            return
        if not self.path.endswith(_GONE) or os.path.exists(self.path):
            fd = os.open(self.path, (os.O_RDWR if self.protection & 2 else os.O_RDONLY) | os.O_CLOEXEC)
            try:
                self._map(fd)
            finally:
                os.close(fd)
            return
        if self.size > _LARGEST:
            raise OSError(errno.EFBIG, f"it is {self.size >> 20} MiB, more than is copied ({_LARGEST >> 20} MiB)")
        new = _checked(_library.mmap(None, self.size, _READ_WRITE, _SHARED | _ANONYMOUS, -1, 0))
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            for at in range(0, self.size, _PIECE):
                piece = os.pread(memory, min(_PIECE, self.size - at), self.start + at)
                if piece != _NOTHING[: len(piece)]:
                    os.pwrite(memory, piece, new + at)
        finally:
            os.close(memory)
        _library.mprotect(new, self.size, self.protection)
        _checked(_library.mremap(new, self.size, self.size, _TO_THERE, self.start))

    def _map(self, fd: int) -> None:
        _checked(_library.mmap(self.start, self.size, self.protection, _SHARED | _FIXED, fd, self.offset))


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def shared_memory() -> list[Mapping]:
    """What of this process's memory others may write to, or it for others."""
    with open("/proc/self/maps", "rb") as file:
        rows = _SHARED_ROWS.findall(file.read())
    found = [Mapping(os.fsdecode(row)) for row in rows]
    return [mapping for mapping in found if mapping.protection & 2 or not _is_read_only(mapping.path)]


def _is_read_only(path: str) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False
