"""SIGINT stops the cell, keeps the variables, and means nothing at any other time."""

import os
import signal
import threading
import time

import pytest

from tests.worker.driver import Session

SYNC = [
    "while True: kept += 1",
    "import time; time.sleep(1000)",
    "import ctypes; ctypes.CDLL(None).sleep(1000)",
    "import threading; threading.Event().wait()",
    "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "import subprocess; subprocess.run(['sh', '-c', 'echo child; exec sleep 1000'])",
    "import select; select.select([], [], [])",
    "import queue; queue.Queue().get()",
    "import asyncio; asyncio.run(asyncio.sleep(1000))",
    "sum(n for n in iter(int, 1))",
    "class S:\n    def __repr__(self):\n        while True: pass\nS()",
    "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
]
ASYNC = [
    "await asyncio.sleep(1000)",
    "while True: await asyncio.sleep(0)",
    "await asyncio.sleep(0)\nwhile True: pass",
    "await asyncio.gather(asyncio.sleep(1000), asyncio.sleep(1000))",
    "async with asyncio.Lock(): await asyncio.Event().wait()",
    "await (await asyncio.create_subprocess_exec('sleep', '20')).wait()",
]


@pytest.mark.parametrize("code", SYNC + ASYNC)
def test_it_stops_the_cell_and_keeps_the_variables(session: Session, code: str) -> None:
    session.value("import asyncio\nkept = 1")
    outcome = session.interrupted(f"print('go')\n{code}", after="child" if "echo child" in code else "go")
    assert outcome.error is not None
    assert outcome.error_type in ("KeyboardInterrupt", "E")
    assert session.value("kept") >= 1
    assert session.value("await asyncio.sleep(0, 'on')") == "on"


def test_the_line_that_was_interrupted_is_shown(everywhere: Session) -> None:
    outcome = everywhere.interrupted("def spin():\n    while True:\n        print('go')\nspin()")
    assert "in spin" in (outcome.error or "")
    everywhere.value("import asyncio")
    everywhere.value("async def wait():\n    print('go')\n    await asyncio.sleep(1000)")
    outcome = everywhere.interrupted("await wait()")
    assert outcome.error_type == "KeyboardInterrupt"
    assert "in wait" in (outcome.error or "")


def test_code_may_clean_up(everywhere: Session) -> None:
    everywhere.value("import asyncio, time")
    cleaned = "try:\n    print('go')\n    {}\nexcept {}:\n    done = 'cleaned'\n    raise"
    outcome = everywhere.interrupted(cleaned.format("time.sleep(1000)", "KeyboardInterrupt"))
    assert outcome.error_type == "KeyboardInterrupt"
    assert everywhere.value("done") == "cleaned"
    everywhere.value("done = None")
    code = cleaned.format("await asyncio.sleep(1000)", "(asyncio.CancelledError, KeyboardInterrupt)")
    assert everywhere.interrupted(code).error_type == "KeyboardInterrupt"
    assert everywhere.value("done") == "cleaned"


def test_between_cells_it_means_nothing(everywhere: Session) -> None:
    everywhere.value("x = 1")
    for _ in range(20):
        os.kill(everywhere.pid, signal.SIGINT)
        time.sleep(0.002)
        assert everywhere.run("x").error_type in (None, "KeyboardInterrupt")
    assert everywhere.value("x") == 1


def test_a_worker_started_with_sigint_ignored_takes_it_all_the_same(session: Session) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ignoring = Session(fresh=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with ignoring:
        assert ignoring.interrupted("print('go')\nwhile True: pass").error_type == "KeyboardInterrupt"
        child = "'import signal; print(signal.getsignal(2))'"
        ran = ignoring.run(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child}])")
        assert "default_int_handler" in ran.stdout


def test_a_handler_that_code_installed_lasts_for_its_cell_only(session: Session) -> None:
    session.value("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert session.interrupted("print('go')\nwhile True: pass").error_type == "KeyboardInterrupt"
    session.value("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})")
    assert session.interrupted("print('go')\nwhile True: pass").error_type == "KeyboardInterrupt"


def test_a_snapshot_does_not_mind(session: Session) -> None:
    session.value("x = 5")
    session.wait_for_snapshot()
    os.killpg(session.process.pid, signal.SIGINT)
    session.interrupted("print('go')\nwhile True: pass")
    session.wait_for_snapshot()
    session.crash("import os\nos._exit(1)")
    session.wake()
    assert session.value("x") == 5
    assert session.interrupted("print('go')\nwhile True: pass").error_type == "KeyboardInterrupt"
    assert session.value("x") == 5


def test_further_interrupts_do_not_spoil_the_traceback(session: Session) -> None:
    """Formatting a long traceback takes longer than the pause between two interrupts."""
    code = "def deep(n):\n    if n: deep(n - 1)\n    else:\n        print('go')\n        while True: pass\n"
    session.value(code + "import sys; sys.setrecursionlimit(3000)")
    number = session.ask(op="run", code="deep(900)")
    session.wait_for_output("go")
    stop = threading.Event()

    def press() -> None:
        while not stop.is_set():
            os.kill(session.pid, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    try:
        outcome = session.ran(number)
    finally:
        stop.set()
        presser.join()
    assert outcome.error_type == "KeyboardInterrupt"
    assert "in deep" in (outcome.error or "")


def test_the_peak_of_the_process_that_started_it_is_not_its_own(session: Session) -> None:
    ballast = bytearray(os.urandom(1)) * (256 << 20)
    with Session(fresh=True) as other:
        assert other.run("1").record["usage"]["max_rss_bytes"] < len(ballast)
        assert other.run("x = b'1' * (300 << 20)").record["usage"]["max_rss_bytes"] > 300 << 20


def test_an_interrupt_in_a_destructor_is_not_lost(session: Session) -> None:
    code = (
        "import os, signal, time\nclass Ends:\n    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(0)\n"
        "Ends()\nwhile True: pass"
    )
    outcome = session.run(code)
    assert (outcome.error_type, outcome.stderr) == ("KeyboardInterrupt", "")
    assert session.run("class Odd:\n    def __del__(self): 1 / 0\nOdd()\n1").stderr.count("ZeroDivisionError") == 1
