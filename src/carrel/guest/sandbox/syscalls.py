"""System calls that the standard library lacks, through ctypes; each raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os

from .numbers import NUMBERS

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
SIGCHLD = 17

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
MNT_DETACH = 2

OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
MOUNT_ATTR_IDMAP = 0x00100000

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
# NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE, each with its lock; keep-caps locked off.
SECUREBITS_LOCKED = 0b11101111

libc = ctypes.CDLL(None, use_errno=True)
# The same library called with the interpreter's lock held: a forked child must come back holding it.
_holding_lock = ctypes.PyDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
_holding_lock.syscall.restype = ctypes.c_long

Argument = "int | bytes | ctypes.Array[ctypes.c_char] | None"


class MountAttr(ctypes.Structure):
    """struct mount_attr of linux/mount.h."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def call(name: str, *arguments: object) -> int:
    """One system call by name; integers go as 64 bits, bytes and ctypes objects as pointers."""
    if name not in NUMBERS:
        raise OSError(38, f"{name} is not known on this machine")
    result: int = libc.syscall(ctypes.c_long(NUMBERS[name]), *[_word(argument) for argument in arguments])
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _word(argument: object) -> object:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _path(path: str | None) -> bytes | None:
    return None if path is None else os.fsencode(path)


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    call("mount", _path(source), _path(target), _path(kind), flags, _path(options))


def unmount(target: str, flags: int = MNT_DETACH) -> None:
    call("umount2", _path(target), flags)


def pivot_root(new: str, old: str) -> None:
    call("pivot_root", _path(new), _path(old))


def open_tree(path: str, *, recursive: bool = True) -> int:
    """A detached copy of the mounts at `path`, as a file descriptor."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    return call("open_tree", AT_FDCWD, _path(path), flags)


def move_mount(tree: int, target: str) -> None:
    call("move_mount", tree, b"", AT_FDCWD, _path(target), MOVE_MOUNT_F_EMPTY_PATH)


def mount_setattr(tree: int, attributes: int, *, recursive: bool = True, idmap: int | None = None) -> None:
    """Add attributes (read-only, nosuid, …) to a tree of mounts, or map its owners through a user namespace."""
    wanted = MountAttr(attributes | (0 if idmap is None else MOUNT_ATTR_IDMAP), 0, 0, idmap or 0)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    call("mount_setattr", tree, b"", flags, ctypes.byref(wanted), ctypes.sizeof(wanted))


def prctl(option: int, *arguments: int) -> int:
    padded = [*arguments, 0, 0, 0, 0][:4]
    return call("prctl", option, *padded)


def unshare(flags: int) -> None:
    call("unshare", flags)


def setns(descriptor: int, flags: int) -> None:
    call("setns", descriptor, flags)


def sethostname(name: str) -> None:
    raw = name.encode()
    call("sethostname", raw, len(raw))


def pidfd_open(pid: int) -> int:
    return call("pidfd_open", pid, 0)


def fork_with(flags: int) -> int:
    """fork() whose child starts in the new namespaces that `flags` name; in a process with one thread only.

    os.fork cannot make a child the first of a pid namespace without a process in between. No fork hooks run, neither
    Python's nor those of C libraries: there are no threads whose locks they would have to see to, each would write to
    pages that are shared otherwise, and the worker, for whom random numbers must begin anew, comes of an os.fork.
    """
    pid: int = _holding_lock.syscall(
        ctypes.c_long(NUMBERS["clone"]),
        ctypes.c_long(flags | SIGCHLD),
        ctypes.c_long(0),
        ctypes.c_long(0),
        ctypes.c_long(0),
        ctypes.c_long(0),
    )
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"clone: {os.strerror(number)}")
    return pid


def fork_as_it_is() -> int:
    """fork() with the hooks of C libraries and without Python's own, which the caller sees to."""
    pid: int = _holding_lock.fork()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"fork: {os.strerror(number)}")
    return pid


def drop_capabilities(kept: frozenset[int] = frozenset()) -> None:
    """Give up every capability but those for good, also those that a set-user-ID program or root would bring."""
    if not kept:
        prctl(PR_SET_SECUREBITS, SECUREBITS_LOCKED)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        if capability in kept:
            continue
        # Without the detour over call(): there are forty of them in every start.
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            if number == 22:  # One past the last that this kernel knows.
                break
            raise OSError(number, f"prctl PR_CAPBSET_DROP {capability}: {os.strerror(number)}")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    # Effective, permitted and inheritable, of the capabilities below 32; then the same of those above.
    left = sum(1 << capability for capability in kept)
    call("capset", header, (ctypes.c_uint32 * 6)(left, left, 0, 0, 0, 0))
