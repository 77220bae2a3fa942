"""`carrel datasets …`: which there are, whether they are right, and making new ones."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carrel import tasks
from carrel.cli.exit_codes import TaskFailed, WrongUsage, async_command
from carrel.cli.output import Column, flush, print_json, print_table, print_text, progress
from carrel.cli.task import dataset_named
from carrel.errors import ProgramMissing

if TYPE_CHECKING:
    from carrel.tasks import CheckResult, Dataset, ImportResult

app = typer.Typer(
    help="Datasets: folders of samples, each a task with its files and its tests.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PYTEST = "python -m pytest -q --junitxml={report}"
MOST_LEFT_OUT = 20
"""Rows of the table of what an import left out."""
Folder = Annotated[
    Path | None,
    typer.Option("--datasets", metavar="DIR", help="The folder of datasets (default: $CARREL_HOME/datasets)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Workers = Annotated[int, typer.Option(min=1, help="How many samples at a time.")]
Cache = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where unpacked files are kept (default: $CARREL_HOME/cache).")
]


@app.callback(invoke_without_command=True)
def _datasets(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
def list_datasets(folder: Folder = None, as_json: Json = False) -> None:
    """The datasets, and how many samples each has."""
    datasets = tasks.Datasets(folder)
    found = datasets.list()
    if as_json:
        print_json([info.model_dump(mode="json") for info in found])
    elif not found:
        print_text(f"No datasets in {datasets.folder} yet.")
    else:
        columns = [
            Column("NAME", "cyan"),
            Column("SAMPLES", justify="right"),
            Column("WHAT", gives_way=True),
        ]
        print_table(columns, [(info.name, f"{info.sample_count:,}", info.description) for info in found])


@app.command("check")
@async_command
async def check_dataset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A dataset's name, or the path to its folder.")],
    samples: Annotated[list[str] | None, typer.Argument(metavar="[SAMPLE]...", help="Only these.")] = None,
    workers: Workers = 2,
    folder: Folder = None,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Judge each sample as it is and with its own patch, and tell what does not fit.

    The tests in fail_to_pass have to fail before and pass after the patch, those in pass_to_pass pass both times."""
    dataset = dataset_named(name, folder)
    wanted = [dataset.sample(id_) for id_ in samples] if samples else dataset.samples
    with progress(len(wanted), f"checking {dataset.name}") as done:
        findings = await tasks.check(
            wanted, cache=cache, workers=workers, on_result=lambda result: done(result.sample_id)
        )
    if as_json:
        print_json([finding.model_dump() for finding in findings])
    else:
        _print_findings(findings)
    _end(dataset, findings)


def _print_findings(findings: list[CheckResult]) -> None:
    words = {"right": ("right", "green"), "wrong": ("WRONG", "bold red"), "not_checked": ("not checked", "yellow")}
    columns = [Column(title) for title in ("SAMPLE", "", "WITHOUT PATCH", "WITH PATCH")]
    columns += [Column("TESTS", justify="right"), Column("SECONDS", justify="right", may_go=True)]
    rows = [
        (one.sample_id, words[one.status][0], one.before or "-", one.after or "-", one.tests, f"{one.seconds:.1f}")
        for one in findings
    ]
    print_table(columns, rows)
    for finding in findings:
        for fault in finding.faults:
            print_text(f"{finding.sample_id}: {fault}", words[finding.status][1])


def _end(dataset: Dataset, findings: list[CheckResult]) -> None:
    wrong = [finding.sample_id for finding in findings if finding.status == "wrong"]
    unseen = [finding.sample_id for finding in findings if finding.status == "not_checked"]
    if wrong:
        raise TaskFailed(
            f"{len(wrong)} of {len(findings)} samples of {dataset.name} are not right: {', '.join(wrong[:10])}"
        )
    if unseen:
        raise ProgramMissing(
            f"{len(unseen)} of {len(findings)} samples could not be checked here: {', '.join(unseen[:10])}"
        )


@app.command("prune")
def prune_cache(
    older_than: Annotated[float, typer.Option(metavar="DAYS", min=0, help="Last used so many days ago.")] = 30,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would go, and remove nothing.")] = False,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Remove unpacked files and set-up layers that nobody has used for a while; what is in use stays."""
    done = tasks.prune(cache or tasks.default_cache(), time.time() - older_than * 86_400, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "removed": [{"name": each.name, "bytes": each.bytes} for each in done.removed],
                "bytes": done.bytes,
                "in_use": done.in_use,
                "kept": done.kept,
                "dry_run": dry_run,
            }
        )
        return
    what = "would be removed" if dry_run else "removed"
    print_text(f"{len(done.removed):,} {what}, {done.bytes / 1e6:,.1f} MB; {done.in_use:,} in use, {done.kept:,} kept")


@app.command("import")
@async_command
async def import_dataset(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A SWE-bench-style JSONL; or give --repo and --commits.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="What the new dataset is called.")] = "",
    files: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With FILE: the git bundles, archives or folders of the repositories."),
    ] = None,
    repo: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A git repository whose commits become samples.")
    ] = None,
    commits: Annotated[str, typer.Option(metavar="A..B", help="With --repo: which commits.")] = "",
    test_command: Annotated[
        str, typer.Option(metavar="COMMAND", help=f"What runs the tests (default: {PYTEST}, with pytest installed).")
    ] = "",
    report: Annotated[
        str, typer.Option(metavar="FORMAT", help="What it writes: junit, tap, unittest, go, cargo, …")
    ] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one run of the tests may take.")] = 300,
    dep: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="A package it needs; again for more.")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="COMMAND", help="Run once in a sample's files, online; again for more."),
    ] = None,
    network: Annotated[bool, typer.Option("--network", help="Let samples use the network.")] = False,
    test_pattern: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="With --repo: paths that are tests besides the usual ones.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="With --repo: only the newest so many commits that fit.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --repo: go on with an import of these settings that was stopped.")
    ] = False,
    description: Annotated[str, typer.Option(metavar="TEXT", help="What the dataset is about.")] = "",
    workers: Workers = 2,
    folder: Folder = None,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Make a dataset from SWE-bench lines, or from the commits of a repository that touch both source and tests."""
    if not name:
        raise WrongUsage("the new dataset needs a --name")
    deps = [*(dep or []), *([] if test_command or any(map(_is_pytest, dep or [])) else ["pytest"])]
    environment = {"deps": deps, "setup": setup or [], "setup_network": bool(setup), "network": network}
    verify = {"command": test_command or PYTEST, "report": report, "timeout": timeout}
    settings = {"description": description, "environment": _set(environment), "verify": _set(verify)}
    into = tasks.Datasets(folder).folder / name
    if file is not None and repo is None and files is not None:
        done = tasks.import_swebench(file, files, into, settings)
    elif file is None and repo is not None and commits:
        done = await _import_history(
            repo,
            commits,
            into,
            settings,
            as_json=as_json,
            test_patterns=test_pattern or (),
            limit=limit,
            workers=workers,
            cache=cache,
            resume=resume,
        )
    else:
        raise WrongUsage("give a FILE and --files with its repositories, or --repo and --commits")
    _print_imported(done, as_json)


async def _import_history(
    repo: Path, commits: str, into: Path, settings: dict[str, Any], *, as_json: bool, **options: Any
) -> ImportResult:
    """One line for each commit that was judged, and below them a bar for a person."""
    total = count = 0
    with progress(None, f"judging commits of {repo.name}", among_lines=not as_json) as step:

        def found(commits: int, judged: int) -> None:
            nonlocal total
            total = commits
            step("", total)
            if not as_json:
                earlier = f", {judged} of them judged before" if judged else ""
                print_text(f"{commits:,} commits touch both source and tests{earlier}", "bold")

        def heard(commit: str, what: str) -> None:
            nonlocal count
            count += 1
            step("")
            if not as_json:
                print_text(f"{count:>{len(str(total))}}/{total}  {commit[:12]}  {what}")
                flush()

        try:
            return await tasks.import_history(repo, commits, into, settings, on_found=found, on_commit=heard, **options)
        except asyncio.CancelledError:
            print(f"stopped; {count} of {total} commits are judged, and --resume goes on from there", file=sys.stderr)
            raise


def _is_pytest(requirement: str) -> bool:
    return re.match(r"pytest\s*($|[<>=!~\[@;])", requirement) is not None


def _set(settings: dict[str, Any]) -> dict[str, Any]:
    """Checked where it was typed; without what says nothing."""
    return {name: value for name, value in settings.items() if value not in ("", [], False)}


def _print_imported(done: ImportResult, as_json: bool) -> None:
    if as_json:
        left_out = [{"what": left.what, "why": left.why} for left in done.left_out]
        data = {"folder": str(done.folder), "samples": done.samples, "left_out": left_out, "proposal": done.proposal}
        print_json(data)
        return
    _print_left_out(done)
    print_text(f"{len(done.samples):,} samples in {done.folder}", "bold")


def _print_left_out(done: ImportResult) -> None:
    """A row for each reason, the most frequent first."""
    reasons: dict[str, list[str]] = {}
    for left in done.left_out:
        reasons.setdefault(left.why, []).append(left.what)
    rows = [(names[0] if len(names) == 1 else f"{len(names):,}", why) for why, names in reasons.items()]
    rows.sort(key=lambda row: -len(reasons[row[1]]))
    if rows:
        print_table([Column("LEFT OUT", "cyan"), Column("WHY", gives_way=True)], rows[:MOST_LEFT_OUT])
    if len(rows) > MOST_LEFT_OUT:
        print_text(f"… and {len(rows) - MOST_LEFT_OUT:,} more reasons; --json shows all", "dim")
    if done.proposal:
        print_text(f"Something that the tests need is missing; try {done.proposal}", "yellow")
