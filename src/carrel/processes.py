"""Runs programs on the host: never a shell, bounded output, and the whole process tree ends with the program."""

import asyncio
import codecs
import contextvars
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from carrel.guest.worker.commands import STDOUT, Command, CommandEnd

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


class BoundedOutput:
    """Output of any length in bounded memory: the beginning and the end are kept, with a mark between them."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._head_room = max(limit // 2, 1)
        self._tail_room = max(limit - self._head_room, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        space = self._head_room - len(self._head)
        if space > 0:
            self._head += data[:space]
            data = data[space:]
        self._tail += data
        # Shortened rarely, because moving the tail for each piece would take quadratic time.
        if len(self._tail) > 2 * self._tail_room:
            del self._tail[: -self._tail_room]

    @property
    def left_out(self) -> int:
        """How many bytes are not kept."""
        return max(0, self.total - len(self._head) - self._tail_room)

    @property
    def head(self) -> bytes:
        """All of it, or the part before the gap."""
        return bytes(self._head) if self.left_out else bytes(self._head + self._tail)

    @property
    def tail(self) -> bytes:
        """The part after the gap, if there is one."""
        return bytes(self._tail[-self._tail_room :]) if self.left_out else b""

    def end(self, limit: int) -> tuple[bytes, bool]:
        """Return the last bytes, at most `limit` and half of what is kept, and whether there were more."""
        kept = self.tail or self.head
        return kept[-limit:], self.total > min(limit, len(kept))

    def content(self) -> bytes:
        """All of it, or with a mark at the gap; no character of UTF-8 is cut in two there."""
        if not self.left_out:
            return self.head
        head = self._head[: _last_boundary(self._head)]
        tail = self.tail[_first_boundary(self.tail) :]
        return bytes(head) + gap(self.total - len(head) - len(tail)) + tail

    def text(self) -> str:
        return self.content().decode("utf-8", "replace")


def _first_boundary(data: bytes) -> int:
    """Where the first whole character of UTF-8 begins."""
    for number, byte in enumerate(data[:4]):
        if byte & 0xC0 != 0x80:
            return number
    return 0


def _last_boundary(data: bytearray) -> int:
    """Where the last whole character of UTF-8 ends."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return len(data) if length <= back else len(data) - back
    return len(data)


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


_KEPT_STDERR = 32 * 1024
"""Much more than is shown, so that secrets are redacted before it is shortened."""
_WINDOW = 1024 * 1024
"""Bytes of output that may wait to be taken by the event loop."""
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
        self._stdout, self._stderr = BoundedOutput(), BoundedOutput(2 * _KEPT_STDERR)
        self._on_output = on_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if stream == "stderr":
            self._stderr.add(data)
        else:
            self._stdout.add(data)
            self._pass_on(self._decoder.decode(data))

    def _pass_on(self, text: str) -> None:
        if text and self._on_output is not None:
            self._on_output(text)

    def result(self, exit_code: int, *, timed_out: bool) -> ProcessResult:
        """Return the result; nothing more comes."""
        self._pass_on(self._decoder.decode(b"", final=True))
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
    loop = asyncio.get_running_loop()
    output = ProcessOutput(on_output)

    def take(stream: int, data: bytes) -> None:
        output.add("stdout" if stream == STDOUT else "stderr", data)
        command.grant(len(data))

    def take_in_loop(stream: int, data: bytes) -> None:
        loop.call_soon_threadsafe(take, stream, data)

    command = Command(
        list(argv),
        take_in_loop,
        cwd=os.path.expanduser(cwd or "."),
        env=child_environment(env),
        stdin=stdin is not None,
        output_window=_WINDOW,
        keep_background=False,
    )
    command.start()
    if stdin is not None:
        command.feed(stdin)
        command.feed(b"")
    running = asyncio.ensure_future(run_in_thread(lambda: _run(command)))
    try:
        timed_out = not (await asyncio.wait([running], timeout=timeout))[0]
    finally:
        if not running.done():
            command.terminate()
            await asyncio.wait([running], timeout=_GRACE)
            command.cancel()
            await asyncio.wait([running], timeout=_KILL_WAIT)
    return output.result(running.result().exit_code if running.done() else 128 + signal.SIGKILL, timed_out=timed_out)


def _run(command: Command) -> CommandEnd:
    try:
        return command.run()
    finally:
        command.close()
