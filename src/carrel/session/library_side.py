"""A session's library from the host's side: what a program does without any code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

from carrel.library.describing import described
from carrel.library.tools.python import register
from carrel.library.tools.tool import ToolProvider
from carrel.session.seam import Library
from carrel.session.steps import Steps, sized


class LibrarySide(ABC):
    """Tools, workflows, artifacts and dependencies of a session; each is read from the library at hand."""

    _library: Library | None
    _registered: list[ToolProvider]
    _steps: Steps

    @abstractmethod
    def _open(self) -> None:
        """ExecutorClosed where the session is closed."""

    @abstractmethod
    async def _have(self) -> Library:
        """The library, read on first use."""

    @abstractmethod
    async def _while_open(self, doing: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What it gives; ExecutorClosed where the session is closed before, and it is ended then."""

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

        async def called() -> Any:
            with self._steps.step("tool", name) as step:
                return sized(step, arguments, await tools.call(name, arguments))

        return await self._while_open(called)

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
        self._open()
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
        return await self._steps.install("install", package, deps.add(package))

    async def remove_dep(self, package: str) -> dict[str, Any]:
        deps = (await self._have()).deps
        return await self._steps.install("uninstall", package, deps.remove(package))

    async def sync_deps(self) -> dict[str, Any]:
        """Install what the list names and is not there."""
        deps = (await self._have()).deps
        return await self._steps.install("install", "requirements.txt", deps.sync())
