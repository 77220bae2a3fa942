"""Temporary folders of this process: removed when it ends, or by the next process when it was killed."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

_LOCK = ".lock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")

_lock = threading.Lock()
_folder: Path | None = None
_held = -1
"""The descriptor by which this process holds the lock in its folder."""


def new_folder(kind: str) -> Path:
    """Make a fresh folder, for this user only."""
    return Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=_own_folder()))


def remove(folder: Path) -> None:
    """Remove a folder, also where its content was made read-only."""

    def make_writable(path: str) -> None:
        os.chmod(os.path.dirname(path), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)

    with suppress(FileNotFoundError):
        shutil.rmtree(folder, onerror=lambda function, path, info: make_writable(path))


def _own_folder() -> Path:
    global _folder, _held
    with _lock:
        if _folder is None:
            _folder = Path(tempfile.mkdtemp(prefix="carrel-"))
            _held = _hold(_folder)
            threading.Thread(target=remove_abandoned, name="carrel-sweep", daemon=True).start()
        return _folder


def _hold(folder: Path) -> int:
    """Lock a folder for as long as this process lives.

    The lock file gets its name after it is locked, so at no moment does the folder look abandoned."""
    held = os.open(folder / "new", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.write(held, _boot())
    os.rename(folder / "new", folder / _LOCK)
    return held


def remove_abandoned() -> None:
    """Remove the folders of processes that were killed: no process holds their lock.

    Only folders of this user and this boot: the lock of another machine that shares the folder may not be visible
    here."""
    for path in Path(tempfile.gettempdir()).glob(f"carrel-*/{_LOCK}"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owned = os.fstat(lock).st_uid == os.lstat(path.parent).st_uid == os.geteuid()
            if owned and os.read(lock, 100) == _boot():
                remove(path.parent)
        except OSError:
            continue  # its process is alive, or something still writes there: the next start removes it
        finally:
            os.close(lock)


def _boot() -> bytes:
    return _BOOT.read_bytes() if _BOOT.exists() else b"unknown"


@atexit.register
def _remove_own() -> None:
    if _folder is not None:
        with suppress(OSError):  # a program may still write there: the next start removes it
            remove(_folder)


def _forget() -> None:
    """In a forked copy of this process: folder and lock are the parent's; kept open here, they would hide its end."""
    global _lock, _folder, _held
    _lock = threading.Lock()
    if _held >= 0:
        os.close(_held)
    _folder, _held = None, -1


os.register_at_fork(after_in_child=_forget)
