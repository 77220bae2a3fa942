"""Which keys changed since the last question, told by the kernel, so that nobody has to look at everything."""

import os
import threading
from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from carrel.storage import inotify
from carrel.storage.file_tree import FileTree, is_plain, is_short_enough
from carrel.storage.inotify import Inotify

_MOST_KEPT = 10_000


class Cursor(NamedTuple):
    """A moment in the changes of some folders."""

    changes: "FolderChanges"
    tick: int


class FolderChanges:
    """All folders below a prefix, watched from the first question on, until nobody holds a cursor of it any more."""

    def __init__(self, tree: FileTree, prefix: str) -> None:
        self.prefix = prefix
        self._tree = tree
        self._gate = threading.Lock()
        self._inotify: Inotify | None = None
        self._refused = False
        self._starts: dict[int, str] = {}
        self._top = -1
        self._changed: dict[str, int] = {}
        self._noted: deque[str] = deque()
        self._process = 0
        self._tick = 0
        self._known_from = 0

    def begin(self) -> Cursor:
        """Watch every folder that is there now. Takes its time: a few microseconds a folder."""
        with self._gate:
            self._tick += 1
            self._known_from = self._tick
            self._starts, self._changed = {}, {}
            self._process = os.getpid()
            try:
                self._inotify = Inotify.new()
                self._watch_all(self._inotify)
            except OSError:
                # The machine gives no more instances or watches: then changes stay unknown.
                self._inotify, self._refused = None, True
            return Cursor(self, self._tick)

    def end(self) -> None:
        with self._gate:
            self._inotify = None

    def note(self, keys: Iterable[str]) -> None:
        """Our own store changed these in a way that the kernel may not tell: in a folder that came and went unwatched,
        or a copy of a file onto itself."""
        start = f"{self.prefix}/" if self.prefix else ""
        self._noted.extend(key for key in keys if key.startswith(start))

    def since(self, tick: int) -> tuple[Cursor, set[str] | None] | None:
        """What changed since that tick (None: unknown) and the cursor of now; None when it has to begin again."""
        if self._refused or not self._gate.acquire(blocking=False):
            return Cursor(self, tick), None
        try:
            if self._inotify is None or self._process != os.getpid():
                return None
            try:
                keys = self._told(self._inotify)
            except OSError:
                keys = None  # no more watches for new folders
            if keys is None:
                return None
            if keys := {key for key in keys if is_short_enough(key)}:
                self._remember(keys)
            return Cursor(self, self._tick), self._recent(tick) if tick >= self._known_from else None
        finally:
            self._gate.release()

    def _remember(self, keys: set[str]) -> None:
        """An older cursor may be asked for again, so the changes are kept, newest last."""
        self._tick += 1
        for key in keys:
            self._changed.pop(key, None)
            self._changed[key] = self._tick
        while len(self._changed) > _MOST_KEPT:
            self._known_from = self._changed.pop(next(iter(self._changed)))

    def _recent(self, tick: int) -> set[str]:
        return {key for key, _ in takewhile(lambda change: change[1] > tick, reversed(self._changed.items()))}

    def _told(self, told: Inotify) -> set[str] | None:
        """Everything that happened since the last time, or None when it is not all known."""
        keys = {self._noted.popleft() for _ in range(len(self._noted))}
        known = True
        leaving: set[int] = set()
        for watch, mask, name in told.happened():
            start = self._starts.get(watch)
            if mask & inotify.OVERFLOW:
                known = False  # more than the kernel could keep
            elif watch == self._top and (start is None or not name):
                known = False  # the topmost folder itself comes or goes
            elif start is None:
                continue
            elif mask & inotify.IGNORED:
                del self._starts[watch]
                leaving.discard(watch)
            elif not name or not is_plain(name):
                continue
            elif not mask & inotify.IS_FOLDER:
                keys.add(start + name)
            elif mask & (inotify.CREATE | inotify.MOVED_TO):
                self._watch(told, [(f"{start}{name}/", f"{self._tree.root}/{start}{name}")], keys)
            elif mask & inotify.MOVED_FROM:
                gone = f"{start}{name}/"
                leaving |= {below for below, its_start in self._starts.items() if its_start.startswith(gone)}
        # A delete moves the folder out of sight and then empties it, and we hear of each file. One that was moved and
        # is not empty yet, or was taken elsewhere, still has keys that nobody named.
        return keys if known and not leaving else None

    def _watch_all(self, told: Inotify) -> None:
        folder = self._tree.folder(self.prefix)
        top = told.add(folder)
        if top is not None:
            self._top, self._starts[top] = top, f"{self.prefix}/" if self.prefix else ""
            self._watch(told, self._folders_in(self._starts[top], folder, None), None)
            return
        # Not there yet: whatever happens where it would begin, everything has to be looked at.
        while top is None:
            folder = os.path.dirname(folder)
            top = told.add(folder)
        self._top = top

    def _watch(self, told: Inotify, waiting: list[tuple[str, str]], keys: set[str] | None) -> None:
        """Watch folders and all below them; with `keys`, the files that are there already are among them."""
        while waiting:
            start, folder = waiting.pop()
            # The watch first and the look after it, so that nothing falls between.
            watch = told.add(folder, follow=False)
            if watch is not None:
                self._starts[watch] = start
                if keys is not None or not _has_no_folders(folder):
                    waiting += self._folders_in(start, folder, keys)

    def _folders_in(self, start: str, folder: str, keys: set[str] | None) -> list[tuple[str, str]]:
        """(what its keys begin with, its path) of every folder in a folder."""
        folders = []
        for entry in self._tree.entries(folder):
            if entry.is_dir(follow_symlinks=False):
                folders.append((f"{start}{entry.name}/", entry.path))
            elif keys is not None:
                keys.add(start + entry.name)
        return folders


def _has_no_folders(folder: str) -> bool:
    """True when its count of links says so: most file systems count its own two and one for each folder in it."""
    try:
        return os.stat(folder).st_nlink == 2
    except FileNotFoundError:
        return True
