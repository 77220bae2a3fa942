"""Objects as files: written beside their place and moved there in one step, copied, removed. Everything here blocks."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator

from carrel.errors import KeyMissing, StorageError
from carrel.storage.base import Expected, Guard, Missing, Stamp, guard_lost, is_expected
from carrel.storage.files.paths import FileHandle, PathMapper, hidden_beside, read_range, stamp_of, write_error

PIECE = 1024 * 1024
"""Bytes that are read or copied at a time."""

_NEW = ".new-"
_ABANDONED_SECONDS = 3600
_MOST_CLEANED = 10_000


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, or raise the error that prevented it."""
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


def create_file(path: str, flags: int) -> int:
    """Create a file for its owner only, whatever the umask, and open it; FileExistsError if there is one."""
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    return fd


def open_or_create(path: str, flags: int) -> int:
    """Open a file for writing, creating it if missing; never through a link."""
    while True:  # others may create and remove it between these steps
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(FileExistsError):
            return create_file(path, flags)


def make_folders(folder: str, root: str) -> None:
    """Make the folder and its parents for their owner only, whatever the umask."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    make_folders(parent, root)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
    else:
        os.chmod(folder, 0o700)
        if len(folder) <= len(root):
            sync_folder(parent)  # names below the root are synced with the data that is written there


def sync_folder(path: str) -> None:
    """Write the names in a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_names(path: str, root: str) -> None:
    """Write all names from the root to `path` to the disk."""
    while len(path := os.path.dirname(path)) >= len(root):
        sync_folder(path)


@contextlib.contextmanager
def locked_folders(folders: Collection[str]) -> Iterator[None]:
    """Hold the locks of folders, under which the files in them are compared, replaced and removed."""
    opened: list[int] = []
    try:
        for folder in sorted(set(folders)):  # always in one order, so that two writers never wait for each other
            opened.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            fcntl.flock(opened[-1], fcntl.LOCK_EX)
        yield
    finally:
        for fd in opened:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough if a child was forked meanwhile
            os.close(fd)


def check_guard(paths: PathMapper, key: str, guard: Guard | None) -> None:
    """Raise `GuardLost` unless the guarding object is unchanged; its folder must be locked."""
    if guard is not None and paths.stamps([guard[0]])[0] != guard[1]:
        raise guard_lost(key, guard)


def guard_folder(paths: PathMapper, guard: Guard | None) -> list[str]:
    """Return the folder to lock while a guard is checked; none if the folder is gone, and the guard with it."""
    if guard is None:
        return []
    folder = os.path.dirname(paths.safe_path(guard[0]))
    return [folder] if os.path.isdir(folder) else []


class PendingObject:
    """An object that is being written beside its place; nothing of it is visible before `place`."""

    def __init__(self, paths: PathMapper, key: str, expect: Expected = None, guard: Guard | None = None) -> None:
        self._paths = paths
        self._key = key
        self._expect = expect
        self._guard = guard
        self._is_link = False
        self._path = paths.safe_path(key)
        self._folder = os.path.dirname(self._path)
        self._made_folder = not os.path.isdir(self._folder)
        try:
            if self._made_folder:
                make_folders(self._folder, paths.root)
            else:
                _remove_abandoned(paths, self._folder)
            self.temp = f"{self._folder}/{_NEW}{os.urandom(8).hex()}"
            self._file = FileHandle(create_file(self.temp, os.O_WRONLY))
        except FileNotFoundError:
            raise self._deleted() from None
        except OSError as error:
            raise write_error(self._path, error) from error

    def _deleted(self) -> KeyMissing:
        return KeyMissing(f"{self._key!r} was deleted while it was written; nothing was kept")

    def write(self, data: bytes) -> None:
        try:
            write_all(self._file.fd, data)
        except OSError as error:
            raise write_error(self._path, error) from error

    def link(self, path: str) -> bool:
        """Become a second name of another file; False if its file system does not allow that."""
        second = f"{self.temp}-link"
        try:
            os.link(path, second)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS):
                return False
            raise
        os.rename(second, self.temp)
        self._is_link = True
        return True

    def copy_range(self, fd: int, end: int) -> None:
        """Write the first `end` bytes of another file."""
        for start in range(0, end, PIECE):
            self.write(read_range(fd, start, min(start + PIECE, end)))

    def place(self) -> Stamp | None:
        """Move it to its place, durably; None if the condition on what is there does not hold."""
        try:
            if not self._is_link:
                # The kernel's own time stamps are coarse: two quick writes could get the same.
                now = time.time_ns()
                os.utime(self._file.fd, ns=(now, now))
                os.fsync(self._file.fd)
            with locked_folders([self._folder, *guard_folder(self._paths, self._guard)]):
                check_guard(self._paths, self._key, self._guard)
                if not is_expected(self._expect, self._paths.stamps([self._key])[0]):
                    return None
                os.rename(self.temp, self._path)
                stamp = stamp_of(os.lstat(self._path))
        except StorageError:
            raise
        except FileNotFoundError:
            if self._expect is not None:
                return None
            raise self._deleted() from None
        except OSError as error:
            raise write_error(self._path, error) from error
        try:
            # A folder that was deleted meanwhile has no name to write to the disk.
            with contextlib.suppress(FileNotFoundError):
                sync_names(self._path, self._paths.root) if self._made_folder else sync_folder(self._folder)
        except OSError as error:
            raise write_error(self._path, error) from error
        return stamp

    def discard(self) -> None:
        """Remove the file if it was not placed; harmless afterwards."""
        with contextlib.suppress(OSError):
            os.unlink(self.temp)


def put(paths: PathMapper, key: str, data: bytes, expect: Expected, guard: Guard | None) -> Stamp | None:
    """Replace the object in one step; None if `expect` does not hold."""
    if expect is not None:
        found = paths.stamps([key])[0]
        if not is_expected(expect, found) or (isinstance(expect, Missing) and os.path.lexists(paths.safe_path(key))):
            return None
    try:
        pending = PendingObject(paths, key, expect, guard)
    except KeyMissing:
        if expect is None:
            raise
        return None
    try:
        pending.write(data)
        return pending.place()
    finally:
        pending.discard()


def copy(paths: PathMapper, source: str, target: str, guard: Guard | None) -> None:
    """Give the file of `source` a second name; its bytes are copied only where a file cannot have two."""
    path = paths.safe_path(source)
    opened = paths.open(source)
    if opened is None:
        raise KeyMissing(f"there is no object {source!r} to copy to {target!r}")
    pending = PendingObject(paths, target, guard=guard)
    try:
        if os.path.islink(path) or not pending.link(path):
            pending.copy_range(opened[0].fd, opened[1].st_size)
        pending.place()
    except StorageError:
        raise
    except FileNotFoundError:
        raise KeyMissing(f"{source!r} was deleted while it was copied to {target!r}") from None
    except OSError as error:
        raise write_error(paths.path(target), error) from error
    finally:
        pending.discard()


def remove(paths: PathMapper, key: str, expect: tuple[str, Expected] | None, guard: Guard | None) -> bool:
    """Move the key and everything below it out of sight in one step, then remove it; False if there was nothing."""
    path = paths.safe_path(key)
    watched = paths.safe_path(expect[0]) if expect else ""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode) and paths.first_key(path) is None:
            return False
        folders = [os.path.dirname(path), *guard_folder(paths, guard)]
        if watched and os.path.isdir(os.path.dirname(watched)):
            folders.append(os.path.dirname(watched))
        with locked_folders(folders), _no_appends(watched):
            check_guard(paths, key, guard)
            if expect is not None and not is_expected(expect[1], paths.stamps([expect[0]])[0]):
                return False
            trash = _move_to_trash(path, f"{paths.root}/.trash", paths.root)
    except StorageError:
        raise
    except OSError as error:
        if paths.is_missing(error):
            return False
        raise write_error(path, error) from error
    with contextlib.suppress(OSError):
        os.unlink(hidden_beside(path, "batch"))
    # Also what a crash left there. What cannot be removed is tried again by the next delete.
    for name in os.listdir(trash):
        if os.path.isdir(f"{trash}/{name}") and not os.path.islink(f"{trash}/{name}"):
            shutil.rmtree(f"{trash}/{name}", onerror=_remove_unreadable)
        else:
            with contextlib.suppress(OSError):
                os.unlink(f"{trash}/{name}")
    return True


def _remove_unreadable(function: object, path: str, error: object) -> None:
    """Remove a folder that its mode protects: sessions make such ones, and so do overlays."""
    with contextlib.suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


@contextlib.contextmanager
def _no_appends(path: str) -> Iterator[None]:
    """Keep writers from appending to this log, if it is one that can be written."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC) if path else -1
    except OSError:
        fd = -1
    if fd < 0:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _move_to_trash(path: str, trash: str, root: str) -> str:
    """Move it into the trash folder, or into one beside it if it is on another file system; returns that folder."""
    make_folders(trash, root)
    try:
        os.rename(path, f"{trash}/{os.urandom(8).hex()}")
    except OSError as error:
        beside = f"{os.path.dirname(path)}/.trash"
        if error.errno != errno.EXDEV or trash == beside:
            raise
        return _move_to_trash(path, beside, root)
    return trash


def _remove_abandoned(paths: PathMapper, folder: str) -> None:
    """Remove files whose writer was killed, begun long ago and not touched since; once for each folder."""
    if folder in paths.cleaned:
        return
    if len(paths.cleaned) >= _MOST_CLEANED:
        paths.cleaned.clear()
    paths.cleaned.add(folder)
    try:
        with os.scandir(folder) as found:
            begun = [entry for entry in found if entry.name.startswith(_NEW)]
        for entry in begun:
            state = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(state.st_mode) and time.time() - state.st_mtime > _ABANDONED_SECONDS:
                os.unlink(entry.path)
    except OSError:
        return  # nothing depends on it
