"""Settings of the executors: small typed objects, a sentence under each field."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from carrel.errors import ConfigurationError
from carrel.execution.bounded_output import LIMIT
from carrel.execution.kept_apart import refuse_writable
from carrel.home import resolve_carrel_home

SandboxMode = Literal["auto", "required", "off"]
MODES: tuple[SandboxMode, ...] = ("auto", "required", "off")
MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one session may use; None means that carrel sets no limit."""

    memory: int | None = None
    """Bytes, all processes of the session together where a cgroup can be made, else each of them."""
    cpus: float | None = None
    """Processors' worth of time; needs a cgroup."""
    processes: int | None = 512
    """Processes and threads at one time."""
    open_files: int | None = 4096
    """Descriptors of one process."""
    disk: int | None = 1024 * MIB
    """Bytes that the session writes."""
    files: int | None = 200_000
    """Files, folders and links that the session makes."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            wanted = (int, float) if name == "cpus" else (int,)
            if value is not None and (not isinstance(value, wanted) or isinstance(value, bool) or value <= 0):
                unit = ", in bytes" if name in ("memory", "disk") else ""
                raise ConfigurationError(
                    f"limits.{name} is {value!r}; it is a number above 0{unit}, or None for no limit"
                )


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of the host, shown inside."""

    source: Path | str
    at: str
    mode: Literal["ro", "rw"] = "ro"

    def __post_init__(self) -> None:
        _set(self, "source", path_of(self.source))


@dataclass(frozen=True, kw_only=True)
class ExecutorSettings:
    """What every kind of executor can be told. Paths may be texts; `~` is expanded."""

    default_timeout: float | None = None
    """Seconds a run may take when it names none; None is no limit."""
    tools_path: Path | str | None = None
    """A folder with tool definitions, for the session that has this executor."""
    deps: Sequence[str] = ()
    """Requirements that are installed before the first run."""
    deps_file: Path | str | None = None
    """A requirements.txt whose requirements are installed with them; it may come to be later."""
    allow_runtime_deps: bool = True
    """Whether packages may be added and removed while the session lives."""
    wheelhouse: Path | str | None = None
    """A folder of wheels to install from, instead of the package index: for machines without a network."""
    base: Path | str | None = None
    """The folder that the session belongs to; its packages are kept below it and are nobody else's."""
    workspace: Path | str | None = None
    """The folder that code and commands work in; None is an empty one that goes with the session."""
    output_limit: int = LIMIT
    """Bytes kept of each stream of a run or a command."""
    grace: float = 1.0
    """Seconds between the interrupt of a run whose time is up and its end by force."""

    def __post_init__(self) -> None:
        if isinstance(self.deps, str):
            raise ConfigurationError(f"deps is {self.deps!r}; it is a list of requirements, as in [{self.deps!r}]")
        if self.default_timeout is not None and not is_seconds(self.default_timeout):
            raise ConfigurationError(
                f"the timeout is {self.default_timeout!r}; it is a number of seconds, or None for no limit"
            )
        if not is_seconds(self.grace):
            raise ConfigurationError(f"grace is {self.grace!r}; it is a number of seconds")
        _set(self, "deps", tuple(self.deps))
        for name in ("tools_path", "deps_file", "wheelhouse", "base", "workspace"):
            _set(self, name, path_of(getattr(self, name)))
        for name in ("workspace", "wheelhouse"):
            folder = path_of(getattr(self, name))
            if folder is not None and not folder.is_dir():
                raise ConfigurationError(f"the {name} {folder} is no folder")


@dataclass(frozen=True, kw_only=True)
class SubprocessConfig(ExecutorSettings):
    """Where and how a subprocess session lives.

    Without `base`, `venv_path`, `deps`, `deps_file` and `python_version` the host's own Python is used and nothing has
    to be made."""

    default_timeout: float | None = 60.0
    """Seconds a run may take when it names none; None is no limit."""
    sandbox: SandboxMode | None = None
    """`required` fails where something is missing, `auto` does what this machine can; None asks CARREL_SANDBOX."""
    network: bool = True
    """The host's network; False leaves loopback only, where the sandbox can."""
    workspace_mode: Literal["overlay", "rw", "ro"] = "overlay"
    """`overlay` leaves the given folder as it is and keeps changes apart."""
    workspace_at: str = "/workspace"
    """Where the workspace is seen inside, where the session has a file system of its own."""
    mounts: Sequence[Mount] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables inside; nothing of the host's is there unless it is named here."""
    limits: Limits = field(default_factory=Limits)
    python_version: str | None = None
    """The Python of its virtualenv, as in `3.12`; None is the version that runs this program."""
    venv_path: Path | str | None = None
    """Where its virtualenv is, or is made; None keeps one below `base` for each version of Python."""
    shared_in: Path | str | None = None
    """Where virtualenvs that sessions without a base share are kept; None is carrel's own folder."""
    cache_venv: bool = True
    """False makes a virtualenv that is thrown away at close."""
    startup_timeout: float = 60.0
    """Seconds until its Python must be ready; making the virtualenv is not counted."""
    allow_builds: bool = False
    """Whether a package that code asks for may be built from source: that runs on the host, outside of the sandbox."""
    preload: Sequence[str] = ()
    """Modules that every session has in memory already: `import` of them costs nothing then."""
    hostname: str = "carrel"
    frozen: bool = True
    """Whether a frozen fork is kept between runs, to go on from after a crash."""
    frozen_ceiling: int = 2048 * MIB
    """Memory of the session's Python above which none is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "venv_path", path_of(self.venv_path))
        _set(self, "shared_in", path_of(self.shared_in))
        _set(self, "mounts", tuple(self.mounts))
        _set(self, "preload", tuple(self.preload))
        if self.sandbox is not None and self.sandbox not in MODES:
            raise ConfigurationError(f"sandbox is {self.sandbox!r}; it can be {', '.join(MODES)}")
        if not is_seconds(self.startup_timeout):
            raise ConfigurationError(f"startup_timeout is {self.startup_timeout!r}; it is a number of seconds")
        if self.workspace_mode not in ("overlay", "rw", "ro"):
            raise ConfigurationError(f"workspace_mode is {self.workspace_mode!r}; it can be overlay, rw or ro")
        if not isinstance(self.limits, Limits):
            raise ConfigurationError(
                f"limits is {self.limits!r}; give an object, as in Limits(memory=512 * 1024 * 1024)"
            )
        shared = path_of(self.shared_in)
        if shared is None and self.base is None and self.venv_path is None and (self.deps or self.python_version):
            shared = resolve_carrel_home()
        self.keep_apart(
            {
                "the base": path_of(self.base),
                "tools_path": path_of(self.tools_path),
                "venv_path": path_of(self.venv_path),
                "the wheelhouse": path_of(self.wheelhouse),
                "the environments of shared_in": shared and shared / "environments",
            }
        )

    def keep_apart(self, kept: Mapping[str, Path | None]) -> None:
        """`ConfigurationError` when code inside could write one of these folders of the host."""
        writable = [("the mount", mount.source) for mount in self.mounts if mount.mode == "rw"]
        if self.workspace is not None and self.workspace_mode == "rw":
            writable.append(("the workspace", self.workspace))
        refuse_writable([(what, Path(folder)) for what, folder in writable], kept)


@dataclass(frozen=True, kw_only=True)
class InProcessConfig(ExecutorSettings):
    """How code runs in this very process."""

    default_timeout: float | None = 30.0
    """Seconds a run may take when it names none; None is no limit."""


def is_seconds(given: object) -> bool:
    """Whether it is a length of time: a number, also infinity, and not NaN."""
    if not isinstance(given, int | float) or isinstance(given, bool):
        return False
    try:
        return not math.isnan(given)
    except OverflowError:  # an integer beyond all floats
        return False


def path_of(given: Path | str | None) -> Path | None:
    """A path as it may be given, as a Path."""
    return None if given is None else Path(given).expanduser()


def _set(config: object, name: str, value: Any) -> None:
    """While a frozen object is being made."""
    object.__setattr__(config, name, value)


def sandbox_mode(wanted: SandboxMode | None) -> SandboxMode:
    """What was asked for, or what CARREL_SANDBOX says, or `auto`; the variable never weakens what was asked for."""
    if wanted is not None:
        return wanted
    named = os.environ.get("CARREL_SANDBOX", "auto")
    for mode in MODES:
        if mode == named:
            return mode
    raise ConfigurationError(f"CARREL_SANDBOX is {named!r}; it can be {', '.join(MODES)}")
