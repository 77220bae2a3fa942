"""`carrel demo`: every step works, and nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from carrel.cli.demo import CONVERSATIONS, WRITER


def test_the_writing_process_is_killed_in_the_middle_of_a_line(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WRITER, str(tmp_path), json.dumps(CONVERSATIONS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.splitlines()) == sum(map(len, CONVERSATIONS.values()))
    complete, _, half = (tmp_path / "totals" / "messages.jsonl").read_bytes().rpartition(b"\n")
    assert complete.count(b"\n") == len(CONVERSATIONS["totals"]) - 1
    assert half.startswith(b'{"role": "user", "content": [{"type": "tool_result"')


def test_the_tour_shows_every_step_and_removes_its_files(carrel: Any, tmp_path: Path, home: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    printed = carrel("demo", env={"TMPDIR": str(temporary)}).stdout
    for piece in (
        "['OSLO', 'PORTO']",
        "'sunny in Oslo'",
        "variables: restored",
        "steps: ",
        "All 6 acknowledged messages are there",
        "error: tool call was interrupted",
        "sourdough",
        "2 messages are visible; the log keeps all 6 entries",
        "totals.html",
        "solved",
    ):
        assert piece in printed, piece
    assert re.search(r"That took [\d.]+ seconds", printed)
    assert str(temporary / "carrel-demo-") in printed
    assert list(temporary.iterdir()) == []
    assert not (home / "sessions").exists(), "the tour does not touch the user's own sessions"


def test_output_keeps_all_files_in_a_base_folder(carrel: Any, tmp_path: Path) -> None:
    carrel("demo", "--output", "tour")
    assert "set aside by a rewind" in (tmp_path / "tour" / "totals.html").read_text("utf-8")
    metas = json.loads(carrel("sessions", "list", "--base", "tour", "--json").stdout)
    assert {meta["id"] for meta in metas} == set(CONVERSATIONS)
    assert "exists" in carrel("demo", "--output", "tour", code=2).stderr


def test_the_tour_fits_a_terminal(at_terminal: Any) -> None:
    terminal = at_terminal("demo", columns=80)
    assert terminal.end() == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.shown).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert len(lines) < 60


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


def test_a_full_disk_ends_the_tour_with_one_line(environment: dict[str, str], tmp_path: Path) -> None:
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
