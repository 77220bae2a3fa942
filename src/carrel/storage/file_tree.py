"""Keys as paths below one folder: found, refused, listed and read; blocking, without a loop."""

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from carrel.errors import KeyRefused, StorageReadError, StorageWriteError
from carrel.storage.seam import LONGEST_KEY, Stamp, checked_key

_log = logging.getLogger("carrel.storage")

_NO_BEGINNING = ("", ".", "/")

_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a named pipe must not hold us up
_SMALL = 64 * 1024

_OFTEN = 32
_PER_KEY = 3
"""Who asks so often what something in a folder is has it listed; and no more of it than this for each key."""

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
        ways = _Ways(self.root, root.fd, len(keys))
        return [self._small(key, root.fd, ways) for key in keys]

    def _small(self, key: str, root: int, ways: "_Ways") -> bytes | None:
        if not ways.straight(key.rpartition("/")[0]):
            return self._get(key)
        try:
            fd = os.open(key, _READING, dir_fd=root)
        except OSError:
            return self._get(key)
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
        ways = _Ways(self.root, root.fd, len(keys))
        return [self._checked_stamp(key, root.fd, ways) for key in keys]

    def _checked_stamp(self, key: str, root: int, ways: "_Ways") -> Stamp | None:
        if not ways.straight(key.rpartition("/")[0]):
            try:
                self.guarded(key)
            except KeyRefused:
                return None
        return self._stamp(key, root)

    def _stamp(self, key: str, root: int) -> Stamp | None:
        try:
            found = os.stat(key, dir_fd=root, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                real = self._inside(f"{self.root}/{key}")
                if real is None:
                    return None
                found = os.stat(real)
        except OSError as error:
            if self.absent(error):
                return None
            raise read_failed(self.path(key), error) from error
        if not stat.S_ISREG(found.st_mode):
            return None
        # The time of its content alone would not do: programs that copy files set it to what it was elsewhere.
        version = hash((found.st_ino, found.st_mtime_ns, found.st_ctime_ns))
        return Stamp(found.st_size, found.st_mtime, version)

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


class _Ways:
    """The folders to which the way is folders alone, no links: looked at once each, for many keys."""

    def __init__(self, path: str, root: int, keys: int) -> None:
        """`root`: the folder of all keys, open, and `path` where it is; `keys`: how many will be asked for."""
        self._path = path
        self._root = root
        self._at_most = _PER_KEY * keys
        self._straight = {""}
        self._asked: dict[str, int] = {}
        """How often for something in a folder."""

    def straight(self, folder: str) -> bool:
        """Whether the way to a folder is so."""
        if folder in self._straight:
            return True
        above = folder.rpartition("/")[0]
        if above not in self._straight and not self.straight(above):
            return False
        asked = self._asked[above] = self._asked.get(above, 0) + 1
        if asked == _OFTEN:
            self._list(above)
            return self.straight(folder)
        try:
            found = os.stat(folder, dir_fd=self._root, follow_symlinks=False)
        except OSError:
            return False
        if not stat.S_ISDIR(found.st_mode):
            return False
        self._straight.add(folder)
        return True

    def _list(self, above: str) -> None:
        """A folder with many in it tells what they are in a third of the time that it takes to ask each."""
        start = f"{above}/" if above else ""
        with contextlib.suppress(OSError), os.scandir(f"{self._path}/{above}") as entries:
            # A look into one that has far more than are asked for is not worth it.
            for entry in itertools.islice(entries, self._at_most):
                if entry.is_dir(follow_symlinks=False):
                    self._straight.add(start + entry.name)


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
