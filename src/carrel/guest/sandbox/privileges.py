"""What a new worker gives up for good: descriptors, capabilities, files, system calls; and its resource limits."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import stat
from collections.abc import Callable
from typing import Any

from .. import syscalls
from . import root_fs, seccomp
from .spec import SandboxSpec

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

ROOT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10})
"""What a session's own root may do, within the session: change the owner and mode of files and open all of them (CHOWN,
DAC_OVERRIDE, FOWNER, FSETID), become the session's user (SETGID, SETUID), end what it started (KILL), and listen on a
low port of the session's own network (NET_BIND_SERVICE). No mounts, no tracing, no devices."""


def become_root() -> None:
    """Become the session's own root, which will give up all but a few of its capabilities."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def environment(spec: SandboxSpec, settings: dict[str, Any], user: str) -> dict[str, str]:
    """The worker's environment variables: none of the host's but those that the settings name."""
    own = {"PATH": PATH, "HOME": spec.home, "USER": user, "LOGNAME": user, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    if not spec.confined:
        own = {"PATH": PATH, "HOME": spec.workspace.source or "/", "LANG": "C.UTF-8"}
    return {**own, **{str(name): str(value) for name, value in settings.get("env", {}).items()}}


def drop_privileges(spec: SandboxSpec, step: root_fs.Step, *, forks: bool, root: bool) -> int | None:
    """For good. With `forks`, returns the descriptor on which init receives the filter's requests about setns."""
    step("limits")
    _limit_process(spec)
    step("no new privileges")
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if spec.confined or (spec.parts and os.geteuid() == 0):
        step("drop capabilities")
        syscalls.drop_capabilities(ROOT_CAPABILITIES if root else frozenset())
    if "landlock" in spec.parts:
        step("landlock")
        if spec.confined:
            fence()
        else:
            fence(*_reachable(spec))
    if "seccomp" in spec.parts:
        step("system call filter")
        return seccomp.install(seccomp.program(fork=forks, setuid=not spec.writes_to_host), listen=forks)
    return None


def _reachable(spec: SandboxSpec) -> tuple[list[str], list[str]]:
    """Without namespaces: what the session may read, and what it may write, of the host's own file system."""
    readable = [
        "/usr",
        "/bin",
        "/sbin",
        "/lib",
        "/lib32",
        "/lib64",
        "/proc",
        *root_fs.ETC_BOUND,
        *root_fs.ETC_COPIED,
        *root_fs.MACHINE_FACTS,
        *spec.readonly,
    ]
    readable += ["/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf"]
    readable += [mount.source for mount in spec.mounts if mount.mode == "ro"]
    writable = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")]
    writable += [mount.source for mount in spec.mounts if mount.mode == "rw"]
    if spec.workspace.source:
        (readable if spec.workspace.mode == "ro" else writable).append(spec.workspace.source)
    return readable, writable


def call_entry(
    entry: Callable[[int, int, dict[str, Any]], None], channel: int, init: int, settings: dict[str, Any]
) -> None:
    """Never returns: what the entry does not catch ends the process with a traceback on its stderr."""
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    entry(channel, init, settings)


# --- resource limits --------------------------------------------------------------------------------------------------


def _limit_process(spec: SandboxSpec) -> None:
    """Limits of this process and each that it starts, which none can raise again; cgroups limit the session's sum."""
    limits = spec.limits
    _lower(resource.RLIMIT_CORE, 0)
    if limits.processes is not None and spec.confined:
        # Counted per user namespace, so this session's only. Without one it would count all of the user's processes.
        _lower(resource.RLIMIT_NPROC, limits.processes)
    if limits.memory is not None and "memory" not in spec.cgroup_controllers:
        # Private writable memory of each process. RLIMIT_AS would stop programs that map much and use little.
        _lower(resource.RLIMIT_DATA, limits.memory)
    if limits.disk is not None:
        _lower(resource.RLIMIT_FSIZE, limits.disk)
    _lower(resource.RLIMIT_MSGQUEUE, 1 << 20)
    _lower(resource.RLIMIT_MEMLOCK, 8 << 20)
    _lower(resource.RLIMIT_RTPRIO, 0)
    _lower(resource.RLIMIT_NICE, 0)


def limit_open_files(spec: SandboxSpec) -> None:
    """Last of all: it also limits how many descriptors of one user may be in transit between processes before this
    one can send any, and what other sessions send counts too."""
    if spec.limits.open_files is not None:
        _lower(resource.RLIMIT_NOFILE, spec.limits.open_files)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


# --- Landlock --------------------------------------------------------------------------------------------------------
#
# A process restricts itself, without any privilege. To a session in namespaces Landlock adds what they lack: no signals
# to and no tracing of processes outside the session, and no abstract socket of the host when its network is shared.
# Without namespaces it also restricts access to files.

LANDLOCK_CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_BLOCK, MAKE_CHAR = 1 << 11, 1 << 6
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
READING = EXECUTE | READ_FILE | READ_DIR


class _Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr."""

    _fields_ = (("handled_fs", ctypes.c_uint64), ("handled_net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def landlock_version() -> int:
    """The kernel's version of the interface; 0 where there is none."""
    try:
        return syscalls.call("landlock_create_ruleset", None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    except OSError:
        return 0


def file_rights(known: int) -> int:
    """All rights over files that this version can withhold."""
    count = {1: 13, 2: 14, 3: 15, 4: 15}.get(known, 16)
    return int((1 << count) - 1)


def fence(readable: list[str] | None = None, writable: list[str] | None = None) -> bool:
    """Restrict the calling process for good; False where the kernel has no Landlock.

    With lists of paths access to files is restricted too; without them only signals, tracing and sockets.
    """
    known = landlock_version()
    if known == 0:
        return False
    scoped = SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS if known >= 6 else 0
    guarded = file_rights(known) if readable is not None else 0
    if not guarded and not scoped:
        # Some right must be named, and no session makes block devices. Any domain stops tracing.
        guarded = MAKE_BLOCK
    ruleset = _Ruleset(guarded, 0, scoped)
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    descriptor = syscalls.call("landlock_create_ruleset", ctypes.byref(ruleset), size, 0)
    try:
        for path in readable or []:
            _allow(descriptor, path, guarded & READING)
        for path in writable or []:
            _allow(descriptor, path, guarded & ~(MAKE_BLOCK | MAKE_CHAR))
        syscalls.call("landlock_restrict_self", descriptor, 0)
    finally:
        os.close(descriptor)
    return True


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= FILE_RIGHTS
        rule = _PathRule(rights, parent)
        syscalls.call("landlock_add_rule", ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(parent)
