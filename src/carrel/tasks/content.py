"""Which content a sample's files have: a hash, taken again only when something about the files has changed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

from carrel.errors import FilesRefused
from carrel.tasks.tree_rules import every_entry

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


def looked_at(files: Path | None) -> Source:
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
    entries = every_entry(source.path, LEFT_OUT) if source.kind == "folder" else ()
    for path, stats in (("", about), *((entry.path, entry.stat(follow_symlinks=False)) for entry in entries)):
        seen.update(os.fsencode(f"{path}\0{stats.st_mode}\0{stats.st_size}\0{stats.st_ino}\0{stats.st_ctime_ns}\0"))
        newest = max(newest, stats.st_ctime)
    return seen.hexdigest(), newest


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder_digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for entry in every_entry(folder, LEFT_OUT):
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            kind, content = "link", os.readlink(entry.path)
        elif stat.S_ISREG(mode):
            kind, content = "program" if mode & 0o111 else "file", _file_digest(Path(entry.path))
        else:
            kind, content = "folder" if stat.S_ISDIR(mode) else "other", ""
        whole.update(os.fsencode(f"{os.path.relpath(entry.path, folder)}\0{kind}\0{content}\0"))
    return whole.hexdigest()
