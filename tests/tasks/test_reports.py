"""Reports of every kind, as the tools write them, and reports that are meant to do harm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from carrel.errors import ReportUnreadable
from carrel.tasks.verification.reports import cases_in, grade_in, kind_of_report
from carrel.tasks.verification.text_reports import unittest_cases
from carrel.tasks.verification.verdict import ReportedTests, TestCase

SUREFIRE = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="com.acme.CalcTest" time="0.05" tests="3" errors="1" skipped="1" failures="0">
  <properties><property name="java.version" value="21"/></properties>
  <testcase name="adds" classname="com.acme.CalcTest" time="1,234.5"/>
  <testcase name="divides" classname="com.acme.CalcTest"><error message="/ by zero" type="E">at Calc</error></testcase>
  <testcase name="later" classname="com.acme.CalcTest"><skipped/></testcase>
</testsuite>"""
NODE = """<?xml version="1.0" encoding="utf-8"?>
<testsuites>
  <testcase name="adds" time="0.001" classname="test"/>
  <testsuite name="deep"><testsuite name="deeper">
    <testcase name="fails" classname="test"><failure type="x" message="no">why</failure></testcase>
  </testsuite></testsuite>
</testsuites>"""
GO = """{"Action":"start","Package":"acme/calc"}
{"Action":"run","Package":"acme/calc","Test":"TestAdd"}
{"Action":"output","Package":"acme/calc","Test":"TestAdd","Output":"    calc_test.go:9: got 1\\n"}
{"Action":"fail","Package":"acme/calc","Test":"TestAdd","Elapsed":0.01}
{"Action":"run","Package":"acme/calc","Test":"TestSub/small"}
{"Action":"pass","Package":"acme/calc","Test":"TestSub/small","Elapsed":0}
{"Action":"run","Package":"acme/calc","Test":"TestHangs"}
{"Action":"run","Package":"acme/calc","Test":"TestNet"}
{"Action":"skip","Package":"acme/calc","Test":"TestNet"}
{"Action":"fail","Package":"acme/calc","Elapsed":0.2}
{"Action":"fail","Package":"acme/broken","Elapsed":0}
"""
CARGO = """    Finished test [unoptimized] target(s)
     Running unittests src/lib.rs (target/debug/deps/calc-1)

running 3 tests
test tests::adds ... FAILED
test tests::slow ... ignored, needs a network
test tests::subtracts ... ok

failures:

---- tests::adds stdout ----
thread 'tests::adds' panicked at src/lib.rs:9:
assertion failed

failures:
    tests::adds

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests calc

running 1 test
test src/lib.rs - add (line 3) ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s
"""
TAP = """TAP version 13
# Subtest: cart
    # Subtest: adds
    ok 1 - adds
      ---
      duration_ms: 0.5
      ...
    # Subtest: rounds
    not ok 2 - rounds
      ---
      error: 'no'
      ...
    1..2
not ok 1 - cart
ok 2 - alone # SKIP no network
ok 3 plain
1..3
"""
SARIF = """{"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [{
  "tool": {"driver": {"name": "lint", "rules": [{"id": "N1", "defaultConfiguration": {"level": "note"}}]}},
  "results": [
    {"ruleId": "E1", "level": "error", "message": {"text": "bad"}, "locations": [{"physicalLocation":
      {"artifactLocation": {"uri": "a.py"}, "region": {"startLine": 3}}}]},
    {"ruleId": "N1", "message": {"text": "a note"}},
    {"ruleId": "W1", "message": {"text": "known"}, "suppressions": [{"kind": "inSource"}]}]}]}"""


def outcomes(text: str) -> list[tuple[str, str]]:
    kind = kind_of_report(text)
    return [(case.whole_name, case.status) for case in cases_in(text, kind)]


def test_junit_of_maven() -> None:
    assert outcomes(SUREFIRE) == [
        ("com.acme.CalcTest::adds", "passed"),
        ("com.acme.CalcTest::divides", "failed"),
        ("com.acme.CalcTest::later", "skipped"),
    ]
    assert cases_in(SUREFIRE, "junit")[1].message == "/ by zero\nat Calc"


def test_junit_with_tests_beside_and_below_suites() -> None:
    assert outcomes(NODE) == [("test::adds", "passed"), ("test::fails", "failed")]


def test_junit_of_a_real_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('x', [1, 2])\ndef test_x(x): assert x == 1\n\n"
        "class TestY:\n    @pytest.mark.skip(reason='no')\n    def test_z(self): pass\n\n"
        "@pytest.mark.xfail\ndef test_known(): assert False\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=r.xml", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=100)
    assert outcomes((tmp_path / "r.xml").read_text()) == [
        ("test_it::test_x[1]", "passed"),
        ("test_it::test_x[2]", "failed"),
        ("test_it.TestY::test_z", "skipped"),
        ("test_it::test_known", "skipped"),
    ]


RECORDED = {
    "jest": ["group adds", "group later"],
    "vitest": ["group > adds", "group > later"],
    "maven": ["CalcTest::adds", "CalcTest::later"],
    "gotestsum": ["calc::TestAdd/small", "TestLater"],
}


@pytest.mark.parametrize("runner", RECORDED)
def test_junit_as_real_runners_wrote_it(runner: str) -> None:
    text = (Path(__file__).parent / "recorded" / f"{runner}.xml").read_text()
    assert kind_of_report(text) == "junit"
    reported = ReportedTests(cases_in(text, "junit"))
    one = "TestOne" if runner == "gotestsum" else "one"
    adds, later = RECORDED[runner]
    assert [[case.status for case in reported.find(name)] for name in (one, adds, later)] == [
        ["passed"],
        ["failed"],
        ["skipped"],
    ]
    assert reported.find(adds)[0].message


def test_go() -> None:
    assert outcomes(GO) == [
        ("acme/calc::TestAdd", "failed"),
        ("acme/calc::TestSub/small", "passed"),
        ("acme/calc::TestHangs", "failed"),
        ("acme/calc::TestNet", "skipped"),
        ("acme/broken::(package)", "failed"),
    ]
    assert cases_in(GO, "go")[0].message == "calc_test.go:9: got 1"


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ('{"Action":"pass","Package":"acme/calc","Test":"TestAdd"}', "TestAdd, which was not running"),
        ('{"Action":"pass","Package":"acme/calc","Test":"TestNever"}', "TestNever, which was not running"),
        ('{"Action":"pass","Package":"acme/calc"}', "acme/calc passed, and that a test in it failed"),
    ],
)
def test_go_that_contradicts_itself_is_refused(more: str, complaint: str) -> None:
    text = GO.replace('{"Action":"fail","Package":"acme/calc","Elapsed":0.2}\n', "")
    assert text != GO
    with pytest.raises(ReportUnreadable, match=complaint):
        cases_in(f"{text}{more}\n", "go")


def test_more_tests_than_any_suite_has() -> None:
    with pytest.raises(ReportUnreadable, match="more than 500,000 tests"):
        cases_in("<testsuite>" + '<testcase name="a"/>' * 500_001 + "</testsuite>", "junit")


def test_a_go_package_that_could_not_be_built_has_failed() -> None:
    """Before Go 1.24 that is a line among the JSON."""
    right = '{"Action":"run","Package":"a","Test":"TestA"}\n{"Action":"pass","Package":"a","Test":"TestA"}\n'
    cases = cases_in(right + '{"Action":"pass","Package":"a"}\nFAIL\ta/sub [build failed]\n', "go")
    assert [(case.classname, case.name, case.status, case.message) for case in cases] == [
        ("a", "TestA", "passed", ""),
        ("a/sub", "(package)", "failed", "build failed"),
    ]


def test_go_test_that_is_run_again_has_failed_once() -> None:
    about = '"Package":"acme/calc","Test":"TestAdd"'
    assert outcomes(f'{GO}{{"Action":"run",{about}}}\n{{"Action":"pass",{about}}}\n')[0] == (
        "acme/calc::TestAdd",
        "failed",
    )


def test_cargo() -> None:
    assert outcomes(CARGO) == [
        ("unittests src/lib.rs::tests::adds", "failed"),
        ("unittests src/lib.rs::tests::slow", "skipped"),
        ("unittests src/lib.rs::tests::subtracts", "passed"),
        ("calc::src/lib.rs - add (line 3)", "passed"),
    ]
    assert "assertion failed" in cases_in(CARGO, "cargo")[0].message


def test_cargo_that_was_cut_off_or_added_to_is_refused() -> None:
    with pytest.raises(ReportUnreadable, match="cut off"):
        cases_in(CARGO[: CARGO.index("test result")], "cargo")
    with pytest.raises(ReportUnreadable, match="differs from its lines"):
        cases_in(CARGO.replace("running 3 tests", "test forged ... ok"), "cargo")
    with pytest.raises(ReportUnreadable, match="differs from its lines"):
        cases_in(CARGO.replace("running 3 tests", "running 4 tests"), "cargo")
    with pytest.raises(ReportUnreadable, match="differs from its lines"):
        cases_in(CARGO.replace("result: FAILED. 1 passed", "result: ok. 1 passed"), "cargo")
    with pytest.raises(ReportUnreadable, match="began twice"):
        cases_in(CARGO.replace("running 3 tests", "running 3 tests\nrunning 3 tests"), "cargo")
    with pytest.raises(ReportUnreadable, match="a test twice"):
        cases_in(CARGO.replace("test tests::subtracts ... ok", "test tests::adds ... ok"), "cargo")


def test_output_that_looks_like_that_of_two_runners() -> None:
    both = CARGO + GO
    assert kind_of_report(both, "cargo test --workspace") == "cargo"
    assert kind_of_report(both, "go test -json ./...") == "go"
    for command in ("", "make check", "cargo test; go test -json ./..."):
        with pytest.raises(ReportUnreadable, match="looks like go and cargo; say"):
            kind_of_report(both, command)


def test_tap() -> None:
    assert outcomes(TAP) == [
        ("cart::adds", "passed"),
        ("cart::rounds", "failed"),
        ("alone", "skipped"),
        ("plain", "passed"),
    ]
    assert cases_in(TAP, "tap")[1].message == "error: 'no'"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("TAP version 13\nok 1 - a\n", "plan has nothing"),
        ("1..2\nok 1 - a\n", "1 tests were reported"),
        ("1..1\nok 1 - a\nok 2 - b\n", "2 tests were reported"),
        ("1..1\nok 1 - forged\n1..1\nnot ok 1 - a\n", "instead of number 2"),
        ("1..1\nok - forged\n1..1\nnot ok - a\n", "2 tests were reported"),
        ("1..1\nBail out! no database\n", "gave up"),
    ],
)
def test_tap_that_is_not_whole_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ReportUnreadable, match=complaint):
        cases_in(text, "tap")


def test_sarif() -> None:
    assert outcomes(SARIF) == [("a.py:3::E1", "failed"), ("N1", "skipped"), ("W1", "skipped")]


@pytest.mark.parametrize("text", ["", "[]", '{"runs": 5}', '{"runs": [{"results": [5]}]}', "[" * 100_000])
def test_sarif_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ReportUnreadable):
        cases_in(text, "sarif")


def test_xml_that_is_meant_to_do_harm_is_refused() -> None:
    bomb = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaa">]><testsuites><testcase name="&a;"/></testsuites>'
    reads = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><testsuites><testcase name="&a;"/></testsuites>'
    deep = "<testsuite>" * 100_000 + "</testsuite>" * 100_000
    for text, complaint in ((bomb, "document type"), (reads, "document type"), (deep, "deep"), ("<testsuites>", "XML")):
        with pytest.raises(ReportUnreadable, match=complaint):
            cases_in(text, "junit")
    with pytest.raises(ReportUnreadable, match="not a JUnit report"):
        cases_in("<html/>", "junit")


def test_a_graders_json() -> None:
    grade = grade_in('noise\n{"score": 0.5, "evidence": {"why": "half"}}\n{"other": 1}\n')
    assert (grade.score, grade.is_success, grade.evidence) == (0.5, False, {"why": "half"})
    assert grade_in('{\n "score": 1\n}').is_success
    assert not grade_in('{"score": 1, "is_success": false}').is_success


@pytest.mark.parametrize("text", ["", "fine", '{"score": "1"}', '{"score": 2}', '{"score": true}', '{"score": NaN}'])
def test_a_graders_json_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ReportUnreadable):
        grade_in(text)


def test_text_that_is_no_report() -> None:
    assert kind_of_report("all is well") == "exit_code"
    assert cases_in("all is well", "exit_code") == []
    assert isinstance(cases_in(NODE, "junit")[0], TestCase)


# --- unittest -------------------------------------------------------------------------------------------------------

SUITE = '''
import sys, unittest

class Every(unittest.TestCase):
    def test_good(self): pass
    def test_with_words(self):
        """It says something."""
    def test_bad(self): self.assertEqual(1, 2, "no luck")
    def test_broken(self): raise KeyError("x")
    @unittest.skip("not today")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_known(self): self.fail()
    @unittest.expectedFailure
    def test_surprise(self): pass
    def test_parts(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)
    def test_noisy(self): print("hello"); print("noise", file=sys.stderr)

class Never(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise ValueError("no")
    def test_never(self): pass
'''


def unittest_output(folder: Path, suite: str) -> str:
    (folder / "test_suite.py").write_text(suite)
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "-v"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr


def test_a_real_run_of_every_ending(tmp_path: Path) -> None:
    cases = unittest_cases(unittest_output(tmp_path, SUITE))
    assert {test.name: test.status for test in cases} == {
        "test_good": "passed",
        "test_with_words": "passed",
        "test_bad": "failed",
        "test_broken": "failed",
        "test_skipped": "skipped",
        "test_known": "skipped",
        "test_surprise": "failed",
        "test_parts": "failed",
        "test_noisy": "passed",
    }
    assert {test.classname for test in cases} == {"test_suite.Every"}
    messages = {test.name: test.message for test in cases}
    assert "no luck" in messages["test_bad"]
    assert messages["test_skipped"] == "not today"
    assert "1 == 1" in messages["test_parts"]


def test_a_module_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    (case,) = unittest_cases(unittest_output(tmp_path, "import nothing_of_this_name"))
    assert (case.name, case.status) == ("test_suite", "failed")
    assert "nothing_of_this_name" in case.message


def test_the_older_way_of_naming() -> None:
    text = "test_a (tests.test_x.X) ... ok\n\n" + "-" * 70 + "\nRan 1 test in 0.001s\n\nOK\n"
    assert unittest_cases(text) == [TestCase("tests.test_x.X", "test_a", "passed")]


def test_a_clean_up_that_fails_is_no_pass(tmp_path: Path) -> None:
    suite = """
import unittest
class X(unittest.TestCase):
    def test_a(self): pass
    def tearDown(self): raise OSError("late")
"""
    (case,) = unittest_cases(unittest_output(tmp_path, suite))
    assert (case.status, "late" in case.message) == ("failed", True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "did not finish"),
        ("test_a (x.X.test_a) ... ok\n", "did not finish"),
        ("test_a (x.X.test_a) ... ok\n" + "-" * 70 + "\nRan 2 tests in 0.001s\n", "2 tests ran, and reports 1"),
        ("test_a (x.X.test_a) ... \n" + "-" * 70 + "\nRan 1 test in 0.001s\n", "how test_a ended"),
    ],
)
def test_unittest_text_that_is_incomplete_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ReportUnreadable, match=complaint):
        unittest_cases(text)


def test_a_run_that_is_left_in_the_middle_is_refused(tmp_path: Path) -> None:
    suite = "import os, unittest\nclass X(unittest.TestCase):\n    def test_a(self): os._exit(0)\n"
    with pytest.raises(ReportUnreadable):
        unittest_cases(unittest_output(tmp_path, suite))
