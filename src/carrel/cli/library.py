"""`carrel tools`, `workflows`, `artifacts` and `deps`: what sessions of a base folder can use."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from carrel.cli.exit_codes import FAILED, TaskFailed, WrongUsage
from carrel.cli.options import (
    LIBRARY,
    Base,
    Json,
    Limit,
    Timeout,
    accepted_by_hints,
    accepted_by_schema,
    command,
    group,
    open_session,
    parse_arguments,
    read_python,
    resolve_base,
)
from carrel.cli.output import Column, json_text, print_answer, print_json, print_table, print_text, when
from carrel.cli.run import has_failed, print_result, run_printing, write_stream
from carrel.errors import WorkflowNotFoundError
from carrel.guest.worker import values
from carrel.library.prompt import signature
from carrel.text import readable_size

tools = group(
    "tools",
    "Tools that code can call. They are programs, MCP servers, HTTP endpoints and Python functions.",
    panel=LIBRARY,
    example='carrel tools search "http request"',
)
workflows = group(
    "workflows",
    "Saved Python functions that code can call by name.",
    panel=LIBRARY,
    example="carrel workflows run twice n=21",
)
artifacts = group(
    "artifacts",
    "Saved data: text, JSON, tables, pictures.",
    panel=LIBRARY,
    example="carrel artifacts load answer.json",
)
deps = group(
    "deps",
    "Packages that code can import.",
    panel=LIBRARY,
    example="carrel deps add humanize",
)

Words = Annotated[str, typer.Argument(metavar="WORDS", help="What it should do, in any words.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE", help="Arguments: JSON values, or text.")]
WorkflowName = Annotated[str, typer.Argument(metavar="NAME", help="The workflow's name.")]
ArtifactName = Annotated[str, typer.Argument(metavar="NAME", help="The artifact's name: reports/may.json")]
Packages = Annotated[list[str], typer.Argument(metavar="PACKAGE", help="Requirements: pandas, or pandas>=2.")]

# --- tools ----------------------------------------------------------------------------------------------------------


@command(tools, "list", example="carrel tools list")
async def list_tools(base: Base = None, as_json: Json = False) -> None:
    """Show all tools and their recipes."""
    async with open_session(base) as session:
        await session.wait_for_tools()
        found = await session.list_tools()
        _print_tools(
            found, as_json, f"No tools in {resolve_base(base) / 'tools'}; each is defined in a YAML file there."
        )


@command(tools, "search", example='carrel tools search "greet a person"')
async def search_tools(words: Words, limit: Limit = 10, base: Base = None, as_json: Json = False) -> None:
    """Find tools by what they do, in these or other words."""
    async with open_session(base) as session:
        await session.wait_for_tools()
        found = await session.search_tools(words, limit)
        _print_tools(found, as_json, f"No tool matches {words!r}; `carrel tools list` shows all.")


@command(tools, "call", example="carrel tools call greet name=Ada")
async def call_tool(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A tool or recipe: curl.get")],
    arguments: Arguments = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Call a tool and print the result."""
    async with open_session(base) as session:
        tool = await session.get_tool(name) if arguments else None
        accepts = accepted_by_schema(tool.get("schema", {}) if tool is not None else {})
        result = await session.call_tool(name, **parse_arguments(arguments or [], accepts))
    if as_json:
        print_json(values.encode(result))
    elif isinstance(result, str):
        write_stream(sys.stdout, result if result.endswith("\n") or not result else f"{result}\n")
    elif result is not None:
        write_stream(sys.stdout, f"{result!r}\n")


@command(tools, "describe", example="carrel tools describe")
async def describe(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="What matches this task comes first.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=200, help="Maximum number of characters, about.")] = 12_000,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Print the description that a model gets.

    It covers tools, workflows, artifacts and packages."""
    async with open_session(base) as session:
        await session.wait_for_tools()
        text = (await session.describe(task, limit)).rstrip() + "\n"
    if as_json:
        print_json({"text": text})
    else:
        write_stream(sys.stdout, text)


def _print_tools(found: list[dict[str, Any]], as_json: bool, none: str) -> None:
    if as_json:
        print_json(found)
        return
    if not found:
        print_text(none)
        return
    rows = []
    for tool in found:
        callables = [(tool["name"], tool), *((f"{tool['name']}.{each['name']}", each) for each in tool["recipes"])]
        rows += [(name, each.get("error") or each["description"], ", ".join(each["tags"])) for name, each in callables]
    columns = (Column("NAME", "cyan"), Column("DESCRIPTION", gives_way=True), Column("TAGS", "dim", may_go=True))
    print_table(columns, rows)


# --- workflows ------------------------------------------------------------------------------------------------------


@command(workflows, "list", example="carrel workflows list")
async def list_workflows(base: Base = None, as_json: Json = False) -> None:
    """Show all workflows, with their parameters."""
    async with open_session(base) as session:
        found = await session.list_workflows()
        _print_workflows(found, as_json, "No workflows yet; `carrel workflows add NAME FILE` saves one.")


@command(workflows, "search", example='carrel workflows search "double a number"')
async def search_workflows(words: Words, limit: Limit = 5, base: Base = None, as_json: Json = False) -> None:
    """Find workflows by what they do, in these or other words."""
    async with open_session(base) as session:
        found = await session.search_workflows(words, limit)
        _print_workflows(found, as_json, f"No workflow matches {words!r}; `carrel workflows list` shows all.")


@command(workflows, "show", example="carrel workflows show twice")
async def show_workflow(name: WorkflowName, base: Base = None, as_json: Json = False) -> None:
    """Print the source of a workflow."""
    async with open_session(base) as session:
        found = await session.get_workflow(name)
    if found is None:
        raise _no_workflow(name)
    if as_json:
        print_json(found)
    else:
        write_stream(sys.stdout, found["source"].rstrip("\n") + "\n")


@command(workflows, "add", example="carrel workflows add twice twice.py")
async def add_workflow(
    name: WorkflowName,
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Python with a function run(...); - for stdin.")],
    description: Annotated[str, typer.Option(metavar="TEXT", help="What it does; used to find it.")] = "",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Save a file as a workflow.

    An existing workflow of this name is replaced, and stays in the history."""
    async with open_session(base, must_exist=False) as session:
        try:
            saved = await session.add_workflow(name, read_python(file), description)
        except SyntaxError as problem:
            raise TaskFailed(f"{file}, line {problem.lineno}: {problem.msg}; nothing was saved") from None
    print_answer(as_json, saved, f"Saved {saved['name']}{signature(saved['parameters'])}.")


@command(workflows, "remove", example="carrel workflows remove twice")
async def remove_workflow(name: WorkflowName, base: Base = None, as_json: Json = False) -> None:
    """Remove a workflow; its history is kept."""
    async with open_session(base) as session:
        if not await session.remove_workflow(name):
            raise _no_workflow(name)
    print_answer(as_json, {"removed": name}, f"Removed {name}.")


@command(workflows, "history", example="carrel workflows history twice")
async def workflow_history(name: WorkflowName, base: Base = None, as_json: Json = False) -> None:
    """Show all saved versions of a workflow, oldest first."""
    async with open_session(base) as session:
        versions = await session.workflow_history(name)
    if as_json:
        print_json(versions)
        return
    columns = [Column("VERSION", justify="right"), Column("TIME"), Column("CHANGE")]
    columns += [Column("DESCRIPTION", gives_way=True)]
    print_table(columns, [(each["version"], each["at"], each["change"], each["description"]) for each in versions])


@command(workflows, "run", example="carrel workflows run twice n=21")
async def run_workflow(
    name: WorkflowName,
    arguments: Arguments = None,
    timeout: Timeout = 60.0,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Run a workflow in a new session."""
    async with open_session(base, timeout=timeout or None) as session:
        passed = _check_arguments(name, await session.get_workflow(name), arguments or [])
        code = f"workflows.invoke({name!r}, **{passed!r})"
        result = await session.run(code) if as_json else await run_printing(session, code)
    print_result(result, as_json)
    if has_failed(result):
        raise typer.Exit(FAILED)


def _check_arguments(name: str, workflow: dict[str, Any] | None, words: list[str]) -> dict[str, Any]:
    """Return the arguments for a workflow; wrong usage if it cannot be called with them."""
    if workflow is None:
        raise _no_workflow(name)
    if workflow.get("kind") == "instructions":
        raise WrongUsage(f"{name} is a skill of instructions and cannot be run; see `carrel workflows show {name}`")
    if workflow.get("error"):
        raise WrongUsage(str(workflow["error"]))
    parameters = workflow["parameters"]
    passed = parse_arguments(words, accepted_by_hints(parameters))
    usage = f"usage: {workflow['name']}{signature(parameters)}"
    names = [parameter["name"] for parameter in parameters]
    for parameter in parameters:
        required = parameter["name"]
        if parameter["required"] and not required.startswith("*") and required not in passed:
            raise WrongUsage(f"the argument {required}=… is missing; {usage}")
    for argument in passed:
        if argument not in names and not any(each.startswith("**") for each in names):
            raise WrongUsage(f"there is no parameter {argument}; {usage}")
    return passed


def _no_workflow(name: str) -> WorkflowNotFoundError:
    return WorkflowNotFoundError(f"there is no workflow {name}; `carrel workflows list` shows all")


def _print_workflows(found: list[dict[str, Any]], as_json: bool, none: str) -> None:
    if as_json:
        print_json(found)
    elif not found:
        print_text(none)
    else:
        columns = (Column("NAME", "cyan"), Column("PARAMETERS"), Column("DESCRIPTION", gives_way=True))
        rows = [
            (each["name"], signature(each["parameters"]), each.get("error") or each["description"]) for each in found
        ]
        print_table(columns, rows)


# --- artifacts ------------------------------------------------------------------------------------------------------


@command(artifacts, "list", example="carrel artifacts list")
async def list_artifacts(base: Base = None, as_json: Json = False) -> None:
    """Show all artifacts, newest first."""
    async with open_session(base) as session:
        found = await session.list_artifacts()
    found.sort(key=lambda artifact: artifact["created_at"], reverse=True)
    if as_json:
        print_json(found)
    elif not found:
        print_text("No artifacts yet; `carrel artifacts save NAME FILE` saves one.")
    else:
        columns = (Column("NAME", "cyan"), Column("CREATED", "dim", may_go=True), Column("DESCRIPTION", gives_way=True))
        print_table(columns, [(each["name"], when(each["created_at"]), each["description"]) for each in found])


@command(artifacts, "load", example="carrel artifacts load answer.json --output answer.json")
async def load_artifact(
    name: ArtifactName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file. Default: stdout.")
    ] = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Print an artifact, or write it to a file.

    Text and bytes are written as they are, other data as JSON."""
    async with open_session(base) as session:
        data = await session.load_artifact(name)
    if as_json:
        print_json(values.encode(data))
        return
    if not isinstance(data, str | bytes):
        data = json_text(data)
    content = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    if output is not None:
        output.write_bytes(content)
        print_text(f"Wrote {output} ({readable_size(len(content))}).")
    elif isinstance(data, bytes) and not sys.stdout.isatty():
        sys.stdout.buffer.write(content)
    elif isinstance(data, bytes):
        try:
            write_stream(sys.stdout, data.decode("utf-8"))
        except UnicodeDecodeError:
            raise WrongUsage(f"{name} has {len(data):,} bytes that are not text; write them to --output FILE") from None
    else:
        write_stream(sys.stdout, data if data.endswith("\n") else f"{data}\n")


@command(artifacts, "save", example='carrel artifacts save totals.csv totals.csv --description "Totals of May"')
async def save_artifact(
    name: ArtifactName,
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="The file to save.")],
    description: Annotated[str, typer.Option(metavar="TEXT", help="What it is.")] = "",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Save a file as an artifact."""
    async with open_session(base, must_exist=False) as session:
        saved = await session.save_artifact(name, file, description)
    print_answer(as_json, saved, f"Saved {saved['name']}.")


@command(artifacts, "delete", example="carrel artifacts delete answer.json")
async def delete_artifact(name: ArtifactName, base: Base = None, as_json: Json = False) -> None:
    """Delete an artifact, if there is one of this name."""
    async with open_session(base) as session:
        await session.delete_artifact(name)
    print_answer(as_json, {"deleted": name}, f"Deleted {name}.")


# --- deps -----------------------------------------------------------------------------------------------------------


@command(deps, "list", example="carrel deps list")
async def list_deps(base: Base = None, as_json: Json = False) -> None:
    """Show the required packages, as in requirements.txt."""
    async with open_session(base) as session:
        found = await session.list_deps()
    if as_json:
        print_json(found)
    else:
        for requirement in found or ["No packages; `carrel deps add PACKAGE` installs one."]:
            print_text(requirement)


@command(deps, "add", example="carrel deps add humanize")
async def add_deps(packages: Packages, base: Base = None, as_json: Json = False) -> None:
    """Install packages and add them to the list."""
    async with open_session(base, must_exist=False, timeout=None) as session:
        reports = [await session.add_dep(package) for package in packages]
    _print_reports(reports, as_json)


@command(deps, "remove", example="carrel deps remove humanize")
async def remove_deps(packages: Packages, base: Base = None, as_json: Json = False) -> None:
    """Uninstall packages and remove them from the list."""
    async with open_session(base, timeout=None) as session:
        reports = [await session.remove_dep(package) for package in packages]
    _print_reports(reports, as_json)


@command(deps, "sync", example="carrel deps sync")
async def sync_deps(base: Base = None, as_json: Json = False) -> None:
    """Install the packages of the list that are missing."""
    async with open_session(base, timeout=None) as session:
        reports = [await session.sync_deps()]
    _print_reports(reports, as_json)


def _print_reports(reports: list[dict[str, Any]], as_json: bool) -> None:
    total: dict[str, list[str]] = {}
    for report in reports:
        for what, packages in report.items():
            total.setdefault(what, [])
            total[what] += packages if isinstance(packages, list) else []
    messages = "\n".join(report["message"] for report in reports if report.get("message"))
    if as_json:
        print_json(reports[0] if len(reports) == 1 else {**total, "message": messages})
    else:
        for what, packages in total.items():
            if packages:
                print_text(f"{what.replace('_', ' ')}: {', '.join(packages)}", "red" if what == "failed" else "")
        if not any(total.values()):
            print_text("Nothing to do.")
    if total.get("failed"):
        raise TaskFailed(messages or f"{', '.join(total['failed'])} could not be installed")
    if total.get("not_found"):
        raise WrongUsage(f"not installed: {', '.join(total['not_found'])}; `carrel deps list` shows all packages")
