"""The library of a session, read at the first use, and the answers to the calls that running code makes to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from carrel.errors import ExecutorClosed
from carrel.execution.executor import Executor, Handler, current_call
from carrel.session.storage import StorageBackend
from carrel.tracing import Kind, StepRecorder, note_sizes

if TYPE_CHECKING:
    from carrel.library.tools.tool import ToolProvider
    from carrel.session.library import SessionLibrary

CALL_NAMES = ("tools", "tools._names", "workflows", "skills", "artifacts", "deps")
"""The names under which code makes calls."""

WOULD_WAIT = (
    "a tool that the session's code is waiting for made this call, which would wait for that code in turn; "
    "make it before or after the run, or in the code itself (a tool with `runs: sandbox` runs its program beside it)"
)

CLOSED = "Session is closed; make another one"
_CLOSE_TIMEOUT = 5.0
"""Seconds that a running tool call has to end when the session is closed."""


def library_module() -> ModuleType:
    """Import the module that reads libraries."""
    from carrel.session import library  # noqa: PLC0415 -- takes longer to import than everything else together

    return library


class LibraryAccess:
    """Reads the library of a session when it is needed, and cancels the host's tool calls when the session closes."""

    def __init__(self, storage: StorageBackend, executor: Executor, **settings: Any) -> None:
        """`settings` are the keyword arguments of `read_library`."""
        self._storage = storage
        self._executor = executor
        self._settings = settings
        self._lock = asyncio.Lock()
        self._library: SessionLibrary | None = None
        self._registered: list[ToolProvider] = []
        self._calls: set[asyncio.Task[Any]] = set()
        """Tool calls made by the host that are not answered yet."""
        self._closed = False

    async def get(self) -> SessionLibrary:
        """Return the library; ExecutorClosed when the session is closed."""
        self._refuse_closed()
        if self._library is None:
            async with self._lock:
                self._refuse_closed()
                if self._library is None:
                    self._library = await self._read()
        return self._library

    async def _read(self) -> SessionLibrary:
        library: SessionLibrary = await library_module().read_library(self._storage, self._executor, **self._settings)
        for provider in self._registered:
            library.tools.add(provider)
        return library

    def add(self, provider: ToolProvider) -> None:
        """Add the tools of a provider, also when the library is not read yet."""
        self._refuse_closed()
        self._registered.append(provider)
        if self._library is not None:
            self._library.tools.add(provider)

    def register(
        self,
        function: Callable[..., Any],
        name: str | None,
        description: str | None,
        tags: Sequence[str],
        approval: Literal["never", "ask"],
        timeout: float | None,
    ) -> None:
        """Add a function of the host as a tool."""
        self._refuse_closed()
        self.add(
            library_module().register(
                function, name=name, description=description, tags=tags, approval=approval, timeout=timeout
            )
        )

    def add_tools_of(self, other: LibraryAccess) -> None:
        """Add the functions that were registered with another session, for a fork of it."""
        for provider in other._registered:
            self.add(provider)

    async def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return the result of the work; closing the session cancels it and raises ExecutorClosed."""
        self._refuse_closed()
        call = asyncio.get_running_loop().create_task(work())
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and caller is not None and not caller.cancelling():
                raise ExecutorClosed(CLOSED) from None
            raise
        finally:
            self._calls.discard(call)

    def refuse_calls(self) -> None:
        """Refuse every call from now on; `close` ends those under way."""
        self._closed = True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ExecutorClosed(CLOSED)

    async def close(self) -> None:
        """Cancel the host's tool calls and end the programs of the tools."""
        self._closed = True
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=_CLOSE_TIMEOUT)
        async with self._lock:  # A reading that is under way starts programs.
            if self._library is not None:
                await self._library.tools.close()


def unavailable_handlers() -> dict[str, Handler]:
    """Return handlers for an executor that starts before it has a session; each call fails."""

    async def refuse(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        raise ExecutorClosed(f"{name} cannot be answered: the session has not started yet")

    return dict.fromkeys(CALL_NAMES, refuse)


class CallHandlers:
    """Answers the calls of one session's code and records them as steps."""

    def __init__(self, library: LibraryAccess, steps: StepRecorder, executor: Executor) -> None:
        self._library = library
        self._steps = steps
        self._executor = executor
        self._sees_files: bool | None = None

    def handlers(self) -> dict[str, Handler]:
        """Return a handler for each of CALL_NAMES."""
        answers: list[Handler] = [self.call_tool] * 2 + [self.call_workflow] * 2 + [self.call_artifact, self.call_deps]
        return dict(zip(CALL_NAMES, answers, strict=True))

    def code_waits_for_caller(self) -> bool:
        """Return whether the session's code is waiting for a handler that runs in the current task."""
        call = current_call.get()
        return call is not None and call.active and call.executor is self._executor

    async def call_tool(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        tools = (await self._library.get()).tools
        if await tools.is_query(name):
            return await tools.handle(name, args, kwargs)
        call = current_call.get()
        write = call.write if call is not None else None
        with self._steps.step("tool", name.removeprefix("tools."), self._steps.running) as step:
            return note_sizes(step, [args, kwargs], await tools.handle(name, args, kwargs, on_output=write))

    async def call_workflow(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Answer one of the two calls that the worker makes for a workflow: at its start and at its end."""
        value = await (await self._library.get()).workflows.handle(name, args, kwargs)
        verb = name.rpartition(".")[2]
        if verb == "begin":
            self._steps.start_workflow(str(args[0]))
        elif verb == "ended":
            self._steps.end_workflow(str(args[0]), kwargs.get("error"))
        return value

    async def call_artifact(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        artifacts = (await self._library.get()).artifacts
        if self._sees_files is None:
            capabilities = await asyncio.to_thread(self._executor.supported_capabilities)
            # An executor without any capability does not report them.
            self._sees_files = bool(capabilities) and "filesystem_isolation" not in capabilities
        return await artifacts.handle(name, args, kwargs, sees_files=self._sees_files)

    async def call_deps(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        deps = (await self._library.get()).deps
        verb = name.rpartition(".")[2]
        if verb not in ("add", "remove", "sync"):
            return await deps.handle(name, args, kwargs)
        what = str(args[0]) if args else "requirements.txt"
        kind: Kind = "uninstall" if verb == "remove" else "install"
        return await self._steps.install(kind, what, deps.handle(name, args, kwargs), self._steps.running)
