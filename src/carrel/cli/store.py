"""`carrel store …`: between a folder and a store that others share."""

import difflib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import carrel
from carrel.cli.exit_codes import TaskFailed, WrongUsage, async_command
from carrel.cli.output import Column, print_json, print_table, print_text
from carrel.library.store_sync import CopyReport, Difference, contents, copy, differences, parse_kinds
from carrel.storage.base import Store
from carrel.text import readable_size

app = typer.Typer(
    help="Between a folder and a store that others share. STORE is a Redis address (redis://host:6379/0) or a folder.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="With tools/, workflows/, artifacts/, sessions/ …")]
Address = Annotated[str, typer.Argument(metavar="STORE", help="redis://host:6379/0, or a folder.")]
Prefix = Annotated[str, typer.Option(metavar="WORD", help="What all keys in Redis begin with.")]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="tools, workflows, skills, artifacts, deps or sessions; again for more."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what differs there; never a session.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

MARKS = {"new": "+", "longer": "+", "missing": "-", "shorter": "-", "changed": "~", "diverged": "~"}
WORDS = {
    "new": "",
    "missing": "",
    "changed": "differs",
    "longer": "goes on in the folder",
    "shorter": "goes on in the store",
    "diverged": "went on in both",
}
TEXTS = ("tools", "workflows", "skills", "deps")


@app.callback(invoke_without_command=True)
def _store(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@asynccontextmanager
async def opened(address: str | Path, prefix: str, *, there: bool = False) -> AsyncIterator[Store]:
    """The store at an address; with `there` a folder must exist already."""
    text = str(address)
    if isinstance(address, Path) and text.startswith(("redis:/", "rediss:/", "unix:/")):
        # As a folder it would be made, and its name holds the password.
        raise WrongUsage(
            "the address of a store stands where a folder is wanted: bootstrap FOLDER STORE, pull STORE FOLDER"
        )
    if text.startswith(("redis://", "rediss://", "unix://")):
        storage: carrel.FileStorage | carrel.RedisStorage = carrel.RedisStorage(text, prefix)
    elif "://" in text:
        raise WrongUsage(f"{text.partition('://')[0]}:// is no address of a store; redis://host:6379/0 is, or a folder")
    else:
        folder = Path(text).expanduser()
        if folder.exists() and not folder.is_dir():
            raise WrongUsage(f"{folder} is a file; a folder is wanted")
        if there and not folder.exists():
            raise WrongUsage(f"there is no folder {folder}")
        storage = carrel.FileStorage(folder)
    async with storage:
        yield storage.store


@app.command("bootstrap")
@async_command
async def bootstrap(
    folder: Folder,
    store: Address,
    prefix: Prefix = "carrel",
    only: Only = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Copy what a folder holds into a store; what the store has otherwise is left as it is."""
    kinds = parse_kinds(only)
    async with opened(folder, prefix, there=True) as source, opened(store, prefix) as target:
        _print_report(await copy(source, target, kinds, overwrite=overwrite), as_json)


@app.command("pull")
@async_command
async def pull(
    store: Address,
    folder: Folder,
    prefix: Prefix = "carrel",
    only: Only = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Copy what a store holds into a folder; what the folder has otherwise is left as it is."""
    kinds = parse_kinds(only)
    async with opened(store, prefix, there=True) as source, opened(folder, prefix) as target:
        _print_report(await copy(source, target, kinds, overwrite=overwrite), as_json)


@app.command("list")
@async_command
async def list_things(store: Address, prefix: Prefix = "carrel", only: Only = None, as_json: Json = False) -> None:
    """What a store holds."""
    async with opened(store, prefix, there=True) as source:
        found = await contents(source, parse_kinds(only))
    if as_json:
        print_json([{"kind": thing.kind, "name": thing.name, "bytes": thing.size} for thing in found])
    elif not found:
        print_text("Nothing is there yet.")
    else:
        columns = [Column("KIND"), Column("NAME"), Column("SIZE", justify="right")]
        print_table(columns, [(thing.kind, thing.name, readable_size(thing.size)) for thing in found])


@app.command("diff")
@async_command
async def diff(
    folder: Folder,
    store: Address,
    prefix: Prefix = "carrel",
    only: Only = None,
    patch: Annotated[bool, typer.Option("--patch", help="Show the lines in which texts differ.")] = False,
    as_json: Json = False,
) -> None:
    """Where a folder (+) and a store (-) differ."""
    kinds = parse_kinds(only)
    async with opened(folder, prefix, there=True) as ours, opened(store, prefix, there=True) as theirs:
        found = [one for one in await differences(ours, theirs, kinds) if one.state != "same"]
        if as_json:
            print_json([asdict(one) for one in found])
            return
        if not found:
            print_text("No differences.")
        for one in found:
            print_text(_line(one))
            if patch and one.kind in TEXTS:
                for line in await _patch(ours, theirs, one):
                    print_text(line)


def _line(one: Difference) -> str:
    said = f" ({WORDS[one.state]})" if WORDS[one.state] else ""
    return f"{MARKS[one.state]} {_key(one)}{said}"


def _key(one: Difference) -> str:
    return one.name if one.kind == "deps" else f"{one.kind}/{one.name}"


async def _patch(ours: Store, theirs: Store, one: Difference) -> Sequence[str]:
    old, new = [((await store.get(_key(one))) or b"").decode("utf-8", "replace") for store in (theirs, ours)]
    return list(difflib.unified_diff(old.splitlines(), new.splitlines(), "store", "folder", lineterm=""))


def _print_report(report: CopyReport, as_json: bool) -> None:
    if as_json:
        data: dict[str, Any] = asdict(report)
        print_json(data)
        _fail_if_failed(report)
        return
    for one in report.copied:
        print_text(f"copied {one.kind} {one.name}")
    for failure in report.failed:
        print_text(f"failed {failure.kind} {failure.name}: {failure.why}", "red")
    for one in report.kept:
        why = "a session that went on there" if one.kind == "sessions" else "it differs; --overwrite replaces it"
        print_text(f"kept {one.kind} {one.name} ({why})")
    failed = f", {len(report.failed)} failed" if report.failed else ""
    print_text(f"{len(report.copied)} copied, {report.same} the same already, {len(report.kept)} kept{failed}.")
    _fail_if_failed(report)


def _fail_if_failed(report: CopyReport) -> None:
    if report.failed:
        raise TaskFailed(f"{len(report.failed)} could not be copied, the first: {report.failed[0].why}")
