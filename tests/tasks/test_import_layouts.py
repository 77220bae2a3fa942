"""Repositories of every layout become samples: their tests are found, run, and judged as they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carrel.errors import DatasetInvalid
from carrel.tasks.dataset import Dataset
from carrel.tasks.dataset_check import check
from carrel.tasks.git_history import Git
from carrel.tasks.importers.git_commits import Journal, Lists, first_error, import_history, lists_of, standings
from carrel.tasks.importers.layout import options_for, proposal, split
from carrel.tasks.importers.write import ImportResult
from carrel.tasks.sample import Sample, SampleEnvironment, VerifySettings
from carrel.tasks.verification.changes import Change, Changes
from carrel.tasks.verification.verifier import grade, grade_patch
from tests.support.git_repositories import HALF, LAYOUTS, TESTS, of_commits
from tests.support.git_repository import Repository
from tests.support.samples import COMMAND, PYTEST_ENV

EVEN, ODD = "tests.test_halves::test_even", "tests.test_halves::test_odd"
INSTALL = "pip install --no-index -e ."


async def imported(
    repo: Repository, folder: Path, setup: str = "", command: str = COMMAND, **options: Any
) -> tuple[Dataset, ImportResult]:
    settings = {
        "environment": {"env": PYTEST_ENV, "setup": [setup] if setup else []},
        "verify": {"command": command, "timeout": 100},
    }
    done = await import_history(repo.folder, "v1..trunk", folder / "made", settings, cache=folder / "cache", **options)
    return Dataset.load(folder / "made"), done


@pytest.mark.parametrize(
    ("layout", "setup", "command"),
    [
        ("src", "", COMMAND),
        ("src", INSTALL, COMMAND),
        ("flat", "", COMMAND),
        ("tox", "", COMMAND),
        # What is compiled has to be compiled again from the source that is judged.
        ("c_extension", INSTALL, f"{INSTALL} && {COMMAND}"),
    ],
)
async def test_a_layout_gives_a_sample_that_is_right(layout: str, setup: str, command: str, tmp_path: Path) -> None:
    repo = LAYOUTS[layout](tmp_path / "repo")
    dataset, done = await imported(repo, tmp_path, setup, command, test_patterns=["checks/*"])
    (sample,) = dataset.samples
    even, odd = (name.replace("tests.test", "checks.check") if layout == "tox" else name for name in (EVEN, ODD))
    assert (sample.fail_to_pass, sample.pass_to_pass, done.left_out) == ([odd], [even], [])
    (finding,) = await check([sample], cache=tmp_path / "cache")
    assert (finding.status, finding.faults) == ("right", [])


async def test_source_that_breaks_tests_beyond_the_first_5000_is_not_a_solution(tmp_path: Path) -> None:
    repo = LAYOUTS["many"](tmp_path / "repo")
    repo.git("checkout", "-q", "v1")
    test_patch, patch = (repo.git("diff", "v1", "trunk", "--", path) + "\n" for path in ("tests", "halves.py"))
    sample = Sample(
        sample_id="many",
        files=repo.folder,
        test_patch=test_patch,
        environment=SampleEnvironment(env=PYTEST_ENV),
        verify=VerifySettings(command=COMMAND, timeout=200),
    )
    solved = standings(await grade_patch(sample, patch, cache=tmp_path / "cache"))
    lists = lists_of([{**solved, ODD: "failed"}], [solved])
    assert (lists.fail_to_pass, len(lists.pass_to_pass)) == ([ODD], 6001)
    sample.fail_to_pass, sample.pass_to_pass = lists.fail_to_pass, lists.pass_to_pass
    breaks = patch.replace("+    return number / 2", "+    return number / 2 if number < 11994 else 0")
    result = await grade_patch(sample, breaks, cache=tmp_path / "cache")
    assert (result.outcome, result.is_success, result.failed) == ("partly", False, 3)
    assert result.required["tests.test_halves::test_each[5999]"] == "failed"


async def test_a_test_js_at_the_root_is_a_test(tmp_path: Path) -> None:
    command = "node --test --test-reporter=tap"
    dataset, _ = await imported(LAYOUTS["root_test_js"](tmp_path / "repo"), tmp_path, command=command)
    (sample,) = dataset.samples
    assert (sample.fail_to_pass, sample.pass_to_pass) == (["odd"], ["even"])
    index, cheat = Change("index.js", "file", b"module.exports = (number) => 0;"), Change("test.js", "file", b"")
    result = await grade(sample, Changes((index, cheat)), cache=tmp_path / "cache")
    assert (result.outcome, result.left_out) == ("not_solved", {"test.js": "a file of the hidden tests"})


async def test_tests_that_come_out_differently_are_left_out_and_reported(tmp_path: Path) -> None:
    dataset, done = await imported(LAYOUTS["flaky"](tmp_path / "repo"), tmp_path)
    (sample,) = dataset.samples
    assert ODD in sample.fail_to_pass
    assert EVEN in sample.pass_to_pass
    # Of 200, 50 look like fixed ones in one run of each state, and 3 in three.
    assert len(sample.fail_to_pass) < 20
    (left,) = done.left_out
    assert " tests left out of its lists for differing from run to run: tests.test_halves::test_chance[" in left.why


async def test_a_test_file_that_cannot_be_imported_leaves_the_others_where_they_are(tmp_path: Path) -> None:
    dataset, _ = await imported(LAYOUTS["not_importable"](tmp_path / "repo"), tmp_path)
    (sample,) = dataset.samples
    assert (sample.fail_to_pass, sample.pass_to_pass) == (["tests.test_double::test_double"], [EVEN])
    (finding,) = await check([sample], cache=tmp_path / "cache")
    assert (finding.status, finding.faults) == ("right", [])


async def test_what_is_missing_is_shown_with_options_to_try(tmp_path: Path) -> None:
    repo = LAYOUTS["src"](tmp_path / "repo")
    needs = "import no_such_helper\n" + TESTS
    repo.commit("Halve more", {"src/halves/__init__.py": HALF, "tests/test_halves.py": needs})
    with pytest.raises(DatasetInvalid) as refused:
        await imported(repo, tmp_path, limit=1)
    assert "ModuleNotFoundError: No module named 'no_such_helper'" in str(refused.value)
    assert str(refused.value).endswith("; try --setup \"pip install -e .\" --dep pytest --dep 'hypothesis>=6'")


async def test_a_package_that_node_does_not_find_is_named(tmp_path: Path) -> None:
    repo = LAYOUTS["root_test_js"](tmp_path / "repo")
    repo.commit("Test more", {"index.js": "", "test.js": "require('no-such-helper');\n"})
    with pytest.raises(DatasetInvalid) as refused:
        await imported(repo, tmp_path, command="node --test --test-reporter=tap", limit=1)
    assert "Error: Cannot find module 'no-such-helper'" in str(refused.value)
    assert str(refused.value).endswith('; try --setup "npm install"')


async def test_tests_that_are_not_seen_are_an_error_that_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match=r"touches both source and tests; .*--test-pattern GLOB"):
        await imported(LAYOUTS["tox"](tmp_path / "repo"), tmp_path)


async def test_commits_that_cannot_be_tasks_cost_no_run(tmp_path: Path) -> None:
    repo = of_commits(
        tmp_path / "repo", {"halves.py": HALF, "tests/x": "1"}, {"tests/x": "2", "tox.ini": "", ".pre-commit.yaml": ""}
    )
    repo.commit("More settings", {"tests/x": "3", "poetry.lock": "", "README.md": "x"})
    with pytest.raises(DatasetInvalid, match="no commit in"):
        await imported(repo, tmp_path)
    assert not (tmp_path / "cache").exists()


async def test_an_import_that_was_stopped_goes_on(tmp_path: Path) -> None:
    repo = LAYOUTS["flat"](tmp_path / "repo")
    repo.commit(
        "Thirds", {"thirds.py": "THIRD = 1 / 3\n", "tests/test_thirds.py": "import thirds\n\ndef test_it(): pass\n"}
    )

    class Stopped(Exception):
        pass

    def stop(commit: str, what: str) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        await imported(repo, tmp_path, workers=1, on_commit=stop)
    (journal,) = tmp_path.glob(".made.import.jsonl")
    with journal.open("a") as file:
        file.write('{"commit": "torn')
    begun: list[tuple[int, int]] = []
    dataset, _ = await imported(repo, tmp_path, resume=True, on_found=lambda *counts: begun.append(counts))
    assert begun == [(2, 1)]
    assert [sample.fail_to_pass for sample in dataset.samples] == [[ODD], ["tests.test_thirds::test_it"]]
    assert not journal.exists()


def test_a_journal_of_other_settings_or_without_resume_is_begun_anew(tmp_path: Path) -> None:
    Journal(tmp_path / "d", {"a": 1}, resume=False).add("c1", Lists(fail_to_pass=["t"]))
    again = Journal(tmp_path / "d", {"a": 1}, resume=True)
    assert again.judged == {"c1": Lists(fail_to_pass=["t"])}
    again.add("c2", Lists(why="no network", may_change=True))
    assert set(Journal(tmp_path / "d", {"a": 1}, resume=True).judged) == {"c1"}
    assert Journal(tmp_path / "d", {"a": 2}, resume=True).judged == {}


def test_only_what_holds_in_every_run_is_in_a_list() -> None:
    before = [
        {"a": "failed", "b": "passed", "c": "failed", "d": "passed"},
        {"a": "failed", "b": "passed", "c": "failed"},
    ]
    after = [{"a": "passed", "b": "passed", "c": "failed", "d": "passed", "e": "passed"}] * 2
    assert lists_of(before, after) == Lists(  # type: ignore[arg-type]
        fail_to_pass=["a", "e"], pass_to_pass=["b"], fail_to_fail=["c"], unstable=["d"]
    )


def test_options_from_a_project_file() -> None:
    extras = {"project": {"optional-dependencies": {"dev": ["x"], "test": ["y"]}}}
    assert options_for(extras, has_setup_py=False) == ["--setup \"pip install -e '.[test]'\""]
    assert options_for({}, has_setup_py=True) == ['--setup "pip install -e ."']
    groups = {
        "dependency-groups": {"dev": [{"include-group": "tests"}], "tests": [{"include-group": "dev"}, "pytest>8"]}
    }
    assert options_for(groups, has_setup_py=False) == ["--dep 'pytest>8'"]


def test_options_are_proposed_only_for_what_can_be_installed(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "repo")
    git, commit = Git(repo.folder / ".git"), repo.commit("Begin", {"setup.py": "", "halves.py": HALF})
    assert proposal(git, commit, ["ModuleNotFoundError: No module named '_dbm'"]) == ""
    assert proposal(git, commit, ["ModuleNotFoundError: No module named 'yaml'"]) == '--setup "pip install -e ."'


def test_options_that_were_given_are_not_proposed_again(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "repo")
    commit = repo.commit("Begin", {"setup.py": "", "src/halves/__init__.py": HALF, "tests/x": "", "package.json": "{}"})
    given = {"environment": {"setup": ["pip install -e .", "npm install"], "deps": ["pytest"]}}

    def proposed(*modules: str) -> str:
        reasons = [f"ModuleNotFoundError: No module named '{module}'" for module in modules]
        return proposal(Git(repo.folder / ".git"), commit, reasons, settings=given)

    assert proposed("yaml", "yaml", "mypy.api") == (
        "--dep PACKAGE with the package that has the module yaml and the one that has mypy"
    )
    assert proposed("halves", "tests", "_dbm") == ""
    assert proposal(Git(repo.folder / ".git"), commit, ["Cannot find module 'ava'"], settings=given) == ""


def test_the_first_error_of_a_run() -> None:
    shown = "ImportError while importing test module '/workspace/t.py'.\nE   ModuleNotFoundError: No module named 'x'\n"
    assert first_error(shown) == "ModuleNotFoundError: No module named 'x'"
    assert first_error("Error: Cannot find module 'ava'\n") == "Error: Cannot find module 'ava'"
    assert first_error("usage\n__main__.py: error: unrecognized arguments: --cov\n").endswith("arguments: --cov")
    assert first_error("all is well\n") == ""


def test_tests_at_the_root() -> None:
    assert split(["test.js", "tests.sh", "test.txt", "lib/test.js", "testing.js"]).tests == ("test.js", "tests.sh")
