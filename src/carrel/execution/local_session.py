"""A session on this machine: the worker's line, the two pipes, init, and the frozen fork, each a descriptor."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from carrel.errors import ForkRefused
from carrel.execution.executor import Executor, Handler, RunClock
from carrel.execution.host_line import HostLine, Record
from carrel.execution.init_control import InitControl
from carrel.execution.live_session import READY, LiveSession, Piece, SpawnFailed
from carrel.execution.output_pipes import Discard, OutputPipe, Sink, refuse_the_last
from carrel.execution.results import Ending, WorkerDied, told_ending
from carrel.execution.zygote_client import Zygote
from carrel.guest.channel import ChannelError
from carrel.guest.processes import is_descendant, numbers_of
from carrel.guest.sandbox.cgroups import hierarchies

_SETTLES = 2.0
"""Seconds that a worker has to end a fork in that nobody wants any more."""


class LocalSession(LiveSession):
    """Opened by `open`."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        super().__init__(handlers)
        self.stdout = OutputPipe()
        try:
            refuse_the_last(self.stdout.write_end)
            self.stderr = OutputPipe()
        except OSError:
            self.stdout.close()
            raise
        self._line: HostLine | None = None
        self.init: InitControl | None = None
        self._worker_fd = -1
        self._worker_pid = 0
        self._named = asyncio.Event()
        """Set when init has told which process the worker is, or nobody will any more."""
        self._worker_dead = asyncio.Event()
        self._frozen: tuple[socket.socket, int, int] | None = None
        self._pid_depth = 0
        """In how many pid namespaces its processes have a number."""
        self._discard = Discard()
        self._memory_kills = MemoryKills()

    # --- beginning --------------------------------------------------------------------------------------------------

    async def open(self, zygote: Zygote, settings: dict[str, Any], private: dict[str, Any]) -> None:
        """Ask the zygote for it; SpawnFailed leaves nothing behind. What is private only its init and worker hear."""
        line, theirs = socket.socketpair()
        control, init = socket.socketpair()
        try:
            fds = [theirs.fileno(), init.fileno(), self.stdout.write_end, self.stderr.write_end]
            self._line = self._new_line(line)
            self.init = InitControl(control, self._watch_worker, self._init_ended)
            # First, so that init need not wait; and not by way of the zygote, whose memory later sessions begin with.
            self.init.tell({"op": "begin", "settings": private})
            spawned = await asyncio.wrap_future(zygote.spawn(settings, fds))
        finally:
            theirs.close()
            init.close()
            self.stdout.handed_over()
            self.stderr.handed_over()
        try:
            self.init.watch(int(spawned["pid"]))
        except ProcessLookupError:
            raise SpawnFailed("start", None, "the session ended at once") from None
        if settings.get("limits", {}).get("memory") is not None:
            self._memory_kills = MemoryKills.of(int(spawned["pid"]))
        await self._get_ready("start")

    async def _get_ready(self, step: str) -> None:
        await super()._get_ready(step)
        # Init may tell later than the worker speaks; until then there is nobody to interrupt.
        try:
            async with asyncio.timeout(READY):
                await self._named.wait()
        except TimeoutError:
            raise SpawnFailed(step, None, f"its first process said nothing for {READY:.0f} seconds") from None

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def worker_alive(self) -> bool:
        return self._line is not None and not self._line.closed

    def _send(self, record: Record, fds: Sequence[int] = (), *, most_unread: int | None = None) -> None:
        if self._line is not None:
            self._line.send(record, fds, most_unread=most_unread)

    def count_memory_kills(self) -> None:
        """From now on, for `how_it_ended`."""
        self._memory_kills.begin()

    def request(self, record: Record, piece: Piece | None = None, fds: Sequence[int] = ()) -> asyncio.Future[Record]:
        self.count_memory_kills()
        return super().request(record, piece, fds)

    def run(
        self, code: str, stdout: Sink, stderr: Sink, executor: Executor, clock: RunClock | None = None
    ) -> asyncio.Future[Record]:
        fds: list[int] = []
        if self._shared and self._takes_pipes:
            self._shared = False
            self._discard.take([self.stdout.give_up(), self.stderr.give_up()])
            self.stdout, self.stderr = OutputPipe(), OutputPipe()
            fds = [self.stdout.write_end, self.stderr.write_end]
        self._begin_run(stdout, stderr, executor, clock)
        try:
            return self.request({"op": "run", "code": code}, fds=fds)
        finally:
            self.stdout.handed_over()
            self.stderr.handed_over()

    def _set_sinks(self, stdout: Sink | None, stderr: Sink | None) -> None:
        if stdout is not None:
            # What came since the last run belongs to nobody.
            self._drain()
        self.stdout.sink, self.stderr.sink = stdout, stderr

    def _write(self, text: str) -> None:
        self.stdout.drain()
        if self.stdout.sink is not None:
            self.stdout.sink(text.encode("utf-8", "backslashreplace"))

    def watch_output(self, on: bool) -> None:
        self.stdout.watch(on)
        self.stderr.watch(on)

    def _drain(self) -> None:
        self.stdout.drain()
        self.stderr.drain()

    def _signal(self, number: int) -> None:
        if self._worker_fd >= 0:
            try:
                signal.pidfd_send_signal(self._worker_fd, number)
            except ProcessLookupError:
                return
        elif number == signal.SIGKILL and self.init is not None:
            self.init.kill()

    def _tend_worker(self, end: bool) -> None:
        if self.init is not None and self.init.alive and self._worker_pid:
            spare = [self._frozen[2]] if self._frozen is not None else []
            self.init.wake_up()
            self.init.tell({"op": "tend", "worker": self._worker_pid, "spare": spare, "end": end})

    # --- hearing ----------------------------------------------------------------------------------------------------

    def _new_line(self, end: socket.socket) -> HostLine:
        line = HostLine(end, lambda record, fds: self._heard(record, fds, line.length), self._line_ended)
        return line

    def _take_strangers(self, fds: list[int]) -> None:
        # Read ends of pipes that a command's background processes still write to; anything else is dropped as well.
        self._discard.take(fds)

    def _keep_frozen(self, record: Record, fds: list[int]) -> None:
        try:
            if len(fds) != 2:
                raise OSError("a frozen fork without its two descriptors")
            if stat.S_ISDIR(os.fstat(fds[1]).st_mode):
                raise OSError("a folder of /proc, which a signal can be sent to as well, but whose end nobody sees")
            signal.pidfd_send_signal(fds[1], 0)
            wake = socket.socket(fileno=fds[0])
        except OSError as problem:
            for descriptor in fds:
                os.close(descriptor)
            if isinstance(problem, ProcessLookupError):
                return
            raise ChannelError("a frozen fork whose descriptors are not what they should be") from None
        self._drop_frozen("")
        pid = record.get("pid")
        self._frozen = wake, fds[1], pid if type(pid) is int else 0

    def _is_of_this_session(self, pidfd: int) -> bool:
        """Whether a worker may have us signal this process. Without a pid namespace it can open any of its user's."""
        numbers = numbers_of(pidfd)
        if self.init is None or not numbers or len(numbers) != self._pid_depth:
            return False
        return self._pid_depth > 1 or is_descendant(numbers[0], self.init.pid)

    def _drop_frozen(self, why: str) -> None:
        self.unfrozen = why
        if self._frozen is not None:
            wake, watched, _ = self._frozen
            self._frozen = None
            wake.close()
            os.close(watched)

    def _watch_worker(self, descriptor: int, pid: int) -> None:
        self._forget_worker()
        self._worker_fd, self._worker_pid = descriptor, pid
        self._pid_depth = len(numbers_of(descriptor)) or self._pid_depth
        self._named.set()
        self._worker_dead.clear()
        self._loop.add_reader(descriptor, self._worker_gone)

    def _forget_worker(self) -> None:
        if self._worker_fd >= 0:
            self._loop.remove_reader(self._worker_fd)
            os.close(self._worker_fd)
            self._worker_fd = -1
        self._worker_dead.set()
        self._named.clear()

    def _line_ended(self, reason: str) -> None:
        """Dead, or broken; either way this worker is done with."""
        if reason not in ("the line was closed", "the line is gone: Connection reset by peer"):
            self._broke = self._broke or reason
        self._signal(signal.SIGKILL)
        self._named.set()
        self._fail_all(reason)

    def _worker_gone(self) -> None:
        self._loop.remove_reader(self._worker_fd)
        self._worker_dead.set()
        if self._line is not None:
            self._line.read_rest()
            self._line.close()
        self._fail_all("its process ended")

    def _init_ended(self, reason: str) -> None:
        if self._line is not None:
            self._line.read_rest()
            self._line.close()
        self._named.set()
        self._drop_frozen("the session's first process is gone")
        self._fail_all(f"the session's first process is gone ({reason})")

    # --- after a death ----------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the place itself is still there."""
        return self.init is not None and self.init.alive

    async def how_it_ended(self) -> Ending:
        if self._broke or self.init is None:
            return told_ending(None, self._broke)
        status = await self.init.status_of(self._worker_pid)
        return told_ending(status, self._broke, out_of_memory=self._memory_kills.has_grown())

    async def wake(self) -> bool:
        if self._frozen is None or not self.alive:
            return False
        wake, watched, pid = self._frozen
        if not self._is_of_this_session(watched):
            self._drop_frozen("the frozen fork is gone")
            return False
        self._frozen = None
        self._broke = ""
        self._shared = True
        self.unfrozen = "no frozen fork had been made since the last one was used"
        self._ready = self._loop.create_future()
        self._line = self._new_line(wake)
        self._watch_worker(watched, pid)
        self.wake_up()  # It can have been stopped together with the worker.
        self._line.send({"op": "wake"})
        try:
            await self._get_ready("wake the frozen fork")
        except SpawnFailed as problem:
            self.unfrozen = f"the frozen fork did not go on: {problem}"
            # Its line is not heard any more: to see it end later would be to see the place end.
            self._line.close()
            self._signal(signal.SIGKILL)
            return False
        return True

    async def begin_again(self) -> bool:
        if self.init is None or not self.init.alive:
            return False
        if self._worker_fd >= 0:
            # Its line may end before it does; while it lives, what its last run has started is its own to look after.
            with suppress(TimeoutError):
                async with asyncio.timeout(READY):
                    await self._worker_dead.wait()
            if not self.init.alive:
                return False
        line, theirs = socket.socketpair()
        for pipe in (self.stdout, self.stderr):
            pipe.close()
        self.stdout, self.stderr = OutputPipe(), OutputPipe()
        self._broke = ""
        self._ready = self._loop.create_future()
        self._line = self._new_line(line)
        self._forget_worker()
        self.init.tell({"op": "again"}, [theirs.fileno(), self.stdout.write_end, self.stderr.write_end])
        try:
            theirs.close()
            self.stdout.handed_over()
            self.stderr.handed_over()
            await self._get_ready("start a fresh worker")
        except SpawnFailed:
            return False
        return True

    # --- forking ----------------------------------------------------------------------------------------------------

    def wake_up(self) -> None:
        """Let the worker go on, if it was stopped."""
        self._signal(signal.SIGCONT)

    async def fork(self, handlers: dict[str, Handler], *, asleep: bool = False) -> LocalSession:
        """Another session with the same variables and files; ForkRefused, and nothing has changed. A worker that
        does not answer is ended, and WorkerDied raised.

        One that is `asleep` is there to be forked: it keeps no frozen fork, and nobody sees into it."""
        if self.init is None:
            raise ForkRefused("the session has not begun")
        control, init = socket.socketpair()
        line, theirs = socket.socketpair()
        child = LocalSession(handlers)
        asked: asyncio.Future[Record] | None = None
        child._memory_kills = self._memory_kills.shared()
        try:
            child._line = child._new_line(line)
            child.init = InitControl(control, child._watch_worker, child._init_ended)
            # Init makes the place while the worker forks; who is first waits for the other.
            preparing = self.init.ask({"op": "fork"}, [init.fileno()])
            ends = [theirs.fileno(), child.stdout.write_end, child.stderr.write_end]
            asked = self.request({"op": "fork", "asleep": asleep}, fds=ends)
            # To copy many files takes init as long as it does; a worker has nothing to wait for once they are there.
            await asyncio.wait([asked, preparing], return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(None if asked.done() else READY):
                answer = await asyncio.shield(asked)
            prepared = await preparing
            if prepared.get("op") != "fork_ready":
                raise ForkRefused(f"a live fork was refused: {prepared.get('message')}")
            self.init.has_forked = True
            if "refused" in answer or answer.get("error"):
                raise ForkRefused(f"a live fork was refused: {answer.get('refused') or answer.get('error')}")
            theirs.close()
            child.stdout.handed_over()
            child.stderr.handed_over()
            await child._get_ready("start the fork")
        except BaseException as problem:
            # Its end of the line is seen once nobody holds it here.
            init.close()
            theirs.close()
            await child.close()
            if isinstance(problem, TimeoutError):
                # Else it would fork when it is asked for something else.
                self.kill(f"it said nothing for {READY:.0f} seconds")
            if asked is not None and not asked.done():
                # Who was cancelled leaves a worker that is still at it: it would take the next fork's place.
                await asyncio.wait([asked], timeout=_SETTLES)
            if isinstance(problem, TimeoutError):
                raise WorkerDied(self._broke) from None
            if isinstance(problem, SpawnFailed):
                raise ForkRefused(f"a live fork failed: {problem}") from None
            raise
        finally:
            init.close()
            theirs.close()
        return child

    async def upper(self) -> int:
        """A descriptor of the folder that has what was changed in an overlaid workspace; who asked closes it."""
        if self.init is None:
            raise WorkerDied("the session has not begun")
        return int((await self.init.ask({"op": "upper"}, []))["folder"])

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Init takes everything with it; returns when all is gone."""
        if self.init is not None:
            self.init.wake_up()
            self.init.tell({"op": "close"})
        self._broke = self._broke or "the session was closed"
        if self._line is not None:
            self._line.close()
        self._fail_all("the session was closed")
        self.end_run()
        try:
            if self.init is not None:
                async with asyncio.timeout(5):
                    await self.init.until_gone(self._worker_fd)
        except TimeoutError:
            if self.init is not None:
                self.init.kill()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._forget_worker()
        self._drop_frozen("the session is closed")
        if self.init is not None:
            self.init.close()
        self._memory_kills.close()
        self.stdout.close()
        self.stderr.close()
        self._discard.close()


class MemoryKills:
    """How often the kernel has ended something in a session's cgroup for want of memory; it counts on for ever.

    So the count is taken when a request begins, and what matters is whether it has grown since. A session and its
    forks have one cgroup.
    """

    def __init__(self, file: int = -1) -> None:
        self._file = file
        self._before = 0

    @classmethod
    def of(cls, init: int) -> MemoryKills:
        """Of the session with this first process; one that counts nothing where there is no memory cgroup."""
        tree = hierarchies().get("memory")
        try:
            rows = Path(f"/proc/{init}/cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            rows = []
        for row in rows if tree is not None else []:
            _, controllers, path = row.split(":", 2)
            if tree is None or not (controllers == "" or "memory" in controllers.split(",")):
                continue
            for name in ("memory.events", "memory.oom_control"):
                file = Path(tree.folder) / Path(path).name / name
                if file.exists():
                    return cls(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        return cls()

    def shared(self) -> MemoryKills:
        """For a fork."""
        return MemoryKills(os.dup(self._file) if self._file >= 0 else -1)

    def begin(self) -> None:
        self._before = self._count()

    def has_grown(self) -> bool:
        return self._count() > self._before

    def _count(self) -> int:
        if self._file < 0:
            return 0
        try:
            rows = [line.split() for line in os.pread(self._file, 4096, 0).splitlines()]
        except OSError:
            return 0  # the cgroup is gone
        return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == b"oom_kill"), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
