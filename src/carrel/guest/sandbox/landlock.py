"""Landlock: a process restricts itself, without any privilege.

To a session in namespaces it adds what they lack: no signals to and no tracing of processes outside the session, and
no abstract socket of the host when its network is shared. Without namespaces it also restricts access to files.
"""

from __future__ import annotations

import ctypes
import os
import stat

from .. import syscalls

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


def version() -> int:
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
    known = version()
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
