"""The environment of a sample: files, Python packages and set-up, prepared once and shared by its executors."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from carrel.errors import ConfigurationError, EnvironmentFailed, SetupFailed
from carrel.execution import temp_dirs
from carrel.execution.config import ContainerConfig, Mount, SandboxMode, SubprocessConfig
from carrel.execution.connection import WorkerConnection
from carrel.execution.container_executor import ContainerConnection, ContainerExecutor
from carrel.execution.container_transport import ContainerTransport
from carrel.execution.docker_engine import connect
from carrel.execution.environments import Environment, locked
from carrel.execution.executor import CommandResult, Handler
from carrel.execution.packages import environment_for_all
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.execution.warm_pool import WarmPool
from carrel.guest.sandbox.spec import HOME, OWN_ENVIRONMENT
from carrel.home import resolve_carrel_home
from carrel.tasks.file_cache import CacheLease, Files, prepared_files
from carrel.tasks.images import ready_image
from carrel.tasks.sample import Sample

_MAX_SHOWN = 4000
"""Characters of a failed set-up's output that its error shows."""
_LAYOUT = 3
"""The version of set-up layers; with another number all are made again."""
_WRITABLE = "(a set-up can write to the workdir and to its home folder, which are kept, and to /tmp, which is not)"
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
"""Make a virtualenv on top of another: its packages come first, and pip runs from the wheel that Python ships. That
takes 0.1 s; installing pip into each would take 3 s."""


ContainerPool = WarmPool[ContainerTransport]
"""Containers that are started in advance, for images that are used repeatedly."""


@dataclass(frozen=True)
class PreparedSample:
    """A sample whose files, packages and set-up are ready; an executor on it opens in milliseconds."""

    sample: Sample
    config: SubprocessConfig | ContainerConfig
    environment: Environment
    """The Python environment that is first on PATH; for a container, that of this program."""
    files: Files
    output: str = ""
    """What the set-up commands printed when they ran."""
    lease: CacheLease | None = None
    """Keeps the set-up layer in the cache while this object exists."""
    image_modules: frozenset[str] = frozenset()
    """The top-level modules that are installed in the image."""

    @property
    def in_container(self) -> bool:
        return isinstance(self.config, ContainerConfig)

    @property
    def workspace(self) -> Path:
        """The folder that every session of the sample starts from; it is never written to."""
        assert self.config.workspace is not None
        return Path(self.config.workspace)

    @property
    def python_folders(self) -> tuple[str, ...]:
        """The virtualenvs whose packages commands can import."""
        home = self.config.home if isinstance(self.config, SubprocessConfig) else None
        return (*self.environment.folders, *(() if home is None else (str(Path(home) / ".venv"),)))


def default_cache() -> Path:
    """The folder of unpacked files, set-up layers and virtualenvs."""
    return resolve_carrel_home() / "cache"


async def prepare_sample(
    sample: Sample, cache: Path | None = None, *, sandbox: SandboxMode | None = None
) -> PreparedSample:
    """Unpack the files, install the packages and run the set-up commands; cached parts are reused.

    Raises FilesRefused, EnvironmentFailed or SetupFailed, each with the reason.
    """
    cache = cache or default_cache()
    wanted = sample.environment
    image = await ready_image(sample, cache) if wanted.in_container else ""
    if image and sample.files is None:
        archive = await asyncio.to_thread(_archive_of_image, image, wanted.workdir, cache / "images")
        files = await prepared_files(sample.model_copy(update={"files": archive}), cache)
    else:
        files = await prepared_files(sample, cache)
    if missing := wanted.missing():
        raise EnvironmentFailed(f"{sample.sample_id} needs {', '.join(missing)}, which this machine does not have")
    if image:
        config = _container_config(sample, files, image)
        modules = await _modules_of_image(config, cache / "images")
        return PreparedSample(sample, config, Environment(sys.executable, ()), files, image_modules=modules)
    sandboxed = SubprocessConfig(
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
    # Install packages now, so that a failure is reported before anything waits for a session.
    python = await environment_for_all(sandboxed)
    if not wanted.setup:
        return PreparedSample(sample, sandboxed, python, files)
    layer = await _layer(sample, sandboxed, python, files, cache)
    with_setup = replace(sandboxed, workspace=layer.workspace, home=layer.home)
    return PreparedSample(sample, with_setup, python, files, layer.output, layer.lease)


def _container_config(sample: Sample, files: Files, image: str) -> ContainerConfig:
    """The engine is that of DOCKER_HOST, or Docker's own."""
    wanted = sample.environment
    return ContainerConfig(
        default_timeout=None,
        image=image,
        runtime=wanted.runtime or None,
        writable=tuple(wanted.writable),
        network=wanted.network,
        workspace=files.folder,
        workspace_at=wanted.workdir,
        env=dict(wanted.env),
        limits=wanted.limits.limits(),
        deps=tuple(wanted.deps),
    )


_LIST_MODULES = """
import os
found = set()
for place, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if name not in ("proc", "sys", "dev") or place != "/"]
    if place.endswith(("/site-packages", "/dist-packages")):
        found |= {name.partition(".")[0] for name in folders + files if not name.startswith("_")}
        folders.clear()
print(*sorted(name for name in found if name.isidentifier()))
"""


async def _modules_of_image(config: ContainerConfig, folder: Path) -> frozenset[str]:
    """The modules in all site-packages of an image, listed once in a container without files of a sample."""
    assert config.image is not None
    digest = await asyncio.to_thread(lambda: connect().image_id(str(config.image)))
    known = folder / f"{hashlib.sha256(digest.encode()).hexdigest()[:32]}.modules"
    try:
        return frozenset(known.read_text(encoding="utf-8").split())
    except FileNotFoundError:
        pass
    executor = ContainerExecutor(replace(config, workspace=None, deps=(), env={}))
    try:
        await executor.start()
        listed = await executor.exec([*executor.python, "-I", "-c", _LIST_MODULES], timeout=300)
    finally:
        await executor.close()
    if not listed.success:
        raise EnvironmentFailed(f"the modules of the image {config.image} cannot be listed: {listed.stderr[-500:]}")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = known.with_suffix(f".{os.getpid()}")
    new.write_text(listed.stdout, encoding="utf-8")
    new.replace(known)
    return frozenset(listed.stdout.split())


def _archive_of_image(image: str, workdir: str, folder: Path) -> Path:
    """The workdir of an image as a .tar.gz in this folder, read once for each content of the image."""
    engine = connect()
    digest = hashlib.sha256(f"{engine.image_id(image)}\0{workdir}".encode()).hexdigest()[:32]
    archive = folder / f"{digest}.tar.gz"
    if archive.exists():
        os.utime(archive, (time.time(), archive.stat().st_mtime))  # The time of the change identifies the content.
        return archive
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = temp_dirs.new_folder("image")
    try:
        with (scratch / "read.tar").open("wb") as read:
            engine.read_folder(image, workdir, read)
        with tarfile.open(scratch / "read.tar") as read, tarfile.open(scratch / "new", "w:gz", compresslevel=1) as new:
            for member in read:
                # The engine puts all files below the name of the folder; hard links name their targets in the same way.
                content = read.extractfile(member) if member.isreg() else None
                member.name = member.name.partition("/")[2]
                if member.islnk():
                    member.linkname = member.linkname.partition("/")[2]
                if member.name:
                    new.addfile(member, content)
        shutil.move(scratch / "new", archive.with_suffix(".new"))
        archive.with_suffix(".new").replace(archive)
    finally:
        temp_dirs.remove(scratch)
    return archive


async def open_files(prepared: PreparedSample) -> SubprocessExecutor:
    """A started sandbox on the sample's files, without its packages: for work on the files, such as `git apply`."""
    config = SubprocessConfig(default_timeout=None, network=False, workspace=prepared.workspace)
    if isinstance(prepared.config, SubprocessConfig):
        config = replace(config, sandbox=prepared.config.sandbox, workspace_at=prepared.config.workspace_at)
    executor = SubprocessExecutor(config)
    await _start(executor)
    return executor


async def _start(executor: TaskExecutor) -> None:
    try:
        await executor.start()
    except BaseException:
        await executor.close()
        raise


async def open_executor(
    prepared: PreparedSample,
    *,
    env: Mapping[str, str] | None = None,
    network: bool | None = None,
    mounts: tuple[Mount, ...] = (),
    handlers: Mapping[str, Handler] | None = None,
) -> TaskExecutor:
    """A started executor on a private copy of the sample's workspace; close it after use."""
    config, answers = prepared.config, dict(handlers or {})
    executor: TaskExecutor
    if isinstance(config, ContainerConfig):
        executor = ContainerExecutor(_changed(config, env, network, mounts), handlers=answers)
    else:
        executor = SubprocessExecutor(_changed(config, env, network, mounts), handlers=answers)
        executor.holds = prepared
    await _start(executor)
    return executor


_Config = TypeVar("_Config", SubprocessConfig, ContainerConfig)


def _changed(
    config: _Config, env: Mapping[str, str] | None, network: bool | None, mounts: tuple[Mount, ...]
) -> _Config:
    return replace(
        config,
        env={**config.env, **(env or {})},
        network=config.network if network is None else network,
        mounts=(*config.mounts, *mounts),
    )


class SampleExecutor(SubprocessExecutor):
    """An executor that prepares its sample when it starts.

    Starting raises FilesRefused, EnvironmentFailed or SetupFailed. `env`, `network` and `mounts` are for this executor
    only; verification is always as the sample says. A sample that is `prepared` already is not prepared again."""

    def __init__(
        self,
        sample: Sample,
        cache: Path | None = None,
        *,
        sandbox: SandboxMode | None = None,
        env: Mapping[str, str] | None = None,
        network: bool | None = None,
        mounts: tuple[Mount, ...] = (),
        prepared: PreparedSample | None = None,
    ) -> None:
        if sample.environment.in_container:
            raise ConfigurationError(
                f"{sample.sample_id} has an image; use sample_executor, which runs it in a container"
            )
        self._options = (env, network, mounts)
        config = SubprocessConfig(default_timeout=None, sandbox=sandbox, network=sample.environment.network)
        if prepared is not None:
            assert isinstance(prepared.config, SubprocessConfig)
            config = prepared.config
        super().__init__(_changed(config, *self._options))
        self.sample = sample
        self.cache = cache
        self.prepared = prepared
        """The prepared sample, once the executor has started."""

    def _twin(self) -> Self:
        twin = type(self)(self.sample, self.cache)
        twin.config, twin.prepared, twin.handlers = self.config, self.prepared, dict(self.handlers)
        return twin

    async def _connected(self) -> WorkerConnection[Any]:
        if self.prepared is None:
            self.prepared = await prepare_sample(self.sample, self.cache, sandbox=self.config.sandbox)
            assert isinstance(self.prepared.config, SubprocessConfig)
            self.config = _changed(self.prepared.config, *self._options)
        self.holds = self.prepared
        return await super()._connected()


class ContainerSampleExecutor(ContainerExecutor):
    """The same in a container, for a sample that has an image."""

    def __init__(
        self,
        sample: Sample,
        cache: Path | None = None,
        *,
        env: Mapping[str, str] | None = None,
        network: bool | None = None,
        mounts: tuple[Mount, ...] = (),
        prepared: PreparedSample | None = None,
        containers: ContainerPool | None = None,
    ) -> None:
        super().__init__(ContainerConfig(default_timeout=None, image=sample.environment.image or None))
        self.containers = containers
        self._options = (env, network, mounts)
        self.sample = sample
        self.cache = cache
        self.prepared = prepared
        """The prepared sample, once the executor has started."""

    def _twin(self) -> Self:
        twin = type(self)(self.sample, self.cache, prepared=self.prepared, containers=self.containers)
        twin._options, twin.handlers = self._options, dict(self.handlers)
        return twin

    @property
    def alive(self) -> bool:
        """Whether it was started, and its processes are alive."""
        return self._connection is not None and self._connection.alive and self._connection.worker_alive

    async def _open(self) -> ContainerConnection:
        self.prepared = self.prepared or await prepare_sample(self.sample, self.cache)
        assert isinstance(self.prepared.config, ContainerConfig)
        self.config = _changed(self.prepared.config, *self._options)
        return await super()._open()


TaskExecutor = SubprocessExecutor | ContainerExecutor


def sample_executor(
    sample: Sample,
    cache: Path | None = None,
    *,
    sandbox: SandboxMode | None = None,
    env: Mapping[str, str] | None = None,
    network: bool | None = None,
    mounts: tuple[Mount, ...] = (),
    prepared: PreparedSample | None = None,
    containers: ContainerPool | None = None,
) -> SampleExecutor | ContainerSampleExecutor:
    """An executor that prepares the sample when it starts: in a container, perhaps of the pool, if it has an image."""
    if sample.environment.in_container:
        return ContainerSampleExecutor(
            sample, cache, env=env, network=network, mounts=mounts, prepared=prepared, containers=containers
        )
    return SampleExecutor(sample, cache, sandbox=sandbox, env=env, network=network, mounts=mounts, prepared=prepared)


# --- set-up ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """What a set-up left in the folders that it can write to, without /tmp and /dev/shm."""

    workspace: Path
    home: Path | None
    """None when the set-up left nothing there."""
    output: str
    lease: CacheLease


async def _layer(sample: Sample, config: SubprocessConfig, python: Environment, files: Files, cache: Path) -> _Layer:
    """The layer of the set-up commands, made once for all sessions."""
    folder = cache / "layers" / _key(sample, files)
    lease = CacheLease(folder)
    try:
        return _made(folder, lease) or await _new_layer(sample, config, python, files, folder, lease)
    except BaseException:
        lease.release()
        raise


async def _new_layer(
    sample: Sample, config: SubprocessConfig, python: Environment, files: Files, folder: Path, lease: CacheLease
) -> _Layer:
    async with locked(folder.with_suffix(".lock")):
        if (found := _made(folder, lease)) is not None:
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
        return _Layer(folder, _unless_empty(home), output, lease)


def _key(sample: Sample, files: Files) -> str:
    """A digest of everything that the result of the set-up depends on."""
    environment = sample.environment
    facts: list[object] = [
        _LAYOUT,
        files.digest,
        environment.setup,
        sorted(environment.deps),
        environment.python_version,
        environment.workdir,
    ]
    facts += [sorted(environment.env.items()), environment.network, environment.setup_network]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _made(folder: Path, lease: CacheLease) -> _Layer | None:
    """The layer, if its set-up was run to the end."""
    try:
        about: dict[str, Any] = json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not folder.is_dir():
        return None
    return _Layer(folder, _unless_empty(folder.with_suffix(".home")), str(about.get("output", "")), lease)


def _unless_empty(folder: Path) -> Path | None:
    return folder if folder.is_dir() and any(folder.iterdir()) else None


def _copy(source: Path, target: Path) -> None:
    """A writable copy, whatever the modes of the original."""
    shutil.copytree(source, target, symlinks=True)
    for folder, _, names in os.walk(target):
        os.chmod(folder, 0o755)
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | 0o600)


def _with_network(config: SubprocessConfig, sample: Sample) -> SubprocessConfig:
    """The settings of a set-up. With the network it gets the host's variables for certificates and proxies, except
    those that contain a password."""
    if not (sample.environment.network or sample.environment.setup_network):
        return config
    files = {name: os.environ[name] for name in _FILE_VARIABLES if os.path.exists(os.environ.get(name, ""))}
    others = {name: os.environ[name] for name in _CLIENT_VARIABLES if "@" not in os.environ.get(name, "@")}
    hidden = {path for path in files.values() if not os.path.realpath(path).startswith(("/etc/ssl/", "/usr/"))}
    mounts = tuple(Mount(source=path, at=os.path.abspath(path)) for path in sorted(hidden))
    return replace(config, network=True, env={**files, **others, **config.env}, mounts=(*config.mounts, *mounts))


async def _set_up(sample: Sample, config: SubprocessConfig, python: Environment) -> str:
    deadline = time.monotonic() + sample.environment.setup_timeout
    output: list[str] = []
    executor = SubprocessExecutor(config)
    try:
        env = await _own_environment(executor, python, output)
        for number, command in enumerate(sample.environment.setup, 1):
            done = await executor.exec(command, timeout=max(0.1, deadline - time.monotonic()), env=env)
            output.append(f"$ {command}\n{done.stdout}{done.stderr}")
            if not done.success:
                raise SetupFailed(_failure(sample, number, command, done), "".join(output))
    finally:
        await executor.close()
    return "".join(output)


async def _own_environment(executor: SubprocessExecutor, python: Environment, output: list[str]) -> dict[str, str]:
    """Make the virtualenv that the commands may install into. Returns the variables that make them use it."""
    if "filesystem_isolation" not in executor.supported_capabilities():
        return {}  # Without isolation the home folder is the user's own.
    made = await executor.exec([python.python, "-I", "-c", _MAKE_ENVIRONMENT, OWN_ENVIRONMENT, *python.packages])
    if not made.success:
        output.append(f"no virtualenv could be made for the set-up: {made.stderr}")
        return {}
    path = (await executor.exec('printf %s "$PATH"')).stdout
    return {"PATH": f"{OWN_ENVIRONMENT}/bin:{path}", "VIRTUAL_ENV": OWN_ENVIRONMENT}


def _failure(sample: Sample, number: int, command: str, done: CommandResult) -> str:
    how = "took too long" if done.timed_out else f"ended with {done.exit_code}"
    shown = (done.stdout + done.stderr).strip()[-_MAX_SHOWN:]
    which = f"set-up command {number} of {len(sample.environment.setup)}"
    hint = f"\n{_WRITABLE}" if "Read-only file system" in shown else ""
    online = sample.environment.network or sample.environment.setup_network
    if not online and any(words in shown for words in _OFFLINE):
        hint += f"\n{_NO_NETWORK}"
    return f"{sample.sample_id}: {which} {how}: {command}\n{shown}".rstrip() + hint
