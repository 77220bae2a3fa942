"""Live forks: the same variables and files in a place of their own, which outlives its parent and cannot touch it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.guest.channel import ChannelClosed
from carrel.guest.syscalls import NUMBERS
from tests.sandbox.attempts import EACCES, EPERM, RAW
from tests.sandbox.conftest import Host
from tests.sandbox.host import InitGone, Refused, Session, wait_gone


@pytest.fixture
def fork(start: Callable[..., Session], request: pytest.FixtureRequest) -> Callable[[Session], Session]:
    """`fork(session)`; closed after the test, before the session is."""

    def make(session: Session) -> Session:
        made = session.fork()
        request.addfinalizer(made.close)
        return made

    return make


Start = Callable[..., Session]
ForkIt = Callable[[Session], Session]


@pytest.mark.parametrize("given", [False, True])
def test_files_are_there_and_apart(start: Start, fork: ForkIt, folder: Path, host: Host, given: bool) -> None:
    for name in ("kept", "gone", "replaced/old"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, folder.stat().st_uid, folder.stat().st_gid)
    session = start(workspace={"source": str(folder), "mode": "overlay"} if given else None)
    code = (
        "import os, shutil\nfor p in ('new', '/tmp/t', '/home/agent/h', '/dev/shm/s'): open(p, 'w').write('before')\n"
        "os.symlink('new', 'link'); os.link('new', 'hard'); os.chmod('/tmp/t', 0o640); os.mkfifo('pipe')\n"
    )
    gone = "os.remove('gone'); shutil.rmtree('replaced'); os.mkdir('replaced'); open('replaced/new', 'w').write('n')\n"
    session.value(code + (gone if given else ""))
    other = fork(session)
    look = (
        "import os\nanswer = [open(p).read() for p in ('new', 'link', '/tmp/t', '/home/agent/h', '/dev/shm/s')]"
        " + [os.stat('new').st_nlink, oct(os.stat('/tmp/t').st_mode), os.path.exists('pipe'), os.getcwd()]"
    )
    assert other.value(look) == ["before"] * 5 + [2, "0o100640", True, "/workspace"]
    if given:
        assert other.value("answer = [sorted(os.listdir('.')), os.listdir('replaced')]") == [
            ["hard", "kept", "link", "new", "pipe", "replaced"],
            ["new"],
        ]
    other.value(
        "for p in ('new', '/tmp/t', '/home/agent/h', '/dev/shm/s'): open(p, 'w').write('after')\nos.remove('link')"
    )
    assert session.value(look)[:5] == ["before"] * 5
    session.value("open('only-here', 'w').close()")
    assert other.value("answer = os.path.exists('only-here')") is False


def test_random_numbers_are_others_in_a_fork(start: Start, fork: ForkIt) -> None:
    session = start()
    numbers = "import random, secrets, ssl; answer = [random.random(), secrets.token_hex(), ssl.RAND_bytes(16).hex()]"
    session.value(numbers)
    family = [session, fork(session), fork(session)]
    family.append(fork(family[-1]))
    drawn = [member.value(numbers) for member in family]
    assert [len(set(kind)) for kind in zip(*drawn, strict=True)] == [4, 4, 4]


def test_a_fork_sees_only_its_own_processes(start: Start, fork: ForkIt) -> None:
    session = start()
    session.value("import subprocess; p = subprocess.Popen(['sleep', '1000'])")
    other = fork(session)
    assert other.value("import os; answer = [int(n) for n in os.listdir('/proc') if n.isdigit()]") == [1, 2]
    assert other.value("import socket; answer = [os.getpid(), os.getuid(), socket.gethostname()]") == [
        2,
        1000,
        "carrel",
    ]


def test_a_fork_is_confined_as_its_parent(start: Start, fork: ForkIt) -> None:
    other = fork(start())
    status = other.value("answer = open('/proc/self/status').read()")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    for code in (
        "os.chroot('/')",
        f"raw({NUMBERS['unshare']}, {1 << 28})",
        "raw(308, os.open('/proc/self/ns/mnt', 0), 0)",
    ):
        assert other.run(RAW + code)["errno"] == EPERM
    for path in ("/proc/1/root", "/proc/1/cwd", "/.carrel"):
        assert other.run(f"import os; os.listdir({path!r})")["errno"] in (EACCES, EPERM)
    for path in ("/usr/x", "/etc/x", "/x", "/dev/x"):
        assert other.run(f"open({path!r}, 'w')")["errno"] == 30
    assert other.run("import socket; socket.create_connection(('1.1.1.1', 53), 2)")["errno"] == 101
    assert other.value("answer = open('/proc/kallsyms').read()") == ""


def test_its_loopback_is_its_own(start: Start, fork: ForkIt) -> None:
    session = start()
    session.value("import socket; server = socket.create_server(('127.0.0.1', 4000))")
    other = fork(session)
    assert other.run("socket.create_connection(('127.0.0.1', 4000), 2)")["errno"] == 111


def test_a_fork_outlives_its_parent(start: Start, fork: ForkIt) -> None:
    session = start()
    session.value("x = 'kept'; import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True)")
    other = fork(session)
    session.control.send({"op": "close"})
    with pytest.raises(ChannelClosed):
        session.control.read()
    assert session.run("1")["error"] == "Gone"
    assert other.value("import subprocess; answer = [x, subprocess.getoutput('echo ok')]") == ["kept", "ok"]
    other.control.send({"op": "close"})
    wait_gone(session.pid)


def test_forks_of_forks(start: Start, fork: ForkIt) -> None:
    family = [start()]
    family[0].value("trail = [0]")
    for number in range(1, 6):
        family.append(fork(family[-1]))
        assert family[-1].value(f"trail.append({number}); answer = trail") == list(range(number + 1))
    assert family[0].value("answer = trail") == [0]
    family[2].control.send({"op": "close"})
    assert family[2].hear()[0]["op"] == "exited"
    with pytest.raises(InitGone):
        family[2].hear()
    assert [member.value("answer = len(trail)") for member in (family[1], family[3], family[5])] == [2, 4, 6]


def test_how_deep_forks_go(start: Start, fork: ForkIt) -> None:
    family = [start()]
    message = ""
    while not message and len(family) < 40:
        try:
            family.append(fork(family[-1]))
        except Refused as refused:
            message = refused.answer["message"]
    assert 25 < len(family) < 35
    assert "deep" in message
    deepest = max(processes_below(family[0].pid), key=lambda pid: (numbers_of(pid)[-1] == "1", len(numbers_of(pid))))
    before = len(os.listdir(f"/proc/{deepest}/fd"))
    for _ in range(3):
        with pytest.raises(Refused, match="deep"):
            family[-1].fork()
    end = time.monotonic() + 60
    while len(os.listdir(f"/proc/{deepest}/fd")) > before:
        assert time.monotonic() < end, "descriptors of places that could not be made are left"
        time.sleep(0.01)
    assert [member.value("answer = 1") for member in family] == [1] * len(family)


def test_the_end_of_a_fork_s_worker_is_reported(start: Start, fork: ForkIt) -> None:
    session = start()
    other = fork(session)
    signal.pidfd_send_signal(other.worker, signal.SIGKILL)
    record, _ = other.hear()
    assert (record["op"], record["pid"], record["status"]) == ("exited", other.hello["pid"], signal.SIGKILL)
    assert session.value("answer = 1") == 1


def test_a_workspace_that_is_the_folder_itself_is_not_forked(start: Start, folder: Path) -> None:
    session = start(workspace={"source": str(folder), "mode": "rw"})
    with pytest.raises(Refused) as refused:
        session.fork()
    assert "mode rw" in refused.value.answer["message"]
    assert session.value("answer = 1") == 1


def test_without_the_parts_for_it_a_fork_is_refused(start: Start) -> None:
    session = start(parts=["user", "mount", "pid", "ipc", "uts", "net", "overlay", "seccomp"])
    with pytest.raises(Refused) as refused:
        session.fork()
    assert "doctor" in refused.value.answer["message"]
    assert session.value("answer = 'enter_fork' in settings") is False


def test_a_fork_that_was_not_entered_is_gone_with_its_socket(start: Start) -> None:
    session = start()
    for _ in range(3):
        ours, theirs = socket.socketpair()
        session.control.send({"op": "fork", "id": 1}, (theirs.fileno(),))
        theirs.close()
        assert session.hear()[0]["op"] == "fork_ready"
        ours.close()
        end = time.monotonic() + 60
        while len(session.value("import os; answer = [n for n in os.listdir('/proc') if n.isdigit()]")) > 2:
            assert time.monotonic() < end, "the place is still there"
    reply = session.run("settings['enter_fork']()")
    assert (reply["error"], reply["errno"]) == ("ForkFailed", EPERM)


def test_after_a_place_that_was_given_up_the_next_fork_is_made_at_once(start: Start, fork: ForkIt) -> None:
    session = start()
    session.value("x = 3")
    for ready in (True, False, True, False):
        ours, theirs = socket.socketpair()
        session.control.send({"op": "fork", "id": 1}, (theirs.fileno(),))
        theirs.close()
        if ready:
            assert session.hear()[0]["op"] == "fork_ready"
        ours.close()
        if not ready:
            # Given up while it was being made: reported either way, then the next.
            assert session.hear()[0]["op"] in ("fork_ready", "fork_failed")
    assert fork(session).value("answer = x") == 3


def test_two_forks_at_once_are_refused(start: Start) -> None:
    session = start()
    lines = [socket.socketpair() for _ in range(2)]
    for number, (_, theirs) in enumerate(lines):
        session.control.send({"op": "fork", "id": number}, (theirs.fileno(),))
    answers = {record["id"]: record["op"] for record, _ in (session.hear(), session.hear())}
    assert answers == {0: "fork_ready", 1: "fork_failed"}
    for line in lines:
        line[0].close()
        line[1].close()


def test_no_entrance_without_the_host_s_wish(start: Start) -> None:
    reply = start().run("settings['enter_fork']()")
    assert (reply["error"], reply["errno"]) == ("ForkFailed", EPERM)


def test_the_init_of_a_fork_is_out_of_the_worker_s_reach(start: Start, fork: ForkIt) -> None:
    session = start()
    fork(session)
    for number in inits_of_forks(session, 1):
        # While it is being made the numbers of its descriptors can be seen, and no more.
        end = time.monotonic() + 60
        while session.run(f"os.listdir('/proc/{number}/fd')").get("errno") not in (EACCES, EPERM):
            assert time.monotonic() < end
        for name in ("root", "cwd"):
            assert session.run(f"os.listdir('/proc/{number}/{name}')")["errno"] in (EACCES, EPERM)
        for name in ("mem", "ns/user", "ns/mnt", "environ"):
            assert session.run(f"open('/proc/{number}/{name}', 'rb')")["errno"] in (EACCES, EPERM)
        assert session.run(f"os.kill({number}, 9)")["errno"] == EPERM


def test_whenever_the_init_of_a_new_fork_is_killed_the_session_is_unharmed(start: Start) -> None:
    session = start()
    for number in range(40):
        killer = threading.Timer(number / 4_000, kill_inits_below, (session,))
        killer.start()
        try:
            other = session.fork()
        except (Refused, json.JSONDecodeError, InitGone):
            continue  # It was killed before its worker had entered, or when that had just begun.
        finally:
            killer.join()
        other.run("answer = 1")
        other.close()
    assert session.value("answer = 6 * 7") == 42
    assert session.fork().value("answer = 6 * 7") == 42


def test_a_stale_message_about_an_earlier_fork_is_ignored(start: Start, fork: ForkIt) -> None:
    session = start()
    late = (
        "import json, os, socket\n"
        "record = json.dumps({'op': 'entered', 'pid': os.getpid()}).encode()\n"
        "with socket.socket(fileno=os.dup(3)) as line: line.sendall(len(record).to_bytes(4, 'big') + record)\n"
        "answer = 1"
    )
    ours, theirs = socket.socketpair()
    with ours:
        session.control.send({"op": "fork", "id": 7}, (theirs.fileno(),))
        theirs.close()
        assert session.value(late) == 1
        assert session.hear()[0] == {"op": "fork_ready", "id": 7}
    assert fork(session).value("answer = 6 * 7") == 42


INITS = """
import os
answer = []
for number in [name for name in os.listdir('/proc') if name.isdigit()]:
    try:
        rows = open(f'/proc/{number}/status').read().splitlines()
    except OSError:
        continue
    if next(row.split()[2:] for row in rows if row.startswith('NSpid')) == ['1']:
        answer.append(number)
"""


def inits_of_forks(session: Session, wanted: int) -> list[str]:
    """The first processes of the forks below a session, once there are so many."""
    end = time.monotonic() + 60
    while len(found := session.value(INITS)) != wanted:
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return list(found)


def kill_inits_below(session: Session) -> None:
    children = Path(f"/proc/{session.pid}/task/{session.pid}/children").read_text(encoding="ascii").split()
    for number in children:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if is_init(number):
                os.kill(int(number), signal.SIGKILL)


def is_init(number: str) -> bool:
    return numbers_of(int(number))[-1] == "1"


def numbers_of(pid: int) -> list[str]:
    """Of a process, in each namespace that it is in."""
    rows = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(row.split()[1:] for row in rows if row.startswith("NSpid"))


def processes_below(pid: int) -> set[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return {int(number) for number in found}.union(*(processes_below(int(number)) for number in found))


def test_lies_to_init_harm_only_the_liar(start: Start) -> None:
    session = start()
    code = (
        "import socket, json, array\ns = socket.socket(fileno=os.dup(init))\n"
        "def tell(record, fds=()):\n  b = json.dumps(record).encode()\n"
        "  socket.send_fds(s, [len(b).to_bytes(4, 'big') + b], list(fds))\n"
        "r, w = os.pipe()\ntell({'op': 'listener', 'fds': 1}, [r])\n"
        "tell({'op': 'entered', 'pid': 1})\ntell({'op': 'worker', 'pid': 1})\ntell({'op': 'enter'})\n"
        "heard = b''\nwhile heard.count(b'refused') < 1: heard += s.recv(1000)\n"
    )
    session.value(RAW + code)
    assert session.run(RAW + f"raw({NUMBERS['setns']}, os.open('/proc/self/ns/mnt', 0), 0x20000)")["errno"] == EPERM
    session.value("s.sendall(b'\\xff' * 100)")
    assert session.value("answer = 1") == 1
    assert os.path.exists(f"/proc/{session.pid}")


KEEPS = """
import os, sys
calls = next(module for name, module in sys.modules.items() if name.endswith('guest.syscalls'))
enter, doors = calls.setns, []
def setns(descriptor, flags):
    doors.append((os.dup(descriptor), flags))
    enter(descriptor, flags)
calls.setns, calls.drop_capabilities = setns, lambda: None
"""
CAPABLE = "answer = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('CapEff'))"


def test_code_that_keeps_the_capabilities_of_who_enters_gains_nothing(start: Start, fork: ForkIt) -> None:
    """They are those of the code's own fork: the filter and the fence are around it all the same."""
    session = start()
    session.value(KEEPS)
    other = fork(session)
    assert int(other.value(CAPABLE), 16) != 0
    for name in ("root", "cwd", "fd", "ns"):
        assert other.run(f"os.listdir('/proc/1/{name}')")["errno"] in (EACCES, EPERM)
    for call in ("open('/proc/1/mem', 'rb')", "os.kill(1, 9)", "os.chroot('/')"):
        assert other.run(call)["errno"] in (EACCES, EPERM)
    for name in ("mount", "umount2", "unshare", "open_tree", "open_by_handle_at", "ptrace", "bpf"):
        assert other.run(RAW + f"raw({NUMBERS[name]}, 0, 0, 0, 0, 0)")["errno"] == EPERM
    assert int(session.value(CAPABLE), 16) == 0
    assert session.value("answer = len(doors)") == 0  # Only the process in between has had them open.


def test_an_unread_answer_is_not_taken_for_the_next(start: Start, fork: ForkIt) -> None:
    """Who stands between may be killed while it waits, and the worker that goes on has the same line to init."""
    session = start()
    session.value(
        "import os, socket, json, select\ns = socket.socket(fileno=os.dup(init))\n"
        "record = json.dumps({'op': 'enter', 'pid': 4321}).encode()\n"
        "s.sendall(len(record).to_bytes(4, 'big') + record)\nselect.select([s], [], [])"
    )
    for _ in range(2):
        assert fork(session).value("answer = 6 * 7") == 42


def test_a_child_that_cannot_go_on_ends_and_says_nothing_in_its_parent_s_name(start: Start) -> None:
    session = start()
    session.value("import os; os.dup2 = lambda *_, **__: 1 / 0")
    with pytest.raises(json.JSONDecodeError):  # Its line ends without a word.
        session.fork()
    assert [session.value(f"answer = {number}") for number in range(3)] == [0, 1, 2]


def test_a_fork_for_which_there_are_too_few_descriptors_leaves_none(start: Start, fork: ForkIt) -> None:
    session = start()
    count = "len(os.listdir('/proc/self/fd'))"
    session.value(f"import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50)); before = {count}")
    for free in range(8, 12):
        session.value(
            "held = []\ntry:\n  while True: held.append(os.open('/dev/null', os.O_RDONLY))\nexcept OSError: pass\n"
            f"for _ in range({free}): os.close(held.pop())"
        )
        try:
            fork(session).close()
        except Refused:
            session.value("for one in ends: os.close(one)")
        session.value("for one in held: os.close(one)")
        assert session.value(f"answer = {count} - before") == 0
    fork(session)


def test_a_family_leaves_nothing(start: Start, host: Host) -> None:
    session = start()
    forks = [session.fork() for _ in range(3)]
    for other in forks:
        other.close()
    end = time.monotonic() + 60
    while len(session.value("import os; answer = [n for n in os.listdir('/proc') if n.isdigit()]")) > 2:
        assert time.monotonic() < end, "processes of closed forks are left"
    session.close()
    assert not os.path.exists(f"/proc/{session.pid}")
