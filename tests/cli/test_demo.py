"""The tour does what it says: a process really dies in mid-append, and nothing that was acknowledged is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from carrel.cli.demo_package import write_wheel
from carrel.cli.demo_story import CUT_SHORT, OTHERS, STORY, STORY_ID


def test_the_writer_is_killed_with_half_a_line_in_the_log(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "carrel.cli.demo_writer", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    acknowledged = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert acknowledged.count(STORY_ID) == len(STORY)
    assert len(acknowledged) == len(STORY) + sum(map(len, OTHERS.values()))
    whole, _, half = (tmp_path / STORY_ID / "messages.jsonl").read_bytes().rpartition(b"\n")
    assert whole.count(b"\n") == len(STORY) - 1
    assert half.startswith(b'{"role":"user","content":[{"type":"tool_result"')
    with pytest.raises(json.JSONDecodeError):
        json.loads(half)
    assert CUT_SHORT["role"] == "user"


def test_the_tour_shows_everything_and_leaves_nothing(carrel: Any, tmp_path: Path, home: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    shown = carrel("demo", env={"TMPDIR": str(place)}).stdout
    for piece in (
        "12 messages acknowledged in ",
        "ends in half a line",
        "All 12 acknowledged messages are there, word for word.",
        "set aside",
        "error: tool call was interrupted",
        "sourdough",
        "Forked at entry 4",
        "9 messages visible before, 4 after",
        "totals.html",
    ):
        assert piece in shown, piece
    took = re.search(r"That took ([\d.]+) seconds", shown)
    assert took is not None
    assert str(place / "carrel-demo-") in shown
    assert list(place.iterdir()) == []
    assert not home.exists(), "the tour does not touch your own sessions"


def test_keep_leaves_the_sessions_and_the_page(carrel: Any, tmp_path: Path) -> None:
    shown = carrel("demo", "--keep", "tour").stdout
    page = tmp_path / "tour" / "totals.html"
    assert str(page) in shown
    assert "set aside by a rewind" in page.read_text("utf-8")
    metas = json.loads(carrel("sessions", "list", "--data", tmp_path / "tour" / "sessions", "--json").stdout)
    assert {meta["id"] for meta in metas} == {STORY_ID, *OTHERS, "demo-fork"}
    carrel("demo", "--keep", "tour", code=2)


def test_the_tour_fits_a_terminal(at_terminal: Any) -> None:
    columns = 80
    terminal = at_terminal("demo", columns=columns)
    assert terminal.end() == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.shown).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    assert len(lines) < 95


def test_ctrl_c_leaves_nothing_behind(environment: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "carrel", "demo"],
        env=environment | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert "A tour" in process.stdout.readline()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()
    assert list(tmp_path.iterdir()) == []


def test_the_tour_does_not_hang_on_the_clock(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "weather", "x = 1\n")
    with zipfile.ZipFile(wheel) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_a_full_disk_ends_the_tour_in_a_line_each(environment: dict[str, str], tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    command = f'mount -t tmpfs -o size=16k tmpfs {full} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "sh", sys.executable, "-m", "carrel", "demo"],
        env=environment | {"TMPDIR": str(full)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (1, 3)
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr
