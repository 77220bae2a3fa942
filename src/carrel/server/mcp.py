"""The MCP front: a session's code, commands and library as tools of a Model Context Protocol server."""

import asyncio
import base64
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import (
    CallToolResult,
    ImageContent,
    InputRequiredResult,
    TextContent,
    Tool,
    ToolAnnotations,
)
from pydantic import Field, ValidationError

from carrel.errors import CarrelError, DependencyError, ForkRefused, WorkflowNotFoundError
from carrel.execution.executor import ExecutionResult, Output
from carrel.guest.worker import values
from carrel.guest.worker.namespaces import calls_of, in_a_line, in_full
from carrel.library.describing import artifact_line, workflow_line
from carrel.server.mcp_answers import LONGEST, answer_of, answered, as_text, cut, fitted, image_kind, listed, written
from carrel.server.mcp_over_http import LARGEST_ANSWER, serve_over_http
from carrel.session import MAX_CHECKPOINTS, Checkpoint, Session
from carrel.version import __version__

_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_TELL_EVERY = 0.5
"""Seconds between two notifications while code runs."""
_SHOW_DATA_ALONE = frozenset({"claude-code"})
"""Clients that give their model the structured content in place of the text and the pictures, where there is any."""
_DESCRIBED = 8_000

Code = Annotated[str, Field(description="Python code; the value of its last expression comes back")]
Seconds = Annotated[float | None, Field(description="Seconds it may take; left out, the session's own limit", gt=0)]
Query = Annotated[str, Field(description="What it should do, in your own words")]
Limit = Annotated[int, Field(description="At most this many", ge=1, le=100)]
WorkflowName = Annotated[str, Field(description="The workflow's name")]
ArtifactName = Annotated[str, Field(description="The artifact's name, with folders if wanted: reports/may.json")]
Package = Annotated[str, Field(description="A requirement: pandas, or pandas>=2")]


class Front:
    """The tools of the server; each is one call of the session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def run_code(self, code: Code, ctx: Context, timeout: Seconds = None) -> CallToolResult:
        """Run Python in the session and keep its variables for the next call. `tools`, `workflows`, `artifacts` and
        `deps` are there to be used; top-level await works."""
        told = _Told(ctx)
        result = ExecutionResult()
        async with contextlib.aclosing(self._session.stream(code, timeout)) as pieces:
            telling = asyncio.create_task(told.go_on())
            try:
                async for piece in pieces:
                    if isinstance(piece, Output):
                        told.add(piece.text)
                    else:
                        result = piece
            finally:
                telling.cancel()
        return answer_of(result)

    async def execute_command(
        self,
        command: Annotated[str, Field(description="A command for the shell, run where the code runs")],
        timeout: Annotated[float, Field(description="Seconds it may take", gt=0)] = 300.0,
        cwd: Annotated[str | None, Field(description="The folder to run it in")] = None,
    ) -> CallToolResult:
        """Run a shell command in the session's workspace."""
        result = await self._session.execute_command(command, timeout=timeout, cwd=cwd)
        stdout, stderr = cut(result.stdout), cut(result.stderr)
        data = {
            "stdout": stdout,
            "stderr": stderr,
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
        }
        said = [text for text in (stdout, stderr) if text]
        ending = "(time was up)" if result.timed_out else f"(exit code {result.exit_code})"
        text = "\n".join(said if result.success and said else [*said, ending])
        return answered([TextContent(type="text", text=text)], data, is_error=not result.success)

    async def fork(
        self, name: Annotated[str, Field(description="What to call it: before-refactoring", max_length=200)] = ""
    ) -> CallToolResult:
        """Keep a live copy of the session as it is now, its variables and its files, and go on; rewind goes back to
        it. Do it before what may go wrong."""
        point = await self._session.checkpoint(name)
        text = f"kept as {point.label or point.id}"
        kept = self._session.checkpoints()
        if len(kept) == MAX_CHECKPOINTS:
            # Room for the next: one that is refused must not cost the oldest.
            await self._session.drop_checkpoint(kept[0])
            oldest = kept[0].label or kept[0].id
            text += f"; the oldest one, {oldest}, was removed: there are at most {MAX_CHECKPOINTS - 1}"
        return answered([TextContent(type="text", text=text)], self._kept(point))

    async def rewind(
        self, to: Annotated[str | None, Field(description="The name that fork gave; left out, the newest")] = None
    ) -> CallToolResult:
        """Go back to where fork was called: variables and files are as they were then, and what still runs is ended.
        Workflows, artifacts and packages stay as they are. It can be gone back to again."""
        kept = self._session.checkpoints()
        if not kept:
            raise ForkRefused("there is nothing to go back to: fork was not called yet")
        point = await self._session.rewind(to or kept[-1])
        text = f"variables and files are as they were at {point.label or point.id}"
        return answered([TextContent(type="text", text=text)], self._kept(point))

    def _kept(self, point: Checkpoint) -> dict[str, Any]:
        names = [each.label or each.id for each in self._session.checkpoints()]
        return {"fork": point.label or point.id, "id": point.id, "forks": names}

    async def list_tools(self) -> CallToolResult:
        """What code can call as tools.NAME(...), a line each; search_tools tells more."""
        tools = await self._session.list_tools()
        # What a call takes is in its signature: whole, hundreds of them would be a book.
        brief = [{**_brief(tool), "recipes": [_brief(recipe) for recipe in tool["recipes"]]} for tool in tools]
        return listed((in_a_line(call) for tool in tools for call in calls_of(tool)), brief, "(no tools)")

    async def search_tools(self, query: Query, limit: Limit = 10) -> CallToolResult:
        """The tools that fit best, with what their parameters mean."""
        tools = await self._session.search_tools(query, limit)
        return listed((f"{in_full(call)}\n" for tool in tools for call in calls_of(tool)), tools, "(no tool fits)")

    async def list_workflows(self) -> CallToolResult:
        """The saved workflows, with their parameters."""
        kept = await self._session.list_workflows()
        return listed(map(workflow_line, kept), kept, "(no workflows)")

    async def search_workflows(self, query: Query, limit: Limit = 5) -> CallToolResult:
        """The saved workflows that fit best."""
        kept = await self._session.search_workflows(query, limit)
        return listed(map(workflow_line, kept), kept, "(no workflow fits)")

    async def get_workflow(self, name: WorkflowName) -> dict[str, Any]:
        """One workflow, with its source."""
        found = await self._session.get_workflow(name)
        if found is None:
            raise WorkflowNotFoundError(f"there is no workflow {name}; list_workflows shows what there is")
        return found

    async def create_workflow(
        self,
        name: Annotated[str, Field(description="A Python identifier; code calls it as workflows.NAME(...)")],
        source: Annotated[str, Field(description="Python with a function run(...), or async def run(...)")],
        description: Annotated[str, Field(description="What it does, for finding it again")] = "",
    ) -> dict[str, Any]:
        """Save Python that worked under a name; saving one that is there replaces it and keeps its history."""
        return await self._session.add_workflow(name, source, description)

    async def delete_workflow(self, name: WorkflowName) -> dict[str, Any]:
        """Remove a workflow; its history stays."""
        return {"removed": await self._session.remove_workflow(name)}

    async def list_artifacts(self) -> CallToolResult:
        """What was saved to keep."""
        kept = await self._session.list_artifacts()
        return listed(map(artifact_line, kept), kept, "(no artifacts)")

    async def save_artifact(
        self,
        name: ArtifactName,
        data: Annotated[Any, Field(description="Text or JSON data; with encoding base64, the bytes as base64")],
        description: Annotated[str, Field(description="What it is")] = "",
        metadata: Annotated[dict[str, Any] | None, Field(description="Anything else worth knowing of it")] = None,
        encoding: Annotated[str | None, Field(description="base64 when data is bytes", pattern="^base64$")] = None,
    ) -> dict[str, Any]:
        """Keep data under a name, for this session and later ones."""
        if encoding == "base64":
            try:
                data = base64.b64decode(str(data), validate=True)
            except ValueError:
                raise ValueError(f"the data of {name} is no base64; nothing was saved") from None
        return await self._session.save_artifact(name, data, description, metadata)

    async def load_artifact(self, name: ArtifactName) -> CallToolResult:
        """What was saved under a name: text and JSON data as they are, an image as an image, bytes as base64."""
        data = await self._session.load_artifact(name)
        if not isinstance(data, bytes):
            text = cut(data if isinstance(data, str) else as_text(data))
            return answered([TextContent(type="text", text=text)], {"data": values.encode(data)})
        encoded = base64.b64encode(data).decode()
        kind = image_kind(data)
        if kind is not None:
            return answered([ImageContent(type="image", data=encoded, mime_type=kind)], None)
        whole = len(encoded) <= LONGEST
        text = encoded if whole else f"({len(data)} bytes; in code, artifacts.load({name!r}) has them)"
        return answered([TextContent(type="text", text=text)], {"data": encoded, "encoding": "base64"})

    async def list_deps(self) -> list[str]:
        """The packages that the session's Python is set up with."""
        return await self._session.list_deps()

    async def add_dep(self, package: Package) -> dict[str, Any]:
        """Install a package for the session's Python; it can be imported at once."""
        report = await self._session.add_dep(package)
        if report["failed"]:
            raise DependencyError(report["message"] or f"{package} could not be installed")
        return report

    async def remove_dep(self, package: Package) -> dict[str, Any]:
        """Uninstall a package and take it off the list."""
        return await self._session.remove_dep(package)


class _Server(MCPServer[Any]):
    """Takes only what a tool knows, says in a line what was wrong, and answers with what its clients can take."""

    largest = 32 * 1024 * 1024
    """Bytes of one answer."""

    async def list_tools(self) -> list[Tool]:
        told = await super().list_tools()
        for tool in told:
            tool.input_schema["additionalProperties"] = False
        return told

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        tool = next((tool for tool in await super().list_tools() if tool.name == name), None)
        if tool is not None:
            takes = list(tool.input_schema.get("properties", {}))
            unknown = [given for given in arguments if given not in takes]
            missing = [wanted for wanted in tool.input_schema.get("required", ()) if wanted not in arguments]
            if unknown or missing:
                faults = [f"it has no argument {written(given[:100])}" for given in unknown]
                faults += [f"{wanted} is missing" for wanted in missing]
                raise ToolError(f"{name}: {'; '.join(faults)}. It takes {', '.join(takes) or 'none'}")
        try:
            answer = await super().call_tool(name, arguments, context)
        except ToolError as problem:
            if isinstance(problem.__cause__, ValidationError):
                raise ToolError(written(f"{name}: {_misfits(problem.__cause__)}")) from problem.__cause__
            raise
        if not isinstance(answer, CallToolResult):
            return answer
        promised = tool is not None and tool.output_schema is not None
        if _client(context) in _SHOW_DATA_ALONE and not promised:
            # One that has promised data keeps it, which is its text as well.
            answer.structured_content = None
        return fitted(answer, self.largest, promised=promised)


def _brief(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "parameters"}


def _misfits(problem: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        for fault in problem.errors(include_url=False, include_input=False, include_context=False)
    )


def _client(context: Context[Any, Any] | None) -> str:
    told = context.session.client_params if context is not None else None
    return told.client_info.name if told is not None else ""


def mcp_server(session: Session, *, runtime_deps: bool = True, forks: bool = True, about: str = "") -> "_Server":
    """A server for one session. `about` is what the client's model is told of it."""
    front = Front(session)
    server = _Server("carrel", title="carrel", instructions=about or None, version=__version__, log_level="WARNING")
    reading: list[Callable[..., Awaitable[Any]]] = [
        front.list_tools,
        front.search_tools,
        front.list_workflows,
        front.search_workflows,
        front.get_workflow,
        front.list_artifacts,
        front.load_artifact,
        front.list_deps,
    ]
    writing: list[Callable[..., Awaitable[Any]]] = [
        front.run_code,
        front.execute_command,
        *([front.fork, front.rewind] if forks else []),
        front.create_workflow,
        front.delete_workflow,
        front.save_artifact,
        *([front.add_dep, front.remove_dep] if runtime_deps else []),
    ]
    for tool in reading:
        server.add_tool(_telling(tool), description=_prose(tool.__doc__), annotations=_READS)
    for tool in writing:
        server.add_tool(_telling(tool), description=_prose(tool.__doc__))
    return server


def _telling(tool: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The same tool; what it raises for a mistake of its caller is told to the model, which can mend it."""

    @functools.wraps(tool)
    async def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return await tool(*args, **kwargs)
        except (CarrelError, OSError, ValueError, LookupError, TypeError) as problem:
            # A KeyError shows the repr of its message.
            plain = isinstance(problem, KeyError) and not isinstance(problem, CarrelError) and problem.args
            text = str(problem.args[0]) if plain else str(problem)
            raise ToolError(written(cut(text)) or type(problem).__name__) from problem

    return told


async def serve(
    session: Session,
    *,
    runtime_deps: bool = True,
    http: tuple[str, int] | None = None,
    listening: Callable[[str], None] = lambda url: None,
) -> None:
    """Answer one client on standard input and output, until it is gone; or any number over HTTP, until a signal.

    `listening` is told the address then."""
    about = await session.describe(limit=_DESCRIBED)
    forks = await asyncio.to_thread(session.supports, "rewind")
    server = mcp_server(session, runtime_deps=runtime_deps, forks=forks, about=written(about))
    if http is None:
        await server.run_stdio_async()
    else:
        server.largest = LARGEST_ANSWER
        await serve_over_http(server, *http, listening=listening, ending=session.close)


class _Told:
    """What the client hears while code runs: that it does, and the last line it wrote."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._last = ""
        self._began = time.monotonic()

    def add(self, text: str) -> None:
        lines = text.strip().splitlines()
        if lines:
            self._last = written(lines[-1][-200:])

    async def go_on(self) -> None:
        while True:
            await asyncio.sleep(_TELL_EVERY)
            seconds = time.monotonic() - self._began
            await self._ctx.report_progress(seconds, message=self._last or f"running for {seconds:.0f} s")


def _prose(text: str | None) -> str:
    return " ".join((text or "").split())
