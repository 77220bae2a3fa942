"""The wire that task sessions have in public: datasets, samples, sessions, commands, verdicts."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from carrel.server.asking import (
    EVENTS,
    LONGEST_WAIT,
    PROBLEMS,
    Counts,
    Desk,
    JsonRoute,
    Key,
    Once,
    User,
    Wait,
    WantsEvents,
    bearer,
    lasting,
)
from carrel.server.front_desk import HELD, FrontDesk
from carrel.server.keys import KnownKey
from carrel.server.live_task import known_id
from carrel.server.streams import command_stream
from carrel.tasks.file_cache import archive_of
from carrel.tasks.sample import WIRE_FIELDS, Sample
from carrel.version import __version__
from carrel.wire.answers import (
    DatasetInfo,
    Health,
    Interaction,
    ReplaceResult,
    SampleInfo,
    SampleList,
    SessionClosed,
    SessionList,
    SessionRecord,
    SessionStatus,
)
from carrel.wire.requests import CreateSession, ReplaceText, RunCommand
from carrel.wire.verification import Job

health = APIRouter()
_VERSION = __version__
router = APIRouter(dependencies=[Depends(bearer)], responses=PROBLEMS, route_class=JsonRoute)
_ANSWERS_AT_ONCE = ("0.1.", "0.2.", "0.3.")
"""Versions of the public client that want a command's output in the answer to it."""


@health.get("/health", tags=["server"])
async def get_health() -> Health:
    """That the server is there; the only question that needs no key."""
    return Health(service="carrel", status="healthy", timestamp=datetime.now(UTC).isoformat(), version=__version__)


@router.get("/datasets", tags=["datasets"])
async def get_datasets(desk: Desk) -> list[DatasetInfo]:
    """All datasets that can be read."""
    return await asyncio.to_thread(desk.datasets.list)


@router.get("/samples", tags=["datasets"])
async def get_samples(
    desk: Desk,
    key: Key,
    dataset: Annotated[str | None, Query(max_length=200)] = None,
    page: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
    page_size: Annotated[int | None, Query(ge=1, le=100)] = None,
    search: Annotated[str | None, Query(max_length=200, description="In the instance's id")] = None,
) -> SampleList:
    """All samples, or a page of them."""
    found = await asyncio.to_thread(_samples, desk, dataset)
    if search:
        found = [sample for sample in found if search.lower() in sample.instance_id.lower()]
    size = page_size or (100 if page is not None else max(len(found), 1))
    first = ((page or 1) - 1) * size
    shown = found[first : first + size]
    told = [SampleInfo.model_validate(sample.model_dump(include=set(WIRE_FIELDS))) for sample in shown]
    return SampleList(
        samples=[sample.without_solution() for sample in told] if key.scope == "agent" else told,
        total_count=len(found),
        page=page or 1,
        page_size=size,
        has_more=first + len(shown) < len(found),
    )


def _samples(desk: FrontDesk, dataset: str | None) -> list[Sample]:
    if dataset:
        return desk.datasets.get(dataset).samples
    return [sample for about in desk.datasets.list() for sample in desk.datasets.get(about.name).samples]


@router.get(
    "/samples/{dataset}/{sample_id}/download",
    tags=["datasets"],
    response_class=FileResponse,
    responses={200: {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def download(
    desk: Desk, dataset: str, sample_id: str, version: Annotated[int | None, Query(ge=1)] = None
) -> FileResponse:
    """The sample's files as its sessions begin with them."""
    sample = (await asyncio.to_thread(desk.datasets.get, dataset)).sample(sample_id, version)
    archive = await archive_of(sample, desk.cache)
    return FileResponse(archive, media_type="application/gzip", filename=f"{sample.sample_id}.tar.gz")


# --- sessions -------------------------------------------------------------------------------------------------------


@router.post("/sessions", tags=["sessions"])
async def create(desk: Desk, user: User, counts: Counts, wait: Wait, once: Once, asked: CreateSession) -> SessionRecord:
    """A new session; it is being made until its status is `ready` or `error`."""
    session = await desk.create(user, asked, once)
    counts.sessions.inc()
    return session if wait is None else lasting(await desk.ready(session, wait))


@router.get("/sessions", tags=["sessions"])
async def get_sessions(
    desk: Desk,
    user: User,
    key: Key,
    status: SessionStatus | None = None,
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    page_size: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> SessionList:
    """The user's own, newest first."""
    found = [
        session
        for session in desk.sessions_of(user)
        if status in (None, session.status) and key.session in (None, session.session_id)
    ]
    first = (page - 1) * page_size
    shown = [lasting(session) for session in found[first : first + page_size]]
    return SessionList(sessions=shown, total_count=len(found), has_more=first + len(shown) < len(found))


@router.get("/sessions/{session_id}", tags=["sessions"])
async def get_session(desk: Desk, user: User, wait: Wait, session_id: str) -> SessionRecord:
    """How it stands; one that is being made is waited for, for a moment."""
    session = desk.session(user, session_id)
    task = desk.under_way(session_id)
    if wait is None:
        wait = HELD if task is not None and task.first_time(session_id) else 0.0
    return lasting(await desk.ready(session, wait))


@router.delete("/sessions/{session_id}", tags=["sessions"])
async def close(desk: Desk, user: User, session_id: str) -> SessionClosed:
    """End it: nothing of it is left running or on disk. What was answered can still be asked for."""
    session = await desk.close_session(user, session_id)
    return SessionClosed(message=f"the session is {session.status}", duration_seconds=session.duration_seconds or 0.0)


# --- commands -------------------------------------------------------------------------------------------------------


@router.post(
    "/sessions/{session_id}/exec",
    tags=["commands"],
    response_model=Interaction,
    responses={200: {"content": {EVENTS: {}}}},
)
async def execute(
    request: Request,
    desk: Desk,
    user: User,
    counts: Counts,
    wait: Wait,
    once: Once,
    wants_events: WantsEvents,
    session_id: str,
    asked: RunCommand,
    stream: Annotated[bool, Query(description="Events as it writes: output, and done at its end")] = False,
) -> Any:
    """Begin a command; commands of one session run one after another.

    With `Accept: text/event-stream`, as with `stream`, it is answered by events."""
    desk.session(user, session_id)
    interaction = await desk.ledger.interaction(session_id, known_id("int", once)) if once is not None else None
    if interaction is None:
        task = desk.live(user, session_id)
        counts.commands.inc()
        if stream or wants_events:
            return await command_stream(task, asked, once)
        interaction = await task.begin_command(asked, once=once)
    if request.headers.get("x-stainless-package-version", "").startswith(_ANSWERS_AT_ONCE):
        wait = asked.command_timeout + LONGEST_WAIT
    if wait is not None:
        interaction = await desk.interaction(session_id, interaction.interaction_id, wait)
    return interaction


@router.get("/sessions/{session_id}/interactions/{interaction_id}", tags=["commands"])
async def get_interaction(desk: Desk, user: User, wait: Wait, session_id: str, interaction_id: str) -> Interaction:
    """How the command stands; one that runs is waited for, for a moment."""
    desk.session(user, session_id)
    return await desk.interaction(session_id, interaction_id, wait)


@router.post("/sessions/{session_id}/str_replace", tags=["files"])
async def str_replace(desk: Desk, user: User, session_id: str, asked: ReplaceText) -> ReplaceResult:
    """Replace a text that stands in a file exactly once."""
    task = desk.live(user, session_id)
    try:
        await task.place().str_replace(asked.file_path, asked.str_to_replace, asked.str_to_insert)
    except (OSError, ValueError) as problem:
        return ReplaceResult(success=False, message=str(problem))
    await task.note("file", {"action": "str_replace", "path": asked.file_path})
    return ReplaceResult(success=True, message=f"{asked.file_path} was changed in one place")


# --- verification ---------------------------------------------------------------------------------------------------


@router.post("/sessions/{session_id}/verify", tags=["verification"])
async def verify(desk: Desk, user: User, key: Key, counts: Counts, wait: Wait, once: Once, session_id: str) -> Job:
    """Judge what was done so far, in a fresh copy of the sample."""
    desk.session(user, session_id)
    job = await desk.ledger.job(session_id, known_id("job", once)) if once is not None else None
    if job is None:
        job = await desk.live(user, session_id).begin_verification(once)
        counts.verifications.inc()
    return _shown(job if wait is None else await desk.job(session_id, job.job_id, wait), key)


@router.get("/sessions/{session_id}/verify/{job_id}", tags=["verification"])
async def get_job(desk: Desk, user: User, key: Key, wait: Wait, session_id: str, job_id: str) -> Job:
    """How the verification stands; one that runs is waited for, for a moment."""
    desk.session(user, session_id)
    return _shown(await desk.job(session_id, job_id, wait), key)


def _shown(job: Job, key: KnownKey) -> Job:
    return job.without_tests() if key.scope == "agent" else job


@router.get(
    "/sessions/{session_id}/verify/{job_id}/output",
    tags=["verification"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
async def get_output(
    desk: Desk,
    user: User,
    key: Key,
    session_id: str,
    job_id: str,
    stream: Literal["stdout", "stderr", "report"] = "stdout",
    attempt: Annotated[int | None, Query(ge=1, le=100, description="The last one when none is named")] = None,
) -> Response:
    """All that the test command wrote; the verdict itself holds its beginning and end."""
    desk.session(user, session_id)
    if key.scope == "agent":
        raise HTTPException(403, "what the tests wrote is not for a key with the scope agent")
    return Response(await desk.output(session_id, job_id, stream, attempt), media_type="text/plain")


@router.delete("/sessions/{session_id}/verify/{job_id}", tags=["verification"])
async def cancel(desk: Desk, user: User, key: Key, session_id: str, job_id: str) -> Job:
    """End a verification that is not wanted any more."""
    task = desk.under_way(desk.session(user, session_id).session_id)
    return _shown(await (desk.job(session_id, job_id) if task is None else task.cancel_job(job_id)), key)
