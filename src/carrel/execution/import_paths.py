"""Folders on this process's own import path, each as long as it is used."""

from __future__ import annotations

import importlib
import sys
import threading

from carrel.guest.worker import tracebacks

_lock = threading.Lock()
_users: dict[str, int] = {}


def use(folder: str) -> None:
    """Put it last; each `use` needs its `leave`."""
    with _lock:
        _users[folder] = _users.get(folder, 0) + 1
        if folder not in sys.path:
            sys.path.append(folder)
            tracebacks.hide_folder(folder)
        importlib.invalidate_caches()


def leave(folder: str) -> None:
    with _lock:
        _users[folder] -= 1
        if _users[folder] == 0:
            del _users[folder]
            if folder in sys.path:
                sys.path.remove(folder)
