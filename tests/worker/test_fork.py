"""A live fork: another worker on its own line, with the same variables; refused where two could not both go on."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from carrel.guest.channel import Channel
from carrel.guest.worker import values
from tests.worker.driver import Pipe, Session


class Branch:
    """The host's side of a fork."""

    def __init__(self, session: Session) -> None:
        here, there = socket.socketpair()
        self.stdout, self.stderr = Pipe(), Pipe()
        ends = (there.fileno(), self.stdout.write_end, self.stderr.write_end)
        self.answer = session.result(session.ask(ends, op="fork"))
        there.close()
        os.close(self.stdout.write_end)
        os.close(self.stderr.write_end)
        here.settimeout(60)
        self.line = Channel(here)
        if "pid" in self.answer:
            self.ready, _ = self.line.read()

    def run(self, code: str) -> Any:
        self.line.send({"id": 1, "op": "run", "code": code})
        while True:
            record, fds = self.line.read()
            for fd in fds:
                os.close(fd)
            if record["op"] == "call":
                self.line.send({"op": "answer", "call": record["call"], "value": "from the branch's host"})
            if record["op"] == "done":
                assert "error" not in record, record
                return values.decode(record["value"])

    def close(self) -> None:
        self.line.close()
        until = time.monotonic() + 60
        while "pid" in self.answer and _runs(self.answer["pid"]):
            assert time.monotonic() < until
            time.sleep(0.005)
        self.stdout.close()
        self.stderr.close()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_both_go_on_and_neither_sees_the_other(everywhere: Session) -> None:
    everywhere.value("import asyncio\nx = [1]\ndef add(n):\n    x.append(n)\n    return x")
    everywhere.value(
        "await asyncio.sleep(0)\ntask = asyncio.create_task(asyncio.sleep(0.01, 'slept'))\nawait asyncio.sleep(0)"
    )
    branch = Branch(everywhere)
    assert branch.ready["pid"] == branch.answer["pid"] != everywhere.pid
    assert branch.run("add('branch')") == [1, "branch"]
    assert everywhere.value("add('trunk')") == [1, "trunk"]
    assert branch.run("x") == [1, "branch"]
    assert branch.run("await task") == "slept"
    assert everywhere.value("await task") == "slept"
    assert branch.run("print('mine')\ntools.a()") == "from the branch's host"
    assert branch.stdout.take() == "mine\n"
    assert everywhere.stdout.take() == ""
    assert branch.run("await tools.a.call_async()") == "from the branch's host"
    assert everywhere.value("await tools.a.call_async(1)") == ["tools.a", [1], {}]
    branch.close()
    assert everywhere.value("x") == [1, "trunk"]


def test_a_branch_outlives_its_trunk() -> None:
    with Session() as session:
        session.value("x = 7")
        branch = Branch(session)
        session.line.close()
        session.process.wait(60)
        assert branch.run("x") == 7
        branch.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import threading as t\ns = t.Event()\nt.Thread(target=s.wait, name='mine').start()", "mine"),
        ("import socket\ns = socket.socket()", "socket"),
        ("import os\np = os.pipe()", "pipe"),
        ("import asyncio\nl = asyncio.new_event_loop()", "anon_inode"),
        ("import ctypes\nc = ctypes.CDLL(None)\nc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, c.pause, None)",
         "native thread"),
    ],
)  # fmt: skip
def test_it_is_refused_and_nothing_has_changed(session: Session, code: str, words: str) -> None:
    session.value(code)
    before = session.value("import os\nlen(os.listdir('/proc/self/fd'))")
    branch = Branch(session)
    assert words in branch.answer["refused"]
    branch.close()
    assert session.value("len(os.listdir('/proc/self/fd'))") == before
    assert session.value("1 + 1") == 2


def test_a_request_without_a_line_is_refused(session: Session) -> None:
    assert "without the channel" in session.request(op="fork")["refused"]


def test_open_files_are_no_hindrance(session: Session) -> None:
    session.value("f = open('data', 'w')")
    branch = Branch(session)
    assert "pid" in branch.answer
    assert branch.run("f.name") == "data"
    branch.close()


def test_a_fork_with_a_million_objects_is_its_own(session: Session) -> None:
    session.value("big = list(range(1_000_000))")
    branch = Branch(session)
    assert branch.run("big[0] = 'changed'\nlen(big)") == 1_000_000
    assert session.value("big[0]") == 0
    branch.close()
