"""`carrel datasets …`: show, check, import and prune datasets."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carrel import tasks
from carrel.cli.exit_codes import TaskFailed, WrongUsage
from carrel.cli.options import (
    TASKS,
    Base,
    CacheFolder,
    DatasetsFolder,
    Json,
    OlderThan,
    Workers,
    command,
    group,
    parse_age,
    resolve_base,
)
from carrel.cli.output import Column, flush, print_json, print_table, print_text, progress
from carrel.cli.task import Pull, dataset_named, datasets_in, make_images, report_images
from carrel.errors import NoSamplesMade, ProgramMissing, SandboxUnavailable

if TYPE_CHECKING:
    from carrel.tasks import CheckResult, Dataset, ImportResult

app = group(
    "datasets",
    "Folders of samples: tasks with files and tests.",
    panel=TASKS,
    example="carrel datasets list",
)

PYTEST = "python -m pytest -q --junitxml={report}"
MAX_SKIPPED_ROWS = 20
"""Rows of the table of what an import skipped."""


@command(app, "list", example="carrel datasets list")
def list_datasets(base: Base = None, datasets: DatasetsFolder = None, as_json: Json = False) -> None:
    """Show the datasets and their numbers of samples."""
    folder = datasets_in(datasets, base)
    found = folder.list()
    if as_json:
        print_json([info.model_dump(mode="json") for info in found])
    elif not found:
        print_text(f"No datasets in {folder.folder}; `carrel datasets import` makes one.")
    else:
        columns = [
            Column("NAME", "cyan"),
            Column("SAMPLES", justify="right"),
            Column("DESCRIPTION", gives_way=True),
        ]
        print_table(columns, [(info.name, f"{info.sample_count:,}", info.description) for info in found])


@command(app, "check", example="carrel datasets check demo calc-1")
async def check_dataset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A dataset's name, or its folder.")],
    samples: Annotated[list[str] | None, typer.Argument(metavar="SAMPLE", help="Only these samples.")] = None,
    workers: Workers = 2,
    pull: Pull = "missing",
    base: Base = None,
    datasets: DatasetsFolder = None,
    cache: CacheFolder = None,
    as_json: Json = False,
) -> None:
    """Check that the samples of a dataset are right.

    Each is verified without and with its own patch. The tests in fail_to_pass have to fail without the patch and pass
    with it; those in pass_to_pass have to pass both times."""
    dataset = dataset_named(name, datasets, base)
    cache = cache or resolve_base(base) / "cache"
    wanted = [dataset.sample(id_) for id_ in samples] if samples else dataset.samples
    await make_images(wanted, cache, pull)
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
    unchecked = [finding.sample_id for finding in findings if finding.status == "not_checked"]
    if wrong:
        raise TaskFailed(
            f"{len(wrong)} of {len(findings)} samples of {dataset.name} are wrong: {', '.join(wrong[:10])}"
        )
    if unchecked:
        raise ProgramMissing(
            f"{len(unchecked)} of {len(findings)} samples could not be checked here: {', '.join(unchecked[:10])}"
        )


@command(app, "prune", example="carrel datasets prune --older-than 30d --dry-run")
def prune_cache(
    older_than: OlderThan = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    base: Base = None,
    cache: CacheFolder = None,
    as_json: Json = False,
) -> None:
    """Remove cached files that have not been used for a while.

    These are unpacked files and set-up layers; files in use are kept."""
    before = time.time() - parse_age(older_than).total_seconds()
    done = tasks.prune(cache or resolve_base(base) / "cache", before, dry_run=dry_run)
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


@command(app, "import", example="carrel datasets import --name mine --repo my-repository --commits HEAD~1..HEAD")
async def import_dataset(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Samples in the format of SWE-bench."),
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the new dataset.")] = "",
    files: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With FILE: folder of git bundles, archives or folders of the repositories."),
    ] = None,
    image_template: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="With FILE: images to run in, such as 'sweb.eval.x86_64.{instance_id}'; {hub_id} as on Docker Hub.",
        ),
    ] = "",
    harbor: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A Harbor task, or a folder of them, in place of FILE.")
    ] = None,
    workdir: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Folder of the files. Default: /testbed with --image-template, else /workspace; with --harbor, of"
            " tasks that name none.",
        ),
    ] = "",
    repo: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A git repository whose commits become samples.")
    ] = None,
    commits: Annotated[str, typer.Option(metavar="A..B", help="With --repo: the range of commits.")] = "",
    test_command: Annotated[str, typer.Option(metavar="COMMAND", help=f"Runs the tests. Default: {PYTEST}")] = "",
    report: Annotated[
        str, typer.Option(metavar="FORMAT", help="Format of its report: junit, tap, unittest, go, cargo, …")
    ] = "",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Time limit for one run of the tests.")
    ] = 300,
    dep: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="A package to install; may be repeated.")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="COMMAND", help="Run once in a sample's files, with network; may be repeated."),
    ] = None,
    network: Annotated[bool, typer.Option("--network", help="Allow network access.")] = False,
    test_pattern: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="With --repo: further paths of tests; may be repeated."),
    ] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="With --repo: maximum number of samples; 0 for all.")
    ] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="With --repo: continue an import that was stopped.")] = False,
    description: Annotated[str, typer.Option(metavar="TEXT", help="Description of the dataset.")] = "",
    workers: Workers = 2,
    base: Base = None,
    datasets: DatasetsFolder = None,
    cache: CacheFolder = None,
    as_json: Json = False,
) -> None:
    """Make a dataset of SWE-bench, Harbor or git data.

    The commits of a repository that change both source and tests become samples."""
    if not name:
        raise WrongUsage("--name is missing: the name of the new dataset")
    deps = [*(dep or []), *([] if test_command or any(map(_is_pytest, dep or [])) else ["pytest"])]
    environment = {"deps": deps, "setup": setup or [], "setup_network": bool(setup), "network": network}
    environment["workdir"] = workdir or ("/testbed" if image_template else "")
    verify = {"command": test_command or PYTEST, "report": report, "timeout": timeout}
    settings = {
        "description": description,
        "environment": _non_empty(environment),
        "verify": _non_empty(verify),
    }
    into = (datasets or resolve_base(base) / "datasets") / name
    try:
        if harbor is not None:
            if file is not None or repo is not None:
                raise WrongUsage("--harbor has the tasks; FILE and --repo are other sources")
            done = tasks.import_harbor(harbor, into, _non_empty({"description": description}), workdir=workdir)
        elif file is not None and repo is None and (files is not None or image_template):
            done = tasks.import_swebench(file, files, into, settings, image_template=image_template)
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
                cache=cache or resolve_base(base) / "cache",
                resume=resume,
            )
        else:
            raise WrongUsage(
                "give FILE and --files with the repositories or --image-template, --harbor, or --repo and --commits"
            )
    except NoSamplesMade as problem:
        if not as_json:
            _print_skipped(problem.left_out)
        raise
    _print_imported(done, as_json)
    await _report_images(into, cache or resolve_base(base) / "cache")


async def _report_images(dataset: Path, cache: Path) -> None:
    """Say which images of the new samples are missing; without an engine there is nothing to say."""
    try:
        report_images(await tasks.needed_images(tasks.Dataset.load(dataset).samples, cache))
    except SandboxUnavailable as problem:
        print(f"images of containers: {problem}", file=sys.stderr)


async def _import_history(
    repo: Path, commits: str, into: Path, settings: dict[str, Any], *, as_json: bool, **options: Any
) -> ImportResult:
    """Import with a line for each commit and, on a terminal, a progress bar below them."""
    total = count = 0
    with progress(None, f"verifying commits of {repo.name}", among_lines=not as_json) as step:

        def found(commits: int, judged: int) -> None:
            nonlocal total
            total = commits
            step("", total)
            if not as_json:
                earlier = f", {judged} of them verified before" if judged else ""
                changes = "commit changes" if commits == 1 else "commits change"
                print_text(f"{commits:,} {changes} both source and tests{earlier}", "bold")

        def print_commit(commit: str, what: str) -> None:
            nonlocal count
            count += 1
            step("")
            if not as_json:
                print_text(f"{count:>{len(str(total))}}/{total}  {commit[:12]}  {what}")
                flush()

        try:
            return await tasks.import_history(
                repo, commits, into, settings, on_found=found, on_commit=print_commit, **options
            )
        except asyncio.CancelledError:
            print(f"stopped; {count} of {total} commits are verified, --resume continues there", file=sys.stderr)
            raise


def _is_pytest(requirement: str) -> bool:
    return re.match(r"pytest\s*($|[<>=!~\[@;])", requirement) is not None


def _non_empty(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without empty ones."""
    return {name: value for name, value in settings.items() if value not in ("", [], False)}


def _print_imported(done: ImportResult, as_json: bool) -> None:
    if as_json:
        left_out = [{"what": left.what, "why": left.why} for left in done.left_out]
        data = {"folder": str(done.folder), "samples": done.samples, "left_out": left_out, "proposal": done.proposal}
        data["not_carried_over"] = [{"sample": lost.what, "what": lost.why} for lost in done.not_carried_over]
        print_json(data)
        return
    _print_skipped(done.left_out)
    if done.proposal:
        print_text(f"The tests need something that is missing; try {done.proposal}", "yellow")
    if done.not_carried_over:
        columns = [Column("SAMPLE", "cyan"), Column("NOT CARRIED OVER", gives_way=True)]
        print_table(columns, [(lost.what, lost.why) for lost in done.not_carried_over])
    print_text(f"{len(done.samples):,} {'sample' if len(done.samples) == 1 else 'samples'} in {done.folder}", "bold")


def _print_skipped(left_out: Iterable[tuple[str, str]]) -> None:
    """Print a row for each reason, the most frequent first."""
    reasons: dict[str, list[str]] = {}
    for what, why in left_out:
        reasons.setdefault(why, []).append(what)
    rows = [(names[0] if len(names) == 1 else f"{len(names):,}", why) for why, names in reasons.items()]
    rows.sort(key=lambda row: -len(reasons[row[1]]))
    if rows:
        print_table([Column("SKIPPED", "cyan"), Column("REASON", gives_way=True)], rows[:MAX_SKIPPED_ROWS])
    if len(rows) > MAX_SKIPPED_ROWS:
        print_text(f"… and {len(rows) - MAX_SKIPPED_ROWS:,} more reasons; --json shows all", "dim")
