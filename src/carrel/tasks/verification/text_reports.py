"""Read the text that `go test -json`, `cargo test`, TAP runners and unittest print."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal

from carrel.errors import ReportUnreadable
from carrel.tasks.verification.test_cases import Status, TestCase

TextKind = Literal["go", "cargo", "tap", "unittest"]

PACKAGE = "(package)"
"""What a package of Go's is called that failed as a whole."""

_GO_UNBUILT = re.compile(r"^FAIL\s+(\S+) \[((?:build|setup) failed)\]$")
"""Before Go 1.24 this is no JSON, but a line among it."""
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
    """Which of these a command printed; `exit_code` for none of them.

    The code under test prints too, and may print what another runner would have: where it looks like several, the one
    that the command runs counts. ReportUnreadable when that cannot be told."""
    found = [kind for kind, looks in _LOOKS.items() if re.search(looks, text, re.MULTILINE)]
    if len(found) < 2:
        return found[0] if found else "exit_code"
    run = [kind for kind in found if re.search(_COMMANDS[kind], command)]
    if len(run) != 1:
        raise ReportUnreadable(f"the output looks like {' and '.join(found)}; say in verify.report which it is")
    return run[0]


def go_cases(text: str) -> list[TestCase]:
    """`go test -json`: a package that fails without a failed test (it did not build) is told as a test of its own.

    Refused when a test ends that had not begun, or ends twice, or when a package passes in which a test failed."""
    said: dict[tuple[str, str], list[str]] = {}
    ended: dict[tuple[str, str], tuple[str, float]] = {}
    begun: dict[tuple[str, str], None] = {}
    running: set[tuple[str, str]] = set()
    for line in text.splitlines():
        event = _event(line)
        if event is None:
            if unbuilt := _GO_UNBUILT.match(line):
                key = (unbuilt[1], "")
                begun[key], ended[key] = None, ("fail", 0.0)
                said.setdefault(key, []).append(unbuilt[2])
            continue
        key = (str(event.get("Package", "")), str(event.get("Test", "")))
        match event.get("Action"):
            case "run":
                begun[key] = None
                running.add(key)
            case "output":
                said.setdefault(key, []).append(str(event.get("Output", "")))
            case "pass" | "fail" | "skip" as action:
                if key[1] and key not in running:
                    raise ReportUnreadable(f"go's report tells of the end of {'::'.join(key)}, and it was not running")
                running.discard(key)
                begun[key] = None
                # One that failed once has failed, whatever is said of it later.
                if ended.get(key, ("",))[0] != "fail":
                    ended[key] = (action, _seconds(event.get("Elapsed")))
    words: dict[str, Status] = {"pass": "passed", "fail": "failed", "skip": "skipped"}
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
        message = "".join(said.get((package, test), [])) if how != "pass" else ""
        if (package, test) not in ended:
            message += "the test began and never ended\n"
        found.append(TestCase(package, test or PACKAGE, words[how], message.strip(), seconds))
    return found


def _seconds(given: object) -> float:
    return float(given) if isinstance(given, int | float) else 0.0


def _event(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def cargo_cases(text: str) -> list[TestCase]:
    """The text of `cargo test`; a suite whose numbers are not those of its lines is refused, and so is a test twice."""
    found: list[TestCase] = []
    suite, since = "", 0
    planned: int | None = None
    messages = _cargo_messages(text)
    words: dict[str, Status] = {"ok": "passed", "FAILED": "failed", "ignored": "skipped"}
    for line in text.splitlines():
        if told := _CARGO_SUITE.match(line):
            suite = told[1]
        elif told := _CARGO_BEGIN.match(line):
            if planned is not None:
                raise ReportUnreadable(f"cargo's tests of {suite or 'a suite'} began twice")
            planned = int(told[1])
        elif told := _CARGO_TEST.match(line):
            name = told[1].removesuffix(" - should panic")
            found.append(TestCase(suite, name, words[told[2]], told[3] or messages.get(told[1], "")))
        elif told := _CARGO_RESULT.match(line):
            _refuse_odd_suite(found[since:], planned, told)
            since, planned = len(found), None
    if found[since:] or planned:
        raise ReportUnreadable(f"cargo's tests of {suite or 'a suite'} end without a summary: they were cut off")
    return found


def _refuse_odd_suite(cases: list[TestCase], planned: int | None, told: re.Match[str]) -> None:
    counted = [sum(case.status == status for case in cases) for status in ("passed", "failed", "skipped")]
    said = [int(told[2]), int(told[3]), int(told[4])]
    if counted != said or planned not in (None, sum(said)) or (told[1] == "ok") != (said[1] == 0):
        raise ReportUnreadable(f"cargo's summary is not what its lines say: {told[0]}")
    if len({case.name for case in cases}) < len(cases):
        raise ReportUnreadable(f"cargo tells of a test twice in one suite: {told[0]}")


def _cargo_messages(text: str) -> dict[str, str]:
    messages: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if told := _CARGO_FAILURE.match(line):
            current = messages.setdefault(told[1], [])
        elif line in ("failures:", "") and current is not None and (not current or line == "failures:"):
            current = None if line == "failures:" else current
        elif current is not None:
            current.append(line)
    return {name: "\n".join(lines).strip() for name, lines in messages.items()}


def tap_cases(text: str) -> list[TestCase]:
    """TAP 12 to 14 with subtests; a subtest's own points are told under its name, and it only where it has none.

    Refused when the outer plan is missing or another number of points came: somebody stopped early, or spoke too much.
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
        if told := _TAP_PLAN.match(line):
            if not told[1]:
                plans.append(int(told[2]))
        elif told := _TAP_SUBTEST.match(line):
            indent = len(told[1])
            parents = [(depth, name) for depth, name in parents if depth < indent]
            parents.append((indent, told[2].strip()))
        elif (told := _TAP_POINT.match(line)) and told["what"] is not None:
            indent = len(told["in"])
            if indent % 4:
                continue
            points += indent == 0
            if indent == 0 and told["number"] is not None and int(told["number"]) != points:
                raise ReportUnreadable(f"the TAP has {line.strip()!r} where number {points} was to come")
            what = told["what"].strip() or f"test {told['number'] or points}"
            above = tuple(name for depth, name in parents if depth < indent)
            parents = [(depth, name) for depth, name in parents if depth < indent]
            if above:
                had_children.add(above)
            if (*above, what) in had_children and not told["not"]:
                continue
            found.append(_tap_told(told, above, what, lines, number))
    if len(plans) != 1 or plans[0] != points:
        raise ReportUnreadable(f"the TAP plan says {plans or 'nothing'}, and {points} tests were told of")
    return [case for case in found if not _only_sums_up(case, had_children, found)]


def _only_sums_up(case: TestCase, had_children: set[tuple[str, ...]], found: list[TestCase]) -> bool:
    """A failed subtest whose own points tell why."""
    path = (*(case.classname.split(" > ") if case.classname else ()), case.name)
    if path not in had_children:
        return False
    inside = " > ".join(path)
    return any(
        other.status == "failed" and (other.classname == inside or other.classname.startswith(f"{inside} > "))
        for other in found
    )


def _tap_told(told: re.Match[str], above: tuple[str, ...], what: str, lines: list[str], number: int) -> TestCase:
    mark = (told["mark"] or "").upper()
    status: Status = "skipped" if mark else "failed" if told["not"] else "passed"
    message = (told["why"] or "").strip() if mark else _tap_details(lines, number) if told["not"] else ""
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


_BEGINS = re.compile(r"^(?P<name>[\w.]+) \((?P<place>[\w.<>-]+)\)(?: \.\.\. ?(?P<rest>.*))?$")
_ENDS = re.compile(r"^(?:.*\.\.\. )?(?P<word>ok|FAIL|ERROR|expected failure|unexpected success|skipped (?P<why>.+))$")
_RAN = re.compile(r"^Ran (\d+) tests? in [\d.]+s$")
_FAULT = re.compile(r"^(?:FAIL|ERROR): (?P<name>[\w.]+) \((?P<place>[\w.<>-]+)\)")
_DOUBLE, _SINGLE = "=" * 70, "-" * 70
_LONGEST = 4000
_NO_TESTS = ("setUpClass", "tearDownClass", "setUpModule", "tearDownModule")
"""Told of when they fail, and not counted; the tests they stand before did not run."""

Key = tuple[str, str]


def unittest_cases(text: str) -> list[TestCase]:
    """ReportUnreadable where it was cut off, or tells of another number of tests than it says were run."""
    lines = text.splitlines()
    ran = next((match for line in reversed(lines) if (match := _RAN.match(line))), None)
    if ran is None:
        raise ReportUnreadable("unittest did not finish: there is no line `Ran … tests in …s`")
    faults = dict(_faults(lines))
    found = list(_told(lines, faults))
    if len(found) != int(ran[1]):
        raise ReportUnreadable(f"unittest says that {ran[1]} tests ran, and tells of {len(found)}")
    return found


def _told(lines: list[str], faults: dict[Key, str]) -> Iterator[TestCase]:
    test: Key | None = None
    for line in lines:
        if line in (_DOUBLE, _SINGLE):
            break
        begins = _BEGINS.match(line)
        if begins is not None and begins["name"] not in _NO_TESTS:
            if test is not None:
                yield _without_ending(test, faults)
            test = _key(begins)
        # What the tests themselves print may stand before the word, and the word alone on a line of its own.
        ends = _ENDS.match(line)
        if test is not None and ends is not None:
            yield _with_ending(test, ends, faults)
            test = None
    if test is not None:
        yield _without_ending(test, faults)


def _with_ending(test: Key, ends: re.Match[str], faults: dict[Key, str]) -> TestCase:
    status: Status
    if ends["why"] is not None or ends["word"] == "expected failure":
        status, message = "skipped", (ends["why"] or ends["word"]).strip("'\"")
    elif ends["word"] == "ok":
        # With a fault of the same name, one of its parts or its clean-up failed after all.
        status, message = ("failed", faults[test]) if test in faults else ("passed", "")
    else:
        status, message = "failed", faults.get(test, ends["word"])
    return TestCase(*test, status, message)


def _without_ending(test: Key, faults: dict[Key, str]) -> TestCase:
    if test not in faults:
        raise ReportUnreadable(f"unittest does not say how {test[1]} ended")
    return TestCase(*test, "failed", faults[test])


def _key(match: re.Match[str]) -> Key:
    """Since Python 3.11 the name is told again at the end of the place."""
    return match["place"].removesuffix(f".{match['name']}"), match["name"]


def _faults(lines: list[str]) -> Iterator[tuple[Key, str]]:
    """The traceback of each test that failed, the end of it where it is long."""
    for number, line in enumerate(lines[:-1]):
        named = _FAULT.match(lines[number + 1]) if line == _DOUBLE else None
        if named is None:
            continue
        begin = next((place for place in range(number + 2, len(lines)) if lines[place] == _SINGLE), number + 2) + 1
        end = next((place for place in range(begin, len(lines)) if lines[place] in (_DOUBLE, _SINGLE)), len(lines))
        yield _key(named), "\n".join(lines[begin:end]).strip()[-_LONGEST:]
