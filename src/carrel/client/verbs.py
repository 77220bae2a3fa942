"""What a session on a server can do, in the words of a Session that is here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, Unpack

from pydantic import PrivateAttr

from carrel.client.answers import (
    ChangedFile,
    Checkpoint,
    Closed,
    FileInfo,
    Interaction,
    Job,
    OutputPiece,
    RunResult,
    S,
    SessionEvent,
    SessionRecord,
)
from carrel.client.asking import FilePath, Waiting, typed
from carrel.client.failures import named
from carrel.client.line import Asked
from carrel.client.sessions import Sessions
from carrel.errors import NotFoundThere, NotNow, RemoteError, SessionNotFound, SessionNotReady


class Verbs(Generic[S]):
    """Written once; each stands on `sessions` and names its session."""

    session_id: str
    _sessions: Sessions[S]

    async def run(self, code: str, timeout: float | None = None) -> RunResult:
        """Run Python code; variables stay for the next run."""
        return await self._sessions.run(self.session_id, code=code, code_timeout=timeout)

    async def stream(self, code: str, timeout: float | None = None) -> AsyncGenerator[OutputPiece | RunResult, None]:
        """What the code writes as it comes, the result last. Leaving early stops the code."""
        async with aclosing(self._sessions.stream(self.session_id, code=code, code_timeout=timeout)) as pieces:
            async for piece in pieces:
                yield piece

    async def interrupt(self) -> bool:
        """Stop the running code as Ctrl-C does; True when some was running."""
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
        """Run a command; with `background`, only begin it. `timeout` is the command's, 300 seconds by default."""
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
    ) -> AsyncGenerator[OutputPiece | Interaction, None]:
        """What a command writes as it comes, the finished interaction last. Leaving early leaves it running."""
        pieces = self._sessions.stream_command(
            self.session_id, command=command, command_timeout=timeout, stdin=stdin, cwd=cwd, env=env
        )
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def get_interaction(self, interaction_id: str) -> Interaction:
        """A command as it stands now."""
        return await self._sessions.get_interaction(self.session_id, interaction_id)

    async def read_file(self, path: FilePath) -> bytes:
        """Relative to the workspace. Raises FileNotFoundError, IsADirectoryError, PermissionError as `open` does."""
        return await self._sessions.read_file(self.session_id, path)

    async def write_file(self, path: FilePath, data: bytes | str | Path) -> None:
        """Text, bytes, or a file here given as a Path. Missing folders are made."""
        await self._sessions.write_file(self.session_id, path, data)

    async def download_file(self, path: FilePath, to: str | Path) -> Path:
        """Into a file here, which is there whole or not at all."""
        return await self._sessions.download_file(self.session_id, path, to)

    async def list_files(self, path: FilePath = ".") -> list[FileInfo]:
        """What is in a folder, by name."""
        return await self._sessions.list_files(self.session_id, path)

    async def str_replace(self, path: FilePath, old: str, new: str) -> None:
        """Replace the one place where `old` stands; ValueError says how many there are otherwise."""
        done = await self._sessions.str_replace(self.session_id, file_path=path, str_to_replace=old, str_to_insert=new)
        if not done.success:
            raise ValueError(done.message)

    async def diff(self) -> str:
        """What was changed since the start, as a unified diff."""
        return (await self._sessions.diff(self.session_id)).diff

    async def changed_files(self) -> list[ChangedFile]:
        """Which files are not as they were at the start, by path."""
        return (await self._sessions.diff(self.session_id)).changes

    async def conversation(self) -> dict[str, Any]:
        """What was said: `session` and `messages`."""
        return await self._sessions.conversation(self.session_id)

    async def add_messages(self, *messages: dict[str, Any]) -> int:
        """Append to what was said; returns how many messages there are now."""
        return await self._sessions.add_messages(self.session_id, list(messages))

    async def events(self, from_seq: int = 1, *, follow: bool = True) -> AsyncGenerator[SessionEvent, None]:
        """What happened and goes on to happen; with `follow=False`, what happened so far."""
        async with aclosing(self._sessions.events(self.session_id, from_seq=from_seq, follow=follow)) as events:
            async for event in events:
                yield event

    async def verify(
        self,
        *,
        wait_for_completion: bool = True,
        on_progress: Callable[[Job], object] | None = None,
        **more: Unpack[Waiting],
    ) -> Job:
        """Judge what was done so far, in a copy."""
        return await self._sessions.verify.start(
            self.session_id, wait_for_completion=wait_for_completion, on_progress=on_progress, **more
        )

    async def fork(self) -> S:
        """Another session that starts from this moment of this one."""
        return await self._sessions.fork(self.session_id)

    async def checkpoint(self, label: str = "") -> Checkpoint:
        """Keep this moment, the conversation, the variables and the files, to go back to."""
        return await self._sessions.checkpoint(self.session_id, label=label)

    async def checkpoints(self) -> list[Checkpoint]:
        """The moments that it can go back to, oldest first."""
        return await self._sessions.checkpoints(self.session_id)

    async def drop_checkpoint(self, point: Checkpoint | str) -> None:
        """Let go of one."""
        await self._sessions.drop_checkpoint(self.session_id, point=point)

    async def rewind(self, to: Checkpoint | str | int) -> Checkpoint:
        """Go back to a checkpoint, named by itself, its id, its label or its number of messages."""
        return await self._sessions.rewind(self.session_id, to=to)

    async def extend(self, ttl_minutes: int) -> S:
        """Let it live for this many minutes from now."""
        return await self._sessions.extend(self.session_id, ttl_minutes=ttl_minutes)

    async def refresh(self) -> S:
        """The session as it stands now."""
        return await self._sessions.retrieve(self.session_id)

    async def close(self) -> Closed | None:
        """End it; None when it has ended already."""
        try:
            return await self._sessions.close(self.session_id)
        except (SessionNotFound, SessionNotReady, NotFoundThere, NotNow):
            return None


@dataclass
class Unbound(Verbs[S]):
    """The verbs alone, for the session that blocks."""

    session_id: str
    _sessions: Sessions[S]


class AsyncRemoteSession(SessionRecord, Verbs["AsyncRemoteSession"]):
    """A session on a server; `async with` ends it."""

    _sessions: Sessions[AsyncRemoteSession] = PrivateAttr()

    @classmethod
    def of(cls, sessions: Sessions[AsyncRemoteSession], data: Any, asked: Asked) -> AsyncRemoteSession:
        session = typed(cls, data, asked)
        session._sessions = sessions
        return session

    async def __aenter__(self) -> Self:
        try:
            must_be_usable(self)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def must_be_usable(session: SessionRecord) -> None:
    """Raise what kept it from being ready."""
    if session.status in ("ready", "creating"):
        return
    fault = session.error
    why = fault.message if fault else f"it is {session.status}"
    told = RemoteError(f"session {session.session_id} of {session.dataset}/{session.sample_id} cannot be used: {why}")
    kind = named(fault.code) if fault else None
    if kind is None:
        raise told
    raise kind(why) from told
