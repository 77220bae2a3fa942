"""The results of a run: a JSON line for each sample that is done, appended as it comes, read again to go on."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from pydantic import BaseModel, ValidationError

from carrel.errors import ResultsRefused
from carrel.tasks.verdict import VerificationResult

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
