"""Folders on the host's disk that go with this process, even when it is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

_lock = threading.Lock()
_folder: Path | None = None
_owner = 0
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
    global _folder, _owner, _janitor
    with _lock:
        if _folder is None or _owner != os.getpid():
            _folder, _owner = Path(tempfile.mkdtemp(prefix="carrel-")), os.getpid()
            # It reads until this process is gone, however it goes, and then cleans up.
            script = 'cat > /dev/null; chmod -R u+rwX -- "$1" 2> /dev/null; exec rm -rf -- "$1"'
            _janitor = subprocess.Popen(
                ["/bin/sh", "-c", script, "carrel-janitor", str(_folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        return _folder


def _forget_janitor() -> None:
    """In a forked copy of this process: held open here, the pipe would hide the parent's end."""
    if _janitor is not None and _janitor.stdin is not None:
        os.close(_janitor.stdin.fileno())


os.register_at_fork(after_in_child=_forget_janitor)
