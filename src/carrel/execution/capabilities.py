"""What this machine offers: the parts of the sandbox, each tried once, and container engines."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import carrel.guest.sandbox
from carrel.errors import SandboxUnavailable
from carrel.execution.config import SandboxMode, SubprocessConfig
from carrel.execution.docker_engine import connect
from carrel.guest.sandbox.namespaces import offers_root

NEEDED = ("user", "mount", "pid")
WHAT = {
    "user": "a user of its own without rights outside (user namespace)",
    "mount": "a file system of its own (mount namespace)",
    "pid": "only its own processes in sight, and its own /proc (pid namespace)",
    "ipc": "no shared memory or queues with the host (ipc namespace)",
    "uts": "a host name of its own (uts namespace)",
    "net": "the network can be switched off (network namespace)",
    "overlay": "a workspace that keeps changes apart (overlay)",
    "seccomp": "dangerous system calls are refused (seccomp)",
    "landlock": "no tracing beyond the session (Landlock)",
    "sockets": "no signals and no abstract sockets beyond the session, also with the network on (Landlock 6)",
    "fork": "live forks of a session",
    "memory": "a limit on the memory of the whole session (cgroup)",
    "pids": "a limit on the processes of the whole session (user namespace, or cgroup)",
    "cpu": "a share of the processors (cgroup)",
}
INSTEAD = {
    "memory": "; without it each process is limited, not their sum",
    "pids": "; Linux 5.14 and newer count them in each user namespace",
    "cpu": "; without it processors are shared as among all programs",
}


@dataclass(frozen=True)
class HostPart:
    """One row of `carrel doctor`."""

    name: str
    what: str
    in_force: bool
    why: str
    """The kernel's error; empty when the part is active."""
    how_to_get_it: str


_PATIENCE = 120
"""Seconds; a machine on which hundreds of programs start at once is slow."""

_one_at_a_time = threading.Lock()


def probe(python: str | None = None) -> tuple[HostPart, ...]:
    """Try every part, in the order of `WHAT`, with the given interpreter or with this one; concurrent callers share one
    attempt."""
    with _one_at_a_time:
        return _tried(python)


@functools.cache
def _tried(python: str | None) -> tuple[HostPart, ...]:
    if not sys.platform.startswith("linux"):
        why = f"namespaces exist on Linux only; this is {sys.platform}"
        return tuple(HostPart(name, what, False, why, "use a ContainerExecutor") for name, what in WHAT.items())
    program = os.path.join(os.path.dirname(carrel.guest.sandbox.__file__), "__main__.py")
    command = [python or sys.executable, "-I", program, "probe"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False, env={})
    except subprocess.TimeoutExpired:
        raise SandboxUnavailable(
            f"the sandbox could not be tried within {_PATIENCE} s: the machine may be very busy; try again"
        ) from None
    if tried.returncode != 0:
        why = f"the attempt itself failed: {tried.stderr.strip().splitlines()[-1:] or tried.returncode}"
        return tuple(HostPart(name, what, False, why, "report this as a bug of carrel") for name, what in WHAT.items())
    answer = json.loads(tried.stdout)
    results = {**answer["parts"], **answer["cgroups"]}
    return tuple(_part(name, results.get(name)) for name in WHAT)


def _part(name: str, error: str | None) -> HostPart:
    return HostPart(name, WHAT[name], error is None, error or "", "" if error is None else remedy(name))


def remedy(name: str) -> str:
    """What an administrator can do about a missing part."""
    if name in ("memory", "pids", "cpu"):
        wish = "start carrel with `systemd-run --user --scope -p Delegate=yes`, or as root"
        return wish + INSTEAD[name]
    if name == "landlock":
        return "Linux 5.13 or newer with `landlock` in its lsm= list"
    if name == "sockets":
        return "Linux 6.12 or newer; until then do not give hostile code the network"
    if name == "seccomp":
        return "a kernel with CONFIG_SECCOMP_FILTER"
    if name == "fork":
        return "Linux 5.13 or newer with seccomp and Landlock"
    return _namespace_remedy(name)


def _namespace_remedy(name: str) -> str:
    if _setting("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "sysctl kernel.unprivileged_userns_clone=1"
    if _setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that allows `userns`"
    if _setting("/proc/sys/user/max_user_namespaces") == "0":
        return "sysctl user.max_user_namespaces=10000"
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        unmask = " --security-opt systempaths=unconfined" if name == "pid" else ""
        return "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined" + unmask
    return "Linux 5.12 or newer with unprivileged user namespaces switched on"


def _setting(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def can_confine(parts: tuple[HostPart, ...]) -> bool:
    """Whether sessions can have namespaces and their own file system here."""
    return set(NEEDED) <= {part.name for part in parts if part.in_force}


def usable(parts: tuple[HostPart, ...]) -> list[str]:
    """The `parts` of the settings of a new session: all that this machine offers."""
    names = [part.name for part in parts if part.in_force]
    kept = [name for name in names if name not in ("memory", "pids", "cpu", "sockets")]
    if {"memory", "pids", "cpu"} & set(names):
        kept.append("cgroup")
    if not can_confine(parts):
        kept = [name for name in kept if name in ("seccomp", "landlock", "cgroup")]
    return kept


REQUIRED = (*NEEDED, "ipc", "uts", "net", "overlay", "seccomp")
"""The parts that `sandbox="required"` needs; with limits also the cgroup controllers for them."""
ALWAYS = {"timeout", "reset", "interrupt", "streaming", "process_isolation"}


@dataclass(frozen=True)
class Confinement:
    """The protections that are active for a session."""

    parts: tuple[str, ...]
    confined: bool
    """Whether it has namespaces and a file system of its own."""
    groups: frozenset[str] = frozenset()
    """The cgroup controllers that can limit it."""

    def capabilities(self, config: SubprocessConfig) -> set[str]:
        found = set(ALWAYS)
        if self.confined:
            found.add("filesystem_isolation")
            if "net" in self.parts and not config.network:
                found.add("network_isolation")
            if offers_root():
                found.add("root_user")
        # Without a cgroup the limit holds for each process and not for their sum, which is less than it promises.
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
                f"the workspace is the folder {config.workspace} itself (mode rw), which cannot be copied; "
                "use mode overlay to be able to fork"
            )
        if not self.confined:
            return "without a sandbox two sessions cannot have different files at the same path"
        if "fork" not in self.parts:
            return "this machine lacks a part of the sandbox that it needs; `carrel doctor` shows which"
        return None


def confinement(mode: SandboxMode, config: SubprocessConfig, parts: tuple[HostPart, ...] | None = None) -> Confinement:
    """The confinement for these settings; waits for the probe. SandboxUnavailable if a required part is missing."""
    if mode == "off":
        return Confinement((), confined=False)
    parts = probe() if parts is None else parts
    if mode == "required":
        missing = [part for part in parts if part.name in _required(config) and not part.in_force]
        if missing:
            raise SandboxUnavailable(
                "a sandbox is required, and this machine lacks " + "; ".join(map(_missing_part, missing))
            )
    groups = frozenset(part.name for part in parts if part.name in ("memory", "pids", "cpu") and part.in_force)
    return Confinement(tuple(usable(parts)), can_confine(parts), groups)


def _required(config: SubprocessConfig) -> set[str]:
    wanted = set(REQUIRED)
    if config.limits.cpus is not None:
        wanted.add("cpu")
    if config.limits.memory is not None:
        wanted.add("memory")
    return wanted


def _missing_part(part: HostPart) -> str:
    return f"{part.what}: {part.why} (to get it: {part.how_to_get_it})"


_ENGINE = "containers, of the engine {} (ContainerExecutor)"
_KERNEL = "a kernel of its own for the code (gVisor: runtime='runsc')"
_GET_ENGINE = (
    "pip install 'carrel-sessions[container]', and start Docker or Podman; DOCKER_HOST names another than Docker's own"
)
_GET_KERNEL = "install runsc and name it in the engine's settings: `runsc install`, then start the engine again"


def engine_parts(address: str | None = None) -> tuple[HostPart, ...]:
    """Two rows of `carrel doctor` about the container engine."""
    try:
        engine = connect(address)
    except SandboxUnavailable as problem:
        why = str(problem).partition(". ")[0]
        return (
            HostPart("engine", _ENGINE.format("that answers"), False, why, _GET_ENGINE),
            HostPart("runsc", _KERNEL, False, "no container engine answers", _GET_KERNEL),
        )
    has = engine.has_runtime("runsc")
    why = "" if has else f"the engine has the runtimes {', '.join(sorted(engine.info().get('Runtimes') or ['?']))}"
    return (
        HostPart("engine", _ENGINE.format(f"at {engine.where}, version {engine.version()}"), True, "", ""),
        HostPart("runsc", _KERNEL, has, why, "" if has else _GET_KERNEL),
    )
