"""Many samples, one agent: for each a place, the agent's command in it, and a verdict; several at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from carrel.errors import CarrelError, ConfigurationError, WorkerLost
from carrel.execution.config import Mount, is_seconds
from carrel.execution.executor import CommandResult
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.tasks.grading import failed, verify
from carrel.tasks.pass_rate import Summary, summary
from carrel.tasks.place import Prepared, make_ready, open_place
from carrel.tasks.results_file import AgentStatus, ResultsFile, TaskResult
from carrel.tasks.sample import Sample

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
        prepared = await make_ready(sample, cache)
        began = time.perf_counter()
        place = await open_place(prepared, env=agent.env, network=agent.network, mounts=agent.mounts)
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
    prepared: Prepared, place: SubprocessExecutor, agent: Agent, told: TaskResult, folder: Path | None
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
