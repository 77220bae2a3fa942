"""Runs code in a container of Docker or Podman, optionally under gVisor."""

from __future__ import annotations

import asyncio
import io
import mmap
import os
import shutil
import sys
import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from carrel.errors import CarrelError, ExecutorClosed, ForkRefused, NoPython, SandboxUnavailable
from carrel.execution import file_changes, temp_dirs
from carrel.execution.channels import CommandServerGone, error_of
from carrel.execution.commands_and_files import list_entries, tree_of
from carrel.execution.config import ContainerConfig, path_of, settings_of
from carrel.execution.connection import SpawnFailed, WorkerConnection
from carrel.execution.container_settings import HOME, PROGRAM, container_of, environment_of, host_of, image_of, user_of
from carrel.execution.container_transport import PACKAGES, ContainerTransport, program
from carrel.execution.container_volumes import SessionVolumes, used_space
from carrel.execution.docker_engine import LABEL, Engine, connect, default_tag
from carrel.execution.durable import DiskWatch, Origin, StateFolder
from carrel.execution.durable_executor import DurableExecutor
from carrel.execution.environments import NEUTRAL, Environment, has_installer
from carrel.execution.executor import ExecutionResult, ExecutorCheckpoint, Handler
from carrel.execution.file_changes import Tree, seen_below
from carrel.execution.packages import MARK, Packages, found_in_names, made_ready
from carrel.execution.portable_python import portable_python
from carrel.execution.results import WorkerDied
from carrel.execution.warm_pool import WarmPool


def platform_of(facts: Mapping[str, Any]) -> str:
    """The platform of the container's Python, as uv names it."""
    machine, libc = str(facts.get("machine", "x86_64")), str(facts.get("libc", ""))
    if not libc.startswith("glibc 2."):
        return f"{machine}-unknown-linux-musl"
    minor = libc.removeprefix("glibc 2.").partition(".")[0]
    has = int(minor) if minor.isdigit() else 17
    known = max((number for number in (17, 28, *range(31, 41)) if number <= has), default=17)
    return f"{machine}-manylinux_2_{known}"


class ContainerPackages(Packages):
    """Packages in a folder of the host; `changes` makes an archive of those that are new, for the container."""

    def __init__(self, facts: Mapping[str, Any], added: Path, wheelhouse: Path | None) -> None:
        super().__init__(Environment(sys.executable, ()), added, wheelhouse)
        self._facts = facts
        self._copied: Tree = {}

    def _found_beside(self) -> dict[str, str]:
        return found_in_names([str(name) for name in self._facts.get("packages") or []])

    def _python(self) -> list[str]:
        version = ".".join(str(part) for part in (self._facts.get("version") or sys.version_info)[:2])
        return [*super()._python(), "--python-version", version, "--python-platform", platform_of(self._facts)]

    async def _uv_install(self, words: Sequence[str], folder: str = NEUTRAL) -> None:
        # A build would run on this machine, and be made for it.
        await super()._uv_install(words if "--no-build" in words else ["--no-build", *words], folder)

    def changes(self, to: Path, user: tuple[int, int]) -> tuple[list[str], Tree]:
        """Write what is new since the last time as a tar archive; return what was removed, and what there is now."""
        now = self._now()
        with tarfile.open(to, "w") as archive:
            for name in sorted(name for name, seen in now.items() if self._copied.get(name) != seen):
                self._add(archive, name, user)
        return [name for name in self._copied if name not in now], now

    def set_copied(self, now: Tree) -> None:
        """Remember what is in the container; nothing when it is a new one."""
        self._copied = now

    def copy_from(self, other: ContainerPackages) -> None:
        """Copy the packages of another session that has a folder of its own."""
        if other.added != self.added and other.added.is_dir():
            shutil.copytree(other.added, self.added, symlinks=True, dirs_exist_ok=True)

    def is_behind(self) -> bool:
        """Whether something must be copied into the container."""
        return self._now() != self._copied

    def _now(self) -> Tree:
        # The ctime is ignored: making a hard link changes it.
        seen = seen_below(self.added).items()
        return {name: replace(one, changed=0) for name, one in seen if name != MARK}

    def _add(self, archive: tarfile.TarFile, name: str, user: tuple[int, int]) -> None:
        path = self.added / name
        entry = archive.gettarinfo(str(path), name)
        entry.uid, entry.gid = user
        entry.uname = entry.gname = ""
        if not entry.isreg():
            archive.addfile(entry)
            return
        if Path(name).parts[0] != "bin":
            with open(path, "rb") as file:
                archive.addfile(entry, file)
            return
        # The first line of a script names its Python.
        inside = str(self._facts.get("python", "python3"))
        content = path.read_bytes().replace(os.fsencode(self.environment.python), os.fsencode(inside), 1)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


async def container_packages(config: ContainerConfig, facts: Mapping[str, Any]) -> ContainerPackages:
    """The packages of the settings, in a folder of the base, or in one that is removed with the session."""
    base, wheelhouse = path_of(config.base), path_of(config.wheelhouse)
    folder = temp_dirs.new_folder("packages") if base is None else base.absolute() / "environments"
    version = ".".join(str(part) for part in (facts.get("version") or sys.version_info)[:2])
    packages = ContainerPackages(facts, folder / f"container-{version}-{platform_of(facts)}", wheelhouse)
    if base is None:
        packages.goes_with_the_session(folder)
    await made_ready(packages, config.deps, path_of(config.deps_file))
    return packages


ContainerConnection = WorkerConnection[ContainerTransport]
_PYTHON = ("python3",)
_WITHOUT_PYTHON: dict[tuple[str, str], str] = {}
"""By engine and digest of an image, why its Python cannot run the worker's program."""
_NO_CODE = "code cannot run in the image {}: {}. Commands and files work; code needs an image with Python 3.9 or newer"
ALWAYS = {"timeout"}
WITH_CODE = {"reset", "interrupt", "streaming"}
ISOLATED = {"process_isolation", "container_isolation", "filesystem_isolation"}


class ContainerExecutor(DurableExecutor):
    """See `Executor`, and `ContainerConfig` for the settings."""

    config: ContainerConfig
    _connection: ContainerConnection | None
    _packages: ContainerPackages | None

    def __init__(self, config: ContainerConfig | None = None, *, handlers: dict[str, Handler] | None = None) -> None:
        super().__init__(handlers)
        self.config = settings_of(self, ContainerConfig, config)
        self.containers: WarmPool[ContainerTransport] | None = None
        """Where containers are started in advance; None is that each is started when it is needed."""
        self._user = user_of(self.config)
        self._copying = asyncio.Lock()
        self._volumes: SessionVolumes | None = None
        """Where a durable session has its files."""
        self._why_no_code = ""
        """Why only commands and files work, where the image has no Python; known from the start on."""
        self.python: Sequence[str] = _PYTHON
        """The words that start the Python of the first process: the image's, or one that was brought along."""

    # --- life -------------------------------------------------------------------------------------------------------

    async def _open(self) -> ContainerConnection:
        config = self.config
        engine = await asyncio.to_thread(self._engine)
        image = await asyncio.to_thread(self._need, engine)
        if self._state_path is not None:
            await asyncio.to_thread(self._open_state, engine, self._state_path)
        try:
            async with asyncio.timeout(config.startup_timeout):
                transport = await self._with_any_python(engine, image)
        except TimeoutError:
            raise SpawnFailed("start", None, f"it was not ready within {config.startup_timeout:g} s") from None
        connection = WorkerConnection(transport, self.handlers)
        if self._state is not None:
            transport.state_folder = HOME
            transport.max_state = config.limits.disk if isinstance(config.limits.disk, int) else None
        try:
            environment = environment_of(config, transport.facts["path"], with_packages=not self._why_no_code)
            transport.configure(self._settings(), environment)
            if self._why_no_code:
                self._refuse_packages()
                connection.go_without_worker(self._why_no_code)
            else:
                await self._make_packages(connection)
                # The worker starts while files are copied and the first commands run: it needs its packages only.
                transport.start_worker()
            if self._volumes is None or not self._volumes.has_files:
                await self._copy_workspace(connection)
            if config.workspace is not None:
                await self._look_at_workspace(connection)
            if self._state is not None and self._volumes is not None:
                await asyncio.to_thread(self._volumes.note_start, self._before.tree())
                self._watch_disk(connection, self._state)
        except BaseException:
            await connection.close()
            raise
        return connection

    def _open_state(self, engine: Engine, path: Path) -> None:
        """Open the state folder and the volumes with the files."""
        config, source = self.config, path_of(self.config.workspace)
        if self._state is None:
            parts = ("container", *([] if config.runtime is None else [f"the runtime {config.runtime}"]))
            folder = None if source is None else str(source.absolute())
            self._state = StateFolder(path, Origin(parts, config.network is not False, folder, engine.where))
        folders = [HOME] if source is not None and config.workspace_mode != "overlay" else [HOME, config.workspace_at]
        self._volumes = SessionVolumes(engine, self._state, folders)
        self._volumes.open(image_of(config), self._numbers())
        self.lost = self._volumes.lost

    def _files_gone(self, result: ExecutionResult) -> None:
        if self._state is None:
            super()._files_gone(result)
        else:
            result.state_reason = "the container ended with all its processes; its files are there"

    def _watch_disk(self, connection: ContainerConnection, state: StateFolder) -> None:
        if self._disk_watch is not None:
            self._disk_watch.close()
        limit = self.config.limits.disk
        if isinstance(limit, int):
            assert self._volumes is not None
            measure = partial(used_space, connection, self.python, list(self._volumes.names), 2 * limit)
            self._disk_watch = DiskWatch(state.changes, limit, connection, self._turn.locked, measure)

    async def _close(self) -> None:
        await super()._close()
        self._close_state()

    async def _with_any_python(self, engine: Engine, image: str) -> ContainerTransport:
        """A container whose first process runs: with the image's Python, or else with that of this machine."""
        key = (engine.where, image)
        if key not in _WITHOUT_PYTHON:
            try:
                return await self._container(engine, _PYTHON, [program()])
            except NoPython as problem:
                _WITHOUT_PYTHON[key] = str(problem)
        why = _WITHOUT_PYTHON[key]
        try:
            (loader, libraries, python), archive = await asyncio.to_thread(portable_python)
            self.python = (f"{PROGRAM}/{loader}", "--library-path", f"{PROGRAM}/{libraries}", f"{PROGRAM}/{python}")
            transport = await self._container(engine, self.python, [program(), archive])
        except (SpawnFailed, SandboxUnavailable, NoPython) as problem:
            raise NoPython(
                f"the image {image_of(self.config)} needs a Python of 3.9 or newer: {why}; and the Python of this "
                f"machine cannot be used in it either: {problem}"
            ) from None
        self._why_no_code = _NO_CODE.format(image_of(self.config), why)
        return transport

    async def _container(self, engine: Engine, python: Sequence[str], archives: Sequence[bytes]) -> ContainerTransport:
        """A container of these settings, whose first process runs: from the pool, if there is one."""
        volumes = self._volumes.names if self._volumes is not None else None
        host = host_of(self.config, counts_files=engine.counts_files, volumes=volumes)
        container = container_of(self.config, self._user, python)

        async def start() -> ContainerTransport:
            transport = ContainerTransport(engine)
            labels = {LABEL: uuid4().hex, "carrel.host": f"{os.uname().nodename}:{os.getpid()}"}
            try:
                await transport.create({**container, "labels": labels}, host, PROGRAM, archives)
            except BaseException:
                await transport.close()
                raise
            return transport

        if self.containers is None or self._state is not None:
            return await start()
        return await self.containers.take(f"{container['image']} at {engine.where} {container} {host}", start)

    def _engine(self) -> Engine:
        return connect(self.config.remote_url or self.config.docker_host, self.config.auth_token)

    def _need(self, engine: Engine) -> str:
        """The digest of the image; SandboxUnavailable if the engine lacks it or the runtime, and says what to do."""
        runtime = self.config.runtime
        if runtime is not None and not engine.has_runtime(runtime):
            raise SandboxUnavailable(
                f"the engine at {engine.where} has no runtime {runtime}; install it there, add it to the engine's "
                "settings (for Docker /etc/docker/daemon.json), and restart the engine"
            )
        return engine.need_image(
            image_of(self.config),
            "Name another with image=…, or make one from this machine's own Python: "
            f"`carrel.pack_image()`, and image={default_tag()!r}",
        )

    def _settings(self) -> dict[str, Any]:
        config = self.config
        return {
            "home": config.workspace_at,
            "packages": PACKAGES,
            "names": sorted(self.handlers),
            "errors": self.errors,
            "snapshots": config.snapshots,
            "max_snapshot_bytes": config.max_snapshot_bytes,
        }

    def supported_capabilities(self) -> set[str]:
        try:
            engine = self._engine()
            if self.config.runtime is not None and not engine.has_runtime(self.config.runtime):
                return set()
            info = engine.info()
        except CarrelError:
            return set()
        found = ALWAYS | ISOLATED | (set() if self._why_no_code else WITH_CODE)
        if self.config.network is False:
            found.add("network_isolation")
        if self.config.limits.memory is not None and info.get("MemoryLimit"):
            found.add("memory_limit")
        if self.config.limits.cpus is not None and info.get("CpuCfsQuota", info.get("CPUCfsQuota")):
            found.add("cpu_limit")
        if self.config.allow_runtime_deps and has_installer() and not self._why_no_code:
            found |= {"deps_install", "deps_uninstall"}
        return found

    async def fork(self) -> Self:
        """Another container with the same files in the workspace; as variables cannot be copied, there must be none."""
        if names := [variable.name for variable in await self.variables()]:
            shown = ", ".join(names[:10]) + (" …" if len(names) > 10 else "")
            raise ForkRefused(
                f"the variables cannot be carried over: {shown}. No engine can copy a running container with its "
                "processes; its files alone can be forked, after a reset, or use a SubprocessExecutor"
            )
        if self.config.workspace is not None and self.config.workspace_mode != "overlay":
            raise ForkRefused(
                "the files cannot be carried over: the workspace is the folder itself, not a copy of it; "
                "use workspace_mode='overlay'"
            )
        fork, folder = self._twin(), temp_dirs.new_folder("fork")
        try:
            removed = await self._pack_changes(folder / "changes.tar")
            await fork.start()
            connection = fork._connection
            assert connection is not None
            await fork._unpack(connection, folder / "changes.tar", self.config.workspace_at, removed)
            if self._packages is not None and fork._packages is not None:
                await asyncio.to_thread(fork._packages.copy_from, self._packages)
                await fork._copy_packages(connection)
        except BaseException:
            await fork.close()
            raise
        finally:
            await asyncio.to_thread(temp_dirs.remove, folder)
        fork.lost = self.lost
        return fork

    def _twin(self) -> Self:
        twin = type(self)(self.config)
        twin.handlers, twin.containers = dict(self.handlers), self.containers
        return twin

    async def _pack_changes(self, to: Path) -> list[str]:
        """Pack the changed files of the workspace as a tar archive; return the removed ones."""
        removed = []
        uid, gid = self._numbers()
        now = tree_of(await list_entries(await self._command_client("agent"), ".", recursive=True))
        with tarfile.open(to, "w") as archive:
            for change in await self.changed_files():
                if change.kind == "deleted":
                    removed.append(change.path)
                    continue
                entry = tarfile.TarInfo(change.path)
                entry.uid, entry.gid = uid, gid
                seen = now.get(change.path)
                if seen is not None and seen.kind == "link":
                    entry.type, entry.linkname = tarfile.SYMTYPE, seen.target
                    archive.addfile(entry)
                else:
                    about, content = await self.stat(change.path), await self.read_file(change.path)
                    entry.mode, entry.mtime, entry.size = about.mode & 0o777, int(about.mtime), len(content)
                    archive.addfile(entry, io.BytesIO(content))
        return removed

    async def checkpoint(self) -> ExecutorCheckpoint:
        raise await self._no_checkpoint()

    async def rewind(self, to: ExecutorCheckpoint, then: Callable[[], Awaitable[None]] | None = None) -> None:
        raise await self._no_checkpoint()

    async def _no_checkpoint(self) -> ForkRefused:
        async with self._turn:
            await self._started()
        return ForkRefused(
            "a container cannot be rewound: no engine can copy a running one with its processes; "
            "use a SubprocessExecutor to be able to rewind"
        )

    # --- files ------------------------------------------------------------------------------------------------------

    async def _copy_workspace(self, connection: ContainerConnection) -> None:
        """Copy a workspace that must stay unchanged on the host into the container."""
        given = path_of(self.config.workspace)
        if given is None or self.config.workspace_mode != "overlay":
            return
        folder = temp_dirs.new_folder("workspace")
        try:
            await asyncio.to_thread(_pack, given, folder / "workspace.tar", self._numbers())
            await self._unpack(connection, folder / "workspace.tar", self.config.workspace_at)
        finally:
            await asyncio.to_thread(temp_dirs.remove, folder)

    async def _look_at_workspace(self, connection: ContainerConnection) -> None:
        """Remember the workspace at the start."""
        given, mode = path_of(self.config.workspace), self.config.workspace_mode
        assert given is not None
        if mode == "overlay":
            if self._volumes is not None and self._volumes.has_files:
                tree = await asyncio.to_thread(self._volumes.read_start)
            else:
                tree = tree_of(await list_entries(await connection.commands.get("agent"), ".", recursive=True))
            self._before = file_changes.unchanged_folder(given, tree)
        elif self._before is ContainerExecutor._before:
            look = file_changes.remembered_folder if mode == "rw" else file_changes.unchanged_folder
            self._before = await asyncio.to_thread(look, given)

    def _numbers(self) -> tuple[int, int]:
        uid, _, gid = self._user.partition(":")
        return int(uid), int(gid)

    async def _unpack(
        self, connection: ContainerConnection, archive: Path, at: str, remove: Sequence[str] = ()
    ) -> None:
        """Unpack a tar archive in the container; the paths `remove` are removed first."""
        try:
            client = await connection.commands.get("agent")
            request = client.begin({"op": "unpack", "path": at, "remove": list(remove)})
            try:
                with open(archive, "rb") as file:
                    await request.send_input(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                problem = error_of(await asyncio.shield(request.answer))
            finally:
                request.cancel()
        except (CommandServerGone, WorkerDied):
            raise SpawnFailed("copy files into the container", None, "the container ended") from None
        if problem is not None:
            raise SpawnFailed("copy files into the container", None, str(problem))

    # --- packages ---------------------------------------------------------------------------------------------------

    async def _make_packages(self, connection: ContainerConnection) -> None:
        if self._packages is None:
            self._packages = await container_packages(self.config, connection.transport.facts)
        else:
            self._packages.set_copied({})
        await self._copy_packages(connection)

    def _refuse_packages(self) -> None:
        if self.config.deps or self.config.deps_file is not None:
            raise NoPython(f"no packages can be added: {self._why_no_code}")

    async def _with_packages(self) -> Packages:
        if self._packages is None:
            await self.start()
        if self._why_no_code and not self._closed:
            raise NoPython(f"there are no packages to add or list: {self._why_no_code}")
        if self._closed or self._packages is None:
            raise ExecutorClosed("this executor is closed; make another")
        return self._packages

    async def _copy_packages(self, connection: ContainerConnection) -> None:
        async with self._copying:
            packages = self._packages
            if packages is None or not await asyncio.to_thread(packages.is_behind):
                return
            folder = temp_dirs.new_folder("packages")
            try:
                archive = folder / "packages.tar"
                gone, now = await asyncio.to_thread(packages.changes, archive, self._numbers())
                await self._unpack(connection, archive, PACKAGES, gone)
                packages.set_copied(now)
            finally:
                await asyncio.to_thread(temp_dirs.remove, folder)

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        changed = await super().install(requirements, constraints)
        if self._connection is not None:
            await self._copy_packages(self._connection)
        return changed

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        removed = await super().uninstall(names)
        if self._connection is not None:
            await self._copy_packages(self._connection)
        return removed


def _pack(folder: Path, to: Path, user: tuple[int, int]) -> None:
    """Pack a folder's content as a tar archive, owned by the session's user."""

    def own(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid, entry.gid = user
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(to, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name, filter=own)
