"""Run an agent over many samples and record one result per attempt."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ValidationError

from carrel.errors import CarrelError, ConfigurationError, ResultsRefused, WorkerLost
from carrel.execution.config import Mount, is_seconds
from carrel.execution.executor import CommandResult
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.tasks.environment import PreparedSample, open_executor, prepare_sample
from carrel.tasks.sample import Sample
from carrel.tasks.stats import Summary, summary
from carrel.tasks.verification.verifier import failed, verify
from carrel.wire.verification import VerificationResult

Item = TypeVar("Item")
Result = TypeVar("Result")


async def in_parallel(work: Callable[[Item], Awaitable[Result]], items: Sequence[Item], workers: int) -> list[Result]:
    """The results in the order of the items; when one raises or the caller is cancelled, the others end too."""
    turn = asyncio.Semaphore(workers)

    async def one(item: Item) -> Result:
        async with turn:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as problems:
        raise problems.exceptions[0] from None
    return [task.result() for task in tasks]


AgentStatus = Literal["worked", "changed_nothing", "could_not_run"]


class TaskResult(BaseModel):
    """One sample of a run."""

    dataset: str
    sample_id: str
    version: int = 1
    agent: str
    """The agent's command line."""
    started_at: str
    seconds: float = 0.0
    """From the opening of the place to the verdict."""
    agent_exit_code: int | None = None
    agent_timed_out: bool = False
    agent_status: AgentStatus = "worked"
    """`could_not_run`: its command ended with 126 or 127, and the sample is not solved. `changed_nothing`: it left the
    workspace as it was. Neither is a wrong answer."""
    agent_seconds: float = 0.0
    agent_stdout: str = ""
    agent_stderr: str = ""
    patch: str = ""
    """What the agent changed, as a diff; binary files are only named."""
    result: VerificationResult

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.dataset, self.sample_id, self.version)


class ResultsFile:
    """Held by one run at a time. Use as a context manager."""

    def __init__(self, path: Path, agent: str, *, resume: bool) -> None:
        self.path = path
        self._agent = agent
        self._resume = resume
        self._file = -1
        self.earlier: dict[tuple[str, str, int], TaskResult] = {}
        """What is in it from before, the newest of each sample."""

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._begin()
        except BaseException:
            os.close(self._file)
            raise
        return self

    def _begin(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsRefused(f"another run is writing to {self.path}; give this one another --output") from None
        text = self.path.read_bytes()
        if text and not self._resume:
            raise ResultsRefused(f"{self.path} has results already; --resume goes on, or give another --output")
        whole, _, torn = text.rpartition(b"\n")
        if torn:
            # A line that was cut by a crash; what it would have said is done again.
            self.path.with_name(f"{self.path.name}.torn").write_bytes(torn)
            os.ftruncate(self._file, len(text) - len(torn))
        for number, line in enumerate(whole.splitlines(), 1):
            if line.strip():
                self._take(number, line)

    def _take(self, number: int, line: bytes) -> None:
        try:
            told = TaskResult.model_validate_json(line)
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ResultsRefused(f"{self.path}, line {number}: no result of a run: {where} {first['msg']}") from None
        if told.agent != self._agent:
            raise ResultsRefused(
                f"{self.path}, line {number}: of another agent ({told.agent}); give this run another --output"
            )
        self.earlier[told.key] = told

    def add(self, result: TaskResult) -> None:
        """On the disk when this returns."""
        line = result.model_dump_json().encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError:
            os.ftruncate(self._file, size)  # or the next one would stand in the same line
            raise
        os.fsync(self._file)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


SHOWN = 32 * 1024
"""Characters of the agent's output that a result holds, from its end; `keep` has all of it."""
LARGEST_PATCH = 4 * 1024 * 1024
LONGEST_VARIABLE = 100_000
"""Bytes of a problem statement that fit into an environment variable."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A command line that works on a sample."""

    command: str
    """Run by a shell in the place; the problem is in the file `$CARREL_PROBLEM_FILE` and in `$CARREL_PROBLEM`."""
    timeout: float | None = 3600.0
    """Seconds it may work on one sample; None is no limit. What it has done by then is judged."""
    network: bool | None = None
    """Whether its place has the network; None is as the sample says. Judging is always as the sample says."""
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()

    def __post_init__(self) -> None:
        if self.timeout is not None and not is_seconds(self.timeout):
            raise ConfigurationError(
                f"the agent's timeout is {self.timeout!r}; it is a number of seconds from 0 on, or None for no limit"
            )


async def run_samples(
    samples: Sequence[Sample],
    agent: Agent,
    output: Path,
    *,
    workers: int = 1,
    resume: bool = False,
    cache: Path | None = None,
    keep: Path | None = None,
    done: Callable[[TaskResult], None] = lambda result: None,
) -> Summary:
    """Work on all of them; each result is in `output` before `done` hears of it.

    With `resume` those that have a verdict there are left out; those whose infrastructure failed, or on which the agent
    could not be run, are tried again.
    ResultsRefused when the file cannot be gone on with.
    """
    with ResultsFile(output, agent.command, resume=resume) as results:
        found = dict(results.earlier)
        waiting = [sample for sample in samples if not _judged(found, sample)]

        async def work() -> None:
            while waiting:
                result = await run_sample(waiting.pop(0), agent, cache=cache, keep=keep)
                results.add(result)
                found[result.key] = result
                done(result)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max(1, min(workers, len(waiting)))):
                    group.create_task(work())
        except ExceptionGroup as problems:
            # The disk is full, say; the others were stopped, and what they had finished is in the file.
            raise problems.exceptions[0] from None
    of_these = [found[_key(sample)] for sample in samples if _key(sample) in found]
    suspicious = sum(each.result.is_success and each.result.integrity == "suspicious" for each in of_these)
    total = summary([(each.result.outcome, each.result.score, each.seconds) for each in of_these], suspicious)
    statuses = [each.agent_status for each in of_these]
    total.changed_nothing, total.could_not_run = statuses.count("changed_nothing"), statuses.count("could_not_run")
    return total


def _key(sample: Sample) -> tuple[str, str, int]:
    return (sample.dataset, sample.sample_id, sample.version)


def _judged(found: Mapping[tuple[str, str, int], TaskResult], sample: Sample) -> bool:
    earlier = found.get(_key(sample))
    if earlier is None or earlier.agent_status == "could_not_run":
        return False
    return earlier.result.outcome != "infrastructure_failed"


async def run_sample(
    sample: Sample, agent: Agent, *, cache: Path | None = None, keep: Path | None = None
) -> TaskResult:
    """A place, the agent in it, a verdict; never raises for what any of them did."""
    began = time.perf_counter()
    told = TaskResult(
        dataset=sample.dataset,
        sample_id=sample.sample_id,
        version=sample.version,
        agent=agent.command,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        result=failed(sample, CarrelError("nothing was done")),
    )
    folder = keep / sample.dataset / sample.sample_id if keep is not None else None
    try:
        prepared = await prepare_sample(sample, cache)
        began = time.perf_counter()
        place = await open_executor(prepared, env=agent.env, network=agent.network, mounts=agent.mounts)
    except (CarrelError, OSError) as problem:
        told.result = failed(sample, problem)
    else:
        try:
            await _work_and_judge(prepared, place, agent, told, folder)
        finally:
            await place.close()
    told.seconds = time.perf_counter() - began
    return told


async def _work_and_judge(
    prepared: PreparedSample, place: SubprocessExecutor, agent: Agent, told: TaskResult, folder: Path | None
) -> None:
    sample = prepared.sample
    try:
        ended = await _run_agent(place, agent, sample)
        patch = await place.diff()
    except WorkerLost as problem:
        # Its own doing, mostly: a place whose Python was ended has its files still.
        ended, patch = CommandResult(stderr=str(problem), exit_code=-1), ""
    except (CarrelError, OSError) as problem:
        told.result = failed(sample, problem)
        return
    told.agent_exit_code, told.agent_timed_out, told.agent_seconds = ended.exit_code, ended.timed_out, ended.duration
    told.agent_stdout, told.agent_stderr = ended.stdout[-SHOWN:], ended.stderr[-SHOWN:]
    told.patch = patch if len(patch) <= LARGEST_PATCH else ""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("agent-stdout", ended.stdout), ("agent-stderr", ended.stderr), ("patch", patch)):
            (folder / f"{name}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
    told.result = (await verify(sample, place, keep=folder, prepared=prepared)).shown()
    told.agent_status = _status(told)


def _status(told: TaskResult) -> AgentStatus:
    """A shell ends with 126 or 127 when it could not run a command."""
    result = told.result
    if told.agent_exit_code in (126, 127) and not result.is_success:
        return "could_not_run"
    changed = told.patch or result.carried_over or result.left_out
    return "worked" if changed or result.outcome == "infrastructure_failed" else "changed_nothing"


async def _run_agent(place: SubprocessExecutor, agent: Agent, sample: Sample) -> CommandResult:
    home = (await place.exec('printf %s "$HOME"', timeout=60)).stdout
    file = f"{home}/problem.md"
    await place.write_file(file, sample.problem_statement)
    statement = sample.problem_statement.encode()[:LONGEST_VARIABLE].decode("utf-8", "ignore").replace("\0", "")
    env = {
        "CARREL_PROBLEM_FILE": file,
        "CARREL_PROBLEM": statement,
        "CARREL_SAMPLE_ID": sample.sample_id,
        "CARREL_DATASET": sample.dataset,
    }
    return await place.exec(agent.command, timeout=agent.timeout, env=env)
