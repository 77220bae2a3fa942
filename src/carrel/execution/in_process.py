"""Runs code in a thread of this process, without any isolation."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from carrel.errors import CarrelError, ConfigurationError, ExecutorClosed, ForkRefused
from carrel.execution import file_changes, temp_dirs
from carrel.execution.channels import CommandClient, CommandServerGone, Record
from carrel.execution.code_thread import (
    CodeThread,
    RunStreams,
    add_import_folder,
    leave_streams,
    remove_import_folder,
    renew_streams,
    use_streams,
)
from carrel.execution.commands_and_files import CommandsAndFiles
from carrel.execution.config import InProcessConfig, settings_of
from carrel.execution.connection import CommandServers
from carrel.execution.environments import has_installer
from carrel.execution.executor import (
    CallContext,
    ExecutionResult,
    ExecutorCheckpoint,
    Handler,
    Output,
    SavedVariables,
    Variable,
    current_call,
)
from carrel.execution.host_calls import error_record, handler_for, whole
from carrel.execution.packages import Packages, in_process_packages
from carrel.execution.results import (
    LIST_VARIABLES,
    RunTimer,
    Streaming,
    Turn,
    closed_result,
    encode_variables,
    failed_result,
    finished,
    misused,
    stopped,
    streamed,
    variables_of,
)
from carrel.guest.worker import values
from carrel.guest.worker.command_server import CommandServer
from carrel.guest.worker.host_calls import encode_arguments, error_from_record
from carrel.guest.worker.namespaces import namespaces
from carrel.processes import BoundedOutput

_ONE_PROCESS = "code that runs in the host's own process cannot be forked apart from it; use a subprocess"
_NOT_SAVED = "the code ran in the host's own process, which never unpickles; a subprocess can keep variables"
_INTERRUPT_CHECK = 0.02
"""Seconds between two checks for an interrupt, while code waits for the host."""


class InProcessExecutor(CommandsAndFiles):
    """See `Executor`; there is no isolation.

    Code that cannot be interrupted (a C function that does not return) goes on in its thread, and the next run has new
    variables. Threads that the code starts write to this process's own output, and `os._exit` ends this process. The
    whole process can import the packages that are added, until the executor is closed."""

    config: InProcessConfig

    def __init__(self, config: InProcessConfig | None = None, *, handlers: dict[str, Handler] | None = None) -> None:
        self.config = settings_of(self, InProcessConfig, config)
        self.handlers: dict[str, Handler] = handlers if handlers is not None else {}
        self._turn = asyncio.Lock()
        self._thread: CodeThread | None = None
        self._home = Path()
        self._own_home: Path | None = None
        self._state_path: Path | None = None
        self._answer: asyncio.Future[Record] | None = None
        self._timer: RunTimer | None = None
        self._stdout: BoundedOutput | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._servers = CommandServers(self._serve_commands)
        self._command_servers: list[CommandServer] = []
        self._packages: Packages | None = None
        self._making = asyncio.Lock()
        self._closed = False

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        async with self._turn:
            await self._started()

    async def _started(self) -> CodeThread:
        if self._closed:
            raise ExecutorClosed("this executor is closed; make another")
        if self._thread is None:
            if self.config.base is not None or self.config.deps or self.config.deps_file is not None:
                await self._with_packages()
            self._loop = asyncio.get_running_loop()
            if self.config.workspace is not None:
                self._home = Path(self.config.workspace).absolute()
                self._before = await asyncio.to_thread(file_changes.remembered_folder, self._home)
                if self._closed:
                    raise ExecutorClosed("this executor was closed while it started")
            elif self._state_path is not None:
                self._home = self._state_path / "files"
                self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            else:
                self._home = self._own_home = temp_dirs.new_folder("workspace")
            use_streams()
            self._thread = self._new_thread()
        return self._thread

    @property
    def workspace_path(self) -> str:
        """The folder in which code and commands start; known after the start."""
        return str(self._home)

    async def _with_packages(self) -> Packages:
        async with self._making:
            if self._closed:
                raise ExecutorClosed("this executor is closed; make another")
            if self._packages is None:
                self._packages = await in_process_packages(self.config)
                add_import_folder(str(self._packages.added))
            return self._packages

    def keep_state(self, folder: Path) -> None:
        """Keep the workspace in this folder, if it is not a given one."""
        self._state_path = folder

    async def save(self, *, may_block: bool = True) -> SavedVariables:
        """Save nothing, and say why."""
        return SavedVariables(missing={"*": _NOT_SAVED})

    async def load(self) -> SavedVariables | None:
        return SavedVariables(missing={"*": _NOT_SAVED})

    def _new_thread(self) -> CodeThread:
        names = sorted(self.handlers)
        return CodeThread(lambda builtins: namespaces(self, names, builtins))  # type: ignore[arg-type]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            await self._end(thread)
        async with self._making:
            packages, self._packages = self._packages, None
        if packages is not None:
            remove_import_folder(str(packages.added))
            await packages.give_back()

    async def _end(self, thread: CodeThread) -> None:
        thread.interrupt()
        thread.abandon()
        self._cancel_calls()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result({"closed": True})
        self._servers.close()
        for server in self._command_servers:
            await asyncio.to_thread(server.kill_all)
        leave_streams()
        if self._own_home is not None:
            await asyncio.to_thread(temp_dirs.remove, self._own_home)

    def supported_capabilities(self) -> set[str]:
        found = {"timeout", "reset", "interrupt", "streaming"}
        if self.config.allow_runtime_deps and (
            has_installer() if self._packages is None else self._packages.can_install()
        ):
            found |= {"deps_install", "deps_uninstall"}
        return found

    # --- code -------------------------------------------------------------------------------------------------------

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult:
        limit = self.config.output_limit
        return await self._run(code, timeout, _Shared(limit), BoundedOutput(limit))

    def stream(self, code: str, timeout: float | None = None) -> AsyncGenerator[Output | ExecutionResult]:
        def run(streaming: Streaming) -> Coroutine[Any, Any, ExecutionResult]:
            loop = asyncio.get_running_loop()
            return self._run(code, timeout, _Posted(streaming.stdout, loop), _Posted(streaming.stderr, loop))

        return streamed(self.config.output_limit, run)

    async def _run(
        self,
        code: str,
        timeout: float | None,
        stdout: BoundedOutput,
        stderr: BoundedOutput,
        *,
        variables: bool = False,
    ) -> ExecutionResult:
        """Run code, or list the variables."""
        wrong = misused(code, timeout)
        if wrong is not None:
            return wrong
        async with Turn(self._turn) as turn:
            if self._closed:
                return closed_result()
            try:
                thread = await self._started()
            except (CarrelError, OSError) as problem:
                return closed_result() if self._closed else failed_result(type(problem).__name__, str(problem))
            seconds = self.config.default_timeout if timeout is None else timeout
            self._answer = answer = self._loop.create_future()
            self._timer = timer = RunTimer(_Thread(self._interrupt_thread, self._leave_thread), self.config.grace)
            self._stdout = stdout
            began = time.perf_counter()
            renew_streams()
            streams = RunStreams(stdout, stderr)
            thread.run(None if variables else code, streams, _delivery(self._loop, answer))
            if seconds is not None:
                timer.start(seconds)
            record = await turn.finish(self._end_of_run(answer, timer), lambda: timer.stop("cancelled"))
            result = closed_result() if record.get("closed") else finished(record)
            if not variables or not result.is_ok:
                result = stopped(result, timer, seconds)
            if record.get("lost"):
                result.state, result.state_reason = "lost", str(record["lost"])
            streams.flush()  # of code that runs on
            result.stdout, result.stderr = stdout.text(), stderr.text()
            result.duration = time.perf_counter() - began
            return result

    async def _end_of_run(self, answer: asyncio.Future[Record], timer: RunTimer) -> Record:
        try:
            return await answer
        finally:
            timer.cancel()
            self._timer = self._answer = self._stdout = None
            self._cancel_calls()

    def _interrupt_thread(self) -> None:
        if self._thread is not None:
            self._thread.interrupt()

    def _leave_thread(self, why: str) -> None:
        """Abandon the thread, which cannot be killed; the next run gets a new one with new variables."""
        if self._thread is None or self._answer is None or self._answer.done():
            return
        self._thread.abandon()
        self._thread = self._new_thread()
        lost = "its thread could not be stopped and runs on; the variables are new"
        self._answer.set_result({"error": why, "error_type": "Timeout", "lost": lost})

    async def interrupt(self) -> bool:
        if self._timer is None:
            return False
        self._interrupt_thread()
        return True

    async def variables(self) -> list[Variable]:
        return variables_of(await self._run("", LIST_VARIABLES, _Shared(1), BoundedOutput(1), variables=True))

    async def set_variables(self, variables: Mapping[str, Any]) -> None:
        data = values.decode(encode_variables(variables))
        async with self._turn:
            (await self._started()).names.update(data)

    async def reset(self) -> None:
        async with self._turn:
            (await self._started()).reset()

    async def fork(self) -> InProcessExecutor:
        raise ForkRefused(_ONE_PROCESS)

    async def checkpoint(self) -> ExecutorCheckpoint:
        raise ForkRefused(_ONE_PROCESS)

    async def rewind(self, to: ExecutorCheckpoint, then: Callable[[], Awaitable[None]] | None = None) -> None:
        raise ForkRefused(_ONE_PROCESS)

    # --- calls to the host, made in the thread ----------------------------------------------------------------------

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call the host and wait, in small steps: an interrupt arrives only between two bytecodes."""
        future = asyncio.run_coroutine_threadsafe(self._handled(name, encode_arguments(name, arguments)[0]), self._loop)
        try:
            while True:
                try:
                    return _value(future.result(_INTERRUPT_CHECK))
                except TimeoutError:
                    if future.done():
                        raise
        except BaseException:
            future.cancel()
            raise

    async def call_async(self, name: str, arguments: dict[str, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(self._handled(name, encode_arguments(name, arguments)[0]), self._loop)
        return _value(await asyncio.wrap_future(future))

    async def _handled(self, name: str, encoded: Any) -> Record:
        """Answer a call in the host's loop. Arguments and answer are copied as data, as between processes."""
        task = asyncio.current_task()
        if task is not None:
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        stdout = self._stdout

        def write(text: str) -> None:
            if stdout is not None and stdout is self._stdout:
                stdout.add(text.encode("utf-8", "backslashreplace"))

        call = CallContext(self, write, self._timer)
        current_call.set(call)
        try:
            arguments = values.decode(encoded)
            answer = await handler_for(self.handlers, name)(name, list(arguments["args"]), dict(arguments["kwargs"]))
            return {"value": whole(name, answer)}
        except Exception as problem:  # noqa: BLE001 -- whatever a handler raises is for the code that called
            return {"error": error_record(problem)}
        finally:
            call.active = False

    def _cancel_calls(self) -> None:
        for task in list(self._calls):
            task.cancel()

    # --- commands and files -----------------------------------------------------------------------------------------

    async def _command_client(self, user: str) -> CommandClient:
        if user != "agent":
            raise ConfigurationError(f"commands cannot run as {user!r} here: they run as the user of this process")
        while True:
            if self._closed or self._thread is None:
                await self.start()
            try:
                return await self._servers.get(user)
            except CommandServerGone:
                if self._closed:
                    raise ExecutorClosed("this executor is closed; make another") from None

    async def _serve_commands(self, user: str) -> CommandClient:
        """The same command server as in the other kinds, in threads of this process."""
        ours, theirs = socket.socketpair()
        server = CommandServer(theirs, str(self._home))
        self._command_servers.append(server)
        threading.Thread(target=server.serve, name="carrel-commands", daemon=True).start()
        client = CommandClient()
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: client, sock=ours)
        return client

    async def _server_gone(self, client: CommandClient) -> Exception:
        return ExecutorClosed("this executor was closed meanwhile")

    def _command_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Add the paths of the added packages, which are not in this process's environment."""
        found: dict[str, str] = {}
        if self._packages is not None:
            paths = {"PYTHONPATH": self._packages.path_of_commands(), "PATH": f"{self._packages.added}/bin"}
            found = {name: os.pathsep.join(filter(None, (os.environ.get(name), path))) for name, path in paths.items()}
        return {**found, **env}


class _Thread:
    """What a `RunTimer` interrupts and kills."""

    def __init__(self, interrupt: Callable[[], None], leave: Callable[[str], None]) -> None:
        self._interrupt, self._leave = interrupt, leave

    def interrupt(self) -> None:
        self._interrupt()

    def kill(self, why: str = "") -> None:
        self._leave(why)


class _Shared(BoundedOutput):
    """Output of the code's thread, and of handlers in the loop's thread."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._lock = threading.Lock()

    def add(self, data: bytes) -> None:
        with self._lock:
            super().add(data)


class _Posted(BoundedOutput):
    """Takes output in the code's thread and passes it on in the loop's thread."""

    def __init__(self, to: BoundedOutput, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(1)
        self._to, self._loop = to, loop

    def add(self, data: bytes) -> None:
        self._loop.call_soon_threadsafe(self._to.add, data)

    def text(self) -> str:
        return self._to.text()


def _delivery(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Record]) -> Any:
    def settle(record: Record) -> None:
        if not answer.done():
            answer.set_result(record)

    return lambda record: loop.call_soon_threadsafe(settle, record)


def _value(answer: Record) -> Any:
    if "error" in answer:
        raise error_from_record(answer["error"])
    return values.decode(answer["value"])
