"""The folder of a run: what was run, and one result per attempt."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from pydantic import BaseModel, ValidationError

from carrel.errors import ResultsRefused
from carrel.tasks.stats import Attempt, Summary, summarize
from carrel.wire.verification import Integrity, Outcome, VerificationResult

AgentStatus = Literal["worked", "changed_nothing", "could_not_run"]

RUN_FILE, RESULTS_FILE, AGENTS_FOLDER = "run.json", "results.jsonl", "agents"


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
