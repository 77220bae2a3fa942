"""Git on the host, with no settings, hooks or repository but those it is given."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from carrel.errors import FilesRefused, ProgramMissing

SECONDS = 900
"""What one git command may take."""
_PAUSE = 0.2
"""Seconds between two looks at whether anybody still waits for it."""
_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.commitGraph=false",  # it could tell of other parents than the commits do
    "core.bigFileThreshold=64m",
    "pack.windowMemory=256m",
    "gc.auto=0",
    "protocol.allow=never",
)
_SAFE = tuple(word for setting in _SETTINGS for word in ("-c", setting))


class GitFailed(FilesRefused):
    """A git command ended with an error; the message has what it said."""


class Git:
    """Commands on one repository. No git settings of the user, the machine or the files are read."""

    def __init__(
        self,
        folder: Path,
        *,
        worktree: Path | None = None,
        env: Mapping[str, str] | None = None,
        given_up: threading.Event | None = None,
    ) -> None:
        """When `given_up` is set, a command that runs is ended."""
        self._env = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "GIT_DIR": str(folder),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_SYSTEM": "/dev/null",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "HOME": "/nonexistent",
            "LC_ALL": "C",
        } | dict(env or {})
        if worktree is not None:
            self._env["GIT_WORK_TREE"] = str(worktree)
        self._folder = folder
        self._given_up = given_up
        self._where = worktree or folder.parent

    def __call__(self, *words: str, stdin: bytes = b"", fine: tuple[int, ...] = (0,)) -> bytes:
        """What it prints; GitFailed when it ends with a code that is not among the expected."""
        process = self.start(*words, stdin=subprocess.PIPE)
        try:
            out, errors = self._ended(process, stdin, words[0])
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode not in fine:
            said = errors.decode("utf-8", "replace").strip().removeprefix("fatal: ").removeprefix("error: ")
            raise GitFailed(f"git {words[0]}: {said[-1000:] or f'ended with {process.returncode}'}")
        return out

    def _ended(self, process: subprocess.Popen[bytes], stdin: bytes, word: str) -> tuple[bytes, bytes]:
        until = time.monotonic() + SECONDS
        given: bytes | None = stdin
        while True:
            try:
                return process.communicate(given, timeout=_PAUSE)
            except subprocess.TimeoutExpired:
                given = None  # What was not yet taken of it is still sent.
                if self._given_up is not None and self._given_up.is_set():
                    raise GitFailed(f"git {word}: nobody waits for it any more") from None
                if time.monotonic() > until:
                    raise GitFailed(f"git {word} did not end within {SECONDS} seconds") from None

    def lines(self, *words: str, stdin: bytes = b"") -> list[str]:
        return self(*words, stdin=stdin).decode("utf-8", "surrogateescape").splitlines()

    def literally(self, *words: str) -> bytes:
        """With paths that are names, whatever signs are in them."""
        return Git(self._folder, env={"GIT_LITERAL_PATHSPECS": "1"})(*words)

    def path(self, inside: str) -> Path:
        """What git names relative to where it runs."""
        return self._where / inside

    def start(self, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """For output that is read as it comes."""
        try:
            return subprocess.Popen(
                ["git", *_SAFE, *words],
                env=self._env,
                cwd=self._where,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError:
            raise ProgramMissing("git is not installed; samples with a git history need it") from None
