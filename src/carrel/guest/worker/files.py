"""Read, write, list and change files. Nothing here waits on a FIFO, a socket or a device."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
_COPY_SIZE = 1024 * 1024


def open_to_read(path: str) -> BinaryIO:
    """A regular file; raises what `open` raises, and OSError for what is no regular file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check_regular(path, os.fstat(fd).st_mode)
        return open(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def _check_regular(path: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file", path)


class FileWriter:
    """New content of a file, in pieces; it takes the place of the old when `commit` is called.

    It is written to a temporary file beside, which then replaces the file. Where that cannot be, or would make it
    another file to others (a second name, an owner that cannot be given, attributes, a mount of its own), it is written
    to a temporary file elsewhere, which `commit` copies into the file. A link's target is replaced, not the link.
    Missing folders are made.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        _make_parents(path)
        self._target = os.path.realpath(path)
        self._beside: str | None = os.path.join(os.path.dirname(self._target), f".carrel-{uuid.uuid4().hex}")
        before = None
        with suppress(FileNotFoundError):
            before = os.stat(path)
        if before is not None:
            _check_regular(path, before.st_mode)
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        self._file: BinaryIO
        if before is not None and (before.st_nlink > 1 or _has_attributes(path)):
            self._write_elsewhere()
            return
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.fdopen(
                os.open(str(self._beside), flags, 0o666 if before is None else 0o600), "wb", buffering=0
            )
            if before is not None:
                _copy_owner_and_mode(self._file.fileno(), before)
        except OSError:
            self.abort()
            if before is None:
                raise
            self._write_elsewhere()

    def _write_elsewhere(self) -> None:
        self._beside = None
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by commit or abort

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def commit(self) -> None:
        """Put the content in the file's place; the file is as it was where that fails for want of room."""
        try:
            if self._beside is not None:
                self._file.close()
                try:
                    os.replace(self._beside, self._target)
                except OSError:  # it is mounted by itself
                    with open(self._beside, "rb") as source:
                        self._copy_into_place(source)
                    os.unlink(self._beside)
                self._beside = None
            else:
                self._file.seek(0)
                self._copy_into_place(self._file)
        finally:
            self.abort()

    def _copy_into_place(self, source: BinaryIO) -> None:
        fd = os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        with open(fd, "wb", buffering=0) as target:
            size = os.fstat(source.fileno()).st_size
            before = os.fstat(fd)
            _check_regular(self.path, before.st_mode)
            if size > before.st_size:
                try:
                    os.posix_fallocate(fd, before.st_size, size - before.st_size)
                except OSError as problem:  # not on every file system; then a full disk is found while copying
                    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise OSError(problem.errno, os.strerror(problem.errno), self.path) from None
            shutil.copyfileobj(source, target, _COPY_SIZE)
            if before.st_size or size:
                with suppress(OSError):  # files of /proc cannot be cut
                    os.ftruncate(fd, size)

    def abort(self) -> None:
        """Forget the new content; the file stays as it is."""
        if hasattr(self, "_file"):
            self._file.close()
        if self._beside is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._beside)


def _make_parents(path: str) -> None:
    folder = os.path.dirname(path)
    if folder:
        try:
            os.makedirs(folder, exist_ok=True)
        except FileExistsError:  # `open` would call it by another name
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def _has_attributes(path: str) -> bool:
    try:
        return bool(os.listxattr(path))
    except OSError:
        return False


def _copy_owner_and_mode(fd: int, source: os.stat_result) -> None:
    own = os.fstat(fd)
    if (own.st_uid, own.st_gid) != (source.st_uid, source.st_gid):
        os.fchown(fd, source.st_uid, source.st_gid)
    os.fchmod(fd, stat.S_IMODE(source.st_mode))


def write_file(path: str, data: bytes) -> None:
    """Replace a file's content by this."""
    writer = FileWriter(path)
    try:
        writer.write(data)
    except BaseException:
        writer.abort()
        raise
    writer.commit()


def replace_text(path: str, old: str, new: str) -> None:
    """Replace a text that is in the file exactly once; ValueError with the number of matches otherwise."""
    if not old:
        raise ValueError("the text to replace is empty")
    with open_to_read(path) as file:
        data = file.read()
    # As bytes, so that a file which is not all UTF-8 keeps what is not.
    before, after = old.encode("utf-8", "surrogateescape"), new.encode("utf-8", "surrogateescape")
    count = data.count(before)
    if count != 1:
        raise ValueError(f"the text to replace was found {count} times in {path}; it must be there exactly once")
    write_file(path, data.replace(before, after))


def describe(name: str, path: str, status: os.stat_result) -> dict[str, Any]:
    """An entry of a list of files."""
    return {
        "name": name,
        "kind": _KINDS.get(stat.S_IFMT(status.st_mode), "other"),
        "size": status.st_size,
        "mtime": status.st_mtime,
        "ctime_ns": status.st_ctime_ns,
        "mode": stat.S_IMODE(status.st_mode),
        **({"target": os.readlink(path)} if stat.S_ISLNK(status.st_mode) else {}),
    }


def stat_file(path: str) -> dict[str, Any]:
    """One entry; of a link that of its target, and the `target`."""
    entry = describe(os.path.basename(path), path, os.lstat(path))
    if entry["kind"] == "link":
        return {**describe(os.path.basename(path), path, os.stat(path)), "target": entry["target"]}
    return entry


def list_folder(path: str, *, recursive: bool = False) -> Iterator[dict[str, Any]]:
    """The entries of a folder by name; with `recursive` also those of the folders below that can be read."""
    folders = [""]
    while folders:
        below = folders.pop()
        try:
            with os.scandir(os.path.join(path, below) if below else path) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            if not below:
                raise
            continue
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            try:
                yield describe(name, entry.path, entry.stat(follow_symlinks=False))
                if recursive and entry.is_dir(follow_symlinks=False):
                    folders.append(name)
            except FileNotFoundError:
                continue  # removed meanwhile


def unpack(archive: Any, folder: str, remove: list[str]) -> None:
    """Remove these paths below a folder, and unpack a tar archive there, which comes from the host."""
    import tarfile  # noqa: PLC0415 -- most sessions have no use for it

    for name in remove:
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    # The host made the archive, and trusts it; older Pythons have no parameter for that.
    trusted: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(fileobj=archive, mode="r|") as entries:
        entries.extractall(folder, **trusted)


def make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        if os.path.lexists(path):
            raise
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def remove(path: str, *, recursive: bool) -> None:
    """A file, a link, an empty folder; with `recursive` a folder with all that is in it."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.remove(path)
    elif recursive:
        shutil.rmtree(path)
    else:
        os.rmdir(path)


def move(path: str, to: str) -> None:
    """Rename, also from one file system to another; a file that is there is replaced."""
    try:
        os.rename(path, to)
    except OSError as problem:
        # A folder of the layer below an overlay cannot be renamed either.
        if problem.errno != errno.EXDEV:
            raise
        if os.path.isdir(to) and not os.path.islink(to):
            os.rmdir(to)  # as rename does: only an empty one is replaced
        shutil.move(path, to)


def real_path(path: str, *, strict: bool = True) -> str:
    """Absolute and without links; `strict`: FileNotFoundError for what does not exist."""
    if strict:
        os.stat(path)
    return os.path.realpath(path)
