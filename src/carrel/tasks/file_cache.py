"""The cache of sample files: unpacked once by content, shared by all sessions, pruned when unused."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tarfile
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from uuid import uuid4

from pydantic import ValidationError

from carrel.errors import CarrelError, FilesRefused, StorageWriteError
from carrel.execution import temp_dirs
from carrel.execution.environments import locked
from carrel.tasks.git_history import read_bundle, truncate_history
from carrel.tasks.sample import Sample
from carrel.tasks.unpack import UnpackLimits, kind_of, refuse_unfit, unpack_tar, walk_tree
from carrel.wire.verification import Receipt

Kind = Literal["none", "folder", "archive", "bundle"]
_GZIP = b"\x1f\x8b"
_BUNDLE = b"# v"
LEFT_OUT = "__pycache__"
"""Not of the content of a folder: it comes by running or installing what is there."""
_SETTLED = 2.0
"""Seconds after which a file that changes again has another time of change, on any file system."""


@dataclass(frozen=True)
class Source:
    """What a sample's files are made from."""

    kind: Kind
    path: Path | None = None


def inspect_source(files: Path | None) -> Source:
    """By what it is and not by its name; FilesRefused for what is neither of the three kinds."""
    if files is None:
        return Source("none")
    if files.is_dir():
        return Source("folder", files)
    try:
        with files.open("rb") as file:
            beginning = file.read(16)
    except FileNotFoundError:
        raise FilesRefused(f"there is nothing at {files}") from None
    if beginning.startswith(_GZIP):
        return Source("archive", files)
    if beginning.startswith(_BUNDLE) and b"git bundle"[:6] in beginning:
        return Source("bundle", files)
    raise FilesRefused(f"{files} is no folder, .tar.gz or git bundle")


def digest_of(source: Source, cache: Path) -> str:
    """Of the names, kinds, contents and executable bits. What was read once is remembered by its time of change."""
    if source.path is None:
        return hashlib.sha256(b"").hexdigest()
    place = hashlib.sha256(os.fsencode(source.path)).hexdigest()[:32]
    memory = cache / "files" / "digests" / f"{place}.json"
    seen, newest = fingerprint(source)
    known = _remembered(memory, seen)
    if known is not None:
        return known
    digest = _file_digest(source.path) if source.path.is_file() else _folder_digest(source.path)
    if time.time() - newest > _SETTLED and fingerprint(source)[0] == seen:
        memory.parent.mkdir(parents=True, exist_ok=True)
        fresh = memory.with_suffix(f".{uuid4().hex}")
        fresh.write_text(json.dumps({"seen": seen, "digest": digest}), encoding="utf-8")
        fresh.replace(memory)
    return digest


def _remembered(memory: Path, seen: str) -> str | None:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
        return str(known["digest"]) if known["seen"] == seen else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fingerprint(source: Source) -> tuple[str, float]:
    """What the file system says without opening a file, and the last moment at which something changed."""
    assert source.path is not None
    seen, newest = hashlib.sha256(), 0.0
    about = source.path.stat()
    entries = walk_tree(source.path, LEFT_OUT) if source.kind == "folder" else ()
    for path, stats in (("", about), *((entry.path, entry.stat(follow_symlinks=False)) for entry in entries)):
        seen.update(os.fsencode(f"{path}\0{stats.st_mode}\0{stats.st_size}\0{stats.st_ino}\0{stats.st_ctime_ns}\0"))
        newest = max(newest, stats.st_ctime)
    return seen.hexdigest(), newest


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder_digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for entry in walk_tree(folder, LEFT_OUT):
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            kind, content = "link", os.readlink(entry.path)
        elif stat.S_ISREG(mode):
            kind, content = "program" if mode & 0o111 else "file", _file_digest(Path(entry.path))
        else:
            kind, content = "folder" if stat.S_ISDIR(mode) else "other", ""
        whole.update(os.fsencode(f"{os.path.relpath(entry.path, folder)}\0{kind}\0{content}\0"))
    return whole.hexdigest()


class CacheLease:
    """Keeps a folder of the cache from being pruned, by any process, until this object and its process are gone."""

    def __init__(self, folder: Path) -> None:
        """Of a folder that may be still to be made; its own parent is made. StorageWriteError where nothing can be."""
        with _one_at_a_time:
            lock = _locks.get(folder)
            if lock is None:
                lock = _locks[folder] = _Shared(folder)
            self._lock: _Shared | None = lock
        os.utime(lock.descriptor)

    def release(self) -> None:
        """Now, and not when the object goes; twice is harmless."""
        self._lock = None


class _Shared:
    """One for all holds that this process has on a folder: a hundred sessions of a sample cost one descriptor."""

    def __init__(self, folder: Path) -> None:
        file = _file_of(folder)
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as problem:
            raise StorageWriteError(f"nothing can be kept in {folder.parent}: {problem}") from problem
        weakref.finalize(self, os.close, self.descriptor)
        # Who prunes holds it alone for as long as a rename takes.
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)


_one_at_a_time = threading.Lock()
_locks: weakref.WeakValueDictionary[Path, _Shared] = weakref.WeakValueDictionary()


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Whether nobody uses or makes the folder; nobody can begin to while this is open."""
    opened = [
        os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for file in (_file_of(folder), folder.with_suffix(".lock"))
    ]
    try:
        for descriptor in opened:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        for descriptor in opened:
            os.close(descriptor)


def last_used(folder: Path) -> float:
    """Seconds since the epoch."""
    try:
        return _file_of(folder).stat().st_mtime
    except FileNotFoundError:
        return folder.stat().st_mtime


def _file_of(folder: Path) -> Path:
    return folder.with_suffix(".used")


LAYOUT = 1
"""Of the cache; another number makes everything anew."""
TREE, RECEIPT = "tree", "receipt.json"


@dataclass(frozen=True)
class Files:
    """A folder that nobody writes to: what a session changes is kept apart by its overlay."""

    folder: Path
    receipt: Receipt
    digest: str
    """Of what is in the folder: the source and the base commit. The same files of two samples have the same one."""
    hold: CacheLease | None = field(default=None, compare=False)
    """Keeps the folder in the cache while this is there."""


async def prepared_files(sample: Sample, cache: Path) -> Files:
    """The sample's files as a session begins with them, made by the first who asks, in any process.

    FilesRefused says what is wrong with the source; StorageWriteError that there is no room. Either way, and when it
    is killed half way, nothing is left that could be taken for the files."""
    cache = cache.absolute()
    source = inspect_source(sample.files.absolute() if sample.files is not None else None)
    if sample._known_content is None or sample._known_content[0] != source.path:
        sample._known_content = (source.path, await asyncio.to_thread(digest_of, source, cache))
    of_source = sample._known_content[1]
    base = sample.base_commit if source.kind != "none" else ""
    digest = hashlib.sha256(f"{LAYOUT}\0{source.kind}\0{of_source}\0{base}".encode()).hexdigest()[:32]
    folder = cache / "files" / digest
    hold = CacheLease(folder)
    try:
        found = _ready(folder, digest)
        if found is None:
            async with locked(folder.with_suffix(".lock")):
                found = _ready(folder, digest)
                if found is None:
                    await _made(source, of_source, base, folder)
                    found = _ready(folder, digest)
        if found is None:
            raise StorageWriteError(f"{folder} was removed while it was being made")
    except BaseException:
        hold.release()
        raise
    return replace(found, hold=hold)


def _ready(folder: Path, digest: str) -> Files | None:
    try:
        receipt = Receipt.model_validate_json((folder / RECEIPT).read_bytes())
    except (OSError, ValidationError):
        return None
    return Files(folder / TREE, receipt, digest)


async def _made(source: Source, of_source: str, base_commit: str, folder: Path) -> None:
    """In a thread, which is waited for also by one who is cancelled: the lock must outlast it."""
    budget = (
        UnpackLimits.for_packed(source.path)
        if source.path and source.kind != "folder"
        else UnpackLimits(source.path or folder)
    )
    work = asyncio.ensure_future(asyncio.to_thread(_make, source, of_source, base_commit, folder, budget))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        budget.given_up.set()
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):  # Asked again, it still has to wait.
                await asyncio.wait([work])
        work.exception()
        raise


def _make(source: Source, of_source: str, base_commit: str, folder: Path, budget: UnpackLimits) -> None:
    """Made beside its place and moved there whole; what a killed process left beside it is removed first."""
    making = folder.with_suffix(".making")
    temp_dirs.remove(making)
    tree, room = making / TREE, making / "room"
    try:
        tree.mkdir(parents=True)
        room.mkdir()
        bundled = None
        if source.path is not None and source.kind == "folder":
            _copy(source, tree, budget)
        elif source.path is not None and source.kind == "archive":
            unpack_tar(source.path, tree, budget)
        elif source.path is not None:
            bundled = read_bundle(source.path, room, budget)
        if digest_of(source, folder.parent.parent) != of_source:
            raise FilesRefused(f"{budget.what} was changed after it was first looked at; load the dataset again")
        refuse_unfit(tree, budget.what)
        git = truncate_history(tree, base_commit, room, budget, bundled)
        refuse_unfit(tree, budget.what)
        temp_dirs.remove(room)
        receipt = Receipt(source=source.kind, digest=of_source, files=0, bytes=0, git=git)
        for entry in walk_tree(tree):
            about = entry.stat(follow_symlinks=False)
            receipt.files += not stat.S_ISDIR(about.st_mode)
            receipt.bytes += about.st_size if stat.S_ISREG(about.st_mode) else 0
        (making / RECEIPT).write_text(receipt.model_dump_json(), encoding="utf-8")
        temp_dirs.remove(folder)  # Without a receipt that can be read it is of no use to anybody.
        making.rename(folder)
    except CarrelError:
        raise
    except OSError as problem:
        raise StorageWriteError(f"{budget.what} could not be unpacked to {folder.parent}: {problem}") from problem
    finally:
        temp_dirs.remove(making)


def _copy(source: Source, tree: Path, budget: UnpackLimits) -> None:
    """A folder of the user's; links as links."""
    assert source.path is not None
    for entry in walk_tree(source.path, LEFT_OUT):
        about = entry.stat(follow_symlinks=False)
        to = tree / os.path.relpath(entry.path, source.path)
        budget.add(files=1, data=about.st_size if stat.S_ISREG(about.st_mode) else 0)
        if stat.S_ISLNK(about.st_mode):
            os.symlink(os.readlink(entry.path), to)
        elif stat.S_ISDIR(about.st_mode):
            to.mkdir()
        elif stat.S_ISREG(about.st_mode):
            shutil.copyfile(entry.path, to, follow_symlinks=False)
            to.chmod(0o755 if about.st_mode & 0o111 else 0o644)
            os.utime(to, ns=(about.st_atime_ns, about.st_mtime_ns))
        else:
            raise FilesRefused(f"{budget.what}: {entry.name} is {kind_of(about.st_mode)}, and no file or folder")


async def archive_of(sample: Sample, cache: Path) -> Path:
    """A .tar.gz of what the sample's sessions begin with; FilesRefused when there is nothing to be had."""
    files = await prepared_files(sample, cache)
    archive = cache / "downloads" / f"{files.digest}.tar.gz"
    try:
        os.utime(archive)  # `prune` looks at when it was last used
    except FileNotFoundError:
        archive.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        async with locked(archive.with_suffix(".lock")):
            if not archive.is_file():
                await asyncio.to_thread(_pack, files.folder, archive)
    return archive


def _pack(folder: Path, archive: Path) -> None:
    handle, half = tempfile.mkstemp(dir=archive.parent, suffix=".half")
    try:
        with os.fdopen(handle, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz", compresslevel=5) as packed:
            for path in sorted(folder.iterdir()):
                packed.add(path, arcname=path.name, filter=_nobodys)
        os.replace(half, archive)
    except BaseException:
        os.unlink(half)
        raise


def _nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without who owns it here, and writable as files in a session are."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode |= 0o600 if not entry.isdir() else 0o700
    return entry


_GONE = ".gone"


@dataclass(frozen=True)
class Pruned:
    """One folder or archive of the cache that was removed, or would be."""

    name: str
    bytes: int
    last_used: float


@dataclass
class Pruning:
    """What came of it."""

    removed: list[Pruned] = field(default_factory=list)
    in_use: int = 0
    """Folders old enough that somebody uses all the same."""
    kept: int = 0

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.removed)


def prune(cache: Path, before: float, *, dry_run: bool = False) -> Pruning:
    """Remove what was last used before that moment, in seconds since the epoch, and is used by no process now.

    A folder is renamed before it is removed, so that whoever comes meanwhile makes it anew; what a killed prune left
    is removed by the next."""
    done = Pruning()
    for kind in ("files", "layers"):
        for folder in _folders(cache / kind):
            try:
                used = last_used(folder)
                if used >= before:
                    done.kept += 1
                    continue
                found = Pruned(f"{kind}/{folder.name}", sum(_size(part) for part in _parts(folder)), used)
            except FileNotFoundError:
                continue  # another prune was faster
            with exclusive(folder) as free:
                if not folder.exists():
                    continue
                if not free:
                    done.in_use += 1
                    continue
                done.removed.append(found)
                if not dry_run:
                    _take_away(folder)
        if not dry_run:
            for leftover in (cache / kind).glob(f"*{_GONE}"):
                temp_dirs.remove(leftover)
    for archive in sorted((cache / "downloads").glob("*.tar.gz")):
        try:
            about = archive.stat()
        except FileNotFoundError:
            continue  # another prune was faster
        if about.st_mtime >= before:
            done.kept += 1
            continue
        done.removed.append(Pruned(f"downloads/{archive.name}", about.st_size, about.st_mtime))
        if not dry_run:
            # A download that is under way has it open, and ends well.
            archive.unlink(missing_ok=True)
            archive.with_suffix(".lock").unlink(missing_ok=True)
    return done


def _folders(place: Path) -> Iterator[Path]:
    if place.is_dir():
        for folder in sorted(place.iterdir()):
            if folder.is_dir() and not folder.suffix and folder.name != "digests":
                yield folder


def _parts(folder: Path) -> list[Path]:
    return [part for part in (folder, folder.with_suffix(".home")) if part.exists()]


def _take_away(folder: Path) -> None:
    """Its mark first: without one it is nothing that anybody would take for whole."""
    folder.with_suffix(".json").unlink(missing_ok=True)
    for part in _parts(folder):
        part.rename(part.with_name(f"{part.name}.{os.getpid()}{_GONE}"))


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            about = os.lstat(os.path.join(place, name))
            total += about.st_size if stat.S_ISREG(about.st_mode) else 0
    return total
