"""Keys as paths below one folder: found, refused, listed and read; blocking, without a loop."""

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from carrel.errors import KeyRefused, StorageReadError, StorageWriteError
from carrel.storage.libc import open_beneath
from carrel.storage.seam import LONGEST_KEY, Stamp, checked_key

_log = logging.getLogger("carrel.storage")

_NO_BEGINNING = ("", ".", "/")

_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a named pipe must not hold us up
_LOOKING = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW
_SMALL = 64 * 1024

_ADVICE = {
    errno.ENOSPC: "make room on the disk and try again",
    errno.EDQUOT: "your quota is used up; make room and try again",
    errno.EFBIG: "the limit on the size of a file is reached; raise it (ulimit -f) or begin another log",
    errno.EROFS: "the file system is read-only; mount it for writing or choose another folder",
    errno.EACCES: "see who owns it and what its permissions are",
    errno.EPERM: "see who owns it, what its permissions are, and what its file system can do",
    errno.EMFILE: "this process has too many files open; raise its limit (ulimit -n)",
    errno.ENFILE: "the machine has too many files open; close some",
    errno.EIO: "the disk reports an error; look into the system log before you trust it further",
    errno.ENOTDIR: "a file stands where a folder is needed; move it away or use another key",
    errno.EISDIR: "a folder stands where a file is needed; use another key",
    errno.EEXIST: "a file stands where a folder is needed; move it away or use another key",
    errno.ELOOP: "it is a symbolic link, and links are not written through; put the file itself there",
}


def is_hidden(name: str) -> bool:
    """Names that begin with one dot are the store's own, or of some other program, and never shown."""
    return name[0] == "." and name[1:2] != "."


def is_plain(name: str) -> bool:
    """Whether a file of this name can be one of a key."""
    if name.isascii() and name.isprintable() and name[0] != "." and "\\" not in name:
        return True
    try:
        return not is_hidden(checked_key(name))
    except KeyRefused:
        return False


def hidden_beside(path: str, kind: str) -> str:
    """Where our own file of this kind is that belongs to a log."""
    folder, name = os.path.split(path)
    if len(name) > 60:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f"{folder}/.{name}.{kind}"


def is_short_enough(key: str) -> bool:
    """Folders can lie in each other deeper than a key can tell."""
    return len(key) < 256 or len(key.encode()) <= LONGEST_KEY


class OpenFile:
    """A file descriptor that is closed when nobody holds it any more, so that it is never closed under a thread."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


def write_failed(what: str, error: OSError) -> StorageWriteError:
    """The error for a caller: what could not be written, why, and what to do."""
    failed = StorageWriteError(f"{what} could not be written: {_reason(error)}")
    failed.errno = error.errno
    return failed


def read_failed(what: str, error: OSError) -> StorageReadError:
    """The same for reading."""
    failed = StorageReadError(f"{what} could not be read: {_reason(error)}")
    failed.errno = error.errno
    return failed


def _reason(error: OSError) -> str:
    advice = _ADVICE.get(error.errno or 0)
    return f"{error.strerror} ({advice})" if advice else str(error)


class FileTree:
    """The folder in which keys are paths."""

    def __init__(self, root: Path | str) -> None:
        self.root = os.path.abspath(root)
        self._told: set[str] = set()
        """The links that lead out, and the names that no key can have, of which was told."""
        self.swept: set[str] = set()
        """The folders that were looked through for what a crash left."""

    # --- where a key is ---------------------------------------------------------------------------------------------

    def path(self, key: str) -> str:
        """Where the key is, or `KeyRefused`."""
        _refuse_odd(key)
        return f"{self.root}/{key}"

    def guarded(self, key: str) -> str:
        """The same; `KeyRefused` too when a folder on the way is a link that leads out of here."""
        path = self.path(key)
        end = len(self.root)
        while (end := path.find("/", end + 1)) > 0:
            try:
                mode = os.lstat(path[:end]).st_mode
            except OSError:
                break  # whoever goes there meets the same error and knows what to make of it
            if stat.S_ISLNK(mode) and self._inside(path[:end]) is None:
                raise self._leads_out(key, path[:end])
        return path

    def _inside(self, path: str) -> str | None:
        """Where the links of a path lead in the end, or None when that is out of here."""
        real, home = os.path.realpath(path), os.path.realpath(self.root)
        return real if os.path.commonpath((real, home)) == home else None

    def _leads_out(self, key: str, path: str) -> KeyRefused:
        # Code inside may read this: where the store is on the host is not told.
        link = path[len(self.root) + 1 :]
        return KeyRefused(f"{key!r} leads out of its folder by the link {link!r}; nothing was touched")

    def open_file(self, key: str) -> int:
        """Open for reading; `KeyRefused` when it is a link that leads out of here, else OSError."""
        path = self.guarded(key)
        try:
            return os.open(path, _READING)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        real = self._inside(path)
        if real is None:
            raise self._leads_out(key, path)
        return os.open(real, _READING)

    def folder(self, prefix: str) -> str:
        """The folder of everything below a prefix, "" being the root."""
        return os.path.dirname(self.guarded(f"{prefix}/x")) if prefix else self.root

    def absent(self, error: OSError) -> bool:
        """Whether it only says that there is nothing, and not that the root itself is unusable."""
        if isinstance(error, (FileNotFoundError, IsADirectoryError)):
            return True
        return isinstance(error, NotADirectoryError) and (os.path.isdir(self.root) or not os.path.lexists(self.root))

    # --- reading ----------------------------------------------------------------------------------------------------

    def open(self, key: str) -> tuple[OpenFile, os.stat_result] | None:
        """Open for reading, or None when there is no such file."""
        try:
            file = OpenFile(self.open_file(key))
            found = os.fstat(file.fd)
        except OSError as error:
            if self.absent(error):
                return None
            raise read_failed(self.path(key), error) from error
        return (file, found) if stat.S_ISREG(found.st_mode) else None

    def content(self, key: str, file: OpenFile, size: int) -> bytes:
        """The bytes of an open object."""
        try:
            data = os.pread(file.fd, size, 0)
            while len(data) < size and (more := os.pread(file.fd, size - len(data), len(data))):
                data += more
        except OSError as error:
            raise read_failed(self.path(key), error) from error
        return data

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The bytes of many small objects."""
        for key in keys:
            _refuse_odd(key)
        root = self._open_root()
        if root is None:
            return [None] * len(keys)
        return [self._small(key, root.fd) for key in keys]

    def _small(self, key: str, root: int) -> bytes | None:
        try:
            fd = open_beneath(root, key, _READING)
        except OSError:
            return self._get(key)  # none, or by a link: then with more care
        try:
            data = os.read(fd, _SMALL)
        except OSError:
            data = b""
        os.close(fd)
        # Nothing, not all, or no file at all: then with more care.
        return data if 0 < len(data) < _SMALL else self._get(key)

    def _open_root(self) -> OpenFile | None:
        """The folder of all keys, or None when it is not there."""
        try:
            return OpenFile(os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            if self.absent(error):
                return None
            raise read_failed(self.root, error) from error

    def _get(self, key: str) -> bytes | None:
        opened = self.open(key)
        return self.content(key, opened[0], opened[1].st_size) if opened else None

    def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        """Of each key, or None where no file is that may be read."""
        for key in keys:
            _refuse_odd(key)
        root = self._open_root()
        if root is None:
            return [None] * len(keys)
        return [self._stamp(key, root.fd) for key in keys]

    def _stamp(self, key: str, root: int) -> Stamp | None:
        found = _looked_at(key, root) or self._found(key)
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        # The time of its content alone would not do: programs that copy files set it to what it was elsewhere.
        version = hash((found.st_ino, found.st_mtime_ns, found.st_ctime_ns))
        return Stamp(found.st_size, found.st_mtime, version)

    def _found(self, key: str) -> os.stat_result | None:
        """What is there, also behind links that lead nowhere else than here."""
        try:
            path = self.guarded(key)
            found = os.lstat(path)
            if stat.S_ISLNK(found.st_mode):
                real = self._inside(path)
                return os.stat(real) if real is not None else None
        except KeyRefused:
            return None
        except OSError as error:
            if self.absent(error):
                return None
            raise read_failed(self.path(key), error) from error
        return found

    # --- listing ----------------------------------------------------------------------------------------------------

    def keys(self, prefix: str) -> list[str]:
        """Every key that is `prefix` or below it, sorted; links that lead out of here are none."""
        if prefix and os.path.isfile(path := self.guarded(prefix)):
            return [prefix] if not os.path.islink(path) or self._inside(path) else []
        keys: list[str] = []
        waiting = [(f"{prefix}/" if prefix else "", self.folder(prefix))]
        while waiting:
            start, folder = waiting.pop()
            for entry in self.entries(folder):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((f"{start}{entry.name}/", entry.path))
                elif self._is_file(entry):
                    keys.append(start + entry.name)
        for key in keys:
            if not is_short_enough(key):
                self._pass_over(f"{self.root}/{key}", f"has a path of more than {LONGEST_KEY} bytes")
        return sorted(filter(is_short_enough, keys))

    def entries(self, folder: str) -> Iterator["os.DirEntry[str]"]:
        """What is in a folder, not hidden and with a name that a key can have; nothing when it is gone."""
        try:
            with os.scandir(folder) as found:
                for entry in found:
                    if is_plain(entry.name):
                        yield entry
                    elif not is_hidden(entry.name):
                        self._pass_over(
                            entry.path, "has a backslash, a control character or what is no text in its name"
                        )
        except OSError as error:
            if not self.absent(error):
                raise read_failed(folder, error) from error

    def folders(self, prefix: str) -> list[str]:
        """The names of the folders below a prefix that have keys in them, sorted; links are not entered."""
        names, likely = [], ""
        for entry in self.entries(self.folder(prefix)):
            if entry.is_dir(follow_symlinks=False):
                # Where folders are alike, a file that one has is in the next one too, and nothing has to be listed.
                if not (likely and os.path.isfile(f"{entry.path}/{likely}")):
                    found = self.first_key(entry.path)
                    if found is None:
                        continue
                    likely = found
                names.append(entry.name)
        return sorted(names)

    def first_key(self, folder: str) -> str | None:
        """Some key below a folder, as seen from there, or None when it has none."""
        waiting = [""]
        while waiting:
            start = waiting.pop()
            for entry in self.entries(f"{folder}/{start}"):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{start}{entry.name}/")
                elif self._is_file(entry):
                    return start + entry.name
        return None

    def _is_file(self, entry: "os.DirEntry[str]") -> bool:
        try:
            if not entry.is_file():
                return False
        except OSError:
            return False  # a link that leads to itself
        if not entry.is_symlink() or self._inside(entry.path) is not None:
            return True
        self._pass_over(entry.path, f"is a link that leads out of {self.root}")
        return False

    def _pass_over(self, path: str, why: str) -> None:
        if path not in self._told:
            self._told.add(path)
            # A name may be no text, and a log that cannot write it would fail.
            _log.warning("%s %s and is passed over", os.fsencode(path).decode("utf-8", "backslashreplace"), why)


def _looked_at(key: str, root: int) -> os.stat_result | None:
    """What is at a key, by a way without links; None when there is nothing, or a link."""
    try:
        fd = open_beneath(root, key, _LOOKING)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    return None if stat.S_ISLNK(found.st_mode) else found


def _refuse_odd(key: str) -> None:
    if (
        len(key) < 256
        and key.isascii()
        and key.isprintable()
        and key[:1] not in _NO_BEGINNING
        and "/." not in key
        and "//" not in key
        and "\\" not in key
        and key[-1] != "/"
    ):
        return
    for part in checked_key(key).split("/"):
        if is_hidden(part):
            raise KeyRefused(f"{key!r} has a name that begins with '.': those are kept for the store's own files")
        try:
            size = len(os.fsencode(part))
        except UnicodeEncodeError:
            raise KeyRefused(f"{key!r} has a character that no file name can have") from None
        if size > 255:
            raise KeyRefused(f"the name {part[:40]!r}… in a key is longer than the 255 bytes a file name can have")
