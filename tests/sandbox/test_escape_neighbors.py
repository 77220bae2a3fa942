"""Attempts of one session to reach another session of the same host; each must fail."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.guest.sandbox import privileges
from tests.sandbox.attempts import EACCES, ENOENT, EPERM, RAW
from tests.sandbox.conftest import Host
from tests.sandbox.host import Session

ESRCH, ECONNREFUSED = 3, 111
SHMGET = 29 if platform.machine() == "x86_64" else 194
MQ_OPEN = 240 if platform.machine() == "x86_64" else 180

Pair = tuple[Session, Session]


@pytest.fixture(params=[False, True], ids=["own network", "host's network"])
def pair(start: Callable[..., Session], request: pytest.FixtureRequest) -> Pair:
    """Two sessions of one zygote, alike in everything."""
    return start(network=request.param), start(network=request.param)


def fails(session: Session, code: str, *numbers: int) -> None:
    reply = session.run(RAW + code)
    assert reply.get("errno") in numbers, reply


def worker_of(session: Session) -> int:
    """The number of its worker on the host, which a session may guess."""
    children = Path(f"/proc/{session.pid}/task/{session.pid}/children").read_text(encoding="ascii").split()
    return int(children[0])


def test_processes_of_another_session_are_not_in_proc(pair: Pair) -> None:
    first, second = pair
    second.value("import subprocess; p = subprocess.Popen(['sleep', '1000'])")
    for pid in (second.pid, worker_of(second)):
        fails(first, f"os.stat('/proc/{pid}')", ENOENT)
        fails(first, f"open('/proc/{pid}/environ', 'rb')", ENOENT)
    names = first.value(
        "import os\nfound = [n for n in os.listdir('/proc') if n.isdigit()]\n"
        "answer = [open(f'/proc/{n}/cmdline').read() for n in found]"
    )
    assert len(names) == 2
    assert not any("sleep" in name for name in names)


def test_signals_to_another_session(pair: Pair) -> None:
    first, second = pair
    second.value("import subprocess; p = subprocess.Popen(['sleep', '1000'])")
    for pid in (second.pid, worker_of(second)):
        fails(first, f"os.kill({pid}, 0)", ESRCH)
        fails(first, f"os.killpg({pid}, 0)", ESRCH)
        fails(first, f"os.pidfd_open({pid})", ESRCH)
    first.run("import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); os.kill(-1, signal.SIGTERM)")
    first.run("import os; os.kill(-1, 9)")
    assert second.value("answer = p.poll()") is None


def test_priorities_and_processors_of_another_session(pair: Pair) -> None:
    """Both have the same user outside; the kernel looks for its processes in the caller's pid namespace only."""
    first, second = pair
    own = "import os; answer = os.getpriority(os.PRIO_PROCESS, 0)"
    before = second.value(own)
    for user in (1000, 0):
        first.run(f"import os; os.setpriority(os.PRIO_USER, {user}, 15)")
    fails(first, f"os.setpriority(os.PRIO_PROCESS, {worker_of(second)}, 15)", ESRCH)
    fails(first, f"os.sched_setaffinity({worker_of(second)}, [0])", ESRCH)
    assert second.value(own) == before


@pytest.mark.parametrize("folder", ["/dev/shm", "/tmp", "/var/tmp", "/home/agent", "/workspace"])
def test_files_of_another_session(pair: Pair, folder: str) -> None:
    first, second = pair
    second.value(f"open('{folder}/secret', 'w').write('of the second')")
    fails(first, f"open('{folder}/secret')", ENOENT)
    fails(first, f"open('/proc/{worker_of(second)}/root{folder}/secret')", ENOENT)
    first.value(f"open('{folder}/secret', 'w').write('of the first')")
    assert second.value(f"answer = open('{folder}/secret').read()") == "of the second"


def test_shared_memory_and_queues_of_another_session(pair: Pair) -> None:
    first, second = pair
    created = f"answer = [raw({SHMGET}, 4242, 4096, 0o1666) >= 0, raw({MQ_OPEN}, b'queue', 0o102, 0o666, 0) >= 0]"
    assert second.value(RAW + created) == [True, True]
    fails(first, f"raw({SHMGET}, 4242, 4096, 0)", ENOENT)
    fails(first, f"raw({MQ_OPEN}, b'queue', 2, 0, 0)", ENOENT)


def test_abstract_sockets_of_another_session(pair: Pair) -> None:
    first, second = pair
    network = second.value("import os; answer = os.readlink('/proc/self/ns/net')") == os.readlink("/proc/self/ns/net")
    if network and privileges.landlock_version() < 6:
        pytest.skip("abstract sockets of a shared network are out of reach from version 6 of Landlock on")
    name = f"carrel-test-{os.getpid()}"
    second.value(f"import socket; server = socket.socket(socket.AF_UNIX); server.bind('\\0{name}'); server.listen()")
    for kind in ("SOCK_STREAM", "SOCK_DGRAM"):
        fails(first, f"socket.socket(socket.AF_UNIX, socket.{kind}).connect('\\0{name}')", ECONNREFUSED, EPERM, 91)


def test_the_loopback_of_another_session(start: Callable[..., Session]) -> None:
    first, second = start(), start()
    port = second.value(
        "import socket; server = socket.create_server(('127.0.0.1', 0)); answer = server.getsockname()[1]"
    )
    fails(first, f"socket.create_connection(('127.0.0.1', {port}), 5)", ECONNREFUSED)


def test_memory_and_namespaces_of_another_session(pair: Pair) -> None:
    first, second = pair
    pid = worker_of(second)
    for path in (f"/proc/{pid}/mem", f"/proc/{pid}/ns/user", f"/proc/{pid}/ns/mnt", f"/proc/{pid}/fd/0"):
        fails(first, f"os.open({path!r}, os.O_RDONLY)", ENOENT, EACCES)


def test_a_session_that_is_killed_in_every_way_leaves_its_neighbor_alone(host: Host) -> None:
    first, second = host.session(), host.session()
    second.value("x = 'kept'")
    first.run("import os; os.fork() and os.fork() and os.kill(-1, 9)")
    os.kill(first.pid, signal.SIGKILL)
    first.close()
    assert second.value("answer = x") == "kept"
    second.close()
