"""The filter as a program: run here instruction by instruction, for both machines, over every system call."""

from __future__ import annotations

import errno
import signal
import struct

import pytest

from carrel.guest.sandbox import seccomp
from carrel.guest.sandbox.seccomp import ALLOW, KILL, refuse
from carrel.guest.syscalls import NEWEST_REVIEWED, NUMBERS_OF

EPERM = refuse(errno.EPERM)
MACHINES = sorted(NUMBERS_OF)


def answer(code: bytes, number: int, *arguments: int, architecture: int) -> int:
    """What the kernel would do: a machine with one register and jumps forward."""
    words = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=iIQ6Q", number, architecture, 0, *[word & (1 << 64) - 1 for word in words])
    program = list(struct.iter_unpack("HBBI", code))
    register = position = 0
    while True:
        operation, yes, no, value = program[position]
        position += 1
        if operation == 0x06:
            return value
        if operation == 0x20:
            (register,) = struct.unpack_from("=I", data, value)
        elif operation == 0x54:
            register &= value
        else:
            held = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[operation]
            position += yes if held else no


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(machine: str, name: str, *arguments: int, fork: bool = False) -> int:
    code = seccomp.program(fork=fork, machine=machine)
    return answer(code, NUMBERS_OF[machine][name], *arguments, architecture=seccomp.AUDIT_ARCH[machine])


def test_every_call_has_its_answer(machine: str) -> None:
    code = seccomp.program(machine=machine)
    table, architecture = NUMBERS_OF[machine], seccomp.AUDIT_ARCH[machine]
    killed = {table[name] for names in seccomp.KILLED.values() for name in names.split() if name in table}
    refused = {table[name] for names in seccomp.REFUSED.values() for name in names.split() if name in table}
    looked_into = {table[name] for name in (*seccomp._checked_calls(), "clone3") if name in table}
    for number in range(NEWEST_REVIEWED + 1):
        if number in looked_into:
            continue
        expected = KILL if number in killed else EPERM if number in refused | {table["setns"]} else ALLOW
        assert answer(code, number, architecture=architecture) == expected, number


def test_calls_newer_than_the_table_do_not_exist(machine: str) -> None:
    newest = max(NUMBERS_OF[machine].values())
    assert newest <= NEWEST_REVIEWED
    for fork in (False, True):
        code = seccomp.program(fork=fork, machine=machine)
        for number in (NEWEST_REVIEWED + 1, 500, 512, 547, 1 << 20, seccomp.X32_BIT - 1):
            found = answer(code, number, architecture=seccomp.AUDIT_ARCH[machine])
            assert found == refuse(errno.ENOSYS), number


def test_no_number_of_x32_is_admitted() -> None:
    for machine, refused in (("x86_64", KILL), ("aarch64", refuse(errno.ENOSYS))):
        code = seccomp.program(machine=machine)
        for number in (0, 1, 59, NEWEST_REVIEWED, NEWEST_REVIEWED + 1, 512, 547):
            assert answer(code, seccomp.X32_BIT | number, architecture=seccomp.AUDIT_ARCH[machine]) == refused


def test_limits_of_another_process_can_be_read_and_not_set(machine: str) -> None:
    assert ask(machine, "prlimit64", 0, 7, 0x7F0000001000, 0) == ALLOW
    assert ask(machine, "prlimit64", 1 << 32, 7, 0x7F0000001000, 0) == ALLOW  # the kernel reads 32 bits
    assert ask(machine, "prlimit64", 5, 7, 0, 0x7F0000001000) == ALLOW
    for new in (0x7F0000001000, 0x1000, 1 << 32):
        assert ask(machine, "prlimit64", 5, 7, new, 0) == EPERM
        assert ask(machine, "prlimit64", 0xFFFFFFFF, 7, new, 0) == EPERM


def test_no_leases_and_no_notifications(machine: str) -> None:
    assert [ask(machine, "fcntl", 3, command) for command in (1024, 1026, 1 << 32 | 1024)] == [EPERM] * 3
    assert [ask(machine, "fcntl", 3, command) for command in (0, 1, 2, 3, 4, 1025, 1030, 1031, 1033)] == [ALLOW] * 9


def test_another_architecture_is_deadly(machine: str) -> None:
    code = seccomp.program(machine=machine)
    for architecture in (0, 0x40000003, *(value for name, value in seccomp.AUDIT_ARCH.items() if name != machine)):
        assert answer(code, 1, architecture=architecture) == KILL
    x32 = answer(seccomp.program(machine="x86_64"), 0x40000001, architecture=seccomp.AUDIT_ARCH["x86_64"])
    assert x32 == KILL


def test_a_plain_fork_and_a_thread_are_allowed_and_namespaces_not(machine: str) -> None:
    assert ask(machine, "clone", signal.SIGCHLD) == ALLOW
    assert ask(machine, "clone", 0x3D0F00) == ALLOW
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert ask(machine, "clone", 1 << bit | signal.SIGCHLD) == EPERM
    assert ask(machine, "clone3") == refuse(errno.ENOSYS)


def test_sockets(machine: str) -> None:
    allowed = {family for family in range(64) if ask(machine, "socket", family) == ALLOW}
    assert allowed == {1, 2, 10}
    # The kernel reads 32 bits of the family: nothing hides in the upper half.
    assert ask(machine, "socket", 1 << 32 | 16) == refuse(errno.EAFNOSUPPORT)


def test_raw_sockets_and_packet_rules(machine: str) -> None:
    # The flags SOCK_CLOEXEC and SOCK_NONBLOCK ride on the kind of socket.
    assert [ask(machine, "socket", 2, kind | 0o2004000) for kind in (1, 2, 3, 10)] == [
        ALLOW,
        ALLOW,
        EPERM,
        EPERM,
    ]
    assert [ask(machine, "setsockopt", 3, level, 64) for level in (0, 41, 1, 6)] == [
        EPERM,
        EPERM,
        ALLOW,
        ALLOW,
    ]
    assert [ask(machine, "setsockopt", 3, 41, option) for option in (26, 66, 67)] == [ALLOW] * 3
    assert ask(machine, "setsockopt", 3, 0, 1152) == EPERM


def test_protocols_that_few_speak(machine: str) -> None:
    unknown = refuse(errno.EPROTONOSUPPORT)
    spoken = {number for number in range(300) if ask(machine, "socket", 2, 2, number) == ALLOW}
    assert spoken == {0, 1, 6, 17, 58, 136, 262}
    assert [ask(machine, "socket", 10, kind) for kind in (1, 2, 5, 6)] == [
        ALLOW,
        ALLOW,
        unknown,
        unknown,
    ]
    assert ask(machine, "socket", 1, 5) == ALLOW


def test_a_socket_cannot_be_made_to_linger(machine: str) -> None:
    assert ask(machine, "setsockopt", 3, 1, 13) == seccomp.PRETEND
    assert ask(machine, "setsockopt", 3, 6, 13) == ALLOW


def test_no_set_user_id_where_files_reach_the_disk(machine: str) -> None:
    code = seccomp.program(setuid=False, machine=machine)
    table, architecture = NUMBERS_OF[machine], seccomp.AUDIT_ARCH[machine]
    places = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
    for name, place in places.items():
        for mode, expected in ((0o644, ALLOW), (0o1777, ALLOW), (0o4755, EPERM), (0o2755, EPERM)):
            if name in table:
                assert answer(code, table[name], *[0] * place, mode, architecture=architecture) == expected, name
    for name, place in (("open", 1), ("openat", 2)):
        for flags, mode, expected in (
            (0o100, 0o644, ALLOW),
            (0o101, 0o4755, EPERM),
            (0o20200001, 0o2755, EPERM),
            (0o200000, 0o4755, ALLOW),
        ):
            if name in table:
                words = [*[0] * place, flags, mode]
                assert answer(code, table[name], *words, architecture=architecture) == expected, (name, flags)
    assert answer(code, table["openat2"], architecture=architecture) == refuse(errno.ENOSYS)
    assert ask(machine, "fchmod", 0, 0o4755) == ALLOW


def test_devices(machine: str) -> None:
    modes = {
        0o100644: ALLOW,
        0o010644: ALLOW,
        0o140644: ALLOW,
        0o020666: EPERM,
        0o060666: EPERM,
    }
    assert {mode: ask(machine, "mknodat", 0, 0, mode) for mode in modes} == modes


def test_setns_asks_init_where_forks_are_made(machine: str) -> None:
    for flags in (0, 1 << 28, 1 << 28 | 1 << 17, 1 << 25, 1 << 32 | 1 << 28):
        assert ask(machine, "setns", 3, flags, fork=True) == seccomp.NOTIFY
    assert ask(machine, "setns", 3, 1 << 17, fork=True) == ALLOW
    assert ask(machine, "setns") == EPERM


def test_terminals_and_personalities(machine: str) -> None:
    assert [ask(machine, "ioctl", 0, request) for request in (0x5412, 0x541C, 0x5413)] == [EPERM, EPERM, ALLOW]
    assert ask(machine, "ioctl", 0, 1 << 32 | 0x5412) == EPERM
    requests = {
        0x5423: EPERM,
        0x5424: ALLOW,
        0x8933: ALLOW,
        0x89A0: EPERM,
        0x89FF: EPERM,
        0x8A00: ALLOW,
    }
    assert {request: ask(machine, "ioctl", 0, request) for request in requests} == requests
    answers = {value: ask(machine, "personality", value) for value in (0, 0x0040000, 0xFFFFFFFF, 0x0400000, 8)}
    assert answers == {
        0: ALLOW,
        0x0040000: ALLOW,
        0xFFFFFFFF: ALLOW,
        0x0400000: EPERM,
        8: ALLOW,
    }


def test_a_branch_too_long_to_skip_is_refused() -> None:
    long = seccomp.FilterProgram()
    for _ in range(256):
        long.load(0)
    with pytest.raises(ValueError, match="256"):
        seccomp.FilterProgram().if_equal(1, long)
