"""Objects as files: written beside their place and put there in one step, copied, removed; blocking, without a loop."""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator

from carrel.errors import KeyMissing
from carrel.storage.file_tree import FileTree, hidden_beside, write_failed
from carrel.storage.libc import exchange
from carrel.storage.seam import Stamp

_PIECE = 1024 * 1024
_NEW = ".new-"
_ABANDONED = 3600
"""Seconds."""


def _unique() -> str:
    return os.urandom(8).hex()


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, or raise what stopped it."""
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


def make_file(path: str, flags: int) -> int:
    """Make a file for its owner only, whatever the umask, and open it; FileExistsError when there is one."""
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    return fd


def open_or_make(path: str, flags: int) -> int:
    """Open a file for writing, making it when missing; never through a link."""
    while True:  # others may make it and remove it between any two of these steps
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(FileExistsError):
            return make_file(path, flags)


def make_folders(folder: str, root: str) -> None:
    """Make the folder and what is missing above it, for their owner only, whatever the umask."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    make_folders(above, root)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
    else:
        os.chmod(folder, 0o700)
        if len(folder) <= len(root):
            sync_folder(above)  # names below the root are synced with what is written there, those above it only here


def new_beside(tree: FileTree, folder: str) -> str:
    """The path for a file that is to be filled and then put in its place; what a crash left of others goes."""
    if folder not in tree.swept:
        tree.swept.add(folder)
        _sweep(folder)
    return f"{folder}/{_NEW}{_unique()}"


def _sweep(folder: str) -> None:
    """Remove what was begun and, for so long, neither filled further nor put in its place: its writer is gone."""
    try:
        with os.scandir(folder) as found:
            begun = [entry for entry in found if entry.name.startswith(_NEW)]
        for entry in begun:
            state = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(state.st_mode) and time.time() - state.st_mtime > _ABANDONED:
                os.unlink(entry.path)
    except OSError:
        return  # somebody else is at it, or it resists; nothing depends on it


def sync_folder(path: str) -> None:
    """Put the names in a folder on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_names(path: str, root: str) -> None:
    """Put all names that lead from the root to `path` on the disk."""
    while len(path := os.path.dirname(path)) >= len(root):
        sync_folder(path)


def put(tree: FileTree, key: str, data: bytes, *, only_new: bool = False, only_existing: bool = False) -> bool:
    """Replace the object in one step; False when it is there (`only_new`) or is not (`only_existing`)."""
    path = tree.guarded(key)
    if (only_new and os.path.lexists(path)) or (only_existing and not os.path.lexists(path)):
        return False

    def fill(temp: str) -> None:
        fd = make_file(temp, os.O_WRONLY)
        try:
            write_all(fd, data)
            # The kernel's own stamp is coarse: two quick puts could look like one.
            now = time.time_ns()
            os.utime(fd, ns=(now, now))
            os.fsync(fd)
        finally:
            os.close(fd)

    def place(temp: str) -> bool:
        if only_existing:
            return _replaced(temp, path)
        if only_new:
            try:
                os.link(temp, path)
            except FileExistsError:
                return False
            return True
        os.rename(temp, path)
        return True

    try:
        return _placed(tree, path, fill, place, make=not only_existing)
    except FileNotFoundError:
        if only_existing:
            return False
        raise KeyMissing(f"{key!r} was deleted while it was written; nothing was kept") from None
    except OSError as error:
        raise write_failed(path, error) from error


def _replaced(temp: str, path: str) -> bool:
    """Put `temp` in the place of a file that is there; False when it is there no more."""
    try:
        exchange(temp, path)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        # A file system that cannot exchange: only a delete in this very moment could be undone.
        if not os.path.lexists(path):
            return False
        os.rename(temp, path)
    return True


def _placed(
    tree: FileTree, path: str, fill: Callable[[str], None], place: Callable[[str], bool], *, make: bool
) -> bool:
    """Fill a hidden file beside `path`, put it in place, and put the step on the disk."""
    folder = os.path.dirname(path)
    made = make and not os.path.isdir(folder)
    if made:
        make_folders(folder, tree.root)
    temp = new_beside(tree, folder)
    try:
        fill(temp)
        placed = place(temp)
    finally:
        # None is left after a rename; the old object after an exchange; a second name after a link.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
    if placed:
        # Deleted in this moment: then there is nothing to put on the disk.
        with contextlib.suppress(FileNotFoundError):
            sync_names(path, tree.root) if made else sync_folder(folder)
    return placed


def copy(tree: FileTree, source: str, target: str) -> None:
    """Give the bytes of `source` a second name; they are copied only where a file cannot have two."""
    start, path = tree.guarded(source), tree.guarded(target)
    missing = KeyMissing(f"there is no object {source!r} to copy to {target!r}")
    if not os.path.isfile(start):
        raise missing

    def fill(temp: str) -> None:
        try:
            if os.path.islink(start):
                raise OSError(errno.EXDEV, "what a link leads to stays where it is")
            os.link(start, temp)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS):
                raise
            with os.fdopen(tree.open_file(source), "rb") as old, os.fdopen(make_file(temp, os.O_WRONLY), "wb") as new:
                while piece := old.read(_PIECE):
                    new.write(piece)
                new.flush()
                os.fsync(new.fileno())

    def place(temp: str) -> bool:
        os.rename(temp, path)
        return True

    try:
        _placed(tree, path, fill, place, make=True)
    except FileNotFoundError:
        raise missing from None
    except OSError as error:
        raise write_failed(path, error) from error


def remove(tree: FileTree, key: str, as_of: tuple[str, Stamp | None] | None = None) -> bool:
    """Take the key and all below it away in one step, then remove it at leisure; False when there was nothing.

    With `as_of`, also when that log has another stamp by now."""
    path = tree.guarded(key)
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode) and tree.first_key(path) is None:
            return False
        with _unwritten(tree, as_of) as is_unwritten:
            if not is_unwritten:
                return False
            trash = _thrown(path, f"{tree.root}/.trash", tree.root)
        for kind in ("mark", "batch"):
            with contextlib.suppress(OSError):
                os.unlink(hidden_beside(path, kind))
    except OSError as error:
        if tree.absent(error):
            return False
        raise write_failed(path, error) from error
    from shutil import rmtree  # noqa: PLC0415  it brings every kind of compression along, and few ever delete

    # Also what a crash left there. What resists is tried again at the next delete.
    for name in os.listdir(trash):
        if os.path.isdir(f"{trash}/{name}") and not os.path.islink(f"{trash}/{name}"):
            rmtree(f"{trash}/{name}", ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(f"{trash}/{name}")
    return True


@contextlib.contextmanager
def _unwritten(tree: FileTree, as_of: tuple[str, Stamp | None] | None) -> Iterator[bool]:
    """Whether the log still has its stamp; as long as this is open nobody appends to it."""
    if as_of is None:
        yield True
        return
    log, stamp = as_of
    try:
        fd = os.open(tree.guarded(log), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield tree.stamps([log])[0] == stamp  # there is none, or none that anybody could append to
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield tree.stamps([log])[0] == stamp
    finally:
        os.close(fd)


def _thrown(path: str, trash: str, root: str) -> str:
    """Move it into the trash folder, or into one beside it where a file system of its own begins on the way."""
    make_folders(trash, root)
    try:
        os.rename(path, f"{trash}/{_unique()}")
    except OSError as error:
        beside = f"{os.path.dirname(path)}/.trash"
        if error.errno != errno.EXDEV or trash == beside:
            raise
        return _thrown(path, beside, root)
    return trash
