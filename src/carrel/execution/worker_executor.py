"""The base of executors whose code runs in a worker process: runs in order, time limits, recovery."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Self

from carrel.errors import CarrelError, ExecutorClosed, NoPython, WorkerLost, WorkspaceLost
from carrel.execution.channels import CommandClient, CommandServerGone, Record
from carrel.execution.commands_and_files import CommandsAndFiles
from carrel.execution.config import ProcessSettings
from carrel.execution.connection import Recovery, SpawnFailed, StateFile, WorkerConnection
from carrel.execution.executor import ExecutionResult, ExecutorCheckpoint, Handler, Output, Variable
from carrel.execution.host_calls import known_errors
from carrel.execution.packages import Packages
from carrel.execution.results import (
    LIST_VARIABLES,
    OnVariables,
    RunTimer,
    Streaming,
    Turn,
    VariableReport,
    WorkerDied,
    closed_result,
    encode_variables,
    failed_result,
    finished,
    misused,
    read_report,
    stopped,
    streamed,
    variables_of,
)
from carrel.guest.channel import ChannelError
from carrel.processes import BoundedOutput


class WorkerExecutor(CommandsAndFiles):
    """See `Executor`. Subclasses open the session."""

    config: ProcessSettings

    def __init__(self, handlers: dict[str, Handler] | None = None) -> None:
        self.handlers: dict[str, Handler] = handlers if handlers is not None else {}
        self.errors = known_errors()
        """The error classes that code has without importing them, parents first, and what else each is."""
        self._turn = asyncio.Lock()
        self._connection: WorkerConnection[Any] | None = None
        self._packages: Packages | None = None
        self._making = asyncio.Lock()
        self._timer: RunTimer | None = None
        self.on_variables: OnVariables | None = None
        """Where the variables go after the runs that begin from now on."""
        self._unreported: Recovery | None = None
        """A recovery by which variables were lost, for the result of the next run."""
        self.lost = ""
        """Why the changes of the files are lost; empty while they are there."""
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        async with self._turn:
            await self._connected()

    async def _started(self) -> WorkerConnection[Any]:
        """The connection to a worker that is ready; in a container, commands do not wait for that."""
        connection = await self._connected()
        if not connection.is_ready:
            try:
                await connection.wait_ready("start")
            except SpawnFailed:
                await self._drop_connection()
                raise
        return connection

    async def _connected(self) -> WorkerConnection[Any]:
        if self._closed:
            raise ExecutorClosed("this executor is closed; make another")
        if self._connection is None:
            self._connection = await self._open()
            if self._closed:
                await self._drop_connection()
                raise ExecutorClosed("this executor was closed while it started")
        elif not self._connection.worker_alive and not self._connection.why_no_code:
            # It died between two requests: nothing is lost if there is a snapshot of that moment.
            recovery = await self._connection.recover(fresh=False)
            self._unreported = recovery if recovery.changes_lost else None
        return self._connection

    @abstractmethod
    async def _open(self) -> WorkerConnection[Any]:
        """Open a session; a failure leaves nothing behind."""

    @property
    def workspace_path(self) -> str:
        """The folder of the workspace as code and commands see it."""
        at: str = self.config.workspace_at
        return at

    @abstractmethod
    def supported_capabilities(self) -> set[str]:
        """Return the capabilities that are active on this machine now."""

    @abstractmethod
    async def fork(self) -> Self: ...

    @abstractmethod
    async def checkpoint(self) -> ExecutorCheckpoint: ...

    @abstractmethod
    async def rewind(self, to: ExecutorCheckpoint, then: Callable[[], Awaitable[None]] | None = None) -> None: ...

    async def close(self) -> None:
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._drop_connection()
        # A start that is under way holds the turn, and ends too.
        async with self._turn:
            await self._drop_connection()
        async with self._making:
            packages, self._packages = self._packages, None
        if packages is not None:
            await packages.give_back()

    async def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    # --- code -------------------------------------------------------------------------------------------------------

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult:
        limit = self.config.output_limit
        return await self._run(code, timeout, BoundedOutput(limit), BoundedOutput(limit))

    def stream(self, code: str, timeout: float | None = None) -> AsyncGenerator[Output | ExecutionResult]:
        def run(streaming: Streaming) -> Coroutine[Any, Any, ExecutionResult]:
            def begun(connection: WorkerConnection[Any]) -> None:
                streaming.watch = connection.transport.read_output

            return self._run(code, timeout, streaming.stdout, streaming.stderr, begun)

        return streamed(self.config.output_limit, run)

    async def _run(
        self,
        code: str,
        timeout: float | None,
        stdout: BoundedOutput,
        stderr: BoundedOutput,
        begun: Callable[[WorkerConnection[Any]], None] | None = None,
        *,
        variables: bool = False,
        state: StateFile | None = None,
    ) -> ExecutionResult:
        """Run code, or with `variables` list them, or do so much with their saved state."""
        wrong = misused(code, timeout)
        if wrong is not None:
            return wrong
        async with Turn(self._turn) as turn:
            if self._closed:
                return closed_result()
            try:
                connection = self._connection
                if connection is None or not (connection.worker_alive and connection.is_ready):
                    connection = await self._started()
            except (CarrelError, OSError) as problem:
                return closed_result() if self._closed else failed_result(type(problem).__name__, str(problem))
            if connection.why_no_code:
                return failed_result(NoPython.__name__, connection.why_no_code)
            if begun is not None:
                begun(connection)
            seconds = self.config.default_timeout if timeout is None else timeout
            timer = RunTimer(connection, self.config.grace)
            began = time.perf_counter()
            try:
                what, reported = (state, None) if variables else (code, self.on_variables)
                answer = connection.run(what, stdout.add, stderr.add, self, timer, reported)
            except ChannelError as problem:
                connection.end_run()
                return failed_result("ValueError", str(problem))
            self._timer = timer
            if seconds is not None:
                timer.start(seconds)
            result = await turn.finish(self._end_of_run(connection, answer, timer), lambda: timer.stop("cancelled"))
            if not variables or not result.is_ok:
                result = stopped(result, timer, seconds)
            if self._unreported is not None and result.state == "kept":
                result.state, result.state_reason = "restored", self._unreported.reason
            if not variables:
                self._unreported = None
            result.stdout, result.stderr = stdout.text(), stderr.text()
            result.duration = time.perf_counter() - began
            return result

    async def _end_of_run(
        self, connection: WorkerConnection[Any], answer: asyncio.Future[Record], timer: RunTimer
    ) -> ExecutionResult:
        try:
            return finished(await answer)
        except (WorkerDied, ValueError) as problem:
            return await self._after_death(connection, problem)
        finally:
            timer.cancel()
            self._timer = None
            connection.end_run()

    async def _after_death(self, connection: WorkerConnection[Any], problem: Exception) -> ExecutionResult:
        """Recover the session, and return the result of the run that was lost."""
        if self._closed:
            return closed_result()
        if isinstance(problem, ValueError):
            connection.kill(f"it sent a value that cannot be read ({problem})")
        ending = await connection.exit_status()
        result = failed_result(ending.error_type, ending.text)
        recovery = await connection.recover()
        if self._closed and recovery.state != "restored":
            return closed_result()
        if recovery.state == "restored":
            self._unreported = recovery if recovery.changes_lost else None
            result.state, result.state_reason = "restored", recovery.reason
            return result
        result.state, result.state_reason = "lost", recovery.reason
        if recovery.state == "gone":
            try:
                self._files_gone(result)
                await self._drop_connection()
                await self._started()
                result.state_reason += "; a fresh one was opened"
            except (CarrelError, OSError) as worse:
                result.state_reason += f"; and no new one could be started: {worse}"
        return result

    def _files_gone(self, result: ExecutionResult) -> None:
        """The session's first process ended, and with it the memory that its files were in."""
        what = "what was changed in its files"
        if self.config.workspace is not None and self.config.workspace_mode == "rw":
            what = "what was in its home and in /tmp"
        else:
            self.lost = f"the session's place died with all its processes, and {what} is gone: {result.error}"
        result.state_reason = f"the place died with all its processes, and {what} is gone too"

    async def interrupt(self) -> bool:
        if self._timer is None:
            return False
        self._timer.interrupt()
        return True

    async def variables(self) -> list[Variable]:
        return variables_of(await self._run("", LIST_VARIABLES, BoundedOutput(1), BoundedOutput(1), variables=True))

    async def report_variables(self) -> VariableReport:
        """Return what the worker reports after a run. Unlike `variables`, it calls no method of the user's."""
        return read_report(await self._ask({"op": "report"}), 0)

    async def set_variables(self, variables: Mapping[str, Any]) -> None:
        await self._ask({"op": "set_variables", "values": encode_variables(variables)})

    async def reset(self) -> None:
        await self._ask({"op": "reset"})

    # --- commands and files -----------------------------------------------------------------------------------------

    async def _command_client(self, user: str) -> CommandClient:
        while True:
            connection = self._connection
            if self._closed:
                raise ExecutorClosed("this executor is closed; make another")
            if connection is None:
                await self.start()
            elif not connection.alive:
                await self._replace(connection)
            else:
                try:
                    client = await connection.commands.get(user)
                except (WorkerDied, CommandServerGone):
                    if connection.alive and connection is self._connection:
                        raise WorkerLost("the session's command server ended while it was started") from None
                    continue
                connection.check_stopped_later()
                return client

    def _kill_server(self, client: CommandClient) -> None:
        client.owner.transport.kill_server(client)
        super()._kill_server(client)

    async def _server_gone(self, client: CommandClient) -> Exception:
        connection: WorkerConnection[Any] = client.owner
        if self._closed:
            return ExecutorClosed("this executor was closed meanwhile")
        if connection.alive and connection is self._connection:
            return WorkerLost("the session's command server ended, and with it what it was doing")
        if connection is self._connection:
            await self._replace(connection)
        if connection.lost:
            return WorkspaceLost(f"all processes of the session ended; {self.lost or 'its files are as they were'}")
        return WorkerLost("the session was rewound meanwhile, which ends what runs in it")

    async def _replace(self, connection: WorkerConnection[Any]) -> None:
        """Open another session in place of one whose first process is gone."""
        async with self._turn:
            if self._connection is connection and not self._closed:
                await self._after_death(connection, WorkerDied("the session's first process is gone"))

    # --- requests of the worker -------------------------------------------------------------------------------------

    async def _ask(self, record: Record) -> Record:
        """One request in its turn."""
        async with Turn(self._turn) as turn:
            connection = await self._started()
            if connection.why_no_code:
                raise NoPython(connection.why_no_code)
            try:
                answer = connection.request(record)
            except ChannelError as problem:
                raise ValueError(str(problem)) from None
            return await turn.finish(self._end_of_request(connection, answer), lambda: None)

    async def _end_of_request(self, connection: WorkerConnection[Any], answer: asyncio.Future[Record]) -> Record:
        try:
            return await answer
        except WorkerDied as problem:
            if self._closed:
                raise ExecutorClosed("this executor was closed meanwhile") from None
            result = await self._after_death(connection, problem)
            if self._connection is connection:
                raise WorkerLost(f"{result.error}; its variables are {result.state}") from None
            raise WorkspaceLost(f"{result.error}; {result.state_reason}") from None
