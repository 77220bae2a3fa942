"""Datasets made from SWE-bench files and from a repository's history, with real git and real test runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import DatasetExists, DatasetInvalid
from carrel.tasks.dataset import Dataset
from carrel.tasks.dataset_check import check
from carrel.tasks.importers.git_commits import import_history
from carrel.tasks.importers.layout import CommitFiles, split
from carrel.tasks.importers.swebench import import_swebench, sample_of
from tests.support.git_repository import Repository

UNITTEST = {"verify": {"command": "python -m unittest -v", "report": "unittest", "timeout": 60}}
TEST = "import unittest\nfrom calc import {names}\n\nclass Calc(unittest.TestCase):\n{tests}"
ADD = "    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n"
TWICE = "    def test_twice(self):\n        self.assertEqual(twice(4), 8)\n"
NEGATIVE = "    def test_negative(self):\n        self.assertEqual(twice(-1), -2)\n"


@pytest.fixture
def history(tmp_path: Path) -> Repository:
    """A small project that grew: two commits are tasks, the others are not."""
    made = Repository(tmp_path / "calc repo")
    add = "def add(a, b):\n    return a + b\n"
    made.commit(
        "Begin",
        {"calc.py": add, "tests/__init__.py": "", "tests/test_calc.py": TEST.format(names="add", tests=ADD)},
    )
    made.git("tag", "v1")
    both = TEST.format(names="add, twice", tests=ADD + "\n" + TWICE)
    made.base = made.commit(
        "Add twice\n\nIt doubles a number.\n\nSigned-off-by: Ada <ada@example.org>",
        {
            "calc.py": add + "\ndef twice(a):\n    return abs(a) * 2\n",
            "tests/test_calc.py": both,
            "README.md": "# calc\n",
        },
    )
    made.commit("Only words", {"README.md": "# calc\n\nIt calculates.\n"})
    made.commit("Only tests", {"tests/test_calc.py": both + "\n"})
    made.commit(
        "Nothing new is tested", {"calc.py": add + "\ndef twice(a):\n    return a * 2 if a else 0\n", "tests/x": "y"}
    )
    made.commit("Broken again", {"calc.py": add + "\ndef twice(a):\n    return abs(a) * 2\n"})
    made.future = made.commit(
        "Twice of a negative number",
        {"calc.py": add + "\ndef twice(a):\n    return a * 2\n", "tests/test_calc.py": both + "\n" + NEGATIVE},
    )
    return made


async def test_history_becomes_samples_that_are_right(history: Repository, tmp_path: Path) -> None:
    heard: list[tuple[str, str]] = []
    into, cache = tmp_path / "datasets" / "calc", tmp_path / "cache"
    done = await import_history(
        history.folder, "v1..trunk", into, UNITTEST, cache=cache, on_commit=lambda *words: heard.append(words)
    )
    assert done.samples == [f"calc-repo-{history.base[:10]}", f"calc-repo-{history.future[:10]}"]
    assert sorted(left.why for left in done.left_out) == [
        "it touches no source",
        "it touches no tests",
        "it touches no tests",
        "no test fails without its source and passes with it",
    ]
    assert len(heard) == 3
    dataset = Dataset.load(into)
    first, second = dataset.samples
    assert first.problem_statement == "Add twice\n\nIt doubles a number.\n"
    assert first.base_commit == history.git("rev-parse", "v1")
    assert "calc.py" in first.patch
    assert "tests/" not in first.patch
    assert "tests/test_calc.py" in first.test_patch
    assert "README.md" in first.non_code_patch
    assert first.created_at is not None
    # Before it, the tests cannot even be imported: the other test fails too.
    assert first.fail_to_pass == ["tests.test_calc.Calc::test_add", "tests.test_calc.Calc::test_twice"]
    assert second.fail_to_pass == ["tests.test_calc.Calc::test_negative"]
    assert second.pass_to_pass == ["tests.test_calc.Calc::test_add", "tests.test_calc.Calc::test_twice"]
    assert first.verify.command == "python -m unittest -v"
    findings = await check(dataset.samples, cache=cache)
    assert [(finding.status, finding.faults) for finding in findings] == [("right", []), ("right", [])]
    assert [path.name for path in into.parent.iterdir()] == ["calc"]


async def test_the_newest_of_many_can_be_had(history: Repository, tmp_path: Path) -> None:
    done = await import_history(history.folder, "v1..trunk", tmp_path / "one", UNITTEST, limit=1, cache=tmp_path / "c")
    assert done.samples == [f"calc-repo-{history.future[:10]}"]


@pytest.mark.parametrize(
    ("commits", "complaint"),
    [
        ("trunk", "is not a range of commits, like"),
        ("--all..x", "is not a range of commits"),
        ("v1..nowhere", "is not a range of commits here"),
        ("trunk..trunk", "no commit in trunk..trunk of .* touches both source and tests"),
    ],
)
async def test_a_range_without_samples_is_an_error(
    commits: str, complaint: str, history: Repository, tmp_path: Path
) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        await import_history(history.folder, commits, tmp_path / "d", UNITTEST, cache=tmp_path / "cache")
    assert not (tmp_path / "d").exists()


async def test_a_command_that_tests_nothing_makes_no_dataset(history: Repository, tmp_path: Path) -> None:
    settings = {"verify": {"command": "no-such-runner", "report": "unittest"}}
    with pytest.raises(DatasetInvalid, match=r"none of 3 commits became a sample; .*its tests do not run"):
        await import_history(history.folder, "v1..trunk", tmp_path / "d", settings, cache=tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("calc repo", "cache")] == []


async def test_a_folder_that_is_not_a_repository_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match="there is no folder"):
        await import_history(tmp_path / "x", "a..b", tmp_path / "d", UNITTEST)
    (tmp_path / "plain").mkdir()
    with pytest.raises(DatasetInvalid, match="is not a git repository"):
        await import_history(tmp_path / "plain", "a..b", tmp_path / "d", UNITTEST)


def test_files_of_a_commit_are_classified() -> None:
    paths = ["src/a.py", "tests/test_a.py", "a_test.go", "docs/x.py", "README.md", "conftest.py", "requirements.txt"]
    assert split([*paths, "checks/one.py"], ["checks/*"]) == CommitFiles(
        source=("src/a.py", "requirements.txt"),
        tests=("tests/test_a.py", "a_test.go", "conftest.py", "checks/one.py"),
        no_code=("docs/x.py", "README.md"),
    )


# --- SWE-bench --------------------------------------------------------------------------------------------------------

ROW: dict[str, Any] = {
    "instance_id": "ada__calc-7",
    "repo": "ada/calc",
    "base_commit": "",
    "patch": "p",
    "test_patch": "t",
    "problem_statement": "Twice is wrong.",
    "hints_text": "",
    "created_at": "2023-11-14T22:13:20Z",
    "version": "3.0",
    "FAIL_TO_PASS": '["tests/test_calc.py::Calc::test_negative"]',
    "PASS_TO_PASS": ["tests/test_calc.py::Calc::test_add"],
    "environment_setup_commit": "abc",
}


def test_a_line_of_swebench_as_a_sample() -> None:
    sample = sample_of(ROW)
    assert (sample.sample_id, sample.instance_id, sample.repo) == ("ada__calc-7", "ada__calc-7", "ada/calc")
    assert sample.fail_to_pass == ["tests/test_calc.py::Calc::test_negative"]
    assert sample.pass_to_pass == ["tests/test_calc.py::Calc::test_add"]
    assert (sample.version, sample.version_description) == (1, "version 3.0 of ada/calc")
    assert (sample.language, sample.environment_setup_commit) == ("python", "abc")


def test_names_of_unittest_are_those_that_reports_have() -> None:
    names = ["test_a (pkg.test_x.X)", "test_a (pkg.test_x.X.test_a)", "tests/test_x.py::test_a[1 (2)]", "It has words"]
    sample = sample_of(ROW | {"FAIL_TO_PASS": names})
    assert sample.fail_to_pass == ["pkg.test_x.X.test_a", "pkg.test_x.X.test_a", *names[2:]]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"instance_id": None}, "instance_id: it is missing"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: it is empty"),
        ({"FAIL_TO_PASS": "not json"}, "FAIL_TO_PASS: neither a list of names nor the JSON of one"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS: not a list of names"),
        ({"patch": 3}, "patch"),
        ({"created_at": "yesterday"}, "created_at"),
    ],
)
def test_a_row_that_is_not_a_sample_is_reported(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        sample_of(ROW | change)


async def test_swebench_lines_with_a_bundle_each_or_together(history: Repository, tmp_path: Path) -> None:
    base = history.git("rev-parse", f"{history.future}^")
    patch = history.git("diff", base, history.future, "--", "calc.py") + "\n"
    test_patch = history.git("diff", base, history.future, "--", "tests") + "\n"
    rows = [
        ROW | {"base_commit": base, "patch": patch, "test_patch": test_patch},
        "no json",
        ROW | {"instance_id": "ada__calc-8", "FAIL_TO_PASS": "[]"},
        ROW | {"instance_id": "bob__other-1", "repo": "bob/other"},
        ROW | {"base_commit": base},
        [1],
        ROW | {"instance_id": "ada__calc-9", "base_commit": base, "patch": patch, "test_patch": test_patch},
    ]
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    history.git("bundle", "create", "-q", str(bundles / "ada__calc.bundle"), "--all")
    file = tmp_path / "swe.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    into = tmp_path / "datasets" / "swe"
    done = import_swebench(file, bundles, into, {"description": "From elsewhere", **UNITTEST})
    assert done.samples == ["ada__calc-7", "ada__calc-9"]
    assert [(left.what, left.why.partition(":")[0]) for left in done.left_out] == [
        ("line 2", "not JSON"),
        ("line 3", "FAIL_TO_PASS"),
        ("line 4", f"there are no files for bob__other-1 in {bundles}"),
        ("line 5", "ada__calc-7 is there twice"),
        ("line 6", "not a JSON object"),
    ]
    assert [path.name for path in (into / "files").iterdir()] == ["ada__calc.bundle"]
    dataset = Dataset.load(into)
    assert dataset.description == "From elsewhere"
    (finding,) = await check([dataset.sample("ada__calc-7")], cache=tmp_path / "cache")
    assert (finding.status, finding.faults) == ("right", [])


def test_repositories_of_one_name_and_two_owners_stay_apart(tmp_path: Path) -> None:
    for owner in ("ada", "bob"):
        (tmp_path / "files" / owner / "calc").mkdir(parents=True)
        (tmp_path / "files" / owner / "calc" / "who").write_text(owner)
    rows = [ROW | {"instance_id": f"{owner}-1", "repo": f"{owner}/calc"} for owner in ("ada", "bob")]
    (tmp_path / "swe.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_swebench(tmp_path / "swe.jsonl", tmp_path / "files", tmp_path / "d", {})
    samples = Dataset.load(tmp_path / "d").samples
    assert [(sample.files / "who").read_text() for sample in samples if sample.files] == ["ada", "bob"]


def test_nothing_is_written_over_and_nothing_is_left_half_done(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "swe.jsonl").write_text("{}\n")
    (tmp_path / "there").mkdir()
    with pytest.raises(DatasetExists, match="exists already"):
        import_swebench(tmp_path / "swe.jsonl", tmp_path / "files", tmp_path / "there", {})
    with pytest.raises(DatasetInvalid, match=r"no line of .* could become a sample; the first: line 1: instance_id"):
        import_swebench(tmp_path / "swe.jsonl", tmp_path / "files", tmp_path / "new", {})
    with pytest.raises(DatasetInvalid, match="cannot have this name"):
        import_swebench(tmp_path / "swe.jsonl", tmp_path / "files", tmp_path / ".hidden", {})
    with pytest.raises(DatasetInvalid, match="there is no folder"):
        import_swebench(tmp_path / "swe.jsonl", tmp_path / "nothing", tmp_path / "new", {})
    with pytest.raises(DatasetInvalid, match="there is no file"):
        import_swebench(tmp_path / "nothing", tmp_path / "files", tmp_path / "new", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "swe.jsonl", "there"]
