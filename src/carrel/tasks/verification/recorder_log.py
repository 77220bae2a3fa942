"""The recorders in the test runner: how a test command gets them, and what they recorded."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from carrel.execution.config import Mount
from carrel.execution.container_executor import ContainerExecutor
from carrel.execution.container_settings import FOR_COMMANDS
from carrel.tasks.environment import TaskExecutor
from carrel.tasks.sample import Sample
from carrel.tasks.verification.protected_files import touched_by
from carrel.tasks.verification.verdict import ReportedTests, Status, TestCase

RECORDER_FOLDER = Path(__file__).parents[1] / "recorder"
RECORDER_AT = "/opt/carrel-recorder"
"""Where the recorder programs are mounted in the sandbox."""
_BASE_AT, _PATCHED_AT, _MANIFEST = "/opt/carrel-files", "/opt/carrel-patched", "carrel-files.json"
RECORDER_MODULES = frozenset(file.stem for file in RECORDER_FOLDER.glob("*.py"))
_OUT = 9
"""The descriptor through which recorders write to the standard error that the command started with."""
_NAMED_RUNNER = r"\bcargo\s+(\+\S+\s+)?(test|t)\b|\bgo\s+test\b|\bnode\s[^;&|]*--test(?=\s|$)"
_OVERRIDES = r"\b(GOFLAGS|NODE_OPTIONS|CARGO_\w+)=|\s-{1,2}exec\b|\s--target\b|\bcargo\b[^;&|]*\s--config\b"


# --- giving recorders to a test command -----------------------------------------------------------------------------


def is_recorded(sample: Sample) -> bool:
    """Whether the test command gets recorders. Whether one of them works for its test runner shows when it runs."""
    return sample.verifier == "test_suite" and sample.verify.recorder != "off"


def needs_notes(sample: Sample) -> bool:
    """Whether a recorder of cargo, go or node must have noted something: the command names one of these runners, and
    changes none of the settings that start the recorder."""
    command = sample.verify.command
    overrides = re.search(_OVERRIDES, command) or "CARGO_BUILD_TARGET" in sample.environment.env
    return is_recorded(sample) and re.search(_NAMED_RUNNER, command) is not None and not overrides


def recorder_mounts(sample: Sample, files: Path, base: Path) -> tuple[Mount, ...]:
    """Mount the recorders and the sample's own files: `base`, and in `files` those that its test patch changes."""
    if not is_recorded(sample):
        return ()
    return (
        Mount(source=RECORDER_FOLDER, at=RECORDER_AT),
        Mount(source=files, at=_PATCHED_AT),
        Mount(source=base, at=_BASE_AT),
    )


async def write_manifest(
    executor: TaskExecutor, sample: Sample, folder: Path, base: Path, changed: Iterable[str]
) -> str:
    """Write to `folder` what the recorders compare tests with. `changed` are the files of the work that is judged.

    Returns the path of the manifest inside the executor."""
    if not is_recorded(sample):
        return ""
    inside = "filesystem_isolation" in executor.supported_capabilities()
    for path in touched_by(sample.test_patch):
        if path.endswith(".py"):
            with suppress(OSError):  # The patch has removed it.
                content = await executor.read_file(path)
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
    manifest = {
        "workdir": (await executor.exec(["pwd", "-P"], timeout=60)).stdout.strip(),
        "base": _BASE_AT if inside else str(base),
        "patched": _PATCHED_AT if inside else str(folder),
        "theirs": sorted(changed),
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return f"{_PATCHED_AT if inside else folder}/{_MANIFEST}"


def recorded_command(command: str, at: str) -> str:
    """The command, changed so that neither a PYTHONPATH in it hides the recorders nor a `2>` what they write."""
    return f"exec {_OUT}>&2\n" + re.sub(r"\bPYTHONPATH=(?=[^\s;&|])", f"PYTHONPATH={at}:", command)


def recorder_variables(
    executor: TaskExecutor, sample: Sample, marker_file: str, notes_file: str, at: str, manifest: str = ""
) -> dict[str, str]:
    """The environment variables that start the recorders.

    `marker_file` has the marker of the lines that Python's recorders write, `notes_file` is what the others write to.
    """
    env, program = sample.environment.env, f"{at}/carrel_test_program.py"
    packages = FOR_COMMANDS if isinstance(executor, ContainerExecutor) else ""
    machine = platform.machine().upper()
    return {
        "CARREL_RECORDER": marker_file,
        "PYTHONPATH": ":".join(filter(None, [at, env.get("PYTHONPATH", ""), packages])),
        "CARREL_RECORDER_FILES": manifest,
        "CARREL_RECORDER_NOTES": notes_file,
        "NODE_OPTIONS": f"{env.get('NODE_OPTIONS', '')} --require={at}/carrel_node.cjs".strip(),
        "GOFLAGS": f"{env.get('GOFLAGS', '')} -exec={program}".strip(),
        f"CARGO_TARGET_{machine}_UNKNOWN_LINUX_GNU_RUNNER": program,
        f"CARGO_TARGET_{machine}_UNKNOWN_LINUX_MUSL_RUNNER": program,
    }


# --- reading what they recorded -------------------------------------------------------------------------------------

_DOCUMENTATION = re.compile(r"\S - .*\(line \d+\)( - compile( fail)?)?$")


@dataclass
class RecorderLog:
    """What the recorders of one run of the tests recorded."""

    begun: bool = False
    finished: bool = False
    canary_failed: bool | None = None
    """Whether the test that must fail did fail; None when it was not run."""
    problem: str = ""
    cases: list[TestCase] = field(default_factory=list)
    names_tests: bool = True
    """Whether `cases` has each test; some recorders only know that all tests of a program have ended."""
    programs: list[str] = field(default_factory=list)
    """The test programs that were started."""
    unable: bool = False
    """Whether a recorder has reported that it does not work with this version of the test runner."""
    uncompared: dict[str, str] = field(default_factory=dict)
    """Tests that could not be compared with the sample's files, and why; the key "" stands for all of them."""
    tracers: list[str] = field(default_factory=list)
    """Files that installed a tracer or a profiler while the tests ran."""
    early: list[str] = field(default_factory=list)
    """Files of the work that ran in a program of the test command other than its test runner."""
    run_count: int = 0
    """How many test runners have sent lines."""
    steering: list[str] = field(default_factory=list)
    """Files in the workdir that steered the test runner and are not among the sample's files."""


def split_recorder_lines(text: str, marker: str) -> tuple[list[str], str]:
    """The complete recorder lines in a piece of output, and its end, in which another line may have begun."""
    begin, found, at = f"\n{marker} ", [], 0
    while (start := text.find(begin, at)) >= 0 and (end := text.find("\n", start + len(begin))) >= 0:
        found.append(text[start : end + 1])
        at = end + 1
    return found, text[start:] if start >= 0 else text[max(at, len(text) - len(begin)) :]


def parse_lines(stderr: str, marker: str) -> tuple[str, RecorderLog]:
    """Standard error without the recorders' lines, and what these lines say."""
    log = RecorderLog()
    runs: dict[str, dict[str, Status]] = {}
    finished: set[str] = set()

    def take(found: re.Match[str]) -> str:
        try:
            line = json.loads(found[1])
        except ValueError:
            return ""
        run = str(line.get("run"))
        tests = runs.setdefault(run, {}) if line.get("event") != "early" else {}
        match line.get("event"):
            case "begun":
                log.begun = True
            case "early":
                log.early.append(str(line.get("file")))
            case "test":
                _add_phase(tests, str(line.get("id")), str(line.get("when")), str(line.get("outcome")))
            case "canary":
                log.canary_failed = line.get("failed") is True and log.canary_failed is not False
                if problem := line.get("problem"):
                    log.problem = f"the test runner could not be tried with a test that must fail: {problem}"
            case "changed":
                log.problem = _changed(line)
            case "uncompared":
                log.uncompared[str(line.get("id"))] = str(line.get("why"))
            case "tracer":
                log.tracers.append(str(line.get("file")))
            case "steering":
                log.steering.append(str(line.get("file")))
            case "finished":
                finished.add(run)
        return ""

    rest = re.sub(rf"\n{re.escape(marker)} (\{{.*\}})\n", take, stderr)
    log.finished = log.begun and runs.keys() <= finished
    log.run_count = len(runs)
    merged: dict[str, Status] = {}
    for node, status in [item for tests in runs.values() for item in tests.items()]:
        # A command may run a runner again for the failed tests; a test that passed in one of the runs has passed.
        if merged.get(node) != "passed":
            merged[node] = status
    log.cases = [TestCase("", node, status) for node, status in merged.items()]
    return rest, log


def parse_notes(text: str | None) -> RecorderLog:
    """Read the file to which the recorders of several test programs wrote; finished when all of them have finished.

    None stands for a file that was removed."""
    log = RecorderLog()
    if text is None:
        return RecorderLog(begun=True)
    tests: dict[str, Status] = {}
    begun: set[str] = set()
    finished: set[str] = set()
    for line in text.splitlines():
        try:
            note = json.loads(line)
            run, event = str(note["run"]), note["event"]
        except (ValueError, TypeError, KeyError):
            log.problem = "the recorder's notes were overwritten"
            continue
        match event:
            case "unable":
                log.unable = True
            case "begun":
                begun.add(run)
                log.programs.append(str(note.get("program")))
            case "test":
                _add_phase(tests, str(note.get("id")), "call", str(note.get("outcome")))
            case "canary":
                log.canary_failed = note.get("failed") is True and log.canary_failed is not False
            case "changed":
                log.problem = _changed(note)
            case "finished":
                finished.add(run)
                log.names_tests = log.names_tests and not note.get("unnamed")
    log.begun = bool(begun) or bool(log.problem)
    log.finished = begun <= finished
    log.cases = [TestCase(*_split_last(name), status) for name, status in tests.items()]
    return log


def _changed(line: dict[str, object]) -> str:
    return f"the test runner was changed while it ran: {line.get('what')} is not what it was"


def _split_last(name: str) -> tuple[str, str]:
    group, _, last = name.rpartition(" > ")
    return group, last


def _add_phase(tests: dict[str, Status], node: str, when: str, outcome: str) -> None:
    """Add the outcome of one phase: a test passes when its call passed, and fails when any phase failed."""
    if outcome == "failed" or tests.get(node) == "failed":
        tests[node] = "failed"
    elif outcome == "skipped":
        tests[node] = "skipped"
    elif outcome == "passed" and when == "call" and tests.get(node) != "skipped":
        tests[node] = "passed"


def find_contradiction(log: RecorderLog, cases: Sequence[TestCase], required: Sequence[str] = ()) -> str:
    """Why the report cannot be believed; empty when it can. Only `required` tests are compared, if there are any."""
    if not log.begun:
        return ""
    if log.problem:
        return log.problem
    if not log.finished:
        return "the test runner was ended from inside before it had finished, so the report is not its own"
    if log.canary_failed is False:
        return "a test that must fail passed, so the test runner was changed"
    if not log.names_tests:
        return _find_extra_programs(log, cases)
    recorded, reported = ReportedTests(log.cases), ReportedTests(cases)
    for case in [case for name in required for case in reported.find(name)] if required else cases:
        if case.status == "passed" and not _is_not_one_test(case, log):
            found = [each.status for each in recorded.find(case.whole_name) or _with_last_name(case.name, log.cases)]
            if not found or "failed" in found:
                how = "failed" if found else "was not run"
                return f"the report says that {case.whole_name} passed, and it {how}: the report is forged"
    return ""


def _is_not_one_test(case: TestCase, log: RecorderLog) -> bool:
    """Whether this is a file without tests, which node reports like a test, or an example in Rust's documentation,
    which runs in a process of its own."""
    is_program = any(program.endswith(case.name) for program in log.programs)
    return is_program or _DOCUMENTATION.search(case.name) is not None


def _find_extra_programs(log: RecorderLog, cases: Sequence[TestCase]) -> str:
    groups = {case.classname for case in cases if case.status == "passed"}
    if len(groups) <= len(log.programs):
        return ""
    return f"the report has {len(groups)} test programs, and {len(log.programs)} were run: the report is forged"


def _with_last_name(name: str, cases: Sequence[TestCase]) -> list[TestCase]:
    """Find tests by the last part of their names: a runner may be configured to prefix the names in its report."""
    return [case for case in cases if case.name == name or case.name.endswith((f"::{name}", f".{name}"))]
