"""What one sandbox is to be, read from the record that asks for it, and the report of how its start went."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from dataclasses import dataclass, field
from typing import Any

MIB = 1024 * 1024
ALL_PARTS = frozenset({"user", "mount", "pid", "ipc", "uts", "net", "overlay", "seccomp", "landlock", "cgroup", "fork"})
HOME = "/home/agent"
OWN_ENVIRONMENT = f"{HOME}/.venv"
"""A virtualenv in the folder that the home begins with; its programs are first on PATH."""
_RESERVED = ("", "proc", "dev", "sys", "usr", "etc", "bin", "sbin", "lib", "lib64", ".carrel")
"""Folders at the root that belong to the system, and where nothing else can be mounted."""


class SpecError(ValueError):
    """A setting that makes no sense; the message names it."""


@dataclass
class SandboxLimits:
    """Limits of one sandbox; None means that carrel sets no limit."""

    memory: int | None = None
    cpus: float | None = None
    processes: int | None = 512
    open_files: int | None = 4096
    disk: int | None = 1024 * MIB
    files: int | None = 200_000
    """How many files, folders and links the session may create, in all its writable folders together."""


@dataclass
class MountSpec:
    """A folder or file of the host, and where the session sees it."""

    source: str
    at: str
    mode: str = "ro"


@dataclass
class WorkspaceSpec:
    """The folder of the workspace; None for an empty one."""

    source: str | None = None
    mode: str = "overlay"
    at: str = "/workspace"
    upper_dir: str | None = None
    """A folder of the host that keeps what is written in the workspace and the home."""
    generation: str = ""
    """The folder in `upper_dir` that is written to now; empty: it is kept in memory."""


@dataclass
class SandboxSpec:
    """What one sandbox is made of."""

    parts: frozenset[str] = ALL_PARTS
    network: bool = False
    hostname: str = "carrel"
    uid: int = 1000
    workspace: WorkspaceSpec = field(default_factory=WorkspaceSpec)
    mounts: list[MountSpec] = field(default_factory=list)
    readonly: list[str] = field(default_factory=list)
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    home: str = HOME
    home_source: str | None = None
    """The folder that the home begins with; changes to it stay in the session."""
    cgroup_controllers: frozenset[str] = frozenset()
    """The cgroup controllers that limit this session; set by the zygote, which creates the cgroups."""

    @property
    def confined(self) -> bool:
        """Whether the session gets namespaces and a file system of its own."""
        return {"user", "mount", "pid"} <= self.parts

    @property
    def workspace_is_overlay(self) -> bool:
        """Whether the workspace is an overlay over the given folder."""
        return self.workspace.source is not None and self.workspace.mode == "overlay" and "overlay" in self.parts

    @property
    def workspace_is_copy(self) -> bool:
        """Whether the workspace is a copy of the given folder, because the kernel offers no overlay."""
        return self.workspace.source is not None and self.workspace.mode == "overlay" and "overlay" not in self.parts

    @property
    def has_home_source(self) -> bool:
        """Whether the home is a folder of its own that begins with the files of another."""
        return self.home_source is not None and self.home != self.workspace.at

    @property
    def kind(self) -> tuple[object, ...]:
        """What two sessions must have in common so that one sandbox, prepared in advance, fits either."""
        return (
            self.parts,
            self.network,
            self.hostname,
            self.uid,
            self.home,
            self.limits,
            self.writes_to_host,
        )

    @property
    def writes_to_host(self) -> bool:
        """Whether what the session writes can stay on the host, for other users to run."""
        writable_workspace = self.workspace.source is not None and self.workspace.mode == "rw"
        kept_changes = self.workspace.upper_dir is not None
        return not self.confined or writable_workspace or kept_changes or any(m.mode == "rw" for m in self.mounts)

    @property
    def can_fork(self) -> bool:
        """Live forks need Landlock, which keeps a worker from its fork's init, and the filter, which guards setns."""
        return self.confined and {"fork", "seccomp", "landlock"} <= self.parts


def read_spec(record: dict[str, Any]) -> SandboxSpec:
    """The spec that a settings record describes; what is missing gets its default."""
    parts = frozenset(record.get("parts", ALL_PARTS))
    if parts - ALL_PARTS:
        raise SpecError(f"parts: {', '.join(sorted(parts - ALL_PARTS))} unknown; known: {', '.join(sorted(ALL_PARTS))}")
    spec = SandboxSpec(
        parts=frozenset() if record.get("sandbox") == "off" else parts,
        network=bool(record.get("network", False)),
        hostname=record.get("hostname", "carrel"),
        uid=record.get("uid", 1000),
        workspace=WorkspaceSpec(**(record.get("workspace") or {})),
        mounts=[MountSpec(**mount) for mount in record.get("mounts", [])],
        readonly=[str(path) for path in record.get("readonly", [])],
        limits=SandboxLimits(**record.get("limits", {})),
        home=record.get("home", HOME),
        home_source=record.get("home_source"),
    )
    _check(spec)
    return spec


def _check(spec: SandboxSpec) -> None:
    if spec.workspace.mode not in ("overlay", "rw", "ro"):
        raise SpecError(f"workspace mode: overlay, rw or ro, not {spec.workspace.mode!r}")
    for mount in spec.mounts:
        if mount.mode not in ("rw", "ro"):
            raise SpecError(f"mount {mount.at}: mode rw or ro, not {mount.mode!r}")
    targets = [spec.workspace.at, spec.home, *(mount.at for mount in spec.mounts)]
    sources = [
        spec.workspace.source or "/",
        spec.home_source or "/",
        *(mount.source for mount in spec.mounts),
        *spec.readonly,
    ]
    for path in targets + sources:
        if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
            raise SpecError(f"{path!r} is not an absolute path without '..'")
    for path in targets:
        if path.split("/")[1] in _RESERVED:
            raise SpecError(f"{path!r} cannot be mounted on: the system is there")


# --- the report: sent once, through a pipe, by whichever process the start has come to -------------------------------

_MAX_MESSAGE = 4_000
NO_REPORT = {"step": "start", "errno": None, "message": "the process ended without a report"}


class StartReport:
    """Keeps the name of the current step; reports success, or the step that failed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.current = "start"

    def step(self, name: str) -> None:
        self.current = name

    def failed(self, error: BaseException) -> None:
        number = error.errno if isinstance(error, OSError) else None
        text = (
            str(error)
            if isinstance(error, OSError)
            else "".join(traceback.format_exception(None, error, error.__traceback__))
        )
        # When the reader is gone there is nothing to report, and this process is about to exit.
        with contextlib.suppress(OSError):
            self._send({"step": self.current, "errno": number, "message": _shortened(text)})

    def succeeded(self) -> None:
        self._send({"ok": True})

    def _send(self, record: dict[str, Any]) -> None:
        if self.descriptor >= 0:
            os.write(self.descriptor, json.dumps(record).encode() + b"\n")
            self.close()

    def close(self) -> None:
        """Leave it to the other process that has it: from here on its number may be that of something else."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _shortened(text: str) -> str:
    """Short enough for a report to fit into a pipe that no process reads yet, however many characters are escaped."""
    if len(text) <= _MAX_MESSAGE:
        return text
    return (
        f"{text[: _MAX_MESSAGE // 2]}\n… {len(text) - _MAX_MESSAGE} characters left out …\n{text[-_MAX_MESSAGE // 2 :]}"
    )


def parse_report(line: bytes) -> dict[str, Any]:
    """The first line that was reported; no report is a failure too."""
    first, end, _ = line.partition(b"\n")
    if not end:
        return dict(NO_REPORT)
    try:
        report = json.loads(first)
    except ValueError:
        report = None
    return report if isinstance(report, dict) else {**NO_REPORT, "message": "the process sent an unreadable report"}


def read_report(descriptor: int) -> dict[str, Any]:
    """Wait for the report of another process."""
    received = b""
    while not received.endswith(b"\n"):
        piece = os.read(descriptor, 65536)
        if not piece:
            break
        received += piece
    return parse_report(received)
