"""What goes over the line: the bodies that are asked with, and the answers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StrictInt, model_validator

from carrel.server.odd_values import refuse_odd, refuse_surrogates
from carrel.tasks.file_cache import Receipt
from carrel.tasks.verification.verdict import VerificationResult
from carrel.text import refuse_misspelled_fields

SessionStatus = Literal["creating", "ready", "error", "closed", "terminated"]
JobStatus = Literal["pending", "starting", "running", "completed", "error", "cancelled"]

NOT_RUN = -1000
"""The exit code of a command that could not be run at all."""
MOST_MINUTES = 7 * 24 * 60
LONGEST_COMMAND = 24 * 3600.0
LONGEST_TEXT = 8 * 1024 * 1024
FILES_AT_ONCE = 1000
LONGEST_PATH = 4096
ROLES = ("user", "assistant", "system", "tool")
"""Of messages."""


class Body(BaseModel):
    """What is asked with. Fields that only other versions know are let through; one that is nearly the name of one of
    these would be missed in silence."""

    @model_validator(mode="before")
    @classmethod
    def _no_slips(cls, given: Any) -> Any:
        refuse_misspelled_fields(given, cls.model_fields)
        return given


class Health(BaseModel):
    """That the server is there."""

    service: str
    status: str
    timestamp: str
    version: str


class Problem(BaseModel):
    """Every answer that is none."""

    detail: Any
    """What happened, in words; of a wrong body a list that names each field."""
    code: str | None = None
    """The kind of error, by the name of carrel's own or Python's class."""


class ErrorInfo(BaseModel):
    """Why a session or a job came to nothing."""

    code: str
    message: str


class SampleTold(BaseModel):
    """A sample as it is told to those who evaluate."""

    sample_id: str
    instance_id: str
    dataset: str
    repo: str
    language: str
    base_commit: str
    environment_setup_commit: str
    problem_statement: str
    hints_text: str
    patch: str
    test_patch: str
    non_code_patch: str
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    fail_to_fail: list[str]
    verifier: Literal["test_suite", "static_analysis", "linter", "custom"]
    version: int
    latest: bool
    version_description: str
    description: str
    created_at: datetime | None

    def without_solution(self) -> SampleTold:
        """The sample as a key with the scope `agent` may see it."""
        patches = {"patch": "", "test_patch": "", "non_code_patch": ""}
        return self.model_copy(update={**patches, "fail_to_pass": [], "pass_to_pass": [], "fail_to_fail": []})


class Samples(BaseModel):
    """One page of them."""

    samples: list[SampleTold]
    total_count: int
    page: int
    page_size: int
    has_more: bool


# --- sessions -------------------------------------------------------------------------------------------------------


Text = Annotated[str, AfterValidator(refuse_surrogates)]


def _file(path: str) -> str:
    """The path, when a file in the place can be called so."""
    refuse_surrogates(path)
    parts = path.split("/")
    if ".." in parts or parts[-1] in ("", ".") or "\0" in path or len(path.encode()) > LONGEST_PATH:
        raise ValueError(f"{path[:200]!r} is no path of a file in the workspace; write one like src/a.txt, without ..")
    return path


class NewSession(Body):
    """Of a sample, or of none: then the workspace is empty but for the files given here."""

    dataset: str = Field(default="", max_length=200)
    sample_id: str = Field(default="", max_length=200)
    ttl_minutes: int = Field(default=30, ge=1, le=MOST_MINUTES)
    version: int | None = Field(default=None, ge=1)
    """Of the sample; the latest when none is named."""
    files: dict[Annotated[str, AfterValidator(_file)], Text] = Field(default={}, max_length=FILES_AT_ONCE)
    """By path; written over what the sample has."""
    network: bool | None = None
    """For a session of no sample, where the server allows it."""


class SessionChange(Body):
    """What can be changed of one."""

    ttl_minutes: int = Field(ge=1, le=MOST_MINUTES)
    """From now on."""


class NewFork(Body):
    """Another session that goes on from this moment."""

    ttl_minutes: int | None = Field(default=None, ge=1, le=MOST_MINUTES)


class NewCheckpoint(Body):
    """This moment, to go back to."""

    label: str = Field(default="", max_length=200)


class CheckpointTold(BaseModel):
    """A moment that the session can go back to."""

    id: str
    label: str
    messages: int
    """How many were visible."""
    made_at: datetime


class CheckpointList(BaseModel):
    """Oldest first."""

    checkpoints: list[CheckpointTold]


class GoBack(Body):
    """Where to: a checkpoint's id or label, or its number of messages."""

    to: Annotated[str, Field(max_length=200)] | StrictInt


class ContainerInfo(BaseModel):
    """Kept for the wire; places here are no containers that somebody could look up."""

    container_name: str
    created_at: datetime
    expires_at: datetime
    location: str
    sample_id: str
    service_url: str
    status: str


class Session(BaseModel):
    """A session, alive or not."""

    session_id: str
    dataset: str
    sample_id: str
    status: SessionStatus
    requested_at: datetime
    expires_at: datetime
    created_at: datetime | None = None
    """When its place was ready."""
    user_id: str
    duration_seconds: float | None = None
    error: ErrorInfo | None = None
    container_info: ContainerInfo | None = None
    ttl_minutes: int = 30
    closed_at: datetime | None = None
    parent_session_id: str | None = None
    """The one it was forked from."""
    receipt: Receipt | None = None
    """What the sample's files were made from, and what of git's future was taken out."""


class Created(BaseModel):
    """A session that was asked for; with `Prefer: wait` everything else is there too."""

    session_id: str
    status: SessionStatus
    expires_at: datetime


class Sessions(BaseModel):
    """Newest first."""

    sessions: list[Session]
    total_count: int
    has_more: bool


class Closed(BaseModel):
    """A session's end."""

    message: str
    duration_seconds: float


# --- commands and code ----------------------------------------------------------------------------------------------


class NewCommand(Body):
    """A command for bash."""

    command: str = Field(max_length=LONGEST_TEXT)
    command_timeout: float = Field(default=300, gt=0, le=LONGEST_COMMAND)
    """Seconds; then it is killed with all it started, and what it wrote is kept."""
    cwd: str | None = Field(default=None, max_length=LONGEST_PATH)
    env: dict[Text, Text] = {}
    stdin: str | None = Field(default=None, max_length=LONGEST_TEXT)
    background: bool = False
    """Answer at once and let it go on, its output in a file of the place."""


class Interaction(BaseModel):
    """A command and what came of it."""

    interaction_id: str
    session_id: str
    created_at: datetime
    exit_code: int | None = None
    """None while it runs, -1000 when it could not be run at all."""
    stdout: str | None = None
    stderr: str | None = None
    execution_time_seconds: float | None = None
    success: bool | None = None
    message: str | None = None
    status: Literal["pending", "completed", "error"] = "pending"
    command: str = ""
    timed_out: bool = False
    pid: int | None = None
    """Of one in the background."""
    output: str | None = None
    """The file in the place that one in the background writes to; beside it `.exit` has its exit code at the end."""


class Begun(BaseModel):
    """A command that was asked for; with `Prefer: wait`, once it has ended, all of the interaction is there."""

    interaction_id: str
    status: Literal["pending", "completed", "error"]
    exit_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None
    execution_time_seconds: float | None = None
    success: bool | None = None
    message: str | None = None
    session_id: str | None = None
    created_at: datetime | None = None
    command: str | None = None
    timed_out: bool = False
    pid: int | None = None
    output: str | None = None


class Replacement(Body):
    """A text that stands in a file once, and what shall stand there."""

    file_path: str = Field(min_length=1, max_length=LONGEST_PATH)
    str_to_replace: str = Field(max_length=LONGEST_TEXT)
    str_to_insert: str = Field(max_length=LONGEST_TEXT)


class Replaced(BaseModel):
    """Whether it was replaced, and if not, why."""

    success: bool
    message: str


class NewRun(Body):
    """Python to be run; its variables stay."""

    code: str = Field(max_length=LONGEST_TEXT)
    timeout: float = Field(default=60, gt=0, le=LONGEST_COMMAND)


class RunUsageTold(BaseModel):
    """What a run took."""

    cpu_seconds: float
    max_rss_bytes: int


class RunTold(BaseModel):
    """What came of a run."""

    value: Any = None
    """Of the last expression where JSON has it as it is, else None."""
    packed: Any = None
    """The same as tagged data, exact for every kind of data; see docs/worker-protocol.md."""
    value_repr: str
    stdout: str
    stderr: str
    error: str | None
    error_type: str | None
    is_ok: bool
    duration: float
    state: Literal["kept", "restored", "lost"]
    state_reason: str
    display: list[dict[str, Any]]
    usage: RunUsageTold


class Interrupted(BaseModel):
    """Whether something was running."""

    interrupted: bool


# --- verification ---------------------------------------------------------------------------------------------------


class Result(VerificationResult):
    """The verdict; `tool` is what the wire knows, `verifier` what it was."""

    tool: Literal["test_suite"] | None = None  # type: ignore[assignment]
    verifier: str = "test_suite"


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
"""Fields of a result. A new field is hidden until it is named here."""


class Job(BaseModel):
    """A verification."""

    job_id: str
    session_id: str
    sample_id: str
    status: JobStatus
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    error: ErrorInfo | None = None
    result: Result | None = None
    container_info: ContainerInfo | None = None

    def without_tests(self) -> Job:
        """The job as a key with the scope `agent` may see it: nothing that names or shows a test."""
        result = Result(**self.result.model_dump(include=_SHOWN_TO_AGENTS)) if self.result is not None else None
        error = self.error
        if error is not None and error.code == "infrastructure_failed":
            error = ErrorInfo(code=error.code, message="the verification could not be run")
        return self.model_copy(update={"result": result, "error": error})


class JobBegun(BaseModel):
    """A verification that was asked for."""

    job_id: str
    status: JobStatus
    started_at: datetime


# --- files, differences, what was said ------------------------------------------------------------------------------


class EntryTold(BaseModel):
    """One name in a folder."""

    name: str
    kind: Literal["file", "folder", "link"]
    size: int
    percent_encoded: bool = False
    """Whether the name is not UTF-8, and stands here as in an address."""


class FolderTold(BaseModel):
    """What is in a folder, by name."""

    entries: list[EntryTold]


class Written(BaseModel):
    """A file that was put."""

    path: str
    size: int


class ChangeTold(BaseModel):
    """A file that is not as it was at the start."""

    path: str
    kind: Literal["added", "modified", "deleted"]
    size: int
    percent_encoded: bool = False
    """Whether the path is not UTF-8, and stands here as in an address."""


class Difference(BaseModel):
    """All that was changed."""

    diff: str
    changes: list[ChangeTold]


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """The message, when it is one; a rewind and a summary are lines of the log too, and are not said."""
    if given.get("role") not in ROLES:
        raise ValueError(f"role is one of {', '.join(ROLES)}, not {given.get('role')!r}")
    content, meta = given.get("content"), given.get("meta")
    blocks = isinstance(content, list) and all(isinstance(b, dict) and isinstance(b.get("type"), str) for b in content)
    if not (blocks or isinstance(content, str)):
        raise ValueError("content is a text, or a list of blocks that each have a type")
    if meta is not None and not isinstance(meta, dict):
        raise ValueError("meta is an object")
    for name, part in given.items():
        refuse_odd(part, name)
    return given


class NewMessages(Body):
    """What was said, to be kept with the session."""

    messages: list[Annotated[dict[str, Any], AfterValidator(_message)]] = Field(min_length=1, max_length=1000)


class Said(BaseModel):
    """How many messages there are now."""

    count: int


class ConversationTold(BaseModel):
    """What was said so far."""

    session: dict[str, Any] | None
    messages: list[dict[str, Any]]
