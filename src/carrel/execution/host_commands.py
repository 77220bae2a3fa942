"""Commands as processes of this very host, for code that runs in it: each with all that comes of it."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from carrel.execution.executor import CommandEnded, RunningCommand
from carrel.execution.output_pipes import OutputPipe, Sink
from carrel.guest.processes import MARK, ProcessTree, scan_with_marks

SHELL = ["/bin/sh", "-c"]


@dataclass(frozen=True)
class _Command:
    """A command under way, or one that may have left something."""

    text: str
    started: datetime
    tree: ProcessTree
    pipes: tuple[OutputPipe, OutputPipe]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()


class HostCommands:
    """Those under way, and those that may have left something."""

    def __init__(self) -> None:
        self._known: dict[int, _Command] = {}

    async def run(
        self,
        words: list[str],
        out: Sink,
        err: Sink,
        timeout: float | None,
        folder: Path,
        env: Mapping[str, str],
        stdin: bytes | None,
        *,
        keep: bool,
    ) -> CommandEnded:
        """A command, until it ends; `keep`: what it leaves in the background goes on until it is ended."""
        pipes, mark = (OutputPipe(), OutputPipe()), uuid4().hex
        pipes[0].sink, pipes[1].sink = out, err
        starting = asyncio.get_running_loop().create_task(
            asyncio.create_subprocess_exec(
                *words,
                cwd=folder,
                env={**env, MARK: mark},
                stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
                stdout=pipes[0].write_end,
                stderr=pipes[1].write_end,
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # It may have begun: then it goes with all that came of it.
            await asyncio.wait([starting])
            for pipe in pipes:
                pipe.close()
            if not starting.cancelled() and starting.exception() is None:
                await asyncio.to_thread(ProcessTree(starting.result().pid, mark).kill)
                await starting.result().wait()
            raise
        except (OSError, ValueError) as problem:
            for pipe in pipes:
                pipe.close()
            # A folder on the path that may not be looked into is no reason to call the program forbidden.
            missing = isinstance(problem, FileNotFoundError) or shutil.which(words[0]) is None
            return CommandEnded(127 if missing else 126, error=str(problem))
        for pipe in pipes:
            pipe.handed_over()
        text = words[2] if words[:2] == SHELL else shlex.join(words)
        command = _Command(text, datetime.now(UTC), ProcessTree(process.pid, mark), pipes)
        self._known[process.pid] = command
        timed_out = ended = False
        try:
            async with asyncio.timeout(timeout):
                await process.communicate(stdin)
        except (TimeoutError, asyncio.CancelledError) as problem:
            timed_out = isinstance(problem, TimeoutError)
            await asyncio.to_thread(command.tree.kill)
            ended = True
            await process.wait()
            if not timed_out:
                raise
        finally:
            command.tree.reaped = process.returncode is not None
            for pipe in pipes:
                pipe.drain()
                pipe.sink = None
            if not keep:
                await asyncio.to_thread(command.tree.kill)
            # What was ended may still hold its pipes for a moment; what goes on in the background does for long.
            ended = (
                ended or not keep or (all(pipe.has_ended() for pipe in pipes) and not command.tree.has_group_members())
            )
            if ended:
                self._known.pop(process.pid, None)
                command.close()
        code = 0 if process.returncode is None else process.returncode
        return CommandEnded(124 if timed_out else code if code >= 0 else 128 - code, timed_out)

    async def processes(self) -> list[RunningCommand]:
        """Those that still have processes."""
        seen = await asyncio.to_thread(scan_with_marks)
        for pid, command in list(self._known.items()):
            if not command.tree.members(seen):
                del self._known[pid]
                command.close()
        return [RunningCommand(pid, command.text, command.started) for pid, command in self._known.items()]

    async def kill(self, pid: int) -> bool:
        """End one with all that came of it; whether there was something."""
        command = self._known.pop(pid, None)
        if command is None:
            return False
        alive = bool(await asyncio.to_thread(command.tree.members))
        await asyncio.to_thread(command.tree.kill)
        command.close()
        return alive

    async def end_all(self) -> None:
        for command in list(self._known.values()):
            await asyncio.to_thread(command.tree.kill)
            command.close()
