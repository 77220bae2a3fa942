"""`carrel doctor`: what works on this machine, what does not, why, and how to change it."""

import asyncio
import os
import platform
import shutil
import tempfile
import textwrap
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import httpx2
import typer

import carrel
from carrel.cli.exit_codes import MACHINE_LACKS
from carrel.cli.options import RUN, Base, Json, command, resolve_base
from carrel.cli.output import console, print_indented, print_json, print_text, safe_text
from carrel.embedding import choose_embedder
from carrel.errors import CarrelError
from carrel.execution.capabilities import HostPart, can_confine, engine_parts, probe
from carrel.session import open_shared_storage
from carrel.text import readable_size, single_line

app = typer.Typer()

TIMEOUT = 5.0
"""Seconds to wait for the package index and for Redis or Postgres."""
MIN_FREE = 1 << 30
"""Bytes of free disk space below which doctor warns."""
EXTRAS = {
    "uv": "uv",
    "mcp": "mcp",
    "server": "fastapi",
    "search": "numpy",
    "redis": "redis",
    "postgres": "psycopg",
    "container": "docker",
}
"""A module of each extra."""


@command(app, "doctor", panel=RUN, example="carrel doctor")
async def doctor(
    store: Annotated[
        str, typer.Option(metavar="URL", help="The Redis or Postgres to check.")
    ] = "redis://localhost:6379/0",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Check what works on this machine, and how to get the rest.

    The exit code is 3 if no sandbox is possible."""
    folder = resolve_base(base)
    sandbox, containers, installed, index, server = await asyncio.gather(
        asyncio.to_thread(probe),
        asyncio.to_thread(engine_parts),
        asyncio.to_thread(_installed_parts),
        _index_part(),
        _store_part(store),
    )
    possible = can_confine(sandbox)
    disk = _disk_part(folder)
    embedder = choose_embedder(None)
    meaning = HostPart(
        "embedder",
        f"search by meaning with {embedder.name}" if embedder else "search by meaning",
        embedder is not None,
        "" if embedder else "there is no embedder",
        "" if embedder else "pass embedder= to the session or storage",
    )
    sections = {
        "Sandbox": sandbox,
        "Containers": containers,
        "Installed": installed,
        "Storage and network": (disk, index, server, meaning),
    }
    if as_json:
        print_json(
            {
                "sandbox": possible,
                "versions": _versions(),
                "parts": [asdict(part) for part in sandbox],
                "containers": [asdict(part) for part in containers],
                "installed": [asdict(part) for part in installed],
                "disk": asdict(disk),
                "package_index": asdict(index),
                server.name: asdict(server),
                "embedder": embedder.name if embedder else "none",
            }
        )
    else:
        print_text(", ".join(f"{name} {text}" for name, text in _versions().items()))
        for title, parts in sections.items():
            print_text()
            print_text(title, "bold")
            for part in parts:
                _print_part(part)
        print_text()
        print_text(_verdict(sandbox, possible), "bold" if possible else "bold red")
    if not possible:
        raise typer.Exit(MACHINE_LACKS)


def _print_part(part: HostPart) -> None:
    mark = safe_text("yes ", "green") if part.in_force else safe_text("no  ", "yellow")
    first, *more = textwrap.wrap(part.what, max(20, console().width - 6)) or [""]
    print_indented(mark.append_text(safe_text(first)))
    for line in more:
        print_indented(safe_text(line), 6)
    for text in (part.why, f"→ {part.how_to_get_it}" if part.how_to_get_it else ""):
        if text and not part.in_force:
            print_indented(safe_text(text, "dim"), 6)


def _verdict(parts: tuple[HostPart, ...], possible: bool) -> str:
    missing = [part for part in parts if not part.in_force]
    if not possible:
        return "No sandbox is possible here: code runs in a separate process and can read what you can read."
    if missing:
        return f"Code is sandboxed here; {len(missing)} of {len(parts)} protections are missing."
    return "Code is sandboxed here, with all protections."


def _versions() -> dict[str, str]:
    system = f"{platform.release()} ({platform.machine()})"
    return {"carrel": carrel.__version__, "Python": platform.python_version(), platform.system(): system}


def _installed_parts() -> tuple[HostPart, ...]:
    """Return the programs and extras that features need."""
    programs = [
        _found("git", "git, for datasets made from repositories", "install git with your system's package manager")
    ]
    extras = [
        HostPart(
            extra,
            f"{_with_version(module)}, for the extra [{extra}]",
            find_spec(module) is not None,
            "" if find_spec(module) is not None else f"the package {module} is not installed",
            "" if find_spec(module) is not None else f"pip install 'carrel-sessions[{extra}]'",
        )
        for extra, module in EXTRAS.items()
    ]
    return (*programs, *extras)


def _found(program: str, what: str, remedy: str) -> HostPart:
    found = shutil.which(program) is not None
    return HostPart(program, what, found, "" if found else f"{program} is not on the PATH", "" if found else remedy)


def _with_version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def _disk_part(folder: Path) -> HostPart:
    """Return whether the base folder can be written and has free space."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    what = f"free space for {folder}"
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as problem:
        reason = problem.strerror or str(problem)
        return HostPart(
            "disk", what, False, f"{existing} cannot be written: {reason}", "choose another folder with --base"
        )
    what = f"{readable_size(free)} of free space for {folder}"
    if free < MIN_FREE:
        return HostPart(
            "disk", what, False, "less than 1 GiB is free", "delete files; `carrel datasets prune` may help"
        )
    return HostPart("disk", what, True, "", "")


def index_url() -> str:
    """Return the address of the package index that uv and pip would use here."""
    names = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
    return next((os.environ[name] for name in names if os.environ.get(name)), "https://pypi.org/simple/")


async def _index_part() -> HostPart:
    """Return whether the package index answers."""
    url = index_url()
    where = urlsplit(url).hostname or url
    remedy = "check the network and the variables HTTPS_PROXY, SSL_CERT_FILE and UV_DEFAULT_INDEX"
    try:
        async with httpx2.AsyncClient(timeout=TIMEOUT, follow_redirects=True) as client:
            answer = await client.head(url)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as problem:
        why = single_line(str(problem) or type(problem).__name__)
        return HostPart("package_index", f"installing packages from {where}", False, why, remedy)
    if answer.status_code >= 400:
        why = f"it answers with HTTP status {answer.status_code}"
        return HostPart("package_index", f"installing packages from {where}", False, why, remedy)
    return HostPart("package_index", f"installing packages from {where}", True, "", "")


async def _store_part(url: str) -> HostPart:
    """Return whether a Redis or Postgres answers; only shared stores need one."""
    where = urlsplit(url).netloc.rpartition("@")[2] or url
    kind = "Postgres" if url.startswith("postgres") else "Redis"
    what = f"{kind} at {where}, for a store shared by several machines"
    try:
        async with asyncio.timeout(TIMEOUT), open_shared_storage(url) as storage:
            await storage.store.get("doctor")
    except (CarrelError, OSError) as problem:
        why = "no answer" if isinstance(problem, TimeoutError) else single_line(problem)
        return HostPart(kind.lower(), what, False, why, f"start {kind}, or name another one: carrel doctor --store URL")
    return HostPart(kind.lower(), what, True, "", "")
