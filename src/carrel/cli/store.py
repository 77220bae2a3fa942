"""`carrel store …`: copies tools, workflows, artifacts, packages and sessions between a folder and a store."""

import difflib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import carrel
from carrel.cli.exit_codes import TaskFailed, WrongUsage
from carrel.cli.options import LIBRARY, Json, command, existing_folder, group
from carrel.cli.output import Column, print_json, print_table, print_text
from carrel.library.store_sync import CopyReport, Difference, contents, copy, differences, parse_kinds
from carrel.session import SharedStorage, open_shared_storage
from carrel.storage.base import Store
from carrel.text import readable_size

app = group(
    "store",
    "Copy between a folder and a shared store. STORE is redis://host:6379/0, postgresql://user@host/name, or a folder.",
    panel=LIBRARY,
    example="carrel store bootstrap mine ours",
)

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A folder with tools/, workflows/, artifacts/, sessions/.")
]
Address = Annotated[
    str, typer.Argument(metavar="STORE", help="redis://host:6379/0, postgresql://user@host/database, or a folder.")
]
Prefix = Annotated[str, typer.Option(metavar="WORD", help="Prefix of all keys in Redis; the schema in Postgres.")]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="tools, workflows, skills, artifacts, deps or sessions; may be repeated."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what differs; never sessions.")]

MARKS = {"new": "+", "longer": "+", "missing": "-", "shorter": "-", "changed": "~", "diverged": "~"}
WORDS = {
    "new": "",
    "missing": "",
    "changed": "differs",
    "longer": "the folder has more",
    "shorter": "the store has more",
    "diverged": "changed in both",
}
TEXTS = ("tools", "workflows", "skills", "deps")


@asynccontextmanager
async def open_store(address: str | Path, prefix: str, *, must_exist: bool = False) -> AsyncIterator[Store]:
    """Open the store at an address; with `must_exist`, a folder has to exist."""
    text = str(address)
    if isinstance(address, Path) and re.match(r"(rediss?|unix|postgres(ql)?):/", text):
        # A folder of that name would be created, and the name may contain a password.
        raise WrongUsage("FOLDER is the address of a store; the order is bootstrap FOLDER STORE, pull STORE FOLDER")
    storage: carrel.FileStorage | SharedStorage
    if "://" in text:
        storage = open_shared_storage(text, prefix)
    else:
        option = "FOLDER" if isinstance(address, Path) else "STORE"
        storage = carrel.FileStorage(existing_folder(Path(text), option, must_exist=must_exist))
    async with storage:
        yield storage.store


@command(app, "bootstrap", example="carrel store bootstrap mine ours")
async def bootstrap(
    folder: Folder,
    store: Address,
    prefix: Prefix = "carrel",
    only: Only = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Copy a folder into a store.

    Nothing is deleted, and what differs in the store is kept unless --overwrite is given."""
    kinds = parse_kinds(only)
    async with open_store(folder, prefix, must_exist=True) as source, open_store(store, prefix) as target:
        _print_report(await copy(source, target, kinds, overwrite=overwrite), as_json)


@command(app, "pull", example="carrel store pull ours copy")
async def pull(
    store: Address,
    folder: Folder,
    prefix: Prefix = "carrel",
    only: Only = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Copy a store into a folder.

    Nothing is deleted, and what differs in the folder is kept unless --overwrite is given."""
    kinds = parse_kinds(only)
    async with open_store(store, prefix, must_exist=True) as source, open_store(folder, prefix) as target:
        _print_report(await copy(source, target, kinds, overwrite=overwrite), as_json)


@command(app, "list", example="carrel store list ours")
async def list_things(store: Address, prefix: Prefix = "carrel", only: Only = None, as_json: Json = False) -> None:
    """Show the content of a store."""
    async with open_store(store, prefix, must_exist=True) as source:
        found = await contents(source, parse_kinds(only))
    if as_json:
        print_json([{"kind": thing.kind, "name": thing.name, "bytes": thing.size} for thing in found])
    elif not found:
        print_text("The store is empty.")
    else:
        columns = [Column("KIND"), Column("NAME"), Column("SIZE", justify="right")]
        print_table(columns, [(thing.kind, thing.name, readable_size(thing.size)) for thing in found])


@command(app, "diff", example="carrel store diff mine ours --patch")
async def diff(
    folder: Folder,
    store: Address,
    prefix: Prefix = "carrel",
    only: Only = None,
    patch: Annotated[bool, typer.Option("--patch", help="Show the lines that differ.")] = False,
    as_json: Json = False,
) -> None:
    """Show the differences between a folder (+) and a store (-)."""
    kinds = parse_kinds(only)
    async with (
        open_store(folder, prefix, must_exist=True) as ours,
        open_store(store, prefix, must_exist=True) as theirs,
    ):
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
    note = f" ({WORDS[one.state]})" if WORDS[one.state] else ""
    return f"{MARKS[one.state]} {_key(one)}{note}"


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
        why = "the session has changed there" if one.kind == "sessions" else "it differs; --overwrite replaces it"
        print_text(f"kept {one.kind} {one.name} ({why})")
    failed = f", {len(report.failed)} failed" if report.failed else ""
    print_text(f"{len(report.copied)} copied, {report.same} unchanged, {len(report.kept)} kept{failed}.")
    _fail_if_failed(report)


def _fail_if_failed(report: CopyReport) -> None:
    if report.failed:
        raise TaskFailed(f"{len(report.failed)} could not be copied, the first: {report.failed[0].why}")
