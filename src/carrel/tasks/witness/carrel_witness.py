"""A pytest plugin that runs where the tests run: it tells the host what really happened to each of them."""

from typing import Any

import pytest
from carrel_speaking import speaker


class _Canary(pytest.Item):
    """A test that cannot pass; where it is said to, somebody has changed what passing means."""

    def runtest(self) -> None:
        raise AssertionError("as it should")

    def reportinfo(self) -> Any:
        return self.fspath, 0, "carrel's canary"

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return "as it should"


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


_say = speaker()
if _say is not None:

    def pytest_configure(config: Any, _say: Any = _say) -> None:
        config.pluginmanager.register(_Witness(_say), "carrel-witness-lines")

    del _say
