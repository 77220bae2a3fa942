"""A session on a server, with the methods of a session that is here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from pydantic import PrivateAttr

from carrel.client.errors import check_usable
from carrel.client.transport import FilePath, WaitOptions, check_names
from carrel.errors import NotFoundThere, NotNow, SessionNotFound, SessionNotReady
from carrel.wire.answers import (
    CheckpointRecord,
    ClosedSession,
    FileChangeRecord,
    FileEntryRecord,
    Interaction,
    OutputPiece,
    RunResult,
    SessionEvent,
    SessionPage,
    SessionRecord,
    TraceRecord,
    VariableRecord,
)
from carrel.wire.verification import Job

if TYPE_CHECKING:
    from carrel.client._async.sessions import AsyncSessions


class AsyncRemoteSession(SessionRecord):
    """A session on a server; `async with` closes it."""

    _sessions: AsyncSessions = PrivateAttr()

    @property
    def id(self) -> str:
        """The same as `session_id`."""
        return self.session_id

    async def run(self, code: str, timeout: float | None = None) -> RunResult:
        """Run Python code; its variables persist."""
        return await self._sessions.run(self.session_id, code=code, code_timeout=timeout)

    async def stream(self, code: str, timeout: float | None = None) -> AsyncGenerator[OutputPiece | RunResult]:
        """Iterate over the output of code, its result last. Leaving early stops the code."""
        async with aclosing(self._sessions.stream(self.session_id, code=code, code_timeout=timeout)) as pieces:
            async for piece in pieces:
                yield piece

    async def interrupt(self) -> bool:
        """Stop the running code as Ctrl-C does; return whether code was running."""
        return await self._sessions.interrupt(self.session_id)

    async def execute_command(
        self,
        command: str,
        *,
        timeout: float | None = None,
        stdin: str | None = None,
        cwd: FilePath | None = None,
        env: Mapping[str, str] | None = None,
        background: bool = False,
        on_output: Callable[[OutputPiece], object] | None = None,
    ) -> Interaction:
        """Run a command; with `background`, only start it. `timeout` is the command's, 300 seconds by default."""
        return await self._sessions.execute_command(
            self.session_id,
            command=command,
            command_timeout=timeout,
            stdin=stdin,
            cwd=cwd,
            env=env,
            background=background,
            on_output=on_output,
        )

    async def stream_command(
        self,
        command: str,
        *,
        timeout: float | None = None,
        stdin: str | None = None,
        cwd: FilePath | None = None,
        env: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[OutputPiece | Interaction]:
        """Iterate over the output of a command, its interaction last. Leaving early does not stop the command."""
        pieces = self._sessions.stream_command(
            self.session_id, command=command, command_timeout=timeout, stdin=stdin, cwd=cwd, env=env
        )
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def get_interaction(self, interaction_id: str) -> Interaction:
        """Return a command as it is now."""
        return await self._sessions.get_interaction(self.session_id, interaction_id)

    async def cancel_command(self, interaction_id: str) -> Interaction:
        """Stop a running command and all its child processes."""
        return await self._sessions.cancel_command(self.session_id, interaction_id)

    async def read_file(self, path: FilePath) -> bytes:
        """Return the bytes of a file. Raises FileNotFoundError, IsADirectoryError, PermissionError as `open` does."""
        return await self._sessions.read_file(self.session_id, path)

    async def write_file(self, path: FilePath, data: bytes | str | Path) -> None:
        """Write text, bytes, or a file of this machine given as a Path; missing folders are created."""
        await self._sessions.write_file(self.session_id, path, data)

    async def download_file(self, path: FilePath, to: str | Path) -> Path:
        """Download a file into a file here, which appears only when it is complete."""
        return await self._sessions.download_file(self.session_id, path, to)

    async def list_files(self, path: FilePath = ".") -> list[FileEntryRecord]:
        """Return the entries of a folder, by name."""
        return await self._sessions.list_files(self.session_id, path)

    async def str_replace(self, path: FilePath, old: str, new: str) -> None:
        """Replace the one occurrence of `old`; ValueError says how many there are otherwise."""
        done = await self._sessions.str_replace(self.session_id, file_path=path, str_to_replace=old, str_to_insert=new)
        if not done.success:
            raise ValueError(done.message)

    async def diff(self) -> str:
        """Return what changed since the start, as a unified diff."""
        return (await self._sessions.diff(self.session_id)).diff

    async def changed_files(self) -> list[FileChangeRecord]:
        """Return the files that differ from the start, by path."""
        return (await self._sessions.diff(self.session_id)).changes

    async def variables(self) -> list[VariableRecord]:
        """Return the variables of the interpreter, by name."""
        return await self._sessions.variables(self.session_id)

    async def conversation(self, *, before: int | None = None, limit: int | None = None) -> dict[str, Any]:
        """Return `session` and `messages`, as a SessionStore does; with `limit`, the last ones `before` a number."""
        return await self._sessions.conversation(self.session_id, before=before, limit=limit)

    async def add_messages(self, *messages: dict[str, Any]) -> int:
        """Append messages to the conversation; return how many there are now."""
        return await self._sessions.add_messages(self.session_id, list(messages))

    async def events(self, from_seq: int = 1, *, follow: bool = True) -> AsyncGenerator[SessionEvent]:
        """Iterate over what happened and goes on to happen; with `follow=False`, over what happened so far."""
        async with aclosing(self._sessions.events(self.session_id, from_seq=from_seq, follow=follow)) as events:
            async for event in events:
                yield event

    async def trace(self, *, after: int = 0) -> list[TraceRecord]:
        """Return the runs, calls, commands, checkpoints and verdicts so far."""
        return await self._sessions.trace(self.session_id, after=after)

    async def verify(
        self,
        *,
        wait_for_completion: bool = True,
        on_progress: Callable[[Job], object] | None = None,
        **options: Unpack[WaitOptions],
    ) -> Job:
        """Verify the work so far, in a copy."""
        check_names(self.verify, options)
        return await self._sessions.verify.start(
            self.session_id, wait_for_completion=wait_for_completion, on_progress=on_progress, **options
        )

    async def pause(self) -> AsyncRemoteSession:
        """Save and close a durable session, and return it as it is then."""
        return await self._sessions.pause(self.session_id)

    async def resume(self) -> AsyncRemoteSession:
        """Open the paused session again."""
        return await self._sessions.resume(self.session_id)

    async def fork(self) -> AsyncRemoteSession:
        """Return another session that starts from this moment of this one."""
        return await self._sessions.fork(self.session_id)

    async def checkpoint(self, label: str = "") -> CheckpointRecord:
        """Make a checkpoint of the conversation, the variables and the files."""
        return await self._sessions.checkpoint(self.session_id, label=label)

    async def checkpoints(self) -> list[CheckpointRecord]:
        """Return the checkpoints, oldest first."""
        return await self._sessions.checkpoints(self.session_id)

    async def drop_checkpoint(self, point: CheckpointRecord | str) -> None:
        """Remove a checkpoint."""
        await self._sessions.drop_checkpoint(self.session_id, point=point)

    async def rewind(self, to: CheckpointRecord | str | int) -> CheckpointRecord:
        """Return to a checkpoint, given as itself, its id, its label or its number of messages."""
        return await self._sessions.rewind(self.session_id, to=to)

    async def extend(self, ttl_minutes: int) -> AsyncRemoteSession:
        """Keep the session for so many minutes from now."""
        return await self._sessions.extend(self.session_id, ttl_minutes=ttl_minutes)

    async def refresh(self) -> AsyncRemoteSession:
        """Return the session as it is now."""
        return await self._sessions.retrieve(self.session_id)

    async def close(self) -> ClosedSession | None:
        """Close the session; return None if it is closed already."""
        try:
            return await self._sessions.close(self.session_id)
        except (SessionNotFound, SessionNotReady, NotFoundThere, NotNow):
            return None

    async def __aenter__(self) -> Self:
        try:
            check_usable(self)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncSessionList(SessionPage):
    """One page of sessions, each with its calls."""

    sessions: list[AsyncRemoteSession]  # type: ignore[assignment]
