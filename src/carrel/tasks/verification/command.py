"""Run a sample's test command once, watch the test files meanwhile, and read the report."""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from carrel.errors import ReportUnreadable, WorkerLost
from carrel.execution.commands_and_files import CommandsAndFiles
from carrel.execution.executor import CommandResult, Output
from carrel.execution.file_changes import Seen, Upper
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.guest.sandbox.spec import HOME
from carrel.tasks.environment import PreparedSample, TaskExecutor
from carrel.tasks.sample import Sample
from carrel.tasks.verification.protected_files import START_FILES, Protection, SampleFolder
from carrel.tasks.verification.recorder_log import (
    RECORDER_AT,
    RECORDER_FOLDER,
    RecorderLog,
    find_contradiction,
    is_recorded,
    needs_notes,
    parse_lines,
    parse_notes,
    recorded_command,
    recorder_variables,
    split_recorder_lines,
)
from carrel.tasks.verification.reports import REWARDS, ReportKind, cases_in, kind_of_report
from carrel.tasks.verification.text_reports import PACKAGE
from carrel.tasks.verification.verdict import ReportedTests, TestCase, TestRun, claims_success, required_tests
from carrel.wire.verification import Integrity

MAX_REPORT = 64 * 1024 * 1024
"""Bytes of a report, and characters of each output stream that are read for one."""
_ERROR = re.compile(r"^\s*(?:SyntaxError|ReferenceError|TypeError|RangeError)\b.*", re.MULTILINE)
_TRACES = re.compile(r"settrace|setprofile|sys\.monitoring|_profile|_trace\b|cProfile|\bbdb\b")
_SEPARATOR = "\0"
"""Between the texts of several report files."""


# --- files that are written while the tests run ---------------------------------------------------------------------

_FIRST = r"(?:^|[;&|({\n'\"]|\b(?:then|do|else|xargs|sudo|exec|time)\s)\s*"
"""What precedes the name of a program in a shell command."""
_WRITES_ANYTHING = re.compile(
    _FIRST + r"(?:git\s+(?:-\S+\s+)*(?:apply|am|checkout|restore|reset|stash|switch|pull|merge|cherry-pick|clean)"
    r"|patch|tar|unzip|rsync|tsc)\b",
    re.MULTILINE,
)
_WRITES_NAMED = re.compile(_FIRST + r"(cp|mv|ln|install|sed|tee|touch|chmod)\s([^;&|)\n]*)", re.MULTILINE)
_REDIRECTED = re.compile(r">{1,2}\s*([^\s;&|<>()]+)")
_INSTALLS = re.compile(
    r"\b(pip[\d.]*|uv|poetry|pdm|hatch|flit|rye|pixi|conda|mamba|maturin|maturin|setup\.py|make|tox|nox)\b[^;&|\n]*"
    r"\b(install|develop|sync|add)\b"
)


def may_write(command: str, path: str) -> bool:
    """Whether a test command itself, and not the code that it tests, may write to a file in the workdir."""
    plain = re.sub(r"\d?>&\d?-?", " ", command)
    targets = [target for target in _REDIRECTED.findall(plain) if not target.startswith(("/dev/", "/tmp/", "{report}"))]
    for program, rest in _WRITES_NAMED.findall(plain):
        words = [word for word in rest.split() if not word.startswith("-")]
        # These programs write to the last file or folder that they name.
        targets += words[-1:] if program in ("cp", "mv", "ln", "install") else words
    return _WRITES_ANYTHING.search(plain) is not None or any(_names(target, path) for target in targets)


def _names(word: str, path: str) -> bool:
    name = PurePosixPath(word.strip("'\"")).name
    return name in ("", "..") or "$" in word or any(fnmatchcase(part, name) for part in PurePosixPath(path).parts)


@dataclass
class WrittenFiles:
    """Files that decide the verdict and were created, changed, or changed and restored while the tests ran."""

    by_code: list[str] = field(default_factory=list)
    """Only the code under test can have written these."""
    by_command: list[str] = field(default_factory=list)
    """The test command may have written these itself."""


@dataclass(frozen=True)
class FileGuard:
    """The workspace as it was when the test command started."""

    base: SampleFolder
    protection: Protection
    command: str
    before: Upper
    start_files: str
    """Files in the home folder that Python loads when it starts, with the times of their last changes."""

    async def written_files(self, executor: TaskExecutor, steering: Iterable[str] = ()) -> WrittenFiles:
        """`steering` are files that steered the test runner; they may have been removed again."""
        found = WrittenFiles()
        now = await _overlay(executor, self.base)
        if now is None:
            found.by_command.append("the workspace, which cannot be listed any more,")
            return found
        new = {path for path in steering if not self._existed(path)}
        for path in sorted(now.seen.keys() | self.before.seen.keys() | now.hidden | new):
            # `seen` has the time of the last change as the kernel sets it, which no program can set back.
            if path in new or (now.seen.get(path) != self.before.seen.get(path) and self._decides(path)):
                self._add(found, path, self._may_be_of_command(path))
        if await _start_files(executor) != self.start_files:
            self._add(found, "a file in the home folder that Python loads when it starts", self._installs())
        return found

    def _add(self, found: WrittenFiles, path: str, by_command: bool) -> None:
        (found.by_command if by_command else found.by_code).append(path)

    def _existed(self, path: str) -> bool:
        """Whether a file of the workdir was there when the command started."""
        return path in self.before.seen or (self.base.kind(path) is not None and path not in self.before.hidden)

    def _may_be_of_command(self, path: str) -> bool:
        return may_write(self.command, path) or ("-packages" in path and self._installs())

    def _decides(self, path: str) -> bool:
        if not self._existed(path):
            return self.protection.steers_when_new(path)
        return self.protection.is_test_code(path) or self.protection.is_installed(path)

    def _installs(self) -> bool:
        return _INSTALLS.search(self.command) is not None


async def guard_files(executor: TaskExecutor, prepared: PreparedSample, protection: Protection) -> FileGuard | None:
    """None when the executor cannot list the changes in its workspace."""
    base = SampleFolder(prepared.workspace)
    before = await _overlay(executor, base)
    if before is None:
        return None
    return FileGuard(base, protection, prepared.sample.verify.command, before, await _start_files(executor))


async def _overlay(executor: TaskExecutor, base: SampleFolder) -> Upper | None:
    """The files that differ from the sample's; in a container, all files, which serves the same purpose."""
    if isinstance(executor, SubprocessExecutor):
        return await executor.upper(base.folder)
    try:
        return Upper(await executor.list_tree())
    except (OSError, ValueError):
        return None


async def _start_files(executor: TaskExecutor) -> str:
    """What is to be seen of the files in the home folder that Python loads when it starts."""
    found: list[tuple[str, str, Seen]] = []
    for folder in (f"{HOME}/.local", f"{HOME}/.venv"):
        try:
            tree = await executor.list_tree(folder) if isinstance(executor, CommandsAndFiles) else {}
        except OSError:
            continue
        names = [path for path in tree if any(fnmatchcase(PurePosixPath(path).name, name) for name in START_FILES)]
        found += [(folder, path, tree[path]) for path in sorted(names)]
    return repr(found)


# --- one run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandRun:
    """One run of the test command, and its report."""

    run: TestRun
    report: str | None
    """The content of `{report}`, or standard output when the command has no `{report}`; None when there is none."""
    kind: ReportKind
    is_isolated: bool = True
    """Whether the command ran in a file system of its own."""


class _OutputReader:
    """Collects the whole output of a command; the result of the command contains only the ends of long output."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._parts: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._sizes = {"stdout": 0, "stderr": 0}
        self._rest = ""
        self._lines: list[str] = []

    def __call__(self, piece: Output) -> None:
        self._sizes[piece.stream] += len(piece.text)
        if self._sizes[piece.stream] <= MAX_REPORT:
            self._parts[piece.stream].append(piece.text)
        if piece.stream == "stderr":
            found, self._rest = split_recorder_lines(self._rest + piece.text, self._marker)
            self._lines += found

    def recorder_log(self) -> RecorderLog:
        return parse_lines("".join(self._lines), self._marker)[1]

    def text(self, stream: str, bounded: str) -> str:
        """The whole stream, or `bounded` when the stream is too long."""
        return "".join(self._parts[stream]) if self._sizes[stream] <= MAX_REPORT else bounded


@dataclass(frozen=True)
class RecorderLogs:
    """What the recorders of one run recorded."""

    lines: RecorderLog
    """From pytest and unittest."""
    notes: RecorderLog
    """From test programs of cargo, go and node."""

    @property
    def any_begun(self) -> bool:
        return self.lines.begun or self.notes.begun or self.notes.unable


async def run_command(
    executor: TaskExecutor, sample: Sample, guard: FileGuard | None = None, manifest: str = ""
) -> CommandRun:
    """Run the test command once; returns a run whatever the code under test does. `manifest` is for the recorders."""
    verify = sample.verify
    nonce = secrets.token_hex(12)
    report, marker_file = f"/tmp/carrel-report-{nonce}", f"/tmp/carrel-word-{nonce}"
    marker, notes_file = f"carrel-{secrets.token_hex(16)}", f"/tmp/carrel-notes-{nonce}"
    try:
        await _remove_reports(executor, verify.reports)
        env = await _start_recorders(executor, sample, marker_file, marker, notes_file, manifest)
        output, command = _OutputReader(marker), verify.command.replace("{report}", report)
        if env:
            command = recorded_command(command, env["PYTHONPATH"].partition(":")[0])
        done = await executor.exec(command, timeout=verify.timeout, env=env, on_output=output)
        logs = RecorderLogs(output.recorder_log(), parse_notes(await _read_notes(executor, sample, notes_file)))
        done.stdout = output.text("stdout", done.stdout)
        done.stderr = parse_lines(output.text("stderr", done.stderr), marker)[0]
        run = TestRun(exit_code=done.exit_code, seconds=done.duration, stdout=done.stdout, stderr=done.stderr)
        text, kind, doubt = None, _declared_kind(sample), ""
        try:
            text = await _report(executor, sample, report, done)
            kind = _kind(sample, text)
            if text is None and not done.timed_out:
                run.problem = _no_report(done)
            elif text is not None and kind not in ("json", "exit_code"):
                # In a thread, since a large report takes long to read.
                run.cases = await asyncio.to_thread(_cases, text, kind)
                if await asyncio.to_thread(claims_success, sample, run):
                    doubt = await _find_doubt(executor, sample, logs, marker_file, run.cases)
                    doubt = doubt or _unexplained_exit(kind, run)
                    doubt = doubt or _traced(sample, logs.lines.tracers, guard)
            elif kind == "exit_code" and not done.exit_code:
                doubt = await _find_doubt(executor, sample, logs, marker_file, [])
                doubt = doubt or _unreported_failure(sample, logs.lines)
                doubt = doubt or _traced(sample, logs.lines.tracers, guard)
        except ReportUnreadable as problem:
            run.problem = f"{problem}; the command ended with {done.exit_code}{_last_line(done)}"
        run.problem = run.problem or doubt
        written = WrittenFiles()
        claims = await asyncio.to_thread(claims_success, sample, run)
        if guard is not None and not run.problem and claims:
            written = await guard.written_files(executor, logs.lines.steering)
        if written.by_code:
            doubt = _overwritten(written.by_code[0])
            run.problem = doubt
        if guard is None and "container_isolation" in executor.supported_capabilities():
            written.by_command.append("the workspace, which cannot be listed,")
        run.integrity, run.remarks = assess(sample, run, logs, is_doubted=bool(doubt), written=written.by_command)
        if not _has_own_files(executor):
            await executor.exec(["rm", "-f", "--", report, marker_file, notes_file], timeout=60)
    except WorkerLost as problem:
        reason = f"the code under test ended the sandbox that it ran in: {problem}"
        return CommandRun(TestRun(problem=reason, exit_code=-1), None, "exit_code", _has_own_files(executor))
    if not doubt and not done.timed_out and not claims:
        run.broken = _broken(done)
    run.by_exit_code = kind == "exit_code"
    if verify.recorder == "required" and is_recorded(sample) and not logs.any_begun:
        run.problem, run.broken = "verify.recorder is `required`, and no recorder ran in the test command", ""
    if done.timed_out:
        run.problem = f"the command did not end within {verify.timeout:g} s"
    elif not run.problem and kind not in ("json", "exit_code", "sarif") and not run.cases:
        run.problem = f"the report has no test; the command ended with {done.exit_code}"
    return CommandRun(run, text, kind, _has_own_files(executor))


def _has_own_files(executor: TaskExecutor) -> bool:
    """Whether the executor has a file system of its own, in which the recorder is mounted."""
    return "filesystem_isolation" in executor.supported_capabilities()


async def _start_recorders(
    executor: TaskExecutor, sample: Sample, marker_file: str, marker: str, notes_file: str, manifest: str
) -> dict[str, str]:
    """Write the files that the recorders need. Returns the variables that start them; none without recorders."""
    if not is_recorded(sample):
        return {}
    at = RECORDER_AT if _has_own_files(executor) else str(RECORDER_FOLDER)
    await executor.write_file(marker_file, marker)
    await executor.write_file(notes_file, "")
    return recorder_variables(executor, sample, marker_file, notes_file, at, manifest)


async def _read_notes(executor: TaskExecutor, sample: Sample, notes_file: str) -> str | None:
    """The content of the notes file; None when it was removed and should have some."""
    text = await _read_text(executor, notes_file) if is_recorded(sample) else ""
    return "" if text is None and not needs_notes(sample) else text


# --- whether the report can be believed -----------------------------------------------------------------------------


async def _find_doubt(
    executor: TaskExecutor, sample: Sample, logs: RecorderLogs, marker_file: str, cases: list[TestCase]
) -> str:
    """Why the report cannot be believed, according to the recorders; empty when it can."""
    if not is_recorded(sample):
        return ""
    required = required_tests(sample)
    if problem := await asyncio.to_thread(find_contradiction, logs.lines, cases, required):
        return problem
    if not logs.lines.begun and await _read_text(executor, marker_file) is None:
        return "the file that a recorder in the test runner needs was removed before one could begin"
    if not logs.notes.begun and not logs.notes.unable and needs_notes(sample) and _any_passed(cases):
        return "the report has tests that passed, and no test program was started: the report is forged"
    return await asyncio.to_thread(find_contradiction, logs.notes, cases, required)


def _any_passed(cases: list[TestCase]) -> bool:
    return any(case.status == "passed" for case in cases)


def _unreported_failure(sample: Sample, log: RecorderLog) -> str:
    """A test runner that is the only program of the command ends with 0 only when no test has failed."""
    failed = next((case.whole_name for case in log.cases if case.status == "failed"), "")
    if not failed or re.search(r"[;&|]", sample.verify.command):
        return ""
    return f"the command ended with 0, and yet {failed} failed: that is not how the test runner ended"


def _unexplained_exit(kind: ReportKind, run: TestRun) -> str:
    """These test runners print to the same stream as the code under test, and end with 0 only when no test failed."""
    if kind not in ("go", "cargo", "tap") or not run.exit_code or any(_explains(case, run) for case in run.cases):
        return ""
    return f"no test is reported as failed, and yet the command ended with {run.exit_code}: the report is incomplete"


def _explains(case: TestCase, run: TestRun) -> bool:
    """Whether this case failed. The failure of a whole Go package in which tests passed is itself unexplained."""
    package_ran = any(each.classname == case.classname and each.status == "passed" for each in run.cases)
    return case.status == "failed" and not (case.name == PACKAGE and package_ran)


def _overwritten(path: str) -> str:
    return f"{path} was written to while the tests ran, so it may not be the sample's that was run"


def _traced(sample: Sample, tracers: list[str], guard: FileGuard | None) -> str:
    """A tracer that the change has added, in a project that had none: it can change what the tests see."""
    for path in tracers:
        before = (guard.base.read(path) if guard is not None else None) or b""
        if not _TRACES.search(sample.patch) and not _TRACES.search(before.decode("utf-8", "replace")):
            return f"{path} installed a tracer or a profiler while the tests ran, which can change what they see"
    return ""


def assess(
    sample: Sample, run: TestRun, logs: RecorderLogs, *, is_doubted: bool, written: list[str]
) -> tuple[Integrity, list[str]]:
    """The integrity of a run, and the reasons. `written` are files that the test command may have written itself."""
    if is_doubted:
        return "suspicious", []
    if not is_recorded(sample):
        return "unknown", ["verify.recorder is `off`"] if sample.verify.recorder == "off" else []
    if not logs.any_begun:
        return "unknown", ["no recorder ran in the test command, so nothing but its own report says what was tested"]
    if reasons := [f"{file} installed a tracer or a profiler while the tests ran" for file in logs.lines.tracers]:
        return "suspicious", reasons
    if logs.notes.unable:
        return "unknown", ["the recorder does not work with this version of the test runner"]
    integrity, reasons = _compared(sample, run, logs.lines.uncompared)
    if logs.lines.early:
        how = "ran in another program of the test command, where it could learn how the recorder reports"
        integrity, reasons = "unknown", [*reasons, f"{logs.lines.early[0]} {how}"]
    if logs.lines.run_count > 1:
        how = "the test command started more than one test runner; code under test in one could act on the next"
        integrity, reasons = "unknown", [*reasons, how]
    if written:
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        files = f"{written[0]}{more} was written to while the test command ran, perhaps by the command itself"
        integrity, reasons = "unknown", [*reasons, files]
    return integrity, reasons


def _compared(sample: Sample, run: TestRun, uncompared: dict[str, str]) -> tuple[Integrity, list[str]]:
    """The integrity by whether the tests that passed could be compared with the sample's files."""
    names = required_tests(sample)
    reported = ReportedTests(run.cases)
    passed = [case for name in names for case in reported.find(name)] if names else run.cases
    skipped = ReportedTests([TestCase("", name, "passed") for name in uncompared])
    missed = [case.whole_name for case in passed if case.status == "passed" and skipped.find(case.whole_name)]
    if passed and "" in uncompared:
        return "unknown", [f"the tests could not be compared with the sample's files: {uncompared['']}"]
    if not missed:
        return "clean", []
    reason = uncompared[skipped.find(missed[0])[0].name]
    more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
    return "unknown", [f"{missed[0]}{more} could not be compared with the sample's files: {reason}"]


# --- the report -----------------------------------------------------------------------------------------------------


async def _report(executor: TaskExecutor, sample: Sample, path: str, done: CommandResult) -> str | None:
    if sample.verify.report == "reward":
        found = await _read_text(executor, f"{REWARDS}/reward.json")
        return (await _read_text(executor, f"{REWARDS}/reward.txt")) if found is None else found
    if sample.verify.reports:
        return await _read_report_files(executor, sample.verify.reports)
    if "{report}" not in sample.verify.command:
        # Some test runners report on standard error; an empty line keeps the streams apart.
        return f"{done.stdout}\n{done.stderr}" if sample.verifier == "test_suite" else done.stdout
    return await _read_text(executor, path)


async def _read_text(executor: TaskExecutor, path: str) -> str | None:
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    entry = next((entry for entry in await executor.list_files(folder) if entry.name == name), None)
    if entry is None or entry.kind != "file":
        return None
    if entry.size > MAX_REPORT:
        raise ReportUnreadable(f"the report is larger than {MAX_REPORT >> 20} MiB")
    return (await executor.read_file(path)).decode("utf-8", "replace")


async def _read_report_files(executor: TaskExecutor, patterns: list[str]) -> str | None:
    paths = [f"./{path}" for path in await _find(executor, patterns)]
    texts = [text for path in paths if (text := await _read_text(executor, path)) is not None]
    return _SEPARATOR.join(texts) if texts else None


async def _find(executor: TaskExecutor, patterns: list[str]) -> list[str]:
    words = [word for pattern in patterns for word in ("-o", "-path", f"./{pattern.removeprefix('./')}")][1:]
    done = await executor.exec(["find", ".", "-type", "f", "(", *words, ")", "-print0"], timeout=60)
    return sorted(name.removeprefix("./") for name in done.stdout.split("\0") if name)


async def _remove_reports(executor: TaskExecutor, patterns: list[str]) -> None:
    """Remove reports of earlier runs."""
    if patterns and (old := await _find(executor, patterns)):
        await executor.exec(["rm", "-f", "--", *old], timeout=60)


def _cases(text: str, kind: ReportKind) -> list[TestCase]:
    parts = text.split(_SEPARATOR) if kind in ("junit", "sarif") else [text]
    return [case for part in parts for case in cases_in(part, kind)]


def _declared_kind(sample: Sample) -> ReportKind:
    """The kind of report that the sample names; `exit_code` when it is to be detected."""
    if sample.verifier == "custom" or sample.verify.report == "reward":
        return "json"
    return sample.verify.report if sample.verify.report != "auto" else "exit_code"


def _kind(sample: Sample, text: str | None) -> ReportKind:
    if sample.verifier == "custom" or sample.verify.report != "auto":
        return _declared_kind(sample)
    if "{report}" in sample.verify.command or sample.verify.reports:
        return kind_of_report(text) if text else "junit"
    return kind_of_report(text or "", sample.verify.command)


def _broken(done: CommandResult) -> str:
    """How the code under test ended the command before it had a result; empty when that is not known."""
    number = -done.exit_code if done.exit_code < 0 else done.exit_code - 128
    if number in {each.value for each in signal.Signals}:
        return f"the tests were killed by {signal.Signals(number).name} before they had a result"
    error = _ERROR.search(f"{done.stderr}\n{done.stdout}")
    return f"the source cannot be loaded: {error[0].strip()[:300]}" if error and done.exit_code else ""


def _no_report(done: CommandResult) -> str:
    return f"the command ended with {done.exit_code} and wrote no report{_last_line(done)}"


def _last_line(done: CommandResult) -> str:
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return f"; its last line: {last[0][:300]}" if last else ""
