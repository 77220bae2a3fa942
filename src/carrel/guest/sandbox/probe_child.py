"""Tries each part of the sandbox once, each in a child process, and prints the results as JSON.

Run as a program (`python -I …/sandbox/__main__.py probe`): it forks, which a host with threads should not.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from typing import Any

from .. import syscalls
from . import cgroups, namespaces, privileges, root_fs, seccomp
from .spec import SandboxLimits

USER = syscalls.CLONE_NEWUSER
MOUNT = USER | syscalls.CLONE_NEWNS
PID = MOUNT | syscalls.CLONE_NEWPID


def _try_in_child(flags: int, attempt: Callable[[], None]) -> str | None:
    """None when it worked, else the kernel's error; id maps are written as for a session."""
    result_read, result_write = os.pipe()
    go_read, go_write = os.pipe()
    try:
        pid = syscalls.fork_with_namespaces(flags)
    except OSError as error:
        return str(error)
    if pid == 0:
        result = ""
        # While this process has it open too, the end of the parent could not be read.
        os.close(go_write)
        try:
            if not os.read(go_read, 1):
                os._exit(1)
            if flags & USER:
                os.setresgid(1000, 1000, 1000)
                os.setresuid(1000, 1000, 1000)
            attempt()
        except BaseException as error:  # noqa: BLE001 -- it is the result
            result = str(error) or type(error).__name__
        os.write(result_write, result.encode())
        os._exit(0)
    os.close(result_write)
    try:
        if flags & USER:
            namespaces.write_maps(pid, 1000, namespaces.outer_ids(), None)
    except OSError as error:
        os.close(go_write)
        os.waitpid(pid, 0)
        return f"the id maps could not be written: {error}"
    os.write(go_write, b"g")
    result = os.read(result_read, 4096).decode()
    _, status = os.waitpid(pid, 0)
    for descriptor in (result_read, go_read, go_write):
        os.close(descriptor)
    return result or (None if status == 0 else f"the attempt exited with status {status}")


def _own_root() -> None:
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    root_fs.tmpfs("/tmp", size=1 << 20, files=100)
    root_fs.bind("/usr", "/tmp/usr", root_fs.READ_ONLY)


def _own_proc() -> None:
    _own_root()
    os.mkdir("/tmp/proc")
    syscalls.mount("proc", "/tmp/proc", "proc")
    if os.listdir("/tmp/proc/self/fd") == []:
        raise OSError(2, "the new /proc is empty")


def _overlay() -> None:
    _own_root()
    for name in ("lower", "upper", "work"):
        os.mkdir("/tmp/" + name)
    os.chdir("/tmp")
    root_fs.overlay("lower", "upper", "work", "/tmp/merged")
    with open("/tmp/merged/file", "w", encoding="utf-8") as file:
        file.write("x")


def _filter() -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.program())
    try:
        syscalls.unshare(syscalls.CLONE_NEWUTS)
    except PermissionError:
        return
    raise OSError(0, "the filter is in place but refuses nothing")


def _listener() -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if not privileges.landlock_version():
        raise OSError(95, "Landlock is missing: a fork's init could not be kept from its parent")
    seccomp.install(seccomp.program(fork=True), listen=True)


def _fence() -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if not privileges.fence():
        raise OSError(95, "this kernel has no Landlock, or it is switched off")


def _nothing() -> None:
    """Creating the namespaces is the attempt."""


_ATTEMPTS: dict[str, tuple[int, Callable[[], None]]] = {
    "user": (USER, _nothing),
    "mount": (MOUNT, _own_root),
    "pid": (PID, _own_proc),
    "ipc": (PID | syscalls.CLONE_NEWIPC, _nothing),
    "uts": (PID | syscalls.CLONE_NEWUTS, lambda: syscalls.sethostname("tried")),
    "net": (PID | syscalls.CLONE_NEWNET, namespaces.start_loopback),
    "overlay": (MOUNT, _overlay),
    "seccomp": (0, _filter),
    "landlock": (0, _fence),
    "fork": (0, _listener),
}


def _controllers() -> dict[str, str | None]:
    """For each controller None, or why the session cannot be held by it."""
    found: dict[str, str | None] = {}
    found_hierarchies = cgroups.hierarchies()
    for controller in cgroups.CONTROLLERS:
        if controller not in found_hierarchies:
            found[controller] = "there is no cgroup with this controller in which this process may create groups"
            continue
        try:
            limits = SandboxLimits(memory=1 << 30, cpus=1.0, processes=100)
            cgroups.CgroupSet(cgroups.name_for(0), limits, {controller: found_hierarchies[controller]}).remove()
            found[controller] = None
        except OSError as error:
            found[controller] = str(error)
    return found


def probe() -> dict[str, Any]:
    if not syscalls.NUMBERS:
        why = f"the sandbox knows x86_64 and aarch64 machines, not {platform.machine()}"
        return {
            "parts": dict.fromkeys([*_ATTEMPTS, "sockets"], why),
            "cgroups": dict.fromkeys(cgroups.CONTROLLERS, why),
        }
    parts = {name: _try_in_child(flags, attempt) for name, (flags, attempt) in _ATTEMPTS.items()}
    known = privileges.landlock_version()
    parts["sockets"] = None if known >= 6 else f"version {known} of Landlock cannot do it; version 6 can"
    held = _controllers()
    if parts["user"] is None and namespaces.count_processes(namespaces.outer_ids()):
        held["pids"] = None
    return {"parts": parts, "cgroups": held}


def main() -> None:
    print(json.dumps(probe()))
