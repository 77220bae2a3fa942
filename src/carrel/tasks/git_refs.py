"""What a repository says of itself, read from its files alone: git is never started with the settings of a stranger."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_BRANCH = re.compile(r"[A-Za-z0-9][\w./+@-]*")
_MOST_BYTES = 64 * 1024 * 1024


@dataclass
class Past:
    """Everything that a repository holds, before anything is left out."""

    objects: Path
    refs: dict[str, str] = field(default_factory=dict)
    """Names to hashes: `refs/heads/main`, `refs/tags/v1`."""
    head: str | None = None
    """The commit that is checked out."""
    branch: str = "main"
    sha256: bool = False
    shallow: list[str] = field(default_factory=list)
    """Commits whose parents were never there."""
    reflogs: int = 0
    stashes: int = 0
    remotes: int = 0
    borrowed: bool = False
    """Whether it took objects from a repository elsewhere, which is not followed."""

    def named(self, name: str) -> str | None:
        """The hash under a name as a person writes it: a tag, a branch, or the whole name."""
        for full in (name, f"refs/{name}", f"refs/tags/{name}", f"refs/heads/{name}", f"refs/remotes/{name}"):
            if full in self.refs:
                return self.refs[full]
        return None


def read_past(folder: Path) -> Past | None:
    """Of a `.git` folder; None where it is none. Links in it are not followed."""
    objects = folder / "objects"
    if not objects.is_dir() or objects.is_symlink():
        return None
    past = Past(objects, refs=_packed_refs(folder) | _loose_refs(folder))
    head = _text(folder / "HEAD").strip()
    if head.startswith("ref: "):
        name = head.removeprefix("ref: ").strip()
        past.head = past.refs.get(name)
        past.branch = plain_branch(name)
    elif _HASH.fullmatch(head):
        past.head = head
    config = _text(folder / "config")
    past.sha256 = re.search(r"(?im)^\s*objectformat\s*=\s*sha256\s*$", config) is not None
    past.remotes = len(re.findall(r'(?im)^\s*\[\s*remote\s+"', config))
    past.shallow = [line for line in _text(folder / "shallow").split() if _HASH.fullmatch(line)]
    stashes = _text(folder / "logs" / "refs" / "stash")
    past.stashes = stashes.count("\n") or int("refs/stash" in past.refs)
    past.reflogs = sum(_text(file).count("\n") for file in _files(folder / "logs"))
    past.borrowed = any((objects / "info" / name).exists() for name in ("alternates", "http-alternates"))
    return past


def plain_branch(name: str) -> str:
    """The branch's name, or `main` where it has one that is better not used."""
    short = name.removeprefix("refs/heads/")
    strange = ".." in short or "//" in short or short.endswith((".lock", "/", ".")) or "@{" in short or "/." in short
    return short if _BRANCH.fullmatch(short) and not strange else "main"


def _packed_refs(folder: Path) -> dict[str, str]:
    found = {}
    for line in _text(folder / "packed-refs").splitlines():
        hash_, _, name = line.partition(" ")
        if _HASH.fullmatch(hash_) and name.startswith("refs/"):
            found[name] = hash_
    return found


def _loose_refs(folder: Path) -> dict[str, str]:
    found = {}
    for file in _files(folder / "refs"):
        content = _text(file).strip()
        if _HASH.fullmatch(content):
            found[os.path.relpath(file, folder)] = content
    return found


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        for name in names:
            yield Path(place, name)


def _text(file: Path) -> str:
    """Empty where there is none, or something that is not to be read."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size > _MOST_BYTES:
        return ""
    return file.read_text(encoding="utf-8", errors="surrogateescape")
