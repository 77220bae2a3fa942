"""A session on this machine: a socket to the worker, two output pipes, the snapshot, and a socket to init."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from carrel.errors import ConfigurationError
from carrel.execution.channels import AsyncChannel, CommandClient, Discard, OutputPipe, Record, Sink, refuse_the_last
from carrel.execution.connection import READY, SpawnFailed, TransportListener, WorkerConnection
from carrel.execution.results import Ending, ending_of
from carrel.execution.sandbox_client import InitClient, ZygoteClient
from carrel.guest.channel import ChannelError
from carrel.guest.processes import is_descendant, numbers_of
from carrel.guest.sandbox.cgroups import hierarchies

_USUAL_ENDS = ("the channel was closed", "the channel is broken: Connection reset by peer")


class LocalTransport:
    """See `Transport`. Every part is a descriptor; the session ends when this process closes them."""

    listener: TransportListener

    def __init__(self, zygote: ZygoteClient, pid_depth: int = 0) -> None:
        """`zygote` has counted this session in, and is released at its end."""
        self._loop = asyncio.get_running_loop()
        self.zygote = zygote
        self._closed, self.state_problem = False, ""
        self.stdout = OutputPipe()
        try:
            refuse_the_last(self.stdout.write_end)
            self.stderr = OutputPipe()
        except OSError:
            self.stdout.close()
            raise
        self._channel: AsyncChannel | None = None
        self.init: InitClient | None = None
        self._worker_fd = -1
        self._worker_pid = 0
        self._process_known = asyncio.Event()
        """Set when init has reported which process the worker is, or will not any more."""
        self._worker_ended = asyncio.Event()
        self._snapshot: tuple[socket.socket, int, int] | None = None
        """Its channel, its pidfd and its number."""
        self.pid_depth = pid_depth
        """In how many pid namespaces the session's processes have a number; 0 until it is known."""
        self._discard = Discard()
        self._servers: dict[CommandClient, tuple[int, int]] = {}
        """The number and the pidfd of each command server."""
        self.memory_kills = MemoryKills()

    # --- start ------------------------------------------------------------------------------------------------------

    async def open(self, settings: dict[str, Any], private: dict[str, Any]) -> None:
        """Have the zygote start it; SpawnFailed leaves nothing behind. Only its init and worker get `private`."""
        channel, theirs = socket.socketpair()
        control, init = socket.socketpair()
        try:
            fds = [theirs.fileno(), init.fileno(), self.stdout.write_end, self.stderr.write_end]
            self.connect(channel, control)
            assert self.init is not None
            # First, so that init need not wait; and not through the zygote, whose memory later sessions start with.
            self.init.send({"op": "begin", "settings": private})
            spawned = await asyncio.wrap_future(self.zygote.spawn(settings, fds))
        finally:
            theirs.close()
            init.close()
            self.close_write_ends()
        try:
            self.init.watch(int(spawned["pid"]))
        except ProcessLookupError:
            raise SpawnFailed("start", None, "the session ended at once") from None
        if settings.get("limits", {}).get("memory") is not None:
            self.memory_kills = MemoryKills.of(int(spawned["pid"]))

    def connect(self, channel: socket.socket, control: socket.socket) -> None:
        """Use these ends of the channels to the worker and to init."""
        self._channel = self._new_channel(channel)
        self.init = InitClient(control, self._watch_worker, self._init_ended)

    def _new_channel(self, end: socket.socket) -> AsyncChannel:
        made = AsyncChannel(
            end, lambda record, fds: self.listener.on_record(record, fds, made.length), self._channel_ended
        )
        return made

    def close_write_ends(self) -> None:
        for pipe in (self.stdout, self.stderr):
            pipe.handed_over()

    async def wait_for_process(self, step: str) -> None:
        # Init may report later than the worker; until then there is no process to interrupt.
        try:
            async with asyncio.timeout(READY):
                await self._process_known.wait()
        except TimeoutError:
            raise SpawnFailed(step, None, f"its first process did not report within {READY:.0f} seconds") from None

    # --- requests and signals ---------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.init is not None and self.init.alive

    @property
    def worker_alive(self) -> bool:
        return self._channel is not None and not self._channel.closed

    def send(self, record: Record, fds: Sequence[int] = (), *, max_unread: int | None = None) -> None:
        if "id" in record:
            self.memory_kills.begin()
        if self._channel is not None:
            self._channel.send(record, fds, max_unread=max_unread)

    def start_run(self, send: Callable[[Sequence[int]], None], *, fresh_pipes: bool) -> None:
        fds: list[int] = []
        if fresh_pipes:
            self._discard.take([self.stdout.give_up(), self.stderr.give_up()])
            self.stdout, self.stderr = OutputPipe(), OutputPipe()
            fds = [self.stdout.write_end, self.stderr.write_end]
        try:
            send(fds)
        finally:
            self.close_write_ends()

    def signal(self, number: int) -> None:
        if self._worker_fd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._worker_fd, number)
        elif number == signal.SIGKILL and self.init is not None:
            self.init.kill()

    def continue_stopped(self, servers: Sequence[CommandClient], *, kill: bool) -> None:
        if self.init is None:
            return
        processes = [self._servers[client][0] for client in servers if client in self._servers]
        if self.worker_alive and self._worker_pid:
            processes.append(self._worker_pid)
        spare = [self._snapshot[2]] if self._snapshot is not None else []
        self.init.wake_up()
        for process in processes:
            self.init.send({"op": "continue", "worker": process, "spare": spare, "end": kill})

    # --- output -----------------------------------------------------------------------------------------------------

    def set_output(self, stdout: Sink | None, stderr: Sink | None) -> None:
        if stdout is not None:
            self.drain_output()  # What came since the last run belongs to no run.
        self.stdout.sink, self.stderr.sink = stdout, stderr

    def write_output(self, text: str) -> None:
        self.stdout.drain()
        if self.stdout.sink is not None:
            self.stdout.sink(text.encode("utf-8", "backslashreplace"))

    def drain_output(self) -> None:
        self.stdout.drain()
        self.stderr.drain()

    def read_output(self, on: bool) -> None:
        self.stdout.watch(on)
        self.stderr.watch(on)

    def take_descriptors(self, fds: list[int]) -> None:
        # Read ends of pipes that processes in the background still write to; everything else is closed.
        self._discard.take(fds)

    # --- commands ---------------------------------------------------------------------------------------------------

    async def start_command_server(self, user: str) -> CommandClient:
        assert self.init is not None
        for gone in [client for client in self._servers if client.closed]:
            os.close(self._servers.pop(gone)[1])
        ours, theirs = socket.socketpair()
        try:
            with open(os.devnull, "wb") as nothing:
                fds = [theirs.fileno(), nothing.fileno(), nothing.fileno()]
                answer = await self.init.request({"op": "serve_commands", "user": user}, fds)
            if answer["op"] != "serving":
                if user != "agent":
                    raise ConfigurationError(f"commands cannot run as {user!r} here: {answer.get('message')}")
                raise SpawnFailed("start the command server", answer.get("errno"), str(answer.get("message")))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        client = CommandClient(lambda: self.kill_server(client))
        self._servers[client] = answer["pid"], answer["fd"]
        ours.setblocking(False)
        await self._loop.create_connection(lambda: client, sock=ours)
        return client

    def kill_server(self, client: CommandClient) -> None:
        if client in self._servers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._servers[client][1], signal.SIGKILL)

    # --- the end of the worker, or of init --------------------------------------------------------------------------

    def _watch_worker(self, pidfd: int, pid: int) -> None:
        self._forget_worker()
        self._worker_fd, self._worker_pid = pidfd, pid
        self.pid_depth = self.pid_depth or len(numbers_of(pidfd))
        self._process_known.set()
        self._worker_ended.clear()
        self._loop.add_reader(pidfd, self._worker_gone)

    def _forget_worker(self) -> None:
        if self._worker_fd >= 0:
            self._loop.remove_reader(self._worker_fd)
            os.close(self._worker_fd)
            self._worker_fd = -1
        self._worker_ended.set()
        self._process_known.clear()

    def _channel_ended(self, reason: str) -> None:
        """The worker is dead, or has sent what no worker sends: either way it is not used any more."""
        self.signal(signal.SIGKILL)
        self._process_known.set()
        self.listener.on_end(reason, broken=reason not in _USUAL_ENDS)

    def _worker_gone(self) -> None:
        self._loop.remove_reader(self._worker_fd)
        self._worker_ended.set()
        if self._channel is not None:
            self._channel.read_rest()
        self.listener.on_end("its process ended")

    def _init_ended(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.read_rest()
        self._process_known.set()
        self.drop_snapshot()
        self.listener.on_servers_lost()
        self.listener.on_end(f"the session's first process is gone ({reason})")

    async def exit_status(self, broken: str) -> Ending:
        if broken or self.init is None:
            return ending_of(None, broken)
        status = await self.init.status_of(self._worker_pid)
        return ending_of(status, broken, out_of_memory=self.memory_kills.has_grown())

    # --- the snapshot, a fresh worker -------------------------------------------------------------------------------

    @property
    def has_snapshot(self) -> bool:
        return self._snapshot is not None and self._is_of_session(self._snapshot[1])

    def _is_of_session(self, pidfd: int) -> bool:
        """Whether this process may be signalled. Without a pid namespace a worker can send the pidfd of any process of
        its user as its snapshot."""
        numbers = numbers_of(pidfd)
        if self.init is None or not numbers or len(numbers) != self.pid_depth:
            return False
        return self.pid_depth > 1 or is_descendant(numbers[0], self.init.pid)

    def keep_snapshot(self, record: Record, fds: list[int]) -> None:
        try:
            if len(fds) != 2:
                raise OSError("a snapshot without its two descriptors")
            if stat.S_ISDIR(os.fstat(fds[1]).st_mode):
                raise OSError("a folder of /proc, which can be sent signals too, but whose end cannot be watched")
            signal.pidfd_send_signal(fds[1], 0)
            channel = socket.socket(fileno=fds[0])
        except OSError as problem:
            for fd in fds:
                os.close(fd)
            if isinstance(problem, ProcessLookupError):
                return
            raise ChannelError("a snapshot whose descriptors are not what they should be") from None
        self.drop_snapshot()
        pid = record.get("pid")
        self._snapshot = channel, fds[1], pid if type(pid) is int else 0

    def drop_snapshot(self) -> None:
        if self._snapshot is not None:
            channel, pidfd, _ = self._snapshot
            self._snapshot = None
            channel.close()
            os.close(pidfd)

    def restore_snapshot(self) -> None:
        assert self._snapshot is not None
        channel, pidfd, pid = self._snapshot
        self._snapshot = None
        self._channel = self._new_channel(channel)
        self._watch_worker(pidfd, pid)
        self.signal(signal.SIGCONT)  # It may have been stopped together with the worker.
        self._channel.send({"op": "restore"})

    def abandon_worker(self) -> None:
        # Its channel is not read any more: to see it end later would be to see the session end.
        if self._channel is not None:
            self._channel.close()
        self.signal(signal.SIGKILL)

    async def wait_for_worker_end(self) -> bool:
        if self._worker_fd >= 0 and self.alive:
            # Its channel may end before it does; while it lives, it looks after what its last run has started.
            with suppress(TimeoutError):
                async with asyncio.timeout(READY):
                    await self._worker_ended.wait()
        return self.alive

    def start_worker(self) -> None:
        assert self.init is not None
        channel, theirs = socket.socketpair()
        for pipe in (self.stdout, self.stderr):
            pipe.close()
        self.stdout, self.stderr = OutputPipe(), OutputPipe()
        self._channel = self._new_channel(channel)
        self._forget_worker()
        self.init.send({"op": "restart"}, [theirs.fileno(), self.stdout.write_end, self.stderr.write_end])
        theirs.close()
        self.close_write_ends()

    # --- forks ------------------------------------------------------------------------------------------------------

    async def overlay_folder(self) -> int:
        """A descriptor of the folder with what was changed in an overlaid workspace; the caller closes it."""
        assert self.init is not None
        return int((await self.init.request({"op": "upper"}, []))["fd"])

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Init ends everything; returns when all is gone."""
        if self.init is not None:
            self.init.wake_up()
            self.init.send({"op": "close"})
        if self._channel is not None:
            self._channel.close()
        try:
            if self.init is not None:
                async with asyncio.timeout(5):
                    await self.init.wait_gone(self._worker_fd)
        except TimeoutError:
            if self.init is not None:
                self.init.kill()
        finally:
            self._release()

    def _release(self) -> None:
        self._forget_worker()
        self.drop_snapshot()
        if self.init is not None:
            self.init.close()
        for _, pidfd in self._servers.values():
            os.close(pidfd)
        self._servers = {}
        self.memory_kills.close()
        self.stdout.close()
        self.stderr.close()
        self._discard.close()
        if not self._closed:
            self._closed = True
            self.zygote.release()


LocalConnection = WorkerConnection[LocalTransport]


@functools.cache
def _memory_folder() -> str:
    """The cgroup below which the memory of sessions is limited; found once."""
    return found.folder if (found := hierarchies().get("memory")) is not None else ""


class MemoryKills:
    """How often the kernel has killed something in the cgroup of a session and its forks because memory ran out.

    The kernel's count only grows, so it is read when a request starts and compared later."""

    def __init__(self, file: int = -1) -> None:
        self._file = file
        self._before = 0

    @classmethod
    def of(cls, init: int) -> MemoryKills:
        """Of the session with this first process; one that counts nothing where there is no memory cgroup."""
        with suppress(OSError):
            rows = Path(f"/proc/{init}/cgroup").read_text(encoding="utf-8").splitlines() if _memory_folder() else []
            for _, controllers, path in (row.split(":", 2) for row in rows):
                for name in ("memory.events", "memory.oom_control"):
                    file = f"{_memory_folder()}/{Path(path).name}/{name}"
                    if {"", "memory"} & set(controllers.split(",")) and os.path.exists(file):
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
        rows: list[list[bytes]] = []
        with suppress(OSError):  # the cgroup is gone
            rows = [line.split() for line in os.pread(self._file, 4096, 0).splitlines()] if self._file >= 0 else []
        return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == b"oom_kill"), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
