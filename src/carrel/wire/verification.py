"""Verifications and their verdicts, and what is known of a sample's files."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict

JobStatus = Literal["pending", "starting", "running", "completed", "error", "cancelled"]
Outcome = Literal["solved", "flaky", "partly", "not_solved", "tests_did_not_run", "infrastructure_failed"]
Integrity = Literal["clean", "suspicious", "unknown"]
Standing = Literal["passed", "failed", "skipped", "missing"]
MAX_SHOWN_TESTS = 5000
"""Tests of one kind that a result lists where it is sent or written to a file; all of them are counted."""


class Answer(BaseModel):
    """An answer of the server; fields that a newer server adds are kept."""

    model_config = ConfigDict(extra="allow")


class ErrorInfo(Answer):
    """Why a session or a verification failed."""

    code: str
    message: str


def _empty_list(value: Any) -> Any:
    return [] if value is None else value


class GitReceipt(BaseModel):
    """What was done to a sample's git history. Only counts: the name of a removed branch could reveal too much."""

    base_commit: str
    commits_kept: int
    commits_removed: int
    """Commits after the base commit, and those of other branches, stashes, or reachable from nowhere."""
    objects_removed: int
    tags_kept: int
    """Tags of commits up to the base commit that are not younger than it."""
    refs_removed: int
    remotes_removed: int
    stashes_removed: int
    reflog_entries_removed: int
    nested_removed: list[str] = []
    """Repositories within the files (also submodules) whose history was removed; their files are kept."""
    moved_from: str | None = None
    """The commit that was checked out before, if it was another."""
    verified: bool = False
    """Whether every remaining object was counted, and belongs to the history of the base commit."""


class Receipt(BaseModel):
    """What a sample's files were made from, and what was removed from them."""

    source: Literal["none", "folder", "archive", "bundle"]
    digest: str
    """The digest of the source."""
    files: int
    bytes: int
    git: GitReceipt | None = None
    """None if the files have no git history."""


class TestReport(Answer):
    """One test in a result."""

    __test__ = False

    name: str
    message: str = ""

    def __getitem__(self, field: str) -> Any:
        """Return a field: programs written for this API know tests as dicts (`failure["name"]`)."""
        return self.model_dump()[field]


TestList = Annotated[list[TestReport], BeforeValidator(_empty_list)]
OutputText = Annotated[str, BeforeValidator(lambda text: "" if text is None else text)]


class VerificationResult(Answer):
    """The verdict on one sample."""

    tool: str | None = "test_suite"
    """The kind of verifier; in the HTTP API null for all but `test_suite`, see `verifier`."""
    verifier: str = "test_suite"
    is_success: bool = False
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    total: int = 0
    execution_duration_seconds: float = 0.0
    """Of the test command, all its runs together."""
    passes: TestList = []
    failures: TestList = []
    skips: TestList = []
    stdout: OutputText = ""
    stderr: OutputText = ""

    outcome: Outcome = "not_solved"
    score: float = 0.0
    """From 0 to 1: the share of `fail_to_pass` that passes, times the share of `pass_to_pass` that still passes."""
    integrity: Integrity = "unknown"
    """`clean` if the code under test left its test runner alone, `suspicious` if it may not have, with the reasons in
    `evidence`; `unknown` if no recorder could observe it."""
    suite_ran: bool = False
    """Whether the tests really ran to their end."""
    required: dict[str, Standing] = {}
    """Each test of `fail_to_pass` and `pass_to_pass`, and its result."""
    missing: list[str] = []
    """Required tests that the report does not mention."""
    flaky: list[str] = []
    """Tests that failed in one run and passed in another."""
    attempts: int = 0
    exit_code: int | None = None
    evidence: list[str] = []
    """What led to the verdict, in sentences."""
    details: Any = None
    """What a custom verifier returned as evidence."""
    carried_over: list[str] = []
    """The agent's files that were judged."""
    left_out: dict[str, str] = {}
    """The agent's files that were not judged, each with the reason."""
    overhead_seconds: float = 0.0
    """The duration of judging, without the test command."""

    def shown(self) -> Self:
        """Return a copy for sending or storing, with at most `MAX_SHOWN_TESTS` tests of each kind."""
        lists = {kind: getattr(self, kind)[:MAX_SHOWN_TESTS] for kind in ("passes", "failures", "skips")}
        return self.model_copy(update=lists)


_SHOWN_TO_AGENTS = {
    "tool",
    "verifier",
    "is_success",
    "passed",
    "failed",
    "skipped",
    "total",
    "execution_duration_seconds",
    "outcome",
    "score",
    "integrity",
    "suite_ran",
    "attempts",
    "exit_code",
    "overhead_seconds",
}
"""Fields of a result. A new field is hidden from agents until it is named here."""


class Job(Answer):
    """A verification."""

    job_id: str
    session_id: str
    sample_id: str = ""
    status: JobStatus
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    error: ErrorInfo | None = None
    result: VerificationResult | None = None
    container_info: dict[str, Any] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the verification has ended."""
        return self.status in ("completed", "error", "cancelled")

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the result; None without a result, as in the next four."""
        return self.result.outcome if self.result else None

    @property
    def is_success(self) -> bool | None:
        return self.result.is_success if self.result else None

    @property
    def score(self) -> float | None:
        return self.result.score if self.result else None

    @property
    def integrity(self) -> Integrity | None:
        return self.result.integrity if self.result else None

    @property
    def evidence(self) -> list[str] | None:
        return self.result.evidence if self.result else None

    def without_tests(self) -> Job:
        """Return the job as a key with the scope `agent` may see it: nothing that names or shows a test."""
        result = self.result and VerificationResult(**self.result.model_dump(include=_SHOWN_TO_AGENTS))
        error = self.error
        if error is not None and error.code == "infrastructure_failed":
            error = ErrorInfo(code=error.code, message="the verification could not be run")
        return self.model_copy(update={"result": result, "error": error})
