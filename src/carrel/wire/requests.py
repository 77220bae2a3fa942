"""The bodies of requests, with the limits that the server puts on them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, StrictInt, model_validator

from carrel.text import is_utf8, refuse_misspelled_fields

MAX_TTL_MINUTES = 7 * 24 * 60
MAX_COMMAND_SECONDS = 24 * 3600.0
MAX_TEXT = 8 * 1024 * 1024
MAX_FILES = 1000
MAX_PATH = 4096
MAX_NESTING = 200
"""Levels of nesting that a message may have."""
MESSAGE_ROLES = ("user", "assistant", "system", "tool")


class LongInteger(float):
    """Stands for an integer with so many digits that Python refuses to parse it; no field accepts it."""


def parse_integer(digits: str) -> int | LongInteger:
    """Parse any integer for `json.loads`, without an error that does not name the field."""
    try:
        return int(digits)
    except ValueError:
        return LongInteger("inf")


def refuse_unstorable(value: Any, field: str, depth: int = 0) -> None:
    """Raise ValueError for a value that cannot be stored as JSON; `field` names it."""
    if isinstance(value, LongInteger):
        raise ValueError(f"{field}: the number has too many digits; send it as a text")
    if depth > MAX_NESTING:
        raise ValueError(f"{field[:200]}…: it is nested deeper than {MAX_NESTING} levels")
    if isinstance(value, dict):
        for name, part in value.items():
            refuse_unstorable(part, f"{field}.{name}", depth + 1)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            refuse_unstorable(part, f"{field}.{number}", depth + 1)


def refuse_surrogates(text: str) -> str:
    """Return the text; raise ValueError if UTF-8 cannot hold it."""
    if not is_utf8(text):
        raise ValueError("it contains a lone surrogate, which UTF-8 cannot hold")
    return text


Text = Annotated[str, AfterValidator(refuse_surrogates)]
TtlMinutes = Annotated[int, Field(ge=1, le=MAX_TTL_MINUTES)]


class RequestBody(BaseModel):
    """The body of a request.

    Unknown fields are ignored, because other versions may know them; a field that is almost the name of a known one is
    refused, because it would be ignored silently."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspelled(cls, data: Any) -> Any:
        refuse_misspelled_fields(data, cls.model_fields)
        return data


def _workspace_path(path: str) -> str:
    refuse_surrogates(path)
    parts = path.split("/")
    if ".." in parts or parts[-1] in ("", ".") or "\0" in path or len(path.encode()) > MAX_PATH:
        raise ValueError(f"{path[:200]!r} is not the path of a file in the workspace; use one like src/a.txt, no '..'")
    return path


class CreateSession(RequestBody):
    """A new session of a sample, or an empty one: then the workspace holds only the files given here."""

    dataset: str = Field(default="", max_length=200)
    """With `sample_id`: the sample to work on. Without both, the session is empty."""
    sample_id: str = Field(default="", max_length=200)
    ttl_minutes: TtlMinutes = 30
    """How long the session may live."""
    version: int | None = Field(default=None, ge=1)
    """The version of the sample; by default the latest."""
    files: dict[Annotated[str, AfterValidator(_workspace_path)], Text] = Field(default={}, max_length=MAX_FILES)
    """Texts by path; they replace files of the sample."""
    network: bool | None = None
    """Whether a session without a sample may use the network, if the server allows it."""
    session_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,127}$")
    """The id of the new session; by default the server chooses one."""
    durable: bool = False
    """Whether conversation, files and variables are kept when the session ends, for `POST /sessions/{id}/resume`."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if bool(self.dataset) != bool(self.sample_id):
            missing = "sample_id" if self.dataset else "dataset"
            raise ValueError(f"{missing} is missing: give dataset and sample_id together, or neither of them")
        if self.network is not None and self.dataset:
            raise ValueError("network: the sample decides whether its sessions have network access")
        return self


class ExtendSession(RequestBody):
    """A new time limit for a session, counted from now."""

    ttl_minutes: TtlMinutes
    """How long it may live from now on."""


class ForkSession(RequestBody):
    """Settings of a fork."""

    ttl_minutes: TtlMinutes | None = None
    """How long the fork may live; by default as long as its parent was given."""


class CreateCheckpoint(RequestBody):
    """The label of a new checkpoint."""

    label: str = Field(default="", max_length=200)
    """A name to return by."""


class RewindSession(RequestBody):
    """The checkpoint to return to: its id, its label or its number of messages."""

    to: Annotated[str, Field(max_length=200)] | StrictInt
    """The id, label or number of messages of a checkpoint."""


class RunCommand(RequestBody):
    """A command for bash."""

    command: str = Field(max_length=MAX_TEXT)
    """A line for bash."""
    command_timeout: float = Field(default=300, gt=0, le=MAX_COMMAND_SECONDS)
    """Seconds after which it is killed with all its child processes; its output so far is kept."""
    cwd: str | None = Field(default=None, max_length=MAX_PATH)
    """The folder to run it in; by default the workspace."""
    env: dict[Text, Text] = {}
    """Additional environment variables."""
    stdin: str | None = Field(default=None, max_length=MAX_TEXT)
    """The text that the command can read."""
    background: bool = False
    """Answer at once and let it run, its output in a file of the session."""


class ReplaceText(RequestBody):
    """A text that occurs in a file exactly once, and its replacement."""

    file_path: str = Field(min_length=1, max_length=MAX_PATH)
    """A file of the workspace."""
    str_to_replace: str = Field(max_length=MAX_TEXT)
    """The text, which must occur exactly once."""
    str_to_insert: str = Field(max_length=MAX_TEXT)
    """The text to write instead."""


class RunCode(RequestBody):
    """Python code to run; its variables persist."""

    code: str = Field(max_length=MAX_TEXT)
    """Python, which may use `await`."""
    timeout: float = Field(default=60, gt=0, le=MAX_COMMAND_SECONDS)
    """Seconds after which the code is interrupted."""


def _check_message(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") not in MESSAGE_ROLES:
        raise ValueError(f"role is one of {', '.join(MESSAGE_ROLES)}, not {message.get('role')!r}")
    content, meta = message.get("content"), message.get("meta")
    blocks = isinstance(content, list) and all(isinstance(b, dict) and isinstance(b.get("type"), str) for b in content)
    if not (blocks or isinstance(content, str)):
        raise ValueError("content is a text, or a list of blocks that each have a type")
    if meta is not None and not isinstance(meta, dict):
        raise ValueError("meta is an object")
    for name, part in message.items():
        refuse_unstorable(part, name)
    return message


class AddMessages(RequestBody):
    """Messages to append to the session's conversation."""

    messages: list[Annotated[dict[str, Any], AfterValidator(_check_message)]] = Field(min_length=1, max_length=1000)
    """Each has a `role` (user, assistant, system or tool) and a `content`: a text, or a list of blocks."""


class AnswerApproval(RequestBody):
    """The answer to a request for approval."""

    decision: Literal["approve", "refuse"]
    """Whether the call may be made."""
    arguments: dict[str, Any] | None = None
    """Arguments to call the tool with, instead of the requested ones."""
    reason: str = Field(default="", max_length=2000)
    """Shown to the code whose call was refused."""
