"""One session under way: its place, what runs in it, and who waits for that."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from carrel.errors import (
    CarrelError,
    ExecutorClosed,
    InteractionNotFound,
    JobNotFound,
    PlaceLost,
    SessionNotReady,
    SetupFailed,
)
from carrel.execution import temp_dirs
from carrel.execution.executor import CommandResult, ExecutionResult, Executor, OnOutput
from carrel.server.ledger import Ledger
from carrel.session import Checkpoints, ConversationBranch, Session, StorageBackend
from carrel.tasks.environment import PreparedSample
from carrel.tasks.sample import Sample
from carrel.tasks.verification.verifier import SHOWN_OUTPUT, verify
from carrel.wire.answers import NOT_RUN, Interaction, SessionRecord, SessionStatus
from carrel.wire.odd_values import escape_surrogates
from carrel.wire.requests import RunCommand
from carrel.wire.verification import ErrorInfo, Job, VerificationResult

logger = logging.getLogger(__name__)

_IN_BACKGROUND = '(/bin/sh -c "$1" >"$2" 2>&1 </dev/null; echo $? >"$2.exit") & echo $!'
_SHOWN_SETUP = 20_000
"""Characters of a failed set-up's output in a session's error."""


@dataclass(frozen=True)
class Opened:
    """A place that is ready."""

    executor: Executor
    code: Session
    """The same place with its library; closing it closes both."""
    prepared: PreparedSample | None = None


class LiveTask:
    """Everything of it ends with `close`; what was asked of it is in the ledger by then."""

    def __init__(
        self,
        session: SessionRecord,
        sample: Sample | None,
        ledger: Ledger,
        judges: asyncio.Semaphore,
        ended: Ended,
        worded: Callable[[str], str] = str,
    ) -> None:
        """`judges` bounds how many verifications run at once; `ended` is told when the session is over, and why.

        `worded` makes of what went wrong what the user is told of it."""
        self.session = session
        self.sample = sample
        self._ledger = ledger
        self._judges = judges
        self._is_over = ended
        self._worded = worded
        self._opened: Opened | None = None
        self._opening: asyncio.Task[None] | None = None
        self._checkpoints: Checkpoints | None = None
        self._commands: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._last: dict[str, Interaction | Job] = {}
        """The newest that ended, because it is the one that is asked for."""
        self._asked_for: set[str] = set()
        self._ending: tuple[SessionStatus, str] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def open(self, opened: Callable[[], Awaitable[Opened]]) -> None:
        """Begin to make its place; `ready` waits for it."""
        self._opening = asyncio.create_task(self._open(opened))

    async def _open(self, opened: Callable[[], Awaitable[Opened]]) -> None:
        try:
            self._opened = await opened()
        except (CarrelError, OSError, ValueError) as problem:
            told = str(problem) or type(problem).__name__
            if isinstance(problem, SetupFailed):
                told += f"\n{problem.output[-_SHOWN_SETUP:]}" if problem.output else ""
            await self._failed(_code_of(problem), told)
            return
        finally:
            if self._opened is None and self.session.status == "creating" and self._ending is None:
                await self._failed("failed", "carrel failed while it made the place")
        receipt = self._opened.prepared.files.receipt if self._opened.prepared is not None else None
        now = _now()
        expires = now + timedelta(minutes=self.session.ttl_minutes)
        await self._keep(status="ready", created_at=now, expires_at=expires, receipt=receipt)
        self._set_timer()

    async def _failed(self, code: str, told: str) -> None:
        message = escape_surrogates(self._worded(told))
        await self._keep(status="error", error=ErrorInfo(code=code, message=message), closed_at=_now())

    async def ready(self, seconds: float | None) -> SessionRecord:
        """The session when its place is ready or could not be made, or as it stands when the time is up."""
        if self._opening is not None:
            await asyncio.wait({self._opening}, timeout=seconds)
        return self.session

    async def keep_until(self, expires_at: datetime, ttl_minutes: int) -> SessionRecord:
        """SessionNotReady for one whose time is over already, or that is being ended."""
        self._place_in_time()
        await self._keep(expires_at=expires_at, ttl_minutes=ttl_minutes)
        if self.ending is None:
            self._set_timer()
        return self.session

    @property
    def ending(self) -> SessionStatus | None:
        """How it ends, once it was asked to; it may still be about it."""
        return self._ending[0] if self._ending is not None else None

    def place(self) -> Executor:
        """Where it works; SessionNotReady says why there is none."""
        if self.ending is not None or self._opened is None or self.session.status != "ready":
            raise SessionNotReady(f"the session is {self.ending or self.session.status}")
        return self._opened.executor

    @property
    def opened(self) -> Opened:
        self.place()
        assert self._opened is not None
        return self._opened

    async def close(self, status: SessionStatus, why: str) -> SessionRecord:
        """End it and everything in it; twice is harmless."""
        if self._closing is None:
            self._ending = (status, why)
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)
        return self.session

    async def _close(self) -> None:
        assert self._ending is not None
        status, why = self._ending
        if self._timer is not None:
            self._timer.cancel()
        await self._end_place()
        for task in self._jobs.values():
            task.cancel()
        if waiting := [*self._jobs.values(), *self._commands.values()]:
            await asyncio.wait(waiting)
        if self.session.status == "error":
            return
        if self.session.status == "creating" and status == "terminated":
            # Who waits for it to be ready gives up on an error, and on nothing else.
            status = "error"
        now = _now()
        begun = self.session.created_at
        error = None if status == "closed" else ErrorInfo(code="terminated", message=why)
        await self._keep(
            status=status,
            error=error,
            closed_at=now,
            duration_seconds=(now - begun).total_seconds() if begun is not None else 0.0,
        )

    async def abandon(self) -> None:
        """End its place; nothing is written down, because that is what failed."""
        self._ending = ("terminated", "it could not be written down")
        await self._end_place()

    async def _end_place(self) -> None:
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._opened is not None:
            try:
                await self._opened.code.close()
            except (CarrelError, OSError) as problem:
                logger.warning("the place of session %s did not close well: %s", self.session.session_id, problem)

    async def _keep(self, **changes: Any) -> None:
        self.session = self.session.model_copy(update=changes)
        await self._ledger.keep(self.session)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left = (self.session.expires_at - _now()).total_seconds()
        self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._expire)

    def _expire(self) -> None:
        if self._closing is not None or self._jobs:
            # A verification that has begun is let go on; its end looks at the time again.
            return
        if self.session.expires_at > _now():
            self._set_timer()
            return
        self._is_over(self, "its time was over")

    @property
    def expired(self) -> bool:
        return self.session.status == "ready" and self.session.expires_at <= _now()

    def first_time(self, what: str) -> bool:
        """Whether this is under way and was not asked for before."""
        under_way = what in self._commands or what in self._jobs or what == self.session.session_id
        new = under_way and what not in self._asked_for
        if new:
            self._asked_for.add(what)
        return new

    # --- commands ---------------------------------------------------------------------------------------------------

    async def begin_command(
        self, asked: RunCommand, told: OnOutput | None = None, once: str | None = None
    ) -> Interaction:
        """Put a command into the queue; `interaction` waits for it."""
        place = self._place_in_time()
        interaction = Interaction(
            interaction_id=_new_id("int", once),
            session_id=self.session.session_id,
            created_at=_now(),
            command=asked.command,
        )
        await self._ledger.note(self.session.session_id, "interaction", interaction)
        task = asyncio.create_task(self._command(place, interaction, asked, told))
        self._commands[interaction.interaction_id] = task
        return interaction

    async def _command(
        self, place: Executor, interaction: Interaction, asked: RunCommand, told: OnOutput | None
    ) -> None:
        log = f"/tmp/background-{interaction.interaction_id}.log"
        words = [shell(), "-c", asked.command]
        if asked.background:
            words = [shell(), "-c", _IN_BACKGROUND.replace("/bin/sh", shell()), shell(), asked.command, log]
        # Whatever happens here, an interaction ends.
        changes = _not_run("carrel failed while the command ran")
        try:
            result = await place.exec(
                words,
                timeout=asked.command_timeout,
                cwd=asked.cwd,
                env=asked.env,
                stdin=asked.stdin,
                on_output=told,
            )
            changes = _ended(result, asked)
            if asked.background and result.success:
                changes |= {"pid": int(result.stdout), "output": log, "stdout": "", "message": f"it writes to {log}"}
        except (CarrelError, OSError, ValueError) as problem:
            changes = _not_run(self._why(problem))
        finally:
            finished = interaction.model_copy(update=changes)
            await self._ledger.note_or_hold(self.session.session_id, "interaction", finished)
            self._last = {finished.interaction_id: finished}
            del self._commands[interaction.interaction_id]
            self._asked_for.discard(interaction.interaction_id)
            self._look_at_place()

    def _look_at_place(self) -> None:
        """One that died was opened anew, without what was done in it: that is not this session any more."""
        lost = getattr(self._opened.executor, "lost", "") if self._opened is not None else ""
        if lost and self._closing is None:
            self._is_over(self, lost)

    def _why(self, problem: Exception) -> str:
        if isinstance(problem, ExecutorClosed) and self._ending is not None:
            return f"the session was {self._ending[0]} while the command ran: {self._ending[1]}"
        if isinstance(problem, PlaceLost):
            return f"the session's place died while the command ran: {problem}"
        return f"the command could not be run to its end: {problem}"

    async def interaction(self, interaction_id: str, seconds: float | None) -> Interaction:
        """As it stands, once it has ended or the time is up; InteractionNotFound when there is none."""
        running = self._commands.get(interaction_id)
        if running is not None:
            await asyncio.wait({running}, timeout=seconds)
        found = self._last.get(interaction_id)
        if not isinstance(found, Interaction):
            found = await self._ledger.interaction(self.session.session_id, interaction_id)
        if found is None:
            raise InteractionNotFound(f"the session has no interaction {interaction_id!r}")
        return found

    # --- verification -----------------------------------------------------------------------------------------------

    async def begin_verification(self, once: str | None = None) -> Job:
        """Judge what was done so far; `job` waits for the verdict."""
        place = self._place_in_time()
        if self.sample is None:
            raise SessionNotReady("the session is of no sample, so there is nothing to verify")
        job = Job(
            job_id=_new_id("job", once),
            session_id=self.session.session_id,
            sample_id=self.sample.sample_id,
            status="pending",
            created_at=(now := _now()),
            started_at=now,
        )
        await self._ledger.note(self.session.session_id, "job", job)
        self._jobs[job.job_id] = asyncio.create_task(self._verification(place, self.sample, job))
        return job

    async def _verification(self, place: Executor, sample: Sample, job: Job) -> None:
        finished = job.model_copy(
            update={"status": "error", "error": ErrorInfo(code="failed", message="carrel failed while it judged")}
        )
        try:
            async with self._judges:
                job = job.model_copy(update={"status": "running", "started_at": _now()})
                await self._ledger.note_or_hold(self.session.session_id, "job", job)
                finished = _judged(job, await self._judge(place, sample, job.job_id))
        except asyncio.CancelledError:
            finished = job.model_copy(update={"status": "cancelled", "completed_at": _now()})
        finally:
            await self._ledger.note_or_hold(self.session.session_id, "job", finished)
            self._last = {finished.job_id: finished}
            del self._jobs[job.job_id]
            self._asked_for.discard(job.job_id)
            self._look_at_place()
            if not self._jobs:
                self._expire()

    async def _judge(self, place: Executor, sample: Sample, job_id: str) -> VerificationResult:
        folder = temp_dirs.new_folder("verification")
        try:
            prepared = self._opened.prepared if self._opened is not None else None
            result = await verify(sample, place, keep=folder, prepared=prepared)
            result.evidence = [self._worded(line) for line in result.evidence]
            for file in sorted(folder.iterdir()):
                # The answer has the streams of the last run, as far as they go.
                text = await asyncio.to_thread(file.read_bytes)
                if result.attempts > 1 or len(text) > SHOWN_OUTPUT:
                    await self._ledger.keep_output(self.session.session_id, job_id, file.name, text)
            return result
        finally:
            await asyncio.to_thread(temp_dirs.remove, folder)

    async def job(self, job_id: str, seconds: float | None) -> Job:
        """As it stands, once it has ended or the time is up; JobNotFound when there is none."""
        running = self._jobs.get(job_id)
        if running is not None:
            await asyncio.wait({running}, timeout=seconds)
        found = self._last.get(job_id)
        if not isinstance(found, Job):
            found = await self._ledger.job(self.session.session_id, job_id)
        if found is None:
            raise JobNotFound(f"the session has no verification {job_id!r}")
        return found

    async def cancel_job(self, job_id: str) -> Job:
        """End a verification; one that has ended stays as it is."""
        running = self._jobs.get(job_id)
        if running is not None:
            running.cancel()
        return await self.job(job_id, None)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _place_in_time(self) -> Executor:
        place = self.place()
        if self.expired:
            raise SessionNotReady("the session's time is over; only a verification that had begun goes on")
        return place

    async def note(self, kind: Any, what: dict[str, Any]) -> None:
        await self._ledger.note(self.session.session_id, kind, {"at": _now().isoformat(), **what})

    def checkpoints(self, storage: StorageBackend) -> Checkpoints:
        """The moments it can go back to; what was said in it is in the storage."""
        place = self._place_in_time()
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(place, ConversationBranch(self.session.session_id, storage, lambda: None))
        return self._checkpoints

    async def note_run(self, code: str, result: ExecutionResult) -> None:
        first = code.strip().partition("\n")[0][:200]
        await self.note("run", {"code": first, "error_type": result.error_type, "duration": result.duration})
        self._look_at_place()


Ended = Callable[[LiveTask, str], None]


@lru_cache(maxsize=1)
def shell() -> str:
    """Bash where there is one: the commands of this wire are written for it."""
    return "/bin/bash" if shutil.which("/bin/bash") else "/bin/sh"


def known_id(kind: str, once: str) -> str:
    """The id of what is made for a request that may come again."""
    return f"{kind}_{once[:24]}"


def _new_id(kind: str, once: str | None) -> str:
    return known_id(kind, once) if once is not None else f"{kind}_{secrets.token_hex(12)}"


def _now() -> datetime:
    return datetime.now(UTC)


def _code_of(problem: Exception) -> str:
    """`SetupFailed` is told as `setup_failed`, and `OSError` as `os_error`."""
    name = type(problem).__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _ended(result: CommandResult, asked: RunCommand) -> dict[str, Any]:
    message = f"time was up after {asked.command_timeout:g} s" if result.timed_out else "the command ended"
    return {
        "exit_code": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "execution_time_seconds": float(result.duration),
        "success": result.success,
        "timed_out": result.timed_out,
        "status": "completed",
        "message": message,
    }


def _not_run(why: str) -> dict[str, Any]:
    nothing = {"stdout": "", "stderr": "", "execution_time_seconds": 0.0}
    return {"exit_code": NOT_RUN, "success": False, "status": "error", "message": why, **nothing}


def interrupted(what: Interaction | Job) -> Interaction | Job | None:
    """How it ends that a server was killed while it ran; None for what had ended."""
    why = "the server was stopped while it ran"
    if isinstance(what, Interaction):
        return what.model_copy(update=_not_run(why)) if what.status == "pending" else None
    if what.status not in ("pending", "starting", "running"):
        return None
    error = ErrorInfo(code="interrupted", message=why)
    return what.model_copy(update={"status": "error", "error": error, "completed_at": _now()})


def _judged(job: Job, result: VerificationResult) -> Job:
    shown = escape_surrogates(result.shown().model_dump())
    shown |= {"tool": "test_suite" if result.tool == "test_suite" else None, "verifier": result.tool}
    changes: dict[str, Any] = {
        "status": "completed",
        "completed_at": _now(),
        "result": VerificationResult(**shown),
    }
    if result.outcome == "infrastructure_failed":
        message = "\n".join(shown["evidence"]) or "the verification could not be run"
        changes |= {"status": "error", "error": ErrorInfo(code="infrastructure_failed", message=message)}
    return job.model_copy(update=changes)
