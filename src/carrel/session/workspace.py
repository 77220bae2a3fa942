"""The workspace of a session: commands and files, beside the code that runs in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from carrel.execution.commands_and_files import command_words
from carrel.execution.executor import (
    CommandResult,
    Executor,
    FileChange,
    FileEntry,
    FilePath,
    FileStat,
    OnOutput,
    RunningCommand,
)
from carrel.session.recording import Recording
from carrel.tracing import StepRecorder


class SessionWorkspace:
    """The methods of Session for commands and files. They do not wait for a run, or for each other."""

    executor: Executor
    _steps: StepRecorder
    _recording: Recording

    async def _ensure_usable(self) -> None:
        """Start the session; raise an error when it is closed."""
        raise NotImplementedError

    @property
    def workspace_path(self) -> str:
        """The folder of the workspace as code and commands see it; without a sandbox, known after the start."""
        return str(getattr(self.executor, "workspace_path", "/workspace"))

    @property
    def user(self) -> str:
        """The user that commands run as, unless they are to run as root."""
        return "agent"

    async def execute_command(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 300,
        cwd: FilePath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        user: str | None = None,
        text: bool = True,
        on_output: OnOutput | None = None,
        name: str | None = None,
    ) -> CommandResult:
        """Run a command (a str for a shell, or a list of arguments) in the workspace, beside the code and others.

        On a timeout the whole process tree is killed and the exit code is 124; cancelling the caller kills it too.
        A command that cannot be started raises what `subprocess` raises. `user` is "agent" (default) or "root"; `name`
        is the command's name in the trace."""
        words = command_words(command)
        await self._ensure_usable()
        with self._steps.step("command", name or (words if isinstance(words, str) else shlex.join(words))) as step:
            result = await self.executor.exec(
                command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, user=user, text=text, on_output=on_output
            )
            step.sizes |= {"stdout": len(result.stdout), "stderr": len(result.stderr)}
            step.facts["exit_code"] = result.exit_code
            if result.timed_out:
                step.outcome = "timeout"
        self._recording.end_command(step)
        return result

    async def processes(self) -> list[RunningCommand]:
        """Return the commands that still have processes, oldest first, as `server & echo started` leaves one."""
        await self._ensure_usable()
        return await self.executor.processes()

    async def kill(self, pid: int) -> bool:
        """Kill such a command with its whole process tree; False when no process with this number is left."""
        await self._ensure_usable()
        return await self.executor.kill(pid)

    async def read_file(self, path: FilePath) -> bytes:
        """Return the content of a file; a relative path starts at the workspace. Raises what `open` raises."""
        await self._ensure_usable()
        return await self.executor.read_file(path)

    async def write_file(self, path: FilePath, data: bytes | str) -> None:
        """Write a file; missing folders are created."""
        await self._ensure_usable()
        await self.executor.write_file(path, data)

    async def list_files(self, path: FilePath = ".") -> list[FileEntry]:
        """Return the entries of a folder, sorted by name."""
        await self._ensure_usable()
        return await self.executor.list_files(path)

    async def stat(self, path: FilePath) -> FileStat:
        """Return what is known of a file; of a link, what is known of its target."""
        await self._ensure_usable()
        return await self.executor.stat(path)

    async def exists(self, path: FilePath) -> bool:
        """Return whether the path exists, as `os.path.exists`."""
        await self._ensure_usable()
        return await self.executor.exists(path)

    async def make_dir(self, path: FilePath) -> None:
        """Create a folder with missing parents; a folder that exists is no error."""
        await self._ensure_usable()
        await self.executor.make_dir(path)

    async def remove(self, path: FilePath, *, recursive: bool = False) -> None:
        """Remove a file, a link or an empty folder; with `recursive` a folder and all that is in it."""
        await self._ensure_usable()
        await self.executor.remove(path, recursive=recursive)

    async def move(self, path: FilePath, to: FilePath) -> None:
        """Rename a file or folder; a file at `to` is replaced."""
        await self._ensure_usable()
        await self.executor.move(path, to)

    async def realpath(self, path: FilePath, *, strict: bool = True) -> str:
        """Return the absolute path without links; FileNotFoundError if it does not exist, unless `strict` is False."""
        await self._ensure_usable()
        return await self.executor.realpath(path, strict=strict)

    async def str_replace(self, path: FilePath, old: str, new: str) -> None:
        """Replace the single occurrence of `old`; ValueError with the number of occurrences if it is not one."""
        await self._ensure_usable()
        await self.executor.str_replace(path, old, new)

    async def changed_files(self) -> list[FileChange]:
        """Return the files of the workspace that differ from the start, sorted by path."""
        await self._ensure_usable()
        return await self.executor.changed_files()

    async def diff(self) -> str:
        """Return the changes of the workspace since the start as a unified diff."""
        await self._ensure_usable()
        return await self.executor.diff()
