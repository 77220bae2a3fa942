"""Folders on the host's disk that go with this process, even when it is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

_LOCK = ".lock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CLEAN_UP = """
folder=$1; shift
remove() { chmod -R u+rwX -- "$@" 2> /dev/null; rm -rf -- "$@" 2> /dev/null; }
[ $# -eq 0 ] || remove "$@"
cat > /dev/null
for attempt in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do remove "$folder" && exit; sleep 1; done
"""
"""Leftovers first. Then it reads until the process is gone, however it ends, and removes its folder; programs that the
process has started may still write to it for a while."""

_lock = threading.Lock()
_folder: Path | None = None
_held = -1
"""The descriptor by which this process holds the lock in its folder."""
_janitor: subprocess.Popen[bytes] | None = None


def new_folder(kind: str) -> Path:
    """A fresh folder, for this user only."""
    return Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=_own_folder()))


def remove(folder: Path) -> None:
    """Remove it, also where its content was made read-only."""

    def writable(function: object, path: str, problem: BaseException) -> None:
        os.chmod(os.path.dirname(path), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)

    try:
        shutil.rmtree(folder, onerror=lambda function, path, info: writable(function, path, info[1]))
    except FileNotFoundError:
        return


def _own_folder() -> Path:
    global _folder, _held, _janitor
    with _lock:
        if _folder is None:
            leftovers = _leftovers(Path(tempfile.gettempdir()))
            _folder = Path(tempfile.mkdtemp(prefix="carrel-"))
            _held = _hold(_folder)
            _janitor = subprocess.Popen(
                ["/bin/sh", "-c", _CLEAN_UP, "carrel-janitor", str(_folder), *map(str, leftovers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        return _folder


def _hold(folder: Path) -> int:
    """Lock a folder for as long as this process lives. The file gets its name when it is locked: there is no moment
    in which the folder looks left behind."""
    held = os.open(folder / "new", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.write(held, _boot())
    os.rename(folder / "new", folder / _LOCK)
    return held


def _leftovers(place: Path) -> list[Path]:
    """Folders of processes that were killed together with their janitor.

    Only of this user, and of this boot: a lock of another machine that shares the place may not be seen here."""
    found = []
    for path in place.glob(f"carrel-*/{_LOCK}"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owned = os.fstat(lock).st_uid == os.lstat(path.parent).st_uid == os.geteuid()
            if owned and os.read(lock, 100) == _boot():
                found.append(path.parent)
        except OSError:
            continue  # its process lives
        finally:
            os.close(lock)
    return found


def _boot() -> bytes:
    return _BOOT.read_bytes() if _BOOT.exists() else b"unknown"


def _forget() -> None:
    """In a forked copy of this process: folder, lock and janitor are the parent's; held open here, they would hide its
    end."""
    global _lock, _folder, _held, _janitor
    _lock = threading.Lock()
    if _janitor is not None and _janitor.stdin is not None:
        _janitor.stdin.close()
        _janitor.returncode = 0  # It is no child of this process, which is not to wait for it.
    if _held >= 0:
        os.close(_held)
    _folder, _held, _janitor = None, -1, None


os.register_at_fork(after_in_child=_forget)
