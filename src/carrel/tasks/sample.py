"""A sample: a task, the files it starts with, its environment, and how it is judged."""

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

VerifierKind = Literal["test_suite", "static_analysis", "linter", "custom"]
ReportFormat = Literal["auto", "junit", "go", "cargo", "tap", "unittest", "sarif", "json", "exit_code", "reward"]

_PLAIN_NAME = re.compile(r"\w[\w.+@-]{0,199}")


def plain_name(text: str) -> str:
    """The text, if it can be the name of a folder and a part of a URL; else ValueError."""
    if _PLAIN_NAME.fullmatch(text) is None:
        raise ValueError(
            f"{text!r} is not a plain name: use letters, digits and . _ + @ -, beginning with a letter or digit"
        )
    return text


def _bytes(given: Any) -> Any:
    return size_in_bytes(given) if isinstance(given, str) else given


Size = Annotated[int, BeforeValidator(_bytes), Field(gt=0)] | None
PlainName = Annotated[str, AfterValidator(plain_name)]


def _is_workdir(path: str) -> str:
    if not path.startswith("/") or path.rstrip("/") == "" or ".." in path.split("/"):
        raise ValueError("the workdir is an absolute path in the sandbox other than /, like /workspace")
    return path.rstrip("/")


class SampleLimits(BaseModel):
    """The limits of a sample's sessions; the defaults are those of `Limits`."""

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
        """The same in the form that an executor takes."""
        return Limits(**self.model_dump(exclude_none=True))


class SampleEnvironment(BaseModel):
    """The environment of a sample's sessions."""

    model_config = ConfigDict(extra="forbid")

    backend: Literal["sandbox", "container"] = "sandbox"
    image: str = ""
    """With `backend: container`, the image that sessions and verdicts run in. A sample without files has those in the
    image's workdir."""
    dockerfile: Path | None = None
    """Instead of `image`: a Dockerfile in the dataset's folder, from which the image is built once for each content."""
    context: Path | None = None
    """The folder with what the Dockerfile copies; None is the folder of the Dockerfile."""
    build_timeout: float = Field(default=1800, gt=0)
    """Seconds that one step of the build may take."""
    writable: list[str] = []
    """In containers, further folders that commands may write to; empty at the start, and not judged."""
    runtime: str = ""
    """A runtime of the container engine, such as `runsc` (gVisor); empty for the engine's default."""
    workdir: Annotated[str, AfterValidator(_is_workdir)] = "/workspace"
    """Where the sample's files are in the sandbox."""
    programs: list[str] = []
    """Programs that the machine must have, like node or make."""
    deps: list[str] = []
    """Python packages, put once into a cached virtualenv that is first on PATH."""
    python_version: str | None = None
    setup: list[str] = []
    """Commands that run once in the workdir; their changes there and in the home folder are kept for all sessions.

    They can install into a virtualenv of the sample, which has `deps` in it; its Python is first on PATH afterwards."""
    setup_timeout: float = Field(default=1800, gt=0)
    """Seconds that all of them may take together."""
    setup_network: bool = False
    """Let the set-up commands use the network, even if the sessions cannot."""
    network: bool = False
    env: dict[str, str] = {}
    limits: SampleLimits = SampleLimits()

    @model_validator(mode="after")
    def _is_possible(self) -> SampleEnvironment:
        if (self.backend == "container") != bool(self.image or self.dockerfile):
            raise ValueError(
                "backend: container needs an image, and only it: write backend and either image or dockerfile, or none"
            )
        if self.image and self.dockerfile:
            raise ValueError("image and dockerfile are both set; name the image or the file that it is built from")
        if self.context and not self.dockerfile:
            raise ValueError("context is the folder of a dockerfile, which is missing")
        if self.backend == "sandbox" and (self.runtime or self.writable):
            raise ValueError("runtime and writable are for containers; write backend: container and an image too")
        if self.in_container and (self.setup or self.python_version):
            raise ValueError("setup and python_version are for the sandbox; build them into the image")
        return self

    @property
    def in_container(self) -> bool:
        return self.backend == "container"

    def missing(self) -> list[str]:
        """The programs that this machine does not have; those of an image are not looked for."""
        if self.in_container:
            return []
        return [program for program in self.programs if shutil.which(program, path=SYSTEM_PATH) is None]


class VerifySettings(BaseModel):
    """How a sample is judged."""

    model_config = ConfigDict(extra="forbid")

    command: str = ""
    """Run in the workdir by a shell; `{report}` in it is the path for the report."""
    report: ReportFormat = "auto"
    """The format of the report: at `{report}` if the command contains that, else on its standard output.

    With `reward` and the verifier `custom` it is the reward that Harbor's tests write below `/logs/verifier`."""
    reports: list[str] = []
    """Report files that the command leaves in the workdir, as patterns (`target/surefire-reports/*.xml`); removed
    before it runs."""
    timeout: float = Field(default=300, gt=0)
    """Seconds one run of the command may take."""
    recorder: Literal["auto", "required", "off"] = "auto"
    """Whether a recorder in the test runner records what really ran; `required`: a run without one does not count."""
    retries: int = Field(default=0, ge=0, le=20)
    """How often a failing run is repeated; a sample that passes then is flaky."""
    tests: Path | None = None
    """A folder in the dataset that is read at `/tests` while the work is judged, and only then."""
    protected: list[str] = []
    """Patterns of files that are always taken from the sample, besides tests and test settings."""


class Sample(BaseModel):
    """One line of `samples.jsonl`, merged with the settings of the dataset."""

    model_config = ConfigDict(extra="allow")

    sample_id: PlainName
    instance_id: str = ""
    dataset: str = ""
    repo: str = ""
    language: str = ""
    base_commit: str = ""
    """The commit the task starts at; the sandbox contains nothing of git that is later."""
    environment_setup_commit: str = ""
    problem_statement: str = ""
    hints_text: str = ""
    patch: str = ""
    """The change that solves it; never shown to the agent."""
    test_patch: str = ""
    """The change that adds the hidden tests; applied when the sample is judged."""
    non_code_patch: str = ""
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    fail_to_fail: list[str] = []
    verifier: VerifierKind = "test_suite"
    version: int = Field(default=1, ge=1)
    latest: bool = True
    version_description: str = ""
    description: str = ""
    created_at: datetime | None = None

    agent_timeout: float | None = Field(default=None, gt=0)
    """Seconds that an agent may work on it; None is as the run says."""
    solution: Path | None = None
    """A folder that `datasets check` reads at `/solution`, to solve the sample by `solve` in place of the patch."""
    solve: str = ""
    """The command of the solution, run in the workdir."""
    files: Path | None = None
    """The folder, .tar.gz or git bundle whose content becomes the workdir; None is an empty workdir."""
    environment: SampleEnvironment = SampleEnvironment()
    verify: VerifySettings = VerifySettings()

    _known_content: tuple[Path | None, str] | None = PrivateAttr(default=None)
    """The files and their digest, once computed: they are assumed not to change while the sample is in memory."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspelled(cls, given: Any) -> Any:
        """Further fields are allowed; a misspelled name of a known field is an error."""
        refuse_misspelled_fields(given, cls.model_fields)
        return given

    @model_validator(mode="after")
    def _filled_in(self) -> Sample:
        if not self.instance_id:
            self.instance_id = self.sample_id
        if (self.solution is None) != (not self.solve):
            raise ValueError("solution is a folder and solve the command that uses it; write both or neither")
        if self.verify.report == "reward" and self.verifier != "custom":
            raise ValueError("verify.report: reward is for the verifier custom")
        return self


WIRE_FIELDS = tuple(
    name
    for name in Sample.model_fields
    if name not in ("files", "environment", "verify", "agent_timeout", "solution", "solve")
)
"""The fields that the HTTP API has: all except paths of the dataset and how the sample is judged."""
