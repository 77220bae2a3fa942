"""The host's channel to a session's init: processes that it starts, how they ended, and the end of the session."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence

from carrel.execution.async_channel import AsyncChannel, Record
from carrel.execution.results import WorkerDied

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
        elif operation in ("fork_ready", "fork_failed"):
            answer = self._requests.pop(record["id"], None)
            if answer is not None and not answer.done():
                answer.set_result(record)
        elif operation == "upper" and len(fds) == 1:
            answer = self._requests.pop(record["id"], None)
            if answer is not None and not answer.done():
                answer.set_result({"folder": fds.pop()})
        elif operation in ("serving", "serve_failed"):
            answer = self._requests.pop(record.get("id", 0), None)
            if answer is not None and not answer.done():
                answer.set_result({**record, "pidfd": fds.pop() if fds else -1})
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
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)
            except ProcessLookupError:
                return

    def kill(self) -> None:
        """End it with all that is in the session, unless forks live below it: then its closed line has to do."""
        if self._pidfd >= 0 and not self.has_forked:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                return

    def close(self) -> None:
        self._channel.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _mark_retrieved(answer: asyncio.Future[Record]) -> None:
    if not answer.cancelled():
        answer.exception()
