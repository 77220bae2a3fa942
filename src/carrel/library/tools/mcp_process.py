"""An MCP server that runs as a child of this process: its lines, its complaints, and its end with all it started."""

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence

from carrel.errors import ToolCallError
from carrel.library.tools.aside import in_a_thread
from carrel.library.tools.descendants import MARK, end_marked
from carrel.library.tools.surroundings import surroundings

LONGEST_LINE = 32 * 1024 * 1024
KEPT_COMPLAINTS = 32 * 1024
"""Bytes; much more than is shown, because what is secret in it has to be found before it is cut."""
GRACE = 1.0
"""Seconds that a server has to end by itself, and again after it was told to."""

_POLL = 0.01


class ServerProcess:
    """One server, the head of a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        """`mark`: what it and all it starts have in their environment."""
        self._process = process
        self._mark = mark
        self._complaints = bytearray()
        self._complained = 0
        self._told_to_end = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, command: str, args: Sequence[str], env: Mapping[str, str], cwd: str | None) -> "ServerProcess":
        """Started, or a ToolCallError that says why it cannot be."""
        mark = uuid.uuid4().hex
        cwd = os.path.expanduser(cwd) if cwd else None
        try:
            process = await asyncio.create_subprocess_exec(
                command,
                *args,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=cwd,
                env=surroundings({**env, MARK: mark}),
                start_new_session=True,
            )
        except FileNotFoundError as problem:
            if problem.filename == cwd and cwd is not None:
                raise ToolCallError(f"there is no folder {cwd} to start it in") from None
            raise ToolCallError(
                f"there is no program {command!r}; install it, or put its arguments into args"
            ) from None
        except (OSError, ValueError) as problem:
            raise ToolCallError(f"{command!r} could not be started: {problem}") from None
        return cls(process, mark)

    @property
    def own_exit_code(self) -> int | None:
        """How it ended, when it did so by itself; negative: the signal that ended it."""
        return None if self._told_to_end else self._process.returncode

    @property
    def complaints(self) -> tuple[bytes, bool]:
        """The end of what it wrote to its standard error, and of what it wrote instead of messages; nothing is hidden
        yet. And whether there was more before."""
        return bytes(self._complaints), self._complained > len(self._complaints)

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(65536):
            self._keep(piece)

    def note(self, said: bytes) -> None:
        """Keep something that explains what is wrong with it, as long as nothing newer does."""
        self._keep(said if said.endswith(b"\n") else said + b"\n")

    def _keep(self, said: bytes) -> None:
        self._complained += len(said)
        self._complaints += said[-KEPT_COMPLAINTS:]
        del self._complaints[:-KEPT_COMPLAINTS]

    async def lines(self) -> AsyncIterator[bytes]:
        """What it writes, line by line, until it writes no more; ToolCallError for a line without end."""
        assert self._process.stdout is not None
        begun: list[bytes] = []
        size = 0
        while piece := await self._process.stdout.read(65536):
            head, *others = piece.split(b"\n")
            begun.append(head)
            size += len(head)
            if size > LONGEST_LINE:
                raise ToolCallError(f"it wrote a line of more than {LONGEST_LINE // 2**20} MiB")
            if not others:
                continue
            *whole, rest = others
            for line in (b"".join(begun), *whole):
                if line.strip():
                    yield line
            begun, size = [rest], len(rest)

    async def write(self, line: bytes) -> None:
        """One line to it; OSError when it does not listen any more."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()

    async def end(self) -> None:
        """No more words to it, then a request to end, then force: to the whole group, so that nothing stays.

        Nobody may be reading its lines any more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        # Else one that still writes would wait for somebody to read, and not end.
        draining = asyncio.create_task(self._drain())
        await self._ended(GRACE)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._told_to_end = self._told_to_end or self._process.returncode is None
            if not self._signalled(number):
                break
            await self._ended(GRACE, group=True)
        # Some leave the group, on purpose or as daemons do.
        await in_a_thread(lambda: end_marked(self._mark))
        with contextlib.suppress(TimeoutError):
            # What it said last explains its end; somebody who left the group may keep the pipe open.
            async with asyncio.timeout(0.2):
                await asyncio.shield(self._listening)
        for task in (draining, self._listening):
            task.cancel()
        await asyncio.gather(draining, self._listening, return_exceptions=True)
        # Nothing public closes the pipes when somebody who left the group holds their other end.
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()

    async def _drain(self) -> None:
        assert self._process.stdout is not None
        while await self._process.stdout.read(65536):
            pass

    async def _ended(self, seconds: float, group: bool = False) -> None:
        # Not Process.wait: that also waits for the pipes, which a child of the server may hold.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._process.returncode is None or (group and self._signalled(0)):  # noqa: ASYNC110 -- nobody tells
                    await asyncio.sleep(_POLL)

    def _signalled(self, number: int) -> bool:
        """False when nobody of the group is left."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
