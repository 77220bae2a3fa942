"""What the session's code asks for: tools, workflows, artifacts and packages, answered on the host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from carrel.execution.executor import Executor, Handler, current_call
from carrel.session.seam import Library
from carrel.session.steps import Steps, sized
from carrel.trace import Kind

WOULD_WAIT = (
    "this was asked by a tool that the session's code is waiting for, and would wait for that code in turn; "
    "do it before or after the run, or in the code itself (a tool with `runs: sandbox` runs its program beside it)"
)


class Inside:
    """Answers the code of one session."""

    def __init__(self, library: Callable[[], Awaitable[Library]], steps: Steps, executor: Executor) -> None:
        self._library = library
        self._steps = steps
        self._executor = executor
        self._sees_files: bool | None = None

    def handlers(self) -> dict[str, Handler]:
        """By the names that code finds."""
        return {
            "tools": self._tool,
            "tools._names": self._tool,
            "workflows": self._workflow,
            "skills": self._workflow,
            "artifacts": self._artifact,
            "deps": self._deps,
        }

    def is_waiting(self) -> bool:
        """Whether the code of this session waits for an answer of the current task."""
        call = current_call.get()
        return call is not None and call.active and call.executor is self._executor

    async def _tool(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        tools = (await self._library()).tools
        if await tools.is_question(name):
            return await tools.handle(name, args, kwargs)
        call = current_call.get()
        write = call.write if call is not None else None
        with self._steps.step("tool", name.removeprefix("tools."), self._steps.running) as step:
            return sized(step, [args, kwargs], await tools.handle(name, args, kwargs, stream=write))

    async def _workflow(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A call of a workflow is two of these, when it begins and when it has ended."""
        value = await (await self._library()).workflows.handle(name, args, kwargs)
        verb = name.rpartition(".")[2]
        if verb == "begin":
            self._steps.workflow_began(str(args[0]))
        elif verb == "ended":
            self._steps.workflow_ended(str(args[0]), kwargs.get("error"))
        return value

    async def _artifact(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        artifacts = (await self._library()).artifacts
        if self._sees_files is None:
            found = await asyncio.to_thread(self._executor.supported_capabilities)
            # None at all are those of an executor that cannot tell.
            self._sees_files = bool(found) and "filesystem_isolation" not in found
        return await artifacts.handle(name, args, kwargs, sees_files=self._sees_files)

    async def _deps(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        deps = (await self._library()).deps
        verb = name.rpartition(".")[2]
        if verb not in ("add", "remove", "sync"):
            return await deps.handle(name, args, kwargs)
        what = str(args[0]) if args else "requirements.txt"
        kind: Kind = "uninstall" if verb == "remove" else "install"
        return await self._steps.install(kind, what, deps.handle(name, args, kwargs), self._steps.running)
