"""Files for the host: read, written, listed and changed where the code sees them."""

from __future__ import annotations

import base64
import os
import stat
from typing import Any

LARGEST = 40 * 1024 * 1024
"""How many bytes one answer carries; longer files are read in pieces."""


def answer(request: dict[str, Any], home: str) -> dict[str, Any]:
    """Do what the request says; raises OSError or ValueError with a text for people."""
    path = os.path.join(home, os.path.expanduser(str(request.get("path", "."))))
    work = _WORK.get(str(request.get("do")))
    if work is None:
        raise ValueError("there is no file request %r" % (request.get("do"),))
    return work(path, request)


def _read(path: str, request: dict[str, Any]) -> dict[str, Any]:
    offset = int(request.get("offset", 0))
    with open(path, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("%s is no regular file" % path)
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        data = file.read(LARGEST)
    return {"data": base64.b64encode(data).decode("ascii"), "size": size, "end": offset + len(data) >= size}


def _write(path: str, request: dict[str, Any]) -> dict[str, Any]:
    data = base64.b64decode(str(request.get("data", "")), validate=True)
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(path, "ab" if request.get("append") else "wb") as file:
        file.write(data)
    return {"bytes": len(data)}


def _list(path: str, request: dict[str, Any]) -> dict[str, Any]:
    entries = []
    with os.scandir(path) as found:
        for entry in found:
            about = entry.stat(follow_symlinks=False)
            kind = "folder" if entry.is_dir(follow_symlinks=False) else "link" if entry.is_symlink() else "file"
            entries.append({"name": entry.name, "kind": kind, "size": about.st_size, "modified": about.st_mtime})
    return {"entries": sorted(entries, key=lambda entry: str(entry["name"]))}


def _replace(path: str, request: dict[str, Any]) -> dict[str, Any]:
    old, new = str(request.get("old", "")), str(request.get("new", ""))
    if not old:
        raise ValueError("the text to replace is empty")
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    count = text.count(old)
    if count != 1:
        raise ValueError("the text to replace is there %d times in %s; it must be there exactly once" % (count, path))
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text.replace(old, new))
    return {}


def _remove(path: str, request: dict[str, Any]) -> dict[str, Any]:
    os.remove(path)
    return {}


_WORK = {"read": _read, "write": _write, "list": _list, "replace": _replace, "remove": _remove}
