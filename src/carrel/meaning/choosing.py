"""Which embedder is used here: the best one that is installed."""

import importlib.util
from pathlib import Path

from carrel.home import resolve_carrel_home
from carrel.meaning import minilm, mpnet
from carrel.meaning.minilm import MiniLMEmbedder
from carrel.meaning.mpnet import MPNetEmbedder
from carrel.meaning.seam import Embedder
from carrel.meaning.static import StaticEmbedder


def default_embedder() -> Embedder:
    """The best one that is installed, else the one that comes with carrel. Loads nothing before it is used."""
    return better_embedder() or plain_embedder()


def plain_embedder() -> StaticEmbedder:
    """The one that comes with carrel."""
    return StaticEmbedder()


def better_embedder() -> MPNetEmbedder | MiniLMEmbedder | None:
    """MPNet or MiniLM, where `carrel search upgrade` puts them; MiniLM from this Python's packages, too."""
    large = MPNetEmbedder(mpnet_folder())
    if large.installed:
        return large
    for folder in (minilm_folder() / minilm.MODULE, _installed(minilm.MODULE)):
        if folder is not None and (found := MiniLMEmbedder(folder)).installed:
            return found
    return None


def minilm_folder() -> Path:
    """Where `carrel search upgrade` installs MiniLM."""
    return resolve_carrel_home() / "models" / minilm.PACKAGE


def mpnet_folder() -> Path:
    """Where `carrel search upgrade --large` installs MPNet."""
    return resolve_carrel_home() / "models" / mpnet.PACKAGE


def _installed(module: str) -> Path | None:
    found = importlib.util.find_spec(module)
    return Path(found.origin).parent if found is not None and found.origin else None
