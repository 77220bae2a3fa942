"""`carrel tools …`: what code can call, looked at and tried from outside."""

import sys
from typing import Annotated, Any

import typer

from carrel.cli.exit_codes import async_command
from carrel.cli.options import Base, Json, Limit, arguments_in, group, opened, takes_by_schema
from carrel.cli.output import Column, print_json, print_table, print_text
from carrel.cli.run import write_stream
from carrel.guest.worker import values

app = group("The tools that code can call: programs, MCP servers, HTTP endpoints, OpenAPI operations, functions.")

Query = Annotated[str, typer.Argument(metavar="WORDS", help="What it should do.")]


@app.command("list")
@async_command
async def list_tools(base: Base = None, as_json: Json = False) -> None:
    """Every tool there is."""
    async with opened(base) as session:
        await session.wait_for_tools()
        _print(
            await session.list_tools(), as_json, "No tools; put definitions into the base's folder tools/, one a file."
        )


@app.command("search")
@async_command
async def search(query: Query, limit: Limit = 10, base: Base = None, as_json: Json = False) -> None:
    """The tools that fit best, in these words or in others."""
    async with opened(base) as session:
        await session.wait_for_tools()
        _print(
            await session.search_tools(query, limit), as_json, f"No tool fits {query!r}; carrel tools list shows all."
        )


@app.command("call")
@async_command
async def call(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tool, and its recipe: curl.get")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE", help="JSON values, or text.")] = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Call one tool, without any code."""
    async with opened(base) as session:
        known = await session.get_tool(name) if arguments else None
        takes = takes_by_schema(known.get("schema", {}) if known is not None else {})
        result = await session.call_tool(name, **arguments_in(arguments or [], takes))
    if as_json:
        print_json(values.encode(result))
    elif isinstance(result, str):
        write_stream(sys.stdout, result if result.endswith("\n") or not result else f"{result}\n")
    elif result is not None:
        write_stream(sys.stdout, f"{result!r}\n")


@app.command("describe")
@async_command
async def describe(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="What fits this comes first.")] = None,
    limit: Annotated[int, typer.Option(min=200, help="At most about so many characters.")] = 12_000,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """What a model is told of tools, workflows, artifacts and packages."""
    async with opened(base) as session:
        await session.wait_for_tools()
        text = (await session.describe(task, limit)).rstrip() + "\n"
    if as_json:
        print_json({"text": text})
    else:
        write_stream(sys.stdout, text)


def _print(tools: list[dict[str, Any]], as_json: bool, none: str) -> None:
    if as_json:
        print_json(tools)
    elif not tools:
        print_text(none)
    else:
        columns = (
            Column("NAME", "cyan"),
            Column("DESCRIPTION", gives_way=True),
            Column("TAGS", "dim", may_go=True),
        )
        called = [
            (name, call)
            for tool in tools
            for name, call in [
                (tool["name"], tool),
                *((f"{tool['name']}.{recipe['name']}", recipe) for recipe in tool["recipes"]),
            ]
        ]
        rows = [(name, call.get("error") or call["description"], ", ".join(call["tags"])) for name, call in called]
        print_table(columns, rows)
