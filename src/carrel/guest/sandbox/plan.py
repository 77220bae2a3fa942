"""What one session is to be: the settings record of a spawn, read once and checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIB = 1024 * 1024
ALL_PARTS = frozenset({"user", "mount", "pid", "ipc", "uts", "net", "overlay", "seccomp", "landlock", "cgroup", "fork"})
HOME = "/home/agent"
OWN_ENVIRONMENT = f"{HOME}/.venv"
"""A virtualenv in a home folder that was given; its programs are first on PATH."""


class PlanRefused(ValueError):
    """A setting that makes no sense; the message names it."""


@dataclass
class Limits:
    """None means: not limited by us."""

    memory: int | None = None
    cpus: float | None = None
    processes: int | None = 512
    open_files: int | None = 4096
    disk: int | None = 1024 * MIB
    files: int | None = 200_000
    """How many files, folders and links a session may make, all its writable places together."""


@dataclass
class Bind:
    """A folder or file of the host, and where it is seen."""

    source: str
    at: str
    mode: str = "ro"


@dataclass
class Workspace:
    source: str | None = None
    mode: str = "overlay"
    at: str = "/workspace"
    upper_dir: str | None = None


@dataclass
class Plan:
    parts: frozenset[str] = ALL_PARTS
    network: bool = False
    hostname: str = "carrel"
    uid: int = 1000
    workspace: Workspace = field(default_factory=Workspace)
    mounts: list[Bind] = field(default_factory=list)
    readonly: list[str] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    home: str = HOME
    home_source: str | None = None
    """The folder that the home begins with; what is changed there is kept apart."""
    held: frozenset[str] = frozenset()
    """The cgroup controllers that hold this session; set by the zygote, which makes the groups."""

    @property
    def confined(self) -> bool:
        """Whether the session gets namespaces and its own file system at all."""
        return {"user", "mount", "pid"} <= self.parts

    @property
    def overlaid(self) -> bool:
        """Whether the workspace is an overlay; where the kernel has none it is a copy of the given folder."""
        return self.workspace.source is not None and self.workspace.mode == "overlay" and "overlay" in self.parts

    @property
    def home_begins(self) -> bool:
        """Whether the home is a folder of its own, and begins with something."""
        return self.home_source is not None and self.home != self.workspace.at

    @property
    def copied(self) -> bool:
        return self.workspace.source is not None and self.workspace.mode == "overlay" and "overlay" not in self.parts

    @property
    def common(self) -> tuple[object, ...]:
        """What two sessions must agree in for a place that was built before it was known for which."""
        return (
            self.parts,
            self.network,
            self.hostname,
            self.uid,
            self.home,
            self.limits,
            self.reaches_the_disk,
        )

    @property
    def reaches_the_disk(self) -> bool:
        """Whether what the session writes can stay on the host, for others to run."""
        given = self.workspace.source is not None and self.workspace.mode == "rw"
        kept = self.workspace.upper_dir is not None
        return not self.confined or given or kept or any(mount.mode == "rw" for mount in self.mounts)

    @property
    def can_fork(self) -> bool:
        """Landlock keeps a worker from its fork's init, and the filter asks before anybody enters."""
        return self.confined and {"fork", "seccomp", "landlock"} <= self.parts


def read_plan(record: dict[str, Any]) -> Plan:
    """The plan that a settings record describes; what is missing gets its default."""
    parts = frozenset(record.get("parts", ALL_PARTS))
    if parts - ALL_PARTS:
        raise PlanRefused(
            f"parts: {', '.join(sorted(parts - ALL_PARTS))} unknown; known: {', '.join(sorted(ALL_PARTS))}"
        )
    plan = Plan(
        parts=frozenset() if record.get("sandbox") == "off" else parts,
        network=bool(record.get("network", False)),
        hostname=_text(record, "hostname", "carrel"),
        uid=_number(record, "uid", 1000),
        workspace=Workspace(**(record.get("workspace") or {})),
        mounts=[Bind(**mount) for mount in record.get("mounts", [])],
        readonly=[str(path) for path in record.get("readonly", [])],
        limits=Limits(**record.get("limits", {})),
        home=_text(record, "home", HOME),
        home_source=_text(record, "home_source", "") or None,
    )
    _check(plan)
    return plan


def _text(record: dict[str, Any], name: str, default: str) -> str:
    value = record.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise PlanRefused(f"{name}: a text is expected, not {value!r}")
    return value


def _number(record: dict[str, Any], name: str, default: int) -> int:
    value = record.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or not 0 < value < 1 << 31:
        raise PlanRefused(f"{name}: a number above 0 is expected, not {value!r}")
    return value


def _check(plan: Plan) -> None:
    if plan.workspace.mode not in ("overlay", "rw", "ro"):
        raise PlanRefused(f"workspace mode: overlay, rw or ro, not {plan.workspace.mode!r}")
    for mount in plan.mounts:
        if mount.mode not in ("rw", "ro"):
            raise PlanRefused(f"mount {mount.at}: mode rw or ro, not {mount.mode!r}")
    seen = [plan.workspace.at, plan.home, *(mount.at for mount in plan.mounts)]
    given = [
        plan.workspace.source or "/",
        plan.home_source or "/",
        *(mount.source for mount in plan.mounts),
        *plan.readonly,
    ]
    for path in seen + given:
        if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
            raise PlanRefused(f"{path!r} is no absolute path without '..'")
    for path in seen:
        if path.split("/")[1] in ("", "proc", "dev", "sys", "usr", "etc", "bin", "sbin", "lib", "lib64", ".carrel"):
            raise PlanRefused(f"{path!r} cannot be mounted on: the system is there")
