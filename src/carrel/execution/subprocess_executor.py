"""Code in a process of its own, sandboxed where this machine can: started in milliseconds, restored after a crash."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from carrel.errors import CarrelError, ExecutorClosed, ForkRefused, WorkerLost
from carrel.execution import file_changes, requests, scratch
from carrel.execution.bounded_output import BoundedOutput
from carrel.execution.calls import known_errors
from carrel.execution.confinement import Confinement, confinement
from carrel.execution.endings import WorkerDied
from carrel.execution.executor import (
    CommandResult,
    ExecutionResult,
    FileChange,
    FileEntry,
    Handler,
    OnOutput,
    Output,
)
from carrel.execution.host_line import Record
from carrel.execution.live_session import LiveSession
from carrel.execution.outcome import Stop, closed_result, failed_result, finished, misused, stopped
from carrel.execution.packages import Packages, subprocess_packages
from carrel.execution.settings import SubprocessConfig, path_of, sandbox_mode
from carrel.execution.streaming import Streaming, streamed
from carrel.execution.uv_program import has_uv
from carrel.execution.zygotes import Family, SpawnFailed, Zygote, shared
from carrel.worker.line import LineBroken

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


class SubprocessExecutor:
    """See `Executor` for what is promised; `SubprocessConfig` for what can be set."""

    def __init__(self, config: SubprocessConfig | None = None, *, handlers: dict[str, Handler] | None = None) -> None:
        self.config = config or SubprocessConfig()
        self.handlers: dict[str, Handler] = handlers if handlers is not None else {}
        self._turn = asyncio.Lock()
        self._session: LiveSession | None = None
        self._zygote: Zygote | None = None
        self._packages: Packages | None = None
        self._making = asyncio.Lock()
        self._confinement: Confinement | None = None
        self._before: file_changes.Before = file_changes.Empty()
        self._scratch: Path | None = None
        self._stop: Stop | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        async with self._turn:
            await self._started()

    async def _started(self) -> LiveSession:
        if self._closed:
            raise ExecutorClosed("this executor is closed; make another")
        if self._session is not None:
            if not self._session.worker_alive:
                # It died between two requests; where a frozen fork is left nothing is lost by that.
                await self._session.wake()
            return self._session
        config = self.config
        packages = await self._with_packages()
        zygote = shared.take(Family(packages.environment.python, tuple(config.preload)))
        try:
            if self._confinement is None:
                mode = sandbox_mode(config.sandbox)
                self._confinement = await asyncio.to_thread(confinement, mode, config)
                await asyncio.to_thread(self._look_at_workspace)
            session = LiveSession(self.handlers)
            try:
                async with asyncio.timeout(config.startup_timeout):
                    if not zygote.ready.done():
                        await asyncio.shield(asyncio.wrap_future(zygote.ready))
                    await session.open(zygote, self._settings(packages, self._confinement))
            except TimeoutError:
                await session.close()
                raise SpawnFailed("start", None, f"it was not ready within {config.startup_timeout:g} s") from None
            except BaseException:
                await session.close()
                raise
        except BaseException:
            zygote.give_back()
            raise
        self._zygote, self._session = zygote, session
        return session

    async def _with_packages(self) -> Packages:
        async with self._making:
            if self._closed:
                raise ExecutorClosed("this executor is closed; make another")
            if self._packages is None:
                self._packages = await subprocess_packages(self.config)
            return self._packages

    def _look_at_workspace(self) -> None:
        """Remember how it begins; without a file system of its own the session gets a copy to work on."""
        given, mode = path_of(self.config.workspace), self.config.workspace_mode
        confined = self._confinement is not None and self._confinement.confined
        if given is not None:
            self._before = file_changes.Remembered(given) if mode == "rw" else file_changes.Folder(given)
        if confined or (given is not None and mode == "rw"):
            return
        self._scratch = scratch.new_folder("workspace")
        if given is not None:
            shutil.copytree(given, self._scratch, symlinks=True, dirs_exist_ok=True)
            self._before = file_changes.Copied(given, self._scratch)

    def _settings(self, packages: Packages, confinement: Confinement) -> dict[str, Any]:
        config, environment, added = self.config, packages.environment, str(packages.added)
        source = self._scratch or path_of(config.workspace)
        mode = config.workspace_mode if self._scratch is None else "rw"
        return {
            "sandbox": "auto" if confinement.parts else "off",
            "parts": list(confinement.parts),
            "network": config.network,
            "hostname": config.hostname,
            "workspace": {
                "source": str(source.absolute()) if source is not None else None,
                "mode": mode,
                "at": config.workspace_at,
            },
            "mounts": [{"source": str(Path(m.source).absolute()), "at": m.at, "mode": m.mode} for m in config.mounts],
            "readonly": [*environment.folders, added],
            "packages": added,
            "env": {"PATH": f"{environment.path}:{added}/bin:{SYSTEM_PATH}", "PYTHONPATH": added, **config.env},
            "limits": {name: getattr(config.limits, name) for name in config.limits.__dataclass_fields__},
            "names": sorted({name.partition(".")[0] for name in self.handlers}),
            "errors": known_errors(),
            "frozen": config.frozen,
            "frozen_ceiling": config.frozen_ceiling,
        }

    async def close(self) -> None:
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._drop_session()
        # A start that was under way ends as well; it holds the turn.
        async with self._turn:
            await self._drop_session()
        async with self._making:
            packages, self._packages = self._packages, None
        if packages is not None:
            await packages.give_back()
        if self._scratch is not None:
            await asyncio.to_thread(scratch.remove, self._scratch)

    async def _drop_session(self) -> None:
        session, self._session = self._session, None
        zygote, self._zygote = self._zygote, None
        try:
            if session is not None:
                await session.close()
        finally:
            if zygote is not None:
                zygote.give_back()

    def supported_capabilities(self) -> set[str]:
        if self._confinement is None:
            mode = sandbox_mode(self.config.sandbox)
            self._confinement = confinement(mode, self.config)
        found = self._confinement.capabilities(self.config)
        if self.config.allow_runtime_deps and (has_uv() if self._packages is None else self._packages.can_install()):
            found |= {"deps_install", "deps_uninstall"}
        return found

    # --- packages ---------------------------------------------------------------------------------------------------

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        return await (await self._with_packages()).install(requirements, constraints)

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        return await (await self._with_packages()).uninstall(names)

    async def installed(self) -> dict[str, str]:
        return await (await self._with_packages()).installed()

    # --- code -------------------------------------------------------------------------------------------------------

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult:
        limit = self.config.output_limit
        return await self._run(code, timeout, BoundedOutput(limit), BoundedOutput(limit))

    def stream(self, code: str, timeout: float | None = None) -> AsyncGenerator[Output | ExecutionResult]:
        def run(streaming: Streaming) -> Coroutine[Any, Any, ExecutionResult]:
            def begun(session: LiveSession) -> None:
                streaming.watch = session.watch_output

            return self._run(code, timeout, streaming.stdout, streaming.stderr, begun)

        return streamed(self.config.output_limit, run)

    async def _run(
        self,
        code: str,
        timeout: float | None,
        stdout: BoundedOutput,
        stderr: BoundedOutput,
        begun: Callable[[LiveSession], None] | None = None,
    ) -> ExecutionResult:
        wrong = misused(code, timeout)
        if wrong is not None:
            return wrong
        async with self._turn:
            if self._closed:
                return closed_result()
            try:
                session = await self._started()
            except (CarrelError, OSError) as problem:
                return closed_result() if self._closed else failed_result(type(problem).__name__, str(problem))
            if begun is not None:
                begun(session)
            seconds = self.config.default_timeout if timeout is None else timeout
            stop = Stop(session, self.config.grace)
            began = time.perf_counter()
            self._stop = stop
            try:
                answer = session.run(code, stdout.add, stderr.add, stop)
                result = await self._answered(session, answer, seconds, stop)
            except LineBroken as problem:
                return failed_result("ValueError", str(problem))
            finally:
                stop.over()
                self._stop = None
                session.end_run()
            result = stopped(result, stop, seconds)
            result.stdout, result.stderr = stdout.text(), stderr.text()
            result.duration = time.perf_counter() - began
            return result

    async def _answered(
        self, session: LiveSession, answer: asyncio.Future[Record], seconds: float | None, stop: Stop
    ) -> ExecutionResult:
        number = session.last_request
        if seconds is not None:
            stop.after(seconds)
        cancelled = False
        try:
            try:
                record = await answer
            except asyncio.CancelledError:
                cancelled = True
                answer = session.rejoin(number, answer)
                stop.now("cancelled")
                await asyncio.wait([answer])
                record = answer.result()
            result = finished(record)
        except (WorkerDied, ValueError) as problem:
            result = await self._after_death(session, problem)
        if cancelled:
            raise asyncio.CancelledError
        return result

    async def _after_death(self, session: LiveSession, problem: Exception) -> ExecutionResult:
        """The run is lost; the session is not."""
        if self._closed:
            return closed_result()
        if isinstance(problem, ValueError):
            session.kill(f"it sent a value that cannot be read ({problem})")
        ending = await session.how_it_ended()
        result = failed_result(ending.error_type, ending.text)
        if await session.wake():
            result.state, result.state_reason = "restored", "the variables are as they were before this run"
            return result
        if self._closed:
            return closed_result()
        result.state, result.state_reason = "lost", session.unfrozen
        try:
            if not await session.begin_again():
                await self._drop_session()
                await self._started()
        except CarrelError as worse:
            result.state_reason += f"; and no new one could be started: {worse}"
        return result

    async def interrupt(self) -> bool:
        if self._stop is None:
            return False
        self._stop.interrupt()
        return True

    async def reset(self) -> None:
        await self._ask({"op": "reset"})

    async def fork(self) -> Self:
        async with self._turn:
            session = await self._started()
            assert self._confinement is not None
            assert self._zygote is not None
            why = self._confinement.why_no_fork(self.config)
            if why is not None:
                raise ForkRefused(f"a live fork is not possible here: {why}")
            fork = self._twin()
            if not self._zygote.take():
                raise ForkRefused("the process that the session came from is gone")
            try:
                fork._session = await session.fork(fork.handlers)
            except WorkerDied as problem:
                self._zygote.give_back()
                result = await self._after_death(session, problem)
                raise ForkRefused(
                    f"the session's Python ended: {result.error}; its variables are {result.state}"
                ) from None
            except BaseException:
                self._zygote.give_back()
                raise
            fork._zygote = self._zygote
            fork._packages = self._packages.take() if self._packages is not None else None
            fork._confinement = self._confinement
            fork._before = self._before
            return fork

    def _twin(self) -> Self:
        """Another of this kind, with the same settings and handlers, not started."""
        return type(self)(self.config, handlers=dict(self.handlers))

    # --- commands and files -----------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 300,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        on_output: OnOutput | None = None,
    ) -> CommandResult:
        output = requests.CommandOutput(self.config.output_limit, on_output)
        began = time.perf_counter()
        answer = await self._ask(requests.command_request(command, timeout, cwd, env, stdin), output.add)
        return output.result(answer, time.perf_counter() - began)

    async def read_file(self, path: str) -> bytes:
        return await requests.read_file(self._ask, path)

    async def write_file(self, path: str, data: bytes | str) -> None:
        await requests.write_file(self._ask, path, data)

    async def list_files(self, path: str = ".") -> list[FileEntry]:
        return await requests.list_files(self._ask, path)

    async def str_replace(self, path: str, old: str, new: str) -> None:
        await requests.str_replace(self._ask, path, old, new)

    async def changed_files(self) -> list[FileChange]:
        await self.start()
        now = await requests.seen_inside(self._ask)
        return await file_changes.changes(self._before, now, self.read_file)

    async def diff(self) -> str:
        return await file_changes.unified(self._before, await self.changed_files(), self.read_file)

    async def _ask(self, record: Record, piece: Callable[[Record], None] | None = None) -> Record:
        """One request in its turn; cancelling the caller ends the command that it asked for."""
        async with self._turn:
            session = await self._started()
            try:
                answer = session.request(record, piece)
            except LineBroken as problem:
                raise ValueError(str(problem)) from None
            try:
                try:
                    return await asyncio.shield(answer)
                except asyncio.CancelledError:
                    if record["op"] == "exec":
                        session.request({"op": "kill", "of": session.last_request}).add_done_callback(_ignored)
                        await asyncio.wait([answer], timeout=self.config.grace)
                        if not answer.done():
                            session.kill("a cancelled command did not end")
                    await asyncio.wait([answer])
                    if not isinstance(answer.exception(), WorkerDied):
                        raise
                    await self._after_death(session, WorkerDied())
                    raise
            except WorkerDied as problem:
                if self._closed:
                    raise ExecutorClosed("this executor was closed meanwhile") from None
                result = await self._after_death(session, problem)
                raise WorkerLost(f"{result.error}; its variables are {result.state}") from None


def _ignored(answer: asyncio.Future[Record]) -> None:
    """Whether there was still something to kill does not matter."""
    if not answer.cancelled():
        answer.exception()
