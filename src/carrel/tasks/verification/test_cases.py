"""The tests of a report, and how the names in a sample's lists match them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class TestCase:
    """One test in a report."""

    __test__ = False

    classname: str
    """The file, class, package or group that it is in; what each runner calls so."""
    name: str
    status: Status
    message: str = ""
    seconds: float = 0.0

    @property
    def whole_name(self) -> str:
        return f"{self.classname}::{self.name}" if self.classname else self.name


class ReportedTests:
    """The tests of a report, found by any of the names that API and runners use for them."""

    def __init__(self, cases: Sequence[TestCase]) -> None:
        self._by_name: dict[str, list[TestCase]] = defaultdict(list)
        self._by_bare: dict[str, list[TestCase]] = defaultdict(list)
        self._by_family: dict[str, list[TestCase]] = defaultdict(list)
        for case in cases:
            for name in _names_of(case):
                self._by_name[name].append(case)
            self._by_bare[case.name].append(case)
            head, parameters = _split(case.name)
            if parameters:
                for name in _names_of(TestCase(case.classname, head, case.status)):
                    self._by_family[name].append(case)

    def find(self, wanted: str) -> list[TestCase]:
        """The tests that this name means; more than one when they share it, none when it did not run.

        In this order: the whole name; the bare name where only one test has it; the name without its parameters, which
        stands for all of them.
        """
        wanted = wanted.strip()
        for table in (self._by_name, self._by_family):
            found = table.get(wanted) or table.get(_dotted(wanted))
            if found:
                return found
            unique = self._by_bare.get(wanted, [])
            if table is self._by_name and len(unique) == 1:
                return unique
        return []


def _names_of(case: TestCase) -> Iterable[str]:
    if not case.classname:
        return {case.name, _dotted(case.name)}
    return {
        f"{case.classname}::{case.name}",
        f"{case.classname}.{case.name}",
        _dotted(f"{case.classname}::{case.name}"),
    }


def _dotted(name: str) -> str:
    """A node id as pytest's report has it: `tests.test_a.TestX.test_y[1]` for `tests/test_a.py::TestX::test_y[1]`."""
    head, parameters = _split(name)
    file, *rest = head.split("::")
    if rest:
        file = file.removesuffix(".py").replace("/", ".").lstrip(".")
    return ".".join([file, *rest]) + parameters


def _split(name: str) -> tuple[str, str]:
    """The parameters of a test, which may hold anything, are from the first bracket on."""
    cut = name.find("[")
    return (name, "") if cut < 0 or not name.endswith("]") else (name[:cut], name[cut:])
