"""Session: one conversation, one executor, one library, one workspace."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol, Self, runtime_checkable
from uuid import uuid4

from carrel.conversation.conversation import Conversation, ConversationStorage
from carrel.conversation.metadata import checked_id
from carrel.conversation.session_info import SessionInfo
from carrel.conversation.store import SessionStore
from carrel.errors import ExecutorClosed, ForkRefused, ToolCallError
from carrel.execution import given
from carrel.execution.executor import (
    RUN_OUTPUT,
    CommandResult,
    ExecutionResult,
    Executor,
    FileChange,
    FileEntry,
    FilePath,
    Handler,
    OnOutput,
    Output,
    RunningCommand,
)
from carrel.execution.outcome import closed_result, failed_result
from carrel.library.artifacts import ArtifactStore
from carrel.library.deps import Deps
from carrel.library.describing import described
from carrel.library.moving import carry_over
from carrel.library.tools.catalog import Tools
from carrel.library.tools.python_functions import register
from carrel.library.tools.seam import ToolProvider
from carrel.library.tools.secrets import Secrets
from carrel.library.workflows import WorkflowLibrary
from carrel.storage.seam import Store
from carrel.trace import Kind, Step, Trace, TraceLog, Watcher, size_of


@runtime_checkable
class StorageBackend(Protocol):
    """One place where everything of a program's sessions is kept."""

    store: Store

    def get_session_store(self, durability: Literal["os", "fsync"] = "os") -> SessionStore:
        """The conversations kept here; the same object each time."""

    def get_workflow_library(self) -> WorkflowLibrary:
        """The workflows kept here; the same object each time."""

    def get_artifact_store(self) -> ArtifactStore:
        """The artifacts kept here; the same object each time."""

    async def close(self) -> None:
        """Let go of files and connections; twice is harmless."""


@dataclass
class Library:
    """What a session has at hand."""

    tools: Tools
    workflows: WorkflowLibrary
    artifacts: ArtifactStore
    deps: Deps
    secrets: Secrets


@dataclass
class _Answering:
    """A call of running code that somebody in this context is answering."""

    session: Session
    over: bool = False


_ANSWERING: ContextVar[_Answering | None] = ContextVar("carrel_answering", default=None)
_WOULD_WAIT = (
    "this was asked by a tool that the session's code is waiting for, and would wait for that code in turn; "
    "do it before or after the run, or in the code itself (a tool with `runs: sandbox` runs its program beside it)"
)

_NO_WAY_BACK = (
    "{}: a session does not take its variables and files back yet, and nothing has changed. To be able to go back, "
    "`fork()` before what may go wrong and go on in the fork; to take back what was said alone, use `append_rewind` of "
    "its session store"
)


NAMES = ("tools", "workflows", "skills", "artifacts", "deps")
"""What code finds: each is answered by the session."""


def unanswered() -> dict[str, Handler]:
    """For an executor that is started before its session is there: the names, and nobody behind them yet."""

    async def nobody(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        raise ExecutorClosed(f"{name} cannot be answered: the session has not begun")

    return dict.fromkeys(NAMES, nobody)


class Session:
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
        self._trace = Trace([self._log, *watchers(self.id)], hide=self._hidden)
        self._turn = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._started = False
        self._running: Step | None = None
        self._flows: dict[str, list[Step]] = {}
        """The workflows that have begun and not ended, by name."""
        self._registered: list[ToolProvider] = []
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
            self.executor.handlers.update(
                {
                    "tools": self._answer_tool,
                    "workflows": self._answer_workflow,
                    "skills": self._answer_workflow,
                    "artifacts": library.artifacts.handle,
                    "deps": self._answer_deps,
                }
            )
            await self.executor.start()
            if self._sync_deps_on_start:
                await self._install("install", "requirements.txt", library.deps.sync())
            self._started = True

    def _open(self) -> None:
        if self._closed:
            raise ExecutorClosed("Session is closed; make another one")

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

    async def _close_tools(self) -> None:
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

    def supports(self, name: str) -> bool:
        """Whether this capability is really in force here and now."""
        return name in self.supported_capabilities()

    def supported_capabilities(self) -> set[str]:
        return self.executor.supported_capabilities()

    async def converse(self, title: str = "New Session", **fields: Any) -> Conversation:
        """The session's conversation; made, or opened again, in its storage when it holds none yet."""
        if self.conversation is None:
            conversations = ConversationStorage(self.storage.get_session_store())
            found = await conversations.get(self.id)
            info = SessionInfo(id=self.id, title=title, **fields)
            self.conversation = found or await conversations.create(Conversation(info=info))
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
            with _refusing():
                executor = await self.executor.fork()
                async with AsyncExitStack() as undone:
                    undone.push_async_callback(executor.close)
                    said = await self._fork_conversation(id_, undone, is_needed=storage is not None)
                    if storage is not None:
                        await carry_over(self.storage.store, storage.store)
                    fork = self._twin(storage or self.storage, executor, id_, said)
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

    async def _fork_conversation(self, new_id: str, undone: AsyncExitStack, *, is_needed: bool) -> Conversation | None:
        """Fork what was said, where it is kept; the typed one where this session holds it, or it `is_needed`."""
        held = self.conversation
        conversations = (held and held.storage) or ConversationStorage(self.storage.get_session_store())
        if held is not None:
            # What was added and not yet written is part of this moment.
            await conversations.update(held)
        if not await fork_conversation(conversations.store, held.id if held is not None else self.id, new_id):
            return None
        undone.push_async_callback(conversations.store.delete_session, new_id)
        return await conversations.get(new_id) if held is not None or is_needed else None

    async def checkpoint(self, label: str = "") -> NoReturn:
        """A moment to come back to: not possible yet; ForkRefused says what is."""
        raise ForkRefused(_NO_WAY_BACK.format("a checkpoint cannot be made"))

    async def rewind(self, to: Any) -> NoReturn:
        """Going back in conversation, variables and files: not possible yet; ForkRefused says what is."""
        raise ForkRefused(_NO_WAY_BACK.format("a session cannot be rewound as a whole"))

    # --- code -------------------------------------------------------------------------------------------------------

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult:
        """Run code; whatever it does, a result comes, never an exception and never a hang."""
        if self._is_waited_for():
            return failed_result("ToolCallError", _WOULD_WAIT)
        async with self._turn:
            problem = await self._not_ready()
            if problem is not None:
                return problem
            step = self._begin_run(code)
            try:
                result = await self.executor.run(code, timeout)
                _note_result(step, result)
            except BaseException as raised:
                step.raised(raised)
                raise
            finally:
                self._end_run(step)
            return result

    async def stream(self, code: str, timeout: float | None = None) -> AsyncGenerator[Output | ExecutionResult]:
        """The same, with what is written as it comes, the result last. Closing the iterator stops the code."""
        if self._is_waited_for():
            yield failed_result("ToolCallError", _WOULD_WAIT)
            return
        async with self._turn:
            problem = await self._not_ready()
            if problem is not None:
                yield problem
                return
            step = self._begin_run(code)
            try:
                async with aclosing(self.executor.stream(code, timeout)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, ExecutionResult):
                            _note_result(step, piece)
                        yield piece
            except BaseException as raised:
                step.raised(raised)
                raise
            finally:
                self._end_run(step)

    async def _not_ready(self) -> ExecutionResult | None:
        if self._closed:
            return closed_result()
        if not self._started:
            try:
                await self.start()
            except Exception as problem:  # noqa: BLE001 -- whatever keeps it from starting, a run has a result
                return closed_result() if self._closed else failed_result(type(problem).__name__, str(problem))
        return None

    def _is_waited_for(self) -> bool:
        """Whether the code that runs here waits for an answer of whoever asks."""
        answering = _ANSWERING.get()
        return answering is not None and answering.session is self and not answering.over

    async def _my_turn(self) -> None:
        """Started, and nobody who would wait for ever."""
        if self._is_waited_for():
            raise ToolCallError(_WOULD_WAIT)
        await self.start()

    def _begin_run(self, code: str) -> Step:
        first = code.strip().partition("\n")[0] if isinstance(code, str) else type(code).__name__
        self._running = self._trace.begin("run", first, message=self._last_said())
        return self._running

    def _end_run(self, step: Step) -> None:
        self._running = None
        self._flows.clear()
        self._trace.end(step)

    async def interrupt(self) -> bool:
        """Stop the running code as Ctrl-C does; True when some was running. Its variables survive."""
        return await self.executor.interrupt()

    def _step(self, kind: Kind, name: str, parent: Step | None = None) -> AbstractContextManager[Step]:
        return self._trace.step(kind, name, parent=parent, message=self._last_said())

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
        words = given.command_words(command)
        await self._my_turn()
        with self._step("command", words if isinstance(words, str) else shlex.join(words)) as step:
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

    # --- tools ------------------------------------------------------------------------------------------------------

    async def list_tools(self) -> list[dict[str, Any]]:
        return await (await self._have()).tools.list()

    async def search_tools(self, query: str, limit: int = 10) -> list[dict[str, Any]]:
        return await (await self._have()).tools.search(query, limit)

    async def wait_for_tools(self) -> None:
        """Until everything that has tools has started, or failed to; the others wait 2 seconds for it at most."""
        await (await self._have()).tools.ready()

    async def get_tool(self, name: str) -> dict[str, Any] | None:
        """One tool as `list_tools` gives it, with the JSON `schema` of its arguments; None when there is none."""
        return await (await self._have()).tools.get(name)

    async def call_tool(self, name: str, /, **arguments: Any) -> Any:
        """One call without any code: `await session.call_tool("curl.get", url=…)`."""
        tools = (await self._have()).tools
        with self._step("tool", name) as step:
            return _sized(step, arguments, await tools.call(name, arguments))

    def register_tool(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        tags: Sequence[str] = (),
        approval: Literal["never", "ask"] = "never",
        timeout: float | None = 60.0,
    ) -> None:
        """Let code call a function of this program as `tools.NAME(...)`; it runs here, outside the sandbox."""
        provider = register(function, name=name, description=description, tags=tags, approval=approval, timeout=timeout)
        self._registered.append(provider)
        if self._library is not None:
            self._library.tools.add(provider)

    async def describe(self, task: str | None = None, limit: int = 12_000) -> str:
        """Text for a model's prompt: what the four namespaces hold, in about `limit` characters, what fits the task
        first."""
        library = await self._have()
        return await described(library.tools, library.workflows, library.artifacts, library.deps, task, limit)

    # --- workflows --------------------------------------------------------------------------------------------------

    async def list_workflows(self) -> list[dict[str, Any]]:
        return await (await self._have()).workflows.list()

    async def search_workflows(self, query: str, limit: int = 5) -> list[dict[str, Any]]:
        return await (await self._have()).workflows.search(query, limit)

    async def get_workflow(self, name: str) -> dict[str, Any] | None:
        return await (await self._have()).workflows.get(name)

    async def add_workflow(self, name: str, source: str, description: str = "") -> dict[str, Any]:
        """Keep Python with a function `run` under a name; ValueError and SyntaxError for what cannot be kept."""
        return await (await self._have()).workflows.add(name, source, description)

    async def remove_workflow(self, name: str) -> bool:
        return await (await self._have()).workflows.remove(name)

    async def workflow_history(self, name: str) -> list[dict[str, Any]]:
        """Every version that was kept, the oldest first."""
        return await (await self._have()).workflows.history(name)

    list_skills, search_skills, get_skill = list_workflows, search_workflows, get_workflow
    add_skill, remove_skill = add_workflow, remove_workflow

    # --- artifacts --------------------------------------------------------------------------------------------------

    async def list_artifacts(self) -> list[dict[str, Any]]:
        return await (await self._have()).artifacts.list()

    async def save_artifact(
        self, name: str, data: Any, description: str = "", metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return await (await self._have()).artifacts.save(name, data, description, metadata)

    async def load_artifact(self, name: str) -> Any:
        """The data as it was saved; ArtifactNotFoundError when there is none."""
        return await (await self._have()).artifacts.load(name)

    async def delete_artifact(self, name: str) -> None:
        """Remove it; no harm when there is none."""
        await (await self._have()).artifacts.delete(name)

    # --- dependencies -----------------------------------------------------------------------------------------------

    async def list_deps(self) -> list[str]:
        return await (await self._have()).deps.list()

    async def add_dep(self, package: str) -> dict[str, Any]:
        """Install a package for the session's Python and put it on the list; it can be imported at once."""
        deps = (await self._have()).deps
        return await self._install("install", package, deps.add(package))

    async def remove_dep(self, package: str) -> dict[str, Any]:
        deps = (await self._have()).deps
        return await self._install("uninstall", package, deps.remove(package))

    async def sync_deps(self) -> dict[str, Any]:
        """Install what the list names and is not there."""
        deps = (await self._have()).deps
        return await self._install("install", "requirements.txt", deps.sync())

    async def _install(
        self, kind: Kind, what: str, doing: Awaitable[dict[str, Any]], parent: Step | None = None
    ) -> dict[str, Any]:
        with self._step(kind, what, parent) as step:
            report = await doing
            step.facts |= {name: value for name, value in report.items() if isinstance(value, list) and value}
            if report.get("failed"):
                step.failed("DependencyError", str(report.get("message", "")))
            return report

    # --- what code inside asks for ----------------------------------------------------------------------------------

    async def _answer_tool(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        tools = (await self._have()).tools
        if name in ("tools", "tools.list", "tools.search", "tools.describe"):
            return await tools.handle(name, args, kwargs)
        answering = _Answering(self)
        _ANSWERING.set(answering)
        try:
            with self._step("tool", name.removeprefix("tools."), self._running) as step:
                return _sized(step, [args, kwargs], await tools.handle(name, args, kwargs, stream=RUN_OUTPUT.get()))
        finally:
            answering.over = True

    async def _answer_workflow(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A call of a workflow is two of these, when it begins and when it has ended."""
        value = await (await self._have()).workflows.handle(name, args, kwargs)
        verb = name.rpartition(".")[2]
        if verb == "begin":
            step = self._trace.begin("workflow", str(args[0]), parent=self._running)
            self._flows.setdefault(str(args[0]), []).append(step)
        elif verb == "ended" and self._flows.get(str(args[0])):
            step = self._flows[str(args[0])].pop()
            if kwargs.get("error"):
                step.failed("WorkflowExecutionError", str(kwargs["error"]))
            self._trace.end(step)
        return value

    async def _answer_deps(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        deps = (await self._have()).deps
        verb = name.rpartition(".")[2]
        if verb not in ("add", "remove", "sync"):
            return await deps.handle(name, args, kwargs)
        what = str(args[0]) if args else "requirements.txt"
        kind: Kind = "uninstall" if verb == "remove" else "install"
        return await self._install(kind, what, deps.handle(name, args, kwargs), self._running)


async def fork_conversation(store: SessionStore, session_id: str, new_id: str) -> bool:
    """Let the fork of a session begin with what was said in it; False where nothing was."""
    if await store.find_meta(session_id) is None:
        return False
    await store.fork_session(session_id, new_id=new_id)
    return True


@contextmanager
def _refusing() -> Iterator[None]:
    """Whatever keeps a session from being forked, whoever asked is told so in the same way."""
    try:
        yield
    except ForkRefused:
        raise
    except Exception as problem:
        raise ForkRefused(f"the session could not be forked: {problem}") from problem


def _note_result(step: Step, result: ExecutionResult) -> None:
    step.sizes |= {"stdout": len(result.stdout), "stderr": len(result.stderr)}
    if result.state != "kept":
        step.facts |= {"state": result.state}
    if result.error is not None:
        step.failed(result.error_type or "Error", result.error)


def _sized(step: Step, arguments: Any, value: Any) -> Any:
    step.sizes |= {"arguments": size_of(arguments), "result": size_of(value)}
    return value
