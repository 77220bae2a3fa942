"""A carrel session as the workspace of a pydantic-ai agent."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic_ai.workspaces import (
    CommandResult,
    FileEntry,
    SupportsCommands,
    SupportsFilesystem,
    SupportsRealpath,
    WorkspaceBackend,
    WorkspaceCommand,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)

from carrel.adapters.sessions import check_source, open_session
from carrel.errors import ConfigurationError, SessionClosed, SessionNotFound, WorkspaceLost
from carrel.session.session import Session

PROVIDER = "carrel"


class CarrelWorkspace(WorkspaceBackend, SupportsCommands, SupportsFilesystem, SupportsRealpath):
    """Commands and files of one session: `Workspace(CarrelWorkspace(session))`, or of a session in the folder `base`.

    With a `ref`, it reaches the session that an earlier CarrelWorkspace on this `base` has opened, in this process or
    another, also after that one was killed. An agent's run never closes the session; `close` does, if the session was
    opened here, and `delete` removes what is kept of it."""

    def __init__(
        self,
        session: Session | None = None,
        *,
        base: Path | str | None = None,
        session_id: str | None = None,
        ref: WorkspaceRef | None = None,
    ) -> None:
        check_source(session, base, session_id)
        if ref is not None and (session is not None or session_id is not None):
            raise ConfigurationError(
                "ref= names the session already; give it with base=, without session= or session_id="
            )
        if ref is not None and ref.provider != PROVIDER:
            raise ConfigurationError(
                f"the ref names a workspace of {ref.provider!r}; CarrelWorkspace opens those of {PROVIDER!r} only"
            )
        self._base, self._id = base, session_id
        self._session = session
        self._ref = WorkspaceRef(provider=PROVIDER, id=session.id) if session is not None else ref
        self._opened: Session | None = None

    @property
    def ref(self) -> WorkspaceRef | None:
        """The session's id: None until a session without a given id is opened by the first operation."""
        return self._ref

    async def close(self) -> None:
        """Close the session if this workspace opened it; what it keeps can be reached again by the `ref`."""
        if self._opened is not None:
            await self._opened.close()

    async def delete(self) -> None:
        """Close the session and delete what is kept of it; its `ref` leads nowhere then."""
        with _unavailable():
            session = await self._open()
        await session.close()
        await session.storage.get_session_store().delete_session(session.id)
        if self._base is not None:
            await session.storage.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _open(self) -> Session:
        """Return the started session. Nothing is awaited before it is kept: concurrent first calls share one."""
        if self._session is None:
            assert self._base is not None
            if self._ref is None:
                self._session = self._opened = open_session(self._base, self._id)
                self._ref = WorkspaceRef(provider=PROVIDER, id=self._session.id)
            else:
                self._session = self._attach(self._base, self._ref.id)
        await self._session.start()
        return self._session

    def _attach(self, base: Path | str, session_id: str) -> Session:
        """Return the session that is open in this process, else continue what was kept of it."""
        try:
            return Session.attach(session_id)
        except SessionNotFound:
            self._opened = Session.resume(base, session_id)
            return self._opened

    # --- commands ---------------------------------------------------------------------------------------------------

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        if isinstance(command, str) != shell:
            raise TypeError("a command in one string needs shell=True, a sequence of arguments shell=False")
        if timeout is not None and not 0 < timeout < math.inf:
            raise ValueError(f"timeout is {timeout!r}; it is a number of seconds above 0, or None")
        with _unavailable():
            session = await self._open()
            try:
                done = await session.execute_command(command, timeout=timeout, env=env)
            except (FileNotFoundError, PermissionError, NotADirectoryError) as problem:
                code = 126 if isinstance(problem, PermissionError) else 127  # as a shell
                return CommandResult(exit_code=code, stdout="", stderr=f"{problem}\n")
        if done.timed_out:
            text = f"the command had not ended after {timeout:g} seconds and was killed"
            raise WorkspaceTimeoutError(text, stdout=done.stdout, stderr=done.stderr)
        if done.truncated:
            limit = getattr(getattr(session.executor, "config", None), "output_limit", len(done.output))
            text = f"the command printed more than {limit} bytes; write its output to a file and read parts of that"
            raise WorkspaceOutputLimitError(text, limit=limit, stdout=done.stdout, stderr=done.stderr)
        return CommandResult(exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr)

    # --- files ------------------------------------------------------------------------------------------------------

    async def working_dir(self) -> str:
        with _unavailable():
            return await (await self._open()).realpath(".")

    async def read_bytes(self, path: str) -> bytes:
        with _unavailable():
            return await (await self._open()).read_file(path)

    async def write_bytes(self, path: str, data: bytes) -> None:
        with _unavailable():
            await (await self._open()).write_file(path, data)

    async def stat(self, path: str) -> FileEntry:
        with _unavailable():
            return await _entry(await self._open(), path)

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        with _unavailable():
            session = await self._open()
            found = []
            for entry in await session.list_files(path):
                full = posixpath.join(path, entry.name)
                if entry.kind == "link":
                    try:
                        found.append(await _entry(session, full))
                    except OSError:  # it leads nowhere, or to itself
                        found.append(FileEntry(name=entry.name, path=full, is_dir=False, size=None))
                else:
                    found.append(_of_kind(entry.name, full, entry.kind, entry.size))
            return found

    async def make_dir(self, path: str) -> None:
        with _unavailable():
            await (await self._open()).make_dir(path)

    async def remove(self, path: str) -> None:
        with _unavailable():
            session = await self._open()
            root = await session.realpath(".")
            target = posixpath.join(
                await session.realpath(posixpath.dirname(path), strict=False), posixpath.basename(path)
            )
            if root == target or root.startswith(f"{target.rstrip('/')}/"):
                raise ValueError(f"{path} is the working directory or one above it, which cannot be removed")
            await session.remove(path, recursive=True)

    async def exists(self, path: str) -> bool:
        with _unavailable():
            return await (await self._open()).exists(path)

    async def realpath(self, path: str) -> str:
        with _unavailable():
            return await (await self._open()).realpath(path, strict=False)


async def _entry(session: Session, path: str) -> FileEntry:
    about = await session.stat(path)
    return _of_kind(about.name, path, about.kind, about.size)


def _of_kind(name: str, path: str, kind: str, size: int) -> FileEntry:
    is_dir = kind == "folder"
    return FileEntry(name=name, path=path, is_dir=is_dir, size=None if is_dir else size)


@contextmanager
def _unavailable() -> Iterator[None]:
    """Turn the errors after which a session cannot be used into pydantic-ai's."""
    try:
        yield
    except (SessionClosed, SessionNotFound, WorkspaceLost) as problem:
        raise WorkspaceUnavailableError(str(problem)) from problem
