"""uv, run as a program: it makes virtualenvs and installs packages, and what it says when it fails is kept."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal

from carrel.errors import EnvironmentFailed

_MOST_SAID = 2000
_LONGEST = 30 * 60.0
"""Seconds. It gives up by itself where a network does not answer; what it builds from source may never end."""
NEUTRAL = "/"
"""Where it runs: no folder that code inside may write to, from which uv would take settings."""


def has_uv() -> bool:
    """Whether it is installed here."""
    return importlib.util.find_spec("uv") is not None


async def uv(*words: str, folder: str = NEUTRAL) -> None:
    """Run it; EnvironmentFailed has what it said.

    What it is set to comes from the host's environment (`UV_…`) and the user's and the machine's own uv.toml: one that
    happens to lie in a folder of the program's says nothing. Relative paths are those of `folder`."""
    # In the neutral folder uv finds no project, so that nothing but the user's own settings is read.
    settings = [] if folder == NEUTRAL or os.environ.get("UV_CONFIG_FILE") else ["--no-config"]
    await output([_program(), *words[:1], *settings, *words[1:]], folder)


def _program() -> str:
    try:
        import uv as package  # noqa: PLC0415 -- only a session with packages of its own needs it
    except ImportError:
        raise EnvironmentFailed("uv is not installed; `pip install uv` brings it") from None
    return str(package.find_uv_bin())


async def output(command: list[str], folder: str | None = None, longest: float = _LONGEST) -> bytes:
    """What a program prints; a caller that is cancelled takes it with him, and what it has started."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env=_environment(),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(longest):
            out, errors = await process.communicate()
    except BaseException as problem:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is built from source may hang, and not uv itself
        await process.wait()
        if isinstance(problem, TimeoutError):
            raise EnvironmentFailed(
                f"{os.path.basename(command[0])} did not end within {longest / 60:g} minutes and was given up"
            ) from None
        raise
    if process.returncode != 0:
        said = errors.decode("utf-8", "replace").strip() or out.decode("utf-8", "replace").strip()
        words = [os.path.basename(command[0]), *(word for word in command[1:4] if word.isalpha())]
        raise EnvironmentFailed(f"{' '.join(words)} failed: {said[-_MOST_SAID:]}")
    return out


def _environment() -> dict[str, str]:
    """The host's own, without the virtualenv that the host happens to be in; its paths hold in any folder."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    if kept.get("UV_LINK_MODE") == "symlink":
        del kept["UV_LINK_MODE"]  # the links would lead to its cache, which is not there where code runs
    for name in ("UV_CONFIG_FILE", "UV_CACHE_DIR"):
        if kept.get(name):
            kept[name] = os.path.abspath(kept[name])
    if not kept.get("UV_CACHE_DIR") and not _may_make(_cache()):
        kept.setdefault("UV_NO_CACHE", "1")  # a service has no folder of its own, and uv would give up
    return kept


def _cache() -> str:
    """Where uv keeps what it downloaded, unless it was told where."""
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return os.path.join(os.path.expanduser(above), "uv")


def _may_make(folder: str) -> bool:
    """Whether a folder can be written, or made where it is not there yet."""
    while not os.path.lexists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return os.access(folder, os.W_OK | os.X_OK)
