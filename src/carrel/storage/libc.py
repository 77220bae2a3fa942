"""The few system calls that Python does not offer, each raising OSError as its own would."""

import ctypes
import errno
import os
import struct
import sys
from functools import lru_cache

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_OPENAT2 = 437
_NO_SYMLINKS, _BENEATH = 4, 8


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def exchange(first: str, second: str) -> None:
    """Swap two files in one step; FileNotFoundError when one of them is not there."""
    here, there = os.fsencode(first), os.fsencode(second)
    _checked(_libc.renameat2(_AT_FDCWD, here, _AT_FDCWD, there, _RENAME_EXCHANGE))


def open_beneath(root: int, path: str, flags: int) -> int:
    """Open what is below the folder `root`, on a way without any link; ELOOP or EXDEV where there is none.

    The kernel looks at the way while it goes it, so nobody can put a link there in between. ENOSYS before Linux 5.6."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    how = _how(flags)
    return _checked(_libc.syscall(_OPENAT2, root, os.fsencode(path), how, len(how)))


@lru_cache
def _how(flags: int) -> bytes:
    """What openat2 wants to know, as its struct: flags, mode, and how the way is to be gone."""
    return struct.pack("QQQ", flags, 0, _NO_SYMLINKS | _BENEATH)


def syncfs(fd: int) -> None:
    """Put everything on the disk that was written to the file system of `fd`."""
    _checked(_libc.syncfs(fd))


def inotify_init() -> int:
    """A new inotify instance, not inherited, that never blocks."""
    return _checked(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))


def inotify_add_watch(fd: int, folder: str, mask: int) -> int:
    """The number of the watch on this folder; the same one again when it is watched already."""
    return _checked(_libc.inotify_add_watch(fd, os.fsencode(folder), mask))


def inotify_rm_watch(fd: int, watch: int) -> None:
    _checked(_libc.inotify_rm_watch(fd, watch))
