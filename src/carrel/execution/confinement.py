"""Which parts of the sandbox a session gets on this machine, and what may be said of them."""

from __future__ import annotations

from dataclasses import dataclass

from carrel.errors import SandboxUnavailable
from carrel.execution.settings import SandboxMode, SubprocessConfig
from carrel.guest.sandbox.probe import NEEDED, Part, can_confine, probe, usable

REQUIRED = (*NEEDED, "ipc", "uts", "net", "overlay", "seccomp")
"""What `sandbox="required"` insists on; limits of the whole session come on top when they are asked for."""
ALWAYS = {"timeout", "reset", "interrupt", "streaming", "process_isolation"}


@dataclass(frozen=True)
class Confinement:
    """What is in force for a session."""

    parts: tuple[str, ...]
    confined: bool
    """Whether it has namespaces and a file system of its own."""
    groups: frozenset[str] = frozenset()
    """The cgroup controllers that can hold it."""

    def capabilities(self, config: SubprocessConfig) -> set[str]:
        found = set(ALWAYS)
        if self.confined:
            found.add("filesystem_isolation")
            if "net" in self.parts and not config.network:
                found.add("network_isolation")
        # Without a cgroup the limit holds for each process and not for their sum: that is less than the word says.
        if config.limits.memory is not None and "memory" in self.groups:
            found.add("memory_limit")
        if config.limits.cpus is not None and "cpu" in self.groups:
            found.add("cpu_limit")
        if self.can_fork(config):
            found.add("fork")
        return found

    def can_fork(self, config: SubprocessConfig) -> bool:
        return self.why_no_fork(config) is None

    def why_no_fork(self, config: SubprocessConfig) -> str | None:
        """Why sessions like this cannot be forked alive, or None."""
        if config.workspace is not None and config.workspace_mode == "rw":
            return (
                f"the workspace is the folder {config.workspace} itself (mode rw), which there cannot be two of; "
                "use mode overlay to be able to fork"
            )
        if not self.confined:
            return "without a sandbox two sessions cannot have different files at the same path"
        if "fork" not in self.parts:
            return "this machine lacks a part of the sandbox that it needs; `carrel doctor` shows which"
        return None


def confinement(mode: SandboxMode, config: SubprocessConfig, parts: tuple[Part, ...] | None = None) -> Confinement:
    """For these settings here; waits for the first probe. SandboxUnavailable when required and not possible."""
    if mode == "off":
        return Confinement((), confined=False)
    parts = probe() if parts is None else parts
    if mode == "required":
        missing = [part for part in parts if part.name in _required(config) and not part.in_force]
        if missing:
            raise SandboxUnavailable("a sandbox is required, and this machine lacks " + "; ".join(map(_said, missing)))
    groups = frozenset(part.name for part in parts if part.name in ("memory", "pids", "cpu") and part.in_force)
    return Confinement(tuple(usable(parts)), can_confine(parts), groups)


def _required(config: SubprocessConfig) -> set[str]:
    wanted = set(REQUIRED)
    if config.limits.cpus is not None:
        wanted.add("cpu")
    if config.limits.memory is not None:
        wanted.add("memory")
    return wanted


def _said(part: Part) -> str:
    return f"{part.what}: {part.why} (to get it: {part.how_to_get_it})"
