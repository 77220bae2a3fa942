"""What the kernel tells about changes in folders (Linux inotify)."""

import errno
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple, Self

from carrel.storage import libc
from carrel.storage.file_tree import OpenFile

MODIFY = 0x0002
MOVED_FROM = 0x0040
MOVED_TO = 0x0080
CREATE = 0x0100
DELETE = 0x0200
DELETE_SELF = 0x0400
MOVE_SELF = 0x0800
UNMOUNT = 0x2000
OVERFLOW = 0x4000
IGNORED = 0x8000
IS_FOLDER = 0x4000_0000
_ONLY_FOLDER = 0x0100_0000
_DONT_FOLLOW = 0x0200_0000

_ALL = MODIFY | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF | _ONLY_FOLDER
_HEAD = struct.Struct("iIII")


class Happening(NamedTuple):
    """Something happened in the folder of a watch, to the name or (without one) to the folder itself."""

    watch: int
    mask: int
    name: str


class Inotify(OpenFile):
    """One inotify instance: OSError when the machine gives no more of them. Never blocks."""

    @classmethod
    def new(cls) -> Self:
        return cls(libc.inotify_init())

    def add(self, folder: str, *, follow: bool = True) -> int | None:
        """The number of the watch on a folder, or None when it is not there; OSError when there are too many."""
        try:
            return libc.inotify_add_watch(self.fd, folder, _ALL if follow else _ALL | _DONT_FOLLOW)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise

    def drop(self, watch: int) -> None:
        try:
            libc.inotify_rm_watch(self.fd, watch)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it is gone already, with its folder
                raise

    def happened(self) -> Iterator[Happening]:
        """Everything since the last call."""
        while True:
            try:
                told = os.read(self.fd, 64 * 1024)
            except BlockingIOError:
                return
            at = 0
            while at < len(told):
                watch, mask, _, length = _HEAD.unpack_from(told, at)
                at += _HEAD.size + length
                yield Happening(watch, mask, os.fsdecode(told[at - length : at].rstrip(b"\0")))
