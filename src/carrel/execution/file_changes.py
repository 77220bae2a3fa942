"""Which files of a workspace are not as they were at the start, and how they differ."""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from carrel.execution.executor import FileChange

LONGEST = 1024 * 1024
"""Bytes of a file above which it is only said that it differs."""
KEPT_IN_ALL = 64 * 1024 * 1024
"""Bytes that are remembered of a workspace which the session writes to directly."""

Reader = Callable[[str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Seen:
    """One file or link, as a listing shows it."""

    kind: str
    size: int
    modified: float
    changed: int = 0
    """When the kernel last saw it change, in nanoseconds: unlike the time before, no program can set it."""
    executable: bool = False
    target: str = ""
    """Where a link leads; empty where it was not read."""

    @property
    def mode(self) -> str:
        """As git tells it."""
        return "120000" if self.kind == "link" else "100755" if self.executable else "100644"


Tree = dict[str, Seen]


@dataclass(frozen=True)
class Before:
    """The workspace as it was at the start; by default empty."""

    tree: Callable[[], Tree] = dict
    """Returns every file and link, by its path."""
    read: Callable[[str], bytes | None] = lambda path: None
    """Returns a file's content, or None where it was not remembered."""


def unchanged_folder(path: Path, tree: Tree | None = None) -> Before:
    """A folder that the session cannot change; `tree` is the list of a copy, where the session works on one."""
    return Before(lambda: seen_below(path) if tree is None else tree, lambda name: read_plain(path / name))


def unchanged_files(path: Path, names: Collection[str]) -> Before:
    """Only some of the files of a folder that the session cannot change: all others are as they were."""

    def tree() -> Tree:
        found = {name: seen_at(path, name) for name in names}
        return {name: seen for name, seen in found.items() if seen is not None}

    return replace(unchanged_folder(path), tree=tree)


def remembered_folder(path: Path) -> Before:
    """A folder that the session does change: a list of it, and the content of what is not too large."""
    tree, content, left = seen_below(path), {}, KEPT_IN_ALL
    for name, seen in tree.items():
        if seen.kind == "file" and seen.size <= min(LONGEST, left):
            data = read_plain(path / name)
            if data is not None:
                content[name] = data
                left -= len(data)
    return Before(lambda: tree, content.get)


def seen_below(folder: Path) -> Tree:
    """Every file and link below a folder of the host; links are not followed."""
    found = {path: seen_at(folder, path) for path in _paths_below(folder, folder)}
    return {path: seen for path, seen in found.items() if seen is not None}


def _paths_below(start: Path, folder: Path) -> Iterator[str]:
    """Of every file and link below `start`, relative to `folder`."""
    for place, folders, files in os.walk(start):
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(place, name)))]:
            yield os.path.relpath(os.path.join(place, name), folder)


def seen_at(folder: Path, path: str) -> Seen | None:
    """One file or link below a folder of the host; None for nothing, or for a folder."""
    full = os.path.join(folder, path)
    try:
        about = os.lstat(full)
        if stat.S_ISDIR(about.st_mode):
            return None
        target = os.readlink(full) if stat.S_ISLNK(about.st_mode) else ""
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        if problem.errno != errno.ENAMETOOLONG:
            raise
        return None
    return _seen(about, target)


def _seen(about: os.stat_result, target: str) -> Seen:
    kind = "link" if stat.S_ISLNK(about.st_mode) else "file"
    runs = kind == "file" and bool(about.st_mode & stat.S_IXUSR)
    return Seen(kind, about.st_size, about.st_mtime, about.st_ctime_ns, runs, target)


def read_plain(path: Path) -> bytes | None:
    """The content of a regular file; a link, a pipe or a device is not opened for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


async def changes(before: Before, now: Tree, read: Reader) -> list[FileChange]:
    """By path. Size and times decide at a glance; where only a time differs, the content does, or a link's target."""
    return await _changes(before, before.tree(), now, read)


async def _changes(before: Before, was: Tree, now: Tree, read: Reader) -> list[FileChange]:
    found = [FileChange(path, "deleted") for path in was.keys() - now.keys()]
    found += [FileChange(path, "added", now[path].size) for path in now.keys() - was.keys()]
    for path in was.keys() & now.keys():
        old, new = was[path], now[path]
        if old == new:
            continue
        if (old.kind, old.size, old.executable, old.target) == (new.kind, new.size, new.executable, new.target):
            if old.target:
                continue
            content = before.read(path) if old.kind == "file" else None
            if content is not None and content == await read(path):
                continue
        found.append(FileChange(path, "modified", new.size))
    return sorted(found, key=lambda change: change.path)


# --- as a diff ------------------------------------------------------------------------------------------------------


async def unified(before: Before, now: Tree, read: Reader) -> str:
    """The changes as a diff that `git apply` and `patch -p1` take.

    What is no UTF-8 text, or is too long, is only named. That stands at the beginning, where both tools pass over it:
    after a header it would be taken for a part of that file's change. Bytecode that Python has added is left out.
    """
    was = before.tree()
    named, parts = [], []
    for change in await _changes(before, was, now, read):
        path = change.path
        old, new = was.get(path), now.get(path)
        contents = _old_content(before, path, old), await _new_content(path, new, read)
        texts = _text(contents[0]), _text(contents[1])
        if texts[0] is None or texts[1] is None:
            if old is None and path.endswith(".pyc") and "__pycache__/" in path:
                continue
            if old is None or new is None or contents[0] is None or contents[0] != contents[1]:
                names = _named("a/", path, old), _named("b/", path, new)
                named.append(f"Binary files {names[0]} and {names[1]} differ\n")
                continue
            texts = "", ""
        if old is not None and new is not None and old.kind != new.kind:
            parts.append(_one(path, old, None, texts[0] or "", ""))
            old, texts = None, ("", texts[1])
        parts.append(_one(path, old, new, texts[0] or "", texts[1] or ""))
    return "".join((*named, *parts))


def _old_content(before: Before, path: str, seen: Seen | None) -> bytes | None:
    if seen is None:
        return b""
    return _bytes(seen.target) if seen.kind == "link" else before.read(path)


async def _new_content(path: str, seen: Seen | None, read: Reader) -> bytes | None:
    if seen is None:
        return b""
    if seen.kind == "link":
        return _bytes(seen.target)
    if seen.size > LONGEST:
        return None
    try:
        return await read(path)
    except (OSError, ValueError):
        return None


def _bytes(text: str) -> bytes:
    """Of a name or a target, which need not be text."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _text(content: bytes | None) -> str | None:
    if content is None or len(content) > LONGEST or b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _one(path: str, old: Seen | None, new: Seen | None, before: str, after: str) -> str:
    """One file's part, as git writes it."""
    lines = [f"diff --git {_quoted('a/' + path)} {_quoted('b/' + path)}\n"]
    same_mode = ""
    if old is None:
        lines.append(f"new file mode {new.mode if new else ''}\n")
    elif new is None:
        lines.append(f"deleted file mode {old.mode}\n")
    elif old.mode != new.mode:
        lines.append(f"old mode {old.mode}\nnew mode {new.mode}\n")
    else:
        same_mode = f" {new.mode}"
    if before != after or old is None or new is None:
        lines.append(f"index {_blob(old, before)}..{_blob(new, after)}{same_mode}\n")
    if before != after:
        lines += [f"--- {_named('a/', path, old)}\n", f"+++ {_named('b/', path, new)}\n"]
        hunks = list(difflib.unified_diff(_lines(before), _lines(after)))[2:]
        lines += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in hunks]
    return "".join(lines)


def _lines(text: str) -> list[str]:
    """Cut at line feeds and at nothing else, as other programs do."""
    lines = [f"{line}\n" for line in text.split("\n")]
    last = lines.pop()
    return [*lines, last[:-1]] if len(last) > 1 else lines


def _blob(seen: Seen | None, text: str) -> str:
    """The beginning of git's own name for this content."""
    content = text.encode("utf-8")
    head = f"blob {len(content)}\0".encode()
    return "0" * 10 if seen is None else hashlib.sha1(head + content, usedforsecurity=False).hexdigest()[:10]


def _named(side: str, path: str, seen: Seen | None) -> str:
    return "/dev/null" if seen is None else _quoted(side + path)


_SHORT = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}


def _quoted(name: str) -> str:
    """As git writes a name that a line cannot hold as it stands: what is no text in it as numbers.

    One with a space too, which git itself leaves as it is: `patch` does not know where it ends."""
    parts = []
    for letter in name:
        code = ord(letter)
        if code in _SHORT:
            parts.append("\\" + _SHORT[code])
        elif code < 32 or code == 127 or 0xD800 <= code <= 0xDFFF:
            parts.append("".join(f"\\{byte:03o}" for byte in _bytes(letter)))
        else:
            parts.append(letter)
    made = "".join(parts)
    return name if made == name and " " not in name else f'"{made}"'


DEEPEST = 200
"""Folders in folders; who makes more is looked at in another way."""
_OPAQUE = "user.overlay.opaque"


class Unreadable(Exception):
    """A layer that cannot be read: too deep, or with names that are no text."""


@dataclass
class Upper:
    """One layer, read once."""

    seen: Tree = field(default_factory=dict)
    """The files and links in it: made, written to, or only looked at in a way that copies them."""
    hidden: set[str] = field(default_factory=set)
    """Files and links of the base that are not to be seen any more, unless they are in `seen` again."""


def read_upper(folder: int, base: Path) -> Upper:
    """By its descriptor, and without following links: code may move things meanwhile."""
    found = Upper()
    _read(folder, "", base, found, 0)
    return found


def _read(folder: int, path: str, base: Path | None, found: Upper, depth: int) -> None:
    if depth > DEEPEST:
        raise Unreadable(f"more than {DEEPEST} folders deep")
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise Unreadable("a name is no text")
        inner = f"{path}/{name}" if path else name
        try:
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
            _note(folder, name, inner, about, base, found, depth)
        except (FileNotFoundError, NotADirectoryError):
            continue  # It was moved meanwhile.
        except OSError as problem:
            raise Unreadable(str(problem)) from None


def _note(
    folder: int, name: str, path: str, about: os.stat_result, base: Path | None, found: Upper, depth: int
) -> None:
    """`base` is None below a folder that the base does not have, or that hides the base's."""
    if stat.S_ISDIR(about.st_mode):
        inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            if base is not None and (_is_opaque(inside) or not _is_folder(base / path)):
                found.hidden.update(_below(base, path))
                base = None
            _read(inside, path, base, found, depth + 1)
        finally:
            os.close(inside)
        return
    if base is not None:
        found.hidden.update(_below(base, path))
    if stat.S_ISCHR(about.st_mode) and about.st_rdev == 0:
        return
    found.seen[path] = _seen(about, os.readlink(name, dir_fd=folder) if stat.S_ISLNK(about.st_mode) else "")


def _is_folder(path: Path) -> bool:
    """And no link to one."""
    return path.is_dir() and not path.is_symlink()


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE) == b"y"
    except OSError:
        return False


def _below(base: Path, path: str) -> list[str]:
    """What the base has at a path: the file or link itself, or all that is in the folder."""
    full = base / path
    if not _is_folder(full):
        return [path] if os.path.lexists(full) else []
    return list(_paths_below(full, base))
