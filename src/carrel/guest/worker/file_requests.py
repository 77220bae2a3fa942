"""Files for the host: read, written, listed and changed where the code sees them."""

from __future__ import annotations

import base64
import binascii
import errno
import os
import shutil
import stat
from typing import Any, BinaryIO

from . import writing

LARGEST = 32 * 1024 * 1024
"""How many bytes one answer carries; longer files are read in pieces."""
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def answer(request: dict[str, Any], home: str) -> dict[str, Any]:
    """Do what the request says; raises OSError or ValueError with a text for people."""
    path = os.path.join(home, os.path.expanduser(str(request.get("path", "."))))
    work = _WORK.get(str(request.get("do")))
    if work is None:
        raise ValueError(f"there is no file request {request.get('do')!r}")
    return work(path, request)


def _read(path: str, request: dict[str, Any]) -> dict[str, Any]:
    offset, length = int(request.get("offset") or 0), int(request.get("length") or LARGEST)
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        data = file.read(max(0, min(length, LARGEST)))
        # Files of /proc say that they are empty, so the end is where nothing more comes.
        end = not file.read(1)
    return {"data": base64.b64encode(data).decode("ascii"), "size": max(size, len(data)), "end": end}


def _opened(path: str) -> BinaryIO:
    """To be read, without waiting: a pipe that nobody writes to would hold up the whole session."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return open(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise ValueError(f"{path} is no regular file")


def _write(path: str, request: dict[str, Any]) -> dict[str, Any]:
    data, part = _data(request), str(request.get("part") or "")
    if request.get("append"):
        return _append(path, request)
    if not part:
        writing.put(path, data)
        return {"bytes": len(data)}
    if request.get("forget"):
        writing.forget_piece(path, part)
        return {}
    first, more = bool(request.get("first")), bool(request.get("more"))
    return {"bytes": len(data), "beside": writing.put_piece(path, data, part, first=first, more=more)}


def _append(path: str, request: dict[str, Any]) -> dict[str, Any]:
    data = _data(request)
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_APPEND, 0o666)
    with open(fd, "wb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{path} is no regular file")
        file.write(data)
    return {"bytes": len(data)}


def _data(request: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(str(request.get("data") or ""), validate=True)
    except binascii.Error:
        raise ValueError("the data to write is no base64") from None


def _about(name: str, path: str, found: os.stat_result) -> dict[str, Any]:
    return {
        "name": name,
        "kind": _KINDS.get(stat.S_IFMT(found.st_mode), "other"),
        "size": found.st_size,
        "modified": found.st_mtime,
        "changed": found.st_ctime_ns,
        "mode": stat.S_IMODE(found.st_mode),
        **({"target": os.readlink(path)} if stat.S_ISLNK(found.st_mode) else {}),
    }


def _list(path: str, request: dict[str, Any]) -> dict[str, Any]:
    entries = []
    with os.scandir(path) as found:
        for entry in found:
            try:
                entries.append(_about(entry.name, entry.path, entry.stat(follow_symlinks=False)))
            except FileNotFoundError:
                continue  # removed meanwhile
    return {"entries": sorted(entries, key=lambda entry: str(entry["name"]))}


def _stat(path: str, request: dict[str, Any]) -> dict[str, Any]:
    return _about(os.path.basename(path), path, os.lstat(path))


def _mkdir(path: str, request: dict[str, Any]) -> dict[str, Any]:
    os.makedirs(path, exist_ok=True)
    return {}


def _replace(path: str, request: dict[str, Any]) -> dict[str, Any]:
    old, new = str(request.get("old", "")), str(request.get("new", ""))
    if not old:
        raise ValueError("the text to replace is empty")
    with _opened(path) as file:
        data = file.read()
    # As bytes, so that a file which is not all UTF-8 keeps what is not.
    before, after = old.encode("utf-8"), new.encode("utf-8")
    count = data.count(before)
    if count != 1:
        raise ValueError(f"the text to replace is there {count} times in {path}; it must be there exactly once")
    writing.put(path, data.replace(before, after))
    return {}


def _remove(path: str, request: dict[str, Any]) -> dict[str, Any]:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path) if request.get("recursive") else os.rmdir(path)
    else:
        os.remove(path)
    return {}


_WORK = {
    "read": _read,
    "write": _write,
    "append": _append,
    "list": _list,
    "stat": _stat,
    "mkdir": _mkdir,
    "replace": _replace,
    "remove": _remove,
}
