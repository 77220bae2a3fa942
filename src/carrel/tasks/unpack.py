"""Unpack untrusted archives: sizes are limited, and no path or link leads out of the target folder."""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from carrel.errors import FilesRefused

MIB = 1024 * 1024
MAX_BYTES = 16 * 1024 * MIB
"""All files of a sample together, unpacked."""
MAX_FILES = 2_000_000
ALWAYS_ALLOWED = 256 * MIB
"""Bytes that any archive may unpack to, however small it is."""
MAX_RATIO = 100
"""How many times its own size a larger archive may unpack to; source code packs to a third or a tenth."""
_MAX_LINKS = 40
"""Links that the kernel follows for one path."""


@dataclass
class UnpackLimits:
    """Counts what is unpacked; FilesRefused above the limits."""

    what: Path
    """The source that error messages name."""
    most_bytes: int = MAX_BYTES
    most_files: int = MAX_FILES
    bytes: int = 0
    files: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when the caller was cancelled; the work ends at the next count."""

    @classmethod
    def for_packed(cls, file: Path) -> UnpackLimits:
        """The limits of an archive, which depend on its size: a bomb unpacks to many times its size."""
        return cls(file, min(MAX_BYTES, max(ALWAYS_ALLOWED, MAX_RATIO * file.stat().st_size)))

    def add(self, *, files: int = 0, data: int = 0) -> None:
        self.files += files
        self.bytes += data
        if self.cancelled.is_set():
            raise FilesRefused(f"{self.what}: unpacking was cancelled")
        if self.bytes > self.most_bytes:
            raise FilesRefused(
                f"{self.what} unpacks to more than {self.most_bytes // MIB:,} MiB, more than a sample may have "
                f"({MAX_RATIO} times its packed size, {MAX_BYTES // MIB:,} MiB at most)"
            )
        if self.files > self.most_files:
            raise FilesRefused(
                f"{self.what} has more than {self.most_files:,} files, which is more than a sample may have"
            )


def safe_member_path(name: str, what: Path) -> str:
    """A member's name as a plain relative path; empty for the top folder. FilesRefused for one that leads out."""
    if name.startswith("/"):
        raise FilesRefused(f"{what}: {name!r} is an absolute path; files of a sample have relative paths")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise FilesRefused(f"{what}: {name!r} leads out of the sample's folder")
    return "/".join(parts)


def walk_tree(tree: Path, without: str | None = None) -> Iterator[os.DirEntry[str]]:
    """All entries below a folder except those named `without`; links are not followed. Folders precede content."""
    folders = [str(tree)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name == without:
                    continue
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def refuse_unfit(tree: Path, what: Path) -> None:
    """FilesRefused for a device, a pipe, a socket, or a link that leads out of the tree, even through other links."""
    for entry in walk_tree(tree):
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            refuse_link_out(tree, os.path.relpath(entry.path, tree), what)
        elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise FilesRefused(f"{what}: {os.path.relpath(entry.path, tree)} is {kind_of(mode)}, not a file or folder")


def kind_of(mode: int) -> str:
    """A name for what is not a file, folder or link."""
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"


def refuse_link_out(tree: Path, path: str, what: Path) -> None:
    """Follow a link step by step, as the kernel does. It may lead to nothing, but not out of the tree."""
    position: list[str] = path.split("/")[:-1]
    target = os.readlink(tree / path)
    ahead, links = _steps(target), 1
    problem = FilesRefused(f"{what}: the link {path} leads out of the sample's folder, to {target}")
    if target.startswith("/"):
        raise problem
    while ahead:
        step = ahead.pop(0)
        if step == "..":
            if not position:
                raise problem
            position.pop()
            continue
        here = tree.joinpath(*position, step)
        if here.is_symlink():
            links += 1
            onward = os.readlink(here)
            if onward.startswith("/"):
                raise problem
            if links > _MAX_LINKS:
                return  # The kernel stops here as well: the link leads nowhere.
            ahead[:0] = _steps(onward)
        else:
            position.append(step)


def _steps(target: str) -> list[str]:
    return [step for step in target.split("/") if step not in ("", ".")]


_HEADER_ROOM = 8 * MIB
"""Bytes between two files of an archive: names and attributes. Python's tarfile reads all of it into memory."""
_PIECE = MIB


class _LimitedReader:
    """Reads an archive, but not more than `due` bytes before it is raised."""

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


def unpack_tar(file: Path, into: Path, limits: UnpackLimits) -> None:
    """Unpack into a new, empty folder. Owners, set-user-ID bits and unusual modes are dropped."""
    with open(file, "rb") as packed:
        try:
            with gzip.GzipFile(fileobj=packed) as plain:
                _unpack(_LimitedReader(plain, file), into, file, limits)
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as problem:
            raise FilesRefused(f"{file} is not a complete .tar.gz: {problem}") from None


def _unpack(source: _LimitedReader, into: Path, what: Path, limits: UnpackLimits) -> None:
    # Links come last: until then no path can lead through one.
    links: dict[str, str] = {}
    modified: dict[str, float] = {}
    source.due = _HEADER_ROOM
    with tarfile.open(fileobj=cast(IO[bytes], source), mode="r|", errorlevel=2) as archive:
        while (member := archive.next()) is not None:
            path = safe_member_path(member.name, what)
            limits.add(files=1)
            if not path:
                continue
            if links.keys() & set(_above(path)):
                raise FilesRefused(f"{what}: {path} lies below a link")
            links.pop(path, None)
            if member.isdir():
                _make_folder(into, path, what)
                modified[path] = member.mtime
            elif member.issym():
                _remove_existing(into / path, what, path)
                links[path] = member.linkname
            elif member.islnk():
                _copy_hard_link(into, path, safe_member_path(member.linkname, what), what, limits)
            elif member.isreg() and not member.issparse():
                limits.add(data=member.size)
                source.due = member.size + _HEADER_ROOM
                content = archive.extractfile(member)
                assert content is not None
                _write(into, path, content, member, what)
                source.due = _HEADER_ROOM
            else:
                raise FilesRefused(f"{what}: {path} is a device, a pipe or a sparse file, not a file, folder or link")
            archive.members = []  # type: ignore[attr-defined]  # It would remember each of millions of members.
    while source.read(_PIECE):
        pass  # The checksum of the archive is at its end, after what tarfile reads.
    for path, target in sorted(links.items()):
        _make_folder(into, os.path.dirname(path), what)
        _remove_existing(into / path, what, path)
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
        raise FilesRefused(f"{what}: {path} is both a folder and a file in it") from None


def _remove_existing(target: Path, what: Path, path: str) -> None:
    """A later member of the same name replaces an earlier file, as in tar."""
    try:
        target.unlink(missing_ok=True)
    except OSError:
        raise FilesRefused(f"{what}: {path} is both a folder and a file in it") from None


def _new_file(into: Path, path: str, what: Path, mode: int) -> int:
    _make_folder(into, os.path.dirname(path), what)
    _remove_existing(into / path, what, path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(into / path, flags, 0o755 if mode & 0o111 else 0o644)


def _write(into: Path, path: str, content: IO[bytes], member: tarfile.TarInfo, what: Path) -> None:
    with os.fdopen(_new_file(into, path, what, member.mode), "wb") as file:
        left = member.size
        while left:
            piece = content.read(min(_PIECE, left))
            if not piece:
                raise FilesRefused(f"{what} is not a complete .tar.gz: it ends within {path}")
            file.write(piece)
            left -= len(piece)
    _set_time(into / path, member.mtime)


def _copy_hard_link(into: Path, path: str, of: str, what: Path, limits: UnpackLimits) -> None:
    """Copy the target of a hard link, so that a change to one file does not change the other."""
    original = into / of
    if not of or not original.is_file():
        raise FilesRefused(
            f"{what}: {path} is a hard link to {of or 'nothing'}, which is not an earlier file of the archive"
        )
    if of == path:
        return
    about = original.stat()
    limits.add(data=about.st_size)
    with open(original, "rb") as source, os.fdopen(_new_file(into, path, what, about.st_mode), "wb") as file:
        while piece := source.read(_PIECE):
            file.write(piece)
    _set_time(into / path, about.st_mtime)


def _set_time(path: Path, moment: float) -> None:
    """Set the time of the archive, limited to what a file system can store."""
    moment = min(max(moment, 0), 2**33)
    os.utime(path, (moment, moment))
