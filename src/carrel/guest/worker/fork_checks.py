"""What forbids a fork of the session's Python (threads, devices, connections, shared memory), and how its open files,
which it shares with the process that it came from, are opened again for itself alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import io
import os
import re
import socket
import stat
import sys
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_FORK_SAFE_THREADS = ("jemalloc_bg_thd",)
"""jemalloc (in pyarrow, and so in pandas) ends its background thread before a fork, and starts it again after."""
_CONNECTIONS = ("socket:", "pipe:", "anon_inode:")
_TERMINALS = ("/dev/pts/", "/dev/ptmx", "/dev/tty")
_SHARED_ROW = re.compile(rb"^[0-9a-f-]+ .w.s .*$", re.MULTILINE)
_SEMAPHORES = "/dev/shm/sem."
"""Locks of multiprocessing, which work in both processes; tqdm makes one."""
_CODE_ROW = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..x. \S+ \S+ \S+ +(/.*)$", re.MULTILINE)
_MAX_STACK = 256 * 1024
"""Bytes of a thread's stack that are searched."""
_MAX_NAMES = 3


def native_threads() -> set[int]:
    """The threads of this process but this one, Python's and others', without those that a fork does not harm."""
    tasks = {int(task) for task in os.listdir("/proc/self/task")} - {threading.get_native_id()}
    return {task for task in tasks if not _is_fork_safe(task)}


def _is_fork_safe(task: int) -> bool:
    try:
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip() in _FORK_SAFE_THREADS
    except OSError:
        return True  # it has ended


def python_threads_reason() -> str | None:
    """Why Python's own threads forbid a fork, or None: only the forking thread exists in the child."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if not others:
        return None
    shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
    return f"{len(others)} other thread{'s' * (len(others) > 1)} running in the session's Python ({shown})"


def native_threads_reason(tasks: set[int]) -> str:
    packages = _join(packages_of_threads(frozenset(tasks))) or "a library"
    return f"{len(tasks)} native thread{'s' * (len(tasks) > 1)} of {packages}, which no fork survives"


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
    return f"open connections cannot be shared: {shown}{holders(found)}"


def _is_named_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def shared_memory_reason() -> str | None:
    """Why memory that this process shares forbids a fork, or None: both would go on writing to it."""
    with open("/proc/self/maps", "rb") as file:
        rows = [os.fsdecode(row).split(maxsplit=5) for row in _SHARED_ROW.findall(file.read())]
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


# --- packages that hold threads and descriptors ---------------------------------------------------------------------


def holders(descriptors: Collection[int]) -> str:
    """As a part of a message: the packages that probably hold these; empty where Python objects hold them all."""
    if not set(descriptors) - _held_by_python():
        return ""
    certain = packages_of_threads(frozenset(int(task) for task in os.listdir("/proc/self/task")))
    names = certain or tuple(sorted({name for _, _, path in _mapped_code() if (name := _package_of(path))}))
    return f"; held by {_join(names)}" if certain else f"; perhaps held by {_join(names)}" if names else ""


@functools.lru_cache(maxsize=2)
def packages_of_threads(tasks: frozenset[int]) -> tuple[str, ...]:
    """The packages that started these threads: return addresses on a thread's stack lie in its library's code."""
    code = _mapped_code()
    starts = [start for start, _, _ in code]
    found = set()
    for task in tasks - {os.getpid()}:
        for address in _stack(task):
            index = bisect_right(starts, address) - 1
            if index >= 0 and address < code[index][1] and (name := _package_of(code[index][2])):
                found.add(name)
                break
    return tuple(sorted(found))


def _stack(task: int) -> Iterable[int]:
    """The words on the stack of a thread that waits, from its top; nothing where the kernel does not show it."""
    try:
        with open(f"/proc/self/task/{task}/syscall", encoding="ascii") as file:
            pointer = int(file.read().split()[-2], 16)
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError, IndexError):
        return ()
    pages = []
    try:
        for address in range(pointer, pointer + _MAX_STACK, 4096):  # by page: the stack may end before
            pages.append(os.pread(memory, 4096, address))
    except OSError:
        pass
    finally:
        os.close(memory)
    data = b"".join(pages)
    return memoryview(data[: len(data) // 8 * 8]).cast("Q")


def _mapped_code() -> list[tuple[int, int, str]]:
    """Mapped files that are run as code, by their addresses."""
    with open("/proc/self/maps", "rb") as file:
        rows = _CODE_ROW.findall(file.read())
    return sorted((int(start, 16), int(end, 16), os.fsdecode(path)) for start, end, path in rows)


def _join(names: Collection[str]) -> str:
    shown = list(names)[:_MAX_NAMES]
    return ", ".join(shown) + (", …" if len(names) > _MAX_NAMES else "")


def _held_by_python() -> set[int]:
    found = set()
    for held in gc.get_objects():
        if isinstance(held, (io.FileIO, socket.socket)):
            with contextlib.suppress(ValueError):  # it is closed
                found.add(held.fileno())
    return found


def _package_of(path: str) -> str:
    """The top folder or module below a folder of packages; empty for libraries of the system and of Python itself."""
    for folder in sys.path:
        if folder and path.startswith(folder + os.sep) and "lib-dynload" not in path:
            # numpy.libs holds libraries of numpy, _duckdb is the compiled part of duckdb.
            return path[len(folder) + 1 :].partition(os.sep)[0].partition(".")[0].strip("_")
    return ""


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
