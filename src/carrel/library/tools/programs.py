"""Runs a program on the host: never a shell, its output bounded, and all it started gone when it ends or time is up."""

import asyncio
import codecs
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from carrel.library.tools.bounded import Bounded
from carrel.library.tools.seam import Stream
from carrel.library.tools.surroundings import surroundings

_PIECE = 256 * 1024
_LAST_PIECES = 8
"""As many as fill the largest pipe, and one more."""
_KEPT_STDERR = 32 * 1024
"""Much more than is shown of it: what is secret in it has to be found before it is cut to that."""
_GRACE = 0.3
"""Seconds between asking a program to end and ending it."""
_DYING = 5.0
"""Seconds to wait for one that was killed; more only where the kernel is stuck in it."""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    exit_code: int
    """As a shell tells it: 128 and the signal's number for one that was killed."""
    stdout: bytes
    """All of it; of very much, the beginning."""
    stderr: str
    """The end of it; what is no UTF-8 is escaped (surrogateescape)."""
    left_out: int = 0
    """Bytes of stdout that were not kept."""
    timed_out: bool = False
    stdout_end: bytes = b""
    """What came after those."""
    stderr_cut: bool = False
    """Whether there was more of it before."""


class Written:
    """What a program writes, as it comes: bounded, and told to whoever wants its output meanwhile."""

    def __init__(self, stream: Stream | None = None) -> None:
        self._stdout, self._stderr = Bounded(), Bounded(2 * _KEPT_STDERR)
        self._say = _Decoded(stream) if stream is not None else None

    def add(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        (self.add_stdout if stream == "stdout" else self.add_stderr)(data)

    def add_stdout(self, data: bytes) -> None:
        self._stdout.add(data)
        if self._say is not None:
            self._say(data)

    def add_stderr(self, data: bytes) -> None:
        self._stderr.add(data)

    def ended(self, exit_code: int, *, timed_out: bool) -> Ended:
        """It is over; nothing more comes."""
        if self._say is not None:
            self._say.end()
        stderr, cut = self._stderr.end(_KEPT_STDERR)
        out = self._stdout
        said = stderr.decode("utf-8", "surrogateescape")
        return Ended(exit_code, out.head, said, out.left_out, timed_out, out.tail, cut)


class Runner(Protocol):
    """Runs a program somewhere. `OSError` when it cannot be started; on a timeout, all it started is gone."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        stream: Stream | None = None,
    ) -> Awaitable[Ended]: ...


async def run_here(
    argv: Sequence[str],
    *,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout: float | None = None,
    stream: Stream | None = None,
) -> Ended:
    """On this machine, as this user; it gets `env` and the little that every program does. Cancelling ends it."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=surroundings(env),
        cwd=os.path.expanduser(cwd) if cwd else None,
        bufsize=0,
        start_new_session=True,
    )
    try:
        running = _Running(process, stdin or b"", stream)
    except OSError:
        # No more descriptors: nobody could tell when it ends, so it does so now.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    try:
        return await running.ended(timeout)
    finally:
        await running.gone()


class _Running:
    """One program under way, watched by the loop."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, stream: Stream | None) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._watched = os.pidfd_open(process.pid)
        self._input = memoryview(stdin)
        self._written = Written(stream)
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._pipes: dict[int, Callable[[bytes], None]] = {}
        for pipe, take in ((process.stdout, self._written.add_stdout), (process.stderr, self._written.add_stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe.fileno()] = take
            self._loop.add_reader(pipe.fileno(), self._readable, pipe.fileno())
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self._loop.add_writer(process.stdin.fileno(), self._writable)
        self._loop.add_reader(self._watched, self._exited)

    async def ended(self, timeout: float | None) -> Ended:
        # Waited for from beside: whoever is cancelled while awaiting a future itself takes it along.
        timed_out = not await self._finished_within(timeout)
        await self.gone()
        code = self._process.returncode
        return self._written.ended(128 - code if code is not None and code < 0 else code or 0, timed_out=timed_out)

    async def gone(self) -> None:
        """End it and its process group, wait until it is, and let go of everything; twice is harmless."""
        if self._watched < 0:
            return
        try:
            if not self._finished.done():
                self._signal(signal.SIGTERM)
                await self._finished_within(_GRACE)
            # Also after a program that ended by itself: what it left in its group belongs to nobody.
            self._signal(signal.SIGKILL)
            await self._finished_within(_DYING)
        finally:
            self._let_go()

    async def _finished_within(self, seconds: float | None) -> bool:
        if not self._finished.done():
            await asyncio.wait([self._finished], timeout=seconds)
        return self._finished.done()

    def _let_go(self) -> None:
        if self._watched < 0:
            return
        # The group's number cannot be another's yet, because its leader has not been waited for.
        self._signal(signal.SIGKILL)
        self._loop.remove_reader(self._watched)
        os.close(self._watched)
        self._watched = -1
        for fd in list(self._pipes):
            self._drop(fd)
        self._close_input()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        if self._process.poll() is None:
            # One that the kernel cannot end yet: somebody has to wait for it, but not the loop.
            threading.Thread(target=self._process.wait, daemon=True).start()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    # --- what happens -----------------------------------------------------------------------------------------------

    def _readable(self, fd: int) -> bool:
        """One piece; False when there is none now."""
        try:
            data = os.read(fd, _PIECE)
        except BlockingIOError:
            return False
        if data:
            self._pipes[fd](data)
            return True
        self._drop(fd)
        return False

    def _drop(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._pipes.pop(fd, None)

    def _writable(self) -> None:
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        try:
            self._input = self._input[os.write(pipe.fileno(), self._input[:_PIECE]) :]
        except BlockingIOError:
            return
        except OSError:
            self._input = self._input[:0]  # it does not want to read more
        if not self._input:
            self._close_input()

    def _close_input(self) -> None:
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            self._loop.remove_writer(pipe.fileno())
            pipe.close()

    def _exited(self) -> None:
        # What it has written is in the pipes by now; what its children may go on writing is not its answer.
        for fd in list(self._pipes):
            for _ in range(_LAST_PIECES):
                if fd not in self._pipes or not self._readable(fd):
                    break
        self._loop.remove_reader(self._watched)
        if not self._finished.done():
            self._finished.set_result(None)


class _Decoded:
    """Bytes in pieces as text in pieces."""

    def __init__(self, say: Stream) -> None:
        self._say = say
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, data: bytes) -> None:
        text = self._decoder.decode(data)
        if text:
            self._say(text)

    def end(self) -> None:
        text = self._decoder.decode(b"", final=True)
        if text:
            self._say(text)
