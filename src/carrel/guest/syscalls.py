"""System calls that the standard library lacks, through ctypes, and the numbers of those that a session may not make.

Each function raises OSError with the call's name.
"""

from __future__ import annotations

import ctypes
import os
import platform

TABLE = """
call                  x86_64  aarch64
open                       2        -
ioctl                     16       29
socket                    41      198
socketpair                53      199
setsockopt                54      208
clone                     56      220
fcntl                     72       25
creat                     85        -
chmod                     90        -
fchmod                    91       52
ptrace                   101      117
syslog                   103      116
capset                   126       91
mknod                    133        -
uselib                   134        -
personality              135       92
ustat                    136        -
sysfs                    139        -
vhangup                  153       58
modify_ldt               154        -
pivot_root               155       41
_sysctl                  156        -
prctl                    157      167
adjtimex                 159      171
chroot                   161       51
acct                     163       89
settimeofday             164      170
mount                    165       40
umount2                  166       39
swapon                   167      224
swapoff                  168      225
reboot                   169      142
sethostname              170      161
setdomainname            171      162
iopl                     172        -
ioperm                   173        -
create_module            174        -
init_module              175      105
delete_module            176      106
get_kernel_syms          177        -
query_module             178        -
quotactl                 179       60
nfsservctl               180       42
lookup_dcookie           212       18
clock_settime            227      112
kexec_load               246      104
add_key                  248      217
request_key              249      218
keyctl                   250      219
migrate_pages            256      238
openat                   257       56
mknodat                  259       33
fchmodat                 268       53
unshare                  272       97
vmsplice                 278       75
move_pages               279      239
perf_event_open          298      241
fanotify_init            300      262
prlimit64                302      261
name_to_handle_at        303      264
open_by_handle_at        304      265
clock_adjtime            305      266
setns                    308      268
process_vm_readv         310      270
process_vm_writev        311      271
kcmp                     312      272
finit_module             313      273
seccomp                  317      277
kexec_file_load          320      294
bpf                      321      280
userfaultfd              323      282
io_uring_setup           425      425
io_uring_enter           426      426
io_uring_register        427      427
open_tree                428      428
move_mount               429      429
fsopen                   430      430
fsconfig                 431      431
fsmount                  432      432
fspick                   433      433
pidfd_open               434      434
clone3                   435      435
openat2                  437      437
pidfd_getfd              438      438
process_madvise          440      440
mount_setattr            442      442
quotactl_fd              443      443
landlock_create_ruleset  444      444
landlock_add_rule        445      445
landlock_restrict_self   446      446
memfd_secret             447      447
fchmodat2                452      452
statmount                457      457
listmount                458      458
lsm_set_self_attr        460      460
open_tree_attr           467      467
"""
"""The number of each call on the machines that the sandbox supports; - where a machine does not have it. From 424 on a
call has the same number everywhere."""

NEWEST_REVIEWED = 467
"""The highest number whose call has been reviewed (open_tree_attr, Linux 6.15); the filter refuses all above it."""


def _read_table() -> dict[str, dict[str, int]]:
    (_, *machines), *rows = [line.split() for line in TABLE.strip().splitlines()]
    columns = {machine: at for at, machine in enumerate(machines, 1)}
    return {machine: {row[0]: int(row[at]) for row in rows if row[at] != "-"} for machine, at in columns.items()}


NUMBERS_OF = _read_table()
NUMBERS: dict[str, int] = NUMBERS_OF.get(platform.machine(), {})

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
PR_SET_CHILD_SUBREAPER = 36
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
# NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE, each with its lock; keep-caps locked off.
SECUREBITS_LOCKED = 0b11101111

libc = ctypes.CDLL(None, use_errno=True)
# The same library called with the interpreter's lock held: a forked child must come back holding it.
locked_libc = ctypes.PyDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
locked_libc.syscall.restype = ctypes.c_long


class MountAttr(ctypes.Structure):
    """struct mount_attr of linux/mount.h."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def call(name: str, *arguments: object) -> int:
    """Make one system call by name; integers are passed as 64 bits, bytes and ctypes objects as pointers."""
    if name not in NUMBERS:
        raise OSError(38, f"the number of {name} on this machine ({platform.machine()}) is not known")
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _checked(name, libc.syscall(ctypes.c_long(NUMBERS[name]), *words))


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


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
    words = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    return _checked("prctl", libc.prctl(option, *words))


def set_dumpable(dumpable: bool) -> bool:
    """Whether processes of the same user may trace this one and see in /proc what it has open; returns what was
    before."""
    before = prctl(PR_GET_DUMPABLE) == 1
    prctl(PR_SET_DUMPABLE, int(dumpable))
    return before


def unshare(flags: int) -> None:
    call("unshare", flags)


def setns(descriptor: int, flags: int) -> None:
    call("setns", descriptor, flags)


def sethostname(name: str) -> None:
    raw = name.encode()
    call("sethostname", raw, len(raw))


def pidfd_open(pid: int) -> int:
    return call("pidfd_open", pid, 0)


def fork_with_namespaces(flags: int) -> int:
    """fork() whose child starts in the new namespaces that `flags` name; in a process with one thread only.

    os.fork cannot make a child the first of a pid namespace without a process in between. No fork hooks run, neither
    Python's nor those of C libraries: there are no threads whose locks they would have to release, each would write to
    pages that are shared otherwise, and the worker, which needs new random numbers, is made by os.fork.
    """
    words = [ctypes.c_long(word) for word in (NUMBERS["clone"], flags | SIGCHLD, 0, 0, 0, 0)]
    return _checked("clone", locked_libc.syscall(*words))


def fork_without_python_hooks() -> int:
    """fork() with the hooks of C libraries and without those of Python, which the caller runs."""
    return _checked("fork", locked_libc.fork())


def drop_capabilities(kept: frozenset[int] = frozenset()) -> None:
    """Give up every capability but these for good, also those that a set-user-ID program or root would get."""
    if not kept:
        prctl(PR_SET_SECUREBITS, SECUREBITS_LOCKED)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        if capability in kept:
            continue
        # Not by call(), which is slower: there are forty of them in every start.
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            if number == 22:  # EINVAL: one past the last that this kernel has
                break
            raise OSError(number, f"prctl PR_CAPBSET_DROP {capability}: {os.strerror(number)}")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    # Effective, permitted and inheritable, of the capabilities below 32; then the same of those above.
    left = sum(1 << capability for capability in kept)
    call("capset", header, (ctypes.c_uint32 * 6)(left, left, 0, 0, 0, 0))
