"""The volumes with the files of a durable session in a container: made once, and there until the session is deleted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from carrel.execution.channels import CommandServerGone
from carrel.execution.commands_and_files import CommandOutput
from carrel.execution.connection import WorkerConnection
from carrel.execution.container_settings import HOME
from carrel.execution.container_transport import ContainerTransport
from carrel.execution.docker_engine import Engine
from carrel.execution.durable import StateFolder, volumes_of
from carrel.execution.file_changes import Seen, Tree
from carrel.execution.results import WorkerDied

_COUNT_TIME = 20.0
"""Seconds for one count of the used space."""
_TRIES = 3
_MAX_OUTPUT = 1000
_COUNT_SPACE = """
import os, stat, sys
sys.setrecursionlimit(100_000)
def used(folder, seen):
    total = 0
    for name in os.listdir(folder):
        try:
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
            key, flags = (about.st_dev, about.st_ino), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            total += 0 if key in seen else about.st_blocks * 512
            if not stat.S_ISDIR(about.st_mode):
                if about.st_nlink > 1:
                    seen.add(key)
                continue
            try:
                inside = os.open(name, flags, dir_fd=folder)
            except PermissionError:
                os.chmod(name, 0o700, dir_fd=folder)
                inside = os.open(name, flags, dir_fd=folder)
                os.fchmod(inside, stat.S_IMODE(about.st_mode))
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            total += used(inside, seen)
        finally:
            os.close(inside)
    return total
print(sum(used(os.open(path, os.O_RDONLY | os.O_DIRECTORY), set()) for path in sys.argv[1:]))
"""
"""Code can hide files neither in folders without permissions nor in very deep ones."""


class SessionVolumes:
    """One for the home folder, and one for the workspace unless that is a folder of the host."""

    def __init__(self, engine: Engine, state: StateFolder, folders: Sequence[str]) -> None:
        self._engine, self._state = engine, state
        workspace, home = volumes_of(state.generation)
        self.names = {path: home if path == HOME else workspace for path in folders}
        """By the path of the folder in the container."""
        self._start = state.path / "start.json"
        """The files of the workspace as they were when the volumes had all of them."""
        self.has_files = False
        """Whether the volumes have all files that the session began with."""
        self.lost = ""
        """Why files of an earlier session are gone."""

    def open(self, image: str, user: tuple[int, int]) -> None:
        """Make the volumes, unless they are there; containers that a killed host has left with them are removed."""
        missing = [name for name in self.names.values() if not self._engine.has_volume(name)]
        was_begun = self._start.exists()
        self.has_files = was_begun and not missing
        if self.has_files:
            for name in self.names.values():
                self._engine.end_users_of(name)
            return
        if was_begun:
            self.lost = f"the engine at {self._engine.where} has no volume {missing[0]} any more, which had its files"
            self._start.unlink()
        for name in self.names.values():
            self._engine.remove_volume(name)  # A process may have been killed before it had all files.
        self._engine.make_volumes(self.names, user, image, str(self._state.path))

    def note_start(self, tree: Tree) -> None:
        """Remember that the volumes have all files."""
        if not self.has_files:
            new = self._start.with_suffix(".new")
            new.write_text(json.dumps({name: asdict(seen) for name, seen in tree.items()}), encoding="utf-8")
            new.replace(self._start)
            self.has_files = True

    def read_start(self) -> Tree | None:
        """None for a damaged file: then the contents are compared."""
        try:
            return {name: Seen(**seen) for name, seen in json.loads(self._start.read_text(encoding="utf-8")).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return None


async def used_space(
    connection: WorkerConnection[ContainerTransport], python: Sequence[str], folders: Sequence[str], otherwise: int
) -> int:
    """Bytes of everything in these folders, as a program in the container counts them; `otherwise` where code keeps it
    from counting again and again."""
    for _ in range(_TRIES):
        output = CommandOutput(_MAX_OUTPUT)
        command = [*python, "-I", "-S", "-c", _COUNT_SPACE, *folders]
        try:
            client = await connection.commands.get("agent")
            request = client.begin({"op": "command", "command": command, "timeout": _COUNT_TIME}, on_piece=output.add)
            async with asyncio.timeout(2 * _COUNT_TIME):
                answer = await asyncio.shield(request.answer)
            result = output.result(answer)
            if result.exit_code == 0:
                return int(result.stdout)
        except (CommandServerGone, WorkerDied, TimeoutError, ValueError):
            if not connection.alive:
                return 0
        # Where the session is at its limit of processes only for a moment, it is not ended for that.
        await asyncio.sleep(1)
    return otherwise
