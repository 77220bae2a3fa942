"""Honest tests that patch functions, wrap them, or are written before they run: the recorders accuse none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.tasks.verification.changes import Change, Changes
from carrel.tasks.verification.verifier import grade, grade_patch
from tests.support.samples import CALC, COMMAND, GOLD, calc

AT = "tests/test_calc.py"
BASE = """
import functools
import unittest


def wrap(function):
    @functools.wraps(function)
    def inner(*these, **those):
        return function(*these, **those)

    return inner


class Meta(type):
    def __new__(meta, name, bases, names):
        made = {key: wrap(value) if callable(value) and key[0] != "_" else value for key, value in names.items()}
        return super().__new__(meta, name, bases, made)


class Model(metaclass=Meta):
    pass


class Listed:
    def __init_subclass__(cls):
        for key, value in list(vars(cls).items()):
            if callable(value) and key[0] != "_":
                setattr(cls, key, wrap(value))


class Case(unittest.TestCase):
    def __init__(self, name="runTest"):
        super().__init__(name)
        if name != "runTest":
            setattr(self, name, wrap(getattr(self, name)))
"""
CONFTEST = """
import calc
import pytest
from tests import helpers


def here(a, b):
    return 0


@pytest.fixture(scope="session", autouse=True)
def patched_once():
    patch = pytest.MonkeyPatch()
    patch.setattr(helpers, "total", calc.add)
    yield
    patch.undo()
"""
SUITE = """
import sys
import unittest

import base
import calc
import pytest
from calc import add
from tests import helpers


def twice(a, b):
    return 0


class Model(base.Model):
    def compute(self, *, __hidden=1):
        return 1


class TestListed(base.Listed):
    def test_add(self):
        assert add(1, 2) == 3


class TestCase(base.Case):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)


class TestRun(unittest.TestCase):
    def setUp(self):
        self.run = calc.add

    def test_add(self):
        self.assertEqual(self.run(1, 2), 3)


class TestLater:
    def test_add(self):
        assert add(1, 2) == 3


TestLater.test_add = base.wrap(TestLater.test_add)


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "twice", calc.add)


def test_patched(patched):
    assert twice(1, 2) == 3


def test_helper():
    assert (helpers.total(1, 2), Model().compute()) == (3, 1)


def test_examples():
    assert calc.examples() == 0
"""
SOURCE = f"""{CALC["calc.py"]}

def examples():
    import doctest
    import sys

    return doctest.testmod(sys.modules[__name__]).failed
"""
NAMES = ["TestListed::test_add", "TestCase::test_add", "TestRun::test_add", "TestLater::test_add", "test_patched"]


async def test_tests_that_patch_and_are_wrapped(tmp_path: Path, cache: Path) -> None:
    files = {"base.py": BASE, "calc.py": SOURCE, "tests/__init__.py": "", "tests/conftest.py": CONFTEST, AT: SUITE}
    files["tests/helpers.py"] = "def total(a, b):\n    return 0\n"
    names = [f"{AT}::{name}" for name in [*NAMES, "test_helper"]]
    sample = calc(tmp_path / "calc", files, fail_to_pass=names, pass_to_pass=[f"{AT}::test_examples"])
    work = Changes((Change("calc.py", "file", SOURCE.replace("a - b", "a + b").encode()),))
    result = await grade(sample, work, cache=cache)
    assert (result.outcome, result.integrity, result.evidence) == ("solved", "clean", []), result


async def test_cases_of_unittest_that_their_class_wraps(tmp_path: Path, cache: Path) -> None:
    suite = "import base\nfrom calc import add\n\n\nclass TestIt(base.Case):\n    def test_add(self):\n"
    suite += "        self.assertEqual(add(1, 2), 3)\n"
    sample = calc(
        tmp_path / "calc",
        {"base.py": BASE, "tests/__init__.py": "", AT: suite},
        fail_to_pass=["tests.test_calc.TestIt.test_add"],
        pass_to_pass=[],
        verify={"command": "python -m unittest -v", "timeout": 60},
    )
    result = await grade_patch(sample, GOLD, cache=cache)
    assert (result.outcome, result.integrity, result.evidence) == ("solved", "clean", []), result


@pytest.mark.parametrize("before", ["cp hidden/test_calc.py tests/", "sed -i 's/== 4/== 3/' tests/test_calc.py"])
async def test_tests_that_the_command_writes_first(before: str, tmp_path: Path, cache: Path) -> None:
    old = CALC[AT].replace("== 3", "== 4")
    files = {"hidden/test_calc.py": CALC[AT], AT: old}
    command = f"{before} && {COMMAND} tests"
    sample = calc(tmp_path / "calc", files, verify={"command": command, "timeout": 60})
    result = await grade_patch(sample, GOLD, cache=cache)
    assert (result.outcome, result.integrity) == ("solved", "unknown"), result
    assert "its file was written to before it was loaded" in result.evidence[0]
