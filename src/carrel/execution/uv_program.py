"""uv, run as a program: it makes virtualenvs and installs packages, and what it says when it fails is kept."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal

from carrel.errors import EnvironmentFailed

_MOST_SAID = 2000
_LONGEST = 30 * 60.0
"""Seconds. It gives up by itself where a network does not answer; what it builds from source may never end."""
_CERTIFICATE = re.compile(r"invalid peer certificate|certificate.verify.failed|SSLCertVerificationError", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"error sending request|dns error|client error \(connect\)|connection refused|network is unreachable"
    r"|operation timed out|connect timeout|tunnel error|407 proxy|proxyerror|name resolution|newconnectionerror",
    re.IGNORECASE,
)
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
    try:
        await output([_program(), *words[:1], *settings, *words[1:]], folder)
    except EnvironmentFailed as problem:
        raise EnvironmentFailed(f"{problem}{network_advice(str(problem))}") from None


def network_advice(printed: str) -> str:
    """Which environment variables let an installer that printed this reach its index, and where they are set; ""
    where it failed for another reason."""
    if _CERTIFICATE.search(printed):
        advice = (
            "the certificate of the package index is not trusted: set SSL_CERT_FILE to the file with the certificates "
            "of your network"
        )
    elif _UNREACHABLE.search(printed):
        advice = (
            "the package index cannot be reached: set HTTPS_PROXY (and HTTP_PROXY, NO_PROXY) to your network's proxy, "
            "or UV_INDEX_URL to an index that can be reached"
        )
    else:
        return ""
    return (
        f"\n{advice}, in the environment of the program that uses carrel. An MCP client passes few variables on to the "
        'servers it starts: where carrel runs as an MCP server, set them under "env" in its entry of the client\'s '
        "configuration"
    )


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
