"""Python environments: the host's own, or a virtualenv made by uv, cached, and made once however many want it."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from carrel.errors import EnvironmentFailed
from carrel.execution import scratch

READY = "carrel-ready.json"
_FACTS = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.base_exec_prefix]))"
_LOCK_PAUSE = 0.02


@dataclass(frozen=True)
class Environment:
    """An interpreter and the folders it needs."""

    python: str
    folders: tuple[str, ...]
    own: Path | None = None
    """A virtualenv that only one session has, to be removed with it."""

    @property
    def path(self) -> str:
        """Where its commands are."""
        return os.path.dirname(self.python)


def host_environment() -> Environment:
    """The interpreter that runs this program; nothing has to be made."""
    return Environment(sys.executable, _folders([sys.prefix, sys.base_prefix, sys.base_exec_prefix], sys.executable))


def _folders(named: list[str], python: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*named, os.path.dirname(os.path.dirname(os.path.realpath(python)))]))


async def environment(base: Path, python_version: str | None, deps: tuple[str, ...], *, cache: bool) -> Environment:
    """With these requirements installed; EnvironmentFailed has what uv said."""
    if not deps and python_version is None:
        return host_environment()
    if not cache:
        folder = scratch.new_folder("environment") / "venv"
        try:
            return await _make(folder, python_version, deps, own=folder.parent)
        except BaseException:
            scratch.remove(folder.parent)
            raise
    wanted = json.dumps([python_version or sys.executable, sys.version_info[:2], sorted(deps)])
    folder = base / "environments" / hashlib.sha256(wanted.encode()).hexdigest()[:16]
    found = _ready(folder)
    if found is not None:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    async with locked(folder.with_suffix(".lock")):
        return _ready(folder) or await _make(folder, python_version, deps)


def _ready(folder: Path) -> Environment | None:
    try:
        facts = json.loads((folder / READY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    python = str(folder / "bin" / "python")
    return Environment(python, tuple(facts["folders"])) if os.access(python, os.X_OK) else None


@asynccontextmanager
async def locked(file: Path) -> AsyncIterator[None]:
    """The lock goes with the process that holds it, however it ends."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)


async def _make(folder: Path, version: str | None, deps: tuple[str, ...], own: Path | None = None) -> Environment:
    scratch.remove(folder)  # What is there without its mark was left half made.
    python = str(folder / "bin" / "python")
    await _uv("venv", "--quiet", "--no-project", "--python", version or sys.executable, str(folder))
    if deps:
        await _uv("pip", "install", "--quiet", "--compile-bytecode", "--python", python, "--", *deps)
    said = await _output([python, "-I", "-c", _FACTS])
    folders = _folders([str(folder), *json.loads(said)], python)
    mark = folder / f"{READY}.new"
    mark.write_text(json.dumps({"folders": folders, "deps": deps}), encoding="utf-8")
    mark.replace(folder / READY)
    return Environment(python, folders, own)


async def _uv(*words: str) -> None:
    await _output([_uv_program(), *words])


def _uv_program() -> str:
    try:
        import uv  # noqa: PLC0415 -- only a session with requirements of its own needs it
    except ImportError:
        raise EnvironmentFailed("uv is not installed; `pip install uv` brings it") from None
    return str(uv.find_uv_bin())


async def _output(command: list[str]) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        said = errors.decode("utf-8", "replace").strip() or out.decode("utf-8", "replace").strip()
        raise EnvironmentFailed(f"{' '.join(command[:4])} … failed: {said[-2000:]}")
    return out
