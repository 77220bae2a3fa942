"""What every executor promises, and the small things it hands out."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol, Self, runtime_checkable

from carrel.text import html_table

_IMAGES = ("image/png", "image/jpeg")
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]+")

Handler = Callable[[str, list[Any], dict[str, Any]], Awaitable[Any]]
"""Answers calls from inside: the whole name (`tools.curl.get`), the positional and the named arguments."""

State = Literal["kept", "restored", "lost"]
FilePath = str | os.PathLike[str]


@dataclass(slots=True)
class RunUsage:
    """What one run took."""

    cpu_seconds: float = 0.0
    max_rss_bytes: int = 0


@dataclass(slots=True)
class Output:
    """A piece of what running code wrote."""

    stream: Literal["stdout", "stderr"]
    text: str


OnOutput = Callable[[Output], None]
"""Called with each piece as it comes; must not wait."""


@dataclass(slots=True)
class ExecutionResult:
    """What came of one run."""

    value: Any = None
    """Of the last expression, else None; what is no data is its `repr`."""
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    """The message, with the traceback of the user's own lines."""
    error_type: str | None = None
    """The exception's class, or Timeout, Crashed, OutOfMemory, Closed."""
    duration: float = 0.0
    state: State = "kept"
    """The variables: as the code left them, as they were before this run, or gone."""
    state_reason: str = ""
    """Why they are restored or lost."""
    display: list[dict[str, Any]] = field(default_factory=list)
    """Rich forms, by MIME type."""
    usage: RunUsage = field(default_factory=RunUsage)

    @property
    def is_ok(self) -> bool:
        return self.error is None

    def _repr_html_(self) -> str:
        """Show the result in a notebook. Of `display` only images: HTML from the sandbox could run scripts there."""
        texts = [("value", repr(self.value)), ("stdout", self.stdout), ("stderr", self.stderr), ("error", self.error)]
        texts.append(("state", f"{self.state}: {self.state_reason}" if self.state_reason else None))
        table = html_table("Result" if self.is_ok else f"Result: {self.error_type}", [row for row in texts if row[1]])
        pictures = [(mime, str(data)) for bundle in self.display for mime, data in bundle.items() if mime in _IMAGES]
        tags = [f'<img alt="" src="data:{mime};base64,{data}">' for mime, data in pictures if _BASE64.fullmatch(data)]
        return "".join([table, *tags])


@dataclass(slots=True)
class CommandResult:
    """What came of one command."""

    stdout: Any = ""
    """A str; bytes with `text=False`. The same for `stderr` and `output`."""
    stderr: Any = ""
    exit_code: int = 0
    """As in a shell: 128 and the signal's number for one that was killed, 124 after a timeout."""
    duration: float = 0.0
    timed_out: bool = False
    output: Any = ""
    """Both streams in the order in which they were written."""
    truncated: bool = False
    """Whether some of the output was left out."""

    @property
    def success(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


@dataclass(slots=True, frozen=True)
class Variable:
    """A variable of the session's code."""

    name: str
    type: str
    size: int
    """Bytes of the object itself, without what it refers to."""
    preview: str
    """The beginning of its `repr`; empty where calling that took too long."""


@dataclass(slots=True, frozen=True)
class RunningCommand:
    """A command that has processes."""

    pid: int
    """Of its first process, as the session sees it; that one may have ended."""
    command: str
    started: datetime


class RunClock(Protocol):
    """The time limit of a run. Pauses nest: it continues after as many `resume` as `pause`."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(slots=True, eq=False)
class CallContext:
    """The run whose code waits for a handler's answer; a handler finds it in `current_call`."""

    executor: Executor
    write: Callable[[str], None]
    """Writes into the stdout of that run; does nothing after the run has ended."""
    clock: RunClock | None = None
    """The time limit of that run."""
    active: bool = True
    """False once the call was answered or cancelled: tasks that the handler has started may live longer."""


current_call: ContextVar[CallContext | None] = ContextVar("carrel_current_call", default=None)
"""The call that the current task answers; None outside of handlers."""


@contextmanager
def paused_clock() -> Iterator[None]:
    """Stop the time limit of the run whose call is being answered for this block; no effect outside of a call."""
    call = current_call.get()
    clock = call.clock if call is not None else None
    if clock is not None:
        clock.pause()
    try:
        yield
    finally:
        if clock is not None:
            clock.resume()


@dataclass(slots=True, frozen=True)
class FileEntry:
    """One name in a folder."""

    name: str
    kind: Literal["file", "folder", "link"]
    size: int


@dataclass(slots=True, frozen=True)
class FileStat(FileEntry):
    """What is known of one file; of a link, what is known of its target."""

    mode: int
    """The permission bits."""
    mtime: float
    target: str = ""
    """Where a link leads."""


@dataclass(slots=True, frozen=True)
class FileChange:
    """A file that is not as it was at the start."""

    path: str
    kind: Literal["added", "modified", "deleted"]
    size: int = 0


class Moment(Protocol):
    """The variables and files of an executor as they were when it was asked to keep them."""

    async def close(self) -> None:
        """Let go of it; twice is harmless."""


@runtime_checkable
class Place(Protocol):
    """A Python that keeps its variables, with commands and files in the same place: what a session cannot do without.

    Calls queue up in the order in which they were made. Different executors run side by side.
    """

    handlers: dict[str, Handler]
    """Who answers calls from inside, by name or its beginning: `tools` answers `tools.curl.get`. Set before start."""

    async def start(self) -> None:
        """Be ready to run; twice is harmless. Raises SandboxUnavailable where a required sandbox is not possible."""

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult:
        """Run code; whatever it does, a result comes, never an exception and never a hang.

        `timeout` in seconds; None takes the executor's own. Cancelling the caller stops the code.
        """

    def stream(self, code: str, timeout: float | None = None) -> AsyncGenerator[Output | ExecutionResult]:
        """The same, with what is written as it comes, the result last. Closing the iterator stops the code."""

    async def interrupt(self) -> bool:
        """Stop the running code as Ctrl-C does; True when some was running. Its variables survive."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 300,
        cwd: FilePath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        user: str | None = None,
        text: bool = True,
        on_output: OnOutput | None = None,
        keep_background: bool = True,
    ) -> CommandResult:
        """Run a command (a str for a shell, or a list of arguments), beside other commands and the code.

        On a timeout, or when the caller is cancelled, its whole process tree is killed. A command that cannot be
        started raises what `subprocess` raises. `user` is "agent" (default) or "root", which is a ConfigurationError
        where the session has no root. With `text=False` the output is bytes. `on_output` is called with each piece
        as it comes, also with those that the result leaves out. Without `keep_background`, what the command leaves
        running in its process group is killed at its end."""

    async def processes(self) -> list[RunningCommand]:
        """Commands that have left processes running, as `server & echo started` does, oldest first."""

    async def kill(self, pid: int) -> bool:
        """End such a command with all that came of it; False when there is none of this number, or nothing is left."""

    async def read_file(self, path: FilePath) -> bytes:
        """Relative to the workspace. Raises FileNotFoundError, IsADirectoryError, PermissionError as `open` does."""

    async def write_file(self, path: FilePath, data: bytes | str) -> None:
        """Missing folders are made. The file is replaced as a whole: a failure leaves it as it was."""

    async def list_files(self, path: FilePath = ".") -> list[FileEntry]:
        """What is in a folder, by name."""

    async def stat(self, path: FilePath) -> FileStat:
        """Follows links, as `os.stat`."""

    async def exists(self, path: FilePath) -> bool:
        """As `os.path.exists`."""

    async def make_dir(self, path: FilePath) -> None:
        """With missing parents; a folder that exists is no error."""

    async def remove(self, path: FilePath, *, recursive: bool = False) -> None:
        """A file, a link or an empty folder; with `recursive` a folder and all that is in it."""

    async def move(self, path: FilePath, to: FilePath) -> None:
        """To exactly that name; a file there is replaced."""

    async def realpath(self, path: FilePath) -> str:
        """Absolute and without links; FileNotFoundError for what does not exist."""

    async def str_replace(self, path: FilePath, old: str, new: str) -> None:
        """Replace the one place where `old` stands; ValueError says how many there are otherwise."""

    async def changed_files(self) -> list[FileChange]:
        """Which files of the workspace are not as they were at the start, by path."""

    async def diff(self) -> str:
        """The same as a unified diff."""

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        """Have these packages importable, also in a run that is under way; never waits for it.

        Returns the versions of what was added or changed, by name; nothing where all was there. Raises DependencyError
        with what the installer said, and nothing has changed then. `constraints` bound versions and install nothing."""

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        """Remove these packages; returns those that were there. What is in memory already stays there.

        Raises DependencyError where one is there and not the session's to remove."""

    async def installed(self) -> dict[str, str]:
        """The version of each package that code can import, by its normalized name."""

    async def fork(self) -> Self:
        """Another executor with the same variables and files, from now on apart; ForkRefused changes nothing."""

    async def variables(self) -> list[Variable]:
        """The variables that code has made, without those that begin with `_`; at most 1,000. Queues like `run`."""

    async def set_variables(self, variables: Mapping[str, Any]) -> None:
        """Set variables to data: the types that `run` can return. Queues like `run`."""

    async def reset(self) -> None:
        """Forget the variables; files stay."""

    async def close(self) -> None:
        """End everything that was started here; twice is harmless. A run under way ends with the error type Closed."""

    def supported_capabilities(self) -> set[str]:
        """Only what is in force on this machine now."""


@runtime_checkable
class Executor(Place, Protocol):
    """A place that can go back, too, or says why it cannot."""

    async def checkpoint(self) -> Moment:
        """Keep the variables and files as they are now, to go back to; ForkRefused changes nothing."""

    async def rewind(self, to: Moment, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """Go back to a moment of this very executor, as often as wanted; what runs in it ends.

        `then` is done once nothing stands in the way any more. What it raises, and ForkRefused, change nothing. Who
        is cancelled before its turn has changed nothing either; after that, all of it is done."""
