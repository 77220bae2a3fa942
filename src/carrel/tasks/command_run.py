"""One run of a sample's verify command in a place, and what its report tells."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from carrel.errors import ReportUnreadable, WorkerLost
from carrel.execution.executor import CommandResult, Executor
from carrel.execution.settings import Mount
from carrel.tasks.reports import ReportKind, cases_in, kind_of_report
from carrel.tasks.sample import Sample
from carrel.tasks.testimony import doubt, hear
from carrel.tasks.verdict import Run, required_of

LARGEST_REPORT = 64 * 1024 * 1024
_WITNESS = Path(__file__).with_name("witness")
WITNESS_AT = "/opt/carrel-witness"
WITNESS_PLUGIN = "carrel_witness"
WITNESS_MODULES = frozenset(file.stem for file in _WITNESS.glob("*.py"))
_RUNNERS = r"\bpy\.?test\b|-m\s+unittest\b"


@dataclass(frozen=True)
class Ran:
    """A run as the verifiers see it."""

    run: Run
    report: str | None
    """What was written to `{report}`, or to standard output where the command has no `{report}`; None for nothing."""
    kind: ReportKind


def wants_witness(sample: Sample) -> bool:
    """Whether the command runs pytest or unittest in a way in which they take something from the environment."""
    command = sample.verify.command
    python_alone = re.search(r"\bpython[\d.]*\s+(-\w+\s+)*-\w*[IE]", command)
    return sample.verifier == "test_suite" and re.search(_RUNNERS, command) is not None and not python_alone


def witness_mounts(sample: Sample) -> tuple[Mount, ...]:
    return (Mount(source=_WITNESS, at=WITNESS_AT),) if wants_witness(sample) else ()


async def run_command(place: Executor, sample: Sample) -> Ran:
    """Run it once; whatever the code under test does, a run comes of it."""
    verify = sample.verify
    nonce = secrets.token_hex(12)
    report, secret = f"/tmp/carrel-report-{nonce}", f"/tmp/carrel-word-{nonce}"
    word = f"carrel-{secrets.token_hex(16)}"
    env: dict[str, str] = {}
    try:
        await _remove_reports(place, verify.reports)
        if wants_witness(sample):
            env = await _call_witness(place, sample, secret, word)
        done = await place.exec(verify.command.replace("{report}", report), timeout=verify.timeout, env=env)
        stderr, told = hear(done.stderr, word)
        done.stderr = stderr
        text = await _report(place, sample, report, done)
        if not _confined(place):
            await place.exec(["rm", "-f", "--", report, secret], timeout=60)  # They lie among the host's files.
    except WorkerLost as problem:
        lost = f"the code under test ended the place it ran in: {problem}"
        return Ran(Run(problem=lost, exit_code=-1), None, "exit_code")
    kind = _kind(sample, text)
    run = Run(exit_code=done.exit_code, seconds=done.duration, stdout=done.stdout, stderr=done.stderr)
    if text is None and not done.timed_out:
        run.problem = _no_report(done)
    elif text is not None and kind not in ("json", "exit_code"):
        try:
            run.cases = [case for part in _parts(text, kind) for case in cases_in(part, kind)]
            run.problem = doubt(told, run.cases, required_of(sample))
        except ReportUnreadable as problem:
            run.problem = str(problem)
    run.by_exit_code = kind == "exit_code"
    if done.timed_out:
        run.problem = f"the command did not end within {verify.timeout:g} s"
    elif not run.problem and kind not in ("json", "exit_code", "sarif") and not run.cases:
        run.problem = f"the report tells of no test; the command ended with {done.exit_code}"
    return Ran(run, text, kind)


def _confined(place: Executor) -> bool:
    """Whether the place has a file system of its own, with the witness mounted in it."""
    return "filesystem_isolation" in place.supported_capabilities()


async def _call_witness(place: Executor, sample: Sample, file: str, word: str) -> dict[str, str]:
    await place.write_file(file, word)
    given = sample.environment.env
    path = [WITNESS_AT if _confined(place) else str(_WITNESS), *filter(None, [given.get("PYTHONPATH", "")])]
    plugins = [WITNESS_PLUGIN, *filter(None, [given.get("PYTEST_PLUGINS", "")])]
    return {"CARREL_WITNESS": file, "PYTHONPATH": ":".join(path), "PYTEST_PLUGINS": ",".join(plugins)}


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


def _parts(text: str, kind: ReportKind) -> list[str]:
    return text.split(_SEPARATOR) if kind in ("junit", "sarif") else [text]


def _kind(sample: Sample, text: str | None) -> ReportKind:
    if sample.verifier == "custom":
        return "json"
    if sample.verify.report != "auto":
        return sample.verify.report
    if "{report}" in sample.verify.command or sample.verify.reports:
        return kind_of_report(text) if text else "junit"
    return kind_of_report(text or "")


def _no_report(done: CommandResult) -> str:
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    said = f"; its last line: {last[0][:300]}" if last else ""
    return f"the command ended with {done.exit_code} and wrote no report{said}"
