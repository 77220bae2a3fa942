"""What code writes arrives, in order, in its own result; whatever it does to its streams, the next cell has them."""

import time
from pathlib import Path

import pytest

from tests.worker.driver import Session


def test_output_of_python_children_and_c_in_order(everywhere: Session) -> None:
    outcome = everywhere.run(
        "import ctypes, os, subprocess, sys\n"
        "print('one', end=' ')\n"
        "subprocess.run(['echo', 'two'])\n"
        "os.system('echo three; echo wrong >&2')\n"
        "os.write(1, b'four\\n')\n"
        "print('fi', end='')\nprint('ve')\n"
        "ctypes.CDLL(None).puts(b'six')\n"
        "ctypes.CDLL(None).printf(b'no newline')\n"
        "print('err', file=sys.stderr)"
    )
    assert outcome.stdout == "one two\nthree\nfour\nfive\nsix\nno newline"
    assert outcome.stderr == "wrong\nerr\n"
    assert everywhere.run("1").stdout == ""


def test_output_streams_while_the_code_runs(session: Session) -> None:
    number = session.ask(op="run", code="import time\nprint('first')\ntools.wait()\nprint('second')")
    seen: list[str] = []
    session.answer = lambda name, args, kwargs: seen.append(session.wait_for_output("first"))
    assert session.ran(number).stdout == "second\n"
    assert seen == ["first\n"]


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import os; os.close(1); os.close(2)",
        "import os; os.close(1); open('f', 'w')",
        "import os; os.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
        "import sys, io; sys.stdout = io.StringIO()",
        "import sys; sys.stdout = sys.stderr = None",
        "import sys; sys.stdout.detach()",
        "import sys; sys.stdout.buffer.close()",
        "import os; os.closerange(0, 100)",
        "import asyncio, os; await asyncio.sleep(0); os.closerange(0, 100)",
        "class Bad:\n    def flush(self): raise SystemExit\n    write = None\nimport sys; sys.stdout = Bad()",
    ],
)
def test_streams_that_code_closed_are_there_again(everywhere: Session, code: str) -> None:
    everywhere.run(code)
    everywhere.run("pass")
    outcome = everywhere.run("import os, sys\nprint('again')\nos.system('echo child')\nprint('err', file=sys.stderr)")
    assert (outcome.stdout, outcome.stderr, outcome.error) == ("again\nchild\n", "err\n", None)
    assert everywhere.value("import asyncio\nawait asyncio.sleep(0, 'awake')") == "awake"


@pytest.mark.parametrize(
    "code",
    [
        "sys.stdout = io.StringIO()",
        "sys.stdout = None",
        "kept = sys.stdout\nsys.stdout = None",
        "sys.stdout = sys.__stdout__ = io.StringIO()",
        "left = contextlib.redirect_stdout(io.StringIO())\nleft.__enter__()",
        "sys.stdout = Late(sys.stdout)\nprint('ed', end='')",
    ],
)
def test_what_was_printed_before_a_stream_was_replaced_is_in_its_own_result(everywhere: Session, code: str) -> None:
    everywhere.run(
        "import contextlib, io, sys\nclass Late(io.StringIO):\n"
        "    def __init__(self, to): super().__init__(); self.to = to\n"
        "    def __del__(self): self.to.write(self.getvalue())"
    )
    # The answer and what comes too late race with each other.
    for _ in range(20):
        outcome = everywhere.run(f"print('print', end='')\n{code}")
        assert outcome.stdout == ("printed" if "Late" in code else "print")
        assert everywhere.run("print('next')").stdout == "next\n"


def test_surrogates_and_bytes_that_are_no_text(everywhere: Session) -> None:
    assert everywhere.run("print('a\\ud800b', 'ü')").stdout == "a\\ud800b ü\n"
    assert everywhere.value("'\\ud800'") == "\ud800"
    assert everywhere.value("{'\\ud800': 'ü'}") == {"\ud800": "ü"}
    assert "ud800" in (everywhere.run("raise ValueError('\\ud800')").error or "")


def test_a_late_thread_prints_and_nothing_breaks(session: Session) -> None:
    session.run(
        "import os, threading, time\n"
        "def late():\n    while not os.path.exists('go'): time.sleep(0.01)\n    print('late')\n"
        "thread = threading.Thread(target=late)\nthread.start()"
    )
    assert session.stdout.take() == ""
    (Path(session.home) / "go").touch()
    assert "late" in session.wait_for_output("late")
    assert session.run("thread.join()\nprint('mine')").stdout == "mine\n"


def test_a_run_may_bring_its_own_pipes(everywhere: Session) -> None:
    late = "(while ! [ -e go ]; do sleep 0.01; done; echo late; touch said) & echo now"
    first = everywhere.run(f"import os, time\nos.system({late!r})")
    assert first.stdout == "now\n"
    assert first.record["shared"] is True
    old = everywhere.stdout
    apart = everywhere.run_apart(
        "print('mine')\nopen('go', 'w').close()\n"
        "while not os.path.exists('said'): time.sleep(0.01)\nos.system('echo child')"
    )
    assert apart.stdout == "mine\nchild\n"
    assert old.take() == "late\n"
    until = time.monotonic() + 60
    while everywhere.run("1").record["shared"]:
        assert time.monotonic() < until, "the one who wrote late has ended, and the pipes are still shared"
    everywhere.value("x = len([1])")
    everywhere.crash("os._exit(1)")
    everywhere.wake()
    assert everywhere.run_apart("print(x)").stdout == "1\n"


def test_a_fork_of_the_users_ends_with_its_cell(everywhere: Session) -> None:
    outcome = everywhere.run(
        "import os, sys\n"
        "pid = os.fork()\n"
        "print('child' if pid == 0 else 'parent', flush=True)\n"
        "if pid: ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "else: sys.exit(7)\n"
        "ended"
    )
    assert outcome.value == 7
    assert sorted(outcome.stdout.split()) == ["child", "parent"]
    ends = "import os\npid = os.fork()\nif not pid: 1/0\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    outcome = everywhere.run(ends)
    assert outcome.value == 1
    assert "ZeroDivisionError" in outcome.stderr
    refused = "import os\npid = os.fork()\nif not pid:\n    tools.a()\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    assert everywhere.value(refused) == 1
    assert everywhere.value("os.getpid() != pid") is True


def test_processes_of_multiprocessing(session: Session) -> None:
    code = "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as pool: got = pool.map(abs, [-1, -2])\ngot"
    assert session.value(code) == [1, 2]
    assert session.value("got") == [1, 2]


def test_a_fork_from_a_thread(session: Session) -> None:
    code = (
        "import os, threading\n"
        "def work():\n    global pid\n    pid = os.fork()\n    if pid == 0: print('child', flush=True)\n"
        "t = threading.Thread(target=work)\nt.start()\nt.join()\nos.waitpid(pid, 0)[1]"
    )
    outcome = session.run(code)
    assert outcome.value == 0
    assert outcome.stdout == "child\n"


def test_the_worker_ends_when_its_host_is_gone() -> None:
    with Session() as session:
        session.run("import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()")
        session.line.close()
        until = time.monotonic() + 60
        while session.process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.01)
