"""The state of a session in a folder: its changed files, and its variables when they are saved."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import stat
import sys
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrel.errors import ConfigurationError, SessionBusy, StateNotSaved
from carrel.execution import temp_dirs
from carrel.execution.connection import WorkerConnection
from carrel.execution.executor import SavedVariables
from carrel.guest.sandbox.copy_tree import empty_tree
from carrel.text import readable_size

LONGEST_SAVE = 40.0
"""Seconds within which the worker's fork must have written the variables."""
_MAX_REPORT = 4 * 1024 * 1024
_MAX_NAMES = 10_000
_MAX_REASON = 1000
GENERATION = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Origin:
    """What must be the same, or stricter, when a state is used again."""

    parts: tuple[str, ...]
    """The active parts of the sandbox."""
    network: bool
    workspace: str | None
    """The folder that the changed files are changes of."""
    engine: str = ""
    """The address of the container engine that has the files, in volumes; empty where they are in the state folder."""

    def record(self, generation: str) -> dict[str, Any]:
        return {
            **({"engine": self.engine} if self.engine else {}),
            "parts": list(self.parts),
            "network": self.network,
            "workspace": self.workspace,
            "generation": generation,
            "python": list(sys.version_info[:3]),
            "user": os.geteuid(),
        }


class StateFolder:
    """One process at a time uses it. The host never reads the variables: only the session's own Python does.

    lock            held by the process that uses the folder, with its number
    manifest.json   `Origin`, and which generation of the files is the current one
    files/GENERATION/{upper,work,home,home-work}
    variables       as the session's Python has written them
    """

    def __init__(self, path: Path, origin: Origin) -> None:
        """SessionBusy names the process that uses it; ConfigurationError for the state of another workspace or user."""
        self.path = path
        make_own(path)
        self._lock = take_lock(path)
        _locks.add(self)
        try:
            before = self._read_manifest()
            self._check(before, origin)
            self.no_load_reason = _why_not_load(before, origin) if self.variables.exists() else ""
            self.is_new = before is None
            self._origin = origin
            self.generation = self._current_generation(before)
            self._remove_leftovers()
            self.changes.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write_manifest()
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> Path:
        return self.path / "files"

    @property
    def changes(self) -> Path:
        """The current generation: what the session has written in its workspace and its home."""
        return self.files / self.generation

    @property
    def variables(self) -> Path:
        return self.path / "variables"

    def _read_manifest(self) -> dict[str, Any] | None:
        """None where there is none; empty where it cannot be read."""
        try:
            manifest = json.loads((self.path / "manifest.json").read_bytes())
        except FileNotFoundError:
            return {} if self.files.exists() else None
        except (OSError, ValueError):
            return {}
        return manifest if isinstance(manifest, dict) else {}

    def _check(self, before: dict[str, Any] | None, origin: Origin) -> None:
        workspace = (before or {}).get("workspace", origin.workspace)
        if workspace != origin.workspace:
            raise ConfigurationError(
                f"the state in {self.path} was begun on the workspace {workspace or '(none)'}, and this session has "
                f"{origin.workspace or 'none'}; open it with the same workspace"
            )
        engine = (before or {}).get("engine", "")
        if before and engine != origin.engine:
            raise ConfigurationError(
                f"the files of the state in {self.path} are {_whereabouts(engine)}, and this session would have them "
                f"{_whereabouts(origin.engine)}; open it as it was begun"
            )

    def _current_generation(self, before: dict[str, Any] | None) -> str:
        named = str((before or {}).get("generation"))
        if GENERATION.fullmatch(named):
            return named
        # Without a readable manifest: the folder that was changed last.
        with suppress(FileNotFoundError):
            found = [entry for entry in self.files.iterdir() if GENERATION.fullmatch(entry.name)]
            if found:
                return max(found, key=lambda entry: entry.stat().st_mtime).name
        return uuid.uuid4().hex

    def _remove_leftovers(self) -> None:
        """Remove what a process left that was killed while it saved, or while it went back to a checkpoint."""
        for left in self.path.glob("variables-*"):
            left.unlink()
        with suppress(FileNotFoundError):
            for folder in self.files.iterdir():
                if folder.name != self.generation:
                    temp_dirs.remove(folder)

    def _write_manifest(self) -> None:
        with suppress(OSError, ValueError):
            if json.loads((self.path / "manifest.json").read_bytes()) == self._origin.record(self.generation):
                return
        self.stage(self.generation)
        self._new_manifest.replace(self.path / "manifest.json")

    @property
    def _new_manifest(self) -> Path:
        return self.path / "manifest.new"

    def stage(self, generation: str) -> None:
        """Do what may fail of `switch`."""
        with self._new_manifest.open("wb") as file:
            file.write(json.dumps(self._origin.record(generation)).encode())
            file.flush()
            os.fsync(file.fileno())

    def switch(self, generation: str) -> None:
        """Make the generation of the files that was staged the current one, and remove the files of the one before.

        Its folders stay until the next session: the kernel would unmount what is mounted on them, which is the new
        generation, if they were removed."""
        self._new_manifest.replace(self.path / "manifest.json")
        before, self.generation = self.changes, generation
        for name in ("upper", "home"):
            empty_tree(str(before / name))

    def new_file(self) -> tuple[int, Path]:
        """A descriptor to write variables to, and the path of its file."""
        path = self.path / f"variables-{uuid.uuid4().hex}"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path

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
        self.no_load_reason = ""  # They are this session's own now.

    def close(self) -> None:
        if self._lock >= 0:
            _locks.discard(self)
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough: a child that is being forked has it too
            os.close(self._lock)
            self._lock = -1

    def close_in_child(self) -> None:
        """In a fork of this process: the lock is the parent's, and must not outlive it here."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _whereabouts(engine: str) -> str:
    return f"in volumes of the container engine at {engine}" if engine else "in its folder"


def volumes_of(generation: str) -> tuple[str, str]:
    """The names of the volumes with the workspace and the home of a session in a container."""
    return f"carrel-{generation}-workspace", f"carrel-{generation}-home"


def volumes_of_state(folder: Path) -> tuple[str, tuple[str, ...]]:
    """The engine that has the files of this state, and its volumes; empty where the files are in the folder."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        engine, generation = str(manifest.get("engine", "")), str(manifest["generation"])
    except (OSError, ValueError, KeyError, AttributeError):
        return "", ()
    return engine, volumes_of(generation) if engine and GENERATION.fullmatch(generation) else ()


_locks: weakref.WeakSet[StateFolder] = weakref.WeakSet()


def _close_locks_in_child() -> None:
    for folder in list(_locks):
        folder.close_in_child()
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


def make_own(path: Path) -> None:
    """Make the folder; ConfigurationError if it belongs to another user, or cannot be written."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as problem:
        raise ConfigurationError(f"the state of the session cannot be kept in {path}: {problem.strerror}") from None
    if owner != os.geteuid():
        raise ConfigurationError(
            f"the state in {path} was written by the user {owner}, and this process is the user {os.geteuid()}; "
            "open the session as that user, or under another id"
        )


def take_lock(path: Path) -> int:
    try:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        raise ConfigurationError(f"the state of the session cannot be kept in {path}: {problem.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(descriptor, 20, 0).decode("ascii", "replace")
        os.close(descriptor)
        raise SessionBusy(
            f"the state in {path} is used by the process {owner or '?'}; close its session first"
        ) from None
    with suppress(OSError):  # A full disk is no reason not to open it: files may be deleted then.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode("ascii"), 0)
    return descriptor


def _why_not_load(before: dict[str, Any] | None, now: Origin) -> str:
    """Why the variables must not be loaded: old code would run with more rights."""
    try:
        if before is None:
            raise KeyError
        weaker = sorted(set(before["parts"]) - set(now.parts))
        opened = now.network and not before["network"]
    except (KeyError, TypeError):
        return "the description of the sandbox that they were saved in cannot be read"
    if weaker:
        return f"the sandbox lacks what it had when they were saved: {', '.join(weaker)}"
    return "the session has the network now, and had not when they were saved" if opened else ""


# --- what the worker reports ------------------------------------------------------------------------------------------


def variables_of_report(report: Any) -> SavedVariables:
    """The variables that a report of the worker lists; ValueError for anything else."""
    if not isinstance(report, dict) or not isinstance(report.get("kept"), list):
        raise ValueError("an invalid report")
    missing = report.get("missing")
    if not isinstance(missing, dict):
        raise ValueError("an invalid report")
    return SavedVariables(
        tuple(str(name)[:_MAX_REASON] for name in report["kept"][:_MAX_NAMES]),
        {str(name)[:_MAX_REASON]: str(why)[:_MAX_REASON] for name, why in list(missing.items())[:_MAX_NAMES]},
    )


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
            raise StateNotSaved(f"the variables were not saved: {str(report['error'])[:_MAX_REASON]}")
        return variables_of_report(report)
    except ValueError:
        raise StateNotSaved("the variables were not saved: the process that wrote them ended early") from None


# --- used space -------------------------------------------------------------------------------------------------------

_LOOK_INTERVAL = 1.0
_IDLE_INTERVAL = 30.0
_SPACE_OVER = 1.1
"""How much more than its limit a session may use before it is stopped."""
_SPACE_TO_TIDY = 1 << 20
"""Bytes that a session over its limit may add: what it needs to delete files."""
_LONG_PATH = 3000
"""Characters after which a folder is looked at by its descriptor: the kernel takes paths of 4,096."""


class DiskWatch:
    """Looks once a second at the space that a session's kept files use, and ends its processes if that is too much.

    While nothing runs in the session, and the disk does not fill, the files are not looked at."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        connection: WorkerConnection[Any],
        code_runs: Callable[[], bool],
        measure: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """`measure` returns the used space where the files are not in the folder; then they are looked at twice a
        minute while nothing runs."""
        self._folder, self._limit, self._connection, self._code_runs = folder, limit, connection, code_runs
        self._measure = measure
        self._task = asyncio.create_task(self._watch())

    async def _used(self) -> int:
        return await (self._measure() if self._measure is not None else asyncio.to_thread(used_space, self._folder))

    def _is_busy(self) -> bool:
        return self._code_runs() or any(client.deadlines() for client in self._connection.commands.clients())

    async def _watch(self) -> None:
        at_start = await self._used()
        most = max(self._limit * _SPACE_OVER, at_start + _SPACE_TO_TIDY)
        free, looked = _free_space(self._folder), True
        measured = time.monotonic()
        while True:
            began = time.monotonic()
            await asyncio.sleep(_LOOK_INTERVAL)
            # Also once after the last run ended, and for what runs in the background.
            busy, now = self._is_busy(), _free_space(self._folder)
            is_due = self._measure is not None and time.monotonic() - measured > _IDLE_INTERVAL
            if not (busy or looked or is_due or free - now > self._limit / 20):
                continue
            looked, free = busy, now
            used, measured = await self._used(), time.monotonic()
            if used > most:
                self._connection.kill(
                    f"the session was stopped: its files use {readable_size(used)}, and limits.disk is "
                    f"{readable_size(self._limit)}; delete files before it writes more"
                )
                await self._connection.close()
                return
            # A session with very many files is looked at less often, so that this takes a tenth of a processor at most.
            await asyncio.sleep(min(30.0, 10 * (time.monotonic() - began - _LOOK_INTERVAL)))

    def close(self) -> None:
        self._task.cancel()


def _free_space(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def used_space(folder: Path | str, seen: set[tuple[int, int]] | None = None) -> int:
    """Bytes on the disk of everything below a folder; links are not followed, and a file with two names counts once."""
    total, seen = 0, seen if seen is not None else set()
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with suppress(OSError):  # it was removed in between
                        about = entry.stat(follow_symlinks=False)
                        if about.st_nlink > 1 and not stat.S_ISDIR(about.st_mode):
                            if (about.st_dev, about.st_ino) in seen:
                                continue
                            seen.add((about.st_dev, about.st_ino))
                        total += about.st_blocks * 512
                        if stat.S_ISDIR(about.st_mode) and len(entry.path) < _LONG_PATH:
                            waiting.append(entry.path)
                        elif stat.S_ISDIR(about.st_mode):
                            inside = os.open(entry.path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                            try:
                                total += used_space(f"/proc/self/fd/{inside}", seen)
                            finally:
                                os.close(inside)
        except OSError:
            continue
    return total
