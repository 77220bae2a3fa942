"""The report of a start, and an init that fails."""

from __future__ import annotations

import os
from typing import Any

import pytest

from carrel.guest import processes
from carrel.guest.sandbox import session_start
from carrel.guest.sandbox.spec import StartReport, parse_report, read_report


def test_a_report_without_a_reader_is_not_an_error() -> None:
    read, write = os.pipe()
    report = StartReport(write)
    os.close(read)
    report.failed(ValueError("not read"))
    os.close(write)


def test_a_closed_report_writes_nothing() -> None:
    read, write = os.pipe()
    report = StartReport(os.dup(write))
    report.close()
    report.failed(ValueError("written to whatever has its number"))
    os.close(write)
    assert os.read(read, 100) == b""
    os.close(read)


@pytest.mark.parametrize("message", ["x" * 200_000, "\U0001f600" * 200_000, "short"])
def test_a_report_of_any_length_fits_into_a_pipe_and_can_be_read(message: str) -> None:
    read, write = os.pipe()
    report = StartReport(write)
    report.step("mount the home")
    report.failed(OSError(5, message))
    result = read_report(read)
    assert (result["step"], result["errno"]) == ("mount the home", 5)
    assert message[:100] in result["message"]
    os.close(read)


@pytest.mark.parametrize("line", [b"", b'{"ok": tr', b'{"ok": tr\n', b"[1]\n", b"\xff\n"])
def test_no_report_and_an_unreadable_one_are_failures(line: bytes) -> None:
    result = parse_report(line)
    assert not result.get("ok")
    assert result["message"]


def test_an_init_that_fails_exits_and_does_not_continue_as_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(processes, "reset_signals", broken)
    monkeypatch.setattr(StartReport, "failed", broken)
    pid = os.fork()
    if pid == 0:
        try:
            session_start.run_session(None, session_start.InitDescriptors(-1, -1, -1), None, None)  # type: ignore[arg-type]
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
