"""Names, verdicts, protected sections and rates, all from literals."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from carrel.tasks.sample import Sample, VerifySettings
from carrel.tasks.verification.changes import Change, Changes, drop_unsafe, invalid_path
from carrel.tasks.verification.protected_files import (
    Protection,
    SampleFolder,
    programs_of,
    restore_test_settings,
    touched_by,
)
from carrel.tasks.verification.recorder_log import find_contradiction, parse_lines, parse_notes
from carrel.tasks.verification.verdict import ReportedTests, Status, TestCase, TestRun, make_verdict


def case_of(name: str, status: Status = "passed", classname: str = "tests.test_a") -> TestCase:
    return TestCase(classname, name, status)


@pytest.mark.parametrize(
    "wanted",
    [
        "tests/test_a.py::TestX::test_y[1]",
        "tests.test_a.TestX::test_y[1]",
        "tests.test_a.TestX.test_y[1]",
        "test_y[1]",
    ],
)
def test_every_way_to_name_a_test(wanted: str) -> None:
    cases = [case_of("test_y[1]", classname="tests.test_a.TestX"), case_of("test_y[2]", classname="tests.test_a.TestX")]
    assert ReportedTests(cases).find(wanted) == cases[:1]


def test_a_bare_name_counts_only_where_it_is_the_only_one() -> None:
    cases = [case_of("test_y", classname="tests.a"), case_of("test_y", classname="tests.b")]
    assert ReportedTests(cases).find("test_y") == []
    assert ReportedTests(cases).find("tests.b::test_y") == cases[1:]


def test_a_name_without_parameters_stands_for_all_of_them() -> None:
    cases = [case_of("test_y[1]"), case_of("test_y[a::b/c.py]", "failed"), case_of("test_yy[1]")]
    assert ReportedTests(cases).find("tests/test_a.py::test_y") == cases[:2]
    assert ReportedTests(cases).find("tests/test_a.py::test_y[a::b/c.py]") == cases[1:2]


def test_names_of_other_runners() -> None:
    cases = [
        TestCase("acme/calc", "TestAdd/small", "passed"),
        TestCase("lib", "tests::adds", "passed"),
        TestCase("", "it adds", "passed"),
    ]
    found = ReportedTests(cases)
    for name in ("TestAdd/small", "acme/calc::TestAdd/small", "acme/calc.TestAdd/small", "tests::adds", "it adds"):
        assert len(found.find(name)) == 1, name


def sample(fail: list[str], keep: list[str]) -> Sample:
    return Sample(sample_id="s", fail_to_pass=fail, pass_to_pass=keep)


def run(*cases: tuple[str, Status], **more: object) -> TestRun:
    return TestRun(cases=[TestCase("", name, status) for name, status in cases], **more)


TASK = sample(["a", "b"], ["c"])


@pytest.mark.parametrize(
    ("runs", "outcome", "score"),
    [
        ([run(("a", "passed"), ("b", "passed"), ("c", "passed"))], "solved", 1.0),
        ([run(("a", "passed"), ("b", "passed"), ("c", "passed"), ("other", "failed"), exit_code=1)], "solved", 1.0),
        ([run(("a", "passed"), ("b", "failed"), ("c", "passed"))], "partly", 0.5),
        ([run(("a", "passed"), ("b", "skipped"), ("c", "passed"))], "partly", 0.5),
        ([run(("a", "passed"), ("c", "passed"))], "partly", 0.5),
        ([run(("a", "passed"), ("b", "passed"), ("c", "failed"))], "not_solved", 0.0),
        ([run(("a", "failed"), ("b", "failed"), ("c", "passed"))], "not_solved", 0.0),
        ([run(("other", "passed"))], "tests_did_not_run", 0.0),
        ([run(problem="no report")], "tests_did_not_run", 0.0),
        ([run(("a", "passed"), ("a", "failed"), ("b", "passed"), ("c", "passed"))], "partly", 0.5),
        (
            [
                run(("a", "failed"), ("b", "passed"), ("c", "passed")),
                run(("a", "passed"), ("b", "passed"), ("c", "passed")),
            ],
            "flaky",
            1.0,
        ),
        ([run(problem="no report"), run(("a", "passed"), ("b", "passed"), ("c", "passed"))], "flaky", 1.0),
    ],
)
def test_outcomes(runs: list[TestRun], outcome: str, score: float) -> None:
    result = make_verdict(TASK, runs)
    assert (result.outcome, result.score, result.is_success) == (outcome, score, score == 1.0)
    assert result.suite_ran == (outcome != "tests_did_not_run")


def test_missing_and_skipped_tests_are_in_the_evidence() -> None:
    result = make_verdict(TASK, [run(("a", "skipped"), ("c", "passed"))])
    assert result.required == {"a": "skipped", "b": "missing", "c": "passed"}
    assert result.evidence == ["skipped, which counts as failed: a", "missing, which counts as failed: b"]


def test_without_lists_the_command_and_all_tests_decide() -> None:
    free = sample([], [])
    assert make_verdict(free, [run(("x", "passed"), ("y", "skipped"))]).outcome == "solved"
    assert make_verdict(free, [run(("x", "passed"), exit_code=1)]).outcome == "not_solved"
    assert make_verdict(free, [run(("x", "passed"), ("y", "failed"), exit_code=1)]).score == 0.5
    assert make_verdict(free, [run(by_exit_code=True)]).outcome == "solved"
    assert make_verdict(free, [run(by_exit_code=True, exit_code=3)]).outcome == "not_solved"


def test_lists_are_whole_inside_and_cut_where_they_are_shown() -> None:
    many = run(*((f"t{number}", "passed") for number in range(6000)), ("a", "failed"))
    result = make_verdict(sample([], []), [many])
    assert (len(result.passes), result.passed) == (6000, 6000)
    shown = result.shown()
    assert (len(shown.passes), shown.passed, len(shown.failures), len(result.passes)) == (5000, 6000, 1, 6000)


def test_flaky_tests_are_named() -> None:
    runs = [
        run(("a", "failed"), ("b", "passed"), ("c", "passed")),
        run(("a", "passed"), ("b", "failed"), ("c", "passed")),
    ]
    result = make_verdict(TASK, runs)
    assert (result.outcome, result.flaky, result.attempts) == ("flaky", ["a", "b"], 2)


# --- what the recorders report ---------------------------------------------------------------------------------------


def lines(*events: str) -> str:
    return "before" + "".join(f"\nword {event}\n" for event in events) + "after"


FULL = ('{"event":"begun"}', '{"event":"test","id":"t.py::a","when":"call","outcome":"passed"}')
END = ('{"event":"canary","failed":true}', '{"event":"finished","status":0}')


def test_recorder_lines_are_read_and_removed() -> None:
    rest, log = parse_lines(lines(*FULL, *END), "word")
    assert rest == "beforeafter"
    assert find_contradiction(log, [TestCase("t", "a", "passed")]) == ""


@pytest.mark.parametrize(
    ("events", "cases", "complaint"),
    [
        (FULL, [], "ended from inside"),
        ((*FULL, '{"event":"canary","failed":false}', END[1]), [], "the test runner was changed"),
        ((*FULL, '{"event":"canary","failed":false}', *END), [], "the test runner was changed"),
        ((*FULL, '{"event":"changed","what":"x.y"}', *END), [], "was changed while it ran: x.y is not what it was"),
        ((*FULL, *END), [TestCase("t", "b", "passed")], "was not run"),
        ((*FULL, FULL[1].replace("passed", "failed"), *END), [TestCase("t", "a", "passed")], "forged"),
    ],
)
def test_a_recorder_that_contradicts_a_report(events: tuple[str, ...], cases: list[TestCase], complaint: str) -> None:
    assert complaint in find_contradiction(parse_lines(lines(*events), "word")[1], cases)


def notes(*events: str) -> str:
    return "".join(f'{{"run":"{run}",{event}}}\n' for run, _, event in (each.partition(" ") for each in events))


BEGUN, ENDED = '1 "event":"begun","program":"/w/a.test.js"', '1 "event":"finished"'
PASSED = '1 "event":"test","id":"group > a","outcome":"passed"'


def test_notes_of_several_programs() -> None:
    more = ('2 "event":"begun","program":"/w/b.js"', '2 "event":"finished"')
    log = parse_notes(notes(BEGUN, *more, PASSED, ENDED))
    assert find_contradiction(log, [TestCase("group", "a", "passed"), TestCase("", "/w/b.js", "passed")]) == ""
    assert find_contradiction(log, [TestCase("calc", "src/lib.rs - add (line 3)", "passed")]) == ""
    assert not parse_notes("").begun


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "ended from inside"),
        (notes(BEGUN, PASSED), "ended from inside"),
        (notes(BEGUN, PASSED, ENDED, '2 "event":"begun"'), "ended from inside"),
        (notes(BEGUN, PASSED, '1 "event":"canary","failed":false', ENDED), "the test runner was changed"),
        (notes(BEGUN, PASSED, '1 "event":"changed","what":"node:assert.ok"', ENDED), "node:assert.ok is not"),
        (notes(BEGUN, PASSED, ENDED) + "nonsense\n", "were overwritten"),
        (notes(BEGUN, ENDED), "was not run"),
        (notes(BEGUN, PASSED, PASSED.replace("passed", "failed"), ENDED), "and it failed"),
    ],
)
def test_a_report_that_notes_contradict_is_doubted(text: str | None, complaint: str) -> None:
    assert complaint in find_contradiction(parse_notes(text), [TestCase("group", "a", "passed")])


def test_programs_that_name_no_tests_are_counted() -> None:
    log = parse_notes(notes('1 "event":"begun"', '1 "event":"finished","unnamed":true'))
    assert find_contradiction(log, [TestCase("calc", "TestA", "passed"), TestCase("calc", "TestB", "passed")]) == ""
    assert "2 test programs, and 1 were run" in find_contradiction(
        log, [TestCase("calc", "TestA", "passed"), TestCase("calc/other", "TestB", "passed")]
    )


def test_lines_with_another_marker_are_not_the_recorders() -> None:
    rest, log = parse_lines(lines(*FULL), "other")
    assert not log.begun
    assert "begun" in rest


# --- sections --------------------------------------------------------------------------------------------------------

PYPROJECT = b"[project]\nname = 'a'\n\n[tool.pytest.ini_options]\naddopts = '-q'\n"


def test_of_a_pyproject_only_the_test_settings_are_put_back() -> None:
    theirs = PYPROJECT.replace(b"'a'", b"'b'").replace(b"'-q'", b"'-p evil'") + b"\n[tool.black]\nline-length = 99\n"
    merged = restore_test_settings("pyproject.toml", PYPROJECT, theirs)
    assert (
        merged
        == b"[project]\nname = 'b'\n\n[tool.black]\nline-length = 99\n[tool.pytest.ini_options]\naddopts = '-q'\n"
    )


def test_settings_of_what_the_command_runs_are_test_settings(tmp_path: Path) -> None:
    evil = b"[tool.hatch.envs.test.scripts]\nrun = 'true'\n"
    assert restore_test_settings("pyproject.toml", b"", evil) == evil
    assert restore_test_settings("pyproject.toml", b"", evil, command="hatch run test:run") == b""
    pom = Protection(Sample(sample_id="a", verify=VerifySettings(command="mvn -o -q test")), SampleFolder(tmp_path))
    assert pom.protected_reason("sub/pom.xml") == "it defines how the tests are run"
    other = Protection(Sample(sample_id="a", verify=VerifySettings(command="sh tests/ant.sh")), SampleFolder(tmp_path))
    assert (other.protected_reason("pom.xml"), other.protected_reason("build.xml")) == (None, None)


@pytest.mark.parametrize("path", ["vite.config.ts", "a/.babelrc.json", "b-1.DIST-INFO/METADATA", "site-packages/a.py"])
def test_what_else_steers_a_runner(path: str, tmp_path: Path) -> None:
    assert (
        Protection(Sample(sample_id="a"), SampleFolder(tmp_path)).protected_reason(path) == "it steers the test runner"
    )


@pytest.mark.parametrize(
    "evil",
    [
        b"tool = {pytest = {ini_options = {addopts = '-p evil'}}}\n",
        b"[tool]\npytest.ini_options.addopts = '-p evil'\n",
        b"tool.pytest.ini_options.addopts = '-p evil'\n",
        b"[tool.pytest\n",
        b"\xff",
    ],
)
def test_a_pyproject_written_to_get_around_that_is_the_samples_whole(evil: bytes) -> None:
    assert restore_test_settings("pyproject.toml", PYPROJECT, evil) is None


@pytest.mark.parametrize("header", [b"[ 'tool' . pytest . ini_options ]", b'["tool".pytest.ini_options]'])
def test_a_table_by_another_name_does_not_get_through(header: bytes) -> None:
    merged = restore_test_settings(
        "pyproject.toml", PYPROJECT, b"[project]\nname = 'b'\n" + header + b"\naddopts = '-p evil'\n"
    )
    assert merged is None or b"evil" not in merged


def test_other_project_files() -> None:
    cfg = b"[metadata]\nname = a\n[tool:pytest]\naddopts = -q\n"
    assert restore_test_settings("setup.cfg", cfg, b"[tool:pytest]\naddopts = -p evil\n[metadata]\nname = b\n") == (
        b"[metadata]\nname = b\n[tool:pytest]\naddopts = -q\n"
    )
    merged = restore_test_settings(
        "package.json", b'{"scripts": {"test": "node --test"}}', b'{"name": "b", "scripts": {"test": "true"}}'
    )
    assert merged is not None
    assert b'"test": "node --test"' in merged
    assert (
        restore_test_settings("Cargo.toml", b"[package]\n", b"[package]\n[[test]]\nname = 'it'\npath = 'evil.rs'\n")
        is None
    )
    tools = b"[dev-dependencies]\nproptest = '1'\n"
    assert restore_test_settings("Cargo.toml", tools, tools + b"more = '1'\n") == tools + b"more = '1'\n"
    assert restore_test_settings("Cargo.toml", tools, b"[dev-dependencies]\nproptest = {path = 'evil'}\n") is None
    assert (
        restore_test_settings("Cargo.toml", tools, tools + b"[patch.crates-io]\nproptest = {path = 'evil'}\n") is None
    )
    module = b"module a\n\nrequire (\n\tex.org/b v1.0.0\n)\n"
    more = module + b"require ex.org/c v1.0.0\nreplace ex.org/c => ./c\n"
    assert restore_test_settings("go.mod", module, more) == more
    assert restore_test_settings("go.mod", more, module) is None
    assert restore_test_settings("go.mod", module, module + b"replace ex.org/b => ./evil\n") is None
    assert (
        restore_test_settings("go.mod", module, module + b"replace (\n\tex.org/b v1.0.0 => ./evil // why\n)\n") is None
    )
    assert restore_test_settings("main.py", b"a", b"b") == b"b"


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\0b", "a/", "\udcff"])
def test_paths_that_are_none_in_a_workspace(path: str) -> None:
    assert invalid_path(path) is not None


@pytest.mark.parametrize("path", ["a", "a/b.py", "-rf", "..a", "a b", "ä"])
def test_plain_paths(path: str) -> None:
    assert invalid_path(path) is None


class Base:
    """tests/test_a.py, src/a.py, and a link `old` to src."""

    kinds: ClassVar = {"tests": "folder", "tests/test_a.py": "file", "src": "folder", "src/a.py": "file", "old": "link"}

    def kind(self, path: str):
        return self.kinds.get(path)

    def runs(self, path: str) -> bool:
        return False

    def children(self, path: str) -> list[str]:
        return [name for name, kind in self.kinds.items() if name.startswith(f"{path}/") and kind != "folder"]


def carried(*changes: Change) -> list[str]:
    return [change.path for change in drop_unsafe(Changes(changes), Base()).entries]


def test_nothing_is_written_through_a_link_or_a_file() -> None:
    link = Change("lib", "link", b"tests")
    assert carried(link, Change("lib/test_a.py", "file", b"True")) == ["lib"]
    assert carried(Change("old/a.py", "file", b"")) == []
    assert carried(Change("src/a.py/x", "file", b"")) == []
    assert carried(Change("new/a.py", "file", b"")) == ["new/a.py"]


def test_a_folder_is_replaced_only_when_nothing_of_it_is_left() -> None:
    link = Change("src", "link", b"other")
    assert carried(link) == []
    assert carried(Change("src/a.py", "deleted"), link) == ["src"]
    assert carried(Change("tests", "link", b"other")) == []


def test_the_paths_of_a_patch() -> None:
    patch = "diff --git a/old.py b/new.py\nrename from old.py\nrename to new.py\n--- a/x y.py\t2026\n+++ b/x y.py\n"
    assert touched_by(patch + "--- /dev/null\n+++ b/added.py\n") == {"old.py", "new.py", "x y.py", "added.py"}


def test_names_that_git_quotes_are_those_of_the_files() -> None:
    quoted = (
        'diff --git "a/\\303\\251.py" "b/\\303\\251.py"\n--- "a/\\303\\251.py"\n+++ "b/\\303\\251.py"\n'
        'diff --git a/plain.py "b/a\\"b\\\\c\\td.py"\nrename from plain.py\nrename to "a\\"b\\\\c\\td.py"\n'
        'diff --git "a/\\377" "b/\\377"\nold mode 100644\n'
    )
    assert touched_by(quoted) == {"é.py", "plain.py", 'a"b\\c\td.py', "\udcff"}
    sample = Sample(sample_id="s", patch='--- "a/tests/\\303\\251.py"\n+++ "b/tests/\\303\\251.py"\n')
    assert Protection(sample, SampleFolder(Path("/nonexistent"))).protected_reason("tests/é.py") is None


@pytest.mark.parametrize(
    ("pattern", "protected", "free"),
    [
        ("/data", {"data", "data/x", "data/a/b"}, {"lib/data", "lib/data/x", "database"}),
        ("data", {"data", "data/x", "lib/data", "lib/data/x"}, {"database"}),
        ("data/", {"data/x", "lib/data/x"}, {"data", "lib/data"}),
        ("/data/", {"data/x"}, {"data", "lib/data/x"}),
        ("lib/data", {"lib/data", "lib/data/x"}, {"src/lib/data"}),
        ("data/**", {"data/x", "data/a/b"}, {"data", "lib/data/x"}),
        ("**/data", {"data", "lib/data/x"}, {"database"}),
        ("/*.txt", {"a.txt"}, {"lib/a.txt"}),
        ("lib/*.txt", {"lib/a.txt"}, {"lib/b/a.txt", "a.txt"}),
    ],
)
def test_protected_patterns_are_those_of_gitignore(pattern: str, protected: set[str], free: set[str]) -> None:
    guard = Protection(
        Sample(sample_id="s", verify=VerifySettings(protected=[pattern])), SampleFolder(Path("/nonexistent"))
    )
    assert {path for path in protected | free if guard.protected_reason(path)} == protected


@pytest.mark.parametrize(
    ("command", "programs"),
    [
        ("./run.sh --all && A=1 sh scripts/check.sh x | tee log", {"run.sh", "scripts/check.sh", "tee"}),
        ("python -m pytest tests/a.py", set()),
        ("python -B grade.py essay.txt; test -e calc.py", {"grade.py", "test"}),
        ("mypy app.py", {"mypy"}),
        ("cd x && 'unclosed", {"cd", "'unclosed"}),
        ("", set()),
    ],
)
def test_the_programs_of_a_command(command: str, programs: set[str]) -> None:
    assert programs_of(command) == programs
