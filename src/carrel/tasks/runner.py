"""Run an agent over many samples, and record one result per attempt in the folder of the run."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from carrel.errors import CarrelError, ConfigurationError, EnvironmentFailed, ResultsRefused, WorkerLost
from carrel.execution.config import Mount, is_seconds
from carrel.execution.executor import CommandResult
from carrel.tasks.environment import PreparedSample, TaskExecutor, open_executor, prepare_sample
from carrel.tasks.run_folder import RUN_FILE, AgentRecord, AgentStatus, RunFolder, RunInfo, TaskResult, summary_of
from carrel.tasks.sample import Sample
from carrel.tasks.stats import Summary
from carrel.tasks.verification.verifier import infrastructure_failure, verify
from carrel.wire.verification import Job, VerificationResult

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_VARIABLE = 100_000
"""Bytes of a problem statement that fit into an environment variable."""
_PIECE = 20_000
"""Bytes of a file that one shell command can carry, each as up to four characters."""
_STATEMENT, _BEGINNING, _TOKENS = "problem.md", "problem-beginning.md", "carrel-tokens"
_NOT_FOUND_CODES = (126, 127)
"""Exit codes of a shell that could not run its command."""


async def in_parallel(work: Callable[[Item], Awaitable[Result]], items: Sequence[Item], workers: int) -> list[Result]:
    """The results in the order of the items; when one raises or the caller is cancelled, the others are cancelled."""
    slots = asyncio.Semaphore(workers)

    async def one(item: Item) -> Result:
        async with slots:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as problems:
        raise problems.exceptions[0] from None
    return [task.result() for task in tasks]


# --- sessions -------------------------------------------------------------------------------------------------------


class CommandOutcome(Protocol):
    """The result of a command, of a local or a remote session."""

    @property
    def exit_code(self) -> int | None: ...
    @property
    def stdout(self) -> str | None: ...
    @property
    def stderr(self) -> str | None: ...


class TaskSession(Protocol):
    """A session on a sample: `carrel.Session` and the client's `AsyncRemoteSession` have these methods."""

    @property
    def id(self) -> str: ...
    async def execute_command(self, command: str, *, timeout: float | None = ...) -> CommandOutcome: ...
    async def diff(self) -> str: ...
    async def verify(self) -> VerificationResult | Job: ...
    async def close(self) -> object: ...


OpenSession = Callable[[Sample], Awaitable[TaskSession]]


class LocalTaskSession:
    """A session on this machine that has an executor and nothing else: no conversation, no tools."""

    def __init__(self, prepared: PreparedSample, executor: TaskExecutor) -> None:
        self.id = uuid4().hex
        self._prepared = prepared
        self._executor = executor

    async def execute_command(self, command: str, *, timeout: float | None = 300) -> CommandResult:
        return await self._executor.exec(command, timeout=timeout)

    async def diff(self) -> str:
        return await self._executor.diff()

    async def verify(self) -> VerificationResult:
        return await verify(self._prepared.sample, self._executor, prepared=self._prepared)

    async def close(self) -> None:
        await self._executor.close()


def local_sessions(agent: Agent, cache: Path | None = None) -> OpenSession:
    """Sessions on this machine, with the agent's variables, mounts and network."""

    async def open_session(sample: Sample) -> LocalTaskSession:
        prepared = await prepare_sample(sample, cache)
        executor = await open_executor(prepared, env=agent.env, network=agent.network, mounts=agent.mounts)
        return LocalTaskSession(prepared, executor)

    return open_session


# --- agents ---------------------------------------------------------------------------------------------------------


@dataclass
class AgentOutcome:
    """What an agent left, apart from the files in the workspace."""

    exit_code: int | None = None
    timed_out: bool = False
    stdout: str = ""
    stderr: str = ""
    tokens: int | None = None


class Solver(Protocol):
    """An agent: `Agent` for a command line, or any object with these two."""

    @property
    def command(self) -> str:
        """A line that identifies the agent in the results."""

    async def solve(self, session: TaskSession, sample: Sample) -> AgentOutcome: ...


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A command line that works on a sample, run in a session by a shell.

    It finds the problem in the file `$CARREL_PROBLEM_FILE` and in `$CARREL_PROBLEM`, and the names of the sample in
    `$CARREL_SAMPLE_ID` and `$CARREL_DATASET`. It may write the number of tokens it used to `$CARREL_TOKENS_FILE`."""

    command: str
    timeout: float | None = 3600.0
    """Seconds it may work on one sample; None is no limit. What it has done by then is judged. A sample's own
    `agent_timeout` is used in its place."""
    network: bool | None = None
    """Whether its session has the network; None is as the sample says. Judging is always as the sample says."""
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()

    def __post_init__(self) -> None:
        if self.timeout is not None and not is_seconds(self.timeout):
            raise ConfigurationError(
                f"the agent's timeout is {self.timeout!r}; it is a number of seconds from 0 on, or None for no limit"
            )

    async def solve(self, session: TaskSession, sample: Sample) -> AgentOutcome:
        statement = sample.problem_statement.encode()
        seconds = self.timeout if sample.agent_timeout is None else sample.agent_timeout
        await _write_file(session, _STATEMENT, statement)
        variable = statement[:MAX_VARIABLE].decode("utf-8", "ignore").replace("\0", "")
        await _write_file(session, _BEGINNING, variable.encode())
        began = time.monotonic()
        done = await session.execute_command(
            f"export CARREL_SAMPLE_ID={shlex.quote(sample.sample_id)} CARREL_DATASET={shlex.quote(sample.dataset)}\n"
            f'export CARREL_PROBLEM_FILE="$HOME/{_STATEMENT}" CARREL_PROBLEM="$(cat "$HOME/{_BEGINNING}")"\n'
            f'export CARREL_TOKENS_FILE="$HOME/{_TOKENS}"\nrm -f "$HOME/{_BEGINNING}"\n{self.command}',
            timeout=seconds,
        )
        limit = seconds if seconds is not None else float("inf")
        timed_out = done.exit_code == 124 and time.monotonic() - began >= limit
        return AgentOutcome(done.exit_code, timed_out, done.stdout or "", done.stderr or "", await _tokens(session))


async def _write_file(session: TaskSession, name: str, content: bytes) -> None:
    """Write to the home folder by the shell alone, which local and remote sessions have, also in any image."""
    redirect = ">"
    for start in range(0, max(len(content), 1), _PIECE):
        piece = "".join(map(_for_printf, content[start : start + _PIECE]))
        done = await session.execute_command(f"printf '{piece}' {redirect} \"$HOME/{name}\"", timeout=60)
        if done.exit_code:
            raise CarrelError(
                f"the problem statement could not be written to the session: {(done.stderr or '').strip()[-500:]}"
            )
        redirect = ">>"


def _for_printf(byte: int) -> str:
    return chr(byte) if (chr(byte).isascii() and chr(byte).isalnum()) or byte in b" .,_" else f"\\{byte:03o}"


async def _tokens(session: TaskSession) -> int | None:
    try:
        done = await session.execute_command(f'cat "$HOME/{_TOKENS}" 2> /dev/null', timeout=60)
    except CarrelError:
        return None
    written = done.stdout or ""
    return int(written) if re.fullmatch(r"\s*\d{1,15}\s*", written) else None


# --- running --------------------------------------------------------------------------------------------------------


async def run_samples(
    samples: Sequence[Sample],
    agent: Solver,
    open_session: OpenSession,
    folder: Path,
    *,
    attempts: int = 1,
    workers: int = 1,
    resume: bool = False,
    on_result: Callable[[TaskResult], None] = lambda result: None,
) -> Summary:
    """Let the agent make `attempts` attempts at each sample, in sessions that `open_session` opens.

    Each result is in the folder before `on_result` is called with it. With `resume` attempts that have a verdict are
    not made again; those whose infrastructure failed, or in which the agent could not be run, are.
    ResultsRefused when the folder belongs to another run or another process writes to it.
    """
    run = RunFolder(folder)
    info = _run_info(run, samples, agent, attempts, resume=resume)
    with run:
        run.write_info(info)
        found = dict(run.earlier)
        planned = [(sample, number) for number in range(1, attempts + 1) for sample in samples]
        keys = [(sample.dataset, sample.sample_id, sample.version, number) for sample, number in planned]
        waiting = [each for each, key in zip(planned, keys, strict=True) if key not in found or not found[key].is_final]

        async def work(attempt: tuple[Sample, int]) -> None:
            result = await _make_attempt(*attempt, agent, open_session, run)
            run.add(result)
            found[result.key] = result
            on_result(result)

        await in_parallel(work, waiting, max(1, workers))
        total = summary_of([found[key] for key in keys], attempts)
        run.write_info(info.model_copy(update={"finished_at": _now(), "summary": total}))
    return total


def _run_info(run: RunFolder, samples: Sequence[Sample], agent: Solver, attempts: int, *, resume: bool) -> RunInfo:
    """What this run is; ResultsRefused when the folder has another one."""
    names = sorted({sample.dataset for sample in samples})
    info = RunInfo(
        dataset=", ".join(names),
        agent=agent.command,
        attempts=attempts,
        samples=[sample.sample_id for sample in samples],
        started_at=_now(),
    )
    if not (run.path / RUN_FILE).exists() and not run.results_file.exists():
        return info
    if not resume:
        raise ResultsRefused(f"{run.path} has results already; continue them with --resume, or use another --output")
    earlier = run.read_info()
    if earlier.agent != agent.command:
        raise ResultsRefused(f"{run.path} is a run of another agent ({earlier.agent}); use another --output")
    return info.model_copy(update={"started_at": earlier.started_at})


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


async def _make_attempt(
    sample: Sample, number: int, agent: Solver, open_session: OpenSession, run: RunFolder
) -> TaskResult:
    """A session, the agent in it, a verdict; never raises for what any of them did."""
    result = TaskResult(
        dataset=sample.dataset,
        sample_id=sample.sample_id,
        version=sample.version,
        attempt=number,
        started_at=_now(),
        verdict=VerificationResult(),
    )
    began = time.perf_counter()
    try:
        session = await open_session(sample)
    except (CarrelError, OSError) as problem:
        result.judge(infrastructure_failure(sample, problem))
    else:
        began, result.session_id = time.perf_counter(), session.id
        try:
            await _solve_and_judge(session, sample, agent, result, run.agent_folder(result))
        finally:
            await session.close()
    result.seconds = time.perf_counter() - began
    return result


def _verdict_of(verified: VerificationResult | Job) -> VerificationResult:
    """Return the verdict of a local session, or the result of a remote session's job."""
    if isinstance(verified, VerificationResult):
        return verified
    if verified.result is None:
        reason = verified.error.message if verified.error else f"the verification is {verified.status}"
        raise EnvironmentFailed(reason)
    return verified.result


async def _solve_and_judge(
    session: TaskSession, sample: Sample, agent: Solver, result: TaskResult, folder: Path
) -> None:
    began = time.perf_counter()
    try:
        ended = await agent.solve(session, sample)
    except WorkerLost as problem:
        # The agent ended the process it ran in; the files are still there and are judged.
        ended = AgentOutcome(exit_code=-1, stderr=str(problem))
    except (CarrelError, OSError) as problem:
        result.judge(infrastructure_failure(sample, problem))
        return
    result.agent = AgentRecord(
        exit_code=ended.exit_code, timed_out=ended.timed_out, seconds=time.perf_counter() - began
    )
    result.tokens = ended.tokens
    patch = ""
    try:
        with suppress(WorkerLost):  # The process has ended; what is in the workspace is judged all the same.
            patch = await session.diff()
        verdict = _verdict_of(await session.verify())
    except (CarrelError, OSError) as problem:
        verdict = infrastructure_failure(sample, problem)
    result.judge(verdict)
    result.agent.status = _status(ended, patch, verdict)
    if result.agent.status == "could_not_run":
        result.agent.message = "".join((ended.stderr or ended.stdout).strip().splitlines()[-1:])[:500]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("stdout.txt", ended.stdout), ("stderr.txt", ended.stderr), ("patch.diff", patch)):
        (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    (folder / "verdict.json").write_text(json.dumps(verdict.model_dump(mode="json")), encoding="utf-8")


def _status(ended: AgentOutcome, patch: str, verdict: VerificationResult) -> AgentStatus:
    if ended.exit_code in _NOT_FOUND_CODES and not verdict.is_success:
        return "could_not_run"
    changed: Any = patch or verdict.carried_over or verdict.left_out
    return "worked" if changed or verdict.outcome == "infrastructure_failed" else "changed_nothing"
