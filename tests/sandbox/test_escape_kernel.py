"""Attempts on the kernel, other processes and the network; each must fail."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from carrel.guest.sandbox.seccomp import KILLED, REFUSED
from carrel.guest.syscalls import NEWEST_REVIEWED, NUMBERS
from tests.sandbox.attempts import EACCES, EAFNOSUPPORT, EINVAL, ENOENT, ENOSYS, EPERM, RAW, in_a_child
from tests.sandbox.conftest import Host
from tests.sandbox.host import CommandServer, Session

ESRCH, EPROTONOSUPPORT, ENETUNREACH, ECONNREFUSED = 3, 93, 101, 111
CALLS = sorted(name for names in REFUSED.values() for name in names.split() if name in NUMBERS)
DEADLY = sorted(name for names in KILLED.values() for name in names.split() if name in NUMBERS)


def fails(session: Session, code: str, *numbers: int) -> None:
    reply = session.run(RAW + code)
    assert reply.get("errno") in numbers, reply


@pytest.mark.parametrize("name", CALLS)
def test_a_refused_call(inside: Session, name: str) -> None:
    fails(inside, f"raw({NUMBERS[name]}, 0, 0, 0, 0, 0)", EPERM)


@pytest.mark.parametrize("name", DEADLY)
def test_a_deadly_call(inside: Session, name: str) -> None:
    assert inside.value(in_a_child(f"raw({NUMBERS[name]}, 0, 0, 0, 0)")) & 0x7F == signal.SIGSYS


@pytest.mark.parametrize("name", ["user", "mnt", "pid", "ipc", "uts", "net", "cgroup"])
@pytest.mark.parametrize("flag", [0, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
def test_setns_without_a_fork_being_made(inside: Session, name: str, flag: int) -> None:
    fails(inside, f"raw({NUMBERS['setns']}, os.open('/proc/self/ns/{name}', 0), {flag})", EPERM, EINVAL)


@pytest.mark.parametrize("flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
def test_new_namespaces(inside: Session, flag: int) -> None:
    fails(inside, f"raw({NUMBERS['unshare']}, {flag})", EPERM)
    fails(inside, f"raw({NUMBERS['clone']}, {flag | signal.SIGCHLD}, 0, 0, 0, 0)", EPERM)
    fails(inside, f"raw({NUMBERS['clone3']}, ctypes.create_string_buffer(88), 88)", ENOSYS)


def test_calls_that_are_newer_than_the_filter(inside: Session) -> None:
    for number in (NEWEST_REVIEWED + 1, NEWEST_REVIEWED + 2, 512, 1000):
        fails(inside, f"raw({number}, -1, 0, 0, 0, 0)", ENOSYS)


def test_limits_of_another_process(inside: Session) -> None:
    code = "pid = os.fork()\nif pid == 0:\n  time.sleep(60)\n  os._exit(0)\n"
    attempt = "try: resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0))\nfinally: os.kill(pid, 9); os.waitpid(pid, 0)"
    fails(inside, f"import resource, time\n{code}{attempt}", EPERM)
    assert inside.value("import resource; resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, -1)); answer = 1") == 1


def test_leases_and_notifications_of_files(inside: Session) -> None:
    opened = "import fcntl; file = open('/tmp/leased', 'w')"
    fails(inside, f"{opened}; fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)", EPERM)
    fails(inside, "import fcntl; fcntl.fcntl(os.open('/tmp', 0), fcntl.F_NOTIFY, fcntl.DN_CREATE)", EPERM)


def test_the_same_by_a_program(inside: Session) -> None:
    status, _ = inside.value("import subprocess; answer = subprocess.getstatusoutput('unshare -r id')")
    assert status != 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 and i386 are calls of x86_64 machines")
def test_calls_of_another_architecture(inside: Session) -> None:
    assert inside.value(in_a_child(f"raw({0x40000000 | 39})")) & 0x7F == signal.SIGSYS
    # int 0x80 with eax = 20 (getpid on i386), as machine code.
    code = (
        "import mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    )
    assert inside.value(in_a_child(code)) & 0x7F == signal.SIGSYS


def test_signals_to_the_host(inside: Session) -> None:
    fails(inside, f"os.kill({os.getpid()}, 0)", ESRCH)
    fails(inside, "os.kill(1, 0)", EPERM)


def test_init_survives_every_signal(start: Callable[..., Session]) -> None:
    session = start()
    code = "for n in range(1, 65):\n  try: os.kill(1, n)\n  except OSError: pass\nanswer = os.path.exists('/proc/1')"
    assert session.value(RAW + code) is True
    assert session.value("answer = 1") == 1


def test_tracing_init(inside: Session) -> None:
    fails(inside, f"raw({NUMBERS['ptrace']}, 16, 1, 0, 0)", EPERM)
    fails(inside, "open('/proc/1/mem', 'rb+')", EACCES, EPERM)


@pytest.mark.parametrize("family", ["AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG", "AF_CAN", "AF_TIPC"])
def test_other_families_of_sockets(inside: Session, family: str) -> None:
    fails(inside, f"raw({NUMBERS['socket']}, {int(getattr(socket, family))}, {int(socket.SOCK_RAW)}, 0)", EAFNOSUPPORT)


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_raw_sockets(inside: Session, family: str) -> None:
    fails(inside, f"socket.socket(socket.{family}, socket.SOCK_RAW, 255)", EPERM)


def test_the_network_is_off(inside: Session) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        fails(inside, f"socket.create_connection(('127.0.0.1', {port}), 2)", ECONNREFUSED)
    fails(inside, "socket.create_connection(('1.1.1.1', 53), 2)", ENETUNREACH)
    fails(inside, "socket.create_connection(('2606:4700:4700::1111', 53), 2)", ENETUNREACH, 99, EAFNOSUPPORT)
    fails(inside, "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))", ENETUNREACH)
    assert inside.run("import socket; socket.getaddrinfo('example.com', 80)")["error"] == "gaierror"


def test_its_own_loopback_works(inside: Session) -> None:
    code = (
        "import socket\ns = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname())\n"
        "p, _ = s.accept(); p.sendall(b'hi'); answer = c.recv(2).decode()"
    )
    assert inside.value(code) == "hi"


@pytest.mark.parametrize("network", [False, True])
def test_abstract_sockets_of_the_host(start: Callable[..., Session], network: bool) -> None:
    session = start(network=network)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0carrel-test-{os.getpid()}")
        server.listen()
        name = server.getsockname().decode("latin1")
        fails(session, f"socket.socket(socket.AF_UNIX).connect({name!r})", ECONNREFUSED, EPERM)


def test_with_the_network_on_the_host_s_is_there(start: Callable[..., Session]) -> None:
    session = start(network=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert session.value(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); answer = 1") == 1
    assert session.value("answer = open('/etc/resolv.conf').read()") == _resolv()


def _resolv() -> str:
    try:
        with open("/etc/resolv.conf", encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def test_without_network_there_is_no_resolver(inside: Session) -> None:
    fails(inside, "open('/etc/resolv.conf')", ENOENT)


def test_the_host_s_shared_memory_and_queues(inside: Session) -> None:
    made = subprocess.run(["ipcmk", "-M", "64", "-p", "0666"], capture_output=True, text=True, check=True).stdout
    number = made.split()[-1]
    try:
        fails(inside, f"raw({30 if platform.machine() == 'x86_64' else 196}, {number}, 0, 0)", EINVAL)
    finally:
        subprocess.run(["ipcrm", "-m", number], check=True)


def test_who_closes_a_socket_of_the_session_never_waits(inside: Session) -> None:
    """The call succeeds, and the socket does not linger: the host closes what it receives."""
    code = (
        "s = socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 99, 0, 0, 0]))\n"
        "answer = list(s.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))"
    )
    assert inside.value(RAW + code) == [0] * 8


@pytest.mark.parametrize(("sort", "protocol"), [(5, 132), (1, 132), (6, 33), (2, 115)])
def test_protocols_that_few_speak(inside: Session, sort: int, protocol: int) -> None:
    for family in (2, 10):
        fails(inside, f"raw({NUMBERS['socket']}, {family}, {sort}, {protocol})", EPROTONOSUPPORT)


@pytest.mark.parametrize("request_number", [0x89A0, 0x89F1, 0x8990])
def test_network_drivers(inside: Session, request_number: int) -> None:
    fails(inside, f"import fcntl\nfcntl.ioctl(socket.socket(), {request_number}, bytes(40))", EPERM)


def test_another_discipline_of_a_terminal(inside: Session) -> None:
    fails(inside, "import pty, fcntl\na, b = pty.openpty()\nfcntl.ioctl(b, 0x5423, bytes([21, 0, 0, 0]))", EPERM)


def test_the_terminal_s_input(inside: Session) -> None:
    code = "import pty, fcntl\na, b = pty.openpty()\nfcntl.ioctl(b, 0x5412, b'x')"
    fails(inside, code, EPERM)
    fails(inside, "import pty, fcntl\na, b = pty.openpty()\nfcntl.ioctl(b, 0x541C, b'x')", EPERM)


def test_another_personality(inside: Session) -> None:
    fails(inside, "libc.personality.restype = int\nraw(135 if os.uname().machine == 'x86_64' else 92, 0x400000)", EPERM)
    assert inside.value(RAW + "answer = raw(135 if os.uname().machine == 'x86_64' else 92, 0xffffffff)") == 0


def test_its_hostname_is_its_own(inside: Session) -> None:
    assert inside.value("import socket; answer = socket.gethostname()") == "carrel"
    fails(inside, "socket.sethostname('x')", EPERM)
    assert socket.gethostname() != "carrel"


def test_the_filter_cannot_be_answered_by_the_session(inside: Session) -> None:
    fails(inside, f"raw({NUMBERS['seccomp']}, 1, 8, 0)", EPERM)


def test_priority_and_schedule(inside: Session) -> None:
    fails(inside, "os.nice(-5)", EPERM, EACCES)
    fails(inside, "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", EPERM)


def test_the_clock(inside: Session) -> None:
    fails(inside, "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)", EPERM)


def test_more_than_its_limits(inside: Session) -> None:
    reply = inside.run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))")
    assert reply["error"] == "ValueError", reply


# --- interfaces that a filter may have forgotten ----------------------------------------------------------------------


def ends_by_filter(session: Session, code: str) -> bool:
    """Whether the kernel kills a process for this code."""
    return bool(session.value(in_a_child(code)) & 0x7F == signal.SIGSYS)


class Runs(Protocol):
    """A process that runs code."""

    def value(self, code: str) -> Any: ...

    def close(self) -> None: ...


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 and i386 are calls of x86_64 machines")


@X86
@pytest.mark.parametrize("number", [0, 39, 59, 165, 425, 512, 520, 547, (1 << 30) - 1])
def test_x32_calls(inside: Session, number: int) -> None:
    """The ordinary numbers with the x32 bit, and x32's own from 512 to 547, which without the bit are too new."""
    assert ends_by_filter(inside, f"raw({0x40000000 | number}, 0, 0, 0, 0, 0)")
    if number >= 512:
        fails(inside, f"raw({number}, 0, 0, 0, 0, 0)", ENOSYS)


@X86
@pytest.mark.parametrize("number", [1, 11, 21, 26, 120, 310, 346, 374, 425])
def test_calls_of_i386(inside: Session, number: int) -> None:
    """By `int 0x80`: exit, execve, mount, ptrace, clone, unshare, setns, userfaultfd, io_uring_setup."""
    load = f"b'\\xb8' + ({number}).to_bytes(4, 'little') + b'\\xcd\\x80\\xc3'"  # mov eax; int 0x80; ret
    code = (
        f"import mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write({load})\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    )
    assert ends_by_filter(inside, code)


def test_every_number_above_the_table(inside: Session) -> None:
    last = 0x40000000 if platform.machine() == "x86_64" else 0x7FFFFFFF
    numbers = [*range(NEWEST_REVIEWED + 1, NEWEST_REVIEWED + 600), 1 << 16, 1 << 20, last - 1]
    code = (
        f"found = set()\nfor number in {numbers}:\n  try: raw(number, -1, -1, -1, -1, -1)\n"
        "  except OSError as error: found.add(error.errno)\n  else: found.add(number)\nanswer = sorted(found)"
    )
    assert inside.value(RAW + code) == [ENOSYS]


def test_devices_that_do_what_the_filter_refuses(inside: Session) -> None:
    for name in (
        "userfaultfd",
        "mem",
        "kmem",
        "port",
        "kvm",
        "fuse",
        "vhost-vsock",
        "loop-control",
        "net/tun",
        "uinput",
    ):
        fails(inside, f"os.open('/dev/{name}', os.O_RDONLY)", ENOENT)


@pytest.fixture(params=["live fork", "command server", "root's command server"])
def other_process(request: pytest.FixtureRequest, host: Host, start: Callable[..., Session]) -> Iterator[Runs]:
    """The other processes of a session that run code of the user."""
    session = start()
    if request.param == "live fork":
        process: Session | CommandServer = session.fork()
    else:
        has_root = host.user is None and os.geteuid() == 0
        process = session.serve_commands("root" if request.param.startswith("root") and has_root else "agent")
    yield process
    process.close()


def test_no_process_of_a_session_is_behind_a_weaker_filter(other_process: Runs) -> None:
    calls = [NUMBERS[name] for name in ("io_uring_setup", "io_uring_enter", "userfaultfd", "bpf", "mount", "unshare")]
    attempts = (
        "answer = []\n"
        f"for number in {[*calls, NEWEST_REVIEWED + 1]}:\n"
        "  try: raw(number, 0, 0, 0, 0, 0)\n  except OSError as error: answer.append(error.errno)\n"
        "  else: answer.append(0)"
    )
    assert other_process.value(RAW + attempts) == [EPERM] * len(calls) + [ENOSYS]
    if platform.machine() == "x86_64":
        assert other_process.value(in_a_child(f"raw({0x40000000 | 39})")) & 0x7F == signal.SIGSYS
