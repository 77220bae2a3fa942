"""What a new worker gives up for good: descriptors, capabilities, files, system calls; and its resource limits."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

from .. import syscalls
from . import landlock, root_fs, seccomp
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


def close_others(kept: set[int]) -> None:
    """Close every descriptor but these and the first three."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in kept:
            try:
                os.close(number)
            except OSError as error:
                if error.errno != 9:  # The listing's own descriptor is closed already.
                    raise


def reset_signals() -> None:
    """Handle signals as a Python program does at its start, without the zygote's handlers."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def set_standard_streams(stdout: int, stderr: int) -> None:
    nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for source, number in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, number, inheritable=True)
        if source > 2:
            os.close(source)


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
            landlock.fence()
        else:
            landlock.fence(*_reachable(spec))
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
