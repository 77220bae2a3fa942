"""Namespaces: which ones a session gets, its user ids outside of them, and the loopback device of its network.

Inside, a session is one user, 1000 by default. Outside it is the user who runs carrel, or, when that is root, a number
from a range that no account uses, so that even an escape from the namespace leads to an account that owns nothing.
Only then is there a root inside too, for commands that the host runs as root: outside it is a second unused number.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import signal
import socket
import struct

from .. import syscalls
from .spec import SandboxSpec

# According to systemd, the numbers from here up to 2^31 are unused.
# The lower half is for users, the upper half for the roots of their sessions.
UNUSED_FIRST, UNUSED_COUNT = 0x7000_0000, 0x07FF_0000
OVERFLOW_ID = 65534
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def clone_flags(spec: SandboxSpec) -> int:
    """The namespaces that a spec asks for, as flags of clone."""
    if not spec.confined:
        return 0
    wanted = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID
    if "ipc" in spec.parts:
        wanted |= syscalls.CLONE_NEWIPC
    if "uts" in spec.parts:
        wanted |= syscalls.CLONE_NEWUTS
    if "net" in spec.parts and not spec.network:
        wanted |= syscalls.CLONE_NEWNET
    return wanted


def count_processes(outside: tuple[int, int]) -> bool:
    """Whether RLIMIT_NPROC limits a session of this outer user, and counts its processes only.

    Since Linux 5.14 each user namespace has its own count. The machine's root is never limited, and may be behind any
    number where the numbers are mapped already.
    """
    first, second = re.findall(r"\d+", os.uname().release)[:2]
    with open("/proc/self/uid_map", encoding="ascii") as file:
        unmapped = file.read().split() == ["0", "0", "4294967295"]
    return (int(first), int(second)) >= (5, 14) and unmapped and outside[0] != 0


def outer_ids() -> tuple[int, int]:
    """User and group of a session outside: for root an unused number, or 65534 in a container, which has few."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    chosen = UNUSED_FIRST + random.SystemRandom().randrange(UNUSED_COUNT)
    for candidate in (chosen, OVERFLOW_ID):
        if all(_is_mapped(candidate, f"/proc/self/{kind}_map") for kind in ("uid", "gid")):
            return candidate, candidate
    return 0, 0


def _is_mapped(number: int, path: str) -> bool:
    with open(path, encoding="ascii") as file:
        rows = [[int(word) for word in line.split()] for line in file]
    return any(first <= number < first + count for first, _, count in rows)


def outer_root(outside: tuple[int, int]) -> int | None:
    """The outer number of a session's own root; None where there is no such root, because carrel is not root itself, or
    has no number to spare (in a container)."""
    wanted = outside[0] + UNUSED_COUNT
    if outside[0] < UNUSED_FIRST or not all(_is_mapped(wanted, f"/proc/self/{kind}_map") for kind in ("uid", "gid")):
        return None
    return wanted


def offers_root() -> bool:
    """Whether sessions of this process can run commands as root."""
    return outer_root(outer_ids()) is not None


def has_root() -> bool:
    """Whether this process is in a session with a root of its own."""
    return _is_mapped(0, "/proc/self/uid_map")


def write_maps(pid: int, inside: int, outside: tuple[int, int], root: int | None) -> None:
    """One user and one group, and root where there is one; supplementary groups cannot be changed any more."""
    _write(f"/proc/{pid}/setgroups", "deny")
    for kind, number in (("uid", outside[0]), ("gid", outside[1])):
        rows = [f"{inside} {number} 1"] + ([] if root is None else [f"0 {root} 1"])
        _write(f"/proc/{pid}/{kind}_map", "\n".join(rows))


def _write(path: str, text: str) -> None:
    """Without `open`, which makes several more system calls."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)


class OwnerMaps:
    """As root: user namespaces that make a folder's owner appear as the session's user, for id-mapped mounts."""

    def __init__(self, outside: tuple[int, int]) -> None:
        self.outside = outside
        self._made: dict[tuple[int, int], int] = {}

    def for_path(self, path: str) -> int | None:
        """A namespace for this folder, or None where nothing needs mapping."""
        if os.geteuid() != 0 or self.outside == (0, 0):
            return None
        found = os.stat(path)
        owner = (found.st_uid, found.st_gid)
        if owner not in self._made:
            self._made[owner] = self._make(owner)
        return self._made[owner]

    def _make(self, owner: tuple[int, int]) -> int:
        pid = syscalls.fork_with_namespaces(syscalls.CLONE_NEWUSER)
        if pid == 0:
            signal.pause()
            os._exit(0)
        try:
            for kind, inside, outside in (("uid", owner[0], self.outside[0]), ("gid", owner[1], self.outside[1])):
                _write(f"/proc/{pid}/{kind}_map", f"{inside} {outside} 1")
            return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def start_loopback() -> None:
    """Switch on the loopback device of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as device:
        request = struct.pack("16sH22x", b"lo", 0)
        (flags,) = struct.unpack("16xH22x", fcntl.ioctl(device, SIOCGIFFLAGS, request))
        fcntl.ioctl(device, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | IFF_UP))
