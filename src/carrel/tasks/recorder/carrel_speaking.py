"""Speaks to the host from a test runner: lines on standard error as it was at first, which the host takes out again.

Standard library only, and any Python from 3.6 on. What is written to a pipe cannot be taken back, so a report that is
rewritten afterwards says something else than these lines. They begin with a word that only the host and the speaker
know; the file that held it is gone before any code of the project is imported, and comes back when this process has
ended, so that the next runner of the same command has a recorder too.
"""

import atexit
import json
import os
import stat
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = (HERE, "carrel_witness")
_LISTS = (("PYTEST_PLUGINS", ","), ("PYTHONPATH", ":"))
_OUT = 9
_WORKERS = "CARREL_WITNESS_IN_WORKERS"


def speaker() -> Any:
    """A function that sends a line, or None where nobody listens: in a runner that a test has started."""
    file = os.environ.pop("CARREL_WITNESS", "")
    try:
        with open(file) as told:
            word = told.read().strip()
        os.unlink(file)
    except OSError:
        return None
    _leave_the_environment()
    out = _channel()
    getpid, write, dumps, owner = os.getpid, os.write, json.dumps, os.getpid()
    run = str(owner) + "-" + os.urandom(4).hex()

    def give_back() -> None:
        # What was registered first is called last, when the project's code has nothing left to do.
        if getpid() == owner:
            with open(file, "w") as kept:
                kept.write(word)

    atexit.register(give_back)

    def say(**what: Any) -> None:
        # A fork of a test is not the runner; and a line must be one write.
        if getpid() == owner:
            write(out, f"\n{word} {dumps({'run': run, **what})}\n".encode("ascii"))

    return say


def _channel() -> int:
    """Standard error as it was when the test command began, or as it is where another program has started this one."""
    try:
        if stat.S_ISFIFO(os.fstat(_OUT).st_mode) or stat.S_ISSOCK(os.fstat(_OUT).st_mode):
            os.set_inheritable(_OUT, False)
            return _OUT
    except OSError:
        pass
    return os.dup(2)


def _leave_the_environment(*ours: str) -> None:
    """What the tests start is none of our business."""
    for name, between in _LISTS:
        left = [part for part in os.environ.pop(name, "").split(between) if part and part not in OURS]
        left.extend(part for part in ours if (part == HERE) == (between == ":"))
        if left:
            os.environ[name] = between.join(left)


def call_into_workers() -> None:
    """Workers of xdist's are started by the controller, where the tests do not run."""
    _leave_the_environment(*OURS)
    os.environ[_WORKERS] = "1"


def is_called_into_worker() -> bool:
    """Whether this process is one of them."""
    called = os.environ.pop(_WORKERS, "") and "PYTEST_XDIST_WORKER" in os.environ
    if called:
        _leave_the_environment()
    return bool(called)
