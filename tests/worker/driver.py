"""A host that is as small as it can be: starts a real worker without a sandbox, and talks to it."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from carrel.guest.channel import Channel, ChannelError, Record
from carrel.guest.worker import values
from tests.support.preloaded_python import ForkServer

GUEST = Path(__file__).parents[2] / "src" / "carrel" / "guest"
START = Path(__file__).parent / "program" / "start.py"
PATIENCE = 60.0

Handler = Callable[[str, list[Any], dict[str, Any]], Any]


class Gone(Exception):
    """The worker ended, or broke its line."""


class HostError(Exception):
    """What a handler of the host raises, for the code inside."""

    def __init__(self, kind: str, message: str, also: tuple[str, ...] = (), **attributes: Any) -> None:
        super().__init__(message)
        self.record = {
            "type": kind, "message": message, "also": list(also), "attributes": values.encode(attributes)
        }  # fmt: skip


class Pipe:
    """What comes out of one of the worker's pipes, read all the time by a thread, as the host's loop would."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self._data = bytearray()
        self._lock = threading.Lock()
        self._ended = False
        self.total = 0
        os.set_blocking(self.read_end, False)
        self.thread = threading.Thread(target=self._drain, daemon=True)
        self.thread.start()

    def _drain(self) -> None:
        while not self._ended:
            select.select([self.read_end], [], [])
            with self._lock:
                self._read()

    def _read(self) -> bool:
        """One piece; False when there is none now."""
        try:
            piece = os.read(self.read_end, 1 << 20)
        except BlockingIOError:
            return False
        self._ended = not piece
        self.total += len(piece)
        self._data += piece[: max(0, (16 << 20) - len(self._data))]
        return bool(piece)

    def take(self) -> str:
        """Everything until now; the pipe is empty then."""
        with self._lock:
            while self._read():
                pass
            data, self._data = bytes(self._data), bytearray()
        return data.decode(errors="replace")

    def close(self) -> None:
        self.thread.join(PATIENCE)
        os.close(self.read_end)


class Outcome:
    """A result, and the output that came with it."""

    def __init__(self, record: Record, stdout: str, stderr: str) -> None:
        self.record, self.stdout, self.stderr = record, stdout, stderr
        self.error: str | None = record.get("error")
        self.error_type: str | None = record.get("error_type")
        self.display: list[dict[str, Any]] = record.get("display", [])

    @property
    def value(self) -> Any:
        assert self.error is None, self.error
        return values.decode(self.record.get("value"))


@functools.cache
def forks(python: str) -> ForkServer:
    return ForkServer([python, "-I", START, GUEST], env={"PATH": os.environ["PATH"]})


class Session:
    """One worker and its host; a `fresh` one has all from this very process that a child has of its parent."""

    def __init__(
        self, python: str = sys.executable, home: str | None = None, *, fresh: bool = False, **settings: Any
    ) -> None:
        self._folder = tempfile.TemporaryDirectory() if home is None else None
        self.home = home or self._folder.name  # type: ignore[union-attr]
        self.answer: Handler = lambda name, args, kwargs: [name, args, kwargs]
        self.stdout, self.stderr = Pipe(), Pipe()
        self._old_pipes: list[Pipe] = []
        self.snapshot: list[int] = []
        self.why_not: str | None = None
        self.records: list[Record] = []
        self.left_open: list[int] = []
        self._number = 0
        self._last_run: int | None = None
        self._closed = False
        self._sender = ThreadPoolExecutor(1)
        self._pidfds: list[int] = []
        here, there = socket.socketpair()
        settings = {"home": self.home, "names": ["tools"], **settings}
        self._forks = (
            ForkServer([python, "-I", START, GUEST], env={"PATH": os.environ["PATH"]}) if fresh else forks(python)
        )
        self.process = self._forks.start(
            ["main", json.dumps(settings)],
            {"PATH": os.environ["PATH"], "HOME": self.home, "MPLCONFIGDIR": self.home},
            Path(self.home),
            stdout=self.stdout.write_end,
            stderr=self.stderr.write_end,
            session=True,
            more=[there.fileno()],
        )
        self._fresh = fresh
        there.close()
        os.close(self.stdout.write_end)
        os.close(self.stderr.write_end)
        self._meet(here)

    def _meet(self, end: socket.socket) -> None:
        end.settimeout(PATIENCE)
        self.line = Channel(end)
        self.ready = self.until(lambda record: record.get("op") == "ready")
        self.pid: int = self.ready["pid"]

    # --- records ----------------------------------------------------------------------------------------------------

    def ask(self, fds: tuple[int, ...] = (), **request: Any) -> int:
        """Send a request; its number."""
        self._number += 1
        if request.get("op") == "run":
            self._last_run = self._number
        try:
            self.line.send({"id": self._number, **request}, fds)
        except ChannelError as problem:
            raise Gone(str(problem)) from None
        return self._number

    def until(self, wanted: Callable[[Record], bool]) -> Record:
        """Read on, answering calls, until a record is the one."""
        while True:
            try:
                record, fds = self.line.read()
            except ChannelError as problem:
                raise Gone(f"{problem}; stderr: {self.stderr.take()}") from None
            self._heard(record, fds)
            if wanted(record):
                return record

    def _heard(self, record: Record, fds: list[int]) -> None:
        kind = record.get("op")
        self.records.append(record)
        if kind == "snapshot":
            self._drop_snapshot()
            self.snapshot, self.why_not = fds, None
        elif kind == "no_snapshot":
            self._drop_snapshot()
            self.why_not = record["why"]
        elif kind == "call":
            self._called(record)
        else:
            self.left_open += fds

    def _called(self, record: Record) -> None:
        given = values.decode(record["arguments"])
        answer: Record = {"op": "answer", "call": record["call"]}
        try:
            value = self.answer(record["name"], given["args"], given["kwargs"])
            if value is NotImplemented:
                return
            answer["value"] = values.encode(value)
        except HostError as problem:
            answer["error"] = problem.record
        # Beside the reading: two who only write to each other would wait forever.
        self._sender.submit(self.line.send, answer)

    def result(self, number: int) -> Record:
        return self.until(lambda record: record.get("op") == "done" and record.get("id") == number)

    def request(self, **request: Any) -> Record:
        return self.result(self.ask(**request))

    # --- code -------------------------------------------------------------------------------------------------------

    def run(self, code: str) -> Outcome:
        self.stdout.take()
        self.stderr.take()
        return self.ran(self.ask(op="run", code=code))

    def run_apart(self, code: str) -> Outcome:
        """Run with fresh pipes; what comes through the old ones is dropped."""
        self._old_pipes += [self.stdout, self.stderr]
        self.stdout, self.stderr = Pipe(), Pipe()
        ends = (self.stdout.write_end, self.stderr.write_end)
        number = self.ask(ends, op="run", code=code)
        for end in ends:
            os.close(end)
        return self.ran(number)

    def ran(self, number: int) -> Outcome:
        record = self.result(number)
        return Outcome(record, self.stdout.take(), self.stderr.take())

    def value(self, code: str) -> Any:
        return self.run(code).value

    def interrupted(self, code: str, after: str = "go") -> Outcome:
        """Run code, and interrupt it again and again once it has printed a word."""
        self.stdout.take()
        number = self.ask(op="run", code=code)
        self.wait_for_output(after)
        with self.pressing():
            return self.ran(number)

    @contextmanager
    def pressing(self, begin: threading.Event | None = None) -> Iterator[None]:
        """Ctrl-C again and again, from that moment on, as a host does until it has the result."""
        stop = threading.Event()

        def press() -> None:
            if begin is not None:
                assert begin.wait(PATIENCE), "the moment to press never came"
            while not stop.is_set():
                os.kill(self.pid, signal.SIGINT)
                stop.wait(0.2)

        presser = threading.Thread(target=press)
        presser.start()
        try:
            yield
        finally:
            stop.set()
            if begin is not None:
                begin.set()
            presser.join()

    def wait_for_output(self, word: str) -> str:
        until, text = time.monotonic() + PATIENCE, ""
        while word not in text:
            assert time.monotonic() < until, f"no {word!r} in {text!r}"
            text += self.stdout.take()
            time.sleep(0.001)
        return text

    # --- forks ------------------------------------------------------------------------------------------------------

    def wait_for_snapshot(self) -> None:
        """Until the worker has kept a snapshot of what was last run, or has reported why not."""

        def about_it(record: Record) -> bool:
            return record.get("op") in ("snapshot", "no_snapshot") and record["covers"] == self._last_run

        if not any(map(about_it, self.records)):
            self.until(about_it)

    def wake(self) -> None:
        """Go on from the snapshot, the worker being dead."""
        self.process.wait(PATIENCE)
        (end, watched), self.snapshot = self.snapshot, []
        self.line.close()
        self._pidfds.append(watched)
        self.line = Channel(socket.socket(fileno=end))
        self.line.send({"op": "restore"})
        self._meet(self.line.socket)

    def crash(self, code: str) -> None:
        """Run code that ends the worker."""
        number = self.ask(op="run", code=code)
        try:
            outcome = self.result(number)
        except Gone:
            return
        raise AssertionError(f"it lived on: {outcome}")

    def _drop_snapshot(self) -> None:
        for fd in self.snapshot:
            os.close(fd)
        self.snapshot = []

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.line.close()
        self._sender.shutdown()
        self._drop_snapshot()
        self.process.wait(PATIENCE)
        with suppress(ProcessLookupError):
            # What code has started in the worker's own group still holds the pipes.
            os.killpg(self.process.pid, signal.SIGKILL)
        for fd in self._pidfds:
            select.select([fd], [], [], PATIENCE)
            os.close(fd)
        for fd in self.left_open:
            os.close(fd)
        for pipe in (self.stdout, self.stderr, *self._old_pipes):
            pipe.close()
        if self._fresh:
            self._forks.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()
