"""Errors are one line without a traceback, with the exit code that fits; Ctrl-C and closed pipes are no errors."""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from carrel import SessionStore, user_text_message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nonsense", "No such command"),
        ("sessions nonsense", "No such command"),
        ("sessions list --nonsense", "No such option"),
        ("sessions list --limit many", "--limit"),
        ("sessions list --limit -1", "--limit"),
        ("sessions show missing", "missing"),
        ("sessions show ../etc", "etc"),
        ("sessions tail missing", "missing"),
        ("sessions tail stars --from-seq 0", "--from-seq"),
        ("sessions fork stars --at 99", "99"),
        ("sessions fork stars --at -1", "-1"),
        ("sessions rewind stars", "--to"),
        ("sessions rewind stars --to 1 --to-seq 1", "--to"),
        ("sessions rewind stars --to 99", "99"),
        ("sessions rewind stars --to x", "--to"),
        ("sessions rewind stars --to-seq 99", "99"),
        ("sessions label stars", "TEXT"),
        ("sessions label stars here --at 99", "99"),
        ("sessions delete missing --yes", "missing"),
        ("sessions delete", "ID"),
        ("sessions export stars --format docx", "docx"),
        ("sessions export stars --output nowhere/x.html", "no folder"),
        ("sessions export stars --json", "--output"),
        ("sessions import nowhere.jsonl", "nowhere.jsonl"),
        ("sessions prune", "--older-than"),
        ("sessions prune --older-than soon", "not an age"),
        ("sessions prune --older-than 99999999999999w", "not an age"),
        ("sessions usage stars --prices nowhere.json", "nowhere.json"),
        ("sessions search", "WORDS"),
        ("sessions search stars --limit 0", "--limit"),
        ("demo --output home", "exists"),
        ("tools list --base nowhere", "there is no folder nowhere"),
        ("sessions list --base nowhere", "there is no folder nowhere"),
        ("web --base nowhere", "there is no folder nowhere"),
        ("datasets list --datasets nowhere", "there is no folder nowhere"),
        ("serve --datasets nowhere", "there is no folder nowhere"),
    ],
)
def test_wrong_usage_is_named(carrel: Any, stars: str, words: str, message: str) -> None:
    assert message in carrel(*words.split(), code=2).stderr


@pytest.mark.parametrize(
    "table",
    [
        "{",
        "[]",
        '{"m": 3}',
        '{"m": {"input": "3"}}',
        '{"m": {"input": -1}}',
        '{"m": {"in": 1}}',
        '{"m": {"input": NaN}}',
    ],
)
def test_an_invalid_price_table_is_named(carrel: Any, stars: str, tmp_path: Path, table: str) -> None:
    (tmp_path / "p.json").write_text(table)
    assert "p.json" in carrel("sessions", "usage", stars, "--prices", "p.json", code=2).stderr


def test_an_ambiguous_id_is_wrong_usage(carrel: Any, keep: Any) -> None:
    async def write(store: SessionStore) -> None:
        for name in ("abc-1", "abc-2"):
            await store.create_session(name, session_id=name, model="m")

    keep(write)
    assert "abc-1" in carrel("sessions", "show", "abc", code=2).stderr
    assert carrel("sessions", "show", "abc-2").stdout.startswith("abc-2\n")


def test_last_without_any_session(carrel: Any) -> None:
    assert "no sessions" in carrel("sessions", "show", "last", code=2).stderr


def test_a_base_that_is_a_file_is_wrong_usage(carrel: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in carrel("sessions", "list", "--base", "file", code=2).stderr


def test_a_session_of_a_newer_carrel_is_not_changed(carrel: Any, home: Path, stars: str) -> None:
    path = home / "sessions" / stars / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"message_format_version": 99}))
    before = path.read_bytes()
    assert "format 99" in carrel("sessions", "show", stars, code=3).stderr
    assert path.read_bytes() == before


def test_a_full_disk_leaves_no_half_written_file(carrel: Any, keep: Any, tmp_path: Path) -> None:
    async def write(store: SessionStore) -> None:
        await store.append_message("big", user_text_message("x" * 200_000), model="m")

    keep(write)

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    assert "error: " in carrel("sessions", "export", "big", "-o", "big.md", code=3, preexec_fn=limit_file_size).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_missing_permission_is_named(carrel: Any, home: Path, stars: str) -> None:
    # Root may read everything, unless it gives up its capabilities.
    unprivileged = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
    log = home / "sessions" / stars / "messages.jsonl"
    log.chmod(0o000)
    assert "ermission" in carrel("sessions", "show", stars, code=3, through=unprivileged).stderr


def test_an_output_that_cannot_be_written_is_named(carrel: Any, stars: str) -> None:
    assert "error: " in carrel("sessions", "export", stars, "-o", "/proc/nothing.html", code=3).stderr


def test_ctrl_c_at_a_question_changes_nothing(at_terminal: Any, home: Path, stars: str) -> None:
    terminal = at_terminal("sessions", "delete", stars)
    terminal.wait_for("[y/N] ")
    terminal.press("\x03")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.shown
    assert (home / "sessions" / stars).exists()


def test_ctrl_c_is_the_normal_end_of_tail(at_terminal: Any, stars: str) -> None:
    terminal = at_terminal("sessions", "tail", stars)
    terminal.wait_for("And planets?")
    terminal.press("\x03")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.shown


def test_a_closed_standard_output_is_no_error(environment: dict[str, str], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "carrel", "sessions", "list"]
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *words],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", ["--help", "--version", "datasets list", "doctor --json", "sessions"])
def test_a_closed_pipe_is_no_error(environment: dict[str, str], tmp_path: Path, words: str) -> None:
    # The reader ends before anything is written.
    command = f"set -o pipefail; (sleep 0.5; {shlex.quote(sys.executable)} -m carrel {words}; echo $? >code) | true"
    done = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ((tmp_path / "code").read_text(), done.stderr) == ("0\n", "")


@pytest.mark.parametrize(
    "words",
    [["run", "print('\udce9')"], ["run", "-"], ["workflows", "add", "x", "-"], ["store", "list", "redis://\udce9"]],
)
def test_input_that_is_not_text_is_wrong_usage(carrel: Any, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "latin").write_bytes(b"print('\xe9')\n")
    with (tmp_path / "latin").open("rb") as stdin:
        assert "not text in UTF-8" in carrel(*words, code=2, stdin=stdin).stderr


def test_python_is_read_in_its_declared_encoding(carrel: Any, tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint('caf\xe9')\n")
    (tmp_path / "mark.py").write_bytes(b"\xef\xbb\xbfprint('caf\xc3\xa9')\r\n")
    for file in ("latin.py", "mark.py"):
        assert carrel("run", file, "--sandbox", "off").stdout == "café\n"
    with (tmp_path / "mark.py").open("rb") as stdin:
        assert carrel("run", "-", env={"PYTHONUTF8": "0", "LC_ALL": "C"}, stdin=stdin).stdout == "caf\\xe9\n"


def test_a_lack_of_threads_is_exit_code_3(carrel: Any, stars: str) -> None:
    # With a stack larger than the memory limit no thread starts, also for root, to whom `ulimit -u` does not apply.
    none = ["sh", "-c", 'ulimit -s 1000000000 && ulimit -v 8000000 && exec "$@"', "sh"]
    assert "ulimit -u" in carrel("sessions", "list", code=3, through=none).stderr


@pytest.mark.parametrize("after", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4])
def test_ctrl_c_while_loading_is_silent(environment: dict[str, str], tmp_path: Path, after: float) -> None:
    # The audit hook reports that loading has begun; the signal comes at different moments after that.
    script = (
        "import sys\n"
        "sys.argv = ['carrel', 'sessions', 'list']\n"
        "def hook(event, given):\n"
        "    if event == 'import' and given[0] == 'typer': print('on', flush=True)\n"
        "sys.addaudithook(hook)\n"
        "from carrel.__main__ import main\n"
        "sys.exit(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode in (-signal.SIGINT, 130, 0), errors) == (True, "")
