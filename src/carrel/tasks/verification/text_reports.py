"""Read the text that `go test -json`, `cargo test`, TAP runners and unittest print."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal

from carrel.errors import ReportUnreadable
from carrel.tasks.verification.verdict import Status, TestCase

TextKind = Literal["go", "cargo", "tap", "unittest"]

PACKAGE = "(package)"
"""The name of the test that stands for a Go package that failed as a whole."""

_GO_UNBUILT = re.compile(r"^FAIL\s+(\S+) \[((?:build|setup) failed)\]$")
"""Before Go 1.24 this is a line of plain text between the JSON."""
_CARGO_SUITE = re.compile(r"^\s+(?:Running|Doc-tests) (.+?)(?: \(.*\))?$")
_CARGO_TEST = re.compile(r"^test (.+?) \.\.\. (ok|FAILED|ignored)(?:, (.*))?$")
_CARGO_FAILURE = re.compile(r"^---- (.+) stdout ----$")
_CARGO_RESULT = re.compile(r"^test result: (ok|FAILED)\. (\d+) passed; (\d+) failed; (\d+) ignored")
_CARGO_BEGIN = re.compile(r"^running (\d+) tests?$")
_TAP_POINT = re.compile(
    r"^(?P<in> *)(?P<not>not )?ok\b(?: (?P<number>\d+))?(?: -)? ?(?P<what>.*?)"
    r"(?: # ?(?P<mark>SKIP|TODO)\S*(?P<why>.*))?$",
    re.IGNORECASE,
)
_TAP_PLAN = re.compile(r"^( *)1\.\.(\d+)(?: *#.*)?$")
_TAP_SUBTEST = re.compile(r"^( *)# Subtest: (.*)$")


_LOOKS: dict[TextKind, str] = {
    "go": r'^\{.*"Action":"(run|pass|fail|skip|output|start)"',
    "cargo": rf"^running \d+ tests?$|{_CARGO_RESULT.pattern}",
    "tap": r"^TAP version 1[34]$|^1\.\.\d+",
    "unittest": r"^Ran \d+ tests? in [\d.]+s$",
}
_COMMANDS: dict[TextKind, str] = {
    "go": r"\bgo\b.*\btest\b.*-json\b|\btest2json\b",
    "cargo": r"\bcargo\b",
    "tap": r"\bnode\b.*--test\b|\btap\b|\btape\b|\bbats\b|\bprove\b",
    "unittest": r"-m\s+unittest\b",
}


def looks_like(text: str, command: str = "") -> TextKind | Literal["exit_code"]:
    """The kind of report that a command printed; `exit_code` for none.

    The code under test prints too, and may print what another runner would print: when the text looks like several
    kinds, the runner in the command decides. ReportUnreadable when that does not help either."""
    found = [kind for kind, looks in _LOOKS.items() if re.search(looks, text, re.MULTILINE)]
    if len(found) < 2:
        return found[0] if found else "exit_code"
    run = [kind for kind in found if re.search(_COMMANDS[kind], command)]
    if len(run) != 1:
        raise ReportUnreadable(f"the output looks like {' and '.join(found)}; say in verify.report which it is")
    return run[0]


def go_cases(text: str) -> list[TestCase]:
    """Read the output of `go test -json`; a package that fails without a failed test (it did not build) becomes a test.

    ReportUnreadable when a test ends that had not started, or ends twice, or when a package with a failed test passes.
    """
    output: dict[tuple[str, str], list[str]] = {}
    ended: dict[tuple[str, str], tuple[str, float]] = {}
    begun: dict[tuple[str, str], None] = {}
    running: set[tuple[str, str]] = set()
    for line in text.splitlines():
        event = _event(line)
        if event is None:
            if unbuilt := _GO_UNBUILT.match(line):
                key = (unbuilt[1], "")
                begun[key], ended[key] = None, ("fail", 0.0)
                output.setdefault(key, []).append(unbuilt[2])
            continue
        key = (str(event.get("Package", "")), str(event.get("Test", "")))
        match event.get("Action"):
            case "run":
                begun[key] = None
                running.add(key)
            case "output":
                output.setdefault(key, []).append(str(event.get("Output", "")))
            case "pass" | "fail" | "skip" as action:
                if key[1] and key not in running:
                    raise ReportUnreadable(f"go's report has the end of {'::'.join(key)}, which was not running")
                running.discard(key)
                begun[key] = None
                # A test that failed once has failed, whatever is reported later.
                if ended.get(key, ("",))[0] != "fail":
                    ended[key] = (action, _seconds(event.get("Elapsed")))
    statuses: dict[str, Status] = {"pass": "passed", "fail": "failed", "skip": "skipped"}
    how: str
    failed_in = {package for (package, test), (action, _) in ended.items() if test and action == "fail"}
    for package in failed_in:
        if ended.get((package, ""), ("fail",))[0] != "fail":
            raise ReportUnreadable(f"go's report says that {package} passed, and that a test in it failed")
    found = []
    for package, test in begun:
        how, seconds = ended.get((package, test), ("fail", 0.0))
        if not test and (how != "fail" or package in failed_in):
            continue
        message = "".join(output.get((package, test), [])) if how != "pass" else ""
        if (package, test) not in ended:
            message += "the test began and never ended\n"
        found.append(TestCase(package, test or PACKAGE, statuses[how], message.strip(), seconds))
    return found


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _event(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def cargo_cases(text: str) -> list[TestCase]:
    """Read the output of `cargo test`.

    ReportUnreadable when the counts of a suite differ from its lines, or a test is there twice."""
    found: list[TestCase] = []
    suite, since = "", 0
    planned: int | None = None
    messages = _cargo_messages(text)
    statuses: dict[str, Status] = {"ok": "passed", "FAILED": "failed", "ignored": "skipped"}
    for line in text.splitlines():
        if header := _CARGO_SUITE.match(line):
            suite = header[1]
        elif begin := _CARGO_BEGIN.match(line):
            if planned is not None:
                raise ReportUnreadable(f"cargo's tests of {suite or 'a suite'} began twice")
            planned = int(begin[1])
        elif found_test := _CARGO_TEST.match(line):
            name = found_test[1].removesuffix(" - should panic")
            found.append(
                TestCase(suite, name, statuses[found_test[2]], found_test[3] or messages.get(found_test[1], ""))
            )
        elif summary := _CARGO_RESULT.match(line):
            _check_suite(found[since:], planned, summary)
            since, planned = len(found), None
    if found[since:] or planned:
        raise ReportUnreadable(f"cargo's tests of {suite or 'a suite'} end without a summary: they were cut off")
    return found


def _check_suite(cases: list[TestCase], planned: int | None, summary: re.Match[str]) -> None:
    counted = [sum(case.status == status for case in cases) for status in ("passed", "failed", "skipped")]
    reported = [int(summary[2]), int(summary[3]), int(summary[4])]
    if counted != reported or planned not in (None, sum(reported)) or (summary[1] == "ok") != (reported[1] == 0):
        raise ReportUnreadable(f"cargo's summary differs from its lines: {summary[0]}")
    if len({case.name for case in cases}) < len(cases):
        raise ReportUnreadable(f"cargo reports a test twice in one suite: {summary[0]}")


def _cargo_messages(text: str) -> dict[str, str]:
    messages: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if failure := _CARGO_FAILURE.match(line):
            current = messages.setdefault(failure[1], [])
        elif line in ("failures:", "") and current is not None and (not current or line == "failures:"):
            current = None if line == "failures:" else current
        elif current is not None:
            current.append(line)
    return {name: "\n".join(lines).strip() for name, lines in messages.items()}


def tap_cases(text: str) -> list[TestCase]:
    """Read TAP 12 to 14 with subtests; the points of a subtest are in a group with its name.

    ReportUnreadable when the outer plan is missing or differs from the number of points.
    """
    lines = text.splitlines()
    found: list[TestCase] = []
    parents: list[tuple[int, str]] = []
    plans: list[int] = []
    points = 0
    had_children: set[tuple[str, ...]] = set()
    for number, line in enumerate(lines):
        if line.startswith("Bail out!"):
            raise ReportUnreadable(f"the tests gave up: {line}")
        if plan := _TAP_PLAN.match(line):
            if not plan[1]:
                plans.append(int(plan[2]))
        elif subtest := _TAP_SUBTEST.match(line):
            indent = len(subtest[1])
            parents = [(depth, name) for depth, name in parents if depth < indent]
            parents.append((indent, subtest[2].strip()))
        elif (point := _TAP_POINT.match(line)) and point["what"] is not None:
            indent = len(point["in"])
            if indent % 4:
                continue
            points += indent == 0
            if indent == 0 and point["number"] is not None and int(point["number"]) != points:
                raise ReportUnreadable(f"the TAP has {line.strip()!r} instead of number {points}")
            what = point["what"].strip() or f"test {point['number'] or points}"
            above = tuple(name for depth, name in parents if depth < indent)
            parents = [(depth, name) for depth, name in parents if depth < indent]
            if above:
                had_children.add(above)
            if (*above, what) in had_children and not point["not"]:
                continue
            found.append(_tap_case(point, above, what, lines, number))
    if len(plans) != 1 or plans[0] != points:
        raise ReportUnreadable(f"the TAP plan has {plans or 'nothing'}, and {points} tests were reported")
    return [case for case in found if not _only_sums_up(case, had_children, found)]


def _only_sums_up(case: TestCase, had_children: set[tuple[str, ...]], found: list[TestCase]) -> bool:
    """Whether this is a failed subtest with a failed point, which says more."""
    path = (*(case.classname.split(" > ") if case.classname else ()), case.name)
    if path not in had_children:
        return False
    inside = " > ".join(path)
    return any(
        other.status == "failed" and (other.classname == inside or other.classname.startswith(f"{inside} > "))
        for other in found
    )


def _tap_case(point: re.Match[str], above: tuple[str, ...], what: str, lines: list[str], number: int) -> TestCase:
    mark = (point["mark"] or "").upper()
    status: Status = "skipped" if mark else "failed" if point["not"] else "passed"
    message = (point["why"] or "").strip() if mark else _tap_details(lines, number) if point["not"] else ""
    return TestCase(" > ".join(above), what.replace("\\#", "#"), status, message)


def _tap_details(lines: list[str], number: int) -> str:
    """The YAML block or the comments under a failed point."""
    kept: list[str] = []
    for line in lines[number + 1 :]:
        text = line.strip()
        inside = bool(kept) and kept[0] == "---"
        if text == "..." and inside:
            break
        if not inside and not text.startswith("#") and text != "---":
            break
        kept.append(text)
    return "\n".join(line.lstrip("# ") for line in kept if line != "---")


_TEST_BEGINS = re.compile(r"^(?P<name>[\w.]+) \((?P<owner>[\w.<>-]+)\)(?: \.\.\. ?(?P<rest>.*))?$")
_TEST_ENDS = re.compile(
    r"^(?:.*\.\.\. )?(?P<word>ok|FAIL|ERROR|expected failure|unexpected success|skipped (?P<why>.+))$"
)
_RAN = re.compile(r"^Ran (\d+) tests? in [\d.]+s$")
_FAILURE = re.compile(r"^(?:FAIL|ERROR): (?P<name>[\w.]+) \((?P<owner>[\w.<>-]+)\)")
_DOUBLE, _SINGLE = "=" * 70, "-" * 70
_MAX_TRACEBACK = 4000
_FIXTURES = ("setUpClass", "tearDownClass", "setUpModule", "tearDownModule")
"""Reported when they fail, but not counted; the tests after them did not run."""

Key = tuple[str, str]


def unittest_cases(text: str) -> list[TestCase]:
    """Read the output of `python -m unittest -v`; ReportUnreadable when it is incomplete or miscounts its tests."""
    lines = text.splitlines()
    ran = next((match for line in reversed(lines) if (match := _RAN.match(line))), None)
    if ran is None:
        raise ReportUnreadable("unittest did not finish: there is no line `Ran … tests in …s`")
    failures = dict(_failures(lines))
    found = list(_unittest_cases(lines, failures))
    if len(found) != int(ran[1]):
        raise ReportUnreadable(f"unittest says that {ran[1]} tests ran, and reports {len(found)}")
    return found


def _unittest_cases(lines: list[str], failures: dict[Key, str]) -> Iterator[TestCase]:
    test: Key | None = None
    for line in lines:
        if line in (_DOUBLE, _SINGLE):
            break
        begins = _TEST_BEGINS.match(line)
        if begins is not None and begins["name"] not in _FIXTURES:
            if test is not None:
                yield _without_ending(test, failures)
            test = _key(begins)
        # Output of the tests themselves may precede the outcome, which may also be on a line of its own.
        ends = _TEST_ENDS.match(line)
        if test is not None and ends is not None:
            yield _with_ending(test, ends, failures)
            test = None
    if test is not None:
        yield _without_ending(test, failures)


def _with_ending(test: Key, ends: re.Match[str], failures: dict[Key, str]) -> TestCase:
    status: Status
    if ends["why"] is not None or ends["word"] == "expected failure":
        status, message = "skipped", (ends["why"] or ends["word"]).strip("'\"")
    elif ends["word"] == "ok":
        # With a failure of the same name, one of its subtests or its clean-up failed.
        status, message = ("failed", failures[test]) if test in failures else ("passed", "")
    else:
        status, message = "failed", failures.get(test, ends["word"])
    return TestCase(*test, status, message)


def _without_ending(test: Key, failures: dict[Key, str]) -> TestCase:
    if test not in failures:
        raise ReportUnreadable(f"unittest does not say how {test[1]} ended")
    return TestCase(*test, "failed", failures[test])


def _key(match: re.Match[str]) -> Key:
    """Since Python 3.11 the class is followed by the name of the test once more."""
    return match["owner"].removesuffix(f".{match['name']}"), match["name"]


def _failures(lines: list[str]) -> Iterator[tuple[Key, str]]:
    """The traceback of each failed test; of a long one the end."""
    for number, line in enumerate(lines[:-1]):
        named = _FAILURE.match(lines[number + 1]) if line == _DOUBLE else None
        if named is None:
            continue
        begin = next((at for at in range(number + 2, len(lines)) if lines[at] == _SINGLE), number + 2) + 1
        end = next((at for at in range(begin, len(lines)) if lines[at] in (_DOUBLE, _SINGLE)), len(lines))
        yield _key(named), "\n".join(lines[begin:end]).strip()[-_MAX_TRACEBACK:]
