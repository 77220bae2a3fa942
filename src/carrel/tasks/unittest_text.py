"""Pure: what `python -m unittest -v` prints (and Django's test runner), as the tests it tells of."""

import re
from collections.abc import Iterator

from carrel.errors import ReportUnreadable
from carrel.tasks.told import Status, Told

_BEGINS = re.compile(r"^(?P<name>[\w.]+) \((?P<place>[\w.<>-]+)\)(?: \.\.\. ?(?P<rest>.*))?$")
_ENDS = re.compile(r"^(?:.*\.\.\. )?(?P<word>ok|FAIL|ERROR|expected failure|unexpected success|skipped (?P<why>.+))$")
_RAN = re.compile(r"^Ran (\d+) tests? in [\d.]+s$")
_FAULT = re.compile(r"^(?:FAIL|ERROR): (?P<name>[\w.]+) \((?P<place>[\w.<>-]+)\)")
_DOUBLE, _SINGLE = "=" * 70, "-" * 70
_LONGEST = 4000
_NO_TESTS = ("setUpClass", "tearDownClass", "setUpModule", "tearDownModule")
"""Told of when they fail, and not counted; the tests they stand before did not run."""

Key = tuple[str, str]


def parsed(text: str) -> list[Told]:
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


def _told(lines: list[str], faults: dict[Key, str]) -> Iterator[Told]:
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


def _with_ending(test: Key, ends: re.Match[str], faults: dict[Key, str]) -> Told:
    status: Status
    if ends["why"] is not None or ends["word"] == "expected failure":
        status, message = "skipped", (ends["why"] or ends["word"]).strip("'\"")
    elif ends["word"] == "ok":
        # With a fault of the same name, one of its parts or its clean-up failed after all.
        status, message = ("failed", faults[test]) if test in faults else ("passed", "")
    else:
        status, message = "failed", faults.get(test, ends["word"])
    return Told(*test, status, message)


def _without_ending(test: Key, faults: dict[Key, str]) -> Told:
    if test not in faults:
        raise ReportUnreadable(f"unittest does not say how {test[1]} ended")
    return Told(*test, "failed", faults[test])


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
