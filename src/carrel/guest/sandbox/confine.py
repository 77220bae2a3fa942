"""The last steps of the worker child: everything it could still abuse is given up, and its entry is called."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

from .. import syscalls
from . import etc_files, filter, landlock, limits
from .place import MACHINE_FACTS, Step
from .plan import Plan

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


ROOT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10})
"""What a session's own root may do, within the session: change the owner and mode of files and open all of them (CHOWN,
DAC_OVERRIDE, FOWNER, FSETID), become the session's user (SETGID, SETUID), end what it started (KILL), and listen on a
low port of the session's own network (NET_BIND_SERVICE). No mounts, no tracing, no devices."""


def become_root() -> None:
    """The session's own root, in a process that will give up all but a few of its rights."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def environment(plan: Plan, settings: dict[str, Any], user: str) -> dict[str, str]:
    """Nothing of the host's but what was named."""
    own = {"PATH": PATH, "HOME": plan.home, "USER": user, "LOGNAME": user, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    if not plan.confined:
        own = {"PATH": PATH, "HOME": plan.workspace.source or "/", "LANG": "C.UTF-8"}
    return {**own, **{str(name): str(value) for name, value in settings.get("env", {}).items()}}


def keep_only(wanted: set[int]) -> None:
    """Close every descriptor but these and the first three."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in wanted:
            try:
                os.close(number)
            except OSError as error:
                if error.errno != 9:  # The listing's own descriptor is gone already.
                    raise


def usual_signals() -> None:
    """As a Python program finds them at its start; no handler of the zygote stays."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def standard_streams(stdout: int, stderr: int) -> None:
    nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for source, number in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, number, inheritable=True)
        if source > 2:
            os.close(source)


def give_up_privileges(plan: Plan, step: Step, *, forks: bool, root: bool) -> int | None:
    """For good. With `forks`, returns the descriptor on which init answers for setns."""
    step("limits")
    limits.apply(plan)
    step("no new privileges")
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if plan.confined or (plan.parts and os.geteuid() == 0):
        step("drop capabilities")
        syscalls.drop_capabilities(ROOT_CAPABILITIES if root else frozenset())
    if "landlock" in plan.parts:
        step("landlock")
        if plan.confined:
            landlock.fence()
        else:
            landlock.fence(*reachable(plan))
    if "seccomp" in plan.parts:
        step("system call filter")
        return filter.install(filter.program(fork=forks, setuid=not plan.reaches_the_disk), listen=forks)
    return None


def reachable(plan: Plan) -> tuple[list[str], list[str]]:
    """Without namespaces: what may be read, and what may be written, of the host's own file system."""
    readable = [
        "/usr",
        "/bin",
        "/sbin",
        "/lib",
        "/lib32",
        "/lib64",
        "/proc",
        *etc_files.BOUND,
        *etc_files.COPIED,
        *plan.readonly,
    ]
    readable += ["/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf", *MACHINE_FACTS]
    readable += [mount.source for mount in plan.mounts if mount.mode == "ro"]
    writable = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")]
    writable += [mount.source for mount in plan.mounts if mount.mode == "rw"]
    if plan.workspace.source:
        (readable if plan.workspace.mode == "ro" else writable).append(plan.workspace.source)
    return readable, writable


def call_entry(
    entry: Callable[[int, int, dict[str, Any]], None], line: int, init: int, settings: dict[str, Any]
) -> None:
    """Never returns: what the entry does not catch ends the process with a traceback on its stderr."""
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    entry(line, init, settings)
