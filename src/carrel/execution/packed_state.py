"""The state of a session as compressed archives, for a store that several machines share."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import shutil
import stat
import tarfile
import uuid
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from carrel.errors import StateNotSaved
from carrel.execution import temp_dirs
from carrel.execution.durable import GENERATION, make_own, take_lock
from carrel.text import readable_size

_OPAQUE = "user.overlay.opaque"
_OPAQUE_HEADER = f"SCHILY.xattr.{_OPAQUE}"
_PACKED = ("upper", "home", "upper.copied", "home.copied")
_DEEPEST = 200
_LARGE_FILE = 1 << 20
_SEGMENT = 8 << 20
"""Bytes of small files after which another archive is begun."""
_CUT = 64
"""One in so many names ends an archive, so that a changed file changes only the archive that it is in."""
_PIECE = 1 << 20


def state_manifest(folder: Path) -> dict[str, Any] | None:
    """The description of a state, without what holds on this machine only; None where there is no state."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        return {name: manifest[name] for name in ("parts", "network", "python", "generation")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def pack_files(folder: Path, generation: str, most: int | None) -> Generator[tuple[str, Path]]:
    """Pack the files of a state into compressed archives, and yield each with the digest of what is in it.

    An archive is there until the next one is asked for. StateNotSaved when the files are more than so many bytes; files
    with holes count whole. What changes meanwhile is packed as it was or as it is; no link is followed."""
    if GENERATION.fullmatch(generation) is None:
        raise StateNotSaved("the files were not stored: the manifest of the state is damaged")
    spool = temp_dirs.new_folder("state")
    archive: _Archive | None = None
    try:
        total, links = 0, dict[tuple[int, int], str]()
        for entry in _walk(folder / "files" / generation):
            total += entry.about.st_size if stat.S_ISREG(entry.about.st_mode) else 0
            if most is not None and total > most:
                raise StateNotSaved(f"the files were not stored: they are more than {readable_size(most)}; delete some")
            is_large = stat.S_ISREG(entry.about.st_mode) and entry.about.st_size >= _LARGE_FILE
            if is_large and archive is not None:
                finished, archive = archive, None
                yield finished.finish()
            archive = archive or _Archive(spool / "archive")
            archive.add(entry, links)
            if is_large or archive.size > _SEGMENT or hashlib.sha256(os.fsencode(entry.path)).digest()[0] % _CUT == 0:
                finished, archive = archive, None
                yield finished.finish()
        if archive is not None:
            finished, archive = archive, None
            yield finished.finish()
    finally:
        if archive is not None:
            archive.finish()
        temp_dirs.remove(spool)


class _PackedEntry(NamedTuple):
    """A file, folder or link, and an open folder in which it is `name`."""

    path: str
    folder: int
    name: str
    about: os.stat_result
    is_opaque: bool = False


def _walk(root: Path) -> Iterator[_PackedEntry]:
    with suppress(FileNotFoundError):
        descriptor = os.open(root, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield from _walk_folder(descriptor, "", 0)
        finally:
            os.close(descriptor)


def _walk_folder(folder: int, path: str, depth: int) -> Iterator[_PackedEntry]:
    """By descriptors: code of the session may put a link in the place of a folder at any moment."""
    if depth > _DEEPEST:
        raise StateNotSaved(f"the files were not stored: folders are more than {_DEEPEST} deep; delete some")
    for name in sorted(os.listdir(folder)):
        if depth == 0 and name not in _PACKED:
            continue
        inner = f"{path}/{name}" if path else name
        inside = -1
        try:
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(about.st_mode):
                yield _PackedEntry(inner, folder, name, about)
                continue
            inside = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            yield _PackedEntry(inner, folder, name, about, _is_opaque(inside))
            yield from _walk_folder(inside, inner, depth + 1)
        except (FileNotFoundError, NotADirectoryError):
            continue  # It was moved meanwhile.
        finally:
            if inside >= 0:
                os.close(inside)


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE) == b"y"
    except OSError:
        return False


class _Archive:
    """One archive that is being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._file = path.open("wb")
        self._compressed = gzip.GzipFile("", "wb", 1, self._file, mtime=0)
        self.size = 0
        self._tar = tarfile.open(  # noqa: SIM115 -- `finish` closes it
            fileobj=cast(IO[bytes], self), mode="w|", format=tarfile.PAX_FORMAT
        )

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self.size += len(data)
        return self._compressed.write(data)

    def add(self, entry: _PackedEntry, links: dict[tuple[int, int], str]) -> None:
        """Add one entry; `links` are the paths of files with several names."""
        about, kind = entry.about, stat.S_IFMT(entry.about.st_mode)
        info = tarfile.TarInfo(entry.path)
        info.mode, info.mtime = stat.S_IMODE(about.st_mode) & 0o1777, about.st_mtime
        if kind == stat.S_IFDIR:
            info.type = tarfile.DIRTYPE
            if entry.is_opaque:
                info.pax_headers = {_OPAQUE_HEADER: "y"}
        elif about.st_nlink > 1 and (known := links.setdefault((about.st_dev, about.st_ino), entry.path)) != entry.path:
            info.type, info.linkname = tarfile.LNKTYPE, known
        elif kind == stat.S_IFLNK:
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry.name, dir_fd=entry.folder)
        elif kind == stat.S_IFCHR and about.st_rdev == 0:
            info.type = tarfile.CHRTYPE  # an overlay's mark for a file that was deleted
        elif kind == stat.S_IFIFO:
            info.type = tarfile.FIFOTYPE
        elif kind == stat.S_IFREG:
            self._add_file(entry, info)
            return
        else:
            return  # a socket: no program listens on a copy
        self._tar.addfile(info)

    def _add_file(self, entry: _PackedEntry, info: tarfile.TarInfo) -> None:
        # It may have become a named pipe, and opening that would wait.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(entry.name, flags, dir_fd=entry.folder), "rb") as file:
            about = os.fstat(file.fileno())
            if stat.S_ISREG(about.st_mode):
                info.size = entry.about.st_size
                self._tar.addfile(info, cast(IO[bytes], _Exactly(file, info.size)))

    def finish(self) -> tuple[str, Path]:
        self._tar.close()
        self._compressed.close()
        self._file.close()
        return self._digest.hexdigest(), self._path


class _Exactly:
    """So many bytes of a file that may become shorter while it is read."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left)).ljust(min(size, self._left), b"\0")
        self._left -= len(data)
        return data


class StateImport:
    """Replaces the state in a folder by one that comes from a store; nothing changes before `finish`."""

    def __init__(self, folder: Path, manifest: dict[str, Any], most: int | None) -> None:
        """SessionBusy when a process of this machine uses the folder."""
        self._folder, self._manifest, self._left = folder, manifest, most
        make_own(folder)
        self._lock = take_lock(folder)
        self._generation = uuid.uuid4().hex
        self._root = folder / "files" / self._generation
        self._root.mkdir(mode=0o700, parents=True)
        self._kinds: dict[str, bytes] = {"": tarfile.DIRTYPE}
        self._folders: list[tarfile.TarInfo] = []
        self._links: list[tarfile.TarInfo] = []

    def add(self, archive: Path) -> None:
        """Unpack one archive; StateNotSaved for one that no carrel has packed."""
        try:
            with tarfile.open(archive, "r|gz") as tar:
                for info in tar:
                    self._add(info, tar)
        except (tarfile.TarError, EOFError, OSError, ValueError) as problem:
            raise StateNotSaved(f"the stored files cannot be unpacked: {problem}") from None

    def _add(self, info: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        parent, _, name = info.name.rpartition("/")
        is_plain = name not in ("", ".", "..") and "\0" not in name and (parent or name in _PACKED)
        if not is_plain or self._kinds.get(parent) != tarfile.DIRTYPE or info.name in self._kinds:
            raise ValueError(f"an unexpected entry {info.name[:100]!r}")
        target = self._root / info.name
        if info.type == tarfile.DIRTYPE:
            target.mkdir(mode=0o700)
            self._folders.append(info)
        elif info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            self._links.append(info)  # Last, so that nothing is written through one.
        elif info.type == tarfile.CHRTYPE:
            os.mknod(target, stat.S_IFCHR, 0)
        elif info.type == tarfile.FIFOTYPE:
            os.mkfifo(target, info.mode & 0o777)
        elif info.isreg():
            if self._left is not None:
                self._left -= info.size
                if self._left < 0:
                    raise ValueError("they are larger than limits.disk of the session")
            content = tar.extractfile(info)
            assert content is not None
            with target.open("xb") as file:
                shutil.copyfileobj(content, file, _PIECE)
                os.fchmod(file.fileno(), info.mode & 0o1777)
            os.utime(target, (info.mtime, info.mtime))
        else:
            raise ValueError(f"an entry of an unknown kind {info.type!r}")
        self._kinds[info.name] = info.type

    def finish(self, variables: Path | None) -> None:
        """Make it the state of the folder, with a file of variables if there is one."""
        for info in self._links:
            target = self._root / info.name
            if info.type == tarfile.SYMTYPE:
                os.symlink(info.linkname, target)
                os.utime(target, (info.mtime, info.mtime), follow_symlinks=False)
            elif self._kinds.get(info.linkname) == tarfile.REGTYPE:
                os.link(self._root / info.linkname, target, follow_symlinks=False)
        for info in reversed(self._folders):
            target = self._root / info.name
            if info.pax_headers.get(_OPAQUE_HEADER) == "y":
                os.setxattr(target, _OPAQUE, b"y")
            os.chmod(target, info.mode & 0o1777)
            os.utime(target, (info.mtime, info.mtime))
        (self._folder / "variables").unlink(missing_ok=True)
        new = self._folder / "manifest.new"
        new.write_text(json.dumps({**self._manifest, "generation": self._generation}), encoding="utf-8")
        new.replace(self._folder / "manifest.json")
        if variables is not None:
            shutil.move(variables, self._folder / "variables")

    def close(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
