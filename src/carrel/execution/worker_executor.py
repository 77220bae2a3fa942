"""What the kinds with a worker share: requests in their turn, output, stops, deaths. How they open it is their own."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from carrel.errors import CarrelError, ExecutorClosed, PlaceLost, WorkerLost
from carrel.execution import file_changes, requests
from carrel.execution.config import PlaceSettings
from carrel.execution.executor import (
    CommandResult,
    ExecutionResult,
    FilePath,
    Handler,
    Moment,
    OnOutput,
    Output,
    RunningCommand,
)
from carrel.execution.host_line import Record
from carrel.execution.live_session import LiveSession
from carrel.execution.output import BoundedOutput, Streaming, streamed
from carrel.execution.packages import Packages
from carrel.execution.results import Stop, WorkerDied, closed_result, failed_result, finished, misused, stopped
from carrel.execution.turns import Turn
from carrel.execution.workspace_files import WorkspaceFiles
from carrel.guest.channel import ChannelError

LATE = 10.0
"""Seconds after the time of a command was up in which its worker must have ended it."""
_LONGEST = 1e9
WENT_BACK = "the session's Python ended after the run before this one, whose changes to the variables are gone"


class WorkerExecutor(WorkspaceFiles):
    """See `Executor` for what is promised."""

    config: PlaceSettings

    def __init__(self, handlers: dict[str, Handler] | None = None) -> None:
        super().__init__()
        self.handlers: dict[str, Handler] = handlers if handlers is not None else {}
        self._turn = asyncio.Lock()
        self._session: LiveSession | None = None
        self._packages: Packages | None = None
        self._making = asyncio.Lock()
        self._stop: Stop | None = None
        self._went_back = False
        """Whether the next run is to be told that what the last one did to the variables is gone."""
        self.lost = ""
        """Why what was changed in the files is gone; empty while it is there."""
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
        if self._session is None:
            self._session = await self._open()
            if self._closed:
                await self._drop_session()
                raise ExecutorClosed("this executor was closed while it started")
        elif not self._session.worker_alive:
            # It died between two requests; where a frozen fork of that moment is left nothing is lost by that.
            unkept, self._session.unkept = self._session.unkept, False
            self._went_back = await self._session.wake() and unkept
        return self._session

    @abstractmethod
    async def _open(self) -> LiveSession:
        """A session that is ready; leaves nothing behind where it fails."""

    @abstractmethod
    async def _with_packages(self) -> Packages:
        """Its packages, made where they are missing."""

    @abstractmethod
    def supported_capabilities(self) -> set[str]:
        """Only what is in force on this machine now."""

    @abstractmethod
    async def fork(self) -> Self: ...

    @abstractmethod
    async def checkpoint(self) -> Moment: ...

    @abstractmethod
    async def rewind(self, to: Moment, then: Callable[[], Awaitable[None]] | None = None) -> None: ...

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

    async def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

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
        async with Turn(self._turn) as turn:
            if self._closed:
                return closed_result()
            try:
                session = self._session
                if session is None or not session.worker_alive:
                    session = await self._started()
            except (CarrelError, OSError) as problem:
                return closed_result() if self._closed else failed_result(type(problem).__name__, str(problem))
            if begun is not None:
                begun(session)
            seconds = self.config.default_timeout if timeout is None else timeout
            stop = Stop(session, self.config.grace)
            began = time.perf_counter()
            try:
                answer = session.run(code, stdout.add, stderr.add, self, stop)
            except ChannelError as problem:
                session.end_run()
                return failed_result("ValueError", str(problem))
            self._stop = stop
            if seconds is not None:
                stop.after(seconds)
            result = await turn.finish(self._end_of_run(session, answer, stop), lambda: stop.now("cancelled"))
            result = stopped(result, stop, seconds)
            if self._went_back and result.state == "kept":
                result.state, result.state_reason = "restored", WENT_BACK
            self._went_back = False
            result.stdout, result.stderr = stdout.text(), stderr.text()
            result.duration = time.perf_counter() - began
            return result

    async def _end_of_run(self, session: LiveSession, answer: asyncio.Future[Record], stop: Stop) -> ExecutionResult:
        try:
            return finished(await answer)
        except (WorkerDied, ValueError) as problem:
            return await self._after_death(session, problem)
        finally:
            stop.over()
            self._stop = None
            session.end_run()

    async def _after_death(self, session: LiveSession, problem: Exception) -> ExecutionResult:
        """The run is lost; the session is not."""
        if self._closed:
            return closed_result()
        if isinstance(problem, ValueError):
            session.kill(f"it sent a value that cannot be read ({problem})")
        ending = await session.how_it_ended()
        result = failed_result(ending.error_type, ending.text)
        # Where it was no run that ended it, the next one tells what is gone.
        unkept, session.unkept = session.unkept, False
        if await session.wake():
            self._went_back = unkept
            reason = WENT_BACK if unkept else "the variables are as they were before this run"
            result.state, result.state_reason = "restored", reason
            return result
        if self._closed:
            return closed_result()
        result.state, result.state_reason = "lost", session.unfrozen
        try:
            if not await session.begin_again():
                if self._closed:
                    return closed_result()
                self._files_gone(result)
                await self._drop_session()
                await self._started()
                result.state_reason += "; a fresh one was opened"
        except (CarrelError, OSError) as worse:
            result.state_reason += f"; and no new one could be started: {worse}"
        return result

    def _files_gone(self, result: ExecutionResult) -> None:
        """Its first process ended, and with it the memory that everything it wrote was in."""
        what = "what was changed in its files"
        if self.config.workspace is not None and self.config.workspace_mode == "rw":
            what = "what was in its home and in /tmp"
        else:
            self.lost = f"the session's place died with all its processes, and {what} is gone: {result.error}"
        result.state_reason = f"the place died with all its processes, and {what} is gone too"

    async def interrupt(self) -> bool:
        if self._stop is None:
            return False
        self._stop.interrupt()
        return True

    async def reset(self) -> None:
        await self._ask({"op": "reset"})

    # --- commands and files -----------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 300,
        cwd: FilePath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        on_output: OnOutput | None = None,
    ) -> CommandResult:
        output = requests.CommandOutput(self.config.output_limit, on_output)
        began = time.perf_counter()
        answer = await self._ask(requests.command_request(command, timeout, cwd, env, stdin), output.add)
        return output.result(answer, time.perf_counter() - began)

    async def processes(self) -> list[RunningCommand]:
        return await requests.processes(self._ask)

    async def kill(self, pid: int) -> bool:
        return await requests.kill(self._ask, pid)

    async def _seen(self) -> file_changes.Tree:
        await self.start()
        return await requests.seen_inside(self._ask)

    async def _ask(self, record: Record, piece: Callable[[Record], None] | None = None) -> Record:
        """One request in its turn; cancelling the caller ends the command that it asked for."""
        async with Turn(self._turn) as turn:
            session = await self._started()
            try:
                answer = session.request(record, piece)
            except ChannelError as problem:
                raise ValueError(str(problem)) from None
            number, loop, expired = session.last_request, asyncio.get_running_loop(), asyncio.Event()

            def stop() -> None:
                if record["op"] == "exec":
                    session.request({"op": "kill", "of": number}).add_done_callback(_ignored)
                    loop.call_later(self.config.grace, give_up, "a cancelled command did not end")

            def give_up(why: str) -> None:
                if not answer.done():
                    session.kill(why)

            def expire() -> None:
                expired.set()
                give_up("it did not end a command in time")

            seconds = record.get("timeout")
            timer = None if seconds is None else loop.call_later(min(seconds, _LONGEST) + LATE, expire)
            try:
                return await turn.finish(self._end_of_request(session, answer), stop)
            except WorkerLost as problem:
                if isinstance(problem, PlaceLost) or not expired.is_set():
                    raise
                return {"exit_code": 124, "timed_out": True}
            finally:
                if timer is not None:
                    timer.cancel()

    async def _end_of_request(self, session: LiveSession, answer: asyncio.Future[Record]) -> Record:
        try:
            return await answer
        except WorkerDied as problem:
            if self._closed:
                raise ExecutorClosed("this executor was closed meanwhile") from None
            result = await self._after_death(session, problem)
            if self._session is session:
                raise WorkerLost(f"{result.error}; its variables are {result.state}") from None
            raise PlaceLost(f"{result.error}; {result.state_reason}") from None


def _ignored(answer: asyncio.Future[Record]) -> None:
    """Whether there was still something to kill does not matter."""
    if not answer.cancelled():
        answer.exception()
