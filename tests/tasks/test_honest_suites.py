"""Honest tests of every layout are judged as they are, whatever they do to the runner and to each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.tasks.sample import Sample
from carrel.tasks.verification.changes import Change, Changes
from carrel.tasks.verification.verifier import grade, grade_patch
from tests.support.runner_samples import ready_for, runner_sample
from tests.support.samples import COMMAND, GOLD, PYTEST_ENV, calc, written

CONFTEST = """
import pytest
from proj.reporting import Reporter

SEEN = []


def pytest_configure(config):
    config.addinivalue_line("markers", "incremental: each test needs the one before")
    config.pluginmanager.register(Reporter())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed and item.name != "test_wrong":
        item.funcargs["driver"].screenshot()
    if "incremental" in item.keywords and call.excinfo is not None:
        item.parent.failed_before = item.name


def pytest_runtest_setup(item):
    SEEN.append(item.name)
    if hasattr(item.parent, "failed_before"):
        pytest.xfail("the one before failed")


@pytest.fixture(scope="session", autouse=True)
def once():
    kept = pytest.Function.runtest
    pytest.Function.runtest = lambda self: kept(self)
    yield
    pytest.Function.runtest = kept


@pytest.fixture(autouse=True)
def each(request):
    assert SEEN[-1] == request.node.name
    yield


@pytest.fixture(scope="module")
def shared():
    made = []
    yield made
    assert made == [1]
"""
REPORTING = """
class Reporter:
    def pytest_runtest_logreport(self, report):
        report.user_properties.append(("noted", "yes"))
"""
SUITE = """
import unittest
from unittest import mock

import pytest
from calc import add

BEGUN = []


def setup_module(module):
    BEGUN.append(1)


def teardown_module(module):
    assert BEGUN == [1]


@pytest.mark.parametrize("number", [1, 2, "a[b]"])
def test_parameters(number):
    assert add(number, number) == number * 2


def test_fixtures(shared, tmp_path, capsys, monkeypatch):
    shared.append(1)
    print("hello")
    assert capsys.readouterr().out == "hello\\n"
    monkeypatch.setattr("_pytest.runner.check_interactive_exception", lambda call, report: False)
    monkeypatch.setattr(pytest, "raises", None)


def test_shared(shared):
    assert shared == [1]


@pytest.mark.xfail
def test_known_wrong():
    assert add(1, 2) == 4


@pytest.mark.xfail
def test_right_after_all():
    assert add(1, 2) == 3


@pytest.mark.skip
def test_skipped():
    raise AssertionError


def test_skips_itself():
    pytest.skip("not today")


def test_raises():
    with pytest.raises(ZeroDivisionError):
        add(1, 2) / 0
    assert add(0.1, 0.2) == pytest.approx(0.3)


def test_mocks():
    it = mock.Mock()
    it(1)
    it.assert_called_once_with(1)
    with mock.patch("_pytest.runner.CallInfo"), mock.patch.object(unittest.TestCase, "assertEqual"):
        pass


@pytest.mark.incremental
class TestInOrder:
    steps = []

    def setup_method(self, method):
        self.steps.append(1)

    def test_first(self):
        assert len(self.steps) == 1

    def test_second(self):
        assert len(self.steps) == 2

    @staticmethod
    def test_static():
        pass


class TestInherited(TestInOrder):
    steps = []


class TestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.patch = mock.patch("os.getcwd")
        cls.patch.start()

    @classmethod
    def tearDownClass(cls):
        cls.patch.stop()

    def test_one(self):
        self.assertEqual(add(1, 2), 3)

    @unittest.expectedFailure
    def test_expected(self):
        self.assertEqual(add(1, 2), 4)

    @unittest.skip("no")
    def test_skipped(self):
        pass

    def test_parts(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertEqual(add(number, 0), number)


class TestLater(unittest.IsolatedAsyncioTestCase):
    async def test_awaits(self):
        it = mock.AsyncMock()
        await it()
        it.assert_awaited_once()


def test_wrong():
    raise AssertionError("also without a change")
"""
ALL_SKIPPED = "import pytest\n\npytestmark = pytest.mark.skip\n\n\ndef test_never():\n    raise AssertionError\n"
LATER = """
import asyncio

import pytest
from calc import add
from hypothesis import given, settings
from hypothesis import strategies as st

pytest_plugins = ["proj.late"]


@pytest.fixture
async def three():
    yield add(1, 2)


@pytest.mark.asyncio
async def test_awaits():
    await asyncio.sleep(0)
    assert add(1, 2) == 3


@given(st.integers())
@settings(max_examples=5, deadline=None, database=None)
def test_given(number):
    assert add(number, 0) == number


class TestClass:
    @pytest.mark.asyncio
    async def test_awaits(self):
        assert add(1, 2) == 3
"""
LATE = """
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    yield
"""
FILES = {
    "conftest.py": "",
    "proj/__init__.py": "",
    "proj/reporting.py": REPORTING,
    "proj/late.py": LATE,
    "tests/conftest.py": CONFTEST,
    "tests/test_calc.py": SUITE,
    "tests/test_never.py": ALL_SKIPPED,
}
AT = "tests/test_calc.py"
PASSING = [f"{AT}::{name}" for name in ("test_parameters[1]", "test_raises", "TestCase::test_one")]
STAYING = [
    *[f"{AT}::{name}" for name in ("test_fixtures", "test_shared", "test_mocks", "TestLater::test_awaits")],
    *[f"{AT}::TestInOrder::{name}" for name in ("test_first", "test_second", "test_static")],
    f"{AT}::TestInherited::test_second",
]


@pytest.mark.parametrize("more", ["", "-p xdist.plugin -n 2 --dist=loadfile", "-p no:cacheprovider --tb=no", "-s -v"])
async def test_pytest_with_all_that_it_has(more: str, tmp_path: Path, cache: Path) -> None:
    command = f"{COMMAND} {more}"
    sample = calc(
        tmp_path / "calc", FILES, fail_to_pass=PASSING, pass_to_pass=STAYING, verify={"command": command, "timeout": 90}
    )
    result = await grade_patch(sample, GOLD, cache=cache)
    assert result.outcome == "solved", result
    assert not [test.name for test in result.failures if not test.name.endswith("::test_wrong")]
    assert "canary" not in result.stdout + result.stderr
    assert not (await grade(sample, Changes(), cache=cache)).is_success


async def test_pytest_with_tests_that_await_and_are_given_values(tmp_path: Path, cache: Path) -> None:
    plugins = "-p pytest_asyncio.plugin -p _hypothesis_pytestplugin -p anyio.pytest_plugin -p pytest_timeout"
    names = [f"tests/test_later.py::{name}" for name in ("test_awaits", "TestClass::test_awaits")]
    sample = calc(
        tmp_path / "calc",
        {"tests/test_later.py": LATER, "proj/__init__.py": "", "proj/late.py": LATE},
        fail_to_pass=names,
        pass_to_pass=[],
        verify={"command": f"{COMMAND} {plugins}", "timeout": 90},
    )
    result = await grade_patch(sample, GOLD, cache=cache)
    assert (result.outcome, result.failed) == ("solved", 0), result


async def test_a_plugin_of_the_runner_is_what_is_worked_on(tmp_path: Path, cache: Path) -> None:
    """It changes the runner for each test, and puts it back."""
    plugin = """
import _pytest.runner
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    honest = _pytest.runner.call_and_report
    _pytest.runner.call_and_report = lambda *these, **those: honest(*these, **those)
    yield
    _pytest.runner.call_and_report = honest
"""
    files = {"again/__init__.py": "", "again/plugin.py": plugin}
    sample = calc(
        tmp_path / "calc",
        files,
        environment={"env": {**PYTEST_ENV, "PYTHONPATH": "/workspace"}},
        verify={"command": f"{COMMAND} -p again.plugin", "timeout": 90},
    )
    result = await grade_patch(sample, GOLD, cache=cache)
    assert result.outcome == "solved", result


async def test_unittest_with_all_that_it_has(tmp_path: Path, cache: Path) -> None:
    suite = SUITE[SUITE.index("class TestCase") : SUITE.index("def test_wrong")]
    text = f"import unittest\nfrom unittest import mock\n\nfrom calc import add\n\n\n{suite}"
    text += "honest = unittest.TestCase.assertEqual\n"
    text += "unittest.TestCase.assertEqual = lambda self, *these: honest(self, *these)\n"
    files = {"tests/__init__.py": "", "tests/test_calc.py": text}
    command = "python -m unittest -v"
    lists = {"fail_to_pass": ["tests.test_calc.TestCase.test_one"], "pass_to_pass": ["test_awaits"]}
    sample = calc(tmp_path / "calc", files, **lists, verify={"command": command, "timeout": 60})
    result = await grade_patch(sample, GOLD, cache=cache)
    assert (result.outcome, result.failed, result.skipped) == ("solved", 0, 2), result


NODE = """
const { test, describe, it, before, beforeEach, afterEach, mock } = require('node:test');
const assert = require('node:assert/strict');
const { add } = require('./calc.js');

assert.three = (value) => assert.equal(value, 3);
before(() => { mock.method(process, 'exit', () => {}); });
describe('group', () => {
  beforeEach(() => {});
  afterEach(() => {});
  it('adds', () => assert.three(add(1, 2)));
  it('has parts', async (t) => {
    await t.test('one', (part) => {
      part.mock.method(assert, 'equal', () => {});
      assert.equal(1, 2);
    });
    await t.test('two', () => assert.throws(() => assert.equal(1, 2)));
  });
  it.skip('is skipped', () => { throw new Error(); });
  it.todo('is not done', () => { throw new Error(); });
  it('calls back', (t, done) => setTimeout(done, 5));
});
test('one', async () => { await assert.rejects(Promise.reject(new Error('no'))); });
"""
MODULE = """
import test, { describe, it } from 'node:test';
import assert, { equal } from 'node:assert';
test('from a module', () => { equal(1, 1); assert(true); });
describe('more', () => { it('is there', () => {}); });
"""


async def test_node_with_all_that_it_has(tmp_path: Path) -> None:
    folder = written(tmp_path / "more", {"calc.js": "exports.add = (a, b) => a + b;\n", "calc.test.js": NODE})
    written(folder, {"more.test.mjs": MODULE})
    sample: Sample = runner_sample("node", tmp_path / "files", files=folder)
    result = await grade(sample, Changes(), prepared=await ready_for("node", sample, tmp_path / "cache"))
    assert (result.outcome, result.evidence, result.failed) == ("solved", [], 0), result


LAYOUTS = """
import functools
import importlib
import sys
import threading

import pytest
from calc import add, one
from tests import helpers
from tests.helpers import Shared, twice

CASES = [(1, 2, 3), (2, 2, 4)]


def logged(function):
    @functools.wraps(function)
    def inner(*these, **those):
        return function(*these, **those)

    return inner


@pytest.fixture(params=[1, 2], ids=["one", "two"])
def number(request):
    return request.param


@pytest.fixture(scope="module", autouse=True)
def other_helper():
    honest = helpers.thrice
    helpers.thrice = lambda number: honest(number)
    yield
    helpers.thrice = honest


@pytest.mark.parametrize(("a", "b", "c"), CASES)
def test_cases(a, b, c):
    assert add(a, b) == c, f"{a} and {b}"


@logged
@pytest.mark.parametrize("a", [1])
def test_decorated(a, *, wanted=2):
    assert add(a, a) == wanted


def test_fixture(number):
    assert twice(number) == helpers.thrice(number) - number


def test_patches(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "twice", lambda number: 7)
    monkeypatch.setattr("builtins.input", lambda: "x")
    assert (twice(1), input()) == (7, "x")


def test_reloads():
    import calc

    assert importlib.reload(calc).add(1, 2) == 3


def test_traces():
    seen = []
    honest = sys.gettrace()
    sys.settrace(lambda *these: seen.append(these))
    add(1, 1)
    sys.settrace(honest)
    thread = threading.Thread(target=seen.append, args=(1,))
    thread.start()
    thread.join()
    assert seen


def make(wanted):
    def test(self):
        assert wanted == 3

    return test


class TestMade(Shared):
    test_made = make(3)

    def setup_method(self):
        self.check = lambda number: self.assert_three(number)

    def test_method(self):
        self.check(add(1, 2))


if sys.version_info > (3, 0):

    def test_either():
        for _ in range(200):
            assert one() == 1
else:

    def test_either():
        raise AssertionError
"""
HELPERS = """
from calc import add


def twice(number):
    return add(number, number)


def thrice(number):
    return add(number, twice(number))


class Shared:
    def assert_three(self, number):
        assert number == 3

    def test_inherited(self):
        self.assert_three(add(1, 2))
"""
DOCTESTED = (
    'def add(a, b):\n    """\n    >>> add(1, 2)\n    3\n    """\n    return a - b\n\n\ndef one():\n    return 1\n'
)


TWICE = (
    "python -m pytest -q --collect-only; python -m pytest -q --junitxml={report}",
    "python -m pytest -q tests/test_calc.py; python -m pytest -q tests/test_layouts.py --junitxml={report}",
)


@pytest.mark.parametrize(
    "command",
    [
        COMMAND,
        *TWICE,
        "python trace_it.py {report}",
        "python -O -m pytest -q --junitxml={report} --import-mode=importlib",
    ],
)
async def test_no_honest_layout_is_suspicious(command: str, tmp_path: Path, cache: Path) -> None:
    at = "tests/test_layouts.py"
    files = {
        "tests/__init__.py": "",
        "tests/helpers.py": HELPERS,
        "tests/test_layouts.py": LAYOUTS,
        "trace_it.py": "import sys, pytest\nsys.settrace(lambda *these: None)\n"
        "sys.exit(pytest.main(['-q', '--junitxml=' + sys.argv[1]]))\n",
    }
    passing = [f"{at}::{name}" for name in ("test_cases", "test_fixture", "TestMade::test_method")]
    staying = [f"{at}::{name}" for name in ("test_patches", "test_traces", "test_either")]
    sample = calc(
        tmp_path / "calc",
        files,
        fail_to_pass=[*passing, f"{at}::TestMade::test_inherited", f"{at}::test_decorated"],
        pass_to_pass=staying,
        verify={"command": command, "timeout": 90},
    )
    result = await grade_patch(sample, GOLD, cache=cache)
    if command in TWICE:
        assert (result.outcome, result.integrity, len(result.evidence)) == ("solved", "unknown", 1), result
        assert "more than one test runner" in result.evidence[0]
        return
    assert (result.outcome, result.integrity, result.evidence) == ("solved", "clean", []), result
    made = sample.model_copy(update={"pass_to_pass": [*staying, f"{at}::TestMade::test_made"]})
    result = await grade_patch(made, GOLD, cache=cache)
    assert (result.outcome, result.integrity) == ("solved", "unknown"), result
    assert "TestMade::test_made could not be compared with the sample's files" in result.evidence[0]


async def test_examples_in_documentation_cannot_be_compared(tmp_path: Path, cache: Path) -> None:
    sample = calc(
        tmp_path / "calc",
        {"calc.py": DOCTESTED},
        fail_to_pass=["calc.py::calc.add"],
        verify={"command": COMMAND + " --doctest-modules", "timeout": 60},
    )
    work = Changes((Change("calc.py", "file", DOCTESTED.replace("a - b", "a + b").encode()),))
    result = await grade(sample, work, cache=cache)
    assert (result.outcome, result.integrity) == ("solved", "unknown"), result
    assert "calc.add could not be compared" in result.evidence[0]
