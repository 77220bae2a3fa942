"""Session: one conversation, one executor, one library, one workspace."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from carrel.conversation.models.conversation import Conversation, ConversationStorage
from carrel.conversation.models.info import SessionInfo
from carrel.conversation.session_state import checked_id
from carrel.errors import ExecutorClosed, ForkRefused, SessionExists, ToolCallError
from carrel.execution import arguments
from carrel.execution.executor import (
    CommandResult,
    ExecutionResult,
    Executor,
    FileChange,
    FileEntry,
    FilePath,
    OnOutput,
    Output,
    RunningCommand,
)
from carrel.execution.results import closed_result, failed_result
from carrel.library.moving import carry_over
from carrel.library.tools.tool import ToolProvider
from carrel.session.checkpoints import Checkpoints
from carrel.session.forking import refusing
from carrel.session.inside import WOULD_WAIT, Inside
from carrel.session.library_side import LibrarySide
from carrel.session.said import Checkpoint, Said
from carrel.session.seam import Library, StorageBackend
from carrel.session.steps import Steps, note_result
from carrel.trace import Trace, TraceLog, Watcher

_CLOSED = "Session is closed; make another one"
_ENDING = 5.0
"""Seconds that a tool's call has to end in when the session is closed."""


class Session(LibrarySide):
    """A complete, isolated place for an agent to work.

    Calls on one session queue up in order; different sessions run side by side. `run` and `stream` never raise for
    what the code does; everything else raises errors of `carrel.errors`."""

    def __init__(
        self,
        storage: StorageBackend,
        executor: Executor,
        library: Callable[[], Awaitable[Library]],
        *,
        sync_deps_on_start: bool = False,
        session_id: str | None = None,
        conversation: Conversation | None = None,
        watchers: Callable[[str], Sequence[Watcher]] = lambda session_id: (),
        owns_storage: bool = False,
    ) -> None:
        """`library` reads what the storage has, at the start; `watchers` are told of each step beside the trace."""
        self.storage = storage
        self.executor = executor
        self.conversation = conversation
        """What was said, where the session holds it; see `converse`."""
        self.id = session_id or (conversation.id if conversation is not None else uuid4().hex)
        self._load_library = library
        self._library: Library | None = None
        self._sync_deps_on_start = sync_deps_on_start
        self._owns_storage = owns_storage
        self._sharing: set[Session] = {self}
        """This session and the forks on its storage; the last of them to close closes what they own."""
        self._log = TraceLog(storage.store, f"sessions/{self.id}/trace.jsonl")
        self._steps = Steps(Trace([self._log, *watchers(self.id)], hide=self._hidden), self._last_said)
        self._inside = Inside(self._have, self._steps, executor)
        self._turn = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._conversing = asyncio.Lock()
        self._started = False
        self._said = Said(self.id, storage, lambda: self.conversation)
        self._checkpoints = Checkpoints(executor, self._said)
        self._registered: list[ToolProvider] = []
        self._calls: set[asyncio.Task[Any]] = set()
        """What the program has asked of tools, and is not answered."""
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    def _hidden(self, text: str) -> str:
        return self._library.secrets.hide(text) if self._library is not None else text

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Be ready to run; happens by itself on first use, and twice is harmless."""
        async with self._starting:
            self._open()
            if self._started:
                return
            library = await self._read_library()
            self.executor.handlers.update(self._inside.handlers())
            await self.executor.start()
            if self._sync_deps_on_start:
                await self._steps.install("install", "requirements.txt", library.deps.sync())
            self._started = True

    def _open(self) -> None:
        if self._closed:
            raise ExecutorClosed(_CLOSED)

    async def _have(self) -> Library:
        """The library; reading it needs no running executor."""
        self._open()
        if self._library is None:
            async with self._starting:
                return await self._read_library()
        return self._library

    async def _read_library(self) -> Library:
        if self._library is None:
            self._library = await self._load_library()
            for provider in self._registered:
                self._library.tools.add(provider)
        return self._library

    async def close(self) -> None:
        """End everything of the session; twice is harmless, and whoever asks waits until it is done."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        # A caller that is cancelled leaves it to finish: half closed, a program of the library would live on.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        async with AsyncExitStack() as last:
            self._sharing.discard(self)
            if self._owns_storage and not self._sharing:
                last.push_async_callback(self.storage.close)
            last.push_async_callback(self._log.flush)
            last.push_async_callback(self._close_tools)
            await self.executor.close()

    async def _while_open(self, doing: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        self._open()
        call = asyncio.get_running_loop().create_task(doing())
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and caller is not None and not caller.cancelling():
                raise ExecutorClosed(_CLOSED) from None
            raise
        finally:
            self._calls.discard(call)

    async def _close_tools(self) -> None:
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=_ENDING)
        # A start that was under way has the library's programs; it ends first.
        async with self._starting:
            if self._library is not None:
                await self._library.tools.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def reset(self) -> None:
        """Forget the variables; the library, the files and the conversation stay."""
        await self._my_turn()
        await self.executor.reset()

    def supports(self, capability: str) -> bool:
        """Whether this capability is really in force here and now."""
        return capability in self.supported_capabilities()

    def supported_capabilities(self) -> set[str]:
        found = self.executor.supported_capabilities()
        return found | {"checkpoint", "rewind"} if "fork" in found and isinstance(self.executor, Executor) else found

    async def converse(self, title: str = "New Session", **fields: Any) -> Conversation:
        """The session's conversation; made, or opened again, in its storage when it holds none yet."""
        async with self._conversing:
            conversations = ConversationStorage(self.storage.get_session_store())
            while self.conversation is None:
                folders = {"project_dir": "", "working_dir": fields.get("project_dir", "")}
                info = SessionInfo(id=self.id, title=title, **{**folders, **fields})
                self.conversation = await conversations.get(self.id)
                if self.conversation is None:
                    # Another process may make it in this moment, and then it is opened.
                    with suppress(SessionExists):
                        self.conversation = await conversations.create(Conversation(info=info))
        return self.conversation

    # --- branching --------------------------------------------------------------------------------------------------

    async def fork(self, *, storage: StorageBackend | None = None, session_id: str | None = None) -> Self:
        """Another live session that begins as this one is now: the same conversation, variables and files.

        From then on neither sees what the other says and does. Workflows, artifacts and the list of packages belong to
        the storage, which both have; with a `storage` of its own the fork begins with a copy of them. `ForkRefused`
        says what could not be carried and why, and nothing has changed then."""
        await self._my_turn()
        async with self._turn:
            self._open()
            id_ = checked_id(session_id) if session_id is not None else uuid4().hex
            with refusing("forked"):
                executor = await self.executor.fork()
                async with AsyncExitStack() as undone:
                    undone.push_async_callback(executor.close)
                    said = await self._said.fork(id_, undone, is_needed=storage is not None)
                    if storage is not None:
                        await carry_over(self.storage.store, storage.store)
                    fork = self._twin(storage or self.storage, executor, id_, said)
                    undone.push_async_callback(fork.close)
                    fork._registered = list(self._registered)
                    await fork.start()
                    undone.pop_all()
        if storage is None:
            fork._owns_storage, fork._sharing = self._owns_storage, self._sharing
            fork._sharing.add(fork)
        return fork

    def _twin(
        self, storage: StorageBackend, executor: Executor, session_id: str, conversation: Conversation | None
    ) -> Self:
        """Another of this kind with the same settings; who knows the kinds knows how."""
        raise ForkRefused(f"a {type(self).__name__} does not know how to make another of its kind")

    async def checkpoint(self, label: str = "") -> Checkpoint:
        """Keep this moment, the conversation, the variables and the files, to go back to while the session is open.

        `ForkRefused` says what could not be kept and why, and nothing has changed then."""
        if not isinstance(label, str):
            raise TypeError(f"a label is a text, not {label!r}")
        await self._my_turn()
        async with self._turn:
            self._open()
            with self._steps.step("checkpoint", label) as step:
                point = await self._checkpoints.make(label)
                step.facts |= {"checkpoint": point.id, "messages": point.messages}
        return point

    async def rewind(self, to: Checkpoint | str | int) -> Checkpoint:
        """Go back to a checkpoint, which can be named by its id, its label or its number of messages, in all three.

        The log keeps what happened in between, and every checkpoint stays: one can go forward again too. What still
        runs in the session ends. Workflows, artifacts and packages belong to the storage and stay as they are.
        `ForkRefused` says what could not be taken back and why, and nothing has changed then."""
        await self._my_turn()
        async with self._turn:
            self._open()
            point = self._checkpoints.find(to)
            with self._steps.step("rewind", point.label) as step:
                step.facts |= {"checkpoint": point.id, "messages": point.messages}
                await self._checkpoints.rewind(point)
        return point

    def checkpoints(self) -> list[Checkpoint]:
        """The moments that it can go back to, oldest first; none when it is closed."""
        return [] if self._closed else self._checkpoints.all()

    async def drop_checkpoint(self, point: Checkpoint | str | int) -> None:
        """Let go of a checkpoint: its process and its copy of the changed files."""
        await self._checkpoints.drop(point)

    # --- code -------------------------------------------------------------------------------------------------------

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult:
        """Run code; whatever it does, a result comes, never an exception and never a hang."""
        if self._inside.is_waiting():
            return failed_result("ToolCallError", WOULD_WAIT)
        async with self._turn:
            problem = await self._not_ready()
            if problem is not None:
                return problem
            with self._steps.run(code) as step:
                result = await self.executor.run(code, timeout)
                note_result(step, result)
            return result

    async def stream(self, code: str, timeout: float | None = None) -> AsyncGenerator[Output | ExecutionResult]:
        """The same, with what is written as it comes, the result last. Closing the iterator stops the code."""
        if self._inside.is_waiting():
            yield failed_result("ToolCallError", WOULD_WAIT)
            return
        async with self._turn:
            problem = await self._not_ready()
            if problem is not None:
                yield problem
                return
            with self._steps.run(code) as step:
                async with aclosing(self.executor.stream(code, timeout)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, ExecutionResult):
                            note_result(step, piece)
                        yield piece

    async def _not_ready(self) -> ExecutionResult | None:
        if self._closed:
            return closed_result()
        if not self._started:
            try:
                await self.start()
            except Exception as problem:  # noqa: BLE001 -- whatever keeps it from starting, a run has a result
                return closed_result() if self._closed else failed_result(type(problem).__name__, str(problem))
        return None

    async def _my_turn(self) -> None:
        """Started, and nobody who would wait for ever."""
        if self._inside.is_waiting():
            raise ToolCallError(WOULD_WAIT)
        await self.start()

    async def interrupt(self) -> bool:
        """Stop the running code as Ctrl-C does; True when some was running. Its variables survive."""
        return await self.executor.interrupt()

    def _last_said(self) -> str | None:
        said = self.conversation.messages if self.conversation is not None else None
        return said[-1].id if said else None

    async def trace(self) -> list[dict[str, Any]]:
        """What was done in this session so far, a dict a step, oldest first."""
        await self._log.flush()
        return [line async for line in self._log.read()]

    # --- commands and files -----------------------------------------------------------------------------------------

    async def execute_command(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 300,
        cwd: FilePath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        on_output: OnOutput | None = None,
    ) -> CommandResult:
        """Run a command (text for a shell, or words) where the code runs; when time is up it is gone with all it
        started, and the exit code is 124."""
        words = arguments.command_words(command)
        await self._my_turn()
        with self._steps.step("command", words if isinstance(words, str) else shlex.join(words)) as step:
            result = await self.executor.exec(
                command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, on_output=on_output
            )
            step.sizes |= {"stdout": len(result.stdout), "stderr": len(result.stderr)}
            step.facts["exit_code"] = result.exit_code
            if result.timed_out:
                step.outcome = "timeout"
        return result

    async def processes(self) -> list[RunningCommand]:
        """Commands that have left processes running, as `server & echo started` does, oldest first."""
        await self._my_turn()
        return await self.executor.processes()

    async def kill(self, pid: int) -> bool:
        """End such a command with all that came of it; False when there is none of this number, or nothing is left."""
        await self._my_turn()
        return await self.executor.kill(pid)

    async def read_file(self, path: FilePath) -> bytes:
        await self._my_turn()
        return await self.executor.read_file(path)

    async def write_file(self, path: FilePath, data: bytes | str) -> None:
        await self._my_turn()
        await self.executor.write_file(path, data)

    async def list_files(self, path: FilePath = ".") -> list[FileEntry]:
        await self._my_turn()
        return await self.executor.list_files(path)

    async def str_replace(self, path: FilePath, old: str, new: str) -> None:
        """Replace the one place where `old` stands; ValueError says how many there are otherwise."""
        await self._my_turn()
        await self.executor.str_replace(path, old, new)

    async def changed_files(self) -> list[FileChange]:
        """Which files of the workspace are not as they were at the start."""
        await self._my_turn()
        return await self.executor.changed_files()

    async def diff(self) -> str:
        await self._my_turn()
        return await self.executor.diff()
