"""What forbids a fork of the session's Python (threads, devices, connections, shared memory), and how its open files,
which it shares with the process that it came from, are opened again for itself alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import io
import os
import re
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_FORK_SAFE_THREADS = ("jemalloc_bg_thd", "")
"""jemalloc (in pyarrow, and so in pandas) ends its background thread before a fork, and starts it again after."""
_CONNECTIONS = ("socket:", "pipe:", "anon_inode:")
_TERMINALS = ("/dev/pts/", "/dev/ptmx", "/dev/tty")
_SHARED_ROW = re.compile(rb"[0-9a-f-]+ .w.s ")
_SEMAPHORES = "/dev/shm/sem."
"""Locks of multiprocessing, which work in both processes; tqdm makes one."""


def native_threads() -> set[int]:
    """The threads of this process but this one, Python's and others', without those that a fork does not harm."""
    tasks = {int(task) for task in os.listdir("/proc/self/task")} - {threading.get_native_id()}
    return {task for task in tasks if _thread_name(task) not in _FORK_SAFE_THREADS}


def _thread_name(task: int) -> str:
    """Empty when it has ended."""
    try:
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def python_threads_reason() -> str | None:
    """Why Python's own threads forbid a fork, or None: only the forking thread exists in the child."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if not others:
        return None
    shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
    return f"{len(others)} other thread{'s' * (len(others) > 1)} running in the session's Python ({shown})"


def native_threads_reason(tasks: set[int]) -> str:
    names = _native_packages()
    shown = f" (of {' or '.join(names)})" if names else ""
    return f"{len(tasks)} native thread{'s' * (len(tasks) > 1)}{shown}, which no fork survives"


def _native_packages() -> list[str]:
    """The packages with compiled modules that were imported: it is one of them that has started a thread."""
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.endswith(".so") and "lib-dynload" not in file:
            found.add(str(name).partition(".")[0].strip("_"))
    return sorted(found)


def devices_reason(opened: dict[int, str]) -> str | None:
    """Why an open device forbids a fork, or None."""
    for target in opened.values():
        if target.startswith(_DEVICES):
            return f"a GPU is in use ({target})"
    return None


def connections_reason(opened: dict[int, str], own: set[int]) -> str | None:
    """Why open connections forbid a fork, or None: both processes would read from and write to the same one."""
    found = [fd for fd, target in opened.items() if fd > 2 and fd not in own and target.startswith(_CONNECTIONS)]
    named = [fd for fd, target in opened.items() if fd > 2 and fd not in own and target.startswith("/")]
    found += [fd for fd in named if opened[fd].startswith(_TERMINALS) or _is_named_pipe(fd)]
    if not found:
        return None
    kinds = sorted({opened[fd].partition(":")[0] for fd in found})
    shown = f"{', '.join(kinds)} (descriptors {', '.join(map(str, found[:5]))})"
    packages = [] if set(found) <= _held_by_python() else _native_packages()
    perhaps = f"; perhaps of {' or '.join(packages)}" if packages else ""
    return f"open connections cannot be shared: {shown}{perhaps}"


def _held_by_python() -> set[int]:
    found = set()
    for held in gc.get_objects():
        if isinstance(held, (io.FileIO, socket.socket)):
            with contextlib.suppress(ValueError):  # it is closed
                found.add(held.fileno())
    return found


def _is_named_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def shared_memory_reason() -> str | None:
    """Why memory that this process shares forbids a fork, or None: both would go on writing to it."""
    with open("/proc/self/maps", "rb") as file:
        rows = [os.fsdecode(row).strip().split(maxsplit=5) for row in file if _SHARED_ROW.match(row)]
    names = [row[5] if len(row) > 5 else "anonymous" for row in rows]
    found = next((name for name in names if not name.startswith(_SEMAPHORES)), None)
    return None if found is None else f"shared memory cannot be copied into a fork ({found})"


def open_descriptors() -> dict[int, str]:
    """What this process has open, by number."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own, closed by now
    return found


# --- open files of a fork --------------------------------------------------------------------------------------------

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
            what = file.path or "a deleted file"
            raise OSError(problem.errno, f"{what} cannot be opened again: {problem}") from None


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
