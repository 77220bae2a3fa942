"""How init ends processes, where they end by themselves at the same moment; and itself, where something goes wrong."""

from __future__ import annotations

import os
from typing import Any

import pytest

from carrel.guest.sandbox import session_start
from carrel.guest.sandbox.start_report import StartReport


def test_a_report_that_nobody_hears_is_no_error() -> None:
    read, write = os.pipe()
    report = StartReport(write)
    os.close(read)
    report.failed(ValueError("said to nobody"))
    os.close(write)


def test_a_report_that_was_left_to_another_writes_nowhere() -> None:
    read, write = os.pipe()
    report = StartReport(os.dup(write))
    report.close()
    report.failed(ValueError("said to whatever has its number"))
    os.close(write)
    assert os.read(read, 100) == b""
    os.close(read)


def test_an_init_that_fails_ends_and_does_not_go_on_as_who_forked_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(session_start.privileges, "reset_signals", broken)
    monkeypatch.setattr(StartReport, "failed", broken)
    pid = os.fork()
    if pid == 0:
        try:
            session_start.run_session(None, session_start.InitDescriptors(-1, -1, -1), None, None)  # type: ignore[arg-type]
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
