"""Which installed packages hold native threads, and descriptors that no Python object has."""

from __future__ import annotations

import functools
import gc
import io
import os
import re
import socket
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable

_ROW = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..x. \S+ \S+ \S+ +(/.*)$", re.MULTILINE)
_DEEPEST = 256 * 1024
"""Bytes of a thread's stack that are searched."""
_MOST = 3
_WORD = 8
Code = "list[tuple[int, int, str]]"


def holders(descriptors: Collection[int]) -> str:
    """As a part of a message: the packages that probably hold these; empty where Python objects hold them all."""
    if not set(descriptors) - _held_by_python():
        return ""
    tasks = frozenset(int(task) for task in os.listdir("/proc/self/task"))
    certain = packages_of_threads(tasks)
    names = certain or _packages(path for _, _, path in _code())
    return f"; held by {_listed(names)}" if certain else f"; perhaps held by {_listed(names)}" if names else ""


def owners(tasks: Collection[int]) -> str:
    """The packages that these threads run code of, as a part of a message."""
    return _listed(packages_of_threads(frozenset(tasks))) or "a library"


@functools.lru_cache(maxsize=2)
def packages_of_threads(tasks: frozenset[int]) -> tuple[str, ...]:
    """Return addresses on a thread's stack lie in the code of the library that started it."""
    code = _code()
    starts = [start for start, _, _ in code]
    found = set()
    for task in tasks - {os.getpid()}:
        for address in _stack(task):
            at = bisect_right(starts, address) - 1
            if at >= 0 and address < code[at][1] and (name := _package(code[at][2])):
                found.add(name)
                break
    return tuple(sorted(found))


def _stack(task: int) -> Iterable[int]:
    """What is on the stack of a thread that waits, from its end upwards; nothing where the kernel does not show it."""
    try:
        with open(f"/proc/self/task/{task}/syscall", encoding="ascii") as file:
            pointer = int(file.read().split()[-2], 16)
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError, IndexError):
        return ()
    try:
        pieces = []
        # Page by page: the stack may end before so much has been read.
        for at in range(pointer, pointer + _DEEPEST, 4096):
            pieces.append(os.pread(memory, 4096, at))
    except OSError:
        pass
    finally:
        os.close(memory)
    data = b"".join(pieces)
    return memoryview(data[: len(data) // _WORD * _WORD]).cast("Q")


def _code() -> list[tuple[int, int, str]]:
    """Mapped files that are run as code, by their addresses."""
    with open("/proc/self/maps", "rb") as file:
        rows = _ROW.findall(file.read())
    return sorted((int(start, 16), int(end, 16), os.fsdecode(path)) for start, end, path in rows)


def _packages(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for path in paths if (name := _package(path))}))


def _package(path: str) -> str:
    """The top folder or module below a folder of packages; empty for libraries of the system and of Python itself."""
    for folder in sys.path:
        if folder and path.startswith(folder + os.sep) and "lib-dynload" not in path:
            # numpy.libs holds libraries of numpy, _duckdb is the compiled part of duckdb.
            return path[len(folder) + 1 :].partition(os.sep)[0].partition(".")[0].strip("_")
    return ""


def _listed(names: Collection[str]) -> str:
    shown = list(names)[:_MOST]
    return ", ".join(shown) + (", …" if len(names) > _MOST else "")


def _held_by_python() -> set[int]:
    found = set()
    for held in gc.get_objects():
        if isinstance(held, (io.FileIO, socket.socket)):
            try:
                found.add(held.fileno())
            except ValueError:
                continue  # it is closed
    return found
