"""`carrel task`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Carrel, at_terminal, carrel, environment, home  # noqa: F401 -- fixtures

# ruff: noqa: F811 -- a fixture's name is also that of the argument
FIX = "sed -i 's/a - b/a + b/' calc.py"
TEST = (
    "import unittest\n\nfrom calc import add\n\n\nclass Calc(unittest.TestCase):\n"
    "    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n"
)
PATCH = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"


@pytest.fixture
def sums(home: Path) -> Path:
    """A dataset of two samples, one of which cannot be solved by `FIX`."""
    folder = home / "datasets" / "sums"
    for number, body in ((1, "a - b"), (2, "a * b")):
        files = folder / "files" / f"calc-{number}"
        (files / "tests").mkdir(parents=True)
        (files / "calc.py").write_text(f"def add(a, b):\n    return {body}\n")
        (files / "tests" / "__init__.py").write_text("")
        (files / "tests" / "test_calc.py").write_text(TEST)
    (folder / "dataset.yaml").write_text('verify: {command: "python -m unittest -v", timeout: 60}\n')
    with (folder / "samples.jsonl").open("w") as file:
        for number, patch in ((1, PATCH), (2, "")):
            sample = {"sample_id": f"calc-{number}", "files": f"files/calc-{number}", "patch": patch}
            file.write(json.dumps({**sample, "fail_to_pass": ["tests.test_calc.Calc.test_add"]}) + "\n")
    return folder


def test_an_agent_on_a_dataset(carrel: Carrel, sums: Path, home: Path) -> None:
    shown = carrel("task", "run", "sums", "--agent", FIX, "--workers", "1").stdout
    assert "calc-1                   solved" in shown
    assert "calc-2                   nothing changed" in shown
    assert "not solved         1\nIn 1 of them the agent changed nothing.\n" in shown
    assert "pass@1  50.0% solved, 95 % between 9.5% and 90.5%\n1 of 2 attempts solved" in shown
    (folder,) = (home / "runs").iterdir()
    assert folder.name.startswith("sums-2")
    assert f"Run: {folder}" in shown
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [(line["sample_id"], line["outcome"]) for line in lines] == [("calc-1", "solved"), ("calc-2", "not_solved")]
    # What each session did is recorded under its id.
    assert "sed -i" in (home / "sessions" / lines[0]["session_id"] / "trace.jsonl").read_text()
    again = carrel("task", "run", "sums", "--agent", FIX, "--resume", "--json")
    assert json.loads(again.stdout)["done_now"] == 0
    assert json.loads(again.stdout)["summary"]["solved"] == 1


def test_runs_are_shown_and_compared(carrel: Carrel, sums: Path, home: Path) -> None:
    assert carrel("task", "show").stdout == "No runs yet; carrel task run makes one.\n"
    carrel("task", "run", "sums", "--agent", "true", "--output", str(home / "runs" / "nothing"), "--attempts", "2")
    carrel("task", "run", "sums", "calc-1", "--agent", f"{FIX}; echo 77 > $CARREL_TOKENS_FILE", "-o", "mine")
    shown = carrel("task", "show").stdout
    assert "nothing        2  2    0.0%  true\n" in shown
    shown = carrel("task", "show", "nothing").stdout
    assert "calc-1  2  nothing changed" in shown
    assert "pass@1  0.0% solved" in shown
    assert "pass@2  0.0% solved" in shown
    shown = carrel("task", "show", "./mine").stdout
    assert "77" in shown.splitlines()[2]
    lines = carrel("task", "compare", "nothing", "./mine").stdout.splitlines()
    assert lines[0].startswith("nothing  0.0% solved")
    assert lines[1].startswith("mine     100.0% solved")
    assert lines[2:] == ["+ calc-1", "1 samples in both: 1 better, 0 worse, 0 the same; p = 1.000 (sign test)"]
    assert json.loads(carrel("task", "compare", "nothing", "./mine", "--json").stdout)["better"] == ["calc-1"]
    assert "there is no run 'x' in" in carrel("task", "show", "x", code=2).stderr


def test_a_missing_agent_is_no_wrong_answer(carrel: Carrel, sums: Path) -> None:
    done = carrel("task", "run", "sums", "--agent", "./nope.sh", "--output", "a", code=1)
    assert "calc-1                   agent not run" in done.stdout
    assert "the agent's command ended with 127: " in done.stdout
    assert "In 2 of them the agent could not be run." in done.stdout
    assert done.stderr.startswith("error: the agent could not be run in 2 of 2 attempts: its command ended with 126 or")
    done = carrel("task", "run", "sums", "--agent", "true", "--output", "b")
    assert "calc-1                   nothing changed" in done.stdout
    assert "In 2 of them the agent changed nothing." in done.stdout


def test_a_person_sees_the_progress_and_how_to_resume(carrel: Carrel, sums: Path, at_terminal: Any) -> None:
    agent = f"{FIX}; test $CARREL_SAMPLE_ID = calc-1 || sleep 600"
    terminal = at_terminal("task", "run", "sums", "--agent", agent, "--workers", "1", "-o", "r", columns=100)
    terminal.wait_for("calc-1  ")
    terminal.wait_for("1/2")
    terminal.press("\x03")
    terminal.wait_for("--resume continues from there")
    assert terminal.end() == 130
    words = ("task", "run", "sums", "calc-1", "--agent", agent, "--resume", "--output", "r")
    assert "1 were done before" in carrel(*words).stdout


def test_chosen_samples_and_another_folder(carrel: Carrel, sums: Path, tmp_path: Path) -> None:
    carrel("task", "run", sums, "calc-1", "--agent", FIX, "--output", "r")
    line = json.loads((tmp_path / "r" / "results.jsonl").read_text())
    assert (line["verdict"]["outcome"], line["verdict"]["stderr"].count("ok")) == ("solved", 1)
    carrel("task", "verify", sums, "calc-1", "--gold", "--logs", "logs")
    assert (tmp_path / "logs" / "stderr-1.txt").read_text().count("ok") == 1


def test_a_patch_is_judged(carrel: Carrel, sums: Path, tmp_path: Path) -> None:
    (tmp_path / "fix.patch").write_text(PATCH)
    assert carrel("task", "verify", "sums", "calc-1", "--patch", "fix.patch").stdout.startswith("solved, score 1.00\n")
    assert carrel("task", "verify", "sums", "calc-1", "--gold").stdout.startswith("solved")
    failed = carrel("task", "verify", "sums", "calc-2", "--patch", "/dev/null", code=1)
    assert "  failed  tests.test_calc.Calc::test_add" in failed.stdout
    assert failed.stderr == "error: calc-2: not solved, score 0.00\n"
    lost = carrel("task", "verify", "sums", "calc-2", "--patch", "fix.patch", "--json", code=3)
    assert json.loads(lost.stdout)["outcome"] == "infrastructure_failed"
    assert "the patch does not apply" in lost.stderr


def test_a_score_of_almost_one_is_not_shown_as_one(carrel: Carrel, home: Path) -> None:
    folder = home / "datasets" / "many"
    folder.mkdir(parents=True)
    report = "seq 999 | sed 's/.*/ok & - t&/'; echo 'not ok 1000 - t1000'; echo 1..1000"
    (folder / "dataset.yaml").write_text(json.dumps({"verify": {"command": report, "report": "tap"}}))
    names = [f"t{number}" for number in range(1, 1001)]
    (folder / "samples.jsonl").write_text(json.dumps({"sample_id": "m", "fail_to_pass": names}) + "\n")
    done = carrel("task", "verify", "many", "m", "--patch", "/dev/null", code=1)
    assert done.stdout.startswith("partly, score 0.99\n")


def test_a_folder_is_judged(carrel: Carrel, sums: Path, tmp_path: Path) -> None:
    (tmp_path / "work" / "tests").mkdir(parents=True)
    (tmp_path / "work" / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "work" / "tests" / "test_calc.py").write_text("raise SystemExit\n")
    shown = carrel("task", "verify", "sums", "calc-1", "--folder", "work").stdout
    assert shown.startswith("solved")
    assert "not judged: tests/test_calc.py (a test)" in shown


def test_what_is_typed_wrong_is_one_line(carrel: Carrel, sums: Path) -> None:
    assert "--agent is missing" in carrel("task", "run", "sums", code=2).stderr
    assert "there is no dataset 'sum'" in carrel("task", "run", "sum", "--agent", "true", code=2).stderr
    assert "has no sample 'calc-9'" in carrel("task", "run", "sums", "calc-9", "--agent", "true", code=2).stderr
    assert "one of --patch FILE" in carrel("task", "verify", "sums", "calc-1", code=2).stderr
    assert (
        "the variable is not set here"
        in carrel("task", "run", "sums", "--agent", "x", "--env", "NO_SUCH", code=2).stderr
    )
    assert "there is no /no/such" in carrel("task", "run", "sums", "--agent", "x", "--mount", "/no/such", code=2).stderr
    assert "no.patch: No such file" in carrel("task", "verify", "sums", "calc-1", "--patch", "no.patch", code=2).stderr


def test_suspicious_solutions_are_counted_apart(carrel: Carrel, sums: Path, tmp_path: Path) -> None:
    agent = f"{FIX}; echo 'import ctypes' >> calc.py"
    words = ("task", "run", "sums", "calc-1", "--agent", agent, "--output", str(tmp_path / "out"))
    shown = carrel(*words).stdout
    assert "solved, suspicious" in shown, shown
    assert "1 of the solved are suspicious" in shown
    assert "calc.py now imports ctypes" in shown
    assert json.loads(carrel(*words, "--resume", "--json").stdout)["summary"]["suspicious"] == 1
