"""Runs code in a process of its own, in a sandbox where this machine can build one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from carrel.errors import ExecutorClosed, ForkRefused
from carrel.execution import file_changes, temp_dirs
from carrel.execution.capabilities import Confinement, confinement
from carrel.execution.channels import Record
from carrel.execution.config import SubprocessConfig, path_of, sandbox_mode, settings_of
from carrel.execution.connection import READY, SpawnFailed, WorkerConnection
from carrel.execution.durable import DiskWatch, Origin, StateFolder
from carrel.execution.durable_executor import DurableExecutor
from carrel.execution.environments import has_installer
from carrel.execution.executor import ExecutionResult, ExecutorCheckpoint, Handler
from carrel.execution.file_changes import Unreadable, Upper, read_upper
from carrel.execution.local_transport import LocalConnection, LocalTransport
from carrel.execution.packages import Packages, subprocess_packages
from carrel.execution.results import WorkerDied
from carrel.execution.sandbox_client import ZygoteGone, ZygoteKey, shared
from carrel.guest.sandbox.spec import HOME, OWN_ENVIRONMENT

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_SETTLE_TIME = 2.0
"""Seconds that a worker has to finish a fork that was given up."""


class SubprocessExecutor(DurableExecutor):
    """See `Executor`, and `SubprocessConfig` for the settings."""

    config: SubprocessConfig
    _connection: LocalConnection | None

    def __init__(self, config: SubprocessConfig | None = None, *, handlers: dict[str, Handler] | None = None) -> None:
        super().__init__(handlers)
        self.config = settings_of(self, SubprocessConfig, config)
        self._confinement: Confinement | None = None
        self._capabilities: set[str] = set()
        """Without those that depend on the packages."""
        self._why_no_fork: str | None = None
        self._scratch: Path | None = None
        self._kept: list[_Checkpoint] = []
        self.still = asyncio.Lock()
        """Held while files are read several times and must not change in between: a rewind waits for it."""
        self._state_path = path_of(self.config.state_folder)
        self.holds: object = None
        """An object that must live as long as the executor."""

    @property
    def alive(self) -> bool:
        """Whether it was started, and its processes are alive."""
        return self._connection is not None and self._connection.alive and self._connection.worker_alive

    async def _open(self) -> LocalConnection:
        packages = await self._with_packages()
        try:
            return await self._opened(packages)
        except ZygoteGone:
            return await self._opened(packages)

    async def _opened(self, packages: Packages) -> LocalConnection:
        config = self.config
        zygote = shared.take(ZygoteKey(packages.environment.python, tuple(config.preload)))
        try:
            if self._confinement is None:
                await asyncio.to_thread(self._prepare)
            assert self._confinement is not None
            connection = WorkerConnection(LocalTransport(zygote), self.handlers)
        except BaseException:
            zygote.release()
            raise
        try:
            async with asyncio.timeout(config.startup_timeout):
                if not zygote.ready.done():
                    await asyncio.shield(asyncio.wrap_future(zygote.ready))
                settings, private = self._settings(packages, self._confinement), self._private(packages)
                await connection.transport.open(settings, private)
                await connection.wait_ready("start")
            if self._state is not None and self._loads_at_start:
                self.resumed = await self._load(connection)
                self._loads_at_start = False
            self._watch_disk(connection)
        except BaseException as problem:
            await connection.close()
            if isinstance(problem, TimeoutError):
                raise SpawnFailed("start", None, f"it was not ready within {config.startup_timeout:g} s") from None
            raise
        return connection

    async def _with_packages(self) -> Packages:
        async with self._making:
            if self._closed:
                raise ExecutorClosed("this executor is closed; make another")
            if self._packages is None:
                self._packages = await subprocess_packages(self.config)
            return self._packages

    def _prepare(self) -> None:
        """Find out what the sandbox of this machine offers, and open the state; slow with a large workspace."""
        config = self.config
        found = confinement(sandbox_mode(config.sandbox), config)
        if self._state_path is not None and self._state is None:
            source = path_of(config.workspace)
            origin = Origin(found.parts, config.network, str(source.absolute()) if source is not None else None)
            self._state = StateFolder(self._state_path, origin)
        self._look_at_workspace(found.confined)
        self._capabilities, self._why_no_fork = found.capabilities(config), found.why_no_fork(config)
        self._confinement = found

    def _look_at_workspace(self, confined: bool) -> None:
        """Remember the workspace at the start; without a file system of its own the session works on a copy."""
        given, mode = path_of(self.config.workspace), self.config.workspace_mode
        if given is not None:
            look = file_changes.remembered_folder if mode == "rw" else file_changes.unchanged_folder
            self._before = look(given)
        if confined or (given is not None and mode == "rw"):
            return
        if self._state is None:
            self._scratch = temp_dirs.new_folder("workspace")
        else:
            self._scratch = self._state.changes / "upper"
            self._scratch.mkdir(exist_ok=True)
        if given is not None:
            if self._state is None or self._state.is_new:
                shutil.copytree(given, self._scratch, symlinks=True, dirs_exist_ok=True)
            copy = file_changes.seen_below(given if self._state is not None else self._scratch)
            self._before = file_changes.unchanged_folder(given, copy)

    @property
    def workspace_path(self) -> str:
        folder = self._scratch or path_of(self.config.workspace)
        if folder is None or self._confinement is None or self._confinement.confined:
            return self.config.workspace_at
        return str(folder.absolute())

    def _settings(self, packages: Packages, confinement: Confinement) -> dict[str, Any]:
        config, environment = self.config, packages.environment
        source = self._scratch or path_of(config.workspace)
        mode = config.workspace_mode if self._scratch is None else "rw"
        home = path_of(config.home)
        state = self._state if confinement.confined else None
        return {
            "sandbox": "auto" if confinement.parts else "off",
            "parts": list(confinement.parts),
            "network": config.network,
            "hostname": config.hostname,
            "workspace": {
                "source": str(source.absolute()) if source is not None else None,
                "mode": mode,
                "at": config.workspace_at,
                "upper_dir": str(state.files) if state is not None else None,
                "generation": state.generation if state is not None else "",
            },
            "mounts": [{"source": str(Path(m.source).absolute()), "at": m.at, "mode": m.mode} for m in config.mounts],
            "home_source": str(home.absolute()) if home is not None else None,
            "readonly": [*environment.folders, str(packages.shown)],
            "limits": asdict(config.limits),
        }

    def _private(self, packages: Packages) -> dict[str, Any]:
        """Settings that no other session may see: environment variables hold secrets."""
        config, added = self.config, str(packages.added)
        home = path_of(config.home)
        own = f"{HOME}/.local/bin:" if home is not None else ""
        first = f"{OWN_ENVIRONMENT}/bin:" if home is not None and (home / ".venv" / "bin").is_dir() else ""
        path = f"{first}{os.path.dirname(packages.environment.python)}:{added}/bin:{own}{SYSTEM_PATH}"
        return {
            "packages": added,
            "env": {"PATH": path, "PYTHONPATH": packages.path_of_commands(), **config.env},
            "names": sorted(self.handlers),
            "errors": self.errors,
            "snapshots": config.snapshots,
            "max_snapshot_bytes": config.max_snapshot_bytes,
        }

    async def _close(self) -> None:
        # First, because a rewind to one of them holds the turn.
        await self._drop_checkpoints()
        await super()._close()
        await self._drop_checkpoints()
        if self._scratch is not None and self._state is None:
            await asyncio.to_thread(temp_dirs.remove, self._scratch)
        if self._state is not None:
            self._close_state()
        self.holds = None

    async def _drop_checkpoints(self) -> None:
        await asyncio.gather(*(kept.close() for kept in self._kept))

    def _files_gone(self, result: ExecutionResult) -> None:
        if self._scratch is None and self._state is None:
            super()._files_gone(result)

    def supported_capabilities(self) -> set[str]:
        found = set(self._capabilities)
        if self._confinement is None:
            found = confinement(sandbox_mode(self.config.sandbox), self.config).capabilities(self.config)
        if self.config.allow_runtime_deps and (
            has_installer() if self._packages is None else self._packages.can_install()
        ):
            found |= {"deps_install", "deps_uninstall"}
        return found

    def _watch_disk(self, connection: LocalConnection) -> None:
        if self._disk_watch is not None:
            self._disk_watch.close()
        limit = self.config.limits.disk
        if self._state is not None and isinstance(limit, int):
            self._disk_watch = DiskWatch(self._state.changes, limit, connection, self._turn.locked)

    # --- branching --------------------------------------------------------------------------------------------------

    async def fork(self) -> Self:
        async with self._turn:
            fork = self._twin()
            fork._connection = await self._forked(fork.handlers)
            if self._packages is not None:
                fork._packages = self._packages
                self._packages.users += 1
            fork._confinement, fork._capabilities = self._confinement, self._capabilities
            fork._before = self._before
            fork.lost, fork.holds = self.lost, self.holds
            return fork

    async def checkpoint(self) -> ExecutorCheckpoint:
        async with self._turn:
            kept = _Checkpoint(self, await self._forked(self.handlers, as_checkpoint=True), self.lost)
            self._kept.append(kept)
            return kept

    async def rewind(self, to: ExecutorCheckpoint, then: Callable[[], Awaitable[None]] | None = None) -> None:
        if not isinstance(to, _Checkpoint) or to.of is not self:
            raise ForkRefused("this is not a checkpoint of this session")
        await self.still.acquire()
        try:
            await self._turn.acquire()
        except BaseException:
            self.still.release()
            raise
        # Once begun it is completed, also if the caller is cancelled: variables and files must go back together.
        going = asyncio.ensure_future(self._rewind(to, then))
        going.add_done_callback(self._rewound)
        await asyncio.shield(going)

    def _rewound(self, going: asyncio.Task[None]) -> None:
        self._turn.release()
        self.still.release()
        if not going.cancelled():
            going.exception()  # Mark it as retrieved: the caller may be gone.

    async def _rewind(self, to: _Checkpoint, then: Callable[[], Awaitable[None]] | None) -> None:
        if self._closed:
            raise ExecutorClosed("this executor is closed; make another")
        # The files of the state folder are replaced by those of the checkpoint, which are in memory.
        generation = uuid.uuid4().hex if self._state is not None else ""
        try:
            connection = await to.again(self.handlers, generation)
        except ForkRefused:
            if self._closed:
                raise ExecutorClosed("this executor was closed while it was rewound") from None
            raise
        try:
            if self._closed:
                raise ExecutorClosed("this executor was closed while it was rewound")
            if self._state is not None:
                await asyncio.to_thread(self._state.stage, generation)
            if then is not None:
                await then()
        except BaseException as problem:
            await connection.close()
            if isinstance(problem, OSError):
                raise ForkRefused(f"the files could not be replaced: {problem}") from None
            raise
        before, self._connection = self._connection, connection
        self.lost, self._unreported = to.lost, None
        if before is not None:
            await before.close()
        if self._state is not None:
            await asyncio.to_thread(self._state.switch, generation)
            self._watch_disk(connection)

    async def _forked(self, handlers: dict[str, Handler], *, as_checkpoint: bool = False) -> LocalConnection:
        """Open a session with a copy of the variables and files."""
        connection = await self._started()
        if self._why_no_fork is not None:
            raise ForkRefused(f"a live fork is not possible here: {self._why_no_fork}")
        try:
            return await fork_connection(connection, handlers, as_checkpoint=as_checkpoint)
        except WorkerDied as problem:
            if self._closed:
                raise ExecutorClosed("this executor was closed while it was forked") from None
            result = await self._after_death(connection, problem)
            raise ForkRefused(f"the session's Python ended: {result.error}; its variables are {result.state}") from None

    def _twin(self) -> Self:
        """Return an executor of this kind with the same settings and handlers, not started."""
        twin = type(self)(self.config, handlers=dict(self.handlers))
        twin._state_path = None  # A fork's files are in memory.
        return twin

    async def _before_and_now(self) -> tuple[file_changes.Before, file_changes.Tree]:
        base, at = path_of(self.config.workspace), self.config.workspace_at
        # The overlay does not know of files that are mounted into the workspace.
        if base is not None and not any(Path(mount.at).is_relative_to(at) for mount in self.config.mounts):
            upper = await self.upper(base)
            if upper is not None:
                return file_changes.unchanged_files(base, upper.hidden), upper.seen
        return await super()._before_and_now()

    async def upper(self, base: Path) -> Upper | None:
        """What the overlay of the workspace has changed in `base`; None where there is no overlay."""
        async with self._turn:
            connection = await self._started()
            config, parts = self.config, self._confinement.parts if self._confinement is not None else ()
            if config.workspace is None or config.workspace_mode != "overlay" or "overlay" not in parts:
                return None
            try:
                folder = await connection.transport.overlay_folder()
            except WorkerDied:
                return None
            try:
                return await asyncio.to_thread(read_upper, folder, base)
            except Unreadable:
                return None
            finally:
                os.close(folder)


class _Checkpoint:
    """A fork in which nothing runs: each rewind forks it again."""

    def __init__(self, of: SubprocessExecutor, connection: LocalConnection, lost: str) -> None:
        self.of, self.lost = of, lost
        self._connection: LocalConnection | None = connection
        connection.transport.memory_kills.begin()

    async def again(self, handlers: dict[str, Handler], generation: str) -> LocalConnection:
        """Open a session that continues from this checkpoint."""
        connection = self._connection
        if connection is None:
            raise ForkRefused("this checkpoint was dropped")
        if connection.worker_alive:
            connection.transport.signal(signal.SIGCONT)  # code of the session may have stopped it
            with suppress(WorkerDied):
                return await fork_connection(connection, handlers, generation=generation)
        if self._connection is None:
            raise ForkRefused("this checkpoint was dropped meanwhile")
        # No snapshot is restored in its place: its variables could be others.
        ending = await connection.exit_status()
        raise ForkRefused(f"the process of this checkpoint is gone: {ending.text}")

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self.of._kept.remove(self)
            await connection.close()


async def fork_connection(
    parent: LocalConnection, handlers: dict[str, Handler], *, as_checkpoint: bool = False, generation: str = ""
) -> LocalConnection:
    """Fork a session with its variables and files; after ForkRefused nothing has changed.

    With a `generation` its files are kept on the host, below the folder of the session that all of this came from.
    A worker that does not answer is ended, and WorkerDied raised. A fork for a checkpoint is there only to be forked
    itself: it keeps no snapshot, and no other process can look into it."""
    transport = parent.transport
    assert transport.init is not None
    control, init = socket.socketpair()
    channel, theirs = socket.socketpair()
    if not transport.zygote.acquire():
        raise ForkRefused("the process that the session came from is gone")
    try:
        new = LocalTransport(transport.zygote, transport.pid_depth + 1)
    except BaseException:
        transport.zygote.release()
        raise
    child = WorkerConnection(new, handlers)
    answer: asyncio.Future[Record] | None = None
    new.memory_kills = transport.memory_kills.shared()
    try:
        new.connect(channel, control)
        # Init builds the file system while the worker forks; the first to finish waits for the other.
        preparing = transport.init.request({"op": "fork", "generation": generation}, [init.fileno()])
        fds = [theirs.fileno(), new.stdout.write_end, new.stderr.write_end]
        answer = parent.request({"op": "fork", "checkpoint": as_checkpoint}, fds=fds)
        # Copying many files takes init as long as it takes; once they are there, the worker has nothing to wait for.
        await asyncio.wait([answer, preparing], return_when=asyncio.FIRST_COMPLETED)
        async with asyncio.timeout(None if answer.done() else READY):
            forked = await asyncio.shield(answer)
        prepared = await preparing
        if prepared.get("op") != "fork_ready":
            raise ForkRefused(f"a live fork was refused: {prepared.get('message')}")
        transport.init.has_forked = True
        if "refused" in forked or forked.get("error"):
            raise ForkRefused(f"a live fork was refused: {forked.get('refused') or forked.get('error')}")
        init.close()
        theirs.close()
        new.close_write_ends()
        await child.wait_ready("start the fork")
    except BaseException as problem:
        # Its end of the channel is seen once this process has closed its copies.
        init.close()
        theirs.close()
        await child.close()
        if isinstance(problem, TimeoutError):
            # Otherwise it would fork at the next request.
            parent.kill(f"it did not answer within {READY:.0f} seconds")
        if answer is not None and not answer.done():
            # After a cancellation the worker is still forking: it would take the next fork's file system.
            await asyncio.wait([answer], timeout=_SETTLE_TIME)
        if isinstance(problem, TimeoutError):
            raise WorkerDied("it did not answer a request to fork") from None
        if isinstance(problem, SpawnFailed):
            raise ForkRefused(f"a live fork failed: {problem}") from None
        raise
    return child
