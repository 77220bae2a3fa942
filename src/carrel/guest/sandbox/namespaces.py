"""Namespaces: which a session gets, who it is outside of them, and the loopback device of a network of its own.

Inside, a session is one user, 1000 by default. Outside it is the user who runs carrel, or, when that is root, a number
from a range that no account uses: so that even a way out of the namespace leads to an account which owns nothing.
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
from .plan import Plan

# systemd lists the numbers from here up to 2^31 as used by nobody.
# The lower half is for users, the upper half for the roots of their sessions.
UNUSED_FIRST, UNUSED_COUNT = 0x7000_0000, 0x07FF_0000
NOBODY = 65534
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def flags(plan: Plan) -> int:
    """The namespaces of a plan, as clone takes them."""
    if not plan.confined:
        return 0
    wanted = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID
    if "ipc" in plan.parts:
        wanted |= syscalls.CLONE_NEWIPC
    if "uts" in plan.parts:
        wanted |= syscalls.CLONE_NEWUTS
    if "net" in plan.parts and not plan.network:
        wanted |= syscalls.CLONE_NEWNET
    return wanted


def count_processes(outside: tuple[int, int]) -> bool:
    """Whether the kernel holds a session of this outer user to its number of processes, counted for it alone.

    Since Linux 5.14 they are counted in each user namespace apart; and never are those of the machine's root, who may
    be behind any number where the numbers are mapped already.
    """
    first, second = re.findall(r"\d+", os.uname().release)[:2]
    with open("/proc/self/uid_map", encoding="ascii") as file:
        unmapped = file.read().split() == ["0", "0", "4294967295"]
    return (int(first), int(second)) >= (5, 14) and unmapped and outside[0] != 0


def outer_ids() -> tuple[int, int]:
    """Who a session is outside; for root an unused number, or nobody where the numbers are few (in a container)."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    chosen = UNUSED_FIRST + random.SystemRandom().randrange(UNUSED_COUNT)
    for candidate in (chosen, NOBODY):
        if all(_is_mapped(candidate, f"/proc/self/{kind}_map") for kind in ("uid", "gid")):
            return candidate, candidate
    return 0, 0


def _is_mapped(number: int, path: str) -> bool:
    with open(path, encoding="ascii") as file:
        rows = [[int(word) for word in line.split()] for line in file]
    return any(first <= number < first + count for first, _, count in rows)


def outer_root(outside: tuple[int, int]) -> int | None:
    """The number outside of a session's own root; None where there is none, because carrel is not root itself, or has
    no number to spare (in a container)."""
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
    _tell(f"/proc/{pid}/setgroups", "deny")
    for kind, number in (("uid", outside[0]), ("gid", outside[1])):
        rows = [f"{inside} {number} 1"] + ([] if root is None else [f"0 {root} 1"])
        _tell(f"/proc/{pid}/{kind}_map", "\n".join(rows))


def _tell(path: str, text: str) -> None:
    """Without the layers of `open`, which ask five times what kind of file it is."""
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
                _tell(f"/proc/{pid}/{kind}_map", f"{inside} {outside} 1")
            return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
        request = struct.pack("16sH22x", b"lo", 0)
        (now,) = struct.unpack("16xH22x", fcntl.ioctl(line, SIOCGIFFLAGS, request))
        fcntl.ioctl(line, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", now | IFF_UP))
