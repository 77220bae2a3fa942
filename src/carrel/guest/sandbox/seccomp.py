"""The system-call filter: which calls a session may not make.

All others are allowed, so that ordinary programs run, except those that are newer than the table in `syscalls`.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import struct

from .. import syscalls

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_NEW_LISTENER = 1 << 3

# No ordinary program calls these: the attempt kills the process.
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
PR_SET_MM = 35
# A lease makes another process that opens the file wait, a notification signals on each change in a folder.
F_SETLEASE, F_NOTIFY = 1024, 1026


# --- the assembler --------------------------------------------------------------------------------------------------

# Offsets in struct seccomp_data; the low half of a 64-bit argument comes first on both supported machines.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

ALLOW = 0x7FFF0000
KILL = 0x80000000
NOTIFY = 0x7FC00000
PRETEND = 0x00050000
"""The call is not made, and returns 0."""


def refuse(number: int) -> int:
    """The call is not made, and fails with this errno."""
    return 0x00050000 | number


class FilterProgram:
    """Instructions in order; a failed test skips the instructions inside it."""

    def __init__(self) -> None:
        self.instructions: list[tuple[int, int, int, int]] = []

    def load(self, offset: int) -> None:
        self.instructions.append((0x20, 0, 0, offset))

    def load_argument(self, index: int, *, high: bool = False) -> None:
        self.load(_ARGUMENTS + 8 * index + (4 if high else 0))

    def mask(self, bits: int) -> None:
        self.instructions.append((0x54, 0, 0, bits))

    def answer(self, action: int) -> None:
        self.instructions.append((0x06, 0, 0, action))

    def extend(self, other: FilterProgram) -> None:
        self.instructions += other.instructions

    def if_equal(self, value: int, inside: FilterProgram) -> None:
        """Run `inside` when the loaded word equals the value, else skip it."""
        self._branch(0x15, value, inside, negated=False)

    def unless_equal(self, value: int, inside: FilterProgram) -> None:
        self._branch(0x15, value, inside, negated=True)

    def if_at_least(self, value: int, inside: FilterProgram) -> None:
        self._branch(0x35, value, inside, negated=False)

    def if_any_bit(self, bits: int, inside: FilterProgram) -> None:
        self._branch(0x45, bits, inside, negated=False)

    def _branch(self, code: int, value: int, inside: FilterProgram, *, negated: bool) -> None:
        length = len(inside.instructions)
        if length > 255:
            raise ValueError(f"a branch of {length} instructions; at most 255 can be skipped")
        self.instructions.append((code, length, 0, value) if negated else (code, 0, length, value))
        self.instructions += inside.instructions

    def assemble(self) -> bytes:
        """As struct sock_filter; the kernel takes at most 4096 of them."""
        return b"".join(struct.pack("HBBI", *instruction) for instruction in self.instructions)


def always(action: int) -> FilterProgram:
    """A program that always gives this answer."""
    program = FilterProgram()
    program.answer(action)
    return program


# --- the rules ------------------------------------------------------------------------------------------------------


@functools.cache
def program(*, fork: bool = False, setuid: bool = True, machine: str | None = None) -> bytes:
    """The filter in the kernel's format. With `fork`, setns waits for init's permission instead of failing.

    Without `setuid` no file can be marked set-user-ID or set-group-ID: in a folder of the host another user could
    run it, with the rights of the user who runs carrel.
    """
    machine = machine or platform.machine()
    eperm = always(refuse(errno.EPERM))
    code = FilterProgram()
    code.load(_ARCHITECTURE)
    code.unless_equal(AUDIT_ARCH[machine], always(KILL))
    code.load(_NUMBER)
    if machine == "x86_64":
        code.if_at_least(X32_BIT, always(KILL))
    # Programs take ENOSYS for an older kernel, and do without the call.
    code.if_at_least(syscalls.NEWEST_REVIEWED + 1, always(refuse(errno.ENOSYS)))
    answers = {name: always(KILL) for name in _names(KILLED)}
    answers.update(dict.fromkeys(_names(REFUSED), eperm))
    answers.update(_checked_calls())
    if not setuid:
        answers.update(_without_setuid_bits())
    answers["setns"] = _setns() if fork else eperm
    # libc then uses clone, whose flags the filter can read.
    answers["clone3"] = always(refuse(errno.ENOSYS))
    numbers = syscalls.NUMBERS_OF[machine]
    known = [(numbers[name], answer) for name, answer in answers.items() if name in numbers]
    code.extend(_search(sorted(known, key=lambda pair: pair[0])))
    return code.assemble()


def _names(calls: dict[str, str]) -> list[str]:
    return " ".join(calls.values()).split()


def _search(answers: list[tuple[int, FilterProgram]]) -> FilterProgram:
    """A binary search: the kernel runs the program over every possible call when it is installed."""
    found = FilterProgram()
    if len(answers) <= 4:
        for number, answer in answers:
            found.if_equal(number, answer)
        found.answer(ALLOW)
        return found
    middle = len(answers) // 2
    found.if_at_least(answers[middle][0], _search(answers[middle:]))
    found.extend(_search(answers[:middle]))
    return found


def _checked_calls() -> dict[str, FilterProgram]:
    """Calls that are allowed or not by their arguments; each program ends with an answer."""
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
        "prlimit64": _prlimit(),
    }


def _without_setuid_bits() -> dict[str, FilterProgram]:
    """The calls that set a file's mode. openat2 has it in memory, which no filter sees; programs then use openat."""
    found = {"chmod": _mode(1), "fchmod": _mode(1), "fchmodat": _mode(2), "fchmodat2": _mode(2), "creat": _mode(1)}
    found.update({"mknod": _device(1, no_setuid=True), "mknodat": _device(2, no_setuid=True)})
    for name, flags in (("open", 1), ("openat", 2)):
        found[name] = FilterProgram()
        found[name].load_argument(flags)
        # Without one of these flags the kernel ignores the mode, which can be anything.
        found[name].if_any_bit(O_CREAT | O_TMPFILE, _mode(flags + 1))
        found[name].answer(ALLOW)
    found["openat2"] = always(refuse(errno.ENOSYS))
    return found


def _mode(index: int) -> FilterProgram:
    found = FilterProgram()
    found.load_argument(index)
    found.if_any_bit(S_ISUID | S_ISGID, always(refuse(errno.EPERM)))
    found.answer(ALLOW)
    return found


def _setns() -> FilterProgram:
    """A user namespace only with init's permission. Others the kernel refuses to processes without capabilities."""
    found = FilterProgram()
    found.load_argument(1)
    for flag in (
        syscalls.CLONE_NEWNS,
        syscalls.CLONE_NEWPID,
        syscalls.CLONE_NEWIPC,
        syscalls.CLONE_NEWUTS,
        syscalls.CLONE_NEWNET,
    ):
        found.if_equal(flag, always(ALLOW))
    found.answer(NOTIFY)
    return found


def _clone() -> FilterProgram:
    found = FilterProgram()
    found.load_argument(0)
    found.if_any_bit(NAMESPACE_FLAGS, always(refuse(errno.EPERM)))
    found.answer(ALLOW)
    return found


def _seccomp() -> FilterProgram:
    """A session may add filters of its own, but no listener, which could answer in place of ours."""
    found = FilterProgram()
    found.load_argument(1)
    found.if_any_bit(SECCOMP_FILTER_FLAG_NEW_LISTENER, always(refuse(errno.EPERM)))
    found.answer(ALLOW)
    return found


def _refusing(index: int, values: tuple[int, ...]) -> FilterProgram:
    """The kernel reads 32 bits of these arguments, and so does the filter."""
    found = FilterProgram()
    found.load_argument(index)
    for value in values:
        found.if_equal(value, always(refuse(errno.EPERM)))
    found.answer(ALLOW)
    return found


def _prlimit() -> FilterProgram:
    """A process sets its own limits as process 0. Under another number it may only read them: the filter cannot tell
    its own number from that of the worker, which new limits could stop or end."""
    found = FilterProgram()
    found.load_argument(0)
    found.if_equal(0, always(ALLOW))
    for high in (False, True):
        found.load_argument(2, high=high)
        found.unless_equal(0, always(refuse(errno.EPERM)))
    found.answer(ALLOW)
    return found


def _only(index: int, values: tuple[int, ...]) -> FilterProgram:
    found = FilterProgram()
    found.load_argument(index)
    for value in values:
        found.if_equal(value, always(ALLOW))
    found.answer(refuse(errno.EPERM))
    return found


def _ioctl() -> FilterProgram:
    """Refuse input into a terminal, its line disciplines (the kernel loads modules for them), and network drivers."""
    drivers = FilterProgram()
    drivers.if_at_least(NETWORK_DRIVERS_END, always(ALLOW))
    drivers.answer(refuse(errno.EPERM))
    found = FilterProgram()
    found.load_argument(1)
    for request in (TIOCSTI, TIOCLINUX, TIOCSETD):
        found.if_equal(request, always(refuse(errno.EPERM)))
    found.if_at_least(NETWORK_DRIVERS_FIRST, drivers)
    found.answer(ALLOW)
    return found


def _socket() -> FilterProgram:
    """Refuse netlink, packets, vsock, the kernel's ciphers, Bluetooth: each has a lot of kernel code behind it. So have
    raw sockets and the rarer protocols: SCTP, DCCP, L2TP."""
    kind = FilterProgram()
    kind.load_argument(1)
    kind.mask(0xF)
    for refused in (SOCK_RAW, SOCK_PACKET):
        kind.if_equal(refused, always(refuse(errno.EPERM)))
    for refused in (SOCK_SEQPACKET, SOCK_DCCP):
        kind.if_equal(refused, always(refuse(errno.EPROTONOSUPPORT)))
    kind.load_argument(2)
    for protocol in PROTOCOLS:
        kind.if_equal(protocol, always(ALLOW))
    kind.answer(refuse(errno.EPROTONOSUPPORT))
    found = FilterProgram()
    found.load_argument(0)
    found.if_equal(AF_UNIX, always(ALLOW))
    for family in (AF_INET, AF_INET6):
        found.if_equal(family, kind)
    found.answer(refuse(errno.EAFNOSUPPORT))
    return found


def _socket_option() -> FilterProgram:
    """Refuse the options that set the tables of iptables, arptables and ebtables, which had several vulnerabilities: a
    child that enters a fork has, until it drops them, capabilities over the fork's own network.

    SO_LINGER is accepted and has no effect: closing such a socket waits, and the host closes descriptors that a worker
    sends.
    """
    rules = FilterProgram()
    rules.load_argument(2)
    for option in PACKET_RULES:
        rules.if_equal(option, always(refuse(errno.EPERM)))
    rules.if_at_least(PACKET_RULES_FIRST, always(refuse(errno.EPERM)))
    rules.answer(ALLOW)
    of_all = FilterProgram()
    of_all.load_argument(2)
    of_all.if_equal(SO_LINGER, always(PRETEND))
    of_all.answer(ALLOW)
    found = FilterProgram()
    found.load_argument(1)
    found.if_equal(SOL_SOCKET, of_all)
    for level in (SOL_IP, SOL_IPV6):
        found.if_equal(level, rules)
    found.answer(ALLOW)
    return found


def _device(index: int, *, no_setuid: bool = False) -> FilterProgram:
    """Allow named pipes and sockets, refuse devices; with `no_setuid` refuse set-user-ID files too."""
    found = FilterProgram()
    found.load_argument(index)
    if no_setuid:
        found.if_any_bit(S_ISUID | S_ISGID, always(refuse(errno.EPERM)))
    found.mask(S_IFMT)
    for kind in (S_IFCHR, S_IFBLK):
        found.if_equal(kind, always(refuse(errno.EPERM)))
    found.answer(ALLOW)
    return found


class _FilterCode(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(code: bytes, *, listen: bool = False) -> int | None:
    """Install a filter for the calling process, for good; with `listen`, return the descriptor of its requests."""
    wrapped = _FilterCode(len(code) // 8, code)
    flags = SECCOMP_FILTER_FLAG_NEW_LISTENER if listen else 0
    found = syscalls.call("seccomp", SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(wrapped))
    return found if listen else None
