"""Keys as paths below one folder: checked, opened, listed and stamped. Everything here blocks."""

import errno
import hashlib
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from carrel.errors import KeyRefused, StorageReadError, StorageWriteError
from carrel.storage.base import MAX_KEY, Stamp, check_key

_log = logging.getLogger("carrel.storage")

_PLAIN_KEY = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)*", re.ASCII)
"""Most keys; others are looked at part by part."""

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: opening a named pipe returns

_ADVICE = {
    errno.ENOSPC: "make room on the disk and try again",
    errno.EDQUOT: "your quota is used up; make room and try again",
    errno.EFBIG: "the limit on the size of a file is reached; raise it (ulimit -f) or begin another log",
    errno.EROFS: "the file system is read-only; mount it for writing or choose another folder",
    errno.EACCES: "check its owner and its permissions",
    errno.EPERM: "check its owner, its permissions and what its file system supports",
    errno.EMFILE: "this process has too many open files; raise its limit (ulimit -n)",
    errno.ENFILE: "the machine has too many open files; close some",
    errno.EIO: "the disk reports an error; check the system log before you rely on the disk",
    errno.ENOTDIR: "a file stands where a folder is needed; move it away or use another key",
    errno.EISDIR: "a folder stands where a file is needed; use another key",
    errno.EEXIST: "a file stands where a folder is needed; move it away or use another key",
    errno.ELOOP: "it is a symbolic link, and links are not written through; put the file itself there",
}


def is_hidden(name: str) -> bool:
    """Return whether a name begins with one dot: such files belong to the store or to other programs."""
    return name[0] == "." and name[1:2] != "."


def is_key_part(name: str) -> bool:
    """Return whether a file name can be part of a key."""
    if name.isascii() and name.isprintable() and name[0] != "." and "\\" not in name:
        return True
    try:
        return not is_hidden(check_key(name))
    except KeyRefused:
        return False


def hidden_beside(path: str, kind: str) -> str:
    """Return the path of the store's own file of this kind that belongs to a log."""
    folder, name = os.path.split(path)
    if len(name) > 60:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f"{folder}/.{name}.{kind}"


def stamp_of(found: os.stat_result) -> Stamp:
    """Return the stamp of a file."""
    # The time of its content alone is not enough: programs that copy files set it to that of the original.
    return Stamp(found.st_size, found.st_mtime, hash((found.st_ino, found.st_mtime_ns, found.st_ctime_ns)))


class FileHandle:
    """A file descriptor that is closed when the last reference is gone, so never while a thread uses it."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


def write_error(what: str, error: OSError) -> StorageWriteError:
    """Return the error for a failed write: what could not be written, why, and what to do."""
    failed = StorageWriteError(f"{what} could not be written: {_reason(error)}")
    failed.errno = error.errno
    return failed


def read_error(what: str, error: OSError) -> StorageReadError:
    """Return the error for a failed read."""
    failed = StorageReadError(f"{what} could not be read: {_reason(error)}")
    failed.errno = error.errno
    return failed


def _reason(error: OSError) -> str:
    advice = _ADVICE.get(error.errno or 0)
    return f"{error.strerror} ({advice})" if advice else str(error)


class PathMapper:
    """The folder of a store, in which keys are paths."""

    def __init__(self, root: Path | str) -> None:
        self.root = os.path.abspath(root)
        self.cleaned: set[str] = set()
        """The folders in which abandoned files of killed writers were looked for."""
        self._warned: set[str] = set()

    # --- the path of a key ------------------------------------------------------------------------------------------

    def path(self, key: str) -> str:
        """Return the path of a key; `KeyRefused` if a file cannot have it."""
        if len(key) < 256 and _PLAIN_KEY.fullmatch(key):
            return f"{self.root}/{key}"
        for part in check_key(key).split("/"):
            if is_hidden(part):
                raise KeyRefused(
                    f"invalid key {key!r}: names that begin with '.' are reserved for the store's own files"
                )
            try:
                size = len(os.fsencode(part))
            except UnicodeEncodeError:
                raise KeyRefused(
                    f"invalid key {key!r}: it has a character that the file names of this machine cannot express"
                ) from None
            if size > 255:
                raise KeyRefused(f"invalid key: the name {part[:40]!r}… is longer than the 255 bytes of a file name")
        return f"{self.root}/{key}"

    def safe_path(self, key: str, checked: set[str] | None = None) -> str:
        """Return the path of a key; `KeyRefused` also if a folder in it is a link that leads outside the store.

        `checked` collects the folders that were looked at, for a caller with many keys."""
        path = self.path(key)
        self._check_folder(key, path.rpartition("/")[0], set() if checked is None else checked)
        return path

    def _check_folder(self, key: str, folder: str, checked: set[str]) -> None:
        if folder in checked or len(folder) <= len(self.root):
            return
        self._check_folder(key, folder.rpartition("/")[0], checked)
        try:
            mode = os.lstat(folder).st_mode
        except OSError:
            return  # the caller meets the same error and knows what it means there
        if stat.S_ISLNK(mode) and self._resolve_inside(folder) is None:
            raise self._leads_outside(key, folder)
        checked.add(folder)

    def _resolve_inside(self, path: str) -> str | None:
        """Return the file that a path leads to through links, or None if it is outside the store."""
        real, root = os.path.realpath(path), os.path.realpath(self.root)
        return real if os.path.commonpath((real, root)) == root else None

    def _leads_outside(self, key: str, path: str) -> KeyRefused:
        # Guest code may read this message, so it does not show where the store is on the host.
        link = path[len(self.root) + 1 :]
        return KeyRefused(f"{key!r} leads out of its folder by the link {link!r}; nothing was touched")

    def folder(self, prefix: str) -> str:
        """Return the folder of everything below a prefix; the prefix "" is the root."""
        return os.path.dirname(self.safe_path(f"{prefix}/x")) if prefix else self.root

    def is_missing(self, error: OSError) -> bool:
        """Return whether the error only says that there is nothing, and not that the root itself is unusable."""
        if isinstance(error, (FileNotFoundError, IsADirectoryError)) or error.errno == errno.ELOOP:
            return True  # ELOOP: a link that leads to itself
        return isinstance(error, NotADirectoryError) and (os.path.isdir(self.root) or not os.path.lexists(self.root))

    # --- reading ----------------------------------------------------------------------------------------------------

    def open(self, key: str, checked: set[str] | None = None) -> tuple[FileHandle, os.stat_result] | None:
        """Open a regular file for reading, or return None if there is none."""
        try:
            file = FileHandle(self._open_file(key, checked))
            found = os.fstat(file.fd)
        except OSError as error:
            if self.is_missing(error):
                return None
            raise read_error(self.path(key), error) from error
        return (file, found) if stat.S_ISREG(found.st_mode) else None

    def _open_file(self, key: str, checked: set[str] | None) -> int:
        path = self.safe_path(key, checked)
        try:
            return os.open(path, _READ_FLAGS)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        real = self._resolve_inside(path)
        if real is None:
            raise self._leads_outside(key, path)
        return os.open(real, _READ_FLAGS)

    def read(self, key: str, file: FileHandle, size: int) -> bytes:
        """Return the first `size` bytes of an open object."""
        try:
            return read_range(file.fd, 0, size)
        except OSError as error:
            raise read_error(self.path(key), error) from error

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of many small objects."""
        checked: set[str] = set()
        found: list[bytes | None] = []
        for key in keys:
            opened = self.open(key, checked)
            found.append(self.read(key, opened[0], opened[1].st_size) if opened else None)
        return found

    def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        """Return the stamp of each key, or None where there is no file that may be read."""
        checked: set[str] = set()
        return [self._stamp(key, checked) for key in keys]

    def _stamp(self, key: str, checked: set[str]) -> Stamp | None:
        self.path(key)
        try:
            path = self.safe_path(key, checked)
            found = os.lstat(path)
            if stat.S_ISLNK(found.st_mode):
                real = self._resolve_inside(path)
                if real is None:
                    return None
                found = os.stat(real)
        except KeyRefused:
            return None
        except OSError as error:
            if self.is_missing(error):
                return None
            raise read_error(self.path(key), error) from error
        return stamp_of(found) if stat.S_ISREG(found.st_mode) else None

    # --- listing ----------------------------------------------------------------------------------------------------

    def keys(self, prefix: str) -> list[str]:
        """Return every key that is `prefix` or below it, sorted; links that lead outside are left out."""
        if prefix and os.path.isfile(path := self.safe_path(prefix)):
            return [prefix] if not os.path.islink(path) or self._resolve_inside(path) else []
        return sorted(key for key, _ in self._walk(prefix))

    def scan(self, prefix: str, names: Collection[str]) -> dict[str, Stamp]:
        """Return the stamps of all keys below a prefix, or only of those with one of these names one folder down."""
        found: dict[str, Stamp] = {}
        if names:
            start = f"{prefix}/" if prefix else ""
            for entry in self._entries(self.folder(prefix)):
                if entry.is_dir(follow_symlinks=False):
                    try:
                        for name in names:
                            self._add_stamp(found, f"{start}{entry.name}/{name}", f"{entry.path}/{name}")
                    except StorageReadError as problem:
                        self._leave_out(entry, problem)
        else:
            for key, path in self._walk(prefix):
                self._add_stamp(found, key, path)
        return found

    def _leave_out(self, folder: "os.DirEntry[str]", problem: StorageReadError) -> None:
        """Log a folder that this user may not enter, instead of hiding the others; raise any other problem."""
        if problem.errno != errno.EACCES:
            raise problem
        self._warn(folder.path, "may not be entered by this user (permission denied)")

    def _add_stamp(self, found: dict[str, Stamp], key: str, path: str) -> None:
        try:
            state = os.lstat(path)
        except OSError as error:
            if self.is_missing(error):
                return
            raise read_error(path, error) from error
        if stat.S_ISREG(state.st_mode):
            found[key] = stamp_of(state)
        elif stat.S_ISLNK(state.st_mode) and (stamp := self._stamp(key, set())) is not None:
            found[key] = stamp

    def folders(self, prefix: str) -> list[str]:
        """Return the names of the folders below a prefix that have keys in them, sorted; links are not followed."""
        names, likely = [], ""
        for entry in self._entries(self.folder(prefix)):
            if entry.is_dir(follow_symlinks=False):
                # A file that one folder has is usually in the next one too; then that one need not be listed.
                if not (likely and os.path.isfile(f"{entry.path}/{likely}")):
                    try:
                        found = self.first_key(entry.path)
                    except StorageReadError as problem:
                        self._leave_out(entry, problem)
                        continue
                    if found is None:
                        continue
                    likely = found
                names.append(entry.name)
        return sorted(names)

    def first_key(self, folder: str) -> str | None:
        """Return some key below a folder, relative to it, or None if it has none."""
        waiting = [""]
        while waiting:
            start = waiting.pop()
            for entry in self._entries(f"{folder}/{start}"):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{start}{entry.name}/")
                elif self._is_file(entry):
                    return start + entry.name
        return None

    def _walk(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Iterate over (key, path) of every file below a prefix."""
        waiting = [(f"{prefix}/" if prefix else "", self.folder(prefix))]
        while waiting:
            start, folder = waiting.pop()
            for entry in self._entries(folder):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((f"{start}{entry.name}/", entry.path))
                elif self._is_file(entry):
                    key = start + entry.name
                    if len(key) < MAX_KEY // 4 or len(key.encode()) <= MAX_KEY:
                        yield key, entry.path
                    else:
                        self._warn(entry.path, f"has a path of more than {MAX_KEY} bytes")

    def _entries(self, folder: str) -> Iterator["os.DirEntry[str]"]:
        """Iterate over what is in a folder and can be part of a key; nothing if the folder is gone."""
        try:
            with os.scandir(folder) as found:
                for entry in found:
                    if is_key_part(entry.name):
                        yield entry
                    elif not is_hidden(entry.name):
                        self._warn(entry.path, "has a backslash, a control character or invalid text in its name")
        except OSError as error:
            if not self.is_missing(error):
                raise read_error(folder, error) from error

    def _is_file(self, entry: "os.DirEntry[str]") -> bool:
        try:
            if not entry.is_file():
                return False
        except OSError:
            return False  # a link that leads to itself
        if not entry.is_symlink() or self._resolve_inside(entry.path) is not None:
            return True
        self._warn(entry.path, f"is a link that leads out of {self.root}")
        return False

    def _warn(self, path: str, why: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            # The name may be invalid text, which a log handler could not write.
            _log.warning("%s %s and is ignored", os.fsencode(path).decode("utf-8", "backslashreplace"), why)


def read_range(fd: int, start: int, end: int) -> bytes:
    """Return the bytes of a file from `start` to `end`, or fewer if it ends before."""
    data = os.pread(fd, end - start, start)
    while start + len(data) < end and (more := os.pread(fd, end - start - len(data), start + len(data))):
        data += more
    return data
