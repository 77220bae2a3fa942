"""The host's line to a session's init: how workers ended, new places for forks, and the end of it all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence

from carrel.execution.host_line import HostLine, Record
from carrel.execution.results import WorkerDied

STATUS = 1.0
"""Seconds in which init must have told how a dead worker ended."""


_MOST_STATUSES = 256


class InitControl:
    """`worker` is called with a pidfd and a number for each worker that init starts, `ended` when init is gone."""

    def __init__(self, end: socket.socket, worker: Callable[[int, int], None], ended: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker = worker
        self._told_end = ended
        self._number = 0
        self._asked: dict[int, asyncio.Future[Record]] = {}
        self._statuses: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._pidfd = -1
        self.pid = 0
        self.has_forked = False
        """Whether forks came from here: init then stays for them after this session has ended."""
        self._line = HostLine(end, self._heard, self._ended)

    @property
    def alive(self) -> bool:
        return not self._line.closed

    def watch(self, pid: int) -> None:
        """Its number, for who started it; ProcessLookupError when it has ended already."""
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def tell(self, record: Record, fds: Sequence[int] = ()) -> None:
        self._line.send(record, fds)

    def ask(self, record: Record, fds: Sequence[int]) -> asyncio.Future[Record]:
        """Send a request; the future has its answer, or WorkerDied when init is gone."""
        answer: asyncio.Future[Record] = self._loop.create_future()
        # Whoever asks may have been answered by somebody else meanwhile, and not come for it.
        answer.add_done_callback(_looked_at)
        if not self.alive:
            answer.set_exception(WorkerDied("the session's first process is gone"))
            return answer
        self._number += 1
        self._asked[self._number] = answer
        self._line.send({**record, "id": self._number}, fds)
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

    def _heard(self, record: Record, fds: list[int]) -> None:
        operation = record.get("op")
        if operation == "worker" and len(fds) == 1:
            # By init's count, in which it tells the end too; a fork's first worker has another number for itself.
            self._worker(fds.pop(), record["pid"])
        elif operation == "exited":
            self._statuses[record["pid"]] = record["status"]
            if len(self._statuses) > _MOST_STATUSES:
                # Code can name processes of its own as workers, and end them, for as long as it likes.
                del self._statuses[next(iter(self._statuses))]
            self._changed.set()
        elif operation in ("fork_ready", "fork_failed"):
            answer = self._asked.pop(record["id"], None)
            if answer is not None and not answer.done():
                answer.set_result(record)
        elif operation == "upper" and len(fds) == 1:
            answer = self._asked.pop(record["id"], None)
            if answer is not None and not answer.done():
                answer.set_result({"folder": fds.pop()})
        for descriptor in fds:
            os.close(descriptor)

    def _ended(self, reason: str) -> None:
        self._changed.set()
        self._gone.set()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(WorkerDied("the session's first process is gone"))
        self._asked.clear()
        self._told_end(reason)

    async def until_gone(self, worker: int) -> None:
        """Init is the last to go. Where it stays for forks, or its number is not known, its worker's pidfd tells."""
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
        """Let it go on, if it was stopped: without a namespace of its own it can be."""
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
        self._line.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _looked_at(answer: asyncio.Future[Record]) -> None:
    if not answer.cancelled():
        answer.exception()
