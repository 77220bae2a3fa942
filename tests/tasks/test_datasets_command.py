"""`carrel datasets`, typed for real."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carrel.tasks.dataset import DEMO
from tests.cli.conftest import at_terminal, carrel, environment, home  # noqa: F401 -- fixtures

# ruff: noqa: F811 -- a fixture's name is also that of the argument
Carrel = Callable[..., "subprocess.CompletedProcess[str]"]


def broken_demo(home: Path) -> Path:
    """A copy of the demo with two samples, one of which cannot be solved by its patch."""
    folder = home / "datasets" / "mine"
    folder.mkdir(parents=True)
    shutil.copytree(DEMO / "files", folder / "files")
    shutil.copy(DEMO / "dataset.yaml", folder)
    samples = [json.loads(line) for line in (DEMO / "samples.jsonl").read_text().splitlines()][:2]
    samples[1]["fail_to_pass"].append("tests.test_slug.Slug.test_of_dreams")
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def test_the_list(carrel: Carrel, home: Path) -> None:
    assert "demo        6  Small repairs" in carrel("datasets", "list").stdout
    broken_demo(home)
    (home / "datasets" / "bad").mkdir()
    (home / "datasets" / "bad" / "samples.jsonl").write_text("{}\n")
    done = carrel("datasets", "list", "--json")
    assert [(info["name"], info["sample_count"]) for info in json.loads(done.stdout)] == [("demo", 6), ("mine", 2)]
    assert done.stderr.startswith("note: the dataset bad cannot be read: ")
    (home / "none").mkdir()
    assert carrel("datasets", "list", "--datasets", home / "none").stdout.startswith("No datasets in ")


def test_a_check_that_finds_nothing_wrong(carrel: Carrel) -> None:
    done = carrel("datasets", "check", "demo", "calc-1", "tally-1")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:4] for line in lines[1:]] == [
        ["calc-1", "right", "not_solved", "solved"],
        ["tally-1", "right", "not_solved", "solved"],
    ]


def test_a_check_that_finds_something_wrong(carrel: Carrel, home: Path) -> None:
    folder = broken_demo(home)
    done = carrel("datasets", "check", "mine", code=1)
    assert "slug-1: in fail_to_pass, and is not run with the patch: tests.test_slug.Slug.test_of_dreams" in done.stdout
    assert done.stderr == "error: 1 of 2 samples of mine are wrong: slug-1\n"
    findings = json.loads(carrel("datasets", "check", folder, "--json", "--workers", 1, code=1).stdout)
    assert [(finding["sample_id"], finding["status"]) for finding in findings] == [
        ("calc-1", "right"),
        ("slug-1", "wrong"),
    ]


def test_what_this_machine_lacks(carrel: Carrel, home: Path) -> None:
    folder = broken_demo(home)
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    sample["environment"] = {"programs": ["no-such-program"]}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    done = carrel("datasets", "check", "mine", code=3)
    assert "calc-1: this machine has no no-such-program" in done.stdout


def test_what_is_not_there(carrel: Carrel, home: Path) -> None:
    assert "there is no dataset 'demi'" in carrel("datasets", "check", "demi", code=2).stderr
    assert "no sample 'calc-2'; did you mean calc-1" in carrel("datasets", "check", "demo", "calc-2", code=2).stderr
    (home / "datasets" / "bad").mkdir(parents=True)
    (home / "datasets" / "bad" / "samples.jsonl").write_text('{"sample_id": "a"}\n{"sample_id": 7}\n')
    assert "samples.jsonl, line 2: sample_id" in carrel("datasets", "check", "bad", code=2).stderr


def test_a_bar_at_a_terminal(at_terminal: Any) -> None:
    terminal = at_terminal("datasets", "check", "demo", "calc-1", columns=100)
    terminal.wait_for("checking demo")
    assert terminal.end() == 0
    assert "right" in terminal.shown


def commit(repo: Path, message: str, **files: str) -> None:
    for name, text in files.items():
        (repo / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
        (repo / name.replace("__", "/")).write_text(text)
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    subprocess.run(["git", "-C", repo, "add", "-A"], check=True)
    subprocess.run(["git", "-C", repo, *identity, "commit", "-qm", message], check=True)


def grown(repo: Path) -> Path:
    subprocess.run(["git", "init", "-q", "-b", "main", repo], check=True)
    test = (
        "set -e\n. ./hello\n[ \"$(hello {0})\" = \"hello {0}\" ] && echo 'ok 1 - greets' || echo 'not ok 1 - greets'\n"
    )
    commit(repo, "Begin", hello="hello() { echo hi; }\n", tests__run="echo 'ok 1 - nothing'\necho 1..1\n")
    commit(repo, "Greet by name", hello='hello() { echo "hello $1"; }\n', tests__run=test.format("you") + "echo 1..1\n")
    commit(repo, "Words", NOTES="words\n")
    return repo


def test_history_becomes_a_dataset(carrel: Carrel, home: Path, tmp_path: Path) -> None:
    repo = grown(tmp_path / "hello")
    words = ["--repo", repo, "--commits", "main~2..main", "--test-command", "sh tests/run", "--report", "tap"]
    done = carrel("datasets", "import", "--name", "hello", *words)
    assert done.stdout.splitlines()[-1] == f"1 sample in {home}/datasets/hello"
    lines = [line.split(None, 2) for line in done.stdout.splitlines()]
    assert done.stdout.startswith("1 commit changes both source and tests\n1/1  ")
    assert lines[2:4] == [["SKIPPED", "REASON"], [lines[3][0], "it", "touches no tests"]]
    assert "right" in carrel("datasets", "check", "hello").stdout
    assert "exists already" in carrel("datasets", "import", "--name", "hello", *words, code=2).stderr


def test_an_import_without_samples_shows_what_it_left_out(carrel: Carrel, tmp_path: Path) -> None:
    repo = grown(tmp_path / "hello")
    commit(repo, "More words", NOTES="more words\n")
    failed = carrel("datasets", "import", "--name", "x", "--repo", repo, "--commits", "main~2..main", code=2)
    assert [line.split(None, 1) for line in failed.stdout.splitlines()] == [
        ["SKIPPED", "REASON"],
        ["2", "it touches no tests"],
    ]
    assert "touches both source and tests" in failed.stderr


def test_a_person_sees_how_far_an_import_is_and_how_to_go_on(at_terminal: Any, tmp_path: Path) -> None:
    repo = grown(tmp_path / "hello")
    commit(repo, "Wait", hello="hello() { echo hey; }\n", tests__run="test -e go || sleep 600\necho 'ok 1 - waits'\n")
    words = ["--repo", repo, "--commits", "main~3..main", "--test-command", "sh tests/run", "--report", "tap"]
    words = ["datasets", "import", "--name", "hello", *words, "--workers", "1"]
    terminal = at_terminal(*words, columns=100)
    terminal.wait_for("1 fail to pass, 0 pass")
    terminal.wait_for("1/2")
    terminal.press("\x03")
    terminal.wait_for("stopped; 1 of 2 commits are verified, --resume continues there")
    assert terminal.end() == 130


def test_swebench_lines_become_a_dataset(carrel: Carrel, home: Path, tmp_path: Path) -> None:
    (tmp_path / "files" / "a-1").mkdir(parents=True)
    row = {"instance_id": "a-1", "repo": "a/b", "patch": "p", "FAIL_TO_PASS": '["t"]'}
    (tmp_path / "swe.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"instance_id": "a-2"}) + "\n")
    done = carrel("datasets", "import", "swe.jsonl", "--files", "files", "--name", "swe", "--json")
    answer = json.loads(done.stdout)
    assert answer["samples"] == ["a-1"]
    assert [left["what"] for left in answer["left_out"]] == ["line 2"]
    settings = (home / "datasets" / "swe" / "dataset.yaml").read_text()
    assert "python -m pytest -q --junitxml={report}" in settings
    assert "- pytest" in settings
    more = ["--dep", "idna", "--setup", "true"]
    carrel("datasets", "import", "swe.jsonl", "--files", "files", "--name", "more", *more)
    settings = (home / "datasets" / "more" / "dataset.yaml").read_text()
    assert "deps:\n  - idna\n  - pytest\n" in settings
    assert "setup_network: true" in settings


def test_an_import_that_was_typed_wrong(carrel: Carrel, tmp_path: Path) -> None:
    assert "--name is missing" in carrel("datasets", "import", "x.jsonl", code=2).stderr
    assert "give FILE and --files" in carrel("datasets", "import", "--name", "x", code=2).stderr
    assert "give FILE and --files" in carrel("datasets", "import", "a", "--repo", "b", "--name", "x", code=2).stderr
    assert "there is no file" in carrel("datasets", "import", "a", "--files", ".", "--name", "x", code=2).stderr
    wrong = ["--test-command", "true", "--report", "vibes"]
    repo = ["--repo", grown(tmp_path / "repo"), "--commits", "main~2..main"]
    assert "verify.report" in carrel("datasets", "import", "--name", "x", *repo, *wrong, code=2).stderr
