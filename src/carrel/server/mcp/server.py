"""An MCP server whose tools are a session's code, commands and library; served on standard input and output."""

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
from carrel.guest.worker.namespaces import calls_of, details_of, summary_line
from carrel.library.prompt import artifact_line, workflow_line
from carrel.server.mcp.results import (
    MAX_TEXT,
    cut_text,
    fit_result,
    image_type,
    list_result,
    readable_text,
    run_result,
    tool_result,
)
from carrel.session import MAX_CHECKPOINTS, Checkpoint, Session
from carrel.text import escape_surrogates
from carrel.version import __version__

_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_NOTIFY_EVERY = 0.5
"""Seconds between two notifications while code runs."""
_TEXT_ONLY_CLIENTS = frozenset({"claude-code"})
"""Clients that hide text and pictures from their model if a result has structured content, so they get none."""
_MAX_INSTRUCTIONS = 8_000
"""Characters of the description that the client's model gets at the start."""

Code = Annotated[str, Field(description="Python code; the value of its last expression is returned")]
Seconds = Annotated[float | None, Field(description="Maximum seconds; default: the session's limit", gt=0)]
Query = Annotated[str, Field(description="What it should do, in your own words")]
Limit = Annotated[int, Field(description="Maximum number of results", ge=1, le=100)]
WorkflowName = Annotated[str, Field(description="The workflow's name")]
ArtifactName = Annotated[str, Field(description="The artifact's name, which may contain folders: reports/may.json")]
Package = Annotated[str, Field(description="A requirement: pandas, or pandas>=2")]


class SessionTools:
    """The tools of the server; each calls one method of the session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def run_code(self, code: Code, ctx: Context, timeout: Seconds = None) -> CallToolResult:
        """Run Python in the session; its variables persist between calls. The code can use `tools`, `workflows`,
        `artifacts` and `deps`; top-level await works."""
        progress = _ProgressReporter(ctx)
        result = ExecutionResult()
        async with contextlib.aclosing(self._session.stream(code, timeout)) as pieces:
            reporting = asyncio.create_task(progress.report_regularly())
            try:
                async for piece in pieces:
                    if isinstance(piece, Output):
                        progress.add(piece.text)
                    else:
                        result = piece
            finally:
                reporting.cancel()
        return run_result(result)

    async def execute_command(
        self,
        command: Annotated[str, Field(description="A shell command")],
        timeout: Annotated[float, Field(description="Maximum seconds", gt=0)] = 300.0,
        cwd: Annotated[str | None, Field(description="The folder to run it in; default: the workspace")] = None,
    ) -> CallToolResult:
        """Run a shell command in the session's workspace."""
        result = await self._session.execute_command(command, timeout=timeout, cwd=cwd)
        stdout, stderr = cut_text(result.stdout), cut_text(result.stderr)
        data = {
            "stdout": stdout,
            "stderr": stderr,
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
        }
        output = [text for text in (stdout, stderr) if text]
        ending = "(timed out)" if result.timed_out else f"(exit code {result.exit_code})"
        text = "\n".join(output if result.success and output else [*output, ending])
        return tool_result([TextContent(type="text", text=text)], data, is_error=not result.success)

    async def fork(
        self, name: Annotated[str, Field(description="A name for it, such as before-refactoring", max_length=200)] = ""
    ) -> CallToolResult:
        """Keep a live copy of the session, its variables and files, as it is now; rewind returns to it. Use it before
        something that may go wrong."""
        point = await self._session.checkpoint(name)
        text = f"saved as {point.label or point.id}"
        points = self._session.checkpoints()
        if len(points) == MAX_CHECKPOINTS:
            # Removed now and not before the next fork: a refused fork must not remove anything.
            await self._session.drop_checkpoint(points[0])
            oldest = points[0].label or points[0].id
            text += f"; the oldest one, {oldest}, was removed: there are at most {MAX_CHECKPOINTS - 1}"
        return tool_result([TextContent(type="text", text=text)], self._data_of(point))

    async def rewind(
        self, to: Annotated[str | None, Field(description="The name of the fork; default: the newest")] = None
    ) -> CallToolResult:
        """Restore the variables and files as they were when fork was called; running code and commands are stopped.
        Workflows, artifacts and packages are not changed. The same fork can be used again."""
        points = self._session.checkpoints()
        if not points:
            raise ForkRefused("there is no fork to return to: fork was not called yet")
        point = await self._session.rewind(to or points[-1])
        text = f"variables and files are as they were at {point.label or point.id}"
        return tool_result([TextContent(type="text", text=text)], self._data_of(point))

    def _data_of(self, point: Checkpoint) -> dict[str, Any]:
        names = [each.label or each.id for each in self._session.checkpoints()]
        return {"fork": point.label or point.id, "id": point.id, "forks": names}

    async def list_tools(self) -> CallToolResult:
        """List what code can call as tools.NAME(...), one line each; search_tools returns more about them."""
        tools = await self._session.list_tools()
        # The signatures contain the parameters; with hundreds of tools, their descriptions would be too long.
        brief = [{**_brief(tool), "recipes": [_brief(recipe) for recipe in tool["recipes"]]} for tool in tools]
        return list_result((summary_line(call) for tool in tools for call in calls_of(tool)), brief, "(no tools)")

    async def search_tools(self, query: Query, limit: Limit = 10) -> CallToolResult:
        """Return the best matching tools, with the descriptions of their parameters."""
        tools = await self._session.search_tools(query, limit)
        return list_result(
            (f"{details_of(call)}\n" for tool in tools for call in calls_of(tool)), tools, "(no tool matches)"
        )

    async def list_workflows(self) -> CallToolResult:
        """List the saved workflows, with their parameters."""
        workflows = await self._session.list_workflows()
        return list_result(map(workflow_line, workflows), workflows, "(no workflows)")

    async def search_workflows(self, query: Query, limit: Limit = 5) -> CallToolResult:
        """Return the best matching saved workflows."""
        workflows = await self._session.search_workflows(query, limit)
        return list_result(map(workflow_line, workflows), workflows, "(no workflow matches)")

    async def get_workflow(self, name: WorkflowName) -> dict[str, Any]:
        """Return a workflow with its source."""
        found = await self._session.get_workflow(name)
        if found is None:
            raise WorkflowNotFoundError(f"there is no workflow {name}; list_workflows shows what there is")
        return found

    async def create_workflow(
        self,
        name: Annotated[str, Field(description="A Python identifier; code calls it as workflows.NAME(...)")],
        source: Annotated[str, Field(description="Python with a function run(...), or async def run(...)")],
        description: Annotated[str, Field(description="What it does; used to find it")] = "",
    ) -> dict[str, Any]:
        """Save working Python under a name; an existing workflow is replaced and stays in its history."""
        return await self._session.add_workflow(name, source, description)

    async def delete_workflow(self, name: WorkflowName) -> dict[str, Any]:
        """Remove a workflow; its history is kept."""
        return {"removed": await self._session.remove_workflow(name)}

    async def list_artifacts(self) -> CallToolResult:
        """List the saved artifacts."""
        artifacts = await self._session.list_artifacts()
        return list_result(map(artifact_line, artifacts), artifacts, "(no artifacts)")

    async def save_artifact(
        self,
        name: ArtifactName,
        data: Annotated[Any, Field(description="Text or JSON data; with encoding base64, the bytes as base64")],
        description: Annotated[str, Field(description="What it is")] = "",
        metadata: Annotated[dict[str, Any] | None, Field(description="Further information about it")] = None,
        encoding: Annotated[str | None, Field(description="base64 when data is bytes", pattern="^base64$")] = None,
    ) -> dict[str, Any]:
        """Save data under a name, for this session and later ones."""
        if encoding == "base64":
            try:
                data = base64.b64decode(str(data), validate=True)
            except ValueError:
                raise ValueError(f"the data of {name} is not valid base64; nothing was saved") from None
        return await self._session.save_artifact(name, data, description, metadata)

    async def load_artifact(self, name: ArtifactName) -> CallToolResult:
        """Return what was saved under a name: text and JSON data as they are, images as images, bytes as base64."""
        data = await self._session.load_artifact(name)
        if not isinstance(data, bytes):
            text = cut_text(data if isinstance(data, str) else readable_text(data))
            return tool_result([TextContent(type="text", text=text)], {"data": values.encode(data)})
        encoded = base64.b64encode(data).decode()
        kind = image_type(data)
        if kind is not None:
            return tool_result([ImageContent(type="image", data=encoded, mime_type=kind)], None)
        whole = len(encoded) <= MAX_TEXT
        text = encoded if whole else f"({len(data)} bytes; in code, artifacts.load({name!r}) has them)"
        return tool_result([TextContent(type="text", text=text)], {"data": encoded, "encoding": "base64"})

    async def list_deps(self) -> list[str]:
        """List the packages that the session's Python has in addition to the standard library."""
        return await self._session.list_deps()

    async def add_dep(self, package: Package) -> dict[str, Any]:
        """Install a package for the session's Python; it can be imported immediately."""
        report = await self._session.add_dep(package)
        if report["failed"]:
            raise DependencyError(report["message"] or f"{package} could not be installed")
        return report

    async def remove_dep(self, package: Package) -> dict[str, Any]:
        """Uninstall a package and remove it from the list."""
        return await self._session.remove_dep(package)


class SessionServer(MCPServer[Any]):
    """Refuses unknown arguments, reports invalid ones on one line, and limits the size of results."""

    max_result = 32 * 1024 * 1024
    """Bytes of one result."""

    async def list_tools(self) -> list[Tool]:
        tools = await super().list_tools()
        for tool in tools:
            tool.input_schema["additionalProperties"] = False
        return tools

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        tool = next((tool for tool in await super().list_tools() if tool.name == name), None)
        if tool is not None:
            parameters = list(tool.input_schema.get("properties", {}))
            unknown = [argument for argument in arguments if argument not in parameters]
            missing = [parameter for parameter in tool.input_schema.get("required", ()) if parameter not in arguments]
            if unknown or missing:
                faults = [f"it has no argument {escape_surrogates(argument[:100])}" for argument in unknown]
                faults += [f"{parameter} is missing" for parameter in missing]
                raise ToolError(f"{name}: {'; '.join(faults)}. Its arguments: {', '.join(parameters) or 'none'}")
        try:
            result = await super().call_tool(name, arguments, context)
        except ToolError as problem:
            if isinstance(problem.__cause__, ValidationError):
                raise ToolError(escape_surrogates(f"{name}: {_faults(problem.__cause__)}")) from problem.__cause__
            raise
        if not isinstance(result, CallToolResult):
            return result
        has_schema = tool is not None and tool.output_schema is not None
        if _client_name(context) in _TEXT_ONLY_CLIENTS and not has_schema:
            # A tool with an output schema has to return the data, which its text repeats.
            result.structured_content = None
        return fit_result(result, self.max_result, keep_data=has_schema)


def _brief(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "parameters"}


def _faults(problem: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        for fault in problem.errors(include_url=False, include_input=False, include_context=False)
    )


def _client_name(context: Context[Any, Any] | None) -> str:
    params = context.session.client_params if context is not None else None
    return params.client_info.name if params is not None else ""


async def make_server(session: Session, *, runtime_deps: bool = True) -> SessionServer:
    """Return a server with the tools for one session, whose description the client's model gets at the start."""
    about = escape_surrogates(await session.describe(limit=_MAX_INSTRUCTIONS))
    forks = await asyncio.to_thread(session.supports, "rewind")
    server = SessionServer(
        "carrel", title="carrel", instructions=about or None, version=__version__, log_level="WARNING"
    )
    tools = SessionTools(session)
    reading: list[Callable[..., Awaitable[Any]]] = [
        tools.list_tools,
        tools.search_tools,
        tools.list_workflows,
        tools.search_workflows,
        tools.get_workflow,
        tools.list_artifacts,
        tools.load_artifact,
        tools.list_deps,
    ]
    writing: list[Callable[..., Awaitable[Any]]] = [
        tools.run_code,
        tools.execute_command,
        *([tools.fork, tools.rewind] if forks else []),
        tools.create_workflow,
        tools.delete_workflow,
        tools.save_artifact,
        *([tools.add_dep, tools.remove_dep] if runtime_deps else []),
    ]
    for tool in reading:
        server.add_tool(_with_tool_errors(tool), description=_description(tool), annotations=_READS)
    for tool in writing:
        server.add_tool(_with_tool_errors(tool), description=_description(tool))
    return server


def _with_tool_errors(tool: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return the tool with the caller's mistakes as `ToolError`, whose message the model can read."""

    @functools.wraps(tool)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await tool(*args, **kwargs)
        except (CarrelError, OSError, ValueError, LookupError, TypeError) as problem:
            # A KeyError shows the repr of its message.
            plain = isinstance(problem, KeyError) and not isinstance(problem, CarrelError) and problem.args
            text = str(problem.args[0]) if plain else str(problem)
            raise ToolError(escape_surrogates(cut_text(text)) or type(problem).__name__) from problem

    return call


async def serve_stdio(session: Session, *, runtime_deps: bool = True) -> None:
    """Serve one client on standard input and output until it disconnects."""
    await (await make_server(session, runtime_deps=runtime_deps)).run_stdio_async()


class _ProgressReporter:
    """Notifies the client while code runs, with the last line that the code printed."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._last_line = ""
        self._began = time.monotonic()

    def add(self, text: str) -> None:
        lines = text.strip().splitlines()
        if lines:
            self._last_line = escape_surrogates(lines[-1][-200:])

    async def report_regularly(self) -> None:
        while True:
            await asyncio.sleep(_NOTIFY_EVERY)
            seconds = time.monotonic() - self._began
            await self._ctx.report_progress(seconds, message=self._last_line or f"running for {seconds:.0f} s")


def _description(tool: Callable[..., Awaitable[Any]]) -> str:
    return " ".join((tool.__doc__ or "").split())
