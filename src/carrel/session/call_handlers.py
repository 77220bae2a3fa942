"""Answers the calls that running code makes: tools, workflows, artifacts and packages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from carrel.errors import ExecutorClosed
from carrel.execution.executor import Executor, Handler, current_call
from carrel.tracing import Kind, StepRecorder, note_sizes

if TYPE_CHECKING:
    from carrel.session.library import SessionLibrary

CALL_NAMES = ("tools", "tools._names", "workflows", "skills", "artifacts", "deps")
"""The names under which code makes calls."""

WOULD_WAIT = (
    "a tool that the session's code is waiting for made this call, which would wait for that code in turn; "
    "make it before or after the run, or in the code itself (a tool with `runs: sandbox` runs its program beside it)"
)


def unavailable_handlers() -> dict[str, Handler]:
    """Return handlers for an executor that starts before it has a session; each call fails."""

    async def refuse(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        raise ExecutorClosed(f"{name} cannot be answered: the session has not started yet")

    return dict.fromkeys(CALL_NAMES, refuse)


class CallHandlers:
    """Answers the calls of one session's code and records them as steps."""

    def __init__(
        self, get_library: Callable[[], Awaitable[SessionLibrary]], steps: StepRecorder, executor: Executor
    ) -> None:
        self._get_library = get_library
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
        tools = (await self._get_library()).tools
        if await tools.is_query(name):
            return await tools.handle(name, args, kwargs)
        call = current_call.get()
        write = call.write if call is not None else None
        with self._steps.step("tool", name.removeprefix("tools."), self._steps.running) as step:
            return note_sizes(step, [args, kwargs], await tools.handle(name, args, kwargs, on_output=write))

    async def call_workflow(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Answer one of the two calls that the worker makes for a workflow: at its start and at its end."""
        value = await (await self._get_library()).workflows.handle(name, args, kwargs)
        verb = name.rpartition(".")[2]
        if verb == "begin":
            self._steps.start_workflow(str(args[0]))
        elif verb == "ended":
            self._steps.end_workflow(str(args[0]), kwargs.get("error"))
        return value

    async def call_artifact(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        artifacts = (await self._get_library()).artifacts
        if self._sees_files is None:
            capabilities = await asyncio.to_thread(self._executor.supported_capabilities)
            # An executor without any capability does not report them.
            self._sees_files = bool(capabilities) and "filesystem_isolation" not in capabilities
        return await artifacts.handle(name, args, kwargs, sees_files=self._sees_files)

    async def call_deps(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        deps = (await self._get_library()).deps
        verb = name.rpartition(".")[2]
        if verb not in ("add", "remove", "sync"):
            return await deps.handle(name, args, kwargs)
        what = str(args[0]) if args else "requirements.txt"
        kind: Kind = "uninstall" if verb == "remove" else "install"
        return await self._steps.install(kind, what, deps.handle(name, args, kwargs), self._steps.running)
