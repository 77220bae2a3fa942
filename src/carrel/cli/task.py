"""`carrel task`: an agent let loose on samples, and the verdict on somebody's work."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carrel import tasks
from carrel.cli.exit_codes import TaskFailed, WrongUsage, async_command
from carrel.cli.options import text_in
from carrel.cli.output import Column, flush, print_json, print_table, print_text, progress
from carrel.errors import EnvironmentFailed
from carrel.execution.config import Mount

if TYPE_CHECKING:
    from carrel.tasks import Dataset, Sample, Summary, TaskResult, VerificationResult

app = typer.Typer(
    help="Let an agent work on samples, and judge what was done.", no_args_is_help=True, rich_markup_mode=None
)

DatasetName = Annotated[str, typer.Argument(metavar="DATASET", help="A dataset's name, or its folder.")]
DatasetsFolder = Annotated[
    Path | None, typer.Option("--datasets", metavar="DIR", help="Default: $CARREL_HOME/datasets, and the demo.")
]
CacheFolder = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="For unpacked files. Default: $CARREL_HOME/cache.")
]
KeepFolder = Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Keep all output there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_STYLES = {"solved": "green", "flaky": "yellow", "partly": "yellow", "infrastructure_failed": "bold red"}

_AGENT_WORDS = {"could_not_run": "agent not run", "changed_nothing": "nothing changed"}


@app.command("run")
@async_command
async def run(
    dataset: DatasetName,
    samples: Annotated[list[str] | None, typer.Argument(metavar="[SAMPLE]...", help="Default: all of them.")] = None,
    agent: Annotated[
        str, typer.Option(metavar="COMMAND", help="What works on a sample: a command line, run in its place.")
    ] = "",
    workers: Annotated[int, typer.Option(help="Samples at one time.", min=1)] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the results that are there.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The results, a line for each. Default: DATASET.results.jsonl")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for the agent on one sample; 0 for no limit.", min=0)] = 3600,
    network: Annotated[
        bool | None, typer.Option("--network/--no-network", help="For the agent. Default: as the sample says.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="A variable for the agent; again for more.")
    ] = None,
    mount: Annotated[
        list[str] | None, typer.Option(metavar="DIR[:AT]", help="A folder for it to read; again for more.")
    ] = None,
    datasets: DatasetsFolder = None,
    cache: CacheFolder = None,
    keep: KeepFolder = None,
    as_json: AsJson = False,
) -> None:
    """Give each sample to an agent, judge what it did, and count."""
    found = dataset_named(dataset, datasets)
    chosen = [found.sample(name) for name in samples] if samples else found.samples
    if not agent.strip():
        raise WrongUsage("--agent says what works on the samples; there is no default")
    file = output or Path(f"{found.name}.results.jsonl")
    who = tasks.Agent(
        command=agent,
        timeout=timeout or None,
        network=network,
        env=dict(map(_variable, env or [])),
        mounts=tuple(map(_mount, mount or [])),
    )
    count = 0

    def tell(result: TaskResult) -> None:
        nonlocal count
        count += 1
        if as_json:
            return
        words = _AGENT_WORDS.get(result.agent_status) or _words(result.result)
        line = f"{result.sample_id:<24} {words:<18} {_score(result.result):>5}  {result.seconds:>7.1f} s"
        print_text(f"{line}  {_reason_of_run(result)}".rstrip(), _STYLES.get(result.result.outcome, ""))
        flush()
        step("")

    try:
        with (
            nullcontext(print)
            if as_json
            else progress(None if resume else len(chosen), found.name, among_lines=True) as step
        ):
            total = await tasks.run_samples(
                chosen, who, file, workers=workers, resume=resume, cache=cache, keep=keep, done=tell
            )
    except asyncio.CancelledError:
        print(f"stopped; {count} done now are in {file}, and --resume goes on from there", file=sys.stderr)
        raise
    if as_json:
        print_json({"summary": total.model_dump(), "results": str(file.absolute()), "done_now": count})
    else:
        _print_summary(total, file, len(chosen) - count)
    if total.could_not_run:
        raise TaskFailed(
            f"the agent could not be run on {total.could_not_run} of {total.samples} samples: its command ended with "
            "126 or 127; agent_stderr in the results says why, and --resume tries them again"
        )
    lost = total.samples - total.judged
    if lost:
        raise EnvironmentFailed(f"{lost} of {total.samples} samples have no verdict; --resume tries them again")


@app.command("verify")
@async_command
async def verify(
    dataset: DatasetName,
    sample: Annotated[str, typer.Argument(metavar="SAMPLE")],
    patch: Annotated[str | None, typer.Option(metavar="FILE|-", help="The work, as a patch.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", exists=True, file_okay=False, help="The work, as the sample's files were left."),
    ] = None,
    gold: Annotated[bool, typer.Option("--gold", help="The sample's own solution.")] = False,
    datasets: DatasetsFolder = None,
    cache: CacheFolder = None,
    keep: KeepFolder = None,
    as_json: AsJson = False,
) -> None:
    """Judge somebody's work on a sample: a patch, a folder, or the sample's own solution."""
    wanted = dataset_named(dataset, datasets).sample(sample)
    if (patch is not None) + (folder is not None) + gold != 1:
        raise WrongUsage("name the work to judge: one of --patch FILE, --folder DIR or --gold")
    if folder is not None:
        result = await _judge_folder(wanted, folder, cache, keep)
    else:
        text = wanted.patch if gold else text_in(patch or "")
        result = await tasks.grade_patch(wanted, text, cache=cache, keep=keep)
    if as_json:
        print_json(result.shown().model_dump())
    else:
        _print_result(result)
    if result.outcome == "infrastructure_failed":
        raise EnvironmentFailed(f"{sample} could not be judged: {_reason(result)}")
    if not result.is_success:
        raise TaskFailed(f"{sample}: {result.outcome.replace('_', ' ')}, score {_score(result)}")


async def _judge_folder(sample: Sample, folder: Path, cache: Path | None, keep: Path | None) -> VerificationResult:
    prepared = await tasks.prepare_sample(sample, cache)
    work = tasks.changes_of_folder(prepared.workspace, folder.absolute(), tasks.protection_for(prepared).why)
    return await tasks.grade(sample, work, keep=keep, prepared=prepared)


def dataset_named(name: str, folder: Path | None) -> Dataset:
    """By its name among the datasets, or a folder of its own where a path was typed."""
    if os.sep in name or name in (".", ".."):
        return tasks.Dataset.load(name)
    return tasks.Datasets(folder).get(name)


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not name:
        raise WrongUsage(f"{text!r} is no variable: write NAME=VALUE, or NAME for the one that is set here")
    if not given and name not in os.environ:
        raise WrongUsage(f"--env {name}: there is no such variable here; write {name}=VALUE")
    return name, value if given else os.environ[name]


def _mount(text: str) -> Mount:
    source, _, at = text.partition(":")
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise WrongUsage(f"--mount {text}: there is no {path}")
    return Mount(source=path, at=at or str(path))


def _words(result: VerificationResult) -> str:
    suspicious = result.is_success and result.integrity == "suspicious"
    return result.outcome.replace("_", " ") + ", suspicious" * suspicious


def _score(result: VerificationResult) -> str:
    """With two decimals; 1.00 is a whole success only."""
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


def _reason_of_run(result: TaskResult) -> str:
    """The same for a run; when the agent itself is broken, what it said last."""
    if result.agent_status == "could_not_run":
        last = (result.agent_stderr or result.agent_stdout).strip().splitlines()[-1:]
        return f"the agent's command ended with {result.agent_exit_code}{': ' if last else ''}{''.join(last)[:200]}"
    if result.agent_status == "changed_nothing" and not result.result.is_success:
        return f"the agent changed nothing and ended with {result.agent_exit_code}"
    return _reason(result.result)


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"failed: {', '.join(names[:2])}{more}" if names else ""


def _print_result(result: VerificationResult) -> None:
    print_text(f"{_words(result)}, score {_score(result)}", _STYLES.get(result.outcome, "bold"))
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


def _print_summary(total: Summary, file: Path, earlier: int) -> None:
    print_text()
    rows = [(outcome.replace("_", " "), count) for outcome, count in total.outcomes.items()]
    print_table([Column("outcome"), Column("samples", justify="right")], rows)
    if total.could_not_run:
        print_text(f"On {total.could_not_run} of them the agent could not be run.", "bold red")
    if total.changed_nothing:
        print_text(f"On {total.changed_nothing} of them the agent changed nothing.", "yellow")
    print_text()
    rate = f"{total.pass_rate:.1%} solved ({total.solved} of {total.judged})"
    print_text(f"{rate}, 95 % between {total.low:.1%} and {total.high:.1%}; mean score {total.mean_score:.2f}", "bold")
    if total.suspicious:
        print_text(f"{total.suspicious} of the solved are suspicious; the results say why in `evidence`", "yellow")
    before = f"; {earlier} were done before" if earlier else ""
    print_text(f"Median {total.median_seconds:.1f} s a sample. Results: {file}{before}")
