"""The library of a session: the methods of Session for tools, workflows, artifacts and packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from carrel.session.call_handlers import LibraryAccess, library_module
from carrel.tracing import StepRecorder, note_sizes


class SessionLibraryMethods:
    """What a program does with the library; running code does the same through `CallHandlers`."""

    _library: LibraryAccess
    _steps: StepRecorder

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return a dict for each tool: name, description, tags, recipes and more."""
        return await (await self._library.get()).tools.list()

    async def search_tools(self, query: str, limit: int = 10) -> list[dict[str, Any]]:
        """Return the tools that match the query best, in the form of `list_tools`."""
        return await (await self._library.get()).tools.search(query, limit)

    async def wait_for_tools(self) -> None:
        """Wait until every tool provider has started or failed; the other methods wait 2 seconds at most."""
        await (await self._library.get()).tools.ready()

    async def reload_tools(self) -> None:
        """Read `tools/*.yaml` again; for a wrong file raises `ConfigurationError`, and all tools stay as they were."""
        await (await self._library.get()).tools.reload()

    async def get_tool(self, name: str) -> dict[str, Any] | None:
        """Return one tool in the form of `list_tools`, with the JSON `schema` of its arguments; None if missing."""
        return await (await self._library.get()).tools.get(name)

    async def call_tool(self, name: str, /, **arguments: Any) -> Any:
        """Call a tool from the host: `await session.call_tool("curl.get", url=…)`."""
        tools = (await self._library.get()).tools

        async def call() -> Any:
            with self._steps.step("tool", name) as step:
                return note_sizes(step, arguments, await tools.call(name, arguments))

        return await self._library.run(call)

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
        """Let code call a function of this program as `tools.NAME(...)`; it runs on the host, outside the sandbox."""
        self._library.register(function, name, description, tags, approval, timeout)

    async def describe(self, task: str | None = None, limit: int = 12_000) -> str:
        """Return text for a model's prompt: what the four namespaces hold, in about `limit` characters.

        What matches the `task` comes first."""
        library = await self._library.get()
        text: str = await library_module().library_prompt(
            library.tools, library.workflows, library.artifacts, library.deps, task, limit
        )
        return text

    async def list_workflows(self) -> list[dict[str, Any]]:
        """Return a dict for each workflow: name, description and parameters, without the source."""
        return await (await self._library.get()).workflows.list()

    async def search_workflows(self, query: str, limit: int = 5) -> list[dict[str, Any]]:
        """Return the workflows that match the query best, in the form of `list_workflows`."""
        return await (await self._library.get()).workflows.search(query, limit)

    async def get_workflow(self, name: str) -> dict[str, Any] | None:
        """Return one workflow with its source; None if there is none with this name."""
        return await (await self._library.get()).workflows.get(name)

    async def add_workflow(self, name: str, source: str, description: str = "") -> dict[str, Any]:
        """Save Python source that defines a function `run`; ValueError or SyntaxError if it is not valid."""
        return await (await self._library.get()).workflows.add(name, source, description)

    async def remove_workflow(self, name: str) -> bool:
        """Remove a workflow; False if there was none with this name."""
        return await (await self._library.get()).workflows.remove(name)

    async def workflow_history(self, name: str) -> list[dict[str, Any]]:
        """Return every saved version of a workflow, oldest first."""
        return await (await self._library.get()).workflows.history(name)

    list_skills, search_skills, get_skill = list_workflows, search_workflows, get_workflow
    add_skill, remove_skill = add_workflow, remove_workflow

    async def list_artifacts(self) -> list[dict[str, Any]]:
        """Return a dict for each artifact: name, path, description, metadata and created_at."""
        return await (await self._library.get()).artifacts.list()

    async def save_artifact(
        self, name: str, data: Any, description: str = "", metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Save str, bytes or JSON data under a name and return its dict."""
        return await (await self._library.get()).artifacts.save(name, data, description, metadata)

    async def load_artifact(self, name: str) -> Any:
        """Return the data as it was saved; ArtifactNotFoundError if there is none."""
        return await (await self._library.get()).artifacts.load(name)

    async def delete_artifact(self, name: str) -> None:
        """Remove an artifact; no effect if there is none."""
        await (await self._library.get()).artifacts.delete(name)

    async def list_deps(self) -> list[str]:
        """Return the requirements of this storage."""
        return await (await self._library.get()).deps.list()

    async def add_dep(self, package: str) -> dict[str, Any]:
        """Install a package for the session's Python and add it to the requirements; it can be imported at once."""
        deps = (await self._library.get()).deps
        return await self._steps.install("install", package, deps.add(package))

    async def remove_dep(self, package: str) -> dict[str, Any]:
        """Uninstall a package and remove it from the requirements."""
        deps = (await self._library.get()).deps
        return await self._steps.install("uninstall", package, deps.remove(package))

    async def sync_deps(self) -> dict[str, Any]:
        """Install the requirements that are missing."""
        deps = (await self._library.get()).deps
        return await self._steps.install("install", "requirements.txt", deps.sync())
