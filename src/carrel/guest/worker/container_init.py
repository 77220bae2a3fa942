"""The first process of a container: passes records between the host and the worker, and reaps.

It shares nothing with the host but its standard input and output, so the engine may be on another machine, and another
kernel (gVisor) in between. It passes on what the worker sends, and does not trust it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import re
import selectors
import signal
import socket
import struct
import sys
import termios
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from .. import syscalls
from ..channel import MAX_RECORD, Channel, ChannelClosed, ChannelError
from ..processes import (
    StopGuard,
    become_killable,
    close_others,
    end_started_in_session,
    kill_descendants,
    reset_signals,
    set_standard_streams,
    set_title,
)
from . import command_server
from .container_facts import killed_for_memory, python_facts
from .state_transfer import StateTransfer

HEAD = struct.Struct(">cI")
"""Before each frame: its channel, and how many bytes follow."""
LINE, RUN, FRESH = b"l", b"r", b"f"
"""Records of the worker's channel; from the host also those that begin a run, with the present pipes or fresh ones."""
CONTROL, STDOUT, STDERR, COMMANDS = b"c", b"o", b"e", b"s"
STATE, SAVE = b"v", b"w"
"""Saved variables, in either direction; and a request to save them, which the worker gets with two descriptors."""

_MAX_READ = 1 << 16
_REPORT_AFTER = 1 << 20
_MAX_DISCARDED = 64
_WARM_AFTER = 0.2
"""Seconds without a request after which the worker's modules are loaded ahead."""
_MAX_PID = 1 << 22
_HAS_FDS = re.compile(rb'"fds":(\d{1,3})\}\Z')


class ContainerInit:
    """It exits when standard input is closed: when the host is gone, everything in the container ends."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._incoming = bytearray()
        self._worker = 0
        self._channel: Channel | None = None
        self._to_worker: list[tuple[memoryview, tuple[int, ...]]] = []
        self._passed = 0
        self._pipes: dict[bytes, int] = {}
        self._held = False
        self._snapshot: tuple[list[int], int] | None = None
        self._discarded: list[int] = []
        self._worker_session = 0
        """The kernel session of the worker and of what its code starts."""
        self._settings: dict[str, Any] = {}
        self._environment: dict[str, str] = {}
        self._broken_reason = ""
        self._stop_guard = StopGuard(kill_descendants)
        self._state = StateTransfer(self._send_state, self._watch, self._unwatch)
        self._server = 0
        """The process number of the command server."""
        self._to_server = bytearray()
        self._server_channel: socket.socket | None = None
        self._killed_before = 0
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(0, True)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        # Other signals do nothing to the first process of a pid namespace; this one has a handler of Python's.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._watch(0, self._receive_from_host)
        self._watch(self._wake_read, self._reap)

    def serve(self) -> None:
        """Never returns."""
        self._send_control({"op": "begun", "facts": python_facts()})
        is_warm = False
        while True:
            events = self._selector.select(None if is_warm else _WARM_AFTER)
            if not events:
                # It waits for a session: workers of this process need not load their modules then.
                is_warm = True
                with contextlib.suppress(ImportError):  # A Python that was brought along has none for a worker.
                    importlib.import_module(".main", __package__)
            for key, mask in events:
                if self._selector.get_map().get(key.fd) is key:
                    key.data(mask)

    def _watch(self, fd: int, callback: Callable[[int], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _send(self, channel: bytes, data: bytes) -> None:
        """Send a frame whole. The host always reads; when it does not, this waits for it."""
        left = memoryview(HEAD.pack(channel, len(data)) + data)
        while left:
            left = left[os.write(1, left) :]

    def _send_control(self, record: dict[str, Any]) -> None:
        self._send(CONTROL, json.dumps(record).encode("ascii"))

    def _send_state(self, piece: bytes | dict[str, Any]) -> None:
        if isinstance(piece, bytes):
            self._send(STATE, piece)
        else:
            self._send_control(piece)

    # --- the host ---------------------------------------------------------------------------------------------------

    def _receive_from_host(self, mask: int) -> None:
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
            elif channel == COMMANDS:
                self._to_server += body
                self._write_to_server()
            elif channel == STATE:
                self._state.write(body)
            else:
                self._pass_to_worker(channel, body)

    def _obey(self, record: dict[str, Any]) -> None:
        operation = record["op"]
        if operation == "configure":
            self._settings, self._environment = record["settings"], record["environment"]
        elif operation == "start":
            if self._worker_session:
                # What the lost worker's code has started, where no snapshot is left to end it.
                end_started_in_session(self._worker_session)
            self._start()
        elif operation == "restore":
            self._restore_snapshot()
        elif operation == "signal" and self._worker:
            _signal(self._worker, record["number"])
        elif operation == "continue":
            self._continue_stopped(record["end"])
        elif operation == "serve_commands":
            self._serve_commands()
        elif operation == "kill_server" and self._server:
            _signal(self._server, signal.SIGKILL)
        elif operation == "hold":
            self._hold(record["on"])
        elif operation == "new_state":
            self._state.begin(record["folder"], record.get("run"))

    def _continue_stopped(self, end: bool) -> None:
        """Continue the worker and the command server where they were stopped."""
        own = {process for process in (self._worker, self._server) if process}
        spare = own if self._snapshot is None else {*own, self._snapshot[1]}
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
            self._become(command_server.run, theirs.detach(), (nothing, nothing))
        theirs.close()
        os.close(nothing)
        ours.setblocking(False)
        self._server, self._server_channel = pid, ours
        self._watch(ours.fileno(), self._on_server_event)
        self._send_control({"op": "serving"})

    def _on_server_event(self, mask: int) -> None:
        channel = self._server_channel
        if channel is not None and mask & selectors.EVENT_WRITE:
            self._write_to_server()
        if channel is None or channel is not self._server_channel or not mask & selectors.EVENT_READ:
            return
        try:
            data = channel.recv(_MAX_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._send(COMMANDS, data)
        else:
            self._drop_server()
            self._send_control({"op": "server_ended"})

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
            self._selector.modify(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, self._on_server_event)
            return
        except OSError:
            return  # it is gone, which its reading end notices
        self._selector.modify(channel, selectors.EVENT_READ, self._on_server_event)

    def _drop_server(self) -> None:
        self._to_server.clear()
        if self._server_channel is not None:
            self._unwatch(self._server_channel.fileno())
            self._server_channel.close()
            self._server_channel = None

    # --- the worker -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Fork the worker. This process has run no code of the session, so each worker begins afresh."""
        ours, theirs = socket.socketpair()
        streams = self._fresh_pipes()
        pid = os.fork()
        if pid == 0:
            self._become(_run_worker, theirs.detach(), streams)
        theirs.close()
        for fd in streams:
            os.close(fd)
        self._worker_session = pid
        self._use_worker(pid, ours)

    def _become(
        self, entry: Callable[[int, int, dict[str, Any]], None], channel: int, streams: tuple[int, ...]
    ) -> NoReturn:
        """In a child: be the worker, or the command server."""
        try:
            reset_signals()
            os.setsid()
            syscalls.set_dumpable(True)
            close_others({channel, *streams})
            set_standard_streams(*streams)
            os.environ.update(self._environment)
            become_killable()
            os.chdir(str(self._settings["home"]))
            gc.collect()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            entry(channel, -1, self._settings)
        except BaseException:  # noqa: BLE001 - shown where the session's output goes
            traceback.print_exc()
        finally:
            os._exit(70)

    def _use_worker(self, pid: int, end: socket.socket) -> None:
        end.setblocking(False)
        self._close_channel()
        self._worker, self._channel, self._broken_reason = pid, Channel(end), ""
        self._watch(end.fileno(), self._on_worker_event)

    def _close_channel(self) -> None:
        self._to_worker = []
        self._passed = 0
        if self._channel is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._channel.socket)
            self._channel.close()
            self._channel = None

    def _restore_snapshot(self) -> None:
        if self._snapshot is None:
            self._send_control({"op": "exited", "status": None, "broke": "there is no snapshot"})
            return
        (channel, *others), pid = self._snapshot
        self._snapshot = None
        for fd in others:
            os.close(fd)
        _signal(pid, signal.SIGCONT)  # It may have been stopped together with the worker.
        self._use_worker(pid, socket.socket(fileno=channel))
        self._pass_to_worker(LINE, b'{"op":"restore"}')

    def _pass_to_worker(self, channel: bytes, body: bytes) -> None:
        fds: tuple[int, ...] = ()
        if channel == FRESH:
            self._discard(list(self._pipes.values()))
            fds = self._fresh_pipes()
        if channel in (RUN, FRESH):
            fds += self._state.of_run()
        elif channel == SAVE:
            fds = self._state.of_save(json.loads(body)["id"])
        if fds:
            body = json.dumps({**json.loads(body), "fds": len(fds)}).encode("ascii")
        if channel in (RUN, FRESH):
            # Output since the last run belongs to no run: the host drops what comes before `listen`.
            self._drain()
            self._killed_before = killed_for_memory()
            self._send_control({"op": "listen"})
        if self._channel is None:
            for fd in fds:
                os.close(fd)
            return
        self._to_worker.append((memoryview(len(body).to_bytes(4, "big") + body), fds))
        if len(self._to_worker) == 1:
            self._write_to_worker()

    def _write_to_worker(self) -> None:
        channel = self._channel
        if channel is None:
            return
        while self._to_worker:
            data, fds = self._to_worker[0]
            try:
                sent = _send_with(channel.socket, data, fds)
            except BlockingIOError:
                self._selector.modify(
                    channel.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self._on_worker_event
                )
                return
            except OSError:
                return  # it is gone, which its reading end notices
            for fd in fds:
                os.close(fd)
            self._count(sent)
            self._to_worker[0] = (data[sent:], ())
            if sent == len(data):
                self._to_worker.pop(0)
        self._selector.modify(channel.socket, selectors.EVENT_READ, self._on_worker_event)

    def _count(self, sent: int) -> None:
        """Report to the host from time to time how much was passed on: it limits what waits here."""
        self._passed += sent
        if self._passed >= _REPORT_AFTER:
            self._send_control({"op": "passed", "bytes": self._passed})
            self._passed = 0

    def _on_worker_event(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write_to_worker()
        if mask & selectors.EVENT_READ and self._channel is not None:
            try:
                self._pass_on(self._channel)
            except (ChannelError, ValueError, OSError) as problem:
                self._end_worker(problem)

    def _pass_on(self, channel: Channel) -> bool:
        """Pass on what the worker has sent by now, its output first; whether there was something."""
        before = channel.received
        bodies = channel.receive_bodies(_HAS_FDS)
        self._drain()
        for body, fds in bodies:
            if body.startswith(b'{"op":"done"'):
                self._state.end_run()
            self._send(LINE, self._without_fds(body, fds) if fds else body)
            if body.startswith(b'{"op":"no_snapshot"'):
                self._drop_snapshot()
        return channel.received > before

    def _without_fds(self, body: bytes, fds: list[int]) -> bytes:
        """Descriptors stay here: a snapshot's own channel, or pipes that no command reads any more."""
        record = json.loads(body)
        record.pop("fds", None)
        if record.get("op") == "snapshot":
            pid = record.get("pid")
            if type(pid) is not int or not 1 < pid < _MAX_PID:
                raise ChannelError(f"a snapshot whose process is {str(pid)[:100]}")
            self._drop_snapshot()
            self._snapshot = fds, pid
        else:
            self._discard(fds)
        return json.dumps(record).encode("ascii")

    def _drop_snapshot(self) -> None:
        if self._snapshot is not None:
            for fd in self._snapshot[0]:
                os.close(fd)
            self._snapshot = None

    def _end_worker(self, problem: Exception) -> None:
        """Its channel was closed or is broken; either way the worker is ended."""
        if not isinstance(problem, ChannelClosed):
            self._broken_reason = self._broken_reason or str(problem)
        if self._channel is not None:
            self._selector.unregister(self._channel.socket)
        try:
            os.kill(self._worker, signal.SIGKILL)
        except ProcessLookupError:
            self._exited(None)

    def _reap(self, mask: int) -> None:
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

    def _exited(self, status: int | None) -> None:
        """Pass on all that it sent and wrote before it exited, then report its end."""
        channel, self._worker = self._channel, 0
        with contextlib.suppress(ChannelError, ValueError, OSError):
            # At most one record: a child of the worker may have kept the channel, and write for ever.
            end = channel.received + MAX_RECORD if channel is not None else 0
            while channel is not None and channel.received <= end and self._pass_on(channel):
                continue
        self._drain()
        self._close_channel()
        out_of_memory = killed_for_memory() > self._killed_before
        self._send_control(
            {"op": "exited", "status": status, "broke": self._broken_reason, "out_of_memory": out_of_memory}
        )

    # --- output -----------------------------------------------------------------------------------------------------

    def _fresh_pipes(self) -> tuple[int, ...]:
        """Replace the pair of pipes, which the caller has taken care of; returns the write ends."""
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
        """Stop reading while the host's reader is slow: the code then waits as soon as its pipe is full."""
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
        """Send what is in the pipes now, and no more: a program in the background may write for ever."""
        for channel, fd in self._pipes.items():
            left = int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)
            while left > 0:
                data = _read(fd, min(left, _MAX_READ))
                if not data:
                    break
                left -= len(data)
                self._send(channel, data)

    def _discard(self, fds: list[int]) -> None:
        """Read from these pipes and drop it, so that no writer has to wait."""
        for fd in fds:
            self._unwatch(fd)
            try:
                os.set_blocking(fd, False)
                self._watch(fd, lambda mask, fd=fd: self._drop(fd))  # type: ignore[misc]
            except OSError:
                os.close(fd)
                continue
            self._discarded.append(fd)
        while len(self._discarded) > _MAX_DISCARDED:
            self._forget(self._discarded[0])

    def _drop(self, fd: int) -> None:
        if _read(fd) == b"":
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        self._discarded.remove(fd)
        self._unwatch(fd)
        os.close(fd)


def _run_worker(channel: int, init: int, settings: dict[str, Any]) -> None:
    """Load the worker's modules in its own process, while this one goes on: the first command does not need them."""
    importlib.import_module(".main", __package__).run(channel, init, settings)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _send_with(end: socket.socket, data: memoryview, fds: tuple[int, ...]) -> int:
    if not fds:
        return end.send(data)
    rights = struct.pack(f"{len(fds)}i", *fds)
    return end.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def _read(fd: int, most: int = _MAX_READ) -> bytes | None:
    """What is there; empty at the end, and None when nothing has come."""
    try:
        return os.read(fd, most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _ignore(number: int, frame: object) -> None:
    """Only the wake-up pipe matters; without a handler the signal would not reach it."""


def serve_container() -> None:
    """Be the first process of a container; never returns."""
    set_title()
    syscalls.set_dumpable(False)
    os.umask(0o022)
    ContainerInit().serve()
