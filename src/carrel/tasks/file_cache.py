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
IGNORED = "__pycache__"
"""Not part of a folder's content: it appears when its code is run or installed."""
_SETTLED = 2.0
"""Seconds after which a file that changes again gets another time stamp, on any file system."""


@dataclass(frozen=True)
class Source:
    """What a sample's files are made from."""

    kind: Kind
    path: Path | None = None


def inspect_source(files: Path | None) -> Source:
    """The kind of a source, by its content and not by its name; FilesRefused for any other kind."""
    if files is None:
        return Source("none")
    if files.is_dir():
        return Source("folder", files)
    try:
        with files.open("rb") as file:
            beginning = file.read(16)
    except FileNotFoundError:
        raise FilesRefused(f"{files} does not exist") from None
    if beginning.startswith(_GZIP):
        return Source("archive", files)
    if beginning.startswith(_BUNDLE) and b"git bundle"[:6] in beginning:
        return Source("bundle", files)
    raise FilesRefused(f"{files} is not a folder, .tar.gz or git bundle")


def digest_of(source: Source, cache: Path) -> str:
    """A digest of names, kinds, contents and executable bits. It is cached together with the files' time stamps."""
    if source.path is None:
        return hashlib.sha256(b"").hexdigest()
    name = hashlib.sha256(os.fsencode(source.path)).hexdigest()[:32]
    record = cache / "files" / "digests" / f"{name}.json"
    seen, newest = fingerprint(source)
    known = _read_digest(record, seen)
    if known is not None:
        return known
    digest = _file_digest(source.path) if source.path.is_file() else _folder_digest(source.path)
    if time.time() - newest > _SETTLED and fingerprint(source)[0] == seen:
        record.parent.mkdir(parents=True, exist_ok=True)
        fresh = record.with_suffix(f".{uuid4().hex}")
        fresh.write_text(json.dumps({"seen": seen, "digest": digest}), encoding="utf-8")
        fresh.replace(record)
    return digest


def _read_digest(record: Path, seen: str) -> str | None:
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
        if known["seen"] != seen:
            return None
        os.utime(record)  # `prune` removes records that were not used for a while.
        return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fingerprint(source: Source) -> tuple[str, float]:
    """A digest of the file system's metadata, read without opening files, and the time of the last change."""
    assert source.path is not None
    seen, newest = hashlib.sha256(), 0.0
    about = source.path.stat()
    entries = walk_tree(source.path, IGNORED) if source.kind == "folder" else ()
    for path, stats in (("", about), *((entry.path, entry.stat(follow_symlinks=False)) for entry in entries)):
        seen.update(os.fsencode(f"{path}\0{stats.st_mode}\0{stats.st_size}\0{stats.st_ino}\0{stats.st_ctime_ns}\0"))
        newest = max(newest, stats.st_ctime)
    return seen.hexdigest(), newest


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder_digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for entry in walk_tree(folder, IGNORED):
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
    """Protects a folder of the cache from being pruned by any process, while this object and its process exist."""

    def __init__(self, folder: Path) -> None:
        """The folder need not exist yet; its parent is made. StorageWriteError when that is not possible."""
        with _locks_guard:
            lock = _locks.get(folder)
            if lock is None:
                lock = _locks[folder] = _SharedLock(folder)
            self._lock: _SharedLock | None = lock
        os.utime(lock.descriptor)

    def release(self) -> None:
        """Release the lease now; calling it twice has no effect."""
        self._lock = None


class _SharedLock:
    """The lock of all leases that this process has on a folder: a hundred sessions need one descriptor."""

    def __init__(self, folder: Path) -> None:
        file = _lock_file(folder)
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # `prune` takes the lock exclusively, for the duration of a rename.
            self.descriptor = _open_locked(file, fcntl.LOCK_SH)
        except OSError as problem:
            raise StorageWriteError(f"the cache folder {folder.parent} cannot be written to: {problem}") from problem
        weakref.finalize(self, os.close, self.descriptor)


_locks_guard = threading.Lock()
_locks: weakref.WeakValueDictionary[Path, _SharedLock] = weakref.WeakValueDictionary()


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Yield whether no process uses or makes the folder; none can start to until this context ends."""
    try:
        descriptor = _open_locked(_lock_file(folder), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        os.close(descriptor)


def _open_locked(file: Path, operation: int) -> int:
    """Open and lock a file that `prune` may remove: a lock on a removed file protects nothing, so try again then."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, operation)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), file.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def last_used(folder: Path) -> float:
    """The time of the last use, in seconds since the epoch."""
    try:
        return _lock_file(folder).stat().st_mtime
    except FileNotFoundError:
        return folder.stat().st_mtime


def _lock_file(folder: Path) -> Path:
    return folder.with_suffix(".used")


LAYOUT = 1
"""The version of the cache; with another number everything is unpacked again."""
TREE, RECEIPT = "tree", "receipt.json"


@dataclass(frozen=True)
class Files:
    """Unpacked files. The folder is never written to: changes of a session are in its overlay."""

    folder: Path
    receipt: Receipt
    digest: str
    """The digest of the source and the base commit; samples with the same files have the same one."""
    lease: CacheLease | None = field(default=None, compare=False)
    """Keeps the folder in the cache while this object exists."""


async def prepared_files(sample: Sample, cache: Path) -> Files:
    """The sample's files as a session starts with them, unpacked by the first caller of any process.

    FilesRefused says what is wrong with the source, StorageWriteError that there is no space. Then, and also when the
    process is killed, no partly unpacked folder is left that could be used."""
    cache = cache.absolute()
    source = inspect_source(sample.files.absolute() if sample.files is not None else None)
    if sample._known_content is None or sample._known_content[0] != source.path:
        sample._known_content = (source.path, await asyncio.to_thread(digest_of, source, cache))
    of_source = sample._known_content[1]
    base = sample.base_commit if source.kind != "none" else ""
    digest = hashlib.sha256(f"{LAYOUT}\0{source.kind}\0{of_source}\0{base}".encode()).hexdigest()[:32]
    folder = cache / "files" / digest
    lease = CacheLease(folder)
    try:
        found = _ready(folder, digest)
        if found is None:
            async with locked(folder.with_suffix(".lock")):
                found = _ready(folder, digest)
                if found is None:
                    await _unpack_in_thread(source, of_source, base, folder)
                    found = _ready(folder, digest)
        if found is None:
            raise StorageWriteError(f"{folder} was removed while it was being made")
    except BaseException:
        lease.release()
        raise
    return replace(found, lease=lease)


def _ready(folder: Path, digest: str) -> Files | None:
    try:
        receipt = Receipt.model_validate_json((folder / RECEIPT).read_bytes())
    except (OSError, ValidationError):
        return None
    return Files(folder / TREE, receipt, digest)


async def _unpack_in_thread(source: Source, of_source: str, base_commit: str, folder: Path) -> None:
    """Unpack in a thread. A cancelled caller waits for it, too, since the lock must be held until it ends."""
    limits = (
        UnpackLimits.for_packed(source.path)
        if source.path and source.kind != "folder"
        else UnpackLimits(source.path or folder)
    )
    work = asyncio.ensure_future(asyncio.to_thread(_unpack, source, of_source, base_commit, folder, limits))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        limits.cancelled.set()
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):  # Cancelled again, it still has to wait.
                await asyncio.wait([work])
        work.exception()
        raise


def _unpack(source: Source, of_source: str, base_commit: str, folder: Path, limits: UnpackLimits) -> None:
    """Unpack into a folder beside the target, and rename it when it is complete."""
    making = folder.with_suffix(".making")
    temp_dirs.remove(making)  # A killed process may have left one.
    tree, scratch = making / TREE, making / "scratch"
    try:
        tree.mkdir(parents=True)
        scratch.mkdir()
        bundled = None
        if source.path is not None and source.kind == "folder":
            _copy(source, tree, limits)
        elif source.path is not None and source.kind == "archive":
            unpack_tar(source.path, tree, limits)
        elif source.path is not None:
            bundled = read_bundle(source.path, scratch, limits)
        if digest_of(source, folder.parent.parent) != of_source:
            raise FilesRefused(f"{limits.what} was changed after it was first looked at; load the dataset again")
        refuse_unfit(tree, limits.what)
        git = truncate_history(tree, base_commit, scratch, limits, bundled)
        refuse_unfit(tree, limits.what)
        temp_dirs.remove(scratch)
        receipt = Receipt(source=source.kind, digest=of_source, files=0, bytes=0, git=git)
        for entry in walk_tree(tree):
            about = entry.stat(follow_symlinks=False)
            receipt.files += not stat.S_ISDIR(about.st_mode)
            receipt.bytes += about.st_size if stat.S_ISREG(about.st_mode) else 0
        (making / RECEIPT).write_text(receipt.model_dump_json(), encoding="utf-8")
        temp_dirs.remove(folder)  # A folder without a readable receipt is not used.
        making.rename(folder)
    except CarrelError:
        raise
    except OSError as problem:
        raise StorageWriteError(f"{limits.what} could not be unpacked to {folder.parent}: {problem}") from problem
    finally:
        temp_dirs.remove(making)


def _copy(source: Source, tree: Path, limits: UnpackLimits) -> None:
    """Copy a folder of the user; links stay links."""
    assert source.path is not None
    for entry in walk_tree(source.path, IGNORED):
        about = entry.stat(follow_symlinks=False)
        to = tree / os.path.relpath(entry.path, source.path)
        limits.add(files=1, data=about.st_size if stat.S_ISREG(about.st_mode) else 0)
        if stat.S_ISLNK(about.st_mode):
            os.symlink(os.readlink(entry.path), to)
        elif stat.S_ISDIR(about.st_mode):
            to.mkdir()
        elif stat.S_ISREG(about.st_mode):
            shutil.copyfile(entry.path, to, follow_symlinks=False)
            to.chmod(0o755 if about.st_mode & 0o111 else 0o644)
            os.utime(to, ns=(about.st_atime_ns, about.st_mtime_ns))
        else:
            raise FilesRefused(f"{limits.what}: {entry.name} is {kind_of(about.st_mode)}, not a file or folder")


async def archive_of(sample: Sample, cache: Path) -> Path:
    """A .tar.gz of the files that the sample's sessions start with, made once; FilesRefused as for `prepared_files`."""
    files = await prepared_files(sample, cache)
    archive = cache / "downloads" / f"{files.digest}.tar.gz"
    try:
        os.utime(archive)  # `prune` removes archives that were not used for a while.
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
                packed.add(path, arcname=path.name, filter=_without_owner)
        os.replace(half, archive)
    except BaseException:
        os.unlink(half)
        raise


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the owner on this machine, and writable as files in a session are."""
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
    """What `prune` removed."""

    removed: list[Pruned] = field(default_factory=list)
    in_use: int = 0
    """Folders that are old enough, but in use."""
    kept: int = 0

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.removed)


def prune(cache: Path, before: float, *, dry_run: bool = False) -> Pruning:
    """Remove what was last used before a time (seconds since the epoch) and is not used by any process now.

    A folder is renamed before it is removed, so that a new session makes it again; the next prune removes what a
    killed one left."""
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
                continue  # Another prune was faster.
            with exclusive(folder) as free:
                if not folder.exists():
                    continue
                if not free:
                    done.in_use += 1
                    continue
                done.removed.append(found)
                if not dry_run:
                    _remove_marked(folder)
                    _remove_locks(folder)
        if not dry_run:
            for leftover in (cache / kind).glob(f"*{_GONE}"):
                temp_dirs.remove(leftover)
            _remove_old_records(cache / kind, before)
    archives = [path for kind in ("downloads", "images") for path in (cache / kind).glob("*.tar.[gn]*")]
    for archive in sorted([*archives, *(cache / "images").glob("*.modules")]):
        try:
            about = archive.stat()
        except FileNotFoundError:
            continue  # Another prune was faster.
        used = max(about.st_atime, about.st_mtime)
        if used >= before:
            done.kept += 1
            continue
        done.removed.append(Pruned(f"{archive.parent.name}/{archive.name}", about.st_size, used))
        if not dry_run:
            # A download in progress has the file open, and is not disturbed.
            archive.unlink(missing_ok=True)
            archive.with_suffix(".lock").unlink(missing_ok=True)
    return done


def _folders(parent: Path) -> Iterator[Path]:
    if parent.is_dir():
        for folder in sorted(parent.iterdir()):
            if folder.is_dir() and not folder.suffix and folder.name != "digests":
                yield folder


def _parts(folder: Path) -> list[Path]:
    return [part for part in (folder, folder.with_suffix(".home")) if part.exists()]


def _remove_old_records(folder: Path, before: float) -> None:
    """Remove digests, and locks of folders that do not exist any more, which were not used since then."""
    for record in (folder / "digests").glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if record.stat().st_mtime < before:
                record.unlink()
    for lock in [*folder.glob("*.used"), *folder.glob("*.lock")]:
        of_folder = lock.with_suffix("")
        with contextlib.suppress(FileNotFoundError):
            if not of_folder.exists() and lock.stat().st_mtime < before:
                with exclusive(of_folder) as free:
                    if free and not of_folder.exists():
                        _remove_locks(of_folder)


def _remove_locks(folder: Path) -> None:
    """Remove the lock files of a folder that this process holds exclusively.

    A process that makes the folder has a lease on it, so none has the `.lock` file open then."""
    for suffix in (".used", ".lock"):
        folder.with_suffix(suffix).unlink(missing_ok=True)


def _remove_marked(folder: Path) -> None:
    """Remove the record that marks the layer as complete first, then rename the folder for removal."""
    folder.with_suffix(".json").unlink(missing_ok=True)
    for part in _parts(folder):
        part.rename(part.with_name(f"{part.name}.{os.getpid()}{_GONE}"))


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            about = os.lstat(os.path.join(parent, name))
            total += about.st_size if stat.S_ISREG(about.st_mode) else 0
    return total
