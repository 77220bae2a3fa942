"""Which embedder is used here: the best one that is installed."""

import importlib.util
import logging
from pathlib import Path

from carrel.home import resolve_carrel_home
from carrel.meaning.minilm import MODULE, PACKAGE, MiniLMEmbedder
from carrel.meaning.seam import Embedder
from carrel.meaning.static import StaticEmbedder

logger = logging.getLogger(__name__)


def default_embedder() -> Embedder | None:
    """MiniLM where its weights are installed, else the one that comes with carrel, else None.

    Loads nothing before it is used."""
    found = better_embedder() or plain_embedder()
    if found is None:
        logger.info("no weights of wordllama are installed: search goes by words alone")
    return found


def plain_embedder() -> StaticEmbedder | None:
    """The one that comes with carrel, where its package is installed."""
    folder = _installed("wordllama")
    return plain if folder is not None and (plain := StaticEmbedder(folder)).installed else None


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
