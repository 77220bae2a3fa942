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
    """What the function returns or raises. Cancelling the caller lets the thread go on, for nobody."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, problem: BaseException | None) -> None:
        if answered.done():
            return
        if problem is None:
            answered.set_result(result)
        else:
            answered.set_exception(problem)

    def run() -> None:
        result: Any = None
        problem: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as stopped:
            # A future refuses it, because through an await it would mean something else.
            problem = RuntimeError(f"the function raised {stopped!r}")
        except BaseException as raised:  # noqa: BLE001 -- whatever it raises is for whoever waits
            problem = raised
        try:
            loop.call_soon_threadsafe(settle, result, problem)
        except RuntimeError:
            return  # the loop is closed, so nobody waits

    # Not the loop's own pool: that has few threads, and one that hangs in it keeps the program from ending.
    threading.Thread(target=run, name="carrel-tool", daemon=True).start()
    return await answered


LIMIT = 10 * 1024 * 1024


class BoundedBytes:
    """Takes bytes of any amount in flat memory."""

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
        # Cut seldom: moving the tail for each piece would cost the square of what is written.
        if len(self._tail) > 2 * self._room:
            del self._tail[: -self._room]

    @property
    def left_out(self) -> int:
        """How many bytes are not kept."""
        return max(0, self.total - len(self._head) - self._room)

    @property
    def head(self) -> bytes:
        """All of it, or what came before the gap."""
        return bytes(self._head) if self.left_out else bytes(self._head + self._tail)

    @property
    def tail(self) -> bytes:
        """What came after the gap, where there is one."""
        return bytes(self._tail[-self._room :]) if self.left_out else b""

    def end(self, limit: int) -> tuple[bytes, bool]:
        """The last bytes, at most `limit` and half of what is kept; and whether there were others before them."""
        kept = self.tail or self.head
        return kept[-limit:], self.total > min(limit, len(kept))


def gap(left_out: int) -> bytes:
    """What stands in the place of what was not kept."""
    return f"\n[… {left_out:,} bytes left out …]\n".encode()


def last_lines(text: str, limit: int, *, cut: bool) -> str:
    """The last `limit` characters, from the beginning of a line where one begins there; `cut`: more stood before."""
    text = text.strip()
    if len(text) > limit:
        text, cut = text[-limit:], True
        text = text[text.find("\n") + 1 :]
    return f"…{text}" if cut else text


MARK = "CARREL_STARTED_FOR"
_PROC = Path("/proc")


def kill_marked_processes(mark: str) -> int:
    """Kill all that have the mark, until there are none; how many there were.

    One that takes the mark out of its environment when it starts another program, or belongs to another user, is not
    found."""
    ended: set[int] = set()
    for _ in range(10):
        found = set()
        for pid in _marked(mark):
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    # Again, now that the number cannot become another's.
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
        # Gone meanwhile, or somebody else's.
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


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
class ProcessResult:
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


class ProcessOutput:
    """What a program writes, as it comes: bounded, and told to whoever wants its output meanwhile."""

    def __init__(self, stream: OnOutput | None = None) -> None:
        self._stdout, self._stderr = BoundedBytes(), BoundedBytes(2 * _KEPT_STDERR)
        self._say = _Decoded(stream) if stream is not None else None

    def add(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        (self.add_stdout if stream == "stdout" else self.add_stderr)(data)

    def add_stdout(self, data: bytes) -> None:
        self._stdout.add(data)
        if self._say is not None:
            self._say(data)

    def add_stderr(self, data: bytes) -> None:
        self._stderr.add(data)

    def ended(self, exit_code: int, *, timed_out: bool) -> ProcessResult:
        """It is over; nothing more comes."""
        if self._say is not None:
            self._say.end()
        stderr, cut = self._stderr.end(_KEPT_STDERR)
        out = self._stdout
        said = stderr.decode("utf-8", "surrogateescape")
        return ProcessResult(exit_code, out.head, said, out.left_out, timed_out, out.tail, cut)


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
        stream: OnOutput | None = None,
    ) -> Awaitable[ProcessResult]: ...


async def run_on_host(
    argv: Sequence[str],
    *,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout: float | None = None,
    stream: OnOutput | None = None,
) -> ProcessResult:
    """On this machine, as this user; it gets `env` and the little that every program does. Cancelling ends it."""
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

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, stream: OnOutput | None) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._watched = os.pidfd_open(process.pid)
        self._input = memoryview(stdin)
        self._written = ProcessOutput(stream)
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

    async def ended(self, timeout: float | None) -> ProcessResult:
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

    def __init__(self, say: OnOutput) -> None:
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
