"""A sample: a task, the files it begins with, the place it is worked on in, and how it is judged."""

from __future__ import annotations

import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from carrel.execution.config import Limits, size_in_bytes
from carrel.execution.subprocess_executor import SYSTEM_PATH
from carrel.text import refuse_misspelled_fields

Verifier = Literal["test_suite", "static_analysis", "linter", "custom"]
ReportFormat = Literal["auto", "junit", "go", "cargo", "tap", "unittest", "sarif", "json", "exit_code"]

_PLAIN_NAME = re.compile(r"\w[\w.+@-]{0,199}")


def plain_name(text: str) -> str:
    """The text, when it can be a folder's name and a word of an address; else ValueError."""
    if _PLAIN_NAME.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no plain name: letters, digits and . _ + @ -, beginning with a letter or digit")
    return text


def _bytes(given: Any) -> Any:
    return size_in_bytes(given) if isinstance(given, str) else given


Size = Annotated[int | None, BeforeValidator(_bytes), Field(gt=0)]
PlainName = Annotated[str, AfterValidator(plain_name)]


def _in_the_place(path: str) -> str:
    if not path.startswith("/") or path.rstrip("/") == "" or ".." in path.split("/"):
        raise ValueError("the workdir is an absolute path in the place, and not / itself, like /workspace")
    return path.rstrip("/")


class Ceilings(BaseModel):
    """What the place of a sample may use; what is not named is as `Limits` has it."""

    model_config = ConfigDict(extra="forbid")

    memory: Size = None
    """Bytes, or text like 1GiB."""
    cpus: float | None = Field(default=None, gt=0)
    processes: int | None = Field(default=None, gt=0)
    open_files: int | None = Field(default=None, gt=0)
    disk: Size = None
    """Bytes that may be written, or text like 2GiB."""
    files: int | None = Field(default=None, gt=0)

    def limits(self) -> Limits:
        """The same as an executor takes it."""
        return Limits(**self.model_dump(exclude_none=True))


class Environment(BaseModel):
    """The place a sample is worked on in."""

    model_config = ConfigDict(extra="forbid")

    backend: Literal["sandbox", "container"] = "sandbox"
    workdir: Annotated[str, AfterValidator(_in_the_place)] = "/workspace"
    """Where the sample's files are, inside."""
    programs: list[str] = []
    """Programs that the machine must have, like node or make."""
    deps: list[str] = []
    """Python packages, put once into a cached virtualenv that is first on PATH."""
    python_version: str | None = None
    setup: list[str] = []
    """Commands that run once in the workdir; what they leave there and in the home folder is kept for all sessions.

    They have a virtualenv of the sample to install into, with `deps` in it; its Python is first on PATH afterwards."""
    setup_timeout: float = Field(default=1800, gt=0)
    """Seconds that all of them may take together."""
    setup_network: bool = False
    """Let the set-up commands use the network, also where the sessions have none."""
    network: bool = False
    env: dict[str, str] = {}
    limits: Ceilings = Ceilings()

    def missing(self) -> list[str]:
        """Which of the programs are not on this machine."""
        return [program for program in self.programs if shutil.which(program, path=SYSTEM_PATH) is None]


class Verify(BaseModel):
    """How a sample is judged."""

    model_config = ConfigDict(extra="forbid")

    command: str = ""
    """Run in the workdir by a shell; `{report}` in it is where the report is wanted."""
    report: ReportFormat = "auto"
    """What the command writes: to `{report}` where that is in it, else to its standard output."""
    reports: list[str] = []
    """Report files that the command leaves in the workdir, as patterns (`target/surefire-reports/*.xml`); removed
    before it runs."""
    timeout: float = Field(default=300, gt=0)
    """Seconds one run of the command may take."""
    recorder: Literal["auto", "required", "off"] = "auto"
    """Whether a recorder in the test runner notes what really ran: `required` believes no run without one."""
    retries: int = Field(default=0, ge=0, le=20)
    """How often a failing run is tried again; one that passes then is called flaky."""
    protected: list[str] = []
    """Patterns of files that are restored from the sample before judging, besides tests and test settings."""


class Sample(BaseModel):
    """One line of `samples.jsonl`, with what holds for the whole dataset filled in."""

    model_config = ConfigDict(extra="allow")

    sample_id: PlainName
    instance_id: str = ""
    dataset: str = ""
    repo: str = ""
    language: str = ""
    base_commit: str = ""
    """The commit the task begins at; nothing of git later than that is in the place."""
    environment_setup_commit: str = ""
    problem_statement: str = ""
    hints_text: str = ""
    patch: str = ""
    """The change that solves it; never shown to who works on it."""
    test_patch: str = ""
    """The change that brings the hidden tests; applied when it is judged."""
    non_code_patch: str = ""
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    fail_to_fail: list[str] = []
    verifier: Verifier = "test_suite"
    version: int = Field(default=1, ge=1)
    latest: bool = True
    version_description: str = ""
    description: str = ""
    created_at: datetime | None = None

    files: Path | None = None
    """The folder, .tar.gz or git bundle whose content becomes the workdir; None is an empty workdir."""
    environment: Environment = Environment()
    verify: Verify = Verify()

    _known_content: tuple[Path | None, str] | None = PrivateAttr(default=None)
    """The files and their hash, once they were looked at: they are taken to stay so while the sample is in memory."""

    @model_validator(mode="before")
    @classmethod
    def _no_slips(cls, given: Any) -> Any:
        """Fields of one's own are welcome; one that is nearly the name of ours would be missed in silence."""
        refuse_misspelled_fields(given, cls.model_fields)
        return given

    @model_validator(mode="after")
    def _filled_in(self) -> Sample:
        if not self.instance_id:
            self.instance_id = self.sample_id
        return self


WIRE_FIELDS = tuple(name for name in Sample.model_fields if name not in ("files", "environment", "verify"))
"""What others are told of a sample: everything but where its files lie and how it is judged."""
