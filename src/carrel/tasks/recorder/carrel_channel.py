"""The channel from a recorder in a test runner to the host: lines on the original standard error.

Standard library only; Python 3.6 or later. Data written to a pipe cannot be taken back, so a report that is rewritten
afterwards contradicts these lines. Each begins with a marker that only the host and the recorder know. The file with
the marker is deleted before any code of the project is imported, and is written again when this process exits, so that
the next runner of the same command has a recorder too. The host removes the lines from the output.
"""

import atexit
import json
import os
import stat
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = (HERE, "carrel_pytest")
_LISTS = (("PYTEST_PLUGINS", ","), ("PYTHONPATH", ":"))
_OUT = 9
_WORKERS = "CARREL_RECORDER_IN_WORKERS"


ended_watch = []  # type: list[bool]
"""Not empty once this process is a test runner with a channel, or has reported that it is another program."""


def open_channel() -> Any:
    """A function that sends a line, or None without a channel: in a runner that was started by a test."""
    file = os.environ.pop("CARREL_RECORDER", "")
    marker, send = _read(file), lines_for(file, is_runner=True)
    try:
        os.unlink(file)
    except OSError:
        return None
    ended_watch.append(True)
    _clean_environment()
    owner, getpid = os.getpid(), os.getpid

    def restore_marker() -> None:
        # Functions registered first are called last, after all code of the project.
        if getpid() == owner:
            with open(file, "w") as marker_file:
                marker_file.write(marker)

    atexit.register(restore_marker)
    return send


def lines_for(file: str, is_runner: bool = False) -> Any:
    """A function that sends a line with the marker in this file; None when there is no such file."""
    marker = _read(file)
    if not marker:
        return None
    out = _channel(is_runner)
    getpid, write, dumps, owner = os.getpid, os.write, json.dumps, os.getpid()
    run = str(owner) + "-" + os.urandom(4).hex()

    def send(**what: Any) -> None:
        # A process forked by a test is not the runner. A line must be a single write.
        if getpid() == owner:
            write(out, f"\n{marker} {dumps({'run': run, **what})}\n".encode("ascii"))

    return send


def _read(file: str) -> str:
    try:
        with open(file) as marker_file:
            return marker_file.read().strip()
    except OSError:
        return ""


def _channel(is_runner: bool) -> int:
    """The command's original standard error, or the current one when another program started this process."""
    try:
        if stat.S_ISFIFO(os.fstat(_OUT).st_mode) or stat.S_ISSOCK(os.fstat(_OUT).st_mode):
            os.set_inheritable(_OUT, not is_runner)
            return _OUT
    except OSError:
        pass
    return os.dup(2)


def _clean_environment(*ours: str) -> None:
    """Processes that the tests start do not get the recorder, except `ours`."""
    for name, between in _LISTS:
        left = [part for part in os.environ.pop(name, "").split(between) if part and part not in OURS]
        left.extend(part for part in ours if (part == HERE) == (between == ":"))
        if left:
            os.environ[name] = between.join(left)


def enable_in_workers() -> None:
    """Let the workers of pytest-xdist load the recorder: the tests run there, not in the controller."""
    _clean_environment(*OURS)
    os.environ[_WORKERS] = "1"


def is_xdist_worker() -> bool:
    """Whether this process is such a worker."""
    called = os.environ.pop(_WORKERS, "") and "PYTEST_XDIST_WORKER" in os.environ
    if called:
        _clean_environment()
    return bool(called)
