"""How init ends processes, where they end by themselves at the same moment; and itself, where something goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from carrel.guest.sandbox import ending, starting
from carrel.guest.sandbox.report import Report


def test_who_has_been_buried_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of a fork is buried by the init above it, which the fork's own init cannot hold up."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    seen: list[str] = []

    def depth(name: str) -> int:
        seen.append(name)
        return int(seen.count(name) == 1)

    monkeypatch.setattr(os, "listdir", lambda _: ["1", "self", str(gone.pid)])
    monkeypatch.setattr(ending, "_depth", depth)
    ending.kill_own_processes()
    assert seen == [str(gone.pid)] * 2


def test_a_report_that_nobody_hears_is_no_error() -> None:
    read, write = os.pipe()
    report = Report(write)
    os.close(read)
    report.failed(ValueError("said to nobody"))
    os.close(write)


def test_a_report_that_was_left_to_another_writes_nowhere() -> None:
    read, write = os.pipe()
    report = Report(os.dup(write))
    report.close()
    report.failed(ValueError("said to whatever has its number"))
    os.close(write)
    assert os.read(read, 100) == b""
    os.close(read)


def test_an_init_that_fails_ends_and_does_not_go_on_as_who_forked_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(starting.confine, "usual_signals", broken)
    monkeypatch.setattr(Report, "failed", broken)
    pid = os.fork()
    if pid == 0:
        try:
            starting.live(None, starting.Ends([-1, -1, -1]), None, None)  # type: ignore[arg-type]
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
