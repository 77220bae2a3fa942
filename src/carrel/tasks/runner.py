"""Run an agent over many samples, and record one result per attempt in the folder of the run."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from carrel.errors import CarrelError, ConfigurationError, EnvironmentFailed, ResultsRefused, WorkerLost
from carrel.execution.config import Mount, is_seconds
from carrel.execution.executor import CommandResult
from carrel.tasks.environment import PreparedSample, TaskExecutor, open_executor, prepare_sample
from carrel.tasks.sample import Sample
from carrel.tasks.stats import Attempt, Summary, summarize
from carrel.tasks.verification.verifier import infrastructure_failure, verify
from carrel.wire.verification import Integrity, Job, Outcome, VerificationResult

Item = TypeVar("Item")
Result = TypeVar("Result")
AgentStatus = Literal["worked", "changed_nothing", "could_not_run"]

RUN_FILE, RESULTS_FILE, AGENTS_FOLDER = "run.json", "results.jsonl", "agents"
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
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...


class TaskSession(Protocol):
    """A session on a sample: `carrel.Session` and the client's `AsyncRemoteSession` have these methods."""

    @property
    def id(self) -> str: ...
    async def execute_command(self, command: str, *, timeout: float | None = ...) -> CommandOutcome: ...
    async def diff(self) -> str: ...
    async def verify(self) -> VerificationResult | Job: ...
    async def close(self) -> None: ...


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


class AgentRecord(BaseModel):
    """How an agent ended on one attempt."""

    exit_code: int | None = None
    timed_out: bool = False
    seconds: float = 0.0
    status: AgentStatus = "worked"
    """`could_not_run`: its command ended with 126 or 127, and the sample is not solved. `changed_nothing`: the
    workspace is as before. Neither counts as a wrong answer of the agent."""
    message: str = ""
    """The last line that an agent wrote that could not be run."""


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
    """Seconds it may work on one sample; None is no limit. What it has done by then is judged."""
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
        await _write_file(session, _STATEMENT, statement)
        variable = statement[:MAX_VARIABLE].decode("utf-8", "ignore").replace("\0", "")
        await _write_file(session, _BEGINNING, variable.encode())
        began = time.monotonic()
        done = await session.execute_command(
            f"export CARREL_SAMPLE_ID={shlex.quote(sample.sample_id)} CARREL_DATASET={shlex.quote(sample.dataset)}\n"
            f'export CARREL_PROBLEM_FILE="$HOME/{_STATEMENT}" CARREL_PROBLEM="$(cat "$HOME/{_BEGINNING}")"\n'
            f'export CARREL_TOKENS_FILE="$HOME/{_TOKENS}"\nrm -f "$HOME/{_BEGINNING}"\n{self.command}',
            timeout=self.timeout,
        )
        limit = self.timeout if self.timeout is not None else float("inf")
        timed_out = done.exit_code == 124 and time.monotonic() - began >= limit
        return AgentOutcome(done.exit_code, timed_out, done.stdout, done.stderr, await _tokens(session))


async def _write_file(session: TaskSession, name: str, content: bytes) -> None:
    """Write to the home folder by the shell alone, which local and remote sessions have, also in any image."""
    redirect = ">"
    for start in range(0, max(len(content), 1), _PIECE):
        piece = "".join(map(_for_printf, content[start : start + _PIECE]))
        done = await session.execute_command(f"printf '{piece}' {redirect} \"$HOME/{name}\"", timeout=60)
        if done.exit_code:
            raise CarrelError(
                f"the problem statement could not be written to the session: {done.stderr.strip()[-500:]}"
            )
        redirect = ">>"


def _for_printf(byte: int) -> str:
    return chr(byte) if (chr(byte).isascii() and chr(byte).isalnum()) or byte in b" .,_" else f"\\{byte:03o}"


async def _tokens(session: TaskSession) -> int | None:
    try:
        done = await session.execute_command(f'cat "$HOME/{_TOKENS}" 2> /dev/null', timeout=60)
    except CarrelError:
        return None
    return int(done.stdout) if re.fullmatch(r"\s*\d{1,15}\s*", done.stdout) else None


# --- the folder of a run --------------------------------------------------------------------------------------------


class TaskResult(BaseModel):
    """One attempt at a sample: a line of `results.jsonl`."""

    dataset: str
    sample_id: str
    version: int = 1
    attempt: int = 1
    session_id: str = ""
    """Empty when no session could be opened."""
    outcome: Outcome = "not_solved"
    is_success: bool = False
    score: float = 0.0
    integrity: Integrity = "unknown"
    agent: AgentRecord = AgentRecord()
    tokens: int | None = None
    """What the agent reported, if it did."""
    started_at: datetime
    seconds: float = 0.0
    """From the opening of the session to the verdict."""
    verdict: VerificationResult

    def judge(self, verdict: VerificationResult) -> None:
        """Take over a verdict."""
        self.verdict = verdict.shown()
        self.outcome, self.is_success = verdict.outcome, verdict.is_success
        self.score, self.integrity = verdict.score, verdict.integrity

    @property
    def key(self) -> tuple[str, str, int, int]:
        return (self.dataset, self.sample_id, self.version, self.attempt)

    @property
    def is_final(self) -> bool:
        """Whether a resumed run keeps this result: the sample has a verdict, and the agent was run."""
        return self.outcome != "infrastructure_failed" and self.agent.status != "could_not_run"


class RunInfo(BaseModel):
    """`run.json`: what was run, and the summary of a finished run."""

    dataset: str
    agent: str
    """The agent's command line."""
    attempts: int
    """Attempts per sample."""
    samples: list[str]
    started_at: datetime
    finished_at: datetime | None = None
    summary: Summary | None = None


class RunFolder:
    """`run.json`, `results.jsonl` and `agents/<sample>-<attempt>/`; written by one process at a time.

    Use as a context manager for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = -1
        self.earlier: dict[tuple[str, str, int, int], TaskResult] = {}
        """The results of before, the newest of each attempt."""

    @property
    def results_file(self) -> Path:
        return self.path / RESULTS_FILE

    @classmethod
    def new(cls, runs: Path, dataset: str) -> RunFolder:
        """A folder `<dataset>-<UTC time>` in `runs`, which is made."""
        runs.mkdir(parents=True, exist_ok=True)
        name = f"{dataset}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
            try:
                (runs / f"{name}{suffix}").mkdir()
            except FileExistsError:
                continue
            return cls(runs / f"{name}{suffix}")
        raise ResultsRefused(f"{runs / name} exists already, with all numbered names; remove some of them")

    def read_info(self) -> RunInfo:
        """ResultsRefused when this is not the folder of a run."""
        file = self.path / RUN_FILE
        try:
            return RunInfo.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            raise ResultsRefused(f"{self.path} is not the folder of a run: it has no {RUN_FILE}") from None
        except ValidationError as problem:
            raise ResultsRefused(f"{file} is not readable: {_first_error(problem)}") from None

    def write_info(self, info: RunInfo) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        new = self.path / f"{RUN_FILE}.new"
        new.write_text(info.model_dump_json(indent=2) + "\n", encoding="utf-8")
        new.replace(self.path / RUN_FILE)

    def read_results(self) -> list[TaskResult]:
        """The newest result of each attempt; a last line that was cut off by a crash is ignored."""
        try:
            text = self.results_file.read_bytes()
        except FileNotFoundError:
            return []
        found: dict[tuple[str, str, int, int], TaskResult] = {}
        for number, line in enumerate(text.rpartition(b"\n")[0].splitlines(), 1):
            if line.strip():
                result = self._parse(number, line)
                found[result.key] = result
        return list(found.values())

    def _parse(self, number: int, line: bytes) -> TaskResult:
        try:
            return TaskResult.model_validate_json(line)
        except ValidationError as problem:
            raise ResultsRefused(
                f"{self.results_file}, line {number}: not a result of a run: {_first_error(problem)}"
            ) from None

    def agent_folder(self, result: TaskResult) -> Path:
        version = f"-v{result.version}" if result.version > 1 else ""
        return self.path / AGENTS_FOLDER / f"{result.sample_id}{version}-{result.attempt}"

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lines = os.open(self.results_file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self._cut_torn_line()
            self.earlier = {result.key: result for result in self.read_results()}
        except BaseException:
            os.close(self._lines)
            raise
        return self

    def _lock(self) -> None:
        try:
            fcntl.flock(self._lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsRefused(
                f"another process is writing to {self.path}; wait for it, or use another --output"
            ) from None

    def _cut_torn_line(self) -> None:
        """A line that was cut off by a crash is set aside; its attempt is made again."""
        text = self.results_file.read_bytes()
        torn = text.rpartition(b"\n")[2]
        if torn:
            self.results_file.with_name(f"{RESULTS_FILE}.torn").write_bytes(torn)
            os.ftruncate(self._lines, len(text) - len(torn))

    def add(self, result: TaskResult) -> None:
        """The result is on the disk when this returns."""
        line = result.model_dump_json().encode() + b"\n"
        size = os.fstat(self._lines).st_size
        try:
            while line:
                line = line[os.write(self._lines, line) :]
        except OSError:
            os.ftruncate(self._lines, size)  # The next result would be appended to this partial line.
            raise
        os.fsync(self._lines)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lines)


def _first_error(problem: ValidationError) -> str:
    first = problem.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()


def summary_of(results: Sequence[TaskResult], attempts_per_sample: int = 1) -> Summary:
    """The numbers of a run from its results."""
    total = summarize(attempts_of(results), attempts_per_sample)
    total.suspicious = sum(each.is_success and each.integrity == "suspicious" for each in results)
    statuses = [each.agent.status for each in results]
    total.changed_nothing, total.could_not_run = statuses.count("changed_nothing"), statuses.count("could_not_run")
    return total


def attempts_of(results: Sequence[TaskResult]) -> list[Attempt]:
    """The results as the statistics take them."""
    return [Attempt(each.sample_id, each.outcome, each.score, each.seconds) for each in results]


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
    try:
        try:
            patch = await session.diff()
        except WorkerLost:
            patch = ""
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
