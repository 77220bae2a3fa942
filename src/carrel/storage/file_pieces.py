"""Objects too large to hold, as files: written piece by piece beside their place, and read piece by piece; blocking."""

import contextlib
import os
import time

from carrel.errors import KeyMissing
from carrel.storage.file_objects import make_file, make_folders, new_beside, sync_folder, sync_names, write_all
from carrel.storage.file_tree import FileTree, OpenFile, read_failed, write_failed

PIECE = 1024 * 1024
"""What is read at once."""


class Arriving:
    """An object of which nothing is to be seen until it is placed."""

    def __init__(self, tree: FileTree, key: str) -> None:
        self._tree = tree
        self._key = key
        self._path = tree.guarded(key)
        self._temp = ""

    def begin(self) -> None:
        folder = os.path.dirname(self._path)
        self._made = not os.path.isdir(folder)
        try:
            make_folders(folder, self._tree.root)
            self._temp = new_beside(self._tree, folder)
            self._file = OpenFile(make_file(self._temp, os.O_WRONLY))
        except OSError as error:
            raise write_failed(self._path, error) from error

    def add(self, piece: bytes) -> None:
        try:
            write_all(self._file.fd, piece)
        except OSError as error:
            raise write_failed(self._path, error) from error

    def place(self) -> None:
        """Put it in the place of what is there, and the step on the disk."""
        try:
            # The kernel's own stamp is coarse: two quick puts could look like one.
            now = time.time_ns()
            os.utime(self._file.fd, ns=(now, now))
            os.fsync(self._file.fd)
            os.rename(self._temp, self._path)
        except FileNotFoundError:
            raise KeyMissing(f"{self._key!r} was deleted while it was written; nothing was kept") from None
        except OSError as error:
            raise write_failed(self._path, error) from error
        # Deleted in this moment: then there is nothing to put on the disk.
        with contextlib.suppress(FileNotFoundError):
            sync_names(self._path, self._tree.root) if self._made else sync_folder(os.path.dirname(self._path))

    def drop(self) -> None:
        """Leave nothing of what was not placed; harmless afterwards."""
        if self._temp:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temp)


def piece_at(path: str, file: OpenFile, offset: int) -> bytes:
    """The bytes of an open object from there on, as many as are read at once; b"" at its end."""
    try:
        return os.pread(file.fd, PIECE, offset)
    except OSError as error:
        raise read_failed(path, error) from error
