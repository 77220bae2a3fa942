"""The environment of a sample: files, Python packages and set-up, prepared once and shared by its executors."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from carrel.errors import ConfigurationError, EnvironmentFailed, SetupFailed
from carrel.execution import temp_dirs
from carrel.execution.config import Mount, SandboxMode, SubprocessConfig
from carrel.execution.environments import Environment, locked
from carrel.execution.executor import CommandResult, Handler
from carrel.execution.live_session import LiveSession
from carrel.execution.packages import environment_for_all
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.guest.sandbox.plan import HOME, OWN_ENVIRONMENT
from carrel.home import resolve_carrel_home
from carrel.tasks.file_cache import CacheLease, Files, prepared_files
from carrel.tasks.sample import Sample

_TOLD = 4000
"""Characters of a failed set-up's output that its error shows."""

_LAYOUT = 3
"""Of a set-up layer; another number makes all anew."""
_WHERE = "(a set-up can write to the workdir and to its home folder, which are kept, and to /tmp, which is not)"
_NO_NETWORK = "(it has no network; environment.setup_network: true gives it to the set-up alone)"
_OFFLINE = (
    *("name resolution", "Name or service not known", "Could not resolve", "ENOTFOUND", "EAI_AGAIN"),
    *("Network is unreachable", "Failed to establish a new connection", "No matching distribution found"),
)
_FILE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
_CLIENT_VARIABLES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_DEFAULT_TIMEOUT"),
)
_MAKE_ENVIRONMENT = """
import ensurepip, glob, os, sys, sysconfig, venv
target, *packages = sys.argv[1:]
venv.create(target, symlinks=True)
bundled = [os.path.join(os.path.dirname(ensurepip.__file__), "_bundled"), sysconfig.get_config_var("WHEEL_PKG_DIR")]
wheels = [wheel for folder in bundled if folder for wheel in glob.glob(os.path.join(folder, "pip-*.whl"))]
lines = [f"import site; site.addsitedir({folder!r})" for folder in packages]
for folder in glob.glob(f"{target}/lib/python*/site-packages"):
    with open(f"{folder}/carrel.pth", "w") as file:
        file.write("\\n".join([*lines, *wheels[:1], ""]))
for name in ("pip", "pip3"):
    with open(f"{target}/bin/{name}", "w") as file:
        file.write(f'#!/bin/sh\\nexec {target}/bin/python -m pip "$@"\\n')
    os.chmod(file.name, 0o755)
"""
"""A virtualenv on top of another: its packages come first, and pip runs from the wheel that Python brings along. That
takes 0.1 s; installing pip into each would take 3 s."""


@dataclass(frozen=True)
class PreparedSample:
    """A sample made ready; places are opened on it in milliseconds."""

    sample: Sample
    config: SubprocessConfig
    environment: Environment
    """The Python that is first on PATH."""
    files: Files
    output: str = ""
    """What the set-up commands printed when they ran."""
    hold: CacheLease | None = None
    """Keeps what the set-up left in the cache while this is there."""

    @property
    def workspace(self) -> Path:
        """The folder that every place of the sample begins with; nobody writes to it."""
        assert self.config.workspace is not None
        return Path(self.config.workspace)

    @property
    def python_folders(self) -> tuple[str, ...]:
        """The virtualenvs whose packages commands can import."""
        own = () if self.config.home is None else (str(Path(self.config.home) / ".venv"),)
        return (*self.environment.folders, *own)


def default_cache() -> Path:
    """Where unpacked files, set-up layers and virtualenvs are kept."""
    return resolve_carrel_home() / "cache"


async def prepare_sample(
    sample: Sample, cache: Path | None = None, *, sandbox: SandboxMode | None = None
) -> PreparedSample:
    """Files unpacked, packages installed, set-up run: what is cached of it costs nothing.

    Raises FilesRefused, EnvironmentFailed or SetupFailed, each with what went wrong.
    """
    cache = cache or default_cache()
    return await prepare(sample, await prepared_files(sample, cache), cache, sandbox=sandbox)


async def prepare(sample: Sample, files: Files, cache: Path, *, sandbox: SandboxMode | None = None) -> PreparedSample:
    """The same from files that are unpacked already."""
    wanted = sample.environment
    if wanted.backend != "sandbox":
        raise ConfigurationError(
            f"{sample.sample_id}: its environment has backend: {wanted.backend}, and the files, set-up and verdict of "
            "a sample are made for the sandbox alone so far; write backend: sandbox"
        )
    if missing := wanted.missing():
        raise EnvironmentFailed(f"{sample.sample_id} needs {', '.join(missing)}, which this machine does not have")
    config = SubprocessConfig(
        default_timeout=None,
        sandbox=sandbox,
        network=wanted.network,
        workspace=files.folder,
        workspace_at=wanted.workdir,
        env=dict(wanted.env),
        limits=wanted.limits.limits(),
        deps=tuple(wanted.deps),
        python_version=wanted.python_version,
        shared_in=cache,
    )
    # Now, and not with the first place: what cannot be installed is told before anybody waits for a session.
    python = await environment_for_all(config)
    if not wanted.setup:
        return PreparedSample(sample, config, python, files)
    layer = await _layer(sample, config, python, files, cache)
    begun = replace(config, workspace=layer.workspace, home=layer.home)
    return PreparedSample(sample, begun, python, files, layer.output, layer.hold)


async def open_executor(
    prepared: PreparedSample,
    *,
    env: Mapping[str, str] | None = None,
    network: bool | None = None,
    mounts: tuple[Mount, ...] = (),
    handlers: Mapping[str, Handler] | None = None,
) -> SubprocessExecutor:
    """A started executor whose workspace is the sample's; close it to let go of everything."""
    config = replace(
        prepared.config,
        env={**prepared.config.env, **(env or {})},
        network=prepared.config.network if network is None else network,
        mounts=(*prepared.config.mounts, *mounts),
    )
    executor = SubprocessExecutor(config, handlers=dict(handlers or {}))
    executor.holds = prepared
    try:
        await executor.start()
    except BaseException:
        await executor.close()
        raise
    return executor


# --- set-up ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """What a set-up left of all that it could write to; /tmp and /dev/shm are for a while only."""

    workspace: Path
    home: Path | None
    """None where it put nothing there."""
    output: str
    hold: CacheLease


async def _layer(sample: Sample, config: SubprocessConfig, python: Environment, files: Files, cache: Path) -> _Layer:
    """What the set-up commands leave, made once however many want it."""
    folder = cache / "layers" / _key(sample, files)
    hold = CacheLease(folder)
    try:
        return _made(folder, hold) or await _new_layer(sample, config, python, files, folder, hold)
    except BaseException:
        hold.release()
        raise


async def _new_layer(
    sample: Sample, config: SubprocessConfig, python: Environment, files: Files, folder: Path, hold: CacheLease
) -> _Layer:
    async with locked(folder.with_suffix(".lock")):
        if (found := _made(folder, hold)) is not None:
            return found
        half, home = folder.with_suffix(".half"), folder.with_suffix(".home")
        for leftover in (folder, home, half):
            await asyncio.to_thread(temp_dirs.remove, leftover)
        try:
            await asyncio.to_thread(_copy, files.folder, half)
            home.mkdir()
            mount = Mount(source=home, at=HOME, mode="rw")
            settings = replace(config, workspace=half, workspace_mode="rw", mounts=(mount,))
            output = await _set_up(sample, _with_network(settings, sample), python)
        except BaseException:
            await asyncio.to_thread(temp_dirs.remove, half)
            await asyncio.to_thread(temp_dirs.remove, home)
            raise
        half.rename(folder)
        new = folder.with_suffix(".new")
        new.write_text(json.dumps({"sample": sample.sample_id, "output": output}), encoding="utf-8")
        new.replace(folder.with_suffix(".json"))
        return _Layer(folder, _unless_empty(home), output, hold)


def _key(sample: Sample, files: Files) -> str:
    """All that the result of the set-up depends on."""
    place = sample.environment
    facts: list[object] = [_LAYOUT, files.digest, place.setup, sorted(place.deps), place.python_version, place.workdir]
    facts += [sorted(place.env.items()), place.network, place.setup_network]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _made(folder: Path, hold: CacheLease) -> _Layer | None:
    """The layer, when the set-up was run to its end."""
    try:
        about: dict[str, Any] = json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not folder.is_dir():
        return None
    return _Layer(folder, _unless_empty(folder.with_suffix(".home")), str(about.get("output", "")), hold)


def _unless_empty(folder: Path) -> Path | None:
    return folder if folder.is_dir() and any(folder.iterdir()) else None


def _copy(source: Path, target: Path) -> None:
    """A copy that can be written to, whatever the modes of the original."""
    shutil.copytree(source, target, symlinks=True)
    for place, _, names in os.walk(target):
        os.chmod(place, 0o755)
        for name in names:
            path = os.path.join(place, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | 0o600)


def _with_network(config: SubprocessConfig, sample: Sample) -> SubprocessConfig:
    """The settings of a set-up: with the network it needs what the host's programs know of certificates and proxies.

    What holds a password is not passed on."""
    if not (sample.environment.network or sample.environment.setup_network):
        return config
    files = {name: os.environ[name] for name in _FILE_VARIABLES if os.path.exists(os.environ.get(name, ""))}
    others = {name: os.environ[name] for name in _CLIENT_VARIABLES if "@" not in os.environ.get(name, "@")}
    hidden = {path for path in files.values() if not os.path.realpath(path).startswith(("/etc/ssl/", "/usr/"))}
    mounts = tuple(Mount(source=path, at=os.path.abspath(path)) for path in sorted(hidden))
    return replace(config, network=True, env={**files, **others, **config.env}, mounts=(*config.mounts, *mounts))


async def _set_up(sample: Sample, config: SubprocessConfig, python: Environment) -> str:
    deadline = time.monotonic() + sample.environment.setup_timeout
    said: list[str] = []
    executor = SubprocessExecutor(config)
    try:
        env = await _own_environment(executor, python, said)
        for number, command in enumerate(sample.environment.setup, 1):
            done = await executor.exec(command, timeout=max(0.1, deadline - time.monotonic()), env=env)
            said.append(f"$ {command}\n{done.stdout}{done.stderr}")
            if not done.success:
                raise SetupFailed(_failure(sample, number, command, done), "".join(said))
    finally:
        await executor.close()
    return "".join(said)


async def _own_environment(executor: SubprocessExecutor, python: Environment, said: list[str]) -> dict[str, str]:
    """Make the virtualenv that the commands may install into; the variables that make them use it."""
    if "filesystem_isolation" not in executor.supported_capabilities():
        return {}  # the home folder is the user's own
    made = await executor.exec([python.python, "-I", "-c", _MAKE_ENVIRONMENT, OWN_ENVIRONMENT, *python.packages])
    if not made.success:
        said.append(f"no virtualenv could be made for the set-up: {made.stderr}")
        return {}
    path = (await executor.exec('printf %s "$PATH"')).stdout
    return {"PATH": f"{OWN_ENVIRONMENT}/bin:{path}", "VIRTUAL_ENV": OWN_ENVIRONMENT}


def _failure(sample: Sample, number: int, command: str, done: CommandResult) -> str:
    how = "took too long" if done.timed_out else f"ended with {done.exit_code}"
    told = (done.stdout + done.stderr).strip()[-_TOLD:]
    which = f"set-up command {number} of {len(sample.environment.setup)}"
    hint = f"\n{_WHERE}" if "Read-only file system" in told else ""
    online = sample.environment.network or sample.environment.setup_network
    if not online and any(words in told for words in _OFFLINE):
        hint += f"\n{_NO_NETWORK}"
    return f"{sample.sample_id}: {which} {how}: {command}\n{told}".rstrip() + hint


class SampleExecutor(SubprocessExecutor):
    """As its parent, in the sample's workspace. Starting raises FilesRefused, EnvironmentFailed or SetupFailed."""

    def __init__(self, sample: Sample, cache: Path | None = None, *, sandbox: SandboxMode | None = None) -> None:
        super().__init__(SubprocessConfig(default_timeout=None, sandbox=sandbox, network=sample.environment.network))
        self.sample = sample
        self.cache = cache
        self.prepared: PreparedSample | None = None
        """What the place was opened on, once it is."""

    def _twin(self) -> Self:
        twin = type(self)(self.sample, self.cache)
        twin.config, twin.prepared, twin.handlers = self.config, self.prepared, dict(self.handlers)
        return twin

    async def _started(self) -> LiveSession:
        if self.prepared is None:
            self.prepared = await prepare_sample(self.sample, self.cache, sandbox=self.config.sandbox)
            self.config, self.holds = self.prepared.config, self.prepared
        return await super()._started()
