"""Another worker in the same place: when the last one died and left no snapshot, the files are still there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.guest.channel import ChannelClosed
from tests.sandbox.attempts import EPERM
from tests.sandbox.host import Session, wait_gone

Start = Callable[..., Session]


def kill(session: Session) -> None:
    signal.pidfd_send_signal(session.worker, signal.SIGKILL)
    record, _ = session.hear()
    assert record["op"] == "exited"


def test_it_is_confined_as_the_first_was(start: Start) -> None:
    session = start()
    first = session.value("answer = open('/proc/self/status').read()")
    kill(session)
    session.again()
    second = session.value("answer = open('/proc/self/status').read()")
    rows = ("Uid", "Gid", "Cap", "NoNew", "Seccomp", "SigIgn", "SigCgt")
    assert [row for row in first.splitlines() if row.startswith(rows)] == [
        row for row in second.splitlines() if row.startswith(rows)
    ]
    assert session.run("import os; os.chroot('/')")["errno"] == EPERM
    assert session.value("answer = len(os.listdir('/proc/self/fd'))") == 6


def test_it_can_be_forked(start: Start) -> None:
    session = start()
    kill(session)
    session.again()
    session.value("x = 5; open('f', 'w').write('g')")
    fork = session.fork()
    assert fork.value("answer = [x, open('f').read()]") == [5, "g"]
    kill(fork)
    fork.again()
    assert fork.value("x = 6; answer = open('f').read()") == "g"
    deeper = fork.fork()
    assert deeper.value("answer = x") == 6
    deepest = deeper.fork()
    assert deepest.value("answer = x") == 6
    for member in (deepest, deeper, fork):
        member.close()
    assert session.value("answer = x") == 5


def test_init_rests_when_no_worker_is_left(start: Start) -> None:
    session = start()
    kill(session)

    def used() -> int:
        fields = Path(f"/proc/{session.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = used()
    time.sleep(0.4)
    assert used() - before <= os.sysconf("SC_CLK_TCK") * 0.1


def test_an_init_that_fails_ends_with_its_session_and_is_no_second_zygote(start: Start) -> None:
    sessions = []
    for _ in range(4):  # The place of the last ones was built ahead.
        sessions.append(start())
        time.sleep(0.2)
    for session in sessions:
        # What no host sends: a number where a list should be.
        wrong = {"op": "continue", "worker": 1, "spare": 5, "end": True}
        session.control.send(wrong)
        session.control.socket.settimeout(60)
        with pytest.raises(ChannelClosed):
            session.control.read()
        wait_gone(session.pid)
