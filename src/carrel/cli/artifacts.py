"""`carrel artifacts …`: what agents kept, looked at and carried in and out."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from carrel.cli.exit_codes import WrongUsage, async_command
from carrel.cli.options import Base, Json, group, opened
from carrel.cli.output import Column, json_text, print_json, print_table, print_text, when
from carrel.cli.run import write_stream
from carrel.guest.worker import values

app = group("What agents kept: text, data, tables, pictures.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The artifact's name: reports/may.json")]


@app.command("list")
@async_command
async def list_artifacts(base: Base = None, as_json: Json = False) -> None:
    """Every artifact, the newest first."""
    async with opened(base) as session:
        found = await session.list_artifacts()
    found.sort(key=lambda artifact: artifact["created_at"], reverse=True)
    if as_json:
        print_json(found)
    elif not found:
        print_text("No artifacts yet.")
    else:
        columns = (
            Column("NAME", "cyan"),
            Column("CREATED", "dim", may_go=True),
            Column("DESCRIPTION", gives_way=True),
        )
        print_table(columns, [(a["name"], when(a["created_at"]), a["description"]) for a in found])


@app.command("load")
@async_command
async def load(
    name: Name,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it to this file.")] = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """What was kept under a name, as it was saved: text, bytes, or data as JSON."""
    async with opened(base) as session:
        data = await session.load_artifact(name)
    if as_json:
        print_json(values.encode(data))
        return
    if not isinstance(data, str | bytes):
        data = json_text(data)
    content = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    if out is not None:
        out.write_bytes(content)
    elif isinstance(data, bytes) and not sys.stdout.isatty():
        sys.stdout.buffer.write(content)
    elif isinstance(data, bytes):
        try:
            write_stream(sys.stdout, data.decode("utf-8"))
        except UnicodeDecodeError:
            raise WrongUsage(
                f"{name} is {len(data):,} bytes that are no text; --out FILE writes them to a file"
            ) from None
    else:
        write_stream(sys.stdout, data if data.endswith("\n") else f"{data}\n")


@app.command("save")
@async_command
async def save(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="What to keep.")],
    description: Annotated[str, typer.Option(help="What it is.")] = "",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Keep a file under a name."""
    async with opened(base) as session:
        made = await session.save_artifact(name, file, description)
    if as_json:
        print_json(made)
    else:
        print_text(f"{made['name']} is kept.")


@app.command("delete")
@async_command
async def delete(name: Name, base: Base = None, as_json: Json = False) -> None:
    """Remove an artifact; no harm when there is none."""
    async with opened(base) as session:
        await session.delete_artifact(name)
    if as_json:
        print_json({"deleted": name})
    else:
        print_text(f"{name} is not there any more.")
