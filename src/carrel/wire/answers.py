"""The answers of the HTTP API."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from urllib.parse import unquote

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from carrel.guest.worker import values
from carrel.guest.worker.values import safe_repr
from carrel.text import escape_surrogates, url_name
from carrel.wire.verification import Answer, ErrorInfo, Receipt

SessionStatus = Literal["creating", "ready", "error", "closed", "terminated"]
ApprovalStatus = Literal["pending", "approved", "refused", "expired"]
VerifierKind = Literal["test_suite", "static_analysis", "linter", "custom"]

NOT_RUN = -1000
"""The exit code of a command that could not be run at all."""


class Health(Answer):
    """The state of the server."""

    service: str
    status: str
    """`healthy`; of a node also `draining` (takes no new sessions) or `frozen` (cannot reach its store)."""
    timestamp: str
    version: str


class NodeInfo(Answer):
    """A node of a cluster, as it describes itself at each renewal of its lease."""

    name: str
    url: str
    """Where the other machines reach it, without `/api/v1`."""
    state: Literal["ready", "draining", "frozen", "overdue"] = "ready"
    """`overdue`: its lease was not renewed in time, so it is not used any more."""
    sessions: int = 0
    """Live sessions on it."""
    free_slots: int = 0
    """How many more it takes."""
    samples: list[str] = Field(default=[])
    """`dataset/sample_id` of those for which an executor is started in advance."""
    version: str = ""
    load: float = 0.0
    """The machine's load average of the last minute, divided by its processors."""
    started_at: datetime | None = None
    renewed_seconds_ago: float | None = None


class NodeList(Answer):
    """The nodes of a cluster, by name; a server that is not part of one lists itself."""

    nodes: list[NodeInfo]


class Problem(Answer):
    """The answer to a request that failed."""

    detail: Any
    """What happened, as text; for a wrong body, a list that names each field."""
    code: str | None = None
    """The kind of error: the name of carrel's or Python's exception class."""


# --- datasets and samples -------------------------------------------------------------------------------------------


class DatasetInfo(Answer):
    """A dataset in a list."""

    name: str
    sample_count: int
    created_at: datetime | None = None
    description: str = ""


class SampleInfo(Answer):
    """A sample: the problem to solve and how a solution is verified."""

    sample_id: str
    instance_id: str = ""
    """The name of the sample in the collection that it was taken from."""
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
    fail_to_pass: list[str] = Field(default=[])
    pass_to_pass: list[str] = Field(default=[])
    fail_to_fail: list[str] = Field(default=[])
    verifier: VerifierKind = "test_suite"
    version: int | None = None
    latest: bool | None = None
    version_description: str | None = None
    description: str | None = None
    created_at: datetime | None = None

    def without_solution(self) -> SampleInfo:
        """Return the sample as a key with the scope `agent` may see it."""
        patches = {"patch": "", "test_patch": "", "non_code_patch": ""}
        return self.model_copy(update={**patches, "fail_to_pass": [], "pass_to_pass": [], "fail_to_fail": []})


class SampleList(Answer):
    """One page of samples."""

    samples: list[SampleInfo]
    total_count: int
    page: int
    page_size: int
    has_more: bool


# --- sessions -------------------------------------------------------------------------------------------------------


class SessionRecord(Answer):
    """A session as the server knows it, live or ended."""

    session_id: str
    dataset: str = ""
    """Empty for a session without a sample, like `sample_id`."""
    sample_id: str = ""
    status: SessionStatus
    lifecycle: Literal["live", "paused", "ended"] = "live"
    """A paused session has the status `closed`, or `terminated` if its node was lost; it can be resumed."""
    durable: bool = False
    """Whether it is paused when it ends."""
    requested_at: datetime | None = None
    expires_at: datetime
    created_at: datetime | None = None
    """When it became ready."""
    user_id: str = ""
    duration_seconds: float | None = None
    """From `created_at` to now, or to its end."""
    error: ErrorInfo | None = None
    """Why the status is `error` or `terminated`."""
    container_info: dict[str, Any] | None = None
    """Always null: these sessions are not containers."""
    ttl_minutes: int = 30
    closed_at: datetime | None = None
    parent_session_id: str | None = None
    """The session it was forked from."""
    node: str | None = None
    """The node of a cluster that has it."""
    receipt: Receipt | None = None
    """What the sample's files were made from, and what of git's future was removed."""

    @property
    def is_live(self) -> bool:
        """Whether it is being created or ready."""
        return self.status in ("creating", "ready")


class SessionPage(Answer):
    """One page of sessions, newest first."""

    sessions: list[SessionRecord]
    total_count: int
    has_more: bool
    next_cursor: str | None = None
    """For the next page: it continues after the last session of this one, also if new ones were created meanwhile."""


class ClosedSession(Answer):
    """The answer to closing a session."""

    message: str
    duration_seconds: float


# --- checkpoints ----------------------------------------------------------------------------------------------------


class CheckpointRecord(Answer):
    """A checkpoint of a session."""

    id: str
    label: str = ""
    messages: int = 0
    """How many messages were visible."""
    made_at: datetime


class RewoundSession(SessionRecord):
    """A session that was rewound, and the checkpoint that it is at now."""

    checkpoint: CheckpointRecord


class CheckpointList(Answer):
    """The checkpoints of a session, oldest first."""

    checkpoints: list[CheckpointRecord]


# --- commands and code ----------------------------------------------------------------------------------------------


class Interaction(Answer):
    """A command and its result."""

    interaction_id: str
    session_id: str
    created_at: datetime
    exit_code: int | None = None
    """Null while it runs, 124 after a timeout, -1000 if it could not be run to its end."""
    stdout: str | None = None
    stderr: str | None = None
    execution_time_seconds: float | None = None
    success: bool | None = None
    message: str | None = None
    """Why it could not be run to its end."""
    status: Literal["pending", "completed", "error"] = "pending"
    command: str = ""
    timed_out: bool = False
    pid: int | None = None
    """The process id of a background command, as the session sees it."""
    output: str | None = None
    """The session's file that a background command writes to; `.exit` beside it has its exit code at the end."""

    @property
    def is_finished(self) -> bool:
        """Whether the command has ended."""
        return self.exit_code is not None


class OutputPiece(Answer):
    """A piece of the output of running code or of a command."""

    stream: Literal["stdout", "stderr"]
    text: str


class ReplaceResult(Answer):
    """Whether a text was replaced, and if not, why."""

    success: bool
    message: str


class RunUsageRecord(Answer):
    """The resources that one run used."""

    cpu_seconds: float = 0.0
    max_rss_bytes: int = 0


class RunResult(Answer):
    """The result of one run of code.

    In JSON, `value` is there only where JSON has it as it is; the field `packed` has it exactly, as tagged data (see
    docs/worker-protocol.md). In Python, `value` is the value itself, as `Session.run` returns it."""

    value: Any = None
    """The value of the last expression, if JSON can hold it; see `packed` otherwise."""
    value_repr: str = ""
    """The same as Python writes it."""
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    """The message with the traceback of the user's own lines."""
    error_type: str | None = None
    """The name of the exception, such as `ZeroDivisionError`, or `Timeout` or `Crashed`."""
    is_ok: bool = True
    duration: float = 0.0
    """In seconds."""
    state: Literal["kept", "restored", "lost"] = "kept"
    """Of the variables: as the code left them, as they were before this run, or gone."""
    state_reason: str = ""
    """Why they are not `kept`."""
    display: list[dict[str, Any]] = Field(default=[])
    """Tables, plots and other rich results: objects of MIME type and content."""
    usage: RunUsageRecord = RunUsageRecord()

    @model_validator(mode="before")
    @classmethod
    def _unpack(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {"is_ok": data.get("error") is None, **data}
        if "packed" in data:
            shown = [{kind: values.decode(part) for kind, part in each.items()} for each in data.get("display") or []]
            data |= {"value": values.decode(data.pop("packed")), "display": shown}
        return data

    @model_serializer(mode="wrap", when_used="json")
    def _pack(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = write(self.model_copy(update={"value": None, "display": []}))
        packed = values.encode(self.value)
        plain = packed if _is_plain(packed) else None
        if isinstance(self.value, values.Repr) and self.value.why:
            packed = {values.TAG: "repr", "text": str(self.value), "why": self.value.why}
        display = [{kind: _pack_display(part) for kind, part in bundle.items()} for bundle in self.display]
        return {**data, "value": plain, "packed": packed, "display": display}


def repr_of(value: Any) -> str:
    """Return `repr(value)`, shortened where Python refuses to write a number of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return safe_repr(value)


def _is_plain(packed: Any) -> bool:
    """Return whether nothing in encoded data needed a tag."""
    if isinstance(packed, list):
        return all(map(_is_plain, packed))
    if isinstance(packed, dict):
        return values.TAG not in packed and all(map(_is_plain, packed.values()))
    return True


def _pack_display(content: Any) -> Any:
    return escape_surrogates(content) if isinstance(content, str) else values.encode(content)


class InterruptedSession(SessionRecord):
    """A session, and whether code was running in it."""

    interrupted: bool


class VariableRecord(Answer):
    """A variable of a session's interpreter."""

    name: str
    type: str
    """The name of its class."""
    size: int
    """Its bytes, without what it refers to."""
    preview: str
    """The beginning of its `repr`."""


class VariableList(Answer):
    """The variables of a session, by name."""

    variables: list[VariableRecord]


# --- files ----------------------------------------------------------------------------------------------------------


class _NamedFile(Answer):
    """A file with a name or path.

    In JSON, a name that is not UTF-8 is percent-encoded and `percent_encoded` is true; in Python it is decoded."""

    percent_encoded: bool = Field(default=False, repr=False)
    """Whether the name is percent-encoded because it is not UTF-8."""

    @model_validator(mode="before")
    @classmethod
    def _decode_name(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not data.get("percent_encoded"):
            return data
        names = {key: unquote(data[key], errors="surrogateescape") for key in ("name", "path") if key in data}
        return {**data, **names, "percent_encoded": False}

    @model_serializer(mode="wrap", when_used="json")
    def _encode_name(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        names = {key: getattr(self, key) for key in ("name", "path") if key in type(self).model_fields}
        encoded: dict[str, Any] = {key: url_name(name) for key, name in names.items()}
        update = encoded | {"percent_encoded": encoded != names}
        data: dict[str, Any] = write(self.model_copy(update=update))
        return data


class FileEntryRecord(_NamedFile):
    """One entry of a folder in the session."""

    name: str
    kind: Literal["file", "folder", "link"]
    size: int = 0


class FolderListing(Answer):
    """The entries of a folder, by name."""

    entries: list[FileEntryRecord]


class FileWritten(Answer):
    """A file that was written."""

    path: str
    size: int


class FileChangeRecord(_NamedFile):
    """A file that differs from the start of the session."""

    path: str
    kind: Literal["added", "modified", "deleted"]
    size: int = 0


class WorkspaceDiff(Answer):
    """All changes since the start of the session."""

    diff: str
    """As `git diff` writes it."""
    changes: list[FileChangeRecord] = Field(default=[])
    truncated: bool = False
    """Whether `diff` was too large to be kept completely after the end of the session."""


# --- conversation, events and trace ---------------------------------------------------------------------------------


class MessageCount(Answer):
    """How many messages the conversation has now."""

    count: int


class ConversationRecord(Answer):
    """The visible conversation of a session."""

    session: dict[str, Any] | None
    messages: list[dict[str, Any]]
    first: int = 1
    """The number of the first of these messages, counted from 1."""
    has_more: bool = False
    """Whether there are messages before these."""


class SessionEvent(Answer):
    """Something that happened in a session."""

    seq: int
    kind: str
    data: dict[str, Any] = Field(default={})


class TraceRecord(Answer):
    """A run, call, command, checkpoint or verdict of a session, with its times."""

    seq: int


class TracePage(Answer):
    """Steps of a session, oldest first."""

    lines: list[TraceRecord]
    has_more: bool = False


# --- approvals ------------------------------------------------------------------------------------------------------


class ApprovalRecord(Answer):
    """A tool call that waits for approval, or was approved, refused or is no longer needed (`expired`)."""

    id: str
    session_id: str
    tool: str
    arguments: dict[str, Any] = Field(default={})
    created_at: datetime
    status: ApprovalStatus = "pending"
    answered_at: datetime | None = None
    answered_by: str | None = None
    reason: str = ""


class ApprovalList(Answer):
    """Approvals, oldest first."""

    approvals: list[ApprovalRecord]
