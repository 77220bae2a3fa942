"""Runs programs on the host: never a shell, bounded output, and the whole process tree ends with the program."""

import asyncio
import codecs
import contextlib
import contextvars
import os
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

OnOutput = Callable[[str], None]
"""Called with each piece of output as it comes."""

INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The few variables that every program gets, and what its definition adds."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(more or {})


Result = TypeVar("Result")


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a thread of its own; if the caller is cancelled, the thread goes on."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()

    def set_result(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as stopped:
            # A future cannot hold it.
            error = RuntimeError(f"the function raised {stopped!r}")
        except BaseException as raised:  # noqa: BLE001 -- the caller gets whatever it raises
            error = raised
        try:
            loop.call_soon_threadsafe(set_result, result, error)
        except RuntimeError:
            return  # the loop is closed

    # Not in the loop's pool: it has few threads, and one that hangs keeps the program from ending.
    threading.Thread(target=run, name="carrel-tool", daemon=True).start()
    return await future


LIMIT = 10 * 1024 * 1024


class BoundedBytes:
    """Output of any length in bounded memory: the beginning and the end are kept."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._room = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        space = self._room - len(self._head)
        if space > 0:
            self._head += data[:space]
            data = data[space:]
        self._tail += data
        # Shortened rarely, because moving the tail for each piece would take quadratic time.
        if len(self._tail) > 2 * self._room:
            del self._tail[: -self._room]

    @property
    def left_out(self) -> int:
        """How many bytes are not kept."""
        return max(0, self.total - len(self._head) - self._room)

    @property
    def head(self) -> bytes:
        """All of it, or the part before the gap."""
        return bytes(self._head) if self.left_out else bytes(self._head + self._tail)

    @property
    def tail(self) -> bytes:
        """The part after the gap, if there is one."""
        return bytes(self._tail[-self._room :]) if self.left_out else b""

    def end(self, limit: int) -> tuple[bytes, bool]:
        """Return the last bytes, at most `limit` and half of what is kept, and whether there were more."""
        kept = self.tail or self.head
        return kept[-limit:], self.total > min(limit, len(kept))


def gap(left_out: int) -> bytes:
    """Return the text that replaces bytes that were not kept."""
    return f"\n[… {left_out:,} bytes left out …]\n".encode()


def last_lines(text: str, limit: int, *, cut: bool) -> str:
    """Return the last `limit` characters, from the beginning of a line if possible; `cut`: there was more before."""
    text = text.strip()
    if len(text) > limit:
        text, cut = text[-limit:], True
        text = text[text.find("\n") + 1 :]
    return f"…{text}" if cut else text


MARK = "CARREL_STARTED_FOR"
_PROC = Path("/proc")


def kill_marked_processes(mark: str) -> int:
    """Kill all processes with the mark in their environment, until there are none; return how many there were.

    A process that was started without the mark, or belongs to another user, is not found."""
    ended: set[int] = set()
    for _ in range(10):
        found = set()
        for pid in _marked(mark):
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    # Checked again, now that the number cannot be reused.
                    if _has(pid, mark):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                        found.add(pid)
                finally:
                    os.close(handle)
        if not found - ended:
            break
        ended |= found
    return len(ended)


def _marked(mark: str) -> Iterator[int]:
    if not _PROC.is_dir():
        return
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and _has(int(entry.name), mark):
            yield int(entry.name)


def _has(pid: int, mark: str) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        # It has ended, or belongs to another user.
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


_PIECE = 256 * 1024
_LAST_PIECES = 8
"""Enough to read a full pipe."""
_KEPT_STDERR = 32 * 1024
"""Much more than is shown, so that secrets are redacted before it is shortened."""
_GRACE = 0.3
"""Seconds between SIGTERM and SIGKILL."""
_KILL_WAIT = 5.0
"""Seconds to wait for a killed program; longer only if it hangs in the kernel."""


@dataclass(frozen=True)
class ProcessResult:
    """How a program ended."""

    exit_code: int
    """As in a shell: 128 plus the number of the signal that killed it."""
    stdout: bytes
    """All of it, or the beginning of very long output."""
    stderr: str
    """The end of it; bytes that are not UTF-8 are escaped (surrogateescape)."""
    left_out: int = 0
    """Bytes of stdout that were not kept."""
    timed_out: bool = False
    stdout_end: bytes = b""
    """The output after those."""
    stderr_cut: bool = False
    """Whether there was more before it."""


class ProcessOutput:
    """Collects what a program writes, bounded, and passes its standard output on as it comes."""

    def __init__(self, on_output: OnOutput | None = None) -> None:
        self._stdout, self._stderr = BoundedBytes(), BoundedBytes(2 * _KEPT_STDERR)
        self._decoder = _TextStream(on_output) if on_output is not None else None

    def add(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        (self.add_stdout if stream == "stdout" else self.add_stderr)(data)

    def add_stdout(self, data: bytes) -> None:
        self._stdout.add(data)
        if self._decoder is not None:
            self._decoder(data)

    def add_stderr(self, data: bytes) -> None:
        self._stderr.add(data)

    def result(self, exit_code: int, *, timed_out: bool) -> ProcessResult:
        """Return the result; nothing more comes."""
        if self._decoder is not None:
            self._decoder.end()
        stderr, cut = self._stderr.end(_KEPT_STDERR)
        out, text = self._stdout, stderr.decode("utf-8", "surrogateescape")
        return ProcessResult(exit_code, out.head, text, out.left_out, timed_out, out.tail, cut)


class Runner(Protocol):
    """Runs a program. `OSError` when it cannot be started; on a timeout, all its processes are ended."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        on_output: OnOutput | None = None,
    ) -> Awaitable[ProcessResult]: ...


async def run_on_host(
    argv: Sequence[str],
    *,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout: float | None = None,
    on_output: OnOutput | None = None,
) -> ProcessResult:
    """Run a program on this machine as this user, with `env` and few other variables. Cancelling ends it."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(env),
        cwd=os.path.expanduser(cwd) if cwd else None,
        bufsize=0,
        start_new_session=True,
    )
    try:
        running = _Process(process, stdin or b"", on_output)
    except OSError:
        # There are no more file descriptors, so it could not be watched.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    try:
        return await running.wait(timeout)
    finally:
        await running.end()


class _Process:
    """A running program, watched by the event loop."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, on_output: OnOutput | None) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(process.pid)
        self._input = memoryview(stdin)
        self._output = ProcessOutput(on_output)
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._pipes: dict[int, Callable[[bytes], None]] = {}
        for pipe, take in ((process.stdout, self._output.add_stdout), (process.stderr, self._output.add_stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe.fileno()] = take
            self._loop.add_reader(pipe.fileno(), self._readable, pipe.fileno())
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self._loop.add_writer(process.stdin.fileno(), self._writable)
        self._loop.add_reader(self._pidfd, self._exited)

    async def wait(self, timeout: float | None) -> ProcessResult:
        timed_out = not await self._finished_within(timeout)
        await self.end()
        code = self._process.returncode
        return self._output.result(128 - code if code is not None and code < 0 else code or 0, timed_out=timed_out)

    async def end(self) -> None:
        """End the program and its process group, and release all resources; calling it twice has no effect."""
        if self._pidfd < 0:
            return
        try:
            if not self._finished.done():
                self._signal(signal.SIGTERM)
                await self._finished_within(_GRACE)
            # Also after a program that ended by itself: it may have left processes in its group.
            self._signal(signal.SIGKILL)
            await self._finished_within(_KILL_WAIT)
        finally:
            self._release()

    async def _finished_within(self, seconds: float | None) -> bool:
        if not self._finished.done():
            await asyncio.wait([self._finished], timeout=seconds)
        return self._finished.done()

    def _release(self) -> None:
        if self._pidfd < 0:
            return
        # The number of the group cannot be reused yet, because its leader has not been waited for.
        self._signal(signal.SIGKILL)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        for fd in list(self._pipes):
            self._drop(fd)
        self._close_input()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        if self._process.poll() is None:
            # It hangs in the kernel; a thread waits for it, not the loop.
            threading.Thread(target=self._process.wait, daemon=True).start()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    # --- callbacks of the loop --------------------------------------------------------------------------------------

    def _readable(self, fd: int) -> bool:
        """Read one piece; False when there is none now."""
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
            self._input = self._input[:0]  # it has closed its standard input
        if not self._input:
            self._close_input()

    def _close_input(self) -> None:
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            self._loop.remove_writer(pipe.fileno())
            pipe.close()

    def _exited(self) -> None:
        # What it has written is in the pipes; what its children may still write is not part of the result.
        for fd in list(self._pipes):
            for _ in range(_LAST_PIECES):
                if fd not in self._pipes or not self._readable(fd):
                    break
        self._loop.remove_reader(self._pidfd)
        if not self._finished.done():
            self._finished.set_result(None)


class _TextStream:
    """Decodes pieces of bytes and passes them on as text."""

    def __init__(self, on_output: OnOutput) -> None:
        self._on_output = on_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, data: bytes) -> None:
        text = self._decoder.decode(data)
        if text:
            self._on_output(text)

    def end(self) -> None:
        text = self._decoder.decode(b"", final=True)
        if text:
            self._on_output(text)
