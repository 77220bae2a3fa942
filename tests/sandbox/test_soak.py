"""Thousands of sessions and forks, and kills in every phase of their lives: nothing is left of any.

`CARREL_SOAK=0.1` runs a tenth of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carrel.guest.channel import ChannelError
from tests.sandbox.conftest import Host, waiting_place
from tests.sandbox.host import OTHER_USER, InitGone, Refused, Session, Zygote, wait_gone
from tests.sandbox.test_cleanup import alive, family, groups, wait_empty

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

SHARE = float(os.environ.get("CARREL_SOAK", "1"))
SESSIONS, FORKS, KILLS = (max(1, int(count * SHARE)) for count in (10_000, 1_000, 200))
FAILURES = (Refused, InitGone, ChannelError, json.JSONDecodeError, BrokenPipeError, ConnectionResetError)
"""How a session or a fork fails whose processes are killed while it starts."""


def state(host: Host) -> dict[str, int]:
    """What a session that leaves something behind would make larger."""
    zygote = host.zygote.pid
    mounts = Path(f"/proc/{zygote}/mountinfo").read_text(encoding="utf-8").splitlines()
    return {
        "descriptors of the zygote": len(os.listdir(f"/proc/{zygote}/fd")),
        "mounts of the zygote": len([row for row in mounts if ".carrel" in row or "tmpfs /sys" in row]),
        "processes": len(family(zygote)),
        "cgroups": len(groups(zygote)),
        "folders": len([name for name in os.listdir("/tmp") if name.startswith("carrel-") and "tests" not in name]),
        "megabytes of the zygote": resident_pages(zygote) * os.sysconf("SC_PAGESIZE") >> 20,
    }


def resident_pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])


@contextlib.contextmanager
def nothing_left(host: Host) -> Iterator[None]:
    waiting_place(host)
    before = state(host)
    yield
    start(host).close()  # the sandbox that was prepared last may have been killed
    waiting_place(host)
    wait_empty(lambda: {name: (before[name], now) for name, now in state(host).items() if now > before[name] + 1})


def test_sessions_in_a_row(host: Host) -> None:
    with nothing_left(host):
        for number in range(SESSIONS):
            session = host.session(limits={"memory": 1 << 30} if number % 10 == 0 else {})
            assert session.value(f"answer = {number}") == number
            session.close()


def test_forks_of_one_session(host: Host) -> None:
    with nothing_left(host):
        session = host.session()
        descriptors = "import os; answer = [len(os.listdir('/proc/self/fd')), len(os.listdir('/proc'))]"
        session.fork().close()
        before = session.value(descriptors), len(os.listdir(f"/proc/{session.pid}/fd"))
        for number in range(FORKS):
            fork = session.fork()
            assert fork.value(f"answer = {number}") == number
            fork.close()

        def more() -> bool:
            now = session.value(descriptors), len(os.listdir(f"/proc/{session.pid}/fd"))
            return now[0][0] > before[0][0] or now[0][1] > before[0][1] or now[1] > before[1]

        wait_empty(more)
        session.close()


def start(host: Host) -> Session:
    """As a host does: a sandbox that was prepared in advance may have been killed too; then it asks again."""
    while True:
        try:
            return host.session()
        except Refused as refused:
            if not refused.answer.get("lost"):
                raise


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def children(pid: int) -> set[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return {int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()}
    return set()


def kill_inits(host: Host, session: Session | None) -> None:
    for pid in children(host.zygote.pid):
        kill(pid)


def kill_workers(host: Host, session: Session | None) -> None:
    for init in children(host.zygote.pid):
        for pid in children(init):
            kill(pid)


def kill_below_workers(host: Host, session: Session | None) -> None:
    for init in children(host.zygote.pid):
        for worker in children(init):
            for pid in children(worker):
                kill(pid)


VICTIMS: dict[str, Callable[[Host, Session | None], None]] = {
    "init": kill_inits,
    "worker": kill_workers,
    "middle process": kill_below_workers,
}


@pytest.mark.parametrize("victim", ["init", "worker"])
def test_kills_while_a_session_starts(host: Host, victim: str) -> None:
    with nothing_left(host):
        for _ in range(KILLS):
            timer = threading.Timer(random.random() * 0.02, VICTIMS[victim], (host, None))
            timer.start()
            with contextlib.suppress(*FAILURES):
                session = host.session(limits={"memory": 1 << 30})
                session.run("answer = 1")
                session.close()
            timer.join()
        session = start(host)
        assert session.value("answer = 6 * 7") == 42
        session.close()


@pytest.mark.parametrize("victim", ["init", "worker"])
def test_kills_while_code_runs(host: Host, victim: str) -> None:
    with nothing_left(host):
        for _ in range(KILLS):
            session = start(host)
            timer = threading.Timer(random.random() * 0.01, VICTIMS[victim], (host, session))
            timer.start()
            session.run("import subprocess, time; subprocess.Popen(['sleep', '100']); time.sleep(100)")
            timer.join()
            session.close()


@pytest.mark.parametrize("victim", ["init", "worker", "middle process"])
def test_kills_while_a_session_is_forked(host: Host, victim: str) -> None:
    with nothing_left(host):
        for _ in range(KILLS):
            session = start(host)
            timer = threading.Timer(random.random() * 0.03, VICTIMS[victim], (host, session))
            timer.start()
            with contextlib.suppress(*FAILURES):
                fork = session.fork()
                fork.run("answer = 1")
                fork.close()
            timer.join()
            session.close()


def test_kills_while_a_session_is_closed(host: Host) -> None:
    with nothing_left(host):
        for number in range(KILLS):
            session = start(host)
            session.value("import subprocess; p = subprocess.Popen(['sleep', '100'], start_new_session=True)")
            victim = VICTIMS["init" if number % 2 else "worker"]
            timer = threading.Timer(random.random() * 0.003, victim, (host, session))
            timer.start()
            session.close()
            timer.join()


@pytest.mark.parametrize("user", [None, OTHER_USER] if os.geteuid() == 0 else [None])
def test_kills_of_the_zygote(user: int | None) -> None:
    for _ in range(KILLS):
        host = Host(user)
        zygote: Zygote = host.zygote
        sessions = [host.session(), host.session()]
        below = family(zygote.pid)
        timer = threading.Timer(random.random() * 0.02, kill, (zygote.pid,))
        timer.start()
        with contextlib.suppress(*FAILURES, Exception):
            sessions.append(host.session())
        timer.join()
        os.waitpid(zygote.pid, 0)
        wait_empty(lambda below=below: alive(below))  # type: ignore[misc]
        for session in sessions:
            session.close()
        zygote.control.close()
        for pid in host.pids:
            wait_gone(int(pid))
