"""Who uses what in the cache: a shared lock for as long as it is needed, and the time of the last use."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from carrel.errors import StorageWriteError


class Hold:
    """Keeps a folder of the cache from being pruned, by any process, until this object and its process are gone."""

    def __init__(self, folder: Path) -> None:
        """Of a folder that may be still to be made; its own parent is made. StorageWriteError where nothing can be."""
        with _one_at_a_time:
            lock = _locks.get(folder)
            if lock is None:
                lock = _locks[folder] = _Shared(folder)
            self._lock: _Shared | None = lock
        os.utime(lock.descriptor)

    def release(self) -> None:
        """Now, and not when the object goes; twice is harmless."""
        self._lock = None


class _Shared:
    """One for all holds that this process has on a folder: a hundred sessions of a sample cost one descriptor."""

    def __init__(self, folder: Path) -> None:
        file = _file_of(folder)
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as problem:
            raise StorageWriteError(f"nothing can be kept in {folder.parent}: {problem}") from problem
        weakref.finalize(self, os.close, self.descriptor)
        # Who prunes holds it alone for as long as a rename takes.
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)


_one_at_a_time = threading.Lock()
_locks: weakref.WeakValueDictionary[Path, _Shared] = weakref.WeakValueDictionary()


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether nobody uses or makes the folder; nobody can begin to while this is open."""
    opened = [
        os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for file in (_file_of(folder), folder.with_suffix(".lock"))
    ]
    try:
        for descriptor in opened:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        for descriptor in opened:
            os.close(descriptor)


def last_used(folder: Path) -> float:
    """Seconds since the epoch."""
    try:
        return _file_of(folder).stat().st_mtime
    except FileNotFoundError:
        return folder.stat().st_mtime


def _file_of(folder: Path) -> Path:
    return folder.with_suffix(".used")
