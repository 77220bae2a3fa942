"""Routes of sessions as a whole: creation, fork, checkpoints, end, verification, and what is recorded of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.exceptions import HTTPException

from carrel.server.auth import ApiKey
from carrel.server.dependencies import (
    EVENT_STREAM,
    MAX_WAIT,
    PROBLEMS,
    JsonRoute,
    KeyDep,
    ManagerDep,
    MetricsDep,
    RequestIdDep,
    UserDep,
    WaitDep,
    bearer,
    problem,
    with_duration,
)
from carrel.server.event_stream import session_stream
from carrel.server.hosted_session import checkpoint_record
from carrel.server.records import now
from carrel.text import json_bytes
from carrel.wire.answers import (
    CheckpointList,
    CheckpointRecord,
    ClosedSession,
    ConversationRecord,
    MessageCount,
    RewoundSession,
    SessionPage,
    SessionRecord,
    SessionStatus,
    TracePage,
)
from carrel.wire.requests import (
    AddMessages,
    CreateCheckpoint,
    CreateSession,
    ExtendSession,
    ForkSession,
    RewindSession,
)
from carrel.wire.verification import Job

router = APIRouter(dependencies=[Depends(bearer)], responses=PROBLEMS, route_class=JsonRoute)
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {EVENT_STREAM: {}}}}
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


@router.post(
    "/sessions",
    tags=["sessions"],
    responses={
        404: problem("`DatasetNotFound`, `SampleNotFound`: there is no such sample."),
        409: problem("`SessionExists`: the `session_id` is taken. `DatasetInvalid`: the dataset cannot be read."),
        429: problem("`TooManySessions`: the server has as many live sessions as it may."),
    },
)
async def create_session(
    manager: ManagerDep,
    user: UserDep,
    metrics: MetricsDep,
    wait: WaitDep,
    request_id: RequestIdDep,
    request: CreateSession,
) -> SessionRecord:
    """Create a session; its status is `creating` until it is `ready` or `error`."""
    record = await manager.create(user, request, request_id)
    metrics.sessions.inc()
    return record if wait is None else with_duration(await manager.wait_ready(user, record.session_id, wait))


@router.get("/sessions", tags=["sessions"])
async def get_sessions(
    manager: ManagerDep,
    user: UserDep,
    key: KeyDep,
    status: SessionStatus | None = None,
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    page_size: Annotated[int, Query(ge=1, le=1000)] = 1000,
    cursor: Annotated[str | None, Query(max_length=100, description="The `next_cursor` of the page before")] = None,
) -> SessionPage:
    """The user's sessions, newest first."""
    if key.session is not None:
        record = await manager.records.get_session(key.session)
        shown = [record] if record is not None and record.user_id == user and status in (None, record.status) else []
        return SessionPage(sessions=list(map(with_duration, shown)), total_count=len(shown), has_more=False)
    found = await manager.records.list_sessions(user, status, page=page, page_size=page_size, cursor=cursor)
    return found.model_copy(update={"sessions": list(map(with_duration, found.sessions))})


@router.get("/sessions/{session_id}", tags=["sessions"])
async def get_session(manager: ManagerDep, user: UserDep, wait: WaitDep, session_id: str) -> SessionRecord:
    """A session; while it is being created, the answer waits for up to a second."""
    return with_duration(await manager.wait_ready(user, session_id, wait))


@router.patch("/sessions/{session_id}", tags=["sessions"])
async def extend_session(manager: ManagerDep, user: UserDep, session_id: str, request: ExtendSession) -> SessionRecord:
    """Set the time that a session has left, counted from now."""
    expires_at = now() + timedelta(minutes=request.ttl_minutes)
    hosted = await manager.hosted(user, session_id)
    return with_duration(await hosted.extend(expires_at, request.ttl_minutes))


@router.delete("/sessions/{session_id}", tags=["sessions"])
async def close_session(manager: ManagerDep, user: UserDep, session_id: str) -> ClosedSession:
    """End a session: no process and no file of its workspace remains. Its records, diff and trace stay.

    A durable session is paused; deleted once more, its files and variables are removed."""
    record = await manager.close(user, session_id)
    return ClosedSession(message=f"the session is {record.status}", duration_seconds=record.duration_seconds or 0.0)


@router.post(
    "/sessions/{session_id}/fork",
    tags=["sessions"],
    responses={409: problem("`ForkRefused`: threads or open files of a library cannot be copied. `SessionNotReady`.")},
)
async def fork_session(
    manager: ManagerDep,
    user: UserDep,
    wait: WaitDep,
    request_id: RequestIdDep,
    session_id: str,
    request: ForkSession | None = None,
) -> SessionRecord:
    """Create a session with the same variables, files and conversation; later changes are separate."""
    fork = await manager.fork(user, session_id, request or ForkSession(), request_id)
    return with_duration(await manager.wait_ready(user, fork.session_id, MAX_WAIT if wait is None else wait))


@router.post(
    "/sessions/{session_id}/pause",
    tags=["sessions"],
    responses={409: problem("`SessionNotReady`: the session is not durable, or it is not live.")},
)
async def pause_session(manager: ManagerDep, user: UserDep, session_id: str) -> SessionRecord:
    """Save and close a durable session: running code and commands end, and its lifecycle is `paused`."""
    return with_duration(await manager.pause(user, session_id))


@router.post(
    "/sessions/{session_id}/resume",
    tags=["sessions"],
    responses={409: problem("`SessionNotReady`: the session has no stored state.")},
)
async def resume_session(manager: ManagerDep, user: UserDep, wait: WaitDep, session_id: str) -> SessionRecord:
    """Open a paused session again, with its conversation, files and variables."""
    record = await manager.resume(user, session_id)
    return with_duration(await manager.wait_ready(user, record.session_id, MAX_WAIT if wait is None else wait))


# --- checkpoints ----------------------------------------------------------------------------------------------------


@router.post("/sessions/{session_id}/checkpoints", tags=["sessions"])
async def create_checkpoint(
    manager: ManagerDep, user: UserDep, session_id: str, request: CreateCheckpoint | None = None
) -> CheckpointRecord:
    """Keep the conversation, variables and files as they are now, to return to."""
    return await manager.checkpoint(user, session_id, request.label if request is not None else "")


@router.get("/sessions/{session_id}/checkpoints", tags=["sessions"])
async def get_checkpoints(manager: ManagerDep, user: UserDep, session_id: str) -> CheckpointList:
    """The checkpoints of a session, oldest first."""
    return CheckpointList(checkpoints=await manager.checkpoints(user, session_id))


@router.delete(
    "/sessions/{session_id}/checkpoints/{checkpoint_id}",
    tags=["sessions"],
    responses={404: problem("`PointNotFound`: there is no such checkpoint. `SessionNotFound`.")},
)
async def delete_checkpoint(
    manager: ManagerDep, user: UserDep, session_id: str, checkpoint_id: str
) -> CheckpointRecord:
    """Remove a checkpoint."""
    session = (await manager.hosted(user, session_id)).workspace().session
    return checkpoint_record(await session.drop_checkpoint(checkpoint_id))


@router.post(
    "/sessions/{session_id}/rewind",
    tags=["sessions"],
    responses={404: problem("`PointNotFound`: there is no such checkpoint. `SessionNotFound`.")},
)
async def rewind_session(manager: ManagerDep, user: UserDep, session_id: str, request: RewindSession) -> RewoundSession:
    """Return to a checkpoint in conversation, variables and files; running commands end."""
    return await manager.rewind(user, session_id, request.to)


# --- verification ---------------------------------------------------------------------------------------------------


@router.post(
    "/sessions/{session_id}/verify",
    tags=["verification"],
    responses={409: problem("`SessionNotReady`: the session is not live, or was not created from a sample.")},
)
async def start_verification(
    manager: ManagerDep,
    user: UserDep,
    key: KeyDep,
    metrics: MetricsDep,
    wait: WaitDep,
    request_id: RequestIdDep,
    session_id: str,
) -> Job:
    """Verify the workspace as it is now, in a fresh copy of the sample."""
    job = await manager.start_verification(user, session_id, request_id)
    metrics.verifications.inc()
    return _visible(job if wait is None else await manager.wait(user, session_id, Job, job.job_id, wait), key)


@router.get("/sessions/{session_id}/verify/{job_id}", tags=["verification"])
async def get_verification(
    manager: ManagerDep, user: UserDep, key: KeyDep, wait: WaitDep, session_id: str, job_id: str
) -> Job:
    """A verification; while it runs, the answer waits for up to a second."""
    return _visible(await manager.wait(user, session_id, Job, job_id, wait), key)


@router.delete("/sessions/{session_id}/verify/{job_id}", tags=["verification"])
async def cancel_verification(manager: ManagerDep, user: UserDep, key: KeyDep, session_id: str, job_id: str) -> Job:
    """Cancel a verification; one that has ended stays as it is."""
    return _visible(await manager.cancel(user, session_id, Job, job_id), key)


def _visible(job: Job, key: ApiKey) -> Job:
    """Return a verification as the owner of this key may see it."""
    return job.without_tests() if key.scope == "agent" else job


@router.get(
    "/sessions/{session_id}/verify/{job_id}/output",
    tags=["verification"],
    response_class=Response,
    responses={**_TEXT, 403: problem("A key with the scope `agent` cannot read the output of the tests.")},
)
async def get_verification_output(
    manager: ManagerDep,
    user: UserDep,
    key: KeyDep,
    session_id: str,
    job_id: str,
    stream: Literal["stdout", "stderr", "report"] = "stdout",
    attempt: Annotated[int | None, Query(ge=1, le=100, description="By default the last one")] = None,
) -> Response:
    """The complete output of the test command; the verdict contains its beginning and end."""
    await manager.get(user, session_id)
    if key.scope == "agent":
        raise HTTPException(403, "a key with the scope agent cannot read the output of the tests")
    return Response(await manager.output(user, session_id, job_id, stream, attempt), media_type="text/plain")


# --- what is recorded -----------------------------------------------------------------------------------------------


@router.get("/sessions/{session_id}/conversation", tags=["conversation"], response_model=ConversationRecord)
async def get_conversation(
    manager: ManagerDep,
    user: UserDep,
    session_id: str,
    before: Annotated[int | None, Query(ge=1, le=2**53, description="Only messages before this number")] = None,
    limit: Annotated[int | None, Query(ge=1, le=10_000, description="The last messages, so many")] = None,
) -> Response:
    """The visible messages of the conversation, oldest first; all of them, or the last ones before a number."""
    await manager.get(user, session_id)
    data = await manager.storage.get_session_store().load_session(session_id, repair=False)
    messages = data["messages"] if data is not None else []
    end = min(len(messages), before - 1 if before is not None else len(messages))
    start = max(0, end - limit) if limit is not None else 0
    answer = {
        "session": data["session"] if data is not None else None,
        "messages": messages[start:end],
        "first": start + 1,
        "has_more": start > 0,
    }
    # Messages may contain what a model cannot write: lone surrogates, integers of any size.
    return Response(json_bytes(answer), media_type="application/json")


@router.post("/sessions/{session_id}/conversation", tags=["conversation"])
async def add_messages(manager: ManagerDep, user: UserDep, session_id: str, request: AddMessages) -> MessageCount:
    """Append messages to the conversation, all of them or none; also after the session has ended."""
    record = await manager.get(user, session_id)
    store = manager.storage.get_session_store()
    fields = {"provider": "", "model": "", "cwd": f"/{record.dataset}/{record.sample_id}", "api_base": ""}
    await store.append_many(session_id, request.messages, **fields)
    meta = await store.find_meta(session_id)
    return MessageCount(count=(await store.counted([meta]))[0]["message_count"] if meta is not None else 0)


@router.get("/sessions/{session_id}/trace", tags=["conversation"])
async def get_trace(
    manager: ManagerDep,
    user: UserDep,
    session_id: str,
    after: Annotated[int, Query(ge=0, le=2**53, description="Only lines after this one")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> TracePage:
    """The steps of a session, with their times: runs, tool calls, commands, checkpoints, verdicts."""
    return await manager.trace(user, session_id, after, limit)


@router.get("/sessions/{session_id}/events", tags=["conversation"], response_class=Response, responses=_EVENTS)
async def get_events(
    request: Request,
    manager: ManagerDep,
    user: UserDep,
    key: KeyDep,
    session_id: str,
    from_seq: Annotated[int, Query(ge=1, le=2**53)] = 1,
    follow: Annotated[bool, Query(description="False ends with the events that there are now")] = True,
) -> Any:
    """Everything that happens in the session, from a number on, or after `Last-Event-ID`."""
    await manager.get(user, session_id)
    last = request.headers.get("last-event-id", "")
    start = int(last) + 1 if last.isascii() and last.isdigit() and len(last) < 16 else from_seq
    return session_stream(manager, session_id, start, follow=follow, hide_tests=key.scope == "agent")
