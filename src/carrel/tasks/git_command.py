"""Git on the host, with no settings, hooks or repository but those it is given."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from carrel.errors import FilesRefused, ProgramMissing

SECONDS = 900
"""What one git command may take."""
_SAFE = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.allow=never")


class GitFailed(FilesRefused):
    """A git command ended with an error; the message has what it said."""


class Git:
    """Commands on one repository. No git settings of the user, the machine or the files are read."""

    def __init__(self, folder: Path, *, worktree: Path | None = None, env: Mapping[str, str] | None = None) -> None:
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
        self._where = worktree or folder.parent

    def __call__(self, *words: str, stdin: bytes = b"", fine: tuple[int, ...] = (0,)) -> bytes:
        """What it prints; GitFailed when it ends with a code that is not among the expected."""
        process = self.start(*words, stdin=subprocess.PIPE)
        try:
            out, errors = process.communicate(stdin, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise GitFailed(f"git {words[0]} did not end within {SECONDS} seconds") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode not in fine:
            said = errors.decode("utf-8", "replace").strip().removeprefix("fatal: ").removeprefix("error: ")
            raise GitFailed(f"git {words[0]}: {said[-1000:] or f'ended with {process.returncode}'}")
        return out

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
