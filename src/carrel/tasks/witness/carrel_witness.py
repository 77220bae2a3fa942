"""A pytest plugin that runs where the tests run: it tells the host, line by line, what really happened to each of them.

Standard library and any pytest from 3 on. The lines go to standard error as it was before pytest took it, and the host
takes them out again. What is written to a pipe cannot be taken back, so a report that is rewritten afterwards says
something else than these lines. The lines begin with a word that only the host and this file know; the file that held
it is gone before any code of the project is imported.
"""

import json
import os
from typing import Any

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
WORD = os.environ.pop("CARREL_WITNESS", "")


class _Canary(pytest.Item):
    """A test that cannot pass; where it is said to, somebody has changed what passing means."""

    def runtest(self) -> None:
        raise AssertionError("as it should")

    def reportinfo(self) -> Any:
        return self.fspath, 0, "carrel's canary"

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return "as it should"


def _speaker() -> Any:
    """A function that sends a line, or None where nobody listens: in a pytest that a test has started."""
    try:
        with open(WORD) as file:
            word = file.read().strip()
        os.unlink(WORD)
    except OSError:
        return None
    # What the tests start is none of our business.
    for name, between in (("PYTEST_PLUGINS", ","), ("PYTHONPATH", ":")):
        left = [part for part in os.environ.pop(name, "").split(between) if part and part not in (__name__, HERE)]
        if left:
            os.environ[name] = between.join(left)
    out = os.dup(2)
    getpid, write, dumps, owner = os.getpid, os.write, json.dumps, os.getpid()

    def say(**what: Any) -> None:
        # A fork of a test is not the runner; and a line must be one write.
        if getpid() == owner:
            write(out, f"\n{word} {dumps(what)}\n".encode("ascii"))

    return say


def _canary_failed(session: Any) -> bool:
    from _pytest.runner import runtestprotocol  # noqa: PLC0415 -- as late as possible, to find what was changed

    make: Any = getattr(_Canary, "from_parent", None)
    item = make(session, name="carrel") if make else _Canary("carrel", session)
    reports = runtestprotocol(item, log=False, nextitem=None)
    return any(report.when == "call" and report.failed for report in reports)


class _Witness:
    def __init__(self, say: Any) -> None:
        self._say = say

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: Any) -> None:
        self._say(event="begun")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        self._say(event="test", id=report.nodeid, when=report.when, outcome=report.outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._say(event="test", id=report.nodeid, when="collect", outcome="failed")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> None:
        try:
            canary = _canary_failed(session)
        except Exception as problem:  # noqa: BLE001 -- whatever it is, the host is told
            self._say(event="canary", problem=f"{type(problem).__name__}: {problem}")
        else:
            self._say(event="canary", failed=canary)
        self._say(event="finished", status=int(exitstatus))


_say = _speaker()
if _say is not None:

    def pytest_configure(config: Any, _say: Any = _say) -> None:
        config.pluginmanager.register(_Witness(_say), "carrel-witness-lines")

    del _say
