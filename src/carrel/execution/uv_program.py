"""uv, run as a program: it makes virtualenvs and installs packages, and what it says when it fails is kept."""

from __future__ import annotations

import asyncio
import importlib.util
import os

from carrel.errors import EnvironmentFailed

_MOST_SAID = 2000


def has_uv() -> bool:
    """Whether it is installed here."""
    return importlib.util.find_spec("uv") is not None


async def uv(*words: str) -> None:
    """Run it; EnvironmentFailed has what it said."""
    await output([_program(), *words])


def _program() -> str:
    try:
        import uv as package  # noqa: PLC0415 -- only a session with packages of its own needs it
    except ImportError:
        raise EnvironmentFailed("uv is not installed; `pip install uv` brings it") from None
    return str(package.find_uv_bin())


async def output(command: list[str]) -> bytes:
    """What a program prints; a caller that is cancelled takes it with him."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # The virtualenv that the host happens to be in is none of the session's.
        env={name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")},
    )
    try:
        out, errors = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        said = errors.decode("utf-8", "replace").strip() or out.decode("utf-8", "replace").strip()
        raise EnvironmentFailed(f"{os.path.basename(command[0])} {' '.join(command[1:3])} failed: {said[-_MOST_SAID:]}")
    return out
