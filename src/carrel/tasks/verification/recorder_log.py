"""The recorders in the test runner: how a test command gets them, and what they recorded."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from carrel.execution.config import Mount
from carrel.execution.executor import Executor
from carrel.tasks.sample import Sample
from carrel.tasks.verification.protected_files import touched_by
from carrel.tasks.verification.test_cases import ReportedTests, Status, TestCase

FOLDER = Path(__file__).parents[1] / "recorder"
AT = "/opt/carrel-recorder"
_BASE_AT, _PATCHED_AT, _MANIFEST = "/opt/carrel-files", "/opt/carrel-patched", "carrel-files.json"
MODULES = frozenset(file.stem for file in FOLDER.glob("*.py"))
_OUT = 9
"""The descriptor by which recorders write to standard error as it was when the command began."""
_BY_NAME = r"\bcargo\s+(\+\S+\s+)?(test|t)\b|\bgo\s+test\b|\bnode\s[^;&|]*--test(?=\s|$)"
_ITS_OWN_WAY = r"\b(GOFLAGS|NODE_OPTIONS|CARGO_\w+)=|\s-{1,2}exec\b|\s--target\b|\bcargo\b[^;&|]*\s--config\b"


def wanted(sample: Sample) -> bool:
    """Whether the test command gets recorders. Which of them finds its runner is not known before it runs."""
    return sample.verifier == "test_suite" and sample.verify.recorder != "off"


def must_speak(sample: Sample) -> bool:
    """Whether a run in which no such program was seen was none: the command names the runner, and leaves us our way."""
    command = sample.verify.command
    own_way = re.search(_ITS_OWN_WAY, command) or "CARGO_BUILD_TARGET" in sample.environment.env
    return wanted(sample) and re.search(_BY_NAME, command) is not None and not own_way


def mounts(sample: Sample, files: Path, base: Path) -> tuple[Mount, ...]:
    """The recorders and the sample's own files: `base`, and in `files` those that its test patch changes."""
    if not wanted(sample):
        return ()
    return (Mount(source=FOLDER, at=AT), Mount(source=files, at=_PATCHED_AT), Mount(source=base, at=_BASE_AT))


async def show_files(place: Executor, sample: Sample, folder: Path, base: Path, theirs: Iterable[str]) -> str:
    """Put what the recorders compare tests with into `folder`. Returns where in the place they read of it."""
    if not wanted(sample):
        return ""
    inside = "filesystem_isolation" in place.supported_capabilities()
    for path in touched_by(sample.test_patch):
        if path.endswith(".py") and (await place.exec(["test", "-f", path], timeout=60)).success:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(await place.read_file(path))
    told: dict[str, object] = {"workdir": (await place.exec(["pwd", "-P"], timeout=60)).stdout.strip()}
    told |= {"base": _BASE_AT if inside else str(base), "patched": _PATCHED_AT if inside else str(folder)}
    (folder / _MANIFEST).write_text(json.dumps({**told, "theirs": sorted(theirs)}), encoding="utf-8")
    return f"{_PATCHED_AT if inside else folder}/{_MANIFEST}"


def recorded(command: str, at: str) -> str:
    """The command, in which neither a PYTHONPATH of its own hides the recorders nor a `2>` what they write."""
    return f"exec {_OUT}>&2\n" + re.sub(r"\bPYTHONPATH=(?=[^\s;&|])", f"PYTHONPATH={at}:", command)


def variables(sample: Sample, secret: str, notes: str, at: str, files: str = "") -> dict[str, str]:
    """`secret` is a file with the word by which Python's recorders speak, `notes` one that the others write to, and
    `files` says where the sample's own files are."""
    given, run = sample.environment.env, f"{at}/carrel_test_program.py"
    machine = platform.machine().upper()
    return {
        "CARREL_RECORDER": secret,
        "PYTHONPATH": ":".join([at, *filter(None, [given.get("PYTHONPATH", "")])]),
        "CARREL_RECORDER_FILES": files,
        "CARREL_RECORDER_NOTES": notes,
        "NODE_OPTIONS": f"{given.get('NODE_OPTIONS', '')} --require={at}/carrel_node.cjs".strip(),
        "GOFLAGS": f"{given.get('GOFLAGS', '')} -exec={run}".strip(),
        f"CARGO_TARGET_{machine}_UNKNOWN_LINUX_GNU_RUNNER": run,
        f"CARGO_TARGET_{machine}_UNKNOWN_LINUX_MUSL_RUNNER": run,
    }


_DOCUMENTATION = re.compile(r"\S - .*\(line \d+\)( - compile( fail)?)?$")


@dataclass
class RecorderLog:
    """One run of the tests as it was seen from inside."""

    __test__ = False

    begun: bool = False
    finished: bool = False
    canary_failed: bool | None = None
    """Whether a test that must fail did; None where that was not tried."""
    problem: str = ""
    cases: list[TestCase] = field(default_factory=list)
    names_tests: bool = True
    """Whether each test that ended is among the cases; some witnesses only know that all did."""
    programs: list[str] = field(default_factory=list)
    """The test programs that were seen."""
    unable: bool = False
    """Whether a witness said that it cannot see anything here."""
    uncompared: dict[str, str] = field(default_factory=dict)
    """Tests that could not be compared with the sample's files, and why; "" stands for all of them."""
    tracers: list[str] = field(default_factory=list)
    """Files that installed a tracer or a profiler while the tests ran."""


def split_recorder_lines(text: str, word: str) -> tuple[list[str], str]:
    """The whole lines of the witness in a piece of output, and the end of it, in which another may have begun."""
    begin, found, at = f"\n{word} ", [], 0
    while (start := text.find(begin, at)) >= 0 and (end := text.find("\n", start + len(begin))) >= 0:
        found.append(text[start : end + 1])
        at = end + 1
    return found, text[start:] if start >= 0 else text[max(at, len(text) - len(begin)) :]


def parse_lines(stderr: str, word: str) -> tuple[str, RecorderLog]:
    """Standard error without the witness's lines, and what they say."""
    told = RecorderLog()
    runs: dict[str, dict[str, Status]] = {}
    finished: set[str] = set()

    def take(found: re.Match[str]) -> str:
        try:
            line = json.loads(found[1])
        except ValueError:
            return ""
        run = str(line.get("run"))
        seen = runs.setdefault(run, {})
        match line.get("event"):
            case "begun":
                told.begun = True
            case "test":
                _note(seen, str(line.get("id")), str(line.get("when")), str(line.get("outcome")))
            case "canary":
                told.canary_failed = line.get("failed") is True and told.canary_failed is not False
                if problem := line.get("problem"):
                    told.problem = f"the test runner could not be tried with a test that must fail: {problem}"
            case "changed":
                told.problem = _changed(line)
            case "uncompared":
                told.uncompared[str(line.get("id"))] = str(line.get("why"))
            case "tracer":
                told.tracers.append(str(line.get("file")))
            case "finished":
                finished.add(run)
        return ""

    rest = re.sub(rf"\n{re.escape(word)} (\{{.*\}})\n", take, stderr)
    told.finished = told.begun and runs.keys() <= finished
    merged: dict[str, Status] = {}
    for node, status in [item for seen in runs.values() for item in seen.items()]:
        # A command may run a runner again for what failed; what passed in one of its runs has passed.
        if merged.get(node) != "passed":
            merged[node] = status
    told.cases = [TestCase("", node, status) for node, status in merged.items()]
    return rest, told


def parse_notes(text: str | None) -> RecorderLog:
    """What witnesses of several programs wrote to one file: all of them have finished, or it is not finished."""
    told = RecorderLog()
    if text is None:
        return RecorderLog(begun=True)
    seen: dict[str, Status] = {}
    begun: set[str] = set()
    finished: set[str] = set()
    for line in text.splitlines():
        try:
            said = json.loads(line)
            run, event = str(said["run"]), said["event"]
        except (ValueError, TypeError, KeyError):
            told.problem = "what the witness noted was written over"
            continue
        match event:
            case "unable":
                told.unable = True
            case "begun":
                begun.add(run)
                told.programs.append(str(said.get("program")))
            case "test":
                _note(seen, str(said.get("id")), "call", str(said.get("outcome")))
            case "canary":
                told.canary_failed = said.get("failed") is True and told.canary_failed is not False
            case "changed":
                told.problem = _changed(said)
            case "finished":
                finished.add(run)
                told.names_tests = told.names_tests and not said.get("unnamed")
    told.begun = bool(begun) or bool(told.problem)
    told.finished = begun <= finished
    told.cases = [TestCase(*_last_of(name), status) for name, status in seen.items()]
    return told


def _changed(line: dict[str, object]) -> str:
    return f"the test runner was changed while it ran: {line.get('what')} is not what it was"


def _last_of(name: str) -> tuple[str, str]:
    group, _, last = name.rpartition(" > ")
    return group, last


def _note(seen: dict[str, Status], node: str, when: str, outcome: str) -> None:
    """Passed is what passed its call; what failed once, in any phase, has failed."""
    if outcome == "failed" or seen.get(node) == "failed":
        seen[node] = "failed"
    elif outcome == "skipped":
        seen[node] = "skipped"
    elif outcome == "passed" and when == "call" and seen.get(node) != "skipped":
        seen[node] = "passed"


def find_contradiction(told: RecorderLog, cases: Sequence[TestCase], required: Sequence[str] = ()) -> str:
    """Why the report of this run cannot be believed; empty when it can. Of `required` tests, where there are some."""
    if not told.begun:
        return ""
    if told.problem:
        return told.problem
    if not told.finished:
        return "the test runner was ended from inside before it was finished, so its report is not its own"
    if told.canary_failed is False:
        return "a test that must fail passed: somebody has changed the test runner"
    if not told.names_tests:
        return _too_few(told, cases)
    seen, reported = ReportedTests(told.cases), ReportedTests(cases)
    for case in [case for name in required for case in reported.find(name)] if required else cases:
        if case.status == "passed" and not _no_single_test(case, told):
            found = [other.status for other in seen.find(case.whole_name) or _called(case.name, told.cases)]
            if not found or "failed" in found:
                how = "failed" if found else "was not run"
                return f"the report says that {case.whole_name} passed, and it {how}: the report is forged"
    return ""


def _no_single_test(case: TestCase, told: RecorderLog) -> bool:
    """A file without tests, which node tells as one; an example in Rust's documentation, which has its own process."""
    return any(program.endswith(case.name) for program in told.programs) or _DOCUMENTATION.search(case.name) is not None


def _too_few(told: RecorderLog, cases: Sequence[TestCase]) -> str:
    groups = {case.classname for case in cases if case.status == "passed"}
    if len(groups) <= len(told.programs):
        return ""
    return f"the report tells of {len(groups)} test programs, and {len(told.programs)} were run: the report is forged"


def _called(name: str, cases: Sequence[TestCase]) -> list[TestCase]:
    """By the last part of the name: a runner may be told to put something before the names in its report."""
    return [case for case in cases if case.name == name or case.name.endswith((f"::{name}", f".{name}"))]
