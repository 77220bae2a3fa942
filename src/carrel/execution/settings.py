"""Settings of the executors: small typed objects, a sentence under each field."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from carrel.errors import ConfigurationError
from carrel.execution.bounded_output import LIMIT

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


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of the host, shown inside."""

    source: Path
    at: str
    mode: Literal["ro", "rw"] = "ro"


@dataclass(frozen=True, kw_only=True)
class SubprocessConfig:
    """Where and how a subprocess session lives."""

    timeout: float | None = 60.0
    """Seconds a run may take when it names none; None is no limit."""
    sandbox: SandboxMode | None = None
    """`required` fails where something is missing, `auto` does what this machine can; None asks CARREL_SANDBOX."""
    network: bool = True
    """The host's network; False leaves loopback only, where the sandbox can."""
    workspace: Path | None = None
    """The folder that code and commands work in; None is an empty one that goes with the session."""
    workspace_mode: Literal["overlay", "rw", "ro"] = "overlay"
    """`overlay` leaves the given folder as it is and keeps changes apart."""
    workspace_at: str = "/workspace"
    """Where the workspace is seen inside, where the session has a file system of its own."""
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables inside; nothing of the host's is there unless it is named here."""
    limits: Limits = field(default_factory=Limits)
    deps: tuple[str, ...] = ()
    """Requirements for a virtualenv of its own; with none (and no python_version) the host's own Python is used."""
    python_version: str | None = None
    base: Path | None = None
    """Where the virtualenv is cached; None is carrel's own folder."""
    cache_venv: bool = True
    """False makes a virtualenv that is thrown away at close."""
    preload: tuple[str, ...] = ()
    """Modules that every session has in memory already: `import` of them costs nothing then."""
    hostname: str = "carrel"
    output_limit: int = LIMIT
    """Bytes kept of each stream of a run or a command."""
    grace: float = 1.0
    """Seconds between the interrupt of a run whose time is up and its kill."""
    frozen: bool = True
    """Whether a frozen fork is kept between runs, to go on from after a crash."""
    frozen_ceiling: int = 2048 * MIB
    """Memory of the session's Python above which none is kept."""

    def __post_init__(self) -> None:
        if self.sandbox is not None and self.sandbox not in MODES:
            raise ConfigurationError(f"sandbox is {self.sandbox!r}; it can be {', '.join(MODES)}")
        if self.workspace_mode not in ("overlay", "rw", "ro"):
            raise ConfigurationError(f"workspace_mode is {self.workspace_mode!r}; it can be overlay, rw or ro")
        if self.workspace is not None and not self.workspace.is_dir():
            raise ConfigurationError(f"the workspace {self.workspace} is no folder")


@dataclass(frozen=True, kw_only=True)
class InProcessConfig:
    """How code runs in this very process."""

    timeout: float | None = 30.0
    """Seconds a run may take when it names none; None is no limit."""
    workspace: Path | None = None
    """The folder that commands and files work in; None is an empty one that goes with the session."""
    output_limit: int = LIMIT
    grace: float = 1.0
    """Seconds that interrupted code has to stop before its thread is left behind."""


def sandbox_mode(wanted: SandboxMode | None) -> SandboxMode:
    """What was asked for, or what CARREL_SANDBOX says, or `auto`; the variable never weakens what was asked for."""
    if wanted is not None:
        return wanted
    named = os.environ.get("CARREL_SANDBOX", "auto")
    for mode in MODES:
        if mode == named:
            return mode
    raise ConfigurationError(f"CARREL_SANDBOX is {named!r}; it can be {', '.join(MODES)}")
