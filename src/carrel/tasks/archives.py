"""Unpacking a .tar.gz that nobody vouches for: counted while it is read, no path or link out of the folder."""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from pathlib import Path
from typing import IO, cast

from carrel.errors import FilesRefused
from carrel.tasks.tree_rules import MIB, Budget, inner_path

_HEADER_ROOM = 8 * MIB
"""What stands between two files of an archive: names and attributes. Python's tarfile reads that into memory whole."""
_PIECE = MIB


class _Metered:
    """Bytes out of an archive, no more than are due."""

    def __init__(self, file: gzip.GzipFile, what: Path) -> None:
        self._file = file
        self._what = what
        self.due = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.due -= len(data)
        if self.due < 0:
            raise FilesRefused(f"{self._what}: a header of more than {_HEADER_ROOM // MIB} MiB")
        return data


def unpack_tar(file: Path, into: Path, budget: Budget) -> None:
    """Into a new, empty folder that nobody else writes to. Owners, set-user-ID bits and odd modes are left behind."""
    with open(file, "rb") as packed:
        try:
            with gzip.GzipFile(fileobj=packed) as plain:
                _unpack(_Metered(plain, file), into, file, budget)
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as problem:
            raise FilesRefused(f"{file} is no whole .tar.gz: {problem}") from None


def _unpack(source: _Metered, into: Path, what: Path, budget: Budget) -> None:
    # Links come last: until then no path can lead through one.
    links: dict[str, str] = {}
    modified: dict[str, float] = {}
    source.due = _HEADER_ROOM
    with tarfile.open(fileobj=cast(IO[bytes], source), mode="r|", errorlevel=2) as archive:
        while (member := archive.next()) is not None:
            path = inner_path(member.name, what)
            budget.add(files=1)
            if not path:
                continue
            if links.keys() & set(_above(path)):
                raise FilesRefused(f"{what}: {path} lies below a link")
            links.pop(path, None)
            if member.isdir():
                _make_folder(into, path, what)
                modified[path] = member.mtime
            elif member.issym():
                _vacate(into / path, what, path)
                links[path] = member.linkname
            elif member.islnk():
                _copy_twin(into, path, inner_path(member.linkname, what), what, budget)
            elif member.isreg() and not member.issparse():
                budget.add(data=member.size)
                source.due = member.size + _HEADER_ROOM
                content = archive.extractfile(member)
                assert content is not None
                _write(into, path, content, member, what)
                source.due = _HEADER_ROOM
            else:
                raise FilesRefused(f"{what}: {path} is a device, a pipe or a sparse file, and no file, folder or link")
            archive.members = []  # type: ignore[attr-defined]  # else it remembers each of millions
    while source.read(_PIECE):
        pass  # The checksum of the whole stands at its end, behind what tar itself reads.
    for path, target in sorted(links.items()):
        _make_folder(into, os.path.dirname(path), what)
        _vacate(into / path, what, path)
        os.symlink(target, into / path)
    for path, moment in modified.items():
        if path not in links and (into / path).is_dir():
            _set_time(into / path, moment)


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _make_folder(into: Path, path: str, what: Path) -> None:
    try:
        os.makedirs(into / path, 0o755, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise FilesRefused(f"{what}: {path} is a folder in one place and a file in another") from None


def _vacate(place: Path, what: Path, path: str) -> None:
    """A later entry of the same name replaces an earlier file, as tar has it."""
    try:
        place.unlink(missing_ok=True)
    except OSError:
        raise FilesRefused(f"{what}: {path} is a folder in one place and a file in another") from None


def _new_file(into: Path, path: str, what: Path, mode: int) -> int:
    _make_folder(into, os.path.dirname(path), what)
    _vacate(into / path, what, path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(into / path, flags, 0o755 if mode & 0o111 else 0o644)


def _write(into: Path, path: str, content: IO[bytes], member: tarfile.TarInfo, what: Path) -> None:
    with os.fdopen(_new_file(into, path, what, member.mode), "wb") as file:
        left = member.size
        while left:
            piece = content.read(min(_PIECE, left))
            if not piece:
                raise FilesRefused(f"{what} is no whole .tar.gz: it ends within {path}")
            file.write(piece)
            left -= len(piece)
    _set_time(into / path, member.mtime)


def _copy_twin(into: Path, path: str, of: str, what: Path, budget: Budget) -> None:
    """A hard link: a file of its own with the same content, so that a change to one is no change to the other."""
    original = into / of
    if not of or not original.is_file():
        raise FilesRefused(
            f"{what}: {path} is a hard link to {of or 'nothing'}, which is no file before it in the archive"
        )
    if of == path:
        return
    about = original.stat()
    budget.add(data=about.st_size)
    with open(original, "rb") as source, os.fdopen(_new_file(into, path, what, about.st_mode), "wb") as file:
        while piece := source.read(_PIECE):
            file.write(piece)
    _set_time(into / path, about.st_mtime)


def _set_time(place: Path, moment: float) -> None:
    """As the archive says, within what a file system can say."""
    moment = min(max(moment, 0), 2**33)
    os.utime(place, (moment, moment))
