"""The first process of a container: the worker's line goes over its standard input and output, and it buries the dead.

Nothing is shared with the host but these two streams, so the engine may be on another machine, and another kernel may
stand in between. What comes from the worker is passed on and not believed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import selectors
import signal
import site
import socket
import struct
import sys
import termios
from collections.abc import Callable
from typing import Any

from .. import syscalls
from ..channel import MAX_RECORD, Channel, ChannelClosed, ChannelError
from ..processes import StopGuard, end_started_in_session, kill_descendants, set_title
from . import command_server, main
from .container_children import Unpacker, become_worker

HEAD = struct.Struct(">cI")
"""Before each frame: its channel, and how many bytes follow."""
LINE, RUN, FRESH = b"l", b"r", b"f"
"""Records of the line; from the host also those that begin a run, with the pipes there are or with fresh ones."""
CONTROL, STDOUT, STDERR, ARCHIVE, COMMANDS = b"c", b"o", b"e", b"a", b"s"

_AT_ONCE = 1 << 16
_TOLD_AFTER = 1 << 20
_MOST_DISCARDED = 64
_LARGEST_PID = 1 << 22
_HAS_FDS = re.compile(rb'"fds":(\d{1,3})\}\Z')
_OUT_OF_MEMORY = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class ContainerInit:
    """Lives as long as standard input is open: when the host is gone, all that runs in the container goes too."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._incoming = bytearray()
        self._worker = 0
        self._line: Channel | None = None
        self._to_worker: list[tuple[memoryview, tuple[int, ...]]] = []
        self._passed = 0
        self._pipes: dict[bytes, int] = {}
        self._held = False
        self._frozen: tuple[list[int], int] | None = None
        self._discarded: list[int] = []
        self._worker_session = 0
        """The kernel session of the worker and of what its code starts."""
        self._settings: dict[str, Any] = {}
        self._environment: dict[str, str] = {}
        self._unpacker = Unpacker(self._selector, lambda status: self._tell({"op": "unpacked", "status": status}))
        self._broke = ""
        self._stop_guard = StopGuard(kill_descendants)
        self._server = 0
        """The process number of the command server."""
        self._to_server = bytearray()
        self._server_channel: socket.socket | None = None
        self._killed_before = 0
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(0, True)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        # Others do nothing to the first process of a pid namespace, but for this one, which Python has taken.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._watch(0, self._heard_host)
        self._watch(self._wake_read, self._heard_signal)

    def serve(self) -> None:
        """Never returns."""
        self._tell({"op": "begun", "facts": facts()})
        while True:
            for key, mask in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:
                    key.data(mask)

    def _watch(self, fd: int, heard: Callable[[int], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, heard)

    def _send(self, channel: bytes, data: bytes) -> None:
        """Whole. The host always reads; when it does not, there is nothing better to do than to wait for it."""
        left = memoryview(HEAD.pack(channel, len(data)) + data)
        while left:
            left = left[os.write(1, left) :]

    def _tell(self, record: dict[str, Any]) -> None:
        self._send(CONTROL, json.dumps(record).encode("ascii"))

    # --- the host ---------------------------------------------------------------------------------------------------

    def _heard_host(self, mask: int) -> None:
        data = os.read(0, 1 << 18)
        if not data:
            os._exit(0)
        self._incoming += data
        while len(self._incoming) >= HEAD.size:
            channel, length = HEAD.unpack_from(self._incoming)
            if len(self._incoming) < HEAD.size + length:
                return
            body = bytes(self._incoming[HEAD.size : HEAD.size + length])
            del self._incoming[: HEAD.size + length]
            if channel == CONTROL:
                self._obey(json.loads(body))
            elif channel == ARCHIVE:
                self._unpacker.take(body)
            elif channel == COMMANDS:
                self._to_server += body
                self._write_to_server()
            else:
                self._pass_to_worker(channel, body)

    def _obey(self, record: dict[str, Any]) -> None:
        operation = record["op"]
        if operation == "start":
            self._settings, self._environment = record["settings"], record["environment"]
            self._start()
        elif operation == "again":
            if self._worker_session:
                # What the lost worker's code has started, where no snapshot is left to end it.
                end_started_in_session(self._worker_session)
            self._start()
        elif operation == "wake":
            self._wake()
        elif operation == "signal" and self._worker:
            _signal(self._worker, record["number"])
        elif operation == "tend":
            self._tend(record["end"])
        elif operation == "serve_commands":
            self._serve_commands()
        elif operation == "kill_server" and self._server:
            _signal(self._server, signal.SIGKILL)
        elif operation == "hold":
            self._hold(record["on"])
        elif operation == "unpack":
            self._unpacker.begin(record["at"], record["remove"])

    def _tend(self, end: bool) -> None:
        """Continue the worker and the command server where they were stopped."""
        own = {process for process in (self._worker, self._server) if process}
        spare = own if self._frozen is None else {*own, self._frozen[1]}
        for process in own:
            self._stop_guard.check(process, spare, kill=end)

    # --- the command server -----------------------------------------------------------------------------------------

    def _serve_commands(self) -> None:
        """Fork the command server; what comes from it is passed on to the host as it is."""
        self._drop_server()
        ours, theirs = socket.socketpair()
        nothing = os.open("/dev/null", os.O_WRONLY)
        pid = os.fork()
        if pid == 0:
            become_worker(command_server.run, theirs.detach(), (nothing, nothing), self._environment, self._settings)
        theirs.close()
        os.close(nothing)
        ours.setblocking(False)
        self._server, self._server_channel = pid, ours
        self._watch(ours.fileno(), self._heard_server)
        self._tell({"op": "serving"})

    def _heard_server(self, mask: int) -> None:
        channel = self._server_channel
        if channel is not None and mask & selectors.EVENT_WRITE:
            self._write_to_server()
        if channel is None or channel is not self._server_channel or not mask & selectors.EVENT_READ:
            return
        try:
            data = channel.recv(_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._send(COMMANDS, data)
        else:
            self._drop_server()
            self._tell({"op": "server_ended"})

    def _write_to_server(self) -> None:
        """Write what it takes now; the protocol's windows bound what waits here."""
        channel = self._server_channel
        if channel is None:
            self._to_server.clear()
            return
        try:
            while self._to_server:
                del self._to_server[: channel.send(self._to_server)]
        except BlockingIOError:
            self._selector.modify(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, self._heard_server)
            return
        except OSError:
            return  # its end is heard when it is read from
        self._selector.modify(channel, selectors.EVENT_READ, self._heard_server)

    def _drop_server(self) -> None:
        self._to_server.clear()
        if self._server_channel is not None:
            self._unwatch(self._server_channel.fileno())
            self._server_channel.close()
            self._server_channel = None

    # --- the worker -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Fork the worker. This process has run no code of the session, so each begins afresh."""
        ours, theirs = socket.socketpair()
        ends = self._fresh_pipes()
        pid = os.fork()
        if pid == 0:
            become_worker(main.run, theirs.detach(), ends, self._environment, self._settings)
        theirs.close()
        for fd in ends:
            os.close(fd)
        self._worker_session = pid
        self._live_with(pid, ours)

    def _live_with(self, pid: int, line: socket.socket) -> None:
        line.setblocking(False)
        self._drop_line()
        self._worker, self._line, self._broke = pid, Channel(line), ""
        self._watch(line.fileno(), self._heard_worker)

    def _drop_line(self) -> None:
        self._to_worker = []
        self._passed = 0
        if self._line is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._line.socket)
            self._line.close()
            self._line = None

    def _wake(self) -> None:
        if self._frozen is None:
            self._tell({"op": "exited", "status": None, "broke": "there is no frozen fork"})
            return
        (line, *others), pid = self._frozen
        self._frozen = None
        for fd in others:
            os.close(fd)
        _signal(pid, signal.SIGCONT)  # It can have been stopped together with the worker.
        self._live_with(pid, socket.socket(fileno=line))
        self._pass_to_worker(LINE, b'{"op":"wake"}')

    def _pass_to_worker(self, channel: bytes, body: bytes) -> None:
        fds: tuple[int, ...] = ()
        if channel == FRESH:
            self._discard(list(self._pipes.values()))
            fds = self._fresh_pipes()
            body = json.dumps({**json.loads(body), "fds": 2}).encode("ascii")
        if channel in (RUN, FRESH):
            # What came since the last run belongs to nobody: the host does not listen until it is told.
            self._drain()
            self._killed_before = _killed_for_memory()
            self._tell({"op": "listen"})
        if self._line is None:
            for fd in fds:
                os.close(fd)
            return
        self._to_worker.append((memoryview(len(body).to_bytes(4, "big") + body), fds))
        if len(self._to_worker) == 1:
            self._write_to_worker()

    def _write_to_worker(self) -> None:
        line = self._line
        if line is None:
            return
        while self._to_worker:
            data, fds = self._to_worker[0]
            try:
                sent = _send_with(line.socket, data, fds)
            except BlockingIOError:
                self._selector.modify(line.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self._heard_worker)
                return
            except OSError:
                return  # it is gone, which is heard of elsewhere
            for fd in fds:
                os.close(fd)
            self._count(sent)
            self._to_worker[0] = (data[sent:], ())
            if sent == len(data):
                self._to_worker.pop(0)
        self._selector.modify(line.socket, selectors.EVENT_READ, self._heard_worker)

    def _count(self, sent: int) -> None:
        """Tell the host from time to time how much has gone on: it bounds what waits here."""
        self._passed += sent
        if self._passed >= _TOLD_AFTER:
            self._tell({"op": "passed", "bytes": self._passed})
            self._passed = 0

    def _heard_worker(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write_to_worker()
        if mask & selectors.EVENT_READ and self._line is not None:
            try:
                self._pass_on(self._line)
            except (ChannelError, ValueError, OSError) as problem:
                self._end_worker(problem)

    def _pass_on(self, line: Channel) -> bool:
        """What the worker has sent by now, its output first; whether there was something."""
        before = line.received
        bodies = line.receive_bodies(_HAS_FDS)
        self._drain()
        for body, fds in bodies:
            self._send(LINE, self._without_fds(body, fds) if fds else body)
            if body.startswith(b'{"op":"unfrozen"'):
                self._drop_frozen()
        return line.received > before

    def _without_fds(self, body: bytes, fds: list[int]) -> bytes:
        """Descriptors stay here: a frozen fork's own line, or pipes that nobody reads any more."""
        record = json.loads(body)
        record.pop("fds", None)
        if record.get("op") == "frozen":
            pid = record.get("pid")
            if type(pid) is not int or not 1 < pid < _LARGEST_PID:
                raise ChannelError(f"a frozen fork whose process is {str(pid)[:100]}")
            self._drop_frozen()
            self._frozen = fds, pid
        else:
            self._discard(fds)
        return json.dumps(record).encode("ascii")

    def _drop_frozen(self) -> None:
        if self._frozen is not None:
            for fd in self._frozen[0]:
                os.close(fd)
            self._frozen = None

    def _end_worker(self, problem: Exception) -> None:
        """Its channel was closed or is broken; either way it is done with."""
        if not isinstance(problem, ChannelClosed):
            self._broke = self._broke or str(problem)
        if self._line is not None:
            self._selector.unregister(self._line.socket)
        try:
            os.kill(self._worker, signal.SIGKILL)
        except ProcessLookupError:
            self._exited(None)

    def _heard_signal(self, mask: int) -> None:
        os.read(self._wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._worker:
                self._exited(status)
            elif pid == self._server:
                self._server = 0
            else:
                self._unpacker.buried(pid, status)

    def _exited(self, status: int | None) -> None:
        """All it said and wrote before it ended is passed on first."""
        line, self._worker = self._line, 0
        with contextlib.suppress(ChannelError, ValueError, OSError):
            # And no more than one record: a child of its may have kept the line, and write for ever.
            end = line.received + MAX_RECORD if line is not None else 0
            while line is not None and line.received <= end and self._pass_on(line):
                continue
        self._drain()
        self._drop_line()
        out_of_memory = _killed_for_memory() > self._killed_before
        self._tell({"op": "exited", "status": status, "broke": self._broke, "out_of_memory": out_of_memory})

    # --- output -----------------------------------------------------------------------------------------------------

    def _fresh_pipes(self) -> tuple[int, ...]:
        """Another pair in place of the last, which whoever calls has seen to; gives the write ends."""
        ends = []
        for fd in self._pipes.values():
            if fd not in self._discarded:
                self._unwatch(fd)
                os.close(fd)
        for channel in (STDOUT, STDERR):
            read, write = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read, False)
            self._pipes[channel] = read
            ends.append(write)
        self._hold(self._held)
        return tuple(ends)

    def _hold(self, on: bool) -> None:
        """When the host's reader is slow, the code waits as soon as its pipe is full."""
        self._held = on
        for channel, fd in self._pipes.items():
            self._unwatch(fd)
            if not on:
                self._watch(fd, lambda mask, channel=channel, fd=fd: self._read_pipe(channel, fd))  # type: ignore[misc]

    def _unwatch(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _read_pipe(self, channel: bytes, fd: int) -> None:
        data = _read(fd)
        if data:
            self._send(channel, data)
        elif data is not None:
            self._unwatch(fd)

    def _drain(self) -> None:
        """What is in the pipes now, and no more: a program left in the background may write for ever."""
        for channel, fd in self._pipes.items():
            left = int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)
            while left > 0:
                data = _read(fd, min(left, _AT_ONCE))
                if not data:
                    break
                left -= len(data)
                self._send(channel, data)

    def _discard(self, fds: list[int]) -> None:
        """Nobody wants what comes here; it is read all the same, so that no writer has to wait."""
        for fd in fds:
            self._unwatch(fd)
            try:
                os.set_blocking(fd, False)
                self._watch(fd, lambda mask, fd=fd: self._drop(fd))  # type: ignore[misc]
            except OSError:
                os.close(fd)
                continue
            self._discarded.append(fd)
        while len(self._discarded) > _MOST_DISCARDED:
            self._forget(self._discarded[0])

    def _drop(self, fd: int) -> None:
        if _read(fd) == b"":
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        self._discarded.remove(fd)
        self._unwatch(fd)
        os.close(fd)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _send_with(line: socket.socket, data: memoryview, fds: tuple[int, ...]) -> int:
    if not fds:
        return line.send(data)
    rights = struct.pack(f"{len(fds)}i", *fds)
    return line.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def _read(fd: int, most: int = _AT_ONCE) -> bytes | None:
    """What is there; nothing at the end, and None when nothing has come."""
    try:
        return os.read(fd, most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _ignore(number: int, frame: object) -> None:
    """Only the wake-up pipe matters; without a handler the signal would not reach it."""


def _killed_for_memory() -> int:
    """How often the kernel has ended something in this container for want of memory."""
    for name in _OUT_OF_MEMORY:
        try:
            with open(name, encoding="ascii") as file:
                rows = [line.split() for line in file]
        except OSError:
            continue
        return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == "oom_kill"), 0)
    return 0


def facts() -> dict[str, Any]:
    """What the host must know of this Python to install packages for it."""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = ""
    names = []
    for folder in site.getsitepackages():
        if os.path.isdir(folder):
            names += [name for name in os.listdir(folder) if name.endswith(".dist-info")]
    return {
        "python": sys.executable,
        "version": list(sys.version_info[:3]),
        "machine": os.uname().machine,
        "libc": libc,
        "path": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        "packages": names,
    }


def serve_container() -> None:
    """Be the first process of a container; never returns."""
    set_title()
    syscalls.set_dumpable(False)
    os.umask(0o022)
    ContainerInit().serve()
