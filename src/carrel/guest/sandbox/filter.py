"""The system calls that a session may not make. All others are allowed, so that ordinary programs run, except those
that are newer than this list."""

from __future__ import annotations

import ctypes
import errno
import functools
import platform

from .. import syscalls
from . import bpf

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_NEW_LISTENER = 1 << 3

# Nothing that runs in good faith calls these: the attempt ends the process.
KILLED = {
    "the kernel itself": "kexec_load kexec_file_load init_module finit_module delete_module create_module",
    "the machine": "reboot swapon swapoff iopl ioperm",
    "another root": "pivot_root",
}
REFUSED = {
    "other file systems": "mount umount2 fsopen fsconfig fsmount fspick open_tree open_tree_attr move_mount "
    "mount_setattr statmount listmount",
    "other roots and namespaces": "chroot unshare",
    "files by handle, past every path": "open_by_handle_at name_to_handle_at",
    "other processes": "ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd",
    "the kernel's memory, programs and keys": "bpf perf_event_open keyctl add_key request_key lookup_dcookie syslog "
    "_sysctl uselib ustat sysfs get_kernel_syms query_module nfsservctl lsm_set_self_attr fanotify_init",
    "ways to win a race in the kernel": "userfaultfd modify_ldt vmsplice move_pages migrate_pages memfd_secret",
    "calls that no filter sees": "io_uring_setup io_uring_enter io_uring_register",
    "the machine as a whole": "sethostname setdomainname acct quotactl quotactl_fd settimeofday clock_settime "
    "clock_adjtime adjtimex vhangup",
}

NAMESPACE_FLAGS = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
SOCK_RAW, SOCK_PACKET = 3, 10
SOCK_SEQPACKET, SOCK_DCCP = 5, 6
# What the usual kinds of socket speak: their own (0), TCP, UDP, pings, UDP-Lite and TCP over several paths.
PROTOCOLS = (0, 1, 6, 17, 58, 136, 262)
SOL_SOCKET, SOL_IP, SOL_IPV6 = 1, 0, 41
SO_LINGER = 13
# SET_REPLACE and SET_ADD_COUNTERS of each; no option of IP or IPv6 in ordinary use has these numbers.
PACKET_RULES = (64, 65, 96, 97, 128, 129)
# From here on those of the kernel's load balancer (IPVS).
PACKET_RULES_FIRST = 1152
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
# Bonds, bridges, tunnels, and whatever a network driver has of its own.
NETWORK_DRIVERS_FIRST, NETWORK_DRIVERS_END = 0x8980, 0x8A00
S_IFMT, S_IFCHR, S_IFBLK = 0o170000, 0o020000, 0o060000
S_ISUID, S_ISGID = 0o4000, 0o2000
# The bit of O_TMPFILE that is not O_DIRECTORY.
O_CREAT, O_TMPFILE = 0o100, 0o20000000
# What tools ask for: plain Linux, and the same with addresses not randomised.
PERSONALITIES = (0x0, 0x0008, 0x0040000, 0xFFFFFFFF)
PR_SET_MM, PR_SET_SECCOMP = 35, 22
# A lease makes another process that opens the file wait, a notification signals on each change in a folder.
F_SETLEASE, F_NOTIFY = 1024, 1026


@functools.cache
def program(*, fork: bool = False, setuid: bool = True, machine: str | None = None) -> bytes:
    """The filter as the kernel takes it; with `fork`, setns waits for init's word instead of failing.

    Without `setuid` no file can be marked set-user-ID or set-group-ID: on a folder of the host another user could
    run it, and be the one who runs carrel.
    """
    machine = machine or platform.machine()
    eperm = bpf.giving(bpf.refuse(errno.EPERM))
    made = bpf.Program()
    made.load(bpf.ARCHITECTURE)
    made.unless_equal(AUDIT_ARCH[machine], bpf.giving(bpf.KILL))
    made.load(bpf.NUMBER)
    if machine == "x86_64":
        made.if_at_least(X32_BIT, bpf.giving(bpf.KILL))
    # Programs take ENOSYS for an older kernel, and do without the call.
    made.if_at_least(syscalls.NEWEST_REVIEWED + 1, bpf.giving(bpf.refuse(errno.ENOSYS)))
    answers = {name: bpf.giving(bpf.KILL) for name in _names(KILLED)}
    answers.update(dict.fromkeys(_names(REFUSED), eperm))
    answers.update(_looked_into())
    if not setuid:
        answers.update(_unmarked())
    answers["setns"] = _entering() if fork else eperm
    # libc then uses clone, whose flags can be looked at.
    answers["clone3"] = bpf.giving(bpf.refuse(errno.ENOSYS))
    numbers = syscalls.NUMBERS_OF[machine]
    known = [(numbers[name], answer) for name, answer in answers.items() if name in numbers]
    made.follow(_search(sorted(known, key=lambda pair: pair[0])))
    return made.assemble()


def _names(calls: dict[str, str]) -> list[str]:
    return " ".join(calls.values()).split()


def _search(answers: list[tuple[int, bpf.Program]]) -> bpf.Program:
    """Halving, not one by one: the kernel runs the program over every call there is when it is installed."""
    found = bpf.Program()
    if len(answers) <= 4:
        for number, answer in answers:
            found.if_equal(number, answer)
        found.give(bpf.ALLOW)
        return found
    middle = len(answers) // 2
    found.if_at_least(answers[middle][0], _search(answers[middle:]))
    found.follow(_search(answers[:middle]))
    return found


def _looked_into() -> dict[str, bpf.Program]:
    """Calls whose arguments decide; each program ends with an answer."""
    return {
        "clone": _clone(),
        "ioctl": _ioctl(),
        "socket": _socket(),
        "socketpair": _socket(),
        "setsockopt": _socket_option(),
        "personality": _only(0, PERSONALITIES),
        "mknod": _device(1),
        "mknodat": _device(2),
        "prctl": _refusing(0, (PR_SET_MM,)),
        "seccomp": _seccomp(),
        "fcntl": _refusing(1, (F_SETLEASE, F_NOTIFY)),
        "prlimit64": _limits(),
    }


def _unmarked() -> dict[str, bpf.Program]:
    """The calls that give a file its mode; openat2 hides it in memory, and who gets ENOSYS uses openat."""
    found = {"chmod": _mode(1), "fchmod": _mode(1), "fchmodat": _mode(2), "fchmodat2": _mode(2), "creat": _mode(1)}
    found.update({"mknod": _device(1, marks=True), "mknodat": _device(2, marks=True)})
    for name, flags in (("open", 1), ("openat", 2)):
        found[name] = bpf.Program()
        found[name].load_argument(flags)
        # Without one of these flags the mode is not looked at, and holds anything.
        found[name].if_any_bit(O_CREAT | O_TMPFILE, _mode(flags + 1))
        found[name].give(bpf.ALLOW)
    found["openat2"] = bpf.giving(bpf.refuse(errno.ENOSYS))
    return found


def _mode(index: int) -> bpf.Program:
    found = bpf.Program()
    found.load_argument(index)
    found.if_any_bit(S_ISUID | S_ISGID, bpf.giving(bpf.refuse(errno.EPERM)))
    found.give(bpf.ALLOW)
    return found


def _entering() -> bpf.Program:
    """A user namespace only with init's leave. Others the kernel itself refuses to who has no capability."""
    found = bpf.Program()
    found.load_argument(1)
    for flag in (
        syscalls.CLONE_NEWNS,
        syscalls.CLONE_NEWPID,
        syscalls.CLONE_NEWIPC,
        syscalls.CLONE_NEWUTS,
        syscalls.CLONE_NEWNET,
    ):
        found.if_equal(flag, bpf.giving(bpf.ALLOW))
    found.give(bpf.NOTIFY)
    return found


def _clone() -> bpf.Program:
    found = bpf.Program()
    found.load_argument(0)
    found.if_any_bit(NAMESPACE_FLAGS, bpf.giving(bpf.refuse(errno.EPERM)))
    found.give(bpf.ALLOW)
    return found


def _seccomp() -> bpf.Program:
    """A session may filter itself further, but not listen: a listener of its own could answer for ours."""
    found = bpf.Program()
    found.load_argument(1)
    found.if_any_bit(SECCOMP_FILTER_FLAG_NEW_LISTENER, bpf.giving(bpf.refuse(errno.EPERM)))
    found.give(bpf.ALLOW)
    return found


def _refusing(index: int, values: tuple[int, ...]) -> bpf.Program:
    """The kernel looks at 32 bits of these arguments, and so does this."""
    found = bpf.Program()
    found.load_argument(index)
    for value in values:
        found.if_equal(value, bpf.giving(bpf.refuse(errno.EPERM)))
    found.give(bpf.ALLOW)
    return found


def _limits() -> bpf.Program:
    """A process sets its own limits as process 0. Under another number it may only read them: the filter cannot tell
    its own number from that of the worker, which new limits could stop or end."""
    found = bpf.Program()
    found.load_argument(0)
    found.if_equal(0, bpf.giving(bpf.ALLOW))
    for high in (False, True):
        found.load_argument(2, high=high)
        found.unless_equal(0, bpf.giving(bpf.refuse(errno.EPERM)))
    found.give(bpf.ALLOW)
    return found


def _only(index: int, values: tuple[int, ...]) -> bpf.Program:
    found = bpf.Program()
    found.load_argument(index)
    for value in values:
        found.if_equal(value, bpf.giving(bpf.ALLOW))
    found.give(bpf.refuse(errno.EPERM))
    return found


def _ioctl() -> bpf.Program:
    """Typing into a terminal, its other disciplines (the kernel loads modules for them), and network drivers."""
    drivers = bpf.Program()
    drivers.if_at_least(NETWORK_DRIVERS_END, bpf.giving(bpf.ALLOW))
    drivers.give(bpf.refuse(errno.EPERM))
    found = bpf.Program()
    found.load_argument(1)
    for request in (TIOCSTI, TIOCLINUX, TIOCSETD):
        found.if_equal(request, bpf.giving(bpf.refuse(errno.EPERM)))
    found.if_at_least(NETWORK_DRIVERS_FIRST, drivers)
    found.give(bpf.ALLOW)
    return found


def _socket() -> bpf.Program:
    """Netlink, packets, vsock, the kernel's ciphers, Bluetooth: each its own way into the kernel. So are raw sockets,
    and what is rarer than TCP and UDP: SCTP, DCCP, L2TP."""
    kind = bpf.Program()
    kind.load_argument(1)
    kind.mask(0xF)
    for refused in (SOCK_RAW, SOCK_PACKET):
        kind.if_equal(refused, bpf.giving(bpf.refuse(errno.EPERM)))
    for refused in (SOCK_SEQPACKET, SOCK_DCCP):
        kind.if_equal(refused, bpf.giving(bpf.refuse(errno.EPROTONOSUPPORT)))
    kind.load_argument(2)
    for protocol in PROTOCOLS:
        kind.if_equal(protocol, bpf.giving(bpf.ALLOW))
    kind.give(bpf.refuse(errno.EPROTONOSUPPORT))
    found = bpf.Program()
    found.load_argument(0)
    found.if_equal(AF_UNIX, bpf.giving(bpf.ALLOW))
    for family in (AF_INET, AF_INET6):
        found.if_equal(family, kind)
    found.give(bpf.refuse(errno.EAFNOSUPPORT))
    return found


def _socket_option() -> bpf.Program:
    """The tables of iptables, arptables and ebtables are set by socket options, and have been a way in more than once.
    A child that enters a fork holds, until it gives them up, capabilities over the fork's own network.

    And whoever closes a socket that lingers waits, for as long as the one who set it likes: a descriptor that is sent
    over the line would hold up the host. It is taken, as programs expect, and has no effect.
    """
    rules = bpf.Program()
    rules.load_argument(2)
    for option in PACKET_RULES:
        rules.if_equal(option, bpf.giving(bpf.refuse(errno.EPERM)))
    rules.if_at_least(PACKET_RULES_FIRST, bpf.giving(bpf.refuse(errno.EPERM)))
    rules.give(bpf.ALLOW)
    of_all = bpf.Program()
    of_all.load_argument(2)
    of_all.if_equal(SO_LINGER, bpf.giving(bpf.PRETEND))
    of_all.give(bpf.ALLOW)
    found = bpf.Program()
    found.load_argument(1)
    found.if_equal(SOL_SOCKET, of_all)
    for level in (SOL_IP, SOL_IPV6):
        found.if_equal(level, rules)
    found.give(bpf.ALLOW)
    return found


def _device(index: int, *, marks: bool = False) -> bpf.Program:
    """Named pipes and sockets may be made, devices not; with `marks`, nothing that is set-user-ID either."""
    found = bpf.Program()
    found.load_argument(index)
    if marks:
        found.if_any_bit(S_ISUID | S_ISGID, bpf.giving(bpf.refuse(errno.EPERM)))
    found.mask(S_IFMT)
    for kind in (S_IFCHR, S_IFBLK):
        found.if_equal(kind, bpf.giving(bpf.refuse(errno.EPERM)))
    found.give(bpf.ALLOW)
    return found


class _Code(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(code: bytes, *, listen: bool = False) -> int | None:
    """Put the calling process under a filter, for good; with `listen`, the descriptor on which its questions arrive."""
    wrapped = _Code(len(code) // 8, code)
    flags = SECCOMP_FILTER_FLAG_NEW_LISTENER if listen else 0
    found = syscalls.call("seccomp", SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(wrapped))
    return found if listen else None
