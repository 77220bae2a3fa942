"""A file's new content, all of it or none: written beside the file, and put in its place when it is complete."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid

LARGEST_KEPT = 32 * 1024 * 1024
"""Bytes of a file that are remembered while it is written where it stands, to put them back where that fails."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def put(path: str, data: bytes) -> None:
    """Missing folders are made. What a link leads to is replaced, not the link.

    A file is written where it stands when none can be made beside it, or none that would be the same to others: it has
    a second name, an owner that cannot be given, attributes. There too a failure leaves what was there.
    """
    about = _about(path)
    beside = _name_beside(path, uuid.uuid4().hex)
    try:
        if _put_unnamed(path, about, data, beside):
            return
        fd = _made(path, about, beside)
        if fd is None:
            _write_here(path, data)
            return
        try:
            _write(fd, data)
        finally:
            os.close(fd)
    except OSError as problem:
        _forget(beside)
        if problem.errno not in _FULL or about is None or len(data) > about.st_size:
            raise OSError(problem.errno, os.strerror(problem.errno or 0), path) from None
        # No room for both, and what is no longer than before needs none.
        _write_here(path, data)
        return
    _put_in_place(beside, path)


def _put_unnamed(path: str, about: os.stat_result | None, data: bytes, beside: str) -> bool:
    """The same by a file that has no name until it is complete: whatever ends this process leaves nothing behind.

    False where there are no such files, or they get no name: then nothing has been done.
    """
    fd = _made(path, about, None)
    if fd is None:
        return False
    try:
        _write(fd, data)
        if about is None and _named(fd, os.path.realpath(path)):
            return True
        if not _named(fd, beside):
            return False
    finally:
        os.close(fd)
    _put_in_place(beside, path)
    return True


def _named(fd: int, path: str) -> bool:
    try:
        # With a folder's descriptor, which is not looked at: without one Python does not follow the link.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except OSError:
        return False
    return True


def put_piece(path: str, data: bytes, part: str, *, first: bool, more: bool) -> bool:
    """One piece of content that comes in several, all under one name of the caller's choice, which has letters and
    numbers only. False when none can be made beside the file: then nothing has been done."""
    if not part.isalnum():
        raise ValueError(f"{part!r} is no name for a part")
    beside = _name_beside(path, part)
    fd = _made(path, _about(path), beside) if first else os.open(beside, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    if fd is None:
        return False
    try:
        try:
            _write(fd, data)
        finally:
            os.close(fd)
        if not more:
            _put_in_place(beside, path)
    except OSError as problem:
        _forget(beside)
        raise OSError(problem.errno, os.strerror(problem.errno or 0), path) from None
    return True


def forget_piece(path: str, part: str) -> None:
    """No more of it will come."""
    if part.isalnum():
        _forget(_name_beside(path, part))


def _about(path: str) -> os.stat_result | None:
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _name_beside(path: str, part: str) -> str:
    return os.path.join(os.path.dirname(os.path.realpath(path)), f".carrel-{part}")


def _made(path: str, about: os.stat_result | None, beside: str | None) -> int | None:
    """An empty file that can take the other's place, with a name or without; None where there can be none."""
    if about is not None and not (
        stat.S_ISREG(about.st_mode) and about.st_nlink == 1 and os.access(path, os.W_OK) and not _has_attributes(path)
    ):
        return None
    mode = 0o666 if about is None else 0o600
    try:
        if beside is None:
            fd = os.open(os.path.dirname(os.path.realpath(path)), os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, mode)
        else:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError:
        return None
    if about is None:
        return fd
    try:
        own = os.fstat(fd)
        if (own.st_uid, own.st_gid) != (about.st_uid, about.st_gid):
            os.fchown(fd, about.st_uid, about.st_gid)
        os.fchmod(fd, stat.S_IMODE(about.st_mode))
    except OSError:
        os.close(fd)
        if beside is not None:
            _forget(beside)
        return None
    return fd


def _has_attributes(path: str) -> bool:
    try:
        return bool(os.listxattr(path))
    except OSError:
        return False


def _put_in_place(beside: str, path: str) -> None:
    try:
        os.replace(beside, os.path.realpath(path))
    except OSError:
        # It is mounted by itself, or has become a folder, which the next step says.
        try:
            with open(beside, "rb") as file:
                _write_here(path, file.read())
        finally:
            _forget(beside)


def _write_here(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is no regular file")
        before = _content(path) if 0 < about.st_size <= LARGEST_KEPT else None
        try:
            _write(fd, data)
            # Files of /proc say that they are empty, and cannot be cut.
            if about.st_size > len(data):
                os.ftruncate(fd, len(data))
        except OSError as problem:
            if before is not None:
                with contextlib.suppress(OSError):
                    os.lseek(fd, 0, os.SEEK_SET)
                    _write(fd, before)
                    os.ftruncate(fd, len(before))
            raise OSError(problem.errno, os.strerror(problem.errno or 0), path) from None
    finally:
        os.close(fd)


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _forget(beside: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)
