"""What this machine can do for a sandbox, each part tried for real, once in the life of the process.

`probe()` waits for a child for some 100 ms the first time; in an event loop call it in a thread.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

from carrel.errors import SandboxUnavailable

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
class Part:
    """One row of `carrel doctor`."""

    name: str
    what: str
    in_force: bool
    why: str
    """Empty when in force, else what the kernel said."""
    how_to_get_it: str


_PATIENCE = 120
"""Seconds: a machine on which hundreds of programs start at once is slow, and not lacking anything."""

_one_at_a_time = threading.Lock()


def probe(python: str | None = None) -> tuple[Part, ...]:
    """Every part, in the order of `WHAT`; tried with the given interpreter, or with this one.

    Of those who ask at once the first tries, and the others wait for what it finds."""
    with _one_at_a_time:
        return _tried(python)


@functools.cache
def _tried(python: str | None) -> tuple[Part, ...]:
    if not sys.platform.startswith("linux"):
        why = f"namespaces are a thing of Linux; this is {sys.platform}"
        return tuple(Part(name, what, False, why, "use a ContainerExecutor") for name, what in WHAT.items())
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zygote.py")
    command = [python or sys.executable, "-I", program, "trying"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False, env={})
    except subprocess.TimeoutExpired:
        raise SandboxUnavailable(
            f"what this machine can do for a sandbox was not found out in {_PATIENCE} s: is it very busy? Try again"
        ) from None
    if tried.returncode != 0:
        why = f"the attempt itself failed: {tried.stderr.strip().splitlines()[-1:] or tried.returncode}"
        return tuple(Part(name, what, False, why, "report this to the makers of carrel") for name, what in WHAT.items())
    said = json.loads(tried.stdout)
    results = {**said["parts"], **said["cgroups"]}
    return tuple(_part(name, results.get(name)) for name in WHAT)


def _part(name: str, error: str | None) -> Part:
    return Part(name, WHAT[name], error is None, error or "", "" if error is None else remedy(name))


def remedy(name: str) -> str:
    """What the machine's owner can do about a missing part."""
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


def can_confine(parts: tuple[Part, ...]) -> bool:
    """Whether a session can have namespaces and its own file system here."""
    return set(NEEDED) <= {part.name for part in parts if part.in_force}


def usable(parts: tuple[Part, ...]) -> list[str]:
    """The `parts` of a spawn's settings: all that this machine can do."""
    names = [part.name for part in parts if part.in_force]
    kept = [name for name in names if name not in ("memory", "pids", "cpu", "sockets")]
    if {"memory", "pids", "cpu"} & set(names):
        kept.append("cgroup")
    if not can_confine(parts):
        kept = [name for name in kept if name in ("seccomp", "landlock", "cgroup")]
    return kept
