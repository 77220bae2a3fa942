"""Nothing is left: no process, mount, cgroup or folder, whichever process ends first and however."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.guest.sandbox import cgroups
from tests.sandbox.conftest import Host, waiting_place
from tests.sandbox.host import Session, Zygote, wait_gone

HOST = """
import sys, time
from tests.sandbox.conftest import Host, waiting_place
host = Host({user!r})
sessions = [host.session(limits={{"memory": 1 << 30}}, **{settings!r}) for _ in range(5)]
for session in sessions:
    session.value("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); answer = 1")
print(host.zygote.pid, *[session.pid for session in sessions], flush=True)
time.sleep(1000)
"""


def groups(pid: int) -> list[str]:
    folders = {hierarchy.folder for hierarchy in cgroups.hierarchies().values()}
    return [found for folder in folders for found in glob.glob(f"{folder}/carrel-{pid}-*")]


def family(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found |= {int(name)} | family(int(name))
    return found


def wait_empty(look: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while look():
        assert time.monotonic() < end, look()
        time.sleep(0.01)


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if os.path.exists(f"/proc/{pid}")}


def test_closing_a_session_leaves_nothing(host: Host) -> None:
    session = host.session(limits={"memory": 1 << 30, "cpus": 1.0})
    session.value("import os; [os.fork() or os.execv('/bin/sleep', ['sleep', '1000']) for _ in range(3)]")
    below = family(session.pid)
    assert len(below) == 4
    session.close()
    assert alive(below) == set()
    wait_empty(lambda: groups(host.zygote.pid))


def test_a_killed_init_leaves_nothing(host: Host) -> None:
    session = host.session(limits={"memory": 1 << 30})
    below = family(session.pid)
    os.kill(session.pid, signal.SIGKILL)
    wait_gone(session.pid)
    wait_empty(lambda: alive(below))
    wait_empty(lambda: groups(host.zygote.pid))
    session.close()


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_a_killed_zygote_takes_its_sessions_along(host: Host, sandbox: str) -> None:
    zygote = Zygote(user=host.user, python=host.python)
    sessions = [Session(zygote, {"readonly": host.readonly, "sandbox": sandbox}) for _ in range(3)]
    for session in sessions:
        session.value("import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True)")
    below = {pid for session in sessions for pid in family(session.pid) | {session.pid}}
    os.kill(zygote.pid, signal.SIGKILL)
    os.waitpid(zygote.pid, 0)
    wait_empty(lambda: alive(below))
    for session in sessions:
        session.close()
    zygote.control.close()
    # What it could not remove, the next one does.
    other = Zygote(user=host.user, python=host.python)
    assert groups(zygote.pid) == []
    other.close()


@pytest.mark.parametrize("settings", [{}, {"sandbox": "off"}], ids=["sandbox", "off"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_host_leaves_nothing(host: Host, number: signal.Signals, settings: dict[str, str]) -> None:
    here = Path(__file__).parents[2]
    code = HOST.format(user=host.user, settings=settings)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=here) as process:
        assert process.stdout is not None
        zygote, *inits = (int(word) for word in process.stdout.readline().split())
        everything = family(zygote) | {zygote}
        assert len(inits) == 5
        assert len(everything) >= 16
        process.send_signal(number)
    wait_empty(lambda: alive(everything))
    wait_empty(lambda: groups(zygote))


def test_a_failed_start_leaves_nothing(host: Host) -> None:
    before = (family(host.zygote.pid), set(os.listdir(f"/proc/{host.zygote.pid}/fd")))
    for _ in range(5):
        with pytest.raises(Exception, match="missing"):
            host.session(mounts=[{"source": "/missing", "at": "/data", "mode": "ro"}])
    wait_empty(lambda: family(host.zygote.pid) - before[0])
    wait_empty(lambda: set(os.listdir(f"/proc/{host.zygote.pid}/fd")) - before[1])
    wait_empty(lambda: groups(host.zygote.pid))


def test_many_sessions_leak_nothing(host: Host) -> None:
    """Descriptors and mounts of the zygote and of the host are as many after as before."""

    def state() -> tuple[int, int, int]:
        # Where a session's mounts are made; elsewhere other programs may mount meanwhile.
        rows = Path(f"/proc/{host.zygote.pid}/mountinfo").read_text(encoding="utf-8").splitlines()
        places = [row.split()[4] for row in rows]
        mounts = [
            place for place in places if place in ("/sys", "/tmp", "/run", "/var", "/mnt", "/usr") or ".carrel" in place
        ]
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{host.zygote.pid}/fd")), len(mounts)

    waiting_place(host)
    before = state()
    for _ in range(50):
        host.session().close()
    waiting_place(host)
    # The first may still have been ending when they were counted: fewer is no leak.
    wait_empty(lambda: any(now > was for now, was in zip(state(), before, strict=True)))


def test_twenty_at_once(host: Host) -> None:
    sessions = [host.session() for _ in range(20)]
    assert [session.value("answer = 6 * 7") for session in sessions] == [42] * 20
    for session in sessions:
        session.close()


GONE = """
import os, socket, sys, time
from carrel.guest.channel import Channel
from carrel.guest.sandbox.sandbox_pool import SessionProcess
from carrel.guest.sandbox.spec import SandboxSpec
from carrel.guest.sandbox.zygote import Zygote
ours, theirs = socket.socketpair()
zygote = Zygote(Channel(theirs))
pid = os.fork()
if not pid:
    os._exit(1)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
report, reported = os.pipe()
os.write(reported, sys.argv[1].encode().decode("unicode_escape").encode())
os.close(reported)
zygote.poll.register(report)
process = SessionProcess(pid, SandboxSpec(), os.open("/dev/null", os.O_RDONLY), report, socket.socketpair()[0], None)
process.spawn_id = "mine"
zygote.sessions[pid] = process
zygote._reap()
print(zygote.sessions, Channel(ours).read()[0])
"""


@pytest.mark.parametrize(
    "report", ['{"step": "mount", "message": "missing"}\\n', '{"step": "mo', '{"step": "mo\\n', ""]
)
def test_a_session_that_ends_before_its_report_is_read_has_failed(report: str) -> None:
    done = subprocess.run([sys.executable, "-c", GONE, report], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{} {'op': 'failed', 'id': 'mine'"), done.stdout


LOOK_FOR = """
import re
wanted = re.compile(("se" + "cret-of-" + "[A-Z]+").encode())
found = set()
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for row in maps:
        place, rights = row.split()[:2]
        begin, end = (int(word, 16) for word in place.split("-"))
        if rights.startswith("rw"):
            memory.seek(begin)
            try:
                found.update(match.decode() for match in wanted.findall(memory.read(end - begin)))
            except OSError:
                pass
answer = sorted(found)
"""


def test_what_one_session_was_given_is_not_in_the_memory_of_the_next(host: Host) -> None:
    first = host.session(env={"TOKEN": "secret-of-FIRST;" * 20})
    second = host.session(env={"TOKEN": "secret-of-SECOND"})
    third = host.session()
    waiting = waiting_place(host)
    fourth = host.session(env={"TOKEN": "secret-of-FOURTH"})
    try:
        assert first.value("import os; answer = os.environ['TOKEN']") == "secret-of-FIRST;" * 20
        assert second.value(LOOK_FOR) == ["secret-of-SECOND"]
        assert third.value(LOOK_FOR) == []
        assert fourth.pid == waiting
        assert fourth.value(LOOK_FOR) == ["secret-of-FOURTH"]
    finally:
        for session in (first, second, third, fourth):
            session.close()
