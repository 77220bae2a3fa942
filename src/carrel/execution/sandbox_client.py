"""The host's channels to the first processes of sandboxes: to zygotes, which sessions are forked from and which all
sessions and event loops of this process share, and to init, the first process of each session."""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carrel.guest.sandbox
from carrel.errors import ExecutionError
from carrel.execution.channels import AsyncChannel, Record
from carrel.execution.connection import SpawnFailed
from carrel.execution.host_calls import known_errors
from carrel.execution.results import WorkerDied
from carrel.guest.channel import Channel, ChannelError, TooManyDescriptors

SANDBOX = Path(carrel.guest.sandbox.__file__).parent
IDLE = 60.0
"""Seconds without a session after which a zygote is ended."""
START = 60.0
"""Seconds that a zygote may take to import what it preloads."""
_ERRORS_KEPT = 65536


@dataclass(frozen=True)
class ZygoteKey:
    """What sessions must share to come from one zygote."""

    python: str
    preload: tuple[str, ...] = ()


class ZygoteGone(SpawnFailed):
    """The zygote, or the sandbox that it had built ahead, died before it answered; nothing was started."""

    def __init__(self, message: str) -> None:
        super().__init__("ask the zygote", None, message)


class ZygoteClient:
    """One zygote, a thread that starts it, reads its answers and reaps it, and one that sends to it.

    A zygote that does not read (it is stopped, or the machine swaps) blocks only the thread that sends."""

    def __init__(self, key: ZygoteKey, idle: float) -> None:
        self.key = key
        self.ready: Future[dict[str, Any]] = Future()
        self.pid = 0
        self._idle = idle
        self._lock = threading.Lock()
        self._requests: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0
        self._sessions = 0
        self._unused_since = time.monotonic()
        self._over = False
        ours, self._theirs = socket.socketpair()
        self._control = Channel(ours)
        self._outgoing: queue.SimpleQueue[tuple[int, dict[str, Any], list[int]] | None] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._live, name="carrel-zygote", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._over

    def acquire(self) -> bool:
        """Count a session in, so that the zygote is not ended for being unused; False when it is over."""
        with self._lock:
            if self._over:
                return False
            self._sessions += 1
            return True

    def release(self) -> None:
        with self._lock:
            self._sessions -= 1
            self._unused_since = time.monotonic()

    def spawn(self, settings: dict[str, Any], fds: list[int]) -> Future[dict[str, Any]]:
        """Request a session; never waits. The future has its record, or SpawnFailed."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._over:
                answer.set_exception(ZygoteGone("it is gone"))
                return answer
            # The caller may give up, and close its own, before they are sent.
            kept = [os.dup(fd) for fd in fds]
            self._number += 1
            self._requests[self._number] = answer
            self._outgoing.put((self._number, settings, kept))
        return answer

    def _send_requests(self) -> None:
        while (request := self._outgoing.get()) is not None:
            number, settings, fds = request
            with self._lock:
                answer = self._requests.get(number)
            try:
                if answer is not None and not answer.cancelled():
                    self._control.send({"op": "spawn", "id": number, "settings": settings}, tuple(fds))
            except (ChannelError, TooManyDescriptors, OSError) as problem:
                with self._lock:
                    self._over = True  # its end may not have been seen yet; no other session is to use it
                    self._requests.pop(number, None)
                if answer is not None and answer.set_running_or_notify_cancel():
                    answer.set_exception(ZygoteGone(str(problem)))
            finally:
                for fd in fds:
                    os.close(fd)

    def end(self) -> None:
        """Close its line: it ends its sessions and itself."""
        with self._lock:
            if not self._over:
                os.write(self._wake_write, b"e")
        if threading.current_thread() is not self._thread:
            self._thread.join(10)

    def forget(self) -> None:
        """In a forked copy of the host: this end is the parent's; held open here it would hide the parent's death."""
        self._over = True
        self._control.socket.close()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            pid = self._begin()
        except (OSError, ExecutionError, ChannelError) as problem:
            self._close(f"the zygote did not start: {problem}")
            if not self.ready.done():
                self.ready.set_exception(SpawnFailed("start the zygote", None, str(problem)))
            return
        sender = threading.Thread(target=self._send_requests, name="carrel-zygote-requests", daemon=True)
        sender.start()
        try:
            self._listen()
        finally:
            with self._lock:
                self._over = True
            with suppress(OSError):
                self._control.socket.shutdown(socket.SHUT_RDWR)  # wakes up the sender
            self._outgoing.put(None)
            sender.join()
            self._close("the zygote is gone")
            _reap(pid, 10.0)

    def _begin(self) -> int:
        errors_read, errors_write = os.pipe2(os.O_CLOEXEC)
        try:
            actions: list[tuple[Any, ...]] = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, errors_write, 2),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, self._theirs.fileno(), 3),
            ]
            names = ("LANG", "LC_ALL", "LD_LIBRARY_PATH")
            environment = {name: os.environ[name] for name in names if name in os.environ}
            # The shell only leaves the host's current folder, which a session may cover, and becomes the program.
            pid = os.posix_spawn(
                "/bin/sh",
                ["/bin/sh", "-c", 'cd / && exec "$0" -I "$1"', self.key.python, str(SANDBOX / "__main__.py")],
                {"PATH": "/usr/local/bin:/usr/bin:/bin", **environment},
                file_actions=actions,
                setsid=True,
            )
            self._theirs.close()
            os.close(errors_write)
            errors_write = -1
            setup = {
                "op": "setup",
                "entry": "carrel_guest.worker.main:run",
                "command_entry": "carrel_guest.worker.command_server:run",
                "prepare": "carrel_guest.worker.main:prepare",
                "settings": {"errors": known_errors()},
                "preload": list(self.key.preload),
            }
            errors = bytearray()
            try:
                self._control.send(setup)
                found = self._first_record(errors_read, errors)
            except ChannelError:
                found = None
            if found is None:
                _kill(pid)
                _read_end(errors_read, errors)
                output = errors.decode("utf-8", "replace").strip()
                raise ExecutionError(
                    output.splitlines()[-1] if output else f"{self.key.python} ended without a message"
                )
        finally:
            os.close(errors_read)
            if errors_write >= 0:
                os.close(errors_write)
        self.pid = pid
        self.ready.set_result(found)
        return pid

    def _first_record(self, errors_read: int, errors: bytearray) -> dict[str, Any] | None:
        """Its answer to the setup; None when it ends without one, or takes too long. What it writes to stderr is read
        meanwhile: a module that writes more than a pipe holds would wait for ever."""
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(errors_read, select.POLLIN)
        end = time.monotonic() + START
        while (left := end - time.monotonic()) > 0:
            for source, _ in poll.poll(left * 1000):
                if source == errors_read:
                    if not _read_end(errors_read, errors):
                        poll.unregister(errors_read)
                elif found := self._control.receive():
                    return found[0][0]
        return None

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            events = poll.poll(self._patience() * 1000)
            if any(source == self._wake_read for source, _ in events):
                return
            if not events:
                with self._lock:
                    if not self._sessions and time.monotonic() - self._unused_since >= self._idle:
                        self._over = True
                        return
                continue
            try:
                for record, _ in self._control.receive():
                    self._heard(record)
            except (ChannelError, OSError):
                return

    def _patience(self) -> float:
        with self._lock:
            return self._idle if self._sessions else max(0.05, self._idle - time.monotonic() + self._unused_since)

    def _heard(self, record: dict[str, Any]) -> None:
        with self._lock:
            answer = self._requests.pop(record.get("id", 0), None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if record.get("op") == "spawned":
            answer.set_result(record)
        elif record.get("lost"):
            answer.set_exception(ZygoteGone("the place that was built ahead is gone"))
        else:
            step, number = str(record.get("step")), record.get("errno")
            answer.set_exception(SpawnFailed(step, number, str(record.get("message"))))

    def _close(self, why: str) -> None:
        with self._lock:
            self._over = True
            waiting, self._requests = self._requests, {}
            self._control.close()
            self._theirs.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
        for answer in waiting.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(ZygoteGone(why))


def _read_end(source: int, end: bytearray) -> bool:
    """Add one piece of what was written to the end of it that is kept; whether there was something."""
    piece = os.read(source, _ERRORS_KEPT)
    end += piece
    del end[:-_ERRORS_KEPT]
    return bool(piece)


def _reap(pid: int, patience: float) -> None:
    """Wait for its end, and bring it about when it takes too long."""
    end = time.monotonic() + patience
    try:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                _kill(pid)
                return
            time.sleep(0.002)
    except ChildProcessError:
        return  # The program ignores SIGCHLD, so the kernel has buried it.


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return


class Zygotes:
    """All of them; one that died is replaced by the next session that needs it."""

    def __init__(self, idle: float = IDLE) -> None:
        self._idle = idle
        self._lock = threading.Lock()
        self._alive: dict[ZygoteKey, ZygoteClient] = {}

    def take(self, key: ZygoteKey) -> ZygoteClient:
        """The key's zygote with one session counted in; give it back when the session has ended."""
        with self._lock:
            zygote = self._alive.get(key)
            while zygote is None or not zygote.acquire():
                zygote = self._alive[key] = ZygoteClient(key, self._idle)
            return zygote

    def end_all(self) -> None:
        with self._lock:
            zygotes, self._alive = list(self._alive.values()), {}
        for zygote in zygotes:
            zygote.end()

    def forget_all(self) -> None:
        self._lock = threading.Lock()
        for zygote in self._alive.values():
            zygote.forget()
        self._alive = {}


shared = Zygotes()
atexit.register(shared.end_all)
os.register_at_fork(after_in_child=shared.forget_all)


# --- init -----------------------------------------------------------------------------------------------------------

STATUS = 1.0
"""Seconds within which init must have reported how a dead worker ended."""
_MOST_STATUSES = 256


class InitClient:
    """Calls `worker` with a pidfd and a number for each worker that init starts, and `ended` when init is gone."""

    def __init__(self, end: socket.socket, worker: Callable[[int, int], None], ended: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker = worker
        self._report_end = ended
        self._number = 0
        self._requests: dict[int, asyncio.Future[Record]] = {}
        self._statuses: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._pidfd = -1
        self.pid = 0
        self.has_forked = False
        """Whether forks came from here: init then stays for them after this session has ended."""
        self._channel = AsyncChannel(end, self._on_record, self._on_end)

    @property
    def alive(self) -> bool:
        return not self._channel.closed

    def watch(self, pid: int) -> None:
        """Set its number, where this process started it; ProcessLookupError when it has ended already."""
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def send(self, record: Record, fds: Sequence[int] = ()) -> None:
        self._channel.send(record, fds)

    def request(self, record: Record, fds: Sequence[int]) -> asyncio.Future[Record]:
        """Send a request; the future has its answer, or WorkerDied when init is gone."""
        answer: asyncio.Future[Record] = self._loop.create_future()
        answer.add_done_callback(_mark_retrieved)  # the caller may not wait for it any more
        if not self.alive:
            answer.set_exception(WorkerDied("the session's first process is gone"))
            return answer
        self._number += 1
        self._requests[self._number] = answer
        self._channel.send({**record, "id": self._number}, fds)
        return answer

    async def status_of(self, worker: int) -> int | None:
        """How a worker ended, as wait tells it; None when that is not known."""
        end = self._loop.time() + STATUS
        while self.alive and worker not in self._statuses and (left := end - self._loop.time()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                break
        return self._statuses.pop(worker, None)

    def _on_record(self, record: Record, fds: list[int]) -> None:
        operation = record.get("op")
        if operation == "worker" and len(fds) == 1:
            # The number in init's namespace, by which it reports the end too; a fork's first worker sees another one.
            self._worker(fds.pop(), record["pid"])
        elif operation == "exited":
            self._statuses[record["pid"]] = record["status"]
            if len(self._statuses) > _MOST_STATUSES:
                # Code can report any number of its own processes as workers, and end them.
                del self._statuses[next(iter(self._statuses))]
            self._changed.set()
        elif operation in ("fork_ready", "fork_failed", "upper", "serving", "serve_failed"):
            answer = self._requests.pop(record.get("id", 0), None)
            if answer is not None and not answer.done():
                answer.set_result({**record, "fd": fds.pop() if fds else -1})
        for descriptor in fds:
            os.close(descriptor)

    def _on_end(self, reason: str) -> None:
        self._changed.set()
        self._gone.set()
        for answer in self._requests.values():
            if not answer.done():
                answer.set_exception(WorkerDied("the session's first process is gone"))
        self._requests.clear()
        self._report_end(reason)

    async def wait_gone(self, worker: int) -> None:
        """Init ends last. Where it stays for forks, or its number is not known, the worker's pidfd is watched."""
        watched = self._pidfd
        if watched < 0 or self.has_forked:
            watched = worker
            if self.alive:
                await self._gone.wait()
        if watched < 0:
            return
        gone = asyncio.Event()
        self._loop.add_reader(watched, gone.set)
        try:
            await gone.wait()
        finally:
            self._loop.remove_reader(watched)

    def wake_up(self) -> None:
        """Continue it, if it was stopped: without a namespace of its own it can be."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it with all that is in the session, unless forks live below it: then its closed line has to do."""
        if not self.has_forked:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        self._channel.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _mark_retrieved(answer: asyncio.Future[Record]) -> None:
    if not answer.cancelled():
        answer.exception()
