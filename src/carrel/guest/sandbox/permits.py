"""Init's word on entering a user namespace: only the one child that a live fork is waiting for may, and once."""

from __future__ import annotations

import errno
import fcntl
import select
import struct

from .. import syscalls

NOTIF_RECEIVE, NOTIF_SEND = 0xC0502100, 0xC0182101
NOTIF = struct.Struct("=QIIiIQ6Q")
ANSWER = struct.Struct("=QqiI")
CONTINUE = 1
# What a fork gets anew, in the order of entering: the user namespace gives the right to the others.
NAMES = {
    "user": syscalls.CLONE_NEWUSER,
    "mnt": syscalls.CLONE_NEWNS,
    "pid": syscalls.CLONE_NEWPID,
    "ipc": syscalls.CLONE_NEWIPC,
    "uts": syscalls.CLONE_NEWUTS,
    "net": syscalls.CLONE_NEWNET,
}


class Permits:
    """Answers for the filters of all workers that this init has started.

    Flags are in registers, so what is checked is what is run. The descriptor that setns gets could be any: the
    kernel lets this user only into namespaces it owns, which are those of its forks.
    """

    def __init__(self) -> None:
        self.listeners: set[int] = set()
        self.expected: set[int] = set()

    def answer(self, listener: int) -> bool:
        """One question, answered at once; False when nobody is left who could ask."""
        events = _events(listener)
        if not events & select.POLLIN:
            return not events & select.POLLHUP
        buffer = bytearray(NOTIF.size)
        try:
            fcntl.ioctl(listener, NOTIF_RECEIVE, buffer)
        except OSError as error:
            if error.errno == errno.ENOENT:  # Who asked is dead.
                return True
            raise
        identity, pid, _, _, _, _, _, flags, *_ = NOTIF.unpack(bytes(buffer))
        allowed = pid in self.expected and flags == syscalls.CLONE_NEWUSER
        self.expected.discard(pid)
        reply = ANSWER.pack(identity, 0, 0 if allowed else -errno.EPERM, CONTINUE if allowed else 0)
        try:
            fcntl.ioctl(listener, NOTIF_SEND, bytearray(reply))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
        return True


def _events(listener: int) -> int:
    """Looked at before receiving, which would wait for ever after a hang-up."""
    look = select.poll()
    look.register(listener, select.POLLIN)
    return sum(event for _, event in look.poll(0))


def number_of(pidfd: int) -> int:
    """The process behind a descriptor, in our own count; -1 when it is gone."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    return -1
