"""A session in a container: one stream to its first process carries records, output and files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import py_compile
import re
import struct
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import carrel.guest
from carrel.errors import ConfigurationError, NoPython
from carrel.execution.channels import CommandClient, Record, Sink, framed_body, read_body
from carrel.execution.connection import SpawnFailed, TransportListener, fail
from carrel.execution.docker_engine import Engine
from carrel.execution.results import Ending, WorkerDied, ending_of
from carrel.guest.channel import MAX_RECORD, ChannelError
from carrel.guest.worker.container_init import (
    COMMANDS,
    CONTROL,
    FRESH,
    HEAD,
    LINE,
    RUN,
    SAVE,
    STATE,
    STDERR,
    STDOUT,
)

GUEST = Path(carrel.guest.__file__).parent
PACKAGES = "/opt/packages"
"""The folder of added packages in the container."""
KILL_TIME = 10.0
"""Seconds within which the first process must have killed the worker; it takes longer only in a paused container."""
_ENGINE_HEAD = struct.Struct(">BxxxI")
_ENGINE_STDERR = 2
_PIECE = 1 << 20
_MAX_STDERR = 4000
_NOT_STARTED = re.compile(
    r"no usable Python|no Python frame|no such file|not found|shared librar|(?:Syntax|Import|NotFound|Attribute)Error:",
    re.IGNORECASE,
)
"""In the last line that a Python wrote which cannot run the worker's program."""


class ContainerTransport:
    """See `Transport`. `create` makes the container, then `configure` and `start_worker` start its worker."""

    def __init__(self, engine: Engine) -> None:
        self.listener: TransportListener = _NoListener()
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._container = ""
        self._stream: ContainerStream | None = None
        self._begun: asyncio.Future[Record] = self._loop.create_future()
        self._worker_alive = False
        self._starts = 0
        """How many workers have been started or restored."""
        self._before_run = False
        """From a run's request until its output begins: what arrives meanwhile belongs to an earlier run."""
        self._run_channel = RUN
        self._unread = 0
        """About how many bytes were not passed to the worker yet: the first process reports each mebibyte."""
        self._sinks: tuple[Sink | None, Sink | None] = (None, None)
        self._snapshot = False
        self._exited: Record = {}
        self._broken = ""
        """Why the container, or what came from it, cannot be used any more."""
        self._server: CommandClient | None = None
        self._serving: asyncio.Future[Any] | None = None
        self._incoming_state: IncomingState | None = None
        self.state_folder = "/tmp"
        """A folder in the container with room for saved variables on their way."""
        self.max_state: int | None = None
        """How many bytes of saved variables are taken at most."""
        self.state_problem = ""
        self.facts: Record = {}
        """What the first process has reported about the Python in the image."""

    # --- start ------------------------------------------------------------------------------------------------------

    async def create(
        self, container: dict[str, Any], host: dict[str, Any], folder: str, archives: Sequence[bytes]
    ) -> None:
        """Create the container and start it, with these archives in `folder`; sets `facts`.

        NoPython if its Python is missing, or cannot run the worker's program."""
        creating = asyncio.ensure_future(asyncio.to_thread(self._engine.create, container, host))
        try:
            self._container = await asyncio.shield(creating)
        except asyncio.CancelledError:
            # It is created all the same, and only its name allows to remove it.
            self._container = await creating
            raise
        for archive in archives:
            await asyncio.to_thread(self._engine.put, self._container, folder, archive)
        attached = await asyncio.to_thread(self._engine.attach, self._container)
        stream = ContainerStream(self._take_frame, self._stream_ended)
        await self._loop.create_connection(lambda: stream, sock=attached)
        self._stream = stream
        try:
            await asyncio.to_thread(self._engine.start, self._container)
            self.facts = await self._begun
        except SpawnFailed as problem:
            if re.search(r"python3\b.*(not found|no such file)", problem.message, re.IGNORECASE):
                raise NoPython("it has no program python3") from None
            raise
        except WorkerDied as problem:
            if _NOT_STARTED.search(str(problem)) is not None:
                raise NoPython(f"its python3 cannot be used: {problem}") from None
            raise SpawnFailed("start the worker's program", None, str(problem)) from None

    def configure(self, settings: dict[str, Any], environment: dict[str, str]) -> None:
        """Set what every worker and command server starts with."""
        self._control({"op": "configure", "settings": settings, "environment": environment})

    def _start_worker(self, request: Record) -> None:
        if not self.alive:
            raise SpawnFailed("start a worker", None, self._broken or "the container ended")
        self._worker_alive = True
        self._starts += 1
        self._control(request)

    def _control(self, record: Record) -> None:
        if self._stream is not None:
            self._stream.send(CONTROL, json.dumps(record).encode("ascii"))

    async def wait_for_process(self, step: str) -> None:
        """The first process of the container knows the worker."""

    # --- requests and signals ---------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._stream is not None and not self._stream.closed

    @property
    def worker_alive(self) -> bool:
        return self._worker_alive and self.alive

    def send(self, record: Record, fds: Sequence[int] = (), *, max_unread: int | None = None) -> None:
        if self._stream is None:
            return
        body = framed_body(record)
        if max_unread is not None and self._unread and self._unread + len(body) > max_unread:
            raise ChannelError(f"{self._unread:,} bytes wait to be read already; {len(body):,} more are too many")
        self._unread += len(body) + 4
        if fds:
            self._transfer_state(record, fds)
        channel = self._run_channel if record["op"] == "run" else SAVE if record["op"] == "save" else LINE
        self._stream.send(channel, body)

    def _transfer_state(self, record: Record, fds: Sequence[int]) -> None:
        """Let the first process take the place of these descriptors: a file with saved variables, or for them, and a
        pipe for the report of a save."""
        assert self._stream is not None
        run = record.get("state")
        self._control({"op": "new_state", "folder": self.state_folder, "run": run})
        if run == "load":
            place = 0
            while piece := os.pread(fds[0], _PIECE, place):
                self._stream.send(STATE, piece)
                place += len(piece)
            return
        if self._incoming_state is not None:
            self._incoming_state.close()
        self._incoming_state = IncomingState(0 if run == "save" else int(record["id"]), fds, self.max_state)

    def start_run(self, send: Callable[[Sequence[int]], None], *, fresh_pipes: bool) -> None:
        self._run_channel = FRESH if fresh_pipes else RUN
        self._before_run = True
        send(())

    def signal(self, number: int) -> None:
        self._control({"op": "signal", "number": int(number)})
        if number == 9:
            self._loop.call_later(KILL_TIME, self._give_up, self._starts)

    def _give_up(self, starts: int) -> None:
        """Give up the container if the worker that was to be killed is still there."""
        if self._worker_alive and self._starts == starts:
            self._stream_broke("the container, or the engine, does not answer")

    def continue_stopped(self, servers: Sequence[CommandClient], *, kill: bool) -> None:
        self._control({"op": "continue", "end": kill})

    # --- output -----------------------------------------------------------------------------------------------------

    def set_output(self, stdout: Sink | None, stderr: Sink | None) -> None:
        self._sinks = stdout, stderr

    def write_output(self, text: str) -> None:
        # What the code wrote before its call arrived before the call.
        if self._sinks[0] is not None:
            self._sinks[0](text.encode("utf-8", "backslashreplace"))

    def drain_output(self) -> None:
        """Output arrives on the same stream as the records, in order."""

    def read_output(self, on: bool) -> None:
        self._control({"op": "hold", "on": not on})

    # --- commands ---------------------------------------------------------------------------------------------------

    async def start_command_server(self, user: str) -> CommandClient:
        if user != "agent":
            raise ConfigurationError(f"commands cannot run as {user!r} here: the container's first process is not root")
        if not self.alive:
            raise WorkerDied(self._broken or "the container ended")
        client = CommandClient(lambda: self.kill_server(client))
        serving = self._serving = self._loop.create_future()
        self._control({"op": "serve_commands"})
        await serving
        client.use(_CommandStream(self._send_to_server))
        self._server = client
        return client

    def kill_server(self, client: CommandClient) -> None:
        if client is self._server:
            self._control({"op": "kill_server"})

    def _send_to_server(self, data: bytes) -> None:
        if self._stream is not None:
            self._stream.send(COMMANDS, data)

    # --- what comes -------------------------------------------------------------------------------------------------

    def _take_frame(self, channel: bytes, content: bytes) -> None:
        if channel in (STDOUT, STDERR):
            sink = self._sinks[0 if channel == STDOUT else 1]
            if sink is not None and not self._before_run:
                sink(content)
        elif channel == COMMANDS:
            if self._server is not None and not self._server.closed:
                self._server.data_received(content)
        elif channel == STATE:
            if self._incoming_state is not None:
                self._incoming_state.add(content)
                if self._incoming_state.is_too_large:
                    self._stream_broke("it sent more saved variables than limits.disk")
        elif channel == CONTROL:
            try:
                self._take_report(json.loads(content))
            except (ValueError, TypeError, KeyError, AttributeError) as problem:
                self._stream_broke(f"its first process sent a report that cannot be read: {problem}")
        elif self._worker_alive:
            try:
                self.listener.on_record(read_body(content), [], len(content))
            except ChannelError as problem:
                self.listener.kill(str(problem))

    def _take_report(self, record: Record) -> None:
        """Handle a report of the first process."""
        match record.get("op"):
            case "begun" if not self._begun.done():
                self._begun.set_result(dict(record.get("facts") or {}))
            case "listen":
                self._before_run = False
            case "passed":
                self._unread = max(0, self._unread - int(record["bytes"]))
            case "exited":
                self._worker_exited(record)
            case "state" if self._incoming_state is not None:
                self._incoming_state.begin(record["number"])
            case "state_end" if self._incoming_state is not None:
                self._incoming_state.end(record["number"], str(record["report"]))
                self.state_problem = self._incoming_state.problem
            case "serving":
                self._server = None
                if self._serving is not None and not self._serving.done():
                    self._serving.set_result(None)
            case "server_ended" if self._server is not None:
                self._server.close()

    def _worker_exited(self, record: Record) -> None:
        self._worker_alive = False
        self._unread = 0
        self._exited = record
        broken = str(record.get("broke") or "")
        self.listener.on_end(broken or "its process ended", broken=bool(broken))

    def _stream_broke(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream_ended(reason)

    def _stream_ended(self, reason: str) -> None:
        self._worker_alive = self._snapshot = False
        self._broken = self._broken or reason
        self._fail_waiting(self._broken)
        self.listener.on_servers_lost()
        self.listener.on_end(reason, broken=True)

    def _fail_waiting(self, reason: str) -> None:
        if self._incoming_state is not None:
            self._incoming_state.close()
        for waiting in (self._begun, self._serving):
            if waiting is not None and not waiting.done():
                fail(waiting, WorkerDied(reason))
        if self._server is not None:
            self._server.close()

    async def exit_status(self, broken: str) -> Ending:
        status = self._exited.get("status")
        known = status if type(status) is int else None
        return ending_of(known, broken, out_of_memory=self._exited.get("out_of_memory") is True)

    # --- the snapshot, a fresh worker -------------------------------------------------------------------------------

    @property
    def has_snapshot(self) -> bool:
        return self._snapshot

    def keep_snapshot(self, record: Record, fds: list[int]) -> None:
        self._snapshot = True

    def drop_snapshot(self) -> None:
        self._snapshot = False

    def take_descriptors(self, fds: list[int]) -> None:
        """There are none: descriptors stay in the container."""

    def restore_snapshot(self) -> None:
        self._snapshot = False
        self._start_worker({"op": "restore"})

    def abandon_worker(self) -> None:
        """The first process ends it when it starts another."""

    async def wait_for_worker_end(self) -> bool:
        return self.alive

    def start_worker(self) -> None:
        self._start_worker({"op": "start"})

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        self._broken = self._broken or "the session was closed"
        if self._stream is not None:
            self._stream.close()
        self._worker_alive = self._snapshot = False
        self._fail_waiting("the session was closed")
        if self._container:
            await asyncio.to_thread(self._engine.remove, self._container)


class IncomingState:
    """Saved variables that come from a container, and where they go."""

    def __init__(self, number: int, fds: Sequence[int], most: int | None = None) -> None:
        """`fds` are a file, and perhaps a pipe for a report; the caller may close them. `most` bytes are taken."""
        self._number, self._is_mine = number, False
        self._left = sys.maxsize if most is None else most
        self.problem = ""
        self._fds = [os.dup(fd) for fd in fds]

    @property
    def is_too_large(self) -> bool:
        return self._left < 0

    def begin(self, number: int) -> None:
        """Ignores what an earlier save sends, for which the host has not waited."""
        self._is_mine = number == self._number

    def add(self, content: bytes) -> None:
        left = memoryview(content if self._is_mine and self._fds and not self.problem else b"")
        self._left -= len(left)
        if self._left < 0:
            self.problem = "they are larger than limits.disk"
            return
        try:
            while left:
                left = left[os.write(self._fds[0], left) :]
        except OSError as problem:
            self.problem = f"they could not be written on this machine: {problem}"

    def end(self, number: int, report: str) -> None:
        if number != self._number or not self._fds:
            return
        if len(self._fds) > 1:
            if self.problem:
                report = json.dumps({"error": self.problem})
            # In a thread, since a pipe takes less at once than a report may have.
            asyncio.get_running_loop().run_in_executor(None, _write_report, os.dup(self._fds[1]), report.encode())
        self.close()

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _write_report(fd: int, report: bytes) -> None:
    with contextlib.suppress(OSError), open(fd, "wb") as pipe:
        pipe.write(report)


class _NoListener:
    """Ignores that a container ends before a session uses it."""

    def on_record(self, record: Record, fds: list[int], length: int) -> None: ...
    def on_end(self, reason: str, *, broken: bool = False) -> None: ...
    def on_servers_lost(self) -> None: ...
    def kill(self, reason: str = "") -> None: ...


class _CommandStream:
    """The byte stream that a command client writes to."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write

    def close(self) -> None:
        """Nothing to do: the server ends with the container, or was killed."""


class ContainerStream(asyncio.Protocol):
    """The stream of an attached container: the engine's frames, which contain the frames of its first process."""

    def __init__(self, on_frame: Callable[[bytes, bytes], None], on_end: Callable[[str], None]) -> None:
        """`on_frame` gets each frame's channel and content; `on_end` is called once, with the reason."""
        self._on_frame = on_frame
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._from_engine = bytearray()
        self._frames = bytearray()
        self.stderr = b""
        """The end of what the first process wrote to standard error: nothing, unless something failed."""
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._from_engine += data
        while len(self._from_engine) >= _ENGINE_HEAD.size and not self.closed:
            kind, length = _ENGINE_HEAD.unpack_from(self._from_engine)
            if len(self._from_engine) < _ENGINE_HEAD.size + length:
                return
            piece = self._from_engine[_ENGINE_HEAD.size : _ENGINE_HEAD.size + length]
            del self._from_engine[: _ENGINE_HEAD.size + length]
            if kind == _ENGINE_STDERR:
                self.stderr = (self.stderr + bytes(piece))[-_MAX_STDERR:]
            else:
                self._frames += piece
                self._take_frames()

    def _take_frames(self) -> None:
        while len(self._frames) >= HEAD.size and not self.closed:
            channel, length = HEAD.unpack_from(self._frames)
            if length > MAX_RECORD:
                self._end(f"a frame of {length:,} bytes was announced; at most {MAX_RECORD:,} are accepted")
                return
            if len(self._frames) < HEAD.size + length:
                return
            content = bytes(self._frames[HEAD.size : HEAD.size + length])
            del self._frames[: HEAD.size + length]
            self._on_frame(channel, content)

    def eof_received(self) -> None:
        # By default asyncio would first send what no process reads any more.
        self._end("the container ended")

    def connection_lost(self, problem: Exception | None) -> None:
        self._end("the container ended" if problem is None else f"the connection to the container broke: {problem}")

    def send(self, channel: bytes, content: bytes) -> None:
        """Send without waiting; asyncio keeps what there is no room for."""
        if self._transport is not None and not self.closed:
            self._transport.write(HEAD.pack(channel, len(content)) + content)

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            written = self.stderr.decode("utf-8", "replace").strip()
            self._on_end(f"{reason}: {written.splitlines()[-1]}" if written else reason)

    def close(self) -> None:
        """Close it; `on_end` is not called any more."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


@functools.cache
def program() -> bytes:
    """The worker's program as a tar archive, with bytecode for this version of Python."""
    with io.BytesIO() as out, tarfile.open(fileobj=out, mode="w") as archive, tempfile.TemporaryDirectory() as compiled:
        archive.add(GUEST / "worker" / "__main__.py", "__main__.py", filter=_plain)
        for source in sorted([*GUEST.glob("*.py"), *GUEST.glob("worker/*.py")]):
            if source.name == "__main__.py":
                continue
            name = f"carrel_guest/{source.relative_to(GUEST)}"
            archive.add(source, name, filter=_plain)
            made = py_compile.compile(
                str(source),
                os.path.join(compiled, source.name),
                dfile=name,
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
            cached = f"__pycache__/{source.stem}.{sys.implementation.cache_tag}.pyc"
            archive.add(str(made), f"{os.path.dirname(name)}/{cached}", filter=_plain)
        archive.add(
            GUEST / "worker" / "for_commands" / "sitecustomize.py", "packages.path/sitecustomize.py", filter=_plain
        )
        leading = tarfile.TarInfo("packages")
        leading.type, leading.linkname = tarfile.SYMTYPE, PACKAGES
        archive.addfile(leading)
        end = archive.offset + 2 * tarfile.BLOCKSIZE
        archive.close()
        return out.getvalue()[:end]  # Podman does not read the padding that Python adds.


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Owned by root, and readable for all users."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry
