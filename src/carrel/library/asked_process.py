"""A Python of its own that is asked one thing after the other, and ended when it takes too long."""

import contextlib
import json
import select
import subprocess
import sys
import time
from typing import Any


class AskedProcess:
    """Started by the first question: a line of JSON in, a line of JSON out. Blocks meanwhile."""

    def __init__(self, *words: str) -> None:
        # Without -I and -S it would be slower, and could be made to load what lies about.
        self._words = [sys.executable, "-I", "-S", *words]
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: object, until: float) -> Any:
        """What it answers; TimeoutError when the clock comes to `until`, EOFError when it ends without an answer."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}, bufsize=0
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # It reads the whole line before it begins, so that writing does not wait for what may hang.
        unsent = memoryview(json.dumps(question).encode() + b"\n")
        while unsent:
            unsent = unsent[self._process.stdin.write(unsent) or 0 :]
        answer = bytearray()
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError("it took too long")
            piece = self._process.stdout.read(1 << 16)
            if not piece:
                raise EOFError("Python gave up on it")
            answer += piece
        return json.loads(answer)

    def end(self) -> None:
        """Twice is harmless; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()
