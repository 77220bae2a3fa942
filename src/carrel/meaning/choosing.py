"""Which embedder is used here: the best one that is installed."""

import importlib.util
from pathlib import Path

from carrel.home import resolve_carrel_home
from carrel.meaning.minilm import MODULE, PACKAGE, MiniLMEmbedder
from carrel.meaning.seam import Embedder
from carrel.meaning.static import StaticEmbedder


def default_embedder() -> Embedder:
    """MiniLM where its weights are installed, else the one that comes with carrel. Loads nothing before it is used."""
    return better_embedder() or plain_embedder()


def plain_embedder() -> StaticEmbedder:
    """The one that comes with carrel."""
    return StaticEmbedder()


def better_embedder() -> MiniLMEmbedder | None:
    """MiniLM from carrel's own folder, where `carrel search upgrade` puts it, or from this Python's packages."""
    for folder in (minilm_folder() / MODULE, _installed(MODULE)):
        if folder is not None and (found := MiniLMEmbedder(folder)).installed:
            return found
    return None


def minilm_folder() -> Path:
    """Where `carrel search upgrade` installs MiniLM."""
    return resolve_carrel_home() / "models" / PACKAGE


def _installed(module: str) -> Path | None:
    found = importlib.util.find_spec(module)
    return Path(found.origin).parent if found is not None and found.origin else None
