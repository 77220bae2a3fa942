"""Routes of what happens in a session: commands, code, variables and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from carrel.errors import ConfigurationError
from carrel.execution.executor import FileEntry
from carrel.server.dependencies import (
    EVENT_STREAM,
    MAX_WAIT,
    PROBLEMS,
    FilePathDep,
    JsonRoute,
    ManagerDep,
    MetricsDep,
    RequestIdDep,
    UserDep,
    WaitDep,
    WantsEventsDep,
    bearer,
    with_duration,
)
from carrel.server.event_stream import OutputQueue, command_stream, run_record, run_stream
from carrel.text import escape_surrogates, url_name
from carrel.wire.answers import (
    FileEntryRecord,
    FileWritten,
    FolderListing,
    Interaction,
    InterruptedSession,
    ReplaceResult,
    RunResult,
    VariableList,
    VariableRecord,
    WorkspaceDiff,
)
from carrel.wire.requests import ReplaceText, RunCode, RunCommand

router = APIRouter(dependencies=[Depends(bearer)], responses=PROBLEMS, route_class=JsonRoute)
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {EVENT_STREAM: {}}}}
_BINARY = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
_POINT = "An entry number, a checkpoint id, a label, `start` or `now`."
AtDep = Annotated[str | None, Query(description=_POINT, max_length=500)]
_OLD_CLIENTS = ("0.1.", "0.2.", "0.3.")
"""Versions of the codeset client that expect a command's output in the answer to it."""


# --- commands -------------------------------------------------------------------------------------------------------


@router.post("/sessions/{session_id}/exec", tags=["commands"], response_model=Interaction, responses=_EVENTS)
async def run_command(
    http_request: Request,
    manager: ManagerDep,
    user: UserDep,
    metrics: MetricsDep,
    wait: WaitDep,
    request_id: RequestIdDep,
    wants_events: WantsEventsDep,
    session_id: str,
    request: RunCommand,
    stream: Annotated[bool, Query(description="Events: its output as it is written, and `done` at its end")] = False,
) -> Any:
    """Begin a command. With `stream`, or `Accept: text/event-stream`, the answer consists of events."""
    if stream or wants_events:
        output = OutputQueue()
        interaction = await manager.start_command(user, session_id, request, request_id, output.put)
        metrics.commands.inc()
        return command_stream(manager, user, interaction, output)
    interaction = await manager.start_command(user, session_id, request, request_id)
    metrics.commands.inc()
    if http_request.headers.get("x-stainless-package-version", "").startswith(_OLD_CLIENTS):
        wait = request.command_timeout + MAX_WAIT
    if wait is None:
        return interaction
    return await manager.wait(user, session_id, Interaction, interaction.interaction_id, wait)


@router.get("/sessions/{session_id}/interactions/{interaction_id}", tags=["commands"])
async def get_command(
    manager: ManagerDep, user: UserDep, wait: WaitDep, session_id: str, interaction_id: str
) -> Interaction:
    """A command and its result; while it runs, the answer waits for up to a second."""
    return await manager.wait(user, session_id, Interaction, interaction_id, wait)


@router.delete("/sessions/{session_id}/interactions/{interaction_id}", tags=["commands"])
async def stop_command(manager: ManagerDep, user: UserDep, session_id: str, interaction_id: str) -> Interaction:
    """Stop a command with all its processes; one that has ended stays as it is."""
    return await manager.cancel(user, session_id, Interaction, interaction_id)


# --- code -----------------------------------------------------------------------------------------------------------


@router.post("/sessions/{session_id}/run", tags=["code"], response_model=RunResult, responses=_EVENTS)
async def run_code(
    manager: ManagerDep,
    user: UserDep,
    metrics: MetricsDep,
    wants_events: WantsEventsDep,
    session_id: str,
    request: RunCode,
) -> Any:
    """Run Python. With `Accept: text/event-stream`, its output is sent as it is written, and `result` at the end."""
    hosted = await manager.hosted(user, session_id)
    session = hosted.workspace().session
    metrics.runs.inc()
    if wants_events:
        return run_stream(hosted, request)
    result = await session.run(request.code, request.timeout)
    await hosted.note_run(request.code, result)
    return run_record(result)


@router.post("/sessions/{session_id}/interrupt", tags=["code"])
async def interrupt(manager: ManagerDep, user: UserDep, session_id: str) -> InterruptedSession:
    """Stop the running code as Ctrl-C does; its variables survive."""
    hosted = await manager.hosted(user, session_id)
    interrupted = await hosted.executor().interrupt()
    return InterruptedSession(**with_duration(hosted.record).model_dump(), interrupted=interrupted)


@router.get("/sessions/{session_id}/variables", tags=["code"])
async def get_variables(manager: ManagerDep, user: UserDep, session_id: str, at: AtDep = None) -> VariableList:
    """The variables of the session's Python, by name; waits for running code. With `at`, as they were recorded."""
    if at is not None:
        state = await manager.state(user, session_id, at)
        recorded = [
            VariableRecord(name=name, type=each.type, size=each.size, preview=each.preview)
            for name, each in state.variables.items()
        ]
        return VariableList(variables=escape_surrogates(recorded))
    found = await (await manager.hosted(user, session_id)).workspace().session.variables()
    return VariableList(variables=[VariableRecord(**escape_surrogates(asdict(variable))) for variable in found])


# --- files ----------------------------------------------------------------------------------------------------------


@router.get("/sessions/{session_id}/files", tags=["files"])
async def get_workspace(manager: ManagerDep, user: UserDep, session_id: str, at: AtDep = None) -> FolderListing:
    """The entries of the workspace; with `at`, those that had been changed at that point."""
    if at is not None:
        found = await manager.recorded_file(user, session_id, ".", at)
        return _listing(found if isinstance(found, list) else [])
    return _listing(await (await manager.hosted(user, session_id)).executor().list_files("."))


@router.get(
    "/sessions/{session_id}/files/{path:path}", tags=["files"], response_model=FolderListing, responses={200: _BINARY}
)
async def get_file(manager: ManagerDep, user: UserDep, session_id: str, path: FilePathDep, at: AtDep = None) -> Any:
    """The bytes of a file, or the entries of a folder; a path that ends with `/` is a folder's.

    A name that is not UTF-8 is written as in listings (`%FF.txt`). A path that begins with `/` (written `//`) is not
    relative to the workspace. With `at`, it is a text as it was recorded, or the changed entries of a folder."""
    if at is not None:
        found = await manager.recorded_file(user, session_id, path, at)
        if isinstance(found, bytes):
            return Response(found, media_type="application/octet-stream")
        return _listing(found)
    executor = (await manager.hosted(user, session_id)).executor()
    with _refuse_invalid(path):
        if path.endswith("/"):
            return _listing(await executor.list_files(path))
        try:
            data = await executor.read_file(path or ".")
        except IsADirectoryError:
            return _listing(await executor.list_files(path or "."))
    return Response(data, media_type="application/octet-stream")


@router.put("/sessions/{session_id}/files/{path:path}", tags=["files"], openapi_extra={"requestBody": _BINARY})
async def put_file(
    request: Request, manager: ManagerDep, user: UserDep, session_id: str, path: FilePathDep
) -> FileWritten:
    """Write a file; missing folders are created."""
    hosted = await manager.hosted(user, session_id)
    executor = hosted.executor()
    data = await request.body()
    with _refuse_invalid(path):
        await executor.write_file(path, data)
    await hosted.note("file", {"action": "write", "path": url_name(path), "size": len(data)})
    return FileWritten(path=url_name(path), size=len(data))


@contextmanager
def _refuse_invalid(path: str) -> Iterator[None]:
    """Raise ConfigurationError for a path that no file can have."""
    try:
        yield
    except ValueError as problem:
        raise ConfigurationError(f"invalid path {path!r}: {problem}") from None


def _listing(entries: Sequence[FileEntry]) -> FolderListing:
    return FolderListing(entries=[FileEntryRecord(name=each.name, kind=each.kind, size=each.size) for each in entries])


@router.post("/sessions/{session_id}/str_replace", tags=["files"])
async def replace_text(manager: ManagerDep, user: UserDep, session_id: str, request: ReplaceText) -> ReplaceResult:
    """Replace a text that occurs in a file exactly once."""
    hosted = await manager.hosted(user, session_id)
    try:
        await hosted.executor().str_replace(request.file_path, request.str_to_replace, request.str_to_insert)
    except (OSError, ValueError) as problem:
        return ReplaceResult(success=False, message=str(problem))
    await hosted.note("file", {"action": "str_replace", "path": request.file_path})
    return ReplaceResult(success=True, message=f"the text was replaced in {request.file_path}")


@router.get("/sessions/{session_id}/diff", tags=["files"])
async def get_diff(
    manager: ManagerDep,
    user: UserDep,
    session_id: str,
    at: AtDep = None,
    first: Annotated[str | None, Query(alias="from", description=f"{_POINT} Default: start", max_length=500)] = None,
) -> WorkspaceDiff:
    """The changes of the workspace since the start; of a session that has ended, until its end.

    With `at` or `from`, by what was recorded at these points."""
    if at is not None or first is not None:
        return await manager.recorded_diff(user, session_id, first or "start", at or "now")
    return await manager.diff(user, session_id)
