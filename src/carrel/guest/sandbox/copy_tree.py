"""Copy a folder with modes, links, times, extended attributes, and the deletion marks of an overlay's upper layer."""

from __future__ import annotations

import errno
import os
import stat

_ATTEMPTS = 10
_CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EISDIR)


def copy_tree(source: str, target: str) -> None:
    """Copy into a folder that exists. Sockets are left out: no program listens on a copy.

    Other processes may change the source meanwhile: what they have removed by then is not copied."""
    _copy_folder(source, target, {})


def _copy_folder(source: str, target: str, links: dict[tuple[int, int], str]) -> None:
    for name in os.listdir(source):
        _copy_entry(f"{source}/{name}", f"{target}/{name}", links)
    _copy_attributes(source, target, os.stat(source))


def _copy_entry(source: str, target: str, links: dict[tuple[int, int], str]) -> None:
    """Try again where an entry disappears or is replaced in the middle."""
    for attempt in range(_ATTEMPTS):
        try:
            _copy_one(source, target, os.lstat(source), links)
        except OSError as problem:
            if problem.errno not in _CHANGED or attempt == _ATTEMPTS - 1:
                raise
            _remove(target)
            if not os.path.lexists(source):
                return
        else:
            return


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        empty_tree(path)
        os.rmdir(path)
    elif os.path.lexists(path):
        os.remove(path)


def _copy_one(source: str, target: str, found: os.stat_result, links: dict[tuple[int, int], str]) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        os.mkdir(target, 0o700)
        _copy_folder(source, target, links)
        return
    if found.st_nlink > 1:
        known = links.setdefault((found.st_dev, found.st_ino), target)
        if known != target and os.path.lexists(known):
            os.link(known, target, follow_symlinks=False)
            return
    if kind == stat.S_IFLNK:
        os.symlink(os.readlink(source), target)
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)
        return
    if kind == stat.S_IFREG:
        _copy_content(source, target, found.st_size)
    elif kind == stat.S_IFIFO:
        os.mkfifo(target)
    elif kind == stat.S_IFCHR and found.st_rdev == 0:
        # An overlay's mark for a file that was deleted; the one device that anybody may make.
        os.mknod(target, stat.S_IFCHR, 0)
    else:
        return
    _copy_attributes(source, target, found)


def _copy_content(source: str, target: str, size: int) -> None:
    # It may have become a named pipe, and opening that would wait.
    read = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Holes stay holes: a sparse file may be larger than the whole disk.
            position = 0
            while position < size:
                try:
                    position = os.lseek(read, position, os.SEEK_DATA)
                except OSError:
                    break
                end = os.lseek(read, position, os.SEEK_HOLE)
                os.lseek(write, position, os.SEEK_SET)
                while position < end:
                    sent = os.sendfile(write, read, position, min(end - position, 1 << 30))
                    if sent == 0:
                        break
                    position += sent
            os.truncate(write, size)
        finally:
            os.close(write)
    finally:
        os.close(read)


def _copy_attributes(source: str, target: str, found: os.stat_result) -> None:
    if not stat.S_ISCHR(found.st_mode):
        for name in os.listxattr(source, follow_symlinks=False):
            if name.startswith("user."):
                os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    os.chmod(target, stat.S_IMODE(found.st_mode))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)


def empty_tree(folder: str) -> None:
    """Remove what is in a folder, whatever its modes are; a folder that something is mounted on stays."""
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            empty_tree(entry.path)
            try:
                os.rmdir(entry.path)
            except OSError as problem:
                if problem.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                    raise
        else:
            os.remove(entry.path)
