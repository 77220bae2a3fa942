"""Whether the tests were left alone while they ran: code under test can write to their files, too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from carrel.execution.executor import Executor
from carrel.execution.file_changes import Upper
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.guest.sandbox.plan import HOME
from carrel.tasks.place import Prepared
from carrel.tasks.protection import START_FILES, Folder, Protection

_FIRST = r"(?:^|[;&|({\n'\"]|\b(?:then|do|else|xargs|sudo|exec|time)\s)\s*"
"""Before the name of a program that a shell starts."""
_WRITES_ANYTHING = re.compile(
    _FIRST + r"(?:git\s+(?:-\S+\s+)*(?:apply|am|checkout|restore|reset|stash|switch|pull|merge|cherry-pick|clean)"
    r"|patch|tar|unzip|rsync|tsc)\b",
    re.MULTILINE,
)
_WRITES_NAMED = re.compile(_FIRST + r"(cp|mv|ln|install|sed|tee|touch|chmod)\s([^;&|)\n]*)", re.MULTILINE)
_REDIRECTED = re.compile(r">{1,2}\s*([^\s;&|<>()]+)")
_INSTALLS = re.compile(r"\b(install|develop|sync)\b")


def may_write(command: str, path: str) -> bool:
    """Whether a test command itself, and not the code that it tests, may write to a file of the workdir."""
    plain = re.sub(r"\d?>&\d?-?", " ", command)
    targets = [target for target in _REDIRECTED.findall(plain) if not target.startswith(("/dev/", "/tmp/", "{report}"))]
    for program, rest in _WRITES_NAMED.findall(plain):
        words = [word for word in rest.split() if not word.startswith("-")]
        # These write to the last file or folder that they name.
        targets += words[-1:] if program in ("cp", "mv", "ln", "install") else words
    return _WRITES_ANYTHING.search(plain) is not None or any(_names(target, path) for target in targets)


def _names(word: str, path: str) -> bool:
    name = PurePosixPath(word.strip("'\"")).name
    return name in ("", "..") or "$" in word or any(fnmatchcase(part, name) for part in PurePosixPath(path).parts)


@dataclass(frozen=True)
class Watch:
    """The place as it was when the test command began."""

    base: Folder
    guard: Protection
    command: str
    before: Upper
    start_files: str
    """Files in the home folder that Python loads when it starts, with the times of their last changes."""

    async def written(self, place: Executor) -> str:
        """The first file that decides the verdict and was made, changed, or changed and put back; empty for none."""
        now = await _look(place, self.base)
        if now is None:
            return ""
        for path in sorted(now.seen.keys() | now.hidden):
            was = self.before.seen.get(path)
            # The kernel sets the time of a change, and nobody else can.
            if now.seen.get(path) != was and self._decides(path) and not may_write(self.command, path):
                return path
        if not _INSTALLS.search(self.command) and await _start_files(place) != self.start_files:
            return "a file in the home folder that Python loads when it starts"
        return ""

    def _decides(self, path: str) -> bool:
        there = self.base.kind(path) is not None and path not in self.before.hidden
        if not there and path not in self.before.seen:
            return self.guard.steers_when_new(path) and not self._installs(path)
        return self.guard.is_test_code(path) or (self.guard.is_installed(path) and not self._installs(path))

    def _installs(self, path: str) -> bool:
        return "-packages" in path and _INSTALLS.search(self.command) is not None


async def watch(place: Executor, prepared: Prepared, guard: Protection) -> Watch | None:
    """None where it cannot be seen what is written."""
    base = Folder(prepared.workspace)
    before = await _look(place, base)
    if before is None:
        return None
    return Watch(base, guard, prepared.sample.verify.command, before, await _start_files(place))


async def _look(place: Executor, base: Folder) -> Upper | None:
    return await place.upper(base.folder) if isinstance(place, SubprocessExecutor) else None


async def _start_files(place: Executor) -> str:
    names = [word for name in START_FILES for word in ("-o", "-name", name)][1:]
    found = await place.exec(["find", f"{HOME}/.local", "(", *names, ")", "-printf", "%p %C@\\n"], timeout=60)
    return found.stdout
