"""`carrel task …`: run an agent on samples, show and compare its runs, and verify work on a sample."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import carrel
from carrel import tasks
from carrel.cli.exit_codes import TaskFailed, WrongUsage
from carrel.cli.options import (
    TASKS,
    Base,
    CacheFolder,
    DatasetsFolder,
    Json,
    Timeout,
    command,
    existing_folder,
    group,
    read_text,
    resolve_base,
)
from carrel.cli.output import Column, flush, print_json, print_table, print_text, progress
from carrel.cli.remote_task import RemoteSamples
from carrel.errors import EnvironmentFailed
from carrel.execution.config import Mount
from carrel.text import readable_size

if TYPE_CHECKING:
    from carrel.tasks import Dataset, Rate, RunFolder, RunInfo, Sample, Summary, TaskResult, VerificationResult

app = group(
    "task",
    "Run an agent on samples, and verify what it did.",
    panel=TASKS,
    example='carrel task run demo calc-1 --agent "sed -i s/if/while/ calc.py"',
)

DatasetName = Annotated[str, typer.Argument(metavar="DATASET", help="A dataset's name, or its folder.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The name of a run in BASE/runs, or its folder.")]

_PULL_PAUSE = 5.0
"""Seconds between two lines about a download."""
Pull = Annotated[
    Literal["never", "missing", "always"],
    typer.Option(metavar="never|missing|always", help="Which images of containers are pulled before."),
]

_STYLES = {"solved": "green", "flaky": "yellow", "partly": "yellow", "infrastructure_failed": "bold red"}
_AGENT_STATUS = {"could_not_run": "agent not run", "changed_nothing": "nothing changed"}


@command(app, "run", example="carrel task run demo calc-1 --agent 'sed -i s/if/while/ calc.py'")
async def run(
    dataset: DatasetName,
    samples: Annotated[list[str] | None, typer.Argument(metavar="SAMPLE", help="Only these samples.")] = None,
    agent: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Command that solves a sample. Runs inside the sandbox; --mount makes your files visible there.",
        ),
    ] = "",
    attempts: Annotated[int, typer.Option(metavar="K", min=1, help="Attempts at each sample.")] = 1,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Attempts at a time. Default: 2; with --server, as many as it has free slots.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest run of this dataset, or the one of --output.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder of the run. Default: BASE/runs/DATASET-<UTC time>"),
    ] = None,
    timeout: Timeout = 3600,
    network: Annotated[
        bool | None, typer.Option("--network/--no-network", help="Allow network access. Default: as the sample says.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="A variable for the agent; may be repeated.")
    ] = None,
    mount: Annotated[
        list[str] | None, typer.Option(metavar="DIR[:AT]", help="A folder that the agent can read; may be repeated.")
    ] = None,
    pull: Pull = "missing",
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Run on this server or cluster, with its dataset. CARREL_API_KEY has the key."
        ),
    ] = None,
    base: Base = None,
    datasets: DatasetsFolder = None,
    cache: CacheFolder = None,
    as_json: Json = False,
) -> None:
    """Run an agent on samples, and count those it solved."""
    if not agent.strip():
        raise WrongUsage("--agent is missing: the command that solves a sample")
    if server is not None and (mount or network is not None or datasets is not None):
        raise WrongUsage("--mount, --network and --datasets do not go with --server: the server has its own")
    remote = RemoteSamples(server, dataset) if server is not None else None
    if remote is not None:
        name, selected = dataset, await remote.samples(samples or [])
        workers = workers or await remote.workers()
    else:
        found = dataset_named(dataset, datasets, base)
        name, selected = found.name, [found.sample(each) for each in samples] if samples else found.samples
    solver = tasks.Agent(
        command=agent,
        timeout=timeout or None,
        network=network,
        env=dict(map(_variable, env or [])),
        mounts=tuple(map(_mount, mount or [])),
    )
    if remote is None:
        await make_images(selected, cache or resolve_base(base) / "cache", pull)
    folder = _run_folder(name, output, base, resume=resume)
    planned = len(selected) * attempts
    count = 0

    def print_result(result: TaskResult) -> None:
        nonlocal count
        count += 1
        if as_json:
            return
        name = f"{result.sample_id} #{result.attempt}" if attempts > 1 else result.sample_id
        words = _AGENT_STATUS.get(result.agent.status) or _outcome(result.verdict)
        line = f"{name:<24} {words:<18} {_score(result.verdict):>5}  {result.seconds:>7.1f} s"
        print_text(f"{line}  {_reason_of_attempt(result)}".rstrip(), _STYLES.get(result.outcome, ""))
        flush()
        step("")

    containers = tasks.ContainerPool(workers or 2)
    bar = nullcontext(print) if as_json else progress(None if resume else planned, name, among_lines=True)
    try:
        with bar as step:
            total = await tasks.run_samples(
                selected,
                solver,
                _recorded_sessions(solver, resolve_base(base), cache, containers)
                if remote is None
                else lambda sample: remote.open(sample, solver.env, solver.timeout),
                folder,
                attempts=attempts,
                workers=workers or 2,
                resume=resume,
                on_result=print_result,
            )
    except asyncio.CancelledError:
        print(f"stopped; {count} finished attempts are in {folder}; --resume continues from there", file=sys.stderr)
        raise
    finally:
        await containers.close()
        if remote is not None:
            await remote.close()
    if as_json:
        print_json({"summary": total.model_dump(mode="json"), "run": str(folder), "done_now": count})
    else:
        print_text()
        _print_summary(total)
        before = f"; {planned - count} were done before" if planned > count else ""
        print_text(f"Median {total.median_seconds:.1f} s an attempt. Run: {folder}{before}")
    if total.could_not_run:
        raise TaskFailed(
            f"the agent could not be run in {total.could_not_run} of {total.attempts} attempts: its command ended with "
            f"126 or 127; {folder}/agents has its output, and --resume tries them again"
        )
    lost = total.attempts - total.judged
    if lost:
        raise EnvironmentFailed(f"{lost} of {total.attempts} attempts have no verdict; --resume tries them again")


async def make_images(samples: Sequence[Sample], cache: Path, pull: Literal["never", "missing", "always"]) -> None:
    """Say on standard error which images are missing and how large they are, then pull and build them."""
    needed = await tasks.needed_images(samples, cache)
    report_images(needed)
    shown = time.monotonic()

    def show(image: str, step: str) -> None:
        nonlocal shown
        # A download reports many times a second.
        if not step.startswith("pulled ") or time.monotonic() - shown > _PULL_PAUSE:
            shown = time.monotonic()
            print(f"{image}: {step}", file=sys.stderr, flush=True)

    failed = await tasks.make_images(needed, cache, pull=pull, on_step=show)
    for image, problem in failed.items():
        print(f"{image}: {problem}", file=sys.stderr, flush=True)


def report_images(needed: Sequence[tasks.NeededImage]) -> None:
    missing = [image for image in needed if not image.is_present]
    if needed:
        present = sum(image.size or 0 for image in needed if image.is_present)
        there = f"{len(needed) - len(missing)} on the engine ({readable_size(present)})"
        print(f"images of containers: {there}, {len(missing)} missing", file=sys.stderr)
    for image in missing:
        size = "of unknown size" if image.size is None else f"{readable_size(image.size)} to pull"
        how = f"built from {image.dockerfile}" if image.dockerfile else "pulled"
        bases = f" after {', '.join(image.missing_bases)}" if image.missing_bases else ""
        size = size if not image.dockerfile or image.missing_bases else "nothing to pull"
        print(f"  {image.name}: {how}{bases}, {size}; {_count_samples(image.samples)}", file=sys.stderr, flush=True)


def _count_samples(ids: Sequence[str]) -> str:
    return f"for {ids[0]}" if len(ids) == 1 else f"for {len(ids):,} samples"


def _recorded_sessions(
    agent: tasks.Agent, base: Path, cache: Path | None, containers: tasks.ContainerPool | None = None
) -> tasks.OpenSession:
    """Sessions on this machine whose traces are kept in the base folder."""

    async def open_session(sample: Sample) -> carrel.Session:
        executor = tasks.sample_executor(
            sample,
            cache or base / "cache",
            env=agent.env,
            network=agent.network,
            mounts=agent.mounts,
            containers=containers,
        )
        session = carrel.Session(carrel.FileStorage(base), executor, on_error="skip")
        try:
            await session.start()
        except BaseException:
            await session.close()
            raise
        return session

    return open_session


@command(app, "show", example="carrel task show")
def show_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run in BASE/runs or its folder. Default: all.")] = "",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Show all runs, or one run with its attempts."""
    if not run:
        _print_runs([tasks.RunFolder(path) for path in _run_paths(base)], as_json)
        return
    folder = _run_named(run, base)
    info, results = folder.read_info(), folder.read_results()
    total = tasks.summary_of(results, info.attempts)
    if as_json:
        attempts = [result.model_dump(mode="json", exclude={"verdict"}) for result in results]
        data = {"run": info.model_dump(mode="json"), "summary": total.model_dump(mode="json"), "results": attempts}
        print_json(data)
        return
    columns = [Column("SAMPLE", "cyan"), Column("#", justify="right"), Column("OUTCOME")]
    columns += [Column("SCORE", justify="right"), Column("SECONDS", justify="right", may_go=True)]
    columns += [Column("TOKENS", justify="right", may_go=True), Column("WHY", gives_way=True)]
    rows = [
        (
            result.sample_id,
            result.attempt,
            _AGENT_STATUS.get(result.agent.status) or _outcome(result.verdict),
            _score(result.verdict),
            f"{result.seconds:.1f}",
            "-" if result.tokens is None else f"{result.tokens:,}",
            _reason_of_attempt(result),
        )
        for result in sorted(results, key=lambda result: (result.sample_id, result.attempt))
    ]
    print_text(f"{info.dataset}: {info.agent}", "bold")
    print_table(columns, rows)
    print_text()
    _print_summary(total)
    missing = len(info.samples) * info.attempts - len(results)
    if missing > 0:
        print_text(f"{missing} attempts are missing; carrel task run … --resume makes them", "yellow")


def _print_runs(folders: Sequence[RunFolder], as_json: bool) -> None:
    found: list[tuple[str, RunInfo]] = [(folder.path.name, folder.read_info()) for folder in folders]
    if as_json:
        print_json([{"name": name, **info.model_dump(mode="json")} for name, info in found])
        return
    if not found:
        print_text("No runs yet; carrel task run makes one.")
        return
    columns = [Column("RUN", "cyan"), Column("SAMPLES", justify="right"), Column("#", justify="right")]
    columns += [Column("SOLVED", justify="right"), Column("AGENT", gives_way=True)]
    rows = [
        (
            name,
            len(info.samples),
            info.attempts,
            "unfinished" if info.summary is None else f"{info.summary.pass_rate:.1%}",
            info.agent,
        )
        for name, info in found
    ]
    print_table(columns, rows)


@command(app, "compare", example="carrel task compare first second")
def compare_runs(first: RunName, second: RunName, base: Base = None, as_json: Json = False) -> None:
    """Compare two runs on the samples that both have judged."""
    folders = [_run_named(name, base) for name in (first, second)]
    results = [tasks.attempts_of(folder.read_results()) for folder in folders]
    found = tasks.compare(*results)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    if not found.samples:
        raise WrongUsage("these two runs have no judged sample in common")
    names = [folder.path.name for folder in folders]
    width = max(map(len, names))
    for name, rate in zip(names, (found.first, found.second), strict=True):
        print_text(f"{name:<{width}}  {_rate(rate)}", "bold")
    for sign, style, samples in (("+", "green", found.better), ("-", "red", found.worse)):
        for sample in samples:
            print_text(f"{sign} {sample}", style)
    same = found.samples - len(found.better) - len(found.worse)
    print_text(
        f"{found.samples} samples in both: {len(found.better)} better, {len(found.worse)} worse, {same} the same; "
        f"p = {found.p_value:.3f} (sign test)"
    )


def _run_paths(base: Path | None) -> list[Path]:
    """The folders of all runs, the newest first."""
    return sorted((path.parent for path in (resolve_base(base) / "runs").glob("*/run.json")), reverse=True)


def _run_named(name: str, base: Path | None) -> RunFolder:
    path = Path(name) if os.sep in name or Path(name, "run.json").is_file() else resolve_base(base) / "runs" / name
    if not (path / "run.json").is_file():
        there = ", ".join(path.name for path in _run_paths(base)[:10]) or "none"
        raise WrongUsage(f"there is no run {name!r} in {resolve_base(base) / 'runs'}; there are: {there}")
    return tasks.RunFolder(path)


def _run_folder(dataset: str, output: Path | None, base: Path | None, *, resume: bool) -> Path:
    if output is not None:
        return output.absolute()
    if resume:
        for path in _run_paths(base):
            if tasks.RunFolder(path).read_info().dataset == dataset:
                return path.absolute()
        raise WrongUsage(f"there is no run of {dataset} in {resolve_base(base) / 'runs'} to resume; leave --resume out")
    return tasks.RunFolder.new(resolve_base(base) / "runs", dataset).path.absolute()


@command(app, "verify", example="carrel task verify demo calc-1 --gold")
async def verify(
    dataset: DatasetName,
    sample: Annotated[str, typer.Argument(metavar="SAMPLE", help="The id of a sample.")],
    patch: Annotated[str | None, typer.Option(metavar="FILE|-", help="The work as a patch; - for stdin.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", exists=True, file_okay=False, help="The work as a changed copy of the files."),
    ] = None,
    gold: Annotated[bool, typer.Option("--gold", help="The sample's own solution.")] = False,
    base: Base = None,
    datasets: DatasetsFolder = None,
    cache: CacheFolder = None,
    logs: Annotated[
        Path | None, typer.Option("--logs", metavar="DIR", help="Write the complete output to this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify work on a sample.

    The work is a patch, a folder, or the sample's own solution. The exit code is 1 if the sample is not solved."""
    wanted = dataset_named(dataset, datasets, base).sample(sample)
    if (patch is not None) + (folder is not None) + gold != 1:
        raise WrongUsage("give the work to verify: one of --patch FILE, --folder DIR or --gold")
    cache = cache or resolve_base(base) / "cache"
    if folder is not None:
        result = await _verify_folder(wanted, folder, cache, logs)
    else:
        text = wanted.patch if gold else read_text(patch or "")
        result = await tasks.grade_patch(wanted, text, cache=cache, keep=logs)
    if as_json:
        print_json(result.shown().model_dump())
    else:
        _print_result(result)
    if result.outcome == "infrastructure_failed":
        raise EnvironmentFailed(f"{sample} could not be verified: {_reason(result)}")
    if not result.is_success:
        raise TaskFailed(f"{sample}: {result.outcome.replace('_', ' ')}, score {_score(result)}")


async def _verify_folder(sample: Sample, folder: Path, cache: Path, logs: Path | None) -> VerificationResult:
    prepared = await tasks.prepare_sample(sample, cache)
    changes = tasks.changes_of_folder(
        prepared.workspace, folder.absolute(), tasks.protection_for(prepared).protected_reason
    )
    return await tasks.grade(sample, changes, keep=logs, prepared=prepared)


def dataset_named(name: str, folder: Path | None, base: Path | None = None) -> Dataset:
    """Return the dataset of this name, or the one in a folder if the name is a path."""
    if os.sep in name or name in (".", ".."):
        return tasks.Dataset.load(name)
    return datasets_in(folder, base).get(name)


def datasets_in(folder: Path | None, base: Path | None = None) -> tasks.Datasets:
    """Return the datasets of a folder; without one, those of the base folder and the demo."""
    if folder is not None:
        existing_folder(folder, "--datasets", must_exist=True)
    return tasks.Datasets(folder or resolve_base(base) / "datasets", demo=folder is None)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name:
        raise WrongUsage(f"{text!r} is not a variable: write NAME=VALUE, or NAME for one that is set here")
    if not equals and name not in os.environ:
        raise WrongUsage(f"--env {name}: the variable is not set here; write {name}=VALUE")
    return name, value if equals else os.environ[name]


def _mount(text: str) -> Mount:
    source, _, at = text.partition(":")
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise WrongUsage(f"--mount {text}: there is no {path}")
    return Mount(source=path, at=at or str(path))


def _outcome(result: VerificationResult) -> str:
    suspicious = result.is_success and result.integrity == "suspicious"
    return result.outcome.replace("_", " ") + ", suspicious" * suspicious


def _score(result: VerificationResult) -> str:
    """With two decimals; 1.00 only for a complete success."""
    return f"{result.score if result.score == 1 else min(result.score, 0.99):.2f}"


def _reason(result: VerificationResult) -> str:
    """One line on why it is not solved, or why it may not be."""
    if result.is_success and result.integrity != "suspicious":
        return ""
    if result.evidence:
        return result.evidence[0].splitlines()[0]
    lacking = [name for name, how in result.required.items() if how != "passed"] or [
        test.name for test in result.failures
    ]
    return _shortened(lacking)


def _reason_of_attempt(result: TaskResult) -> str:
    """The same for an attempt; for an agent that could not be run, the last line that it printed."""
    if result.agent.status == "could_not_run":
        message = f": {result.agent.message[:200]}" if result.agent.message else ""
        return f"the agent's command ended with {result.agent.exit_code}{message}"
    if result.agent.status == "changed_nothing" and not result.is_success:
        return f"the agent changed nothing and ended with {result.agent.exit_code}"
    return _reason(result.verdict)


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"failed: {', '.join(names[:2])}{more}" if names else ""


def _print_result(result: VerificationResult) -> None:
    print_text(f"{_outcome(result)}, score {_score(result)}", _STYLES.get(result.outcome, "bold"))
    print_text(f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped of {result.total}")
    for test in result.failures[:20]:
        print_text(f"  failed  {test.name}", "red")
    for name in result.missing[:20]:
        print_text(f"  missing {name}", "red")
    if result.integrity != "clean":
        print_text(f"  integrity: {result.integrity}", "yellow")
    for line in result.evidence:
        print_text(f"  {line}", "yellow")
    for path, reason in list(result.left_out.items())[:20]:
        print_text(f"  not judged: {path} ({reason})", "dim")


def _print_summary(total: Summary) -> None:
    rows = [(outcome.replace("_", " "), count) for outcome, count in total.outcomes.items()]
    print_table([Column("outcome"), Column("attempts", justify="right")], rows)
    if total.could_not_run:
        print_text(f"In {total.could_not_run} of them the agent could not be run.", "bold red")
    if total.changed_nothing:
        print_text(f"In {total.changed_nothing} of them the agent changed nothing.", "yellow")
    print_text()
    for k, rate in total.pass_at.items():
        print_text(f"pass@{k}  {_rate(rate)}", "bold")
    print_text(f"{total.solved} of {total.judged} attempts solved; mean score {total.mean_score:.2f}")
    if total.suspicious:
        print_text(f"{total.suspicious} of the solved are suspicious; the results say why in `evidence`", "yellow")


def _rate(rate: Rate) -> str:
    return f"{rate.rate:.1%} solved, 95 % between {rate.low:.1%} and {rate.high:.1%}"
