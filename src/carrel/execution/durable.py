"""The state of a session in a folder: its changed files, and its variables when they are saved."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from carrel.errors import SessionBusy, StateNotSaved
from carrel.execution.executor import SavedVariables

LONGEST_SAVE = 40.0
"""Seconds within which the worker's fork must have written the variables."""
_MAX_REPORT = 4 * 1024 * 1024


class StateFolder:
    """One process at a time uses it. The host never reads the variables: only the session's own Python does."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """`about` describes the sandbox, which must not become weaker; SessionBusy names the process that uses it."""
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 20, 0).decode("ascii", "replace")
            os.close(self._lock)
            raise SessionBusy(f"the state in {path} is used by the process {owner or '?'}") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode("ascii"), 0)
        self.workspace.mkdir(mode=0o700, exist_ok=True)
        for left in path.glob("variables-*"):
            left.unlink()  # of a process that was killed while it saved
        self.no_load_reason = self._compare(about) if self.variables.exists() else ""
        (path / "manifest.new").write_text(json.dumps(about), encoding="utf-8")
        (path / "manifest.new").replace(path / "manifest.json")

    @property
    def workspace(self) -> Path:
        return self.path / "workspace"

    @property
    def variables(self) -> Path:
        return self.path / "variables"

    def _compare(self, now: dict[str, Any]) -> str:
        """Why the variables must not be loaded: old code would run with more rights."""
        try:
            before = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))
            weaker = sorted(set(before["parts"]) - set(now["parts"]))
            opened = now["network"] and not before["network"]
        except (OSError, ValueError, KeyError, TypeError):
            return "the description of the sandbox that they were saved in cannot be read"
        if weaker:
            return f"the sandbox lacks what it had when they were saved: {', '.join(weaker)}"
        return "the session has the network now, and had not when they were saved" if opened else ""

    def new_file(self) -> tuple[int, Path]:
        """A descriptor to write variables to, and the path of its file."""
        path = self.path / f"variables-{uuid.uuid4().hex}"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path

    def keep(self, file: Path) -> None:
        """Replace the saved variables by those of a file that was written whole."""
        for path in (file, self.path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if path == file:
                file.replace(self.variables)

    def close(self) -> None:
        os.close(self._lock)


def describe(parts: tuple[str, ...], network: bool) -> dict[str, Any]:
    """What is compared when the state is used again."""
    return {"parts": list(parts), "network": network, "python": list(sys.version_info[:3])}


def variables_of_report(report: Any) -> SavedVariables:
    """The variables that a report of the worker lists; ValueError for anything else."""
    if not isinstance(report, dict) or not isinstance(report.get("kept"), list):
        raise ValueError("an invalid report")
    missing = report.get("missing")
    if not isinstance(missing, dict):
        raise ValueError("an invalid report")
    return SavedVariables(tuple(map(str, report["kept"])), {str(name): str(why) for name, why in missing.items()})


async def read_report(descriptor: int) -> SavedVariables:
    """Read what the worker's fork reports, and close the descriptor; StateNotSaved with the reason of a failure."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_MAX_REPORT)
    pipe = open(descriptor, "rb", 0)  # noqa: SIM115 -- the transport closes it
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        async with asyncio.timeout(LONGEST_SAVE):
            data = await reader.read(_MAX_REPORT)
            while len(data) < _MAX_REPORT and (piece := await reader.read(_MAX_REPORT)):
                data += piece
    except TimeoutError:
        raise StateNotSaved(f"the variables were not written within {LONGEST_SAVE:g} seconds") from None
    finally:
        transport.close()
    try:
        report = json.loads(data)
        if isinstance(report, dict) and "error" in report:
            raise StateNotSaved(f"the variables were not saved: {str(report['error'])[:1000]}")
        return variables_of_report(report)
    except ValueError:
        raise StateNotSaved("the variables were not saved: the process that wrote them ended early") from None
