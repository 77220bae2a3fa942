"""`carrel deps …`: the packages of a base's Python."""

from typing import Annotated, Any

import typer

from carrel.cli.exit_codes import TaskFailed, WrongUsage, async_command
from carrel.cli.options import Base, Json, group, opened
from carrel.cli.output import print_json, print_text

app = group("The packages that sessions of a base have.")

Packages = Annotated[list[str], typer.Argument(metavar="PACKAGE", help="A requirement: pandas, or pandas>=2.")]


@app.command("list")
@async_command
async def list_deps(base: Base = None, as_json: Json = False) -> None:
    """The requirements, as they are written in requirements.txt."""
    async with opened(base) as session:
        found = await session.list_deps()
    if as_json:
        print_json(found)
    else:
        for requirement in found or ["No packages beyond Python's own."]:
            print_text(requirement)


@app.command("add")
@async_command
async def add(packages: Packages, base: Base = None, as_json: Json = False) -> None:
    """Install packages and put them on the list."""
    async with opened(base, timeout=None) as session:
        reports = [await session.add_dep(package) for package in packages]
    _print(reports, as_json)


@app.command("remove")
@async_command
async def remove(packages: Packages, base: Base = None, as_json: Json = False) -> None:
    """Uninstall packages and take them off the list."""
    async with opened(base, timeout=None) as session:
        reports = [await session.remove_dep(package) for package in packages]
    _print(reports, as_json)


@app.command("sync")
@async_command
async def sync(base: Base = None, as_json: Json = False) -> None:
    """Install what the list names and is not there."""
    async with opened(base, timeout=None) as session:
        reports = [await session.sync_deps()]
    _print(reports, as_json)


def _print(reports: list[dict[str, Any]], as_json: bool) -> None:
    said: dict[str, list[str]] = {}
    for report in reports:
        for what, packages in report.items():
            said.setdefault(what, [])
            said[what] += packages if isinstance(packages, list) else []
    messages = "\n".join(report["message"] for report in reports if report.get("message"))
    if as_json:
        print_json(reports[0] if len(reports) == 1 else {**said, "message": messages})
    else:
        for what, packages in said.items():
            if packages:
                print_text(f"{what.replace('_', ' ')}: {', '.join(packages)}", "red" if what == "failed" else "")
        if not any(said.values()):
            print_text("Nothing to do.")
    if said.get("failed"):
        raise TaskFailed(messages or f"{', '.join(said['failed'])} could not be had")
    if said.get("not_found"):
        raise WrongUsage(
            f"{', '.join(said['not_found'])}: no such package here; `carrel deps list` shows what there is"
        )
