"""Beyond the public wire: code, files, differences, what was said, what happened, forks and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from carrel.errors import ConfigurationError
from carrel.server.asking import (
    EVENTS,
    LONGEST_WAIT,
    PROBLEMS,
    Counts,
    Desk,
    FilePath,
    JsonRoute,
    Key,
    Once,
    User,
    Wait,
    WantsEvents,
    bearer,
    lasting,
)
from carrel.server.streams import happenings, run_record, run_stream
from carrel.session import Checkpoint
from carrel.wire.answers import (
    CheckpointList,
    CheckpointRecord,
    ConversationRecord,
    FileChangeRecord,
    FileEntryRecord,
    FileWritten,
    FolderListing,
    InterruptResult,
    MessageCount,
    RunResult,
    SessionRecord,
    WorkspaceDiff,
)
from carrel.wire.odd_values import json_bytes, url_name
from carrel.wire.requests import AddMessages, CreateCheckpoint, ExtendSession, ForkSession, RewindSession, RunCode

router = APIRouter(dependencies=[Depends(bearer)], responses=PROBLEMS, route_class=JsonRoute)
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {EVENTS: {}}}}
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}


@router.patch("/sessions/{session_id}", tags=["sessions"])
async def change(desk: Desk, user: User, session_id: str, asked: ExtendSession) -> SessionRecord:
    """Let it live for so many minutes from now."""
    expires = datetime.now(UTC) + timedelta(minutes=asked.ttl_minutes)
    return lasting(await desk.live(user, session_id).keep_until(expires, asked.ttl_minutes))


@router.post("/sessions/{session_id}/fork", tags=["sessions"])
async def fork(
    desk: Desk, user: User, wait: Wait, once: Once, session_id: str, asked: ForkSession | None = None
) -> SessionRecord:
    """Another session with the same variables, files and conversation, from now on apart."""
    session = await desk.fork(user, session_id, asked or ForkSession(), once)
    return lasting(await desk.ready(session, LONGEST_WAIT if wait is None else wait))


@router.post("/sessions/{session_id}/checkpoints", tags=["sessions"])
async def keep_moment(
    desk: Desk, user: User, session_id: str, asked: CreateCheckpoint | None = None
) -> CheckpointRecord:
    """Keep this moment, the conversation, the variables and the files, to go back to."""
    task = desk.live(user, session_id)
    kept = await task.checkpoints(desk.storage).create(asked.label if asked is not None else "")
    await task.note("checkpoint", {"id": kept.id, "label": kept.label, "messages": kept.message_count})
    return _point(kept)


@router.get("/sessions/{session_id}/checkpoints", tags=["sessions"])
async def get_moments(desk: Desk, user: User, session_id: str) -> CheckpointList:
    """The moments that it can go back to."""
    kept = desk.live(user, session_id).checkpoints(desk.storage).all()
    return CheckpointList(checkpoints=list(map(_point, kept)))


@router.delete("/sessions/{session_id}/checkpoints/{checkpoint_id}", tags=["sessions"])
async def drop_moment(desk: Desk, user: User, session_id: str, checkpoint_id: str) -> CheckpointRecord:
    """Let go of it."""
    return _point(await desk.live(user, session_id).checkpoints(desk.storage).drop(checkpoint_id))


@router.post("/sessions/{session_id}/rewind", tags=["sessions"])
async def rewind(desk: Desk, user: User, session_id: str, asked: RewindSession) -> CheckpointRecord:
    """Go back to a checkpoint, in conversation, variables and files; what still runs there ends."""
    task = desk.live(user, session_id)
    checkpoints = task.checkpoints(desk.storage)
    point = checkpoints.find(asked.to)
    await checkpoints.rewind(point)
    await task.note("rewind", {"id": point.id, "label": point.label, "messages": point.message_count})
    return _point(point)


def _point(kept: Checkpoint) -> CheckpointRecord:
    return CheckpointRecord(id=kept.id, label=kept.label, messages=kept.message_count, made_at=kept.created_at)


# --- code -----------------------------------------------------------------------------------------------------------


@router.post("/sessions/{session_id}/run", tags=["code"], response_model=RunResult, responses=_EVENTS)
async def run(
    desk: Desk, user: User, counts: Counts, wants_events: WantsEvents, session_id: str, asked: RunCode
) -> Any:
    """Run Python; with `Accept: text/event-stream` events while it runs: output, and result at its end."""
    task = desk.live(user, session_id)
    code = task.opened.code
    counts.runs.inc()
    if wants_events:
        return run_stream(task, asked)
    result = await code.run(asked.code, asked.timeout)
    await task.note_run(asked.code, result)
    return run_record(result)


@router.post("/sessions/{session_id}/interrupt", tags=["code"])
async def interrupt(desk: Desk, user: User, session_id: str) -> InterruptResult:
    """Stop the running code as Ctrl-C does; its variables survive."""
    return InterruptResult(interrupted=await desk.live(user, session_id).place().interrupt())


# --- files ----------------------------------------------------------------------------------------------------------


@router.get("/sessions/{session_id}/files", tags=["files"])
async def get_workspace(desk: Desk, user: User, session_id: str) -> FolderListing:
    """What is in the workspace."""
    return _folder(await desk.live(user, session_id).place().list_files("."))


@router.get("/sessions/{session_id}/files/{path:path}", tags=["files"], response_model=FolderListing, responses=_BYTES)
async def get_file(desk: Desk, user: User, session_id: str, path: FilePath) -> Any:
    """A file's bytes, or what is in a folder; a path that ends with `/` is a folder's.

    A name that is not UTF-8 is reached as it is listed (`%FF.txt`).
    One that begins with `/` (written `//`) is not the workspace's."""
    place = desk.live(user, session_id).place()
    with _path(path):
        if path.endswith("/"):
            return _folder(await place.list_files(path))
        try:
            data = await place.read_file(path or ".")
        except IsADirectoryError:
            return _folder(await place.list_files(path or "."))
    return Response(data, media_type="application/octet-stream")


@router.put(
    "/sessions/{session_id}/files/{path:path}",
    tags=["files"],
    openapi_extra={
        "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
    },
)
async def put_file(request: Request, desk: Desk, user: User, session_id: str, path: FilePath) -> FileWritten:
    """Write a file; missing folders are made."""
    task = desk.live(user, session_id)
    place = task.place()
    data = await request.body()
    with _path(path):
        await place.write_file(path, data)
    await task.note("file", {"action": "write", "path": url_name(path), "size": len(data)})
    return FileWritten(path=url_name(path), size=len(data))


@contextmanager
def _path(path: str) -> Iterator[None]:
    """What no file can be called is a wrong request, and nobody's fault here."""
    try:
        yield
    except ValueError as problem:
        raise ConfigurationError(f"{path!r} is no path: {problem}") from None


def _folder(entries: list[Any]) -> FolderListing:
    return FolderListing(entries=[FileEntryRecord(name=each.name, kind=each.kind, size=each.size) for each in entries])


@router.get("/sessions/{session_id}/diff", tags=["files"])
async def get_diff(desk: Desk, user: User, session_id: str) -> WorkspaceDiff:
    """What is not as it was at the start."""
    place = desk.live(user, session_id).place()
    changes = await place.changed_files()
    told = [FileChangeRecord(path=each.path, kind=each.kind, size=each.size) for each in changes]
    return WorkspaceDiff(diff=await place.diff() if changes else "", changes=told)


# --- what was said and done -----------------------------------------------------------------------------------------


@router.get("/sessions/{session_id}/conversation", tags=["conversation"], response_model=ConversationRecord)
async def get_conversation(desk: Desk, user: User, session_id: str) -> Response:
    """What was said so far, as it is visible."""
    desk.session(user, session_id)
    data = await desk.storage.get_session_store().load_session(session_id, repair=False)
    told: dict[str, Any] = {"session": None, "messages": []}
    if data is not None:
        told = {"session": data["session"], "messages": data["messages"]}
    # What is in a log may be more than a model can write: half of a surrogate pair, integers of any size.
    return Response(json_bytes(told), media_type="application/json")


@router.post("/sessions/{session_id}/conversation", tags=["conversation"])
async def say(desk: Desk, user: User, session_id: str, asked: AddMessages) -> MessageCount:
    """Keep messages with the session, all of them or none; also when it has ended."""
    session = desk.session(user, session_id)
    store = desk.storage.get_session_store()
    where = {"provider": "", "model": "", "cwd": f"/{session.dataset}/{session.sample_id}", "api_base": ""}
    await store.append_many(session_id, asked.messages, **where)
    meta = await store.find_meta(session_id)
    return MessageCount(count=(await store.counted([meta]))[0]["message_count"] if meta is not None else 0)


@router.get("/sessions/{session_id}/events", tags=["conversation"], response_class=Response, responses=_EVENTS)
async def get_events(
    request: Request,
    desk: Desk,
    user: User,
    key: Key,
    session_id: str,
    from_seq: Annotated[int, Query(ge=1, le=2**53)] = 1,
    follow: Annotated[bool, Query(description="False ends with what there is now")] = True,
) -> Any:
    """Everything that happens in the session, from a number on; `Last-Event-ID` goes on after that one."""
    desk.session(user, session_id)
    last = request.headers.get("last-event-id", "")
    start = int(last) + 1 if last.isascii() and last.isdigit() and len(last) < 16 else from_seq
    return happenings(desk.ledger, session_id, start, follow, hide_tests=key.scope == "agent")


@router.get("/metrics", tags=["server"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def get_metrics(counts: Counts) -> Response:
    """Numbers about the server, as Prometheus reads them."""
    return Response(counts.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
