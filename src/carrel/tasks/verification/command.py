"""Run a sample's test command once, watch the test files meanwhile, and read the report."""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from carrel.errors import ReportUnreadable, WorkerLost
from carrel.execution.executor import CommandResult, Executor, Output
from carrel.execution.file_changes import Upper
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.guest.sandbox.spec import HOME
from carrel.tasks.environment import PreparedSample
from carrel.tasks.sample import Sample
from carrel.tasks.verification import recorder_log
from carrel.tasks.verification.protected_files import START_FILES, Folder, Protection
from carrel.tasks.verification.recorder_log import (
    RecorderLog,
    find_contradiction,
    parse_lines,
    parse_notes,
    split_recorder_lines,
)
from carrel.tasks.verification.reports import ReportKind, cases_in, kind_of_report
from carrel.tasks.verification.test_cases import ReportedTests, TestCase
from carrel.tasks.verification.text_reports import PACKAGE
from carrel.tasks.verification.verdict import TestRun, claims_something, required_of
from carrel.wire.verification import Integrity

_FIRST = r"(?:^|[;&|({\n'\"]|\b(?:then|do|else|xargs|sudo|exec|time)\s)\s*"
"""Before the name of a program that a shell starts."""
_WRITES_ANYTHING = re.compile(
    _FIRST + r"(?:git\s+(?:-\S+\s+)*(?:apply|am|checkout|restore|reset|stash|switch|pull|merge|cherry-pick|clean)"
    r"|patch|tar|unzip|rsync|tsc)\b",
    re.MULTILINE,
)
_WRITES_NAMED = re.compile(_FIRST + r"(cp|mv|ln|install|sed|tee|touch|chmod)\s([^;&|)\n]*)", re.MULTILINE)
_REDIRECTED = re.compile(r">{1,2}\s*([^\s;&|<>()]+)")
_INSTALLS = re.compile(r"\b(install|develop|sync)\b")


def may_write(command: str, path: str) -> bool:
    """Whether a test command itself, and not the code that it tests, may write to a file of the workdir."""
    plain = re.sub(r"\d?>&\d?-?", " ", command)
    targets = [target for target in _REDIRECTED.findall(plain) if not target.startswith(("/dev/", "/tmp/", "{report}"))]
    for program, rest in _WRITES_NAMED.findall(plain):
        words = [word for word in rest.split() if not word.startswith("-")]
        # These write to the last file or folder that they name.
        targets += words[-1:] if program in ("cp", "mv", "ln", "install") else words
    return _WRITES_ANYTHING.search(plain) is not None or any(_names(target, path) for target in targets)


def _names(word: str, path: str) -> bool:
    name = PurePosixPath(word.strip("'\"")).name
    return name in ("", "..") or "$" in word or any(fnmatchcase(part, name) for part in PurePosixPath(path).parts)


@dataclass(frozen=True)
class FileGuard:
    """The place as it was when the test command began."""

    base: Folder
    guard: Protection
    command: str
    before: Upper
    start_files: str
    """Files in the home folder that Python loads when it starts, with the times of their last changes."""

    async def written(self, place: Executor) -> str:
        """The first file that decides the verdict and was made, changed, or changed and put back; empty for none."""
        now = await _look(place, self.base)
        if now is None:
            return ""
        for path in sorted(now.seen.keys() | now.hidden):
            was = self.before.seen.get(path)
            # The kernel sets the time of a change, and nobody else can.
            if now.seen.get(path) != was and self._decides(path) and not may_write(self.command, path):
                return path
        if not _INSTALLS.search(self.command) and await _start_files(place) != self.start_files:
            return "a file in the home folder that Python loads when it starts"
        return ""

    def _decides(self, path: str) -> bool:
        there = self.base.kind(path) is not None and path not in self.before.hidden
        if not there and path not in self.before.seen:
            return self.guard.steers_when_new(path) and not self._installs(path)
        return self.guard.is_test_code(path) or (self.guard.is_installed(path) and not self._installs(path))

    def _installs(self, path: str) -> bool:
        return "-packages" in path and _INSTALLS.search(self.command) is not None


async def watch(place: Executor, prepared: PreparedSample, guard: Protection) -> FileGuard | None:
    """None where it cannot be seen what is written."""
    base = Folder(prepared.workspace)
    before = await _look(place, base)
    if before is None:
        return None
    return FileGuard(base, guard, prepared.sample.verify.command, before, await _start_files(place))


async def _look(place: Executor, base: Folder) -> Upper | None:
    return await place.upper(base.folder) if isinstance(place, SubprocessExecutor) else None


async def _start_files(place: Executor) -> str:
    names = [word for name in START_FILES for word in ("-o", "-name", name)][1:]
    found = await place.exec(["find", f"{HOME}/.local", "(", *names, ")", "-printf", "%p %C@\\n"], timeout=60)
    return found.stdout


LARGEST_REPORT = 64 * 1024 * 1024
_ERROR = re.compile(r"^\s*(?:SyntaxError|ReferenceError|TypeError|RangeError)\b.*", re.MULTILINE)
_TRACES = re.compile(r"settrace|setprofile|sys\.monitoring|_profile|_trace\b|cProfile|\bbdb\b")


@dataclass(frozen=True)
class CommandRun:
    """A run as the verifiers see it."""

    run: TestRun
    report: str | None
    """What was written to `{report}`, or to standard output where the command has no `{report}`; None for nothing."""
    kind: ReportKind


class _Listening:
    """Hears all that a command writes; the result that comes at the end has only the ends of what is long."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._parts: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._sizes = {"stdout": 0, "stderr": 0}
        self._rest = ""
        self._lines: list[str] = []

    def __call__(self, piece: Output) -> None:
        self._sizes[piece.stream] += len(piece.text)
        if self._sizes[piece.stream] <= LARGEST_REPORT:
            self._parts[piece.stream].append(piece.text)
        if piece.stream == "stderr":
            self._hear(piece.text)

    def _hear(self, text: str) -> None:
        found, self._rest = split_recorder_lines(self._rest + text, self._word)
        self._lines += found

    def testimony(self) -> RecorderLog:
        return parse_lines("".join(self._lines), self._word)[1]

    def text(self, stream: str, bounded: str) -> str:
        """All of it, or `bounded` where that is too much."""
        return "".join(self._parts[stream]) if self._sizes[stream] <= LARGEST_REPORT else bounded


@dataclass(frozen=True)
class Records:
    """What the recorders of one run of a test command noted."""

    lines: RecorderLog
    """Of pytest and unittest."""
    notes: RecorderLog
    """Of test programs of cargo, go and node."""

    @property
    def any_begun(self) -> bool:
        return self.lines.begun or self.notes.begun or self.notes.unable


async def run_command(place: Executor, sample: Sample, watch: FileGuard | None = None, files: str = "") -> CommandRun:
    """Run it once; whatever the code under test does, a run comes of it. `files` is for the recorders."""
    verify = sample.verify
    nonce = secrets.token_hex(12)
    report, secret = f"/tmp/carrel-report-{nonce}", f"/tmp/carrel-word-{nonce}"
    word, notes = f"carrel-{secrets.token_hex(16)}", f"/tmp/carrel-notes-{nonce}"
    try:
        await _remove_reports(place, verify.reports)
        env = await _call_witnesses(place, sample, secret, word, notes, files)
        listening, command = _Listening(word), verify.command.replace("{report}", report)
        if env:
            command = recorder_log.recorded(command, env["PYTHONPATH"].partition(":")[0])
        done = await place.exec(command, timeout=verify.timeout, env=env, on_output=listening)
        records = Records(listening.testimony(), parse_notes(await _noted(place, sample, notes)))
        done.stdout = listening.text("stdout", done.stdout)
        done.stderr = parse_lines(listening.text("stderr", done.stderr), word)[0]
        run = TestRun(exit_code=done.exit_code, seconds=done.duration, stdout=done.stdout, stderr=done.stderr)
        text, kind, doubted = None, _named_kind(sample), ""
        try:
            text = await _report(place, sample, report, done)
            kind = _kind(sample, text)
            if text is None and not done.timed_out:
                run.problem = _no_report(done)
            elif text is not None and kind not in ("json", "exit_code"):
                # A large report takes its time, in which others want to be answered.
                run.cases = await asyncio.to_thread(_cases, text, kind)
                if await asyncio.to_thread(claims_something, sample, run):
                    doubted = await _doubts(place, sample, records, secret, run.cases) or _at_odds(kind, run)
                    doubted = doubted or _traced(sample, records.lines.tracers, watch)
            elif kind == "exit_code" and not done.exit_code:
                doubted = await _doubts(place, sample, records, secret, []) or _contradicted(sample, records.lines)
                doubted = doubted or _traced(sample, records.lines.tracers, watch)
        except ReportUnreadable as problem:
            run.problem = f"{problem}; the command ended with {done.exit_code}{_last_line(done)}"
        run.problem = run.problem or doubted
        speaks = not run.problem and await asyncio.to_thread(claims_something, sample, run)
        if speaks and watch is not None and (path := await watch.written(place)):
            doubted = f"{path} was written to while the tests ran, so it may not be the sample's that was run"
            run.problem = doubted
        run.integrity, run.remarks = assessed(sample, run, records, doubted=bool(doubted))
        if not _confined(place):
            await place.exec(["rm", "-f", "--", report, secret, notes], timeout=60)  # They lie among the host's files.
    except WorkerLost as problem:
        lost = f"the code under test ended the place it ran in: {problem}"
        return CommandRun(TestRun(problem=lost, exit_code=-1), None, "exit_code")
    if not doubted and not done.timed_out and not await asyncio.to_thread(claims_something, sample, run):
        run.broken = _broken(done)
    run.by_exit_code = kind == "exit_code"
    if sample.verify.recorder == "required" and recorder_log.wanted(sample) and not records.any_begun:
        run.problem, run.broken = "verify.recorder is `required`, and no recorder ran in the test command", ""
    if done.timed_out:
        run.problem = f"the command did not end within {verify.timeout:g} s"
    elif not run.problem and kind not in ("json", "exit_code", "sarif") and not run.cases:
        run.problem = f"the report has no test; the command ended with {done.exit_code}"
    return CommandRun(run, text, kind)


def _contradicted(sample: Sample, heard: RecorderLog) -> str:
    """Where a runner alone is started, it ends with 0 only when nothing has failed."""
    failed = next((case.whole_name for case in heard.cases if case.status == "failed"), "")
    if not failed or re.search(r"[;&|]", sample.verify.command):
        return ""
    return f"the command ended with 0, and yet {failed} failed: that is not how the test runner ended"


def _at_odds(kind: ReportKind, run: TestRun) -> str:
    """These runners print where the code under test prints too, and end with 0 only when nothing has failed."""
    if kind not in ("go", "cargo", "tap") or not run.exit_code or any(_explains(case, run) for case in run.cases):
        return ""
    return f"no test is said to have failed, and yet the command ended with {run.exit_code}: the report is not all"


def _explains(case: TestCase, run: TestRun) -> bool:
    """Whether it failed; a package of Go's that failed as a whole, while tests in it passed, is itself unexplained."""
    ran = case.name == PACKAGE and any(it.classname == case.classname and it.status == "passed" for it in run.cases)
    return case.status == "failed" and not ran


def _confined(place: Executor) -> bool:
    """Whether the place has a file system of its own, with the witness mounted in it."""
    return "filesystem_isolation" in place.supported_capabilities()


async def _call_witnesses(
    place: Executor, sample: Sample, secret: str, word: str, notes: str, files: str
) -> dict[str, str]:
    """The environment that brings them along; what they need lies in files of the place."""
    at = recorder_log.AT if _confined(place) else str(recorder_log.FOLDER)
    if not recorder_log.wanted(sample):
        return {}
    await place.write_file(secret, word)
    await place.write_file(notes, "")
    return recorder_log.variables(sample, secret, notes, at, files)


async def _doubts(place: Executor, sample: Sample, records: Records, secret: str, cases: list[TestCase]) -> str:
    """Why the report is not to be believed, by all that witnesses say."""
    if not recorder_log.wanted(sample):
        return ""
    required, noted = required_of(sample), records.notes
    if problem := await asyncio.to_thread(find_contradiction, records.lines, cases, required):
        return problem
    if not records.lines.begun and await _text_of(place, secret) is None:
        return "the file that a recorder in the test runner needs was removed before one could begin"
    if not noted.begun and not noted.unable and recorder_log.must_speak(sample) and _passed(cases):
        return "the report tells of tests that passed, and no test program was seen to run: the report is forged"
    return await asyncio.to_thread(find_contradiction, noted, cases, required)


def assessed(sample: Sample, run: TestRun, records: Records, *, doubted: bool) -> tuple[Integrity, list[str]]:
    """Pure: what the recorders of a run can say of its integrity, and why."""
    if doubted:
        return "suspicious", []
    if not recorder_log.wanted(sample):
        return "unknown", ["verify.recorder is `off`"] if sample.verify.recorder == "off" else []
    if not records.any_begun:
        return "unknown", ["no recorder ran in the test command, so nothing but its own report says what was tested"]
    if reasons := [f"{file} installed a tracer or a profiler while the tests ran" for file in records.lines.tracers]:
        return "suspicious", reasons
    if records.notes.unable:
        return "unknown", ["the recorder cannot see what this version of the test runner does"]
    return _compared(sample, run, records.lines.uncompared)


def _compared(sample: Sample, run: TestRun, uncompared: dict[str, str]) -> tuple[Integrity, list[str]]:
    names = required_of(sample)
    reported = ReportedTests(run.cases)
    passed = [case for name in names for case in reported.find(name)] if names else run.cases
    told = ReportedTests([TestCase("", name, "passed") for name in uncompared])
    missed = [case.whole_name for case in passed if case.status == "passed" and told.find(case.whole_name)]
    if passed and "" in uncompared:
        return "unknown", [f"the tests could not be compared with the sample's files: {uncompared['']}"]
    if not missed:
        return "clean", []
    reason = uncompared[told.find(missed[0])[0].name]
    more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
    return "unknown", [f"{missed[0]}{more} could not be compared with the sample's files: {reason}"]


def _traced(sample: Sample, tracers: list[str], watch: FileGuard | None) -> str:
    """A tracer that the work has brought along, in a project that has none of its own: it can change what tests see."""
    for path in tracers:
        before = (watch.base.read(path) if watch is not None else None) or b""
        if not _TRACES.search(sample.patch) and not _TRACES.search(before.decode("utf-8", "replace")):
            return f"{path} installed a tracer or a profiler while the tests ran, which can change what they see"
    return ""


async def _noted(place: Executor, sample: Sample, notes: str) -> str | None:
    """What was written to the file for notes; None where it was removed and would have something in it."""
    text = await _text_of(place, notes) if recorder_log.wanted(sample) else ""
    return "" if text is None and not recorder_log.must_speak(sample) else text


def _passed(cases: list[TestCase]) -> bool:
    return any(case.status == "passed" for case in cases)


async def _report(place: Executor, sample: Sample, path: str, done: CommandResult) -> str | None:
    if sample.verify.reports:
        return await _report_files(place, sample.verify.reports)
    if "{report}" not in sample.verify.command:
        # Test runners differ in where they talk to; a blank line keeps the two apart.
        return f"{done.stdout}\n{done.stderr}" if sample.verifier == "test_suite" else done.stdout
    return await _text_of(place, path)


async def _text_of(place: Executor, path: str) -> str | None:
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    entry = next((entry for entry in await place.list_files(folder) if entry.name == name), None)
    if entry is None or entry.kind != "file":
        return None
    if entry.size > LARGEST_REPORT:
        raise ReportUnreadable(f"the report is larger than {LARGEST_REPORT >> 20} MiB")
    return (await place.read_file(path)).decode("utf-8", "replace")


_SEPARATOR = "\0"


async def _report_files(place: Executor, patterns: list[str]) -> str | None:
    texts = [text for path in await _found(place, patterns) if (text := await _text_of(place, f"./{path}")) is not None]
    return _SEPARATOR.join(texts) if texts else None


async def _found(place: Executor, patterns: list[str]) -> list[str]:
    words = [word for pattern in patterns for word in ("-o", "-path", f"./{pattern.removeprefix('./')}")][1:]
    done = await place.exec(["find", ".", "-type", "f", "(", *words, ")", "-print0"], timeout=60)
    return sorted(name.removeprefix("./") for name in done.stdout.split("\0") if name)


async def _remove_reports(place: Executor, patterns: list[str]) -> None:
    """What lies there before the run is nobody's report on it."""
    if patterns and (old := await _found(place, patterns)):
        await place.exec(["rm", "-f", "--", *old], timeout=60)


def _cases(text: str, kind: ReportKind) -> list[TestCase]:
    return [case for part in _parts(text, kind) for case in cases_in(part, kind)]


def _parts(text: str, kind: ReportKind) -> list[str]:
    return text.split(_SEPARATOR) if kind in ("junit", "sarif") else [text]


def _named_kind(sample: Sample) -> ReportKind:
    """What the sample says that the report is; `exit_code` where that is to be found out."""
    if sample.verifier == "custom":
        return "json"
    return sample.verify.report if sample.verify.report != "auto" else "exit_code"


def _kind(sample: Sample, text: str | None) -> ReportKind:
    if sample.verifier == "custom" or sample.verify.report != "auto":
        return _named_kind(sample)
    if "{report}" in sample.verify.command or sample.verify.reports:
        return kind_of_report(text) if text else "junit"
    return kind_of_report(text or "", sample.verify.command)


def _broken(done: CommandResult) -> str:
    """How the code under test ended the command before it had a result; empty where that cannot be told."""
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
