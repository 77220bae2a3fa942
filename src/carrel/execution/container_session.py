"""A session in a container: all that the host has of it is one stream, which its first process speaks on."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import py_compile
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import carrel.guest
from carrel.execution.container_stream import ContainerStream
from carrel.execution.docker_engine import Engine
from carrel.execution.executor import Executor, Handler, RunClock
from carrel.execution.host_line import Record, framed_body, read_body
from carrel.execution.live_session import LiveSession, SpawnFailed, fail
from carrel.execution.output_pipes import Sink
from carrel.execution.results import Ending, WorkerDied, told_ending
from carrel.guest.channel import ChannelError
from carrel.guest.worker.container_init import ARCHIVE, CONTROL, FRESH, LINE, RUN, STDERR, STDOUT

GUEST = Path(carrel.guest.__file__).parent
PACKAGES = "/opt/packages"
"""Where added packages are, inside."""
DEAF = 10.0
"""Seconds that the first process has to kill the worker; it takes that long only when the container stands still."""


class ContainerSession(LiveSession):
    """Made by `create`, begun by `begin` and `start`."""

    def __init__(self, handlers: dict[str, Handler], engine: Engine) -> None:
        super().__init__(handlers)
        self._engine = engine
        self._container = ""
        self._stream: ContainerStream | None = None
        self._begun: asyncio.Future[Record] = self._loop.create_future()
        self._unpacked: asyncio.Future[int] | None = None
        self._unpacking = asyncio.Lock()
        self._alive = False
        self._deaf = False
        """From the moment a run is asked for until its own output begins: what comes meanwhile is an earlier one's."""
        self._run_channel = RUN
        self._unread = 0
        """Bytes that the worker has not been passed yet, or about as many: it is told a mebibyte at a time."""
        self._sinks: tuple[Sink | None, Sink | None] = (None, None)
        self._frozen = False
        self._ended: Record = {}
        self.facts: Record = {}

    # --- beginning --------------------------------------------------------------------------------------------------

    async def begin(self, container: dict[str, Any], host: dict[str, Any], folder: str) -> None:
        """Make the container and start it; its first process has told of itself then. The worker's program is put
        into `folder`."""
        creating = asyncio.ensure_future(asyncio.to_thread(self._engine.create, container, host))
        try:
            self._container = await asyncio.shield(creating)
        except asyncio.CancelledError:
            # It is made all the same, and would be left behind without its name.
            self._container = await creating
            raise
        await asyncio.to_thread(self._engine.put, self._container, folder, program())
        line = await asyncio.to_thread(self._engine.attach, self._container)
        stream = ContainerStream(self._heard_frame, self._stream_ended)
        await self._loop.create_connection(lambda: stream, sock=line)
        self._stream = stream
        await asyncio.to_thread(self._engine.start, self._container)
        try:
            begun = await self._begun
        except WorkerDied as problem:
            raise SpawnFailed("start the worker's program", None, str(problem)) from None
        self.facts = begun

    async def start(self, settings: dict[str, Any], environment: dict[str, str]) -> None:
        """Start the worker, in the files that are there by now."""
        self._alive = True
        self._tell({"op": "start", "settings": settings, "environment": environment})
        await self._get_ready("start")

    async def unpack(self, archive: Path, at: str, remove: Sequence[str] = ()) -> None:
        """Bring files in: those of a tar archive; `remove` are paths that go before."""
        async with self._unpacking:
            self._unpacked = self._loop.create_future()
            if self._stream is None or self._stream.closed:
                raise SpawnFailed("bring files in", None, self._broke or "the container ended")
            self._tell({"op": "unpack", "at": at, "remove": list(remove)})
            with open(archive, "rb") as file:
                while piece := await asyncio.to_thread(file.read, 1 << 20):
                    self._stream.send(ARCHIVE, piece)
                    await self._stream.room()
            self._stream.send(ARCHIVE, b"")
            status = await self._unpacked
            if status != 0:
                said = self._stream.said.decode("utf-8", "replace").strip().splitlines()
                raise SpawnFailed("bring files in", None, said[-1] if said else "the container ended")

    def _tell(self, record: Record) -> None:
        if self._stream is not None:
            self._stream.tell(record)

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def worker_alive(self) -> bool:
        return self._alive and self._stream is not None and not self._stream.closed

    def _send(self, record: Record, fds: Sequence[int] = (), *, most_unread: int | None = None) -> None:
        if self._stream is None:
            return
        body = framed_body(record)
        if most_unread is not None and self._unread and self._unread + len(body) > most_unread:
            raise ChannelError(f"{self._unread:,} bytes wait to be read already, and {len(body):,} more are too many")
        self._unread += len(body) + 4
        self._stream.send(self._run_channel if record["op"] == "run" else LINE, body)

    def run(
        self, code: str, stdout: Sink, stderr: Sink, executor: Executor, clock: RunClock | None = None
    ) -> asyncio.Future[Record]:
        self._run_channel = FRESH if self._shared and self._takes_pipes else RUN
        self._shared = False
        self._begin_run(stdout, stderr, executor, clock)
        self._deaf = True
        return self.request({"op": "run", "code": code})

    def _set_sinks(self, stdout: Sink | None, stderr: Sink | None) -> None:
        self._sinks = stdout, stderr

    def _write(self, text: str) -> None:
        # What the code wrote before it called has come before the call.
        if self._sinks[0] is not None:
            self._sinks[0](text.encode("utf-8", "backslashreplace"))

    def watch_output(self, on: bool) -> None:
        self._tell({"op": "hold", "on": not on})

    def _drain(self) -> None:
        """Output comes on the same stream as everything else, in its order."""

    def _signal(self, number: int) -> None:
        self._tell({"op": "signal", "number": int(number)})

    def _tend_worker(self, end: bool) -> None:
        self._tell({"op": "tend", "end": end})

    def kill(self, why: str = "") -> None:
        super().kill(why)
        self._loop.call_later(DEAF, self._give_up, self._ready)

    def _give_up(self, worker: asyncio.Future[Record]) -> None:
        """Where the worker that was to be killed is still the one: let go of the container as a whole."""
        if self._alive and self._ready is worker:
            self._broke = "the container, or the engine, does not answer"
            self._stream_broke()

    # --- hearing ----------------------------------------------------------------------------------------------------

    def _heard_frame(self, channel: bytes, content: bytes) -> None:
        if channel in (STDOUT, STDERR):
            sink = self._sinks[0 if channel == STDOUT else 1]
            if sink is not None and not self._deaf:
                sink(content)
        elif channel == CONTROL:
            try:
                self._told(json.loads(content))
            except (ValueError, TypeError, KeyError, AttributeError) as problem:
                self._broke = self._broke or f"its first process said what cannot be read: {problem}"
                self._stream_broke()
        elif self._alive:
            try:
                self._heard(read_body(content), [], len(content))
            except ChannelError as problem:
                self.kill(str(problem))

    def _stream_broke(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream_ended(self._broke)

    def _told(self, record: Record) -> None:
        """By its first process."""
        match record.get("op"):
            case "begun" if not self._begun.done():
                self._begun.set_result(dict(record.get("facts") or {}))
            case "listen":
                self._deaf = False
            case "passed":
                self._unread = max(0, self._unread - int(record["bytes"]))
            case "exited":
                self._worker_exited(record)
            case "unpacked" if self._unpacked is not None and not self._unpacked.done():
                self._unpacked.set_result(int(record.get("status") or 0))

    def _worker_exited(self, record: Record) -> None:
        self._alive = False
        self._unread = 0
        self._ended = record
        self._broke = self._broke or str(record.get("broke") or "")
        self._fail_all("its process ended")

    def _stream_ended(self, reason: str) -> None:
        self._alive = self._frozen = False
        self._broke = self._broke or reason
        if not self._begun.done():
            fail(self._begun, WorkerDied(reason))
        if self._unpacked is not None and not self._unpacked.done():
            self._unpacked.set_result(1)
        self._fail_all(reason)

    def _keep_frozen(self, record: Record, fds: list[int]) -> None:
        self._frozen, self.unfrozen = True, ""

    def _take_strangers(self, fds: list[int]) -> None:
        """None come: descriptors stay in the container."""

    def _drop_frozen(self, why: str) -> None:
        self._frozen, self.unfrozen = False, why

    # --- after a death ----------------------------------------------------------------------------------------------

    async def how_it_ended(self) -> Ending:
        status = self._ended.get("status")
        known = status if type(status) is int else None
        return told_ending(known, self._broke, out_of_memory=self._ended.get("out_of_memory") is True)

    async def wake(self) -> bool:
        if not self._frozen:
            return False
        self._frozen = False
        self._shared = True
        self.unfrozen = "no frozen fork had been made since the last one was used"
        try:
            await self._worker_from("wake", "wake the frozen fork")
        except SpawnFailed as problem:
            self.unfrozen = f"the frozen fork did not go on: {problem}"
            return False
        return True

    async def begin_again(self) -> bool:
        try:
            await self._worker_from("again", "start a fresh worker")
        except SpawnFailed:
            return False
        return True

    async def _worker_from(self, operation: str, step: str, **more: Any) -> None:
        if self._stream is None or self._stream.closed:
            raise SpawnFailed(step, None, self._broke)
        self._broke = ""
        self._ready = self._loop.create_future()
        self._alive = True
        self._tell({"op": operation, **more})
        await self._get_ready(step)

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        self._broke = self._broke or "the session was closed"
        if self._stream is not None:
            self._stream.close()
        self._alive = self._frozen = False
        self._fail_all("the session was closed")
        self.end_run()
        if self._container:
            await asyncio.to_thread(self._engine.remove, self._container)


@functools.cache
def program() -> bytes:
    """The worker as a tar archive, compiled for this Python: one of the same version inside need not do it again."""
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
        return out.getvalue()[:end]  # Podman does not read what Python fills it up with.


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Nobody's in particular, and readable for all."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry
