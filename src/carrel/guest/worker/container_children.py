"""The processes that the first process of a container forks: the worker, and one that unpacks files of the host."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import shutil
import signal
import tarfile
import traceback
from collections.abc import Callable
from typing import Any

from .. import syscalls


def _reset_signals() -> None:
    """In a child: handle signals as a program does at its start."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def become_worker(
    entry: Callable[[int, int, dict[str, Any]], None],
    channel: int,
    streams: tuple[int, ...],
    environment: dict[str, str],
    settings: dict[str, Any],
) -> None:
    """Call the entry of the worker, or of the command server, as the session's process; never returns."""
    try:
        _reset_signals()
        os.setsid()
        syscalls.set_dumpable(True)
        nothing = os.open("/dev/null", os.O_RDONLY)
        for source, number in ((nothing, 0), (streams[0], 1), (streams[1], 2)):
            os.dup2(source, number)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != channel:
                with contextlib.suppress(OSError):  # the descriptor of the listing
                    os.close(int(name))
        os.environ.update(environment)
        os.umask(0o022)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("500")  # When memory runs out, the session's own processes go before this one.
        os.chdir(str(settings["home"]))
        gc.collect()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    except BaseException:  # noqa: BLE001 - shown where the session's output goes; then it exits
        traceback.print_exc()
        os._exit(70)
    entry(channel, -1, settings)


def _become_unpacker(source: int, at: str, remove: list[str]) -> None:
    """In a child of the first process: unpack an archive from a pipe, and exit."""
    code = 1
    try:
        _reset_signals()
        os.makedirs(at, exist_ok=True)
        for name in remove:
            path = os.path.join(at, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)
        with open(source, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
            # The host's archives are trusted; older Pythons have no parameter for that.
            trusted: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(at, **trusted)
        code = 0
    except BaseException:  # noqa: BLE001 - the host reads the container's standard error
        traceback.print_exc()
    finally:
        os._exit(code)


class Unpacker:
    """Unpacks an archive of the host that comes in pieces, in a child process; calls `on_exit` with its status."""

    def __init__(self, selector: selectors.BaseSelector, on_exit: Callable[[int], None]) -> None:
        self._selector, self._on_exit = selector, on_exit
        self._pid = 0
        self._pipe = -1
        self._archive: list[memoryview] = []

    def begin(self, at: str, remove: list[str]) -> None:
        """Unpack the archive that follows into a folder, and remove these names first; give up an unfinished one."""
        self._end()
        read, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._pipe)
            _become_unpacker(read, at, remove)
        os.close(read)

    def take(self, data: bytes) -> None:
        """Add a piece without waiting: code could stop the child."""
        if self._pipe >= 0:
            self._archive.append(memoryview(data))
            if len(self._archive) == 1:
                self._write(0)

    def _write(self, mask: int) -> None:
        self._unwatch()
        try:
            while self._archive:
                if not self._archive[0]:
                    self._close()
                    return
                left = self._archive[0][os.write(self._pipe, self._archive[0]) :]
                self._archive[0] = left
                if not left:
                    self._archive.pop(0)
        except BlockingIOError:
            self._selector.register(self._pipe, selectors.EVENT_WRITE, self._write)
        except BrokenPipeError:
            self._close()  # `on_exit` is called when it has exited.

    def _close(self) -> None:
        self._archive = []
        if self._pipe >= 0:
            self._unwatch()
            os.close(self._pipe)
            self._pipe = -1

    def _end(self) -> None:
        self._close()
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._pid = 0

    def reaped(self, pid: int, status: int) -> None:
        """A child has exited: perhaps this one."""
        if pid == self._pid:
            self._pid = 0
            self._close()
            self._on_exit(status)

    def _unwatch(self) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._pipe)
