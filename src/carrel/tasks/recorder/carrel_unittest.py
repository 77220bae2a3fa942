"""Record what unittest's own results report about each test; installed before the project's code is imported."""

import inspect
import os
import sys
import unittest
from typing import Any
from unittest.result import TestResult
from unittest.runner import TextTestResult
from unittest.suite import BaseTestSuite

from carrel_channel import open_channel
from carrel_comparison import CodeComparison, Executed, install_audit_hook, modules_of, test_modules
from carrel_known_functions import LATE, LOOPS, KnownFunctions, KnownTests, is_installed, may_change, plain_function

_PYTHON = os.path.dirname(unittest.__file__)
_WORDS = {
    "addSuccess": "passed",
    "addExpectedFailure": "passed",
    "addFailure": "failed",
    "addError": "failed",
    "addUnexpectedSuccess": "failed",
    "addSkip": "skipped",
}


def _raises_nothing(test: unittest.TestCase) -> None:
    with test.assertRaises(KeyError):
        pass


def _just_fails(test: unittest.TestCase) -> None:
    raise AssertionError("as it should")


_WAYS: Any = [
    _just_fails,
    _raises_nothing,
    lambda test: test.fail(),
    lambda test: test.assertEqual(1, 2),
    lambda test: test.assertEqual("a", "b"),
    lambda test: test.assertEqual([1], [2]),
    lambda test: test.assertNotEqual(1, 1),
    lambda test: test.assertTrue(False),
    lambda test: test.assertFalse(True),
    lambda test: test.assertIn(1, ()),
    lambda test: test.assertIs(1, None),
    lambda test: test.assertIsNone(1),
    lambda test: test.assertGreater(1, 2),
]


class _Canary(unittest.TestCase):
    """A test that cannot pass; if it is reported as passed, the runner was changed."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self._way = way

    def runTest(self) -> None:
        self._way(self)


def _all_fail() -> bool:
    result = TestResult()
    for way in _WAYS:
        _Canary(way).run(result)
    return len(result.failures) == len(_WAYS)


def _listeners() -> Any:
    """The functions that the runner calls with the result of a test."""
    return [getattr(TextTestResult, name) for name in _WORDS]


def _swallowed(test: Any) -> bool:
    """Whether a test that is reported as passed raised something, by what unittest recorded while it ran."""
    outcome = getattr(test, "_outcome", None)
    return outcome is not None and (outcome.success is False or getattr(outcome, "expectedFailure", None) is not None)


def _is_foreign(kind: Any, method: str) -> bool:
    """Whether the code of a test is from another file than its class, and is not a wrapper of the class's function."""
    owner = next((each for each in kind.__mro__ if method in vars(each)), None)
    home = getattr(sys.modules.get(getattr(owner, "__module__", "")), "__file__", None)
    function = plain_function(inspect.unwrap(vars(owner)[method])) if owner is not None else None
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    return file is not None and file != home and not is_installed(file) and not may_change(file)


def _loads_tests() -> str:
    """The name of a module that is not a test file and yet defines `load_tests`."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_trusted = not file or file.startswith(_PYTHON) or is_installed(file) or may_change(file)
        if not is_trusted and plain_function(getattr(module, "__dict__", {}).get("load_tests")) is not None:
            return name
    return ""


def install() -> None:
    """Record every result of this process, if the host has opened a channel for it."""
    send = open_channel()
    if send is None:
        return
    send(event="begun")
    trying: list[bool] = []
    reported: list[str] = []
    foreign: list[str] = []
    parts = KnownFunctions()
    tests = KnownTests(parts.is_allowed)
    executed, traced_by, forged_by = Executed(), set[str](), set[str]()
    comparison = CodeComparison(executed)
    install_audit_hook(executed, traced_by, forged_by)
    kinds: dict[type, bool] = {}

    def report_change(what: str) -> None:
        if what and not reported:
            reported.append(what)
            send(event="changed", what=what)

    def check() -> None:
        report_change(parts.changed() or next(filter(None, (parts.foreign_function(*late) for late in LATE)), ""))

    def wrap_result_method(name: str, outcome: str) -> None:
        honest: Any = getattr(TestResult, name)

        def add(self: Any, test: Any, *more: Any) -> Any:
            if not trying and hasattr(test, "id"):
                check()
                # Result classes without addSkip count skipped tests as successes.
                if name == "addSuccess" and hasattr(self, "addSkip") and _swallowed(test):
                    report_change(f"what came of {test.id()}")
                method = getattr(test, "_testMethodName", "")
                report_change(comparison.changed(test) or comparison.binding_changed_for(type(test), None, method))
                report_change(comparison.strange_method(test))
                send(event="test", id=test.id(), when="call", outcome=outcome)
            return honest(self, test, *more)

        setattr(TestResult, name, add)

    for name, outcome in _WORDS.items():
        wrap_result_method(name, outcome)
    honest_listeners = _listeners()
    honest_part: Any = TestResult.addSubTest
    honest_stop: Any = TestResult.stopTestRun
    honest_collect: Any = BaseTestSuite.addTest
    honest_start: Any = TestResult.startTest

    def start(self: Any, test: Any) -> Any:
        if not trying and isinstance(test, unittest.TestCase):
            try:
                compare(test)
            except Exception as problem:  # noqa: BLE001 -- what cannot be compared does not end the run
                send(event="uncompared", id=test.id(), why=f"{type(problem).__name__}: {problem}")
        return honest_start(self, test)

    def compare(test: Any) -> None:
        if not kinds.setdefault(type(test), False):
            new = [kind for kind, is_known in kinds.items() if not is_known]
            kinds.update(dict.fromkeys(new, True))
            modules = test_modules([module for kind in new for module in modules_of(kind)])
            report_change(comparison.prepare(modules, lambda module: False))
        method = getattr(test, "_testMethodName", "")
        changed, why = comparison.register_test(test, type(test), method, getattr(type(test), method, None))
        report_change(changed or comparison.strange_method(test))
        if why:
            send(event="uncompared", id=test.id(), why=why)

    def add_part(self: Any, test: Any, subtest: Any, error: Any) -> Any:
        if error is not None and not trying:
            send(event="test", id=test.id(), when="call", outcome="failed")
        return honest_part(self, test, subtest, error)

    def collect(self: Any, test: Any) -> Any:
        method = getattr(test, "_testMethodName", None)
        if isinstance(test, unittest.TestCase) and method is not None:
            tests.add(type(test), method, getattr(type(test), method, None))
            kinds.setdefault(type(test), False)
            if _is_foreign(type(test), method):
                foreign.append(test.id())
        return honest_collect(self, test)

    def stop(self: Any) -> Any:
        check()
        changed = tests.changed()
        report_change(changed and f"the test {changed}")
        report_change(comparison.anything_changed())
        report_change(f"the file that code made by {min(forged_by)} is from" if forged_by else "")
        if replaced := next(filter(None, (parts.foreign_function(*each) for each in LOOPS)), ""):
            send(event="uncompared", id="", why=f"{replaced} was replaced")
        for file in sorted(traced_by):
            send(event="tracer", file=file)
        loader = foreign and _loads_tests()
        report_change(loader and f"{foreign[0]}, which load_tests of {loader} gave,")
        trying.append(True)
        failed = _all_fail()
        trying.clear()
        send(event="canary", failed=failed and _listeners() == honest_listeners)
        send(event="finished")
        return honest_stop(self)

    patched: Any = TestResult
    patched.addSubTest, patched.stopTestRun, patched.startTest = add_part, stop, start
    patched = BaseTestSuite
    patched.addTest = collect
    for name in ("case", "result", "suite", "runner", "loader", "main"):
        parts.add_module(sys.modules["unittest." + name])
    parts.add_builtins()
