"""Code in a container of Docker's or Podman's, optionally with another kernel (gVisor) in between."""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from carrel.errors import CarrelError, ExecutorClosed, ForkRefused, SandboxUnavailable
from carrel.execution import container_plan, file_changes, requests, scratch
from carrel.execution.calls import known_errors
from carrel.execution.container_packages import ContainerPackages, container_packages
from carrel.execution.container_session import ContainerSession
from carrel.execution.engine import LABEL, Engine, connect
from carrel.execution.executor import Handler, Moment
from carrel.execution.live_session import SpawnFailed
from carrel.execution.packages import Packages
from carrel.execution.packed_image import default_tag
from carrel.execution.settings import ContainerConfig, path_of, settings_of
from carrel.execution.uv_program import has_uv
from carrel.execution.worker_executor import WorkerExecutor

ALWAYS = {"timeout", "reset", "interrupt", "streaming"}
ISOLATED = {"process_isolation", "container_isolation", "filesystem_isolation"}


class ContainerExecutor(WorkerExecutor):
    """See `Executor` for what is promised; `ContainerConfig` for what can be set."""

    config: ContainerConfig
    _session: ContainerSession | None
    _packages: ContainerPackages | None

    def __init__(self, config: ContainerConfig | None = None, *, handlers: dict[str, Handler] | None = None) -> None:
        super().__init__(handlers)
        self.config = settings_of(self, ContainerConfig, config)
        self._user = container_plan.user_of(self.config)
        self._bringing = asyncio.Lock()

    # --- life -------------------------------------------------------------------------------------------------------

    async def _open(self) -> ContainerSession:
        config = self.config
        engine = await asyncio.to_thread(self._engine)
        await asyncio.to_thread(self._need, engine)
        session = ContainerSession(self.handlers, engine)
        try:
            async with asyncio.timeout(config.startup_timeout) as patience:
                labels = {LABEL: uuid4().hex, "carrel.host": f"{os.uname().nodename}:{os.getpid()}"}
                container = container_plan.container_of(config, self._user, labels)
                await session.begin(
                    container, container_plan.host_of(config, counts_files=engine.counts_files), container_plan.PROGRAM
                )
                patience.reschedule(None)
                await self._make_packages(session)
                await self._bring_workspace(session)
                patience.reschedule(asyncio.get_running_loop().time() + config.startup_timeout)
                await session.start(self._settings(), container_plan.environment_of(config, session.facts["path"]))
        except TimeoutError:
            await session.close()
            raise SpawnFailed("start", None, f"it was not ready within {config.startup_timeout:g} s") from None
        except BaseException:
            await session.close()
            raise
        if config.workspace is not None:
            await self._look_at_workspace(session)
        return session

    def _engine(self) -> Engine:
        return connect(self.config.remote_url or self.config.docker_host, self.config.auth_token)

    def _need(self, engine: Engine) -> None:
        """What the settings ask of the engine; SandboxUnavailable says what it lacks."""
        runtime = self.config.runtime
        if runtime is not None and not engine.has_runtime(runtime):
            raise SandboxUnavailable(
                f"the engine at {engine.where} has no runtime {runtime}; it is installed there and named in the "
                "engine's own settings (for Docker /etc/docker/daemon.json), after which it is started again"
            )
        engine.need_image(
            container_plan.image_of(self.config),
            "Name one that is there with image=…, or make one of this machine's own Python: "
            f"`carrel.pack_image()`, and image={default_tag()!r}",
        )

    def _settings(self) -> dict[str, Any]:
        config = self.config
        return {
            "home": config.workspace_at,
            "packages": container_plan.PACKAGES,
            "names": sorted(self.handlers),
            "errors": known_errors(),
            "frozen": config.frozen,
            "frozen_ceiling": config.frozen_ceiling,
        }

    def supported_capabilities(self) -> set[str]:
        try:
            engine = self._engine()
            if self.config.runtime is not None and not engine.has_runtime(self.config.runtime):
                return set()
            info = engine.info()
        except CarrelError:
            return set()
        found = ALWAYS | ISOLATED
        if self.config.network is False:
            found.add("network_isolation")
        if self.config.limits.memory is not None and info.get("MemoryLimit"):
            found.add("memory_limit")
        if self.config.limits.cpus is not None and info.get("CpuCfsQuota", info.get("CPUCfsQuota")):
            found.add("cpu_limit")
        if self.config.allow_runtime_deps and has_uv():
            found |= {"deps_install", "deps_uninstall"}
        return found

    async def fork(self) -> Self:
        raise await self._no_fork()

    async def checkpoint(self) -> Moment:
        raise await self._no_fork()

    async def rewind(self, to: Moment, then: Callable[[], Awaitable[None]] | None = None) -> None:
        raise await self._no_fork()

    async def _no_fork(self) -> ForkRefused:
        async with self._turn:
            await self._started()
        return ForkRefused(
            "a live fork is not possible here: a container has one file system, and no engine makes a second one "
            "of it with its processes; use a SubprocessExecutor to be able to fork"
        )

    # --- files ------------------------------------------------------------------------------------------------------

    async def _bring_workspace(self, session: ContainerSession) -> None:
        """A workspace that stays as it is on the host is copied in."""
        given = path_of(self.config.workspace)
        if given is None or self.config.workspace_mode != "overlay":
            return
        folder = scratch.new_folder("workspace")
        try:
            await asyncio.to_thread(_pack, given, folder / "workspace.tar", self._numbers())
            await session.unpack(folder / "workspace.tar", self.config.workspace_at)
        finally:
            await asyncio.to_thread(scratch.remove, folder)

    async def _look_at_workspace(self, session: ContainerSession) -> None:
        """Remember how it begins."""
        given, mode = path_of(self.config.workspace), self.config.workspace_mode
        assert given is not None
        if mode == "overlay":
            self._before = file_changes.Copied(given, await requests.seen_inside(session.request))
        elif isinstance(self._before, file_changes.Empty):
            kind = file_changes.Remembered if mode == "rw" else file_changes.Folder
            self._before = await asyncio.to_thread(kind, given)

    def _numbers(self) -> tuple[int, int]:
        uid, _, gid = self._user.partition(":")
        return int(uid), int(gid)

    # --- packages ---------------------------------------------------------------------------------------------------

    async def _make_packages(self, session: ContainerSession) -> None:
        if self._packages is None:
            self._packages = await container_packages(self.config, session.facts)
        else:
            self._packages.brought({})
        await self._bring_packages(session)

    async def _with_packages(self) -> Packages:
        if self._packages is None:
            await self.start()
        if self._closed or self._packages is None:
            raise ExecutorClosed("this executor is closed; make another")
        return self._packages

    async def _bring_packages(self, session: ContainerSession) -> None:
        async with self._bringing:
            packages = self._packages
            if packages is None or not await asyncio.to_thread(packages.is_behind):
                return
            folder = scratch.new_folder("packages")
            try:
                archive = folder / "packages.tar"
                gone, now = await asyncio.to_thread(packages.changes, archive, self._numbers())
                await session.unpack(archive, container_plan.PACKAGES, gone)
                packages.brought(now)
            finally:
                await asyncio.to_thread(scratch.remove, folder)

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        changed = await super().install(requirements, constraints)
        if self._session is not None:
            await self._bring_packages(self._session)
        return changed

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        removed = await super().uninstall(names)
        if self._session is not None:
            await self._bring_packages(self._session)
        return removed


def _pack(folder: Path, to: Path, user: tuple[int, int]) -> None:
    """A folder's content as a tar archive, as the session's user has it."""

    def own(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid, entry.gid = user
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(to, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name, filter=own)
