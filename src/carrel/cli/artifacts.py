"""`carrel artifacts …`: what agents kept, looked at and carried in and out."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from carrel.cli import show
from carrel.cli.bases import Base, Json, group, opened
from carrel.cli.ending import WrongUsage, waits
from carrel.cli.running import write
from carrel.guest.worker import values

app = group("What agents kept: text, data, tables, pictures.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The artifact's name: reports/may.json")]


@app.command("list")
@waits
async def list_artifacts(base: Base = None, as_json: Json = False) -> None:
    """Every artifact, the newest first."""
    async with opened(base) as session:
        found = await session.list_artifacts()
    found.sort(key=lambda artifact: artifact["created_at"], reverse=True)
    if as_json:
        show.print_json(found)
    elif not found:
        show.say("No artifacts yet.")
    else:
        columns = (
            show.Column("NAME", "cyan"),
            show.Column("CREATED", "dim", may_go=True),
            show.Column("DESCRIPTION", gives_way=True),
        )
        show.print_table(columns, [(a["name"], show.when(a["created_at"]), a["description"]) for a in found])


@app.command("load")
@waits
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
        show.print_json(values.encode(data))
        return
    if not isinstance(data, str | bytes):
        data = show.json_text(data)
    content = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    if out is not None:
        out.write_bytes(content)
    elif isinstance(data, bytes) and not sys.stdout.isatty():
        sys.stdout.buffer.write(content)
    elif isinstance(data, bytes):
        try:
            write(sys.stdout, data.decode("utf-8"))
        except UnicodeDecodeError:
            raise WrongUsage(
                f"{name} is {len(data):,} bytes that are no text; --out FILE writes them to a file"
            ) from None
    else:
        write(sys.stdout, data if data.endswith("\n") else f"{data}\n")


@app.command("save")
@waits
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
        show.print_json(made)
    else:
        show.say(f"{made['name']} is kept.")


@app.command("delete")
@waits
async def delete(name: Name, base: Base = None, as_json: Json = False) -> None:
    """Remove an artifact; no harm when there is none."""
    async with opened(base) as session:
        await session.delete_artifact(name)
    if as_json:
        show.print_json({"deleted": name})
    else:
        show.say(f"{name} is not there any more.")
