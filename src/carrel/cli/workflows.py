"""`carrel workflows …`: Python that worked and was kept, looked at, edited and run from outside."""

import sys
from typing import Annotated, Any

import typer

from carrel.cli.exit_codes import FAILED, TaskFailed, WrongUsage, async_command
from carrel.cli.options import Base, Json, Limit, arguments_in, group, opened, python_in, takes_by_hints
from carrel.cli.output import Column, print_json, print_table, print_text
from carrel.cli.run import failed, print_result, shown, write_stream
from carrel.errors import WorkflowNotFoundError
from carrel.library.prompt import signature

app = group("Python that worked and was kept, to be called by name.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The workflow's name.")]
Query = Annotated[str, typer.Argument(metavar="WORDS", help="What it should do.")]


@app.command("list")
@async_command
async def list_workflows(base: Base = None, as_json: Json = False) -> None:
    """Every workflow, with its parameters."""
    async with opened(base) as session:
        _print(await session.list_workflows(), as_json, "No workflows; `carrel workflows add NAME FILE` keeps one.")


@app.command("search")
@async_command
async def search(query: Query, limit: Limit = 5, base: Base = None, as_json: Json = False) -> None:
    """The workflows that fit best, in these words or in others."""
    async with opened(base) as session:
        none = f"No workflow fits {query!r}; carrel workflows list shows all."
        _print(await session.search_workflows(query, limit), as_json, none)


@app.command("show")
@async_command
async def show_workflow(name: Name, base: Base = None, as_json: Json = False) -> None:
    """One workflow's source."""
    async with opened(base) as session:
        found = await session.get_workflow(name)
        if found is None:
            raise _missing(name)
        if as_json:
            print_json(found)
        else:
            write_stream(sys.stdout, found["source"].rstrip("\n") + "\n")


@app.command("add")
@async_command
async def add(
    name: Name,
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Python with a function run(...); - reads it.")],
    description: Annotated[str, typer.Option(help="What it does, for finding it again.")] = "",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Keep a file's Python under a name; what was there before stays in its history."""
    async with opened(base) as session:
        try:
            made = await session.add_workflow(name, python_in(file), description)
        except SyntaxError as problem:
            raise TaskFailed(f"{file}, line {problem.lineno}: {problem.msg}; nothing was kept") from None
    if as_json:
        print_json(made)
    else:
        print_text(f"{made['name']}{signature(made['parameters'])} is kept.")


@app.command("remove")
@async_command
async def remove(name: Name, base: Base = None, as_json: Json = False) -> None:
    """Take a workflow out; its history stays."""
    async with opened(base) as session:
        if not await session.remove_workflow(name):
            raise WorkflowNotFoundError(f"there is no workflow {name}; nothing was changed")
    if as_json:
        print_json({"removed": name})
    else:
        print_text(f"{name} is removed.")


@app.command("history")
@async_command
async def history(name: Name, base: Base = None, as_json: Json = False) -> None:
    """Every version that was kept, the oldest first."""
    async with opened(base) as session:
        versions = await session.workflow_history(name)
    if as_json:
        print_json(versions)
        return
    columns = (
        Column("VERSION", justify="right"),
        Column("WHEN"),
        Column("CHANGE"),
        Column("DESCRIPTION", gives_way=True),
    )
    print_table(columns, [(v["version"], v["at"], v["change"], v["description"]) for v in versions])


@app.command("run")
@async_command
async def run(
    name: Name,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE", help="JSON values, or text.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds it may take; 0 for no limit.", min=0)] = 60.0,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Run a workflow in a session of its own."""
    async with opened(base, timeout=timeout or None) as session:
        given = _checked(name, await session.get_workflow(name), arguments or [])
        code = f"workflows.invoke({name!r}, **{given!r})"
        result = await session.run(code) if as_json else await shown(session, code)
    print_result(result, as_json)
    if failed(result):
        raise typer.Exit(FAILED)


def _checked(name: str, found: dict[str, Any] | None, words: list[str]) -> dict[str, Any]:
    """The arguments for a workflow, where it is one that can be called with them."""
    if found is None:
        raise _missing(name)
    if found.get("kind") == "instructions":
        raise WrongUsage(f"{name} is a skill to be read, not to be run; `carrel workflows show {name}` shows it")
    if found.get("error"):
        raise WrongUsage(str(found["error"]))
    parameters = found["parameters"]
    given = arguments_in(words, takes_by_hints(parameters))
    called = f"{found['name']}{signature(parameters)}"
    for parameter in parameters:
        wanted = parameter["name"]
        if parameter["required"] and not wanted.startswith("*") and wanted not in given:
            raise WrongUsage(f"{wanted}=… is missing; it is {called}")
    names = [parameter["name"] for parameter in parameters]
    for word in given:
        if word not in names and not any(wanted.startswith("**") for wanted in names):
            raise WrongUsage(f"there is no parameter {word}; it is {called}")
    return given


def _missing(name: str) -> WorkflowNotFoundError:
    return WorkflowNotFoundError(f"there is no workflow {name}; `carrel workflows list` shows what there is")


def _print(workflows: list[dict[str, Any]], as_json: bool, none: str) -> None:
    if as_json:
        print_json(workflows)
    elif not workflows:
        print_text(none)
    else:
        columns = (
            Column("NAME", "cyan"),
            Column("PARAMETERS"),
            Column("DESCRIPTION", gives_way=True),
        )
        rows = [(w["name"], signature(w["parameters"]), w.get("error") or w["description"]) for w in workflows]
        print_table(columns, rows)
