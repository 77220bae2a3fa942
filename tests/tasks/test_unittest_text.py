"""What unittest prints, read back: by literals, and from real runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from carrel.errors import ReportUnreadable
from carrel.tasks.verification.text_reports import unittest_cases
from carrel.tasks.verification.verdict import TestCase

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


def run(folder: Path, suite: str) -> str:
    (folder / "test_suite.py").write_text(suite)
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "-v"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr


def test_a_real_run_of_every_ending(tmp_path: Path) -> None:
    told = unittest_cases(run(tmp_path, SUITE))
    assert {test.name: test.status for test in told} == {
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
    assert {test.classname for test in told} == {"test_suite.Every"}
    messages = {test.name: test.message for test in told}
    assert "no luck" in messages["test_bad"]
    assert messages["test_skipped"] == "not today"
    assert "1 == 1" in messages["test_parts"]


def test_a_module_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    (told,) = unittest_cases(run(tmp_path, "import nothing_of_this_name"))
    assert (told.name, told.status) == ("test_suite", "failed")
    assert "nothing_of_this_name" in told.message


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
    (told,) = unittest_cases(run(tmp_path, suite))
    assert (told.status, "late" in told.message) == ("failed", True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "did not finish"),
        ("test_a (x.X.test_a) ... ok\n", "did not finish"),
        ("test_a (x.X.test_a) ... ok\n" + "-" * 70 + "\nRan 2 tests in 0.001s\n", "2 tests ran, and reports 1"),
        ("test_a (x.X.test_a) ... \n" + "-" * 70 + "\nRan 1 test in 0.001s\n", "how test_a ended"),
    ],
)
def test_a_report_that_is_not_whole_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ReportUnreadable, match=complaint):
        unittest_cases(text)


def test_a_run_that_is_left_in_the_middle_is_refused(tmp_path: Path) -> None:
    suite = "import os, unittest\nclass X(unittest.TestCase):\n    def test_a(self): os._exit(0)\n"
    with pytest.raises(ReportUnreadable):
        unittest_cases(run(tmp_path, suite))
