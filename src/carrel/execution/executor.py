"""The protocol of executors, and the types of their results."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

from carrel.text import html_table

_IMAGES = ("image/png", "image/jpeg")
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]+")

Handler = Callable[[str, list[Any], dict[str, Any]], Awaitable[Any]]
"""Answers a call of the session's code: the full name (`tools.curl.get`), the positional and the named arguments."""

State = Literal["kept", "restored", "lost"]
FilePath = str | os.PathLike[str]


@dataclass(slots=True)
class RunUsage:
    """The resources that one run used."""

    cpu_seconds: float = 0.0
    max_rss_bytes: int = 0


@dataclass(slots=True)
class Output:
    """A piece of what running code wrote."""

    stream: Literal["stdout", "stderr"]
    text: str


OnOutput = Callable[[Output], None]
"""Called with each piece of output when it arrives; must not block."""


@dataclass(slots=True)
class ExecutionResult:
    """The result of one run."""

    value: Any = None
    """The value of the last expression, else None. An object that is not data arrives as its `repr`."""
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    """The message, with the traceback of the lines of the user's code."""
    error_type: str | None = None
    """The name of the exception's class, or Timeout, Crashed, OutOfMemory or Closed."""
    duration: float = 0.0
    state: State = "kept"
    """The variables are as the code left them (kept), as they were before this run (restored), or gone (lost)."""
    state_reason: str = ""
    """Why the variables are restored or lost."""
    display: list[dict[str, Any]] = field(default_factory=list)
    """Rich forms, by MIME type."""
    usage: RunUsage = field(default_factory=RunUsage)

    @property
    def is_ok(self) -> bool:
        return self.error is None

    def _repr_html_(self) -> str:
        """Show the result in a notebook. Of `display` only images: HTML of the code could run scripts there."""
        texts = [("value", repr(self.value)), ("stdout", self.stdout), ("stderr", self.stderr), ("error", self.error)]
        texts.append(("state", f"{self.state}: {self.state_reason}" if self.state_reason else None))
        table = html_table("Result" if self.is_ok else f"Result: {self.error_type}", [row for row in texts if row[1]])
        pictures = [(mime, str(data)) for bundle in self.display for mime, data in bundle.items() if mime in _IMAGES]
        tags = [f'<img alt="" src="data:{mime};base64,{data}">' for mime, data in pictures if _BASE64.fullmatch(data)]
        return "".join([table, *tags])


@dataclass(slots=True)
class CommandResult:
    """The result of one command."""

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
    """Whether output was left out because there was too much."""

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
class SavedVariables:
    """Which variables were saved or loaded."""

    kept: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """By name, why a variable was not saved or could not be loaded; under `*`, why none was."""


@dataclass(slots=True, frozen=True)
class RunningCommand:
    """A command with running processes."""

    pid: int
    """The number of its first process in the session; that process may have ended."""
    command: str
    started: datetime


class RunClock(Protocol):
    """The time limit of a run. Pauses nest: it continues when `resume` was called as often as `pause`."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(slots=True, eq=False)
class CallContext:
    """The run whose code waits for a handler's answer; handlers read it from `current_call`."""

    executor: Executor
    write: Callable[[str], None]
    """Writes into the stdout of that run; does nothing after the run has ended."""
    clock: RunClock | None = None
    """The time limit of that run."""
    active: bool = True
    """False once the call was answered or cancelled. Tasks that the handler has started may run longer."""


current_call: ContextVar[CallContext | None] = ContextVar("carrel_current_call", default=None)
"""The call that the current task answers; None outside of handlers."""


@contextmanager
def paused_clock() -> Iterator[None]:
    """Pause the time limit of the run whose call is being answered; no effect outside of a call."""
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
    """An entry of a folder."""

    name: str
    kind: Literal["file", "folder", "link"]
    size: int


@dataclass(slots=True, frozen=True)
class FileStat(FileEntry):
    """Status of a file; for a link, the status of its target."""

    mode: int
    """The permission bits."""
    mtime: float
    target: str = ""
    """The target of a link."""


@dataclass(slots=True, frozen=True)
class FileChange:
    """A file that differs from the workspace at the start."""

    path: str
    kind: Literal["added", "modified", "deleted"]
    size: int = 0


class ExecutorCheckpoint(Protocol):
    """The variables and files of an executor at one moment, which `Executor.rewind` returns to."""

    async def close(self) -> None:
        """Drop the checkpoint; calling it twice has no effect."""


@runtime_checkable
class BasicExecutor(Protocol):
    """What a session needs: a Python that keeps its variables, and commands and files in the same workspace.

    Runs queue in the order of the calls. Commands and files never wait for a run, and different executors run side by
    side."""

    handlers: dict[str, Handler]
    """Handlers of calls, by name or by the beginning of a name: `tools` answers `tools.curl.get`. Set before start."""

    async def start(self) -> None:
        """Start; calling it twice has no effect. Raises SandboxUnavailable where a required sandbox cannot be built."""

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult:
        """Run code. Returns a result whatever the code does; never raises and never hangs.

        `timeout` is in seconds; None means the executor's default. Cancelling the caller stops the code.
        """

    def stream(self, code: str, timeout: float | None = None) -> AsyncGenerator[Output | ExecutionResult]:
        """Run code and yield its output as it is written, and the result last. Closing the iterator stops the code."""

    async def interrupt(self) -> bool:
        """Stop the running code as Ctrl-C does; the variables survive. Returns whether code was running."""

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
        started raises the error that `subprocess` raises. `user` is "agent" (default) or "root"; where the
        session has no root, that is a ConfigurationError. With `text=False` the output is bytes. `on_output` is called
        with each piece when it arrives, also with those that the result leaves out. Without `keep_background`,
        processes that the command leaves in its process group are killed when it ends."""

    async def processes(self) -> list[RunningCommand]:
        """The commands with running processes, oldest first; `server & echo started` is one too."""

    async def kill(self, pid: int) -> bool:
        """Kill all processes of a command. Returns False when there is no such command, or it has no processes."""

    async def read_file(self, path: FilePath) -> bytes:
        """Read a file; a relative path starts at the workspace. Raises the errors that `open` raises."""

    async def write_file(self, path: FilePath, data: bytes | str) -> None:
        """Write a file, and create missing folders. The file is replaced as a whole: a failure leaves it unchanged."""

    async def list_files(self, path: FilePath = ".") -> list[FileEntry]:
        """List a folder, sorted by name."""

    async def stat(self, path: FilePath) -> FileStat:
        """Return the status of a file; follows links, like `os.stat`."""

    async def exists(self, path: FilePath) -> bool:
        """Like `os.path.exists`."""

    async def make_dir(self, path: FilePath) -> None:
        """Create a folder and its missing parents; an existing folder is no error."""

    async def remove(self, path: FilePath, *, recursive: bool = False) -> None:
        """Remove a file, a link or an empty folder; with `recursive` a folder and its content."""

    async def move(self, path: FilePath, to: FilePath) -> None:
        """Rename to exactly this path; a file there is replaced."""

    async def realpath(self, path: FilePath, *, strict: bool = True) -> str:
        """Return the absolute path without links; FileNotFoundError if it does not exist, unless `strict` is False."""

    async def str_replace(self, path: FilePath, old: str, new: str) -> None:
        """Replace the only occurrence of `old`; ValueError with their number if it is not exactly one."""

    async def changed_files(self) -> list[FileChange]:
        """List the files of the workspace that differ from the start, sorted by path."""

    async def diff(self) -> str:
        """Return the changes of the workspace since the start as a unified diff."""

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        """Install packages. They are importable at once, also in a run that is under way; never waits for it.

        Returns the versions of the packages that were added or changed, by name. Raises DependencyError with the
        installer's message; then nothing has changed. `constraints` limit versions and install nothing."""

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        """Remove packages; returns those that were installed. Modules that are already imported stay in memory.

        Raises DependencyError for a package that does not belong to the session."""

    async def installed(self) -> dict[str, str]:
        """Return the version of each package that code can import, by its normalized name."""

    async def fork(self) -> Self:
        """Return another executor with a copy of the variables and files; after ForkRefused nothing has changed."""

    async def variables(self) -> list[Variable]:
        """List the variables that code has set, without names that begin with `_`; at most 1,000. Queues like `run`."""

    async def set_variables(self, variables: Mapping[str, Any]) -> None:
        """Set variables to values of the types that `run` can return. Queues like `run`."""

    async def reset(self) -> None:
        """Delete the variables; files stay."""

    async def close(self) -> None:
        """End all processes; calling it twice has no effect. A run under way ends with the error type Closed."""

    def supported_capabilities(self) -> set[str]:
        """Return the capabilities that are active on this machine now."""


@runtime_checkable
class KeepsState(Protocol):
    """An executor whose files and variables can be kept in a folder, for another one that continues."""

    def keep_state(self, folder: Path) -> None:
        """Keep the state in this folder; before the start. The files are there after the start."""

    async def save(self, *, may_block: bool = True) -> SavedVariables:
        """Save the variables; StateNotSaved leaves those that were saved before. With `may_block` code may have to
        wait until they are written."""

    async def load(self) -> SavedVariables | None:
        """Load the variables that were saved, once, before the first run; None where none were."""


@runtime_checkable
class Executor(BasicExecutor, Protocol):
    """An executor with checkpoints; one that cannot make them raises ForkRefused with the reason."""

    async def checkpoint(self) -> ExecutorCheckpoint:
        """Keep the variables and files as they are now, for `rewind`; after ForkRefused nothing has changed."""

    async def rewind(self, to: ExecutorCheckpoint, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """Return to a checkpoint of this executor, any number of times; running commands end.

        `then` is called when nothing can prevent the rewind any more. If it raises, and after ForkRefused, nothing has
        changed. A caller that is cancelled while it waits for its turn changes nothing; later, the rewind completes."""
