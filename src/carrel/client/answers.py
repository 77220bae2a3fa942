"""What a server answers, typed; a field that a newer server adds is kept, not refused."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, model_validator

from carrel.guest.worker import values

SessionStatus = Literal["creating", "ready", "error", "closed", "terminated"]
JobStatus = Literal["pending", "starting", "running", "completed", "error", "cancelled"]
COULD_NOT_RUN = -1000
"""The exit code of a command that could not be run at all."""


class Answer(BaseModel):
    """What all answers share."""

    model_config = ConfigDict(extra="allow")


class Health(Answer):
    """Whether the server is there."""

    service: str
    status: str
    timestamp: str
    version: str


class Fault(Answer):
    """Why a session or a job came to nothing."""

    code: str
    message: str


class DatasetInfo(Answer):
    """A dataset that the server has."""

    name: str
    sample_count: int
    created_at: datetime | None = None
    description: str | None = None


class SampleInfo(Answer):
    """A task: what is to be done, and how it will be judged."""

    sample_id: str
    instance_id: str = ""
    dataset: str | None = None
    repo: str = ""
    language: str = ""
    base_commit: str = ""
    environment_setup_commit: str = ""
    problem_statement: str = ""
    hints_text: str = ""
    patch: str = ""
    test_patch: str = ""
    non_code_patch: str = ""
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    fail_to_fail: list[str] = []
    verifier: Literal["test_suite", "static_analysis", "linter", "custom"] = "test_suite"
    version: int | None = None
    latest: bool | None = None
    version_description: str | None = None
    description: str | None = None
    created_at: datetime | None = None


class SampleList(Answer):
    """A page of samples."""

    samples: list[SampleInfo]
    total_count: int
    page: int
    page_size: int
    has_more: bool


class SessionRecord(Answer):
    """A session as the server last told of it."""

    session_id: str
    status: SessionStatus
    dataset: str = ""
    """Empty for a session without a sample, like `sample_id`."""
    sample_id: str = ""
    requested_at: datetime | None = None
    created_at: datetime | None = None
    """When its place was ready."""
    expires_at: datetime
    user_id: str = ""
    duration_seconds: float | None = None
    error: Fault | None = None
    container_info: dict[str, Any] | None = None


S = TypeVar("S", bound=SessionRecord)


class SessionList(Answer, Generic[S]):
    """The sessions of the key's owner."""

    sessions: list[S]
    total_count: int
    has_more: bool


class Checkpoint(Answer):
    """A moment that a session can go back to."""

    id: str
    label: str = ""
    messages: int = 0
    """How many were visible."""
    made_at: datetime


class CheckpointList(Answer):
    """Oldest first."""

    checkpoints: list[Checkpoint]


class Closed(Answer):
    """What is said when a session has ended."""

    message: str
    duration_seconds: float


class Interaction(Answer):
    """A command, and what came of it."""

    interaction_id: str
    session_id: str
    created_at: datetime
    exit_code: int | None = None
    """None while it runs."""
    stdout: str | None = None
    stderr: str | None = None
    execution_time_seconds: float | None = None
    success: bool | None = None
    message: str | None = None
    timed_out: bool = False
    pid: int | None = None
    """Of one in the background, as the session sees it."""
    output: str | None = None
    """The session's file that one in the background writes to; beside it, `.exit` has its exit code at the end."""

    @property
    def is_finished(self) -> bool:
        return self.exit_code is not None


class Replaced(Answer):
    """Whether a text was found once and replaced."""

    success: bool
    message: str


class TestReport(Answer):
    """One test in a verdict."""

    __test__ = False

    name: str
    message: str | None = None

    def __getitem__(self, field: str) -> Any:
        """Programs written for the wire know tests as dicts: `failure["name"]`."""
        return self.model_dump()[field]


class Verdict(Answer):
    """What verification found."""

    tool: str | None = None
    is_success: bool
    passed: int
    failed: int
    skipped: int
    total: int
    execution_duration_seconds: float
    passes: list[TestReport] | None = None
    failures: list[TestReport] | None = None
    skips: list[TestReport] | None = None
    stdout: str | None = None
    stderr: str | None = None
    outcome: str | None = None
    """solved, flaky, partly, not_solved, tests_did_not_run or infrastructure_failed."""
    score: float | None = None
    integrity: str | None = None
    """clean, suspicious or unknown; `evidence` has the reasons."""
    suite_ran: bool | None = None
    evidence: list[str] | None = None


class Job(Answer):
    """A verification."""

    job_id: str
    session_id: str
    sample_id: str = ""
    status: JobStatus
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    error: Fault | None = None
    result: Verdict | None = None

    @property
    def is_finished(self) -> bool:
        return self.status in ("completed", "error", "cancelled")


class OutputPiece(Answer):
    """A piece of what running code or a command wrote."""

    stream: Literal["stdout", "stderr"]
    text: str


class Used(Answer):
    """What one run took."""

    cpu_seconds: float = 0.0
    max_rss_bytes: int = 0


class RunResult(Answer):
    """What came of one run of code."""

    value: Any = None
    """Of the last expression, as `Session.run` gives it: what is no data arrives as its repr."""
    value_repr: str = ""
    """The same as Python writes it."""
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    error_type: str | None = None
    duration: float = 0.0
    state: Literal["kept", "restored", "lost"] = "kept"
    state_reason: str = ""
    display: list[dict[str, Any]] = []
    usage: Used = Used()

    @model_validator(mode="before")
    @classmethod
    def _unpacked(cls, told: Any) -> Any:
        """The value from its exact form, in which the server sends it beside plain JSON."""
        if not isinstance(told, dict) or "packed" not in told:
            return told
        rest = {name: field for name, field in told.items() if name != "packed"}
        shown = [{kind: values.decode(part) for kind, part in bundle.items()} for bundle in told.get("display") or []]
        return {**rest, "value": values.decode(told["packed"]), "display": shown}

    @property
    def is_ok(self) -> bool:
        return self.error is None


def _file_name(data: Any) -> Any:
    """Bytes that are not UTF-8 are percent-encoded on the wire; here they are as Python has them in names of files."""
    if isinstance(data, dict) and data.get("percent_encoded"):
        return {
            field: unquote(value, errors="surrogateescape") if field in ("name", "path") else value
            for field, value in data.items()
            if field != "percent_encoded"
        }
    return data


class FileInfo(Answer):
    """One name in a folder of the session."""

    name: str
    kind: Literal["file", "folder", "link"]
    size: int = 0

    _decoded = model_validator(mode="before")(_file_name)


class Folder(Answer):
    """What is in a folder, by name."""

    entries: list[FileInfo]


class Said(Answer):
    """How many messages there are now."""

    count: int


class ChangedFile(Answer):
    """A file that is not as it was at the start."""

    path: str
    kind: Literal["added", "modified", "deleted"]
    size: int = 0

    _decoded = model_validator(mode="before")(_file_name)


class Difference(Answer):
    """What was changed since the start."""

    diff: str
    changes: list[ChangedFile] = []


class SessionEvent(Answer):
    """Something that happened in a session."""

    seq: int
    kind: str
    data: dict[str, Any] = {}
