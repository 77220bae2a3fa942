"""One sync for many files: a whole file system put on the disk, where that is sound and cheap."""

import os
import re
import time
import weakref

from carrel.storage.file_tree import OpenFile
from carrel.storage.libc import syncfs

_SOUND = ("ext4", "xfs")
"""File systems of which we know that syncing the whole is worth as much as syncing each file.

Not so, for one, those that a program serves (FUSE): they are told of a sync of a file, and of nothing else."""

_QUIET_BYTES = 64 * 1024 * 1024
"""A sync of the whole writes what others left unwritten too; with more than this it would take too long."""
_ASK_SECONDS = 0.05


class Device(OpenFile):
    """A file system, open so that the kernel tells us of every error in writing to it from here on."""

    __slots__ = ("__weakref__", "_to_spare", "is_swift")

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._to_spare = 0.0
        self.is_swift = False
        """Whether syncs of late took less time than it takes to write what they are for."""

    def took(self, seconds: float, writing: float) -> None:
        """A sync took so many seconds, and to write what such a one is for takes so many."""
        self._to_spare += (writing - seconds - self._to_spare) / 8
        self.is_swift = self._to_spare > 0

    def forget(self) -> None:
        """How long syncs took says nothing of those to come: others write much now."""
        self._to_spare = 0.0
        self.is_swift = False

    def sync(self) -> bool:
        """Put everything on the disk; False when that failed for some file, which may be none of ours."""
        try:
            syncfs(self.fd)
        except OSError:
            return False
        return True


_devices: weakref.WeakValueDictionary[int, Device] = weakref.WeakValueDictionary()


def device_of(folder: str, number: int) -> Device | None:
    """The file system of a folder on the device of this number, when it can be synced as a whole."""
    device = _devices.get(number)
    if device is None and _is_sound(number):
        try:
            device = Device(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError:
            return None  # a folder that we may only go through: its files are synced one by one
        _devices[number] = device
    return device


def _is_sound(number: int) -> bool:
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if version is None or (int(version[1]), int(version[2])) < (5, 8):
        return False  # older ones keep errors in writing to themselves
    name = f"{os.major(number)}:{os.minor(number)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            kinds = [line.rpartition(" - ")[2].split(" ", 1)[0] for line in mounts if line.split(" ", 3)[2] == name]
    except OSError:
        return False
    return bool(kinds) and all(kind in _SOUND for kind in kinds)


_asked_at = -1.0
_was_quiet = False


def quiet() -> bool:
    """Whether the machine has little left to write. Asked anew now and then: the answer costs more than an append."""
    global _asked_at, _was_quiet
    if time.monotonic() - _asked_at > _ASK_SECONDS:
        _was_quiet, _asked_at = _is_quiet(), time.monotonic()
    return _was_quiet


def _is_quiet() -> bool:
    try:
        fd = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)
        try:
            facts = os.read(fd, 8192)
        finally:
            os.close(fd)
    except OSError:
        return False
    waiting = [int(kilobytes) for kilobytes in re.findall(rb"^(?:Dirty|Writeback): +(\d+) kB", facts, re.MULTILINE)]
    return len(waiting) == 2 and sum(waiting) * 1024 <= _QUIET_BYTES


# A child that is forked has the same open file: it would take from us the errors that it is told, and we from it.
os.register_at_fork(after_in_child=_devices.clear)
