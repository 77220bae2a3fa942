"""Commands and file operations of an executor: side by side, and independent of the code that runs."""

from __future__ import annotations

import asyncio
import codecs
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Literal, Self

from carrel.errors import ConfigurationError, ExecutorClosed, WorkerLost
from carrel.execution import file_changes
from carrel.execution.channels import CommandClient, CommandRequest, CommandServerGone, OnPiece, Record, error_of
from carrel.execution.config import ExecutorSettings, is_seconds
from carrel.execution.executor import (
    CommandResult,
    FileChange,
    FileEntry,
    FilePath,
    FileStat,
    OnOutput,
    Output,
    RunningCommand,
)
from carrel.execution.file_changes import Seen, Tree
from carrel.execution.packages import Packages
from carrel.guest.worker.commands import STDOUT
from carrel.guest.worker.values import safe_repr
from carrel.processes import BoundedOutput

LARGEST_FILE = 2 * 1024 * 1024 * 1024
"""Bytes of a file that are read: code of the session could make one that never ends."""
MOST_FILES = 2_000_000
"""Files and folders that are listed: code could make folders without end too."""
LONGEST_TIMEOUT = 1e9
LATE = 10.0
"""Seconds after its time limit in which a command must have ended, before its server is killed from outside."""
USERS = ("agent", "root")
_DECODER = codecs.getincrementaldecoder("utf-8")


class CommandsAndFiles(ABC):
    """What all executors have in common: commands, files and packages. The kinds differ in how they reach a command
    server."""

    config: ExecutorSettings
    _before: file_changes.Before = file_changes.Before()
    """The workspace at the start."""
    activity = 0
    """How many commands and changes of files have been requested."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    # --- packages ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def _with_packages(self) -> Packages:
        """Its packages; creates the folder for them where it is missing."""

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        return await (await self._with_packages()).install(requirements, constraints)

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        return await (await self._with_packages()).uninstall(names)

    async def installed(self) -> dict[str, str]:
        return await (await self._with_packages()).installed()

    # --- the command server -----------------------------------------------------------------------------------------

    @abstractmethod
    async def _command_client(self, user: str) -> CommandClient:
        """The connection to the command server of this user; starts what is not there yet."""

    @abstractmethod
    async def _server_gone(self, client: CommandClient) -> Exception:
        """What a request raises whose command server ended; replaces what has to be replaced."""

    def _kill_server(self, client: CommandClient) -> None:
        """End a server that does not answer, with what it runs."""
        client.close()

    # --- commands ---------------------------------------------------------------------------------------------------

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
        seconds = time_limit(timeout)
        record = {
            "op": "command",
            "command": command_words(command),
            "timeout": seconds,
            "cwd": None if cwd is None else path_text(cwd, "cwd"),
            "env": self._command_environment(environment_variables(env)),
            "stdin": stdin is not None,
            "keep_background": keep_background,
        }
        content = None if stdin is None else content_bytes(stdin, "stdin")
        self.activity += 1
        client = await self._command_client(_user(user))
        output = CommandOutput(self.config.output_limit, on_output, text=text)
        request = client.begin(record, on_piece=output.add)
        loop = asyncio.get_running_loop()
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            self._kill_server(client)

        timer = None
        if seconds is not None:
            request.deadline = loop.time() + min(seconds, LONGEST_TIMEOUT)
            timer = loop.call_at(request.deadline + LATE, expire)
        try:
            answer = await self._answer_of(client, request, content)
        except (WorkerLost, ExecutorClosed):
            if not expired:
                raise
            answer = {"exit_code": 124, "timed_out": True}
        finally:
            if timer is not None:
                timer.cancel()
        return output.result(answer)

    def _command_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables that a command gets on top of those of its server."""
        return dict(env)

    async def processes(self) -> list[RunningCommand]:
        answer, now = await self._request({"op": "processes"}), datetime.now(UTC)
        try:
            found = [
                RunningCommand(int(one["pid"]), str(one["command"]), now - timedelta(seconds=float(one["seconds"])))
                for one in answer.get("processes") or ()
            ]
        except (KeyError, TypeError, ValueError, OverflowError):
            raise WorkerLost("the session's command server did not list its commands as it should") from None
        return sorted(found, key=lambda command: command.started)

    async def kill(self, pid: int) -> bool:
        answer = await self._request({"op": "kill", "pid": whole_number(pid, "pid")})
        return answer.get("killed") is True

    # --- files ------------------------------------------------------------------------------------------------------

    async def read_file(self, path: FilePath) -> bytes:
        content = bytearray()

        def add(stream: int, data: bytes) -> None:
            content.extend(data)
            if len(content) > LARGEST_FILE:
                request.cancel()

        client = await self._command_client("agent")
        request = client.begin({"op": "read", "path": path_text(path)}, on_piece=add)
        await self._answer_of(client, request)
        if len(content) > LARGEST_FILE:
            raise ValueError(f"{path} has more than {LARGEST_FILE >> 30} GiB; read it in parts, by code or a command")
        return bytes(content)

    async def write_file(self, path: FilePath, data: bytes | str) -> None:
        record = {"op": "write", "path": path_text(path)}
        content = content_bytes(data)
        self.activity += 1
        client = await self._command_client("agent")
        await self._answer_of(client, client.begin(record), content)

    async def list_files(self, path: FilePath = ".") -> list[FileEntry]:
        return [_file_entry(entry) for entry in await self._list(path_text(path))]

    async def stat(self, path: FilePath) -> FileStat:
        entry = await self._request({"op": "stat", "path": path_text(path)})
        _check_entry(entry)
        about = _file_entry(entry)
        times = float(entry["mtime"]), str(entry.get("target", ""))
        return FileStat(about.name, about.kind, about.size, int(entry["mode"]), *times)

    async def exists(self, path: FilePath) -> bool:
        return (await self._request({"op": "exists", "path": path_text(path)})).get("exists") is True

    async def make_dir(self, path: FilePath) -> None:
        await self._request({"op": "make_dir", "path": path_text(path)})

    async def remove(self, path: FilePath, *, recursive: bool = False) -> None:
        await self._request({"op": "remove", "path": path_text(path), "recursive": recursive})

    async def move(self, path: FilePath, to: FilePath) -> None:
        await self._request({"op": "move", "path": path_text(path), "to": path_text(to, "to")})

    async def realpath(self, path: FilePath, *, strict: bool = True) -> str:
        record = {"op": "realpath", "path": path_text(path), "strict": strict}
        return str((await self._request(record)).get("path"))

    async def str_replace(self, path: FilePath, old: str, new: str) -> None:
        texts = {"old": checked_text(old, "old"), "new": checked_text(new, "new")}
        await self._request({"op": "str_replace", "path": path_text(path), **texts})

    # --- changes ----------------------------------------------------------------------------------------------------

    async def changed_files(self) -> list[FileChange]:
        before, now = await self._before_and_now()
        return await file_changes.changes(before, now, self.read_file)

    async def diff(self) -> str:
        before, now = await self._before_and_now()
        return await file_changes.unified(before, now, self.read_file)

    async def changes_and_tree(self) -> tuple[list[FileChange], Tree]:
        """Return the changed files, and at least those files as they look now."""
        before, now = await self._before_and_now()
        return await file_changes.changes(before, now, self.read_file), now

    def original(self, path: str) -> bytes | None:
        """Return the content of a file at the start, if it is known. It may be read from a disk."""
        return self._before.read(path)

    async def _before_and_now(self) -> tuple[file_changes.Before, Tree]:
        """What is to be compared; files that certainly have not changed may be left out of both."""
        now = await self.list_tree()
        return self._before, now

    async def list_tree(self, path: str = ".") -> Tree:
        """Every file and link below a folder, as the session sees them."""
        return tree_of(await self._list(path, recursive=True))

    async def _list(self, path: str, *, recursive: bool = False) -> list[Record]:
        client = await self._command_client("agent")
        try:
            return await list_entries(client, path, recursive=recursive)
        except CommandServerGone:
            raise await self._server_gone(client) from None

    # --- requests ---------------------------------------------------------------------------------------------------

    async def _request(self, record: Record, on_piece: OnPiece | None = None) -> Record:
        self.activity += record["op"] in ("remove", "move", "str_replace")
        client = await self._command_client("agent")
        return await self._answer_of(client, client.begin(record, on_piece=on_piece))

    async def _answer_of(self, client: CommandClient, request: CommandRequest, content: bytes | None = None) -> Record:
        """Send the input, wait for the answer; when the caller is cancelled, the request is, and has ended then."""
        sending = None
        try:
            if content is not None:
                sending = asyncio.ensure_future(request.send_input(content))
            record = await asyncio.shield(request.answer)
        except CommandServerGone:
            raise await self._server_gone(client) from None
        except asyncio.CancelledError:
            request.cancel()
            asyncio.get_running_loop().call_later(LATE, self._give_up, client, request)
            await asyncio.wait([request.answer])
            raise
        finally:
            if sending is not None:
                sending.cancel()
        problem = error_of(record)
        if problem is not None:
            raise problem
        return record

    def _give_up(self, client: CommandClient, request: CommandRequest) -> None:
        if not request.answer.done():
            self._kill_server(client)


def _user(user: str | None) -> str:
    if user is None:
        return "agent"
    if user not in USERS:
        raise ConfigurationError(f"user is {user!r}; it can be 'agent' or 'root'")
    return user


class CommandOutput:
    """Collects the output of one command within a limit, and passes each piece on as it comes."""

    def __init__(self, limit: int, on_output: OnOutput | None = None, *, text: bool = True) -> None:
        self._streams: dict[Literal["stdout", "stderr"], BoundedOutput] = {
            "stdout": BoundedOutput(limit),
            "stderr": BoundedOutput(limit),
        }
        self._both = BoundedOutput(limit)
        self._on_output = on_output
        self._text = text
        self._decoders = {name: _DECODER("replace") for name in self._streams}

    def add(self, stream: int, data: bytes) -> None:
        name: Literal["stdout", "stderr"] = "stdout" if stream == STDOUT else "stderr"
        self._streams[name].add(data)
        self._both.add(data)
        if self._on_output is not None:
            piece: Any = self._decoders[name].decode(data) if self._text else data
            if piece:
                self._on_output(Output(name, piece))

    def result(self, answer: Record) -> CommandResult:
        streams = (self._streams["stdout"], self._streams["stderr"], self._both)
        stdout, stderr, output = (one.text() if self._text else one.content() for one in streams)
        code, duration = answer.get("exit_code"), answer.get("duration")
        return CommandResult(
            stdout=stdout,
            stderr=stderr,
            exit_code=code if type(code) is int else 126,
            duration=float(duration) if isinstance(duration, (int, float)) else 0.0,
            timed_out=answer.get("timed_out") is True,
            output=output,
            truncated=any(one.left_out for one in streams),
        )


async def list_entries(client: CommandClient, path: str, *, recursive: bool) -> list[Record]:
    """The entries of a folder as the command server lists them."""
    found: list[Record] = []

    def add(record: Record) -> None:
        entries = record.get("entries")
        if isinstance(entries, list) and len(found) <= MOST_FILES:
            found.extend(entries)

    request = client.begin({"op": "list", "path": path, "recursive": recursive}, on_record=add)
    problem = error_of(await asyncio.shield(request.answer))
    if problem is not None:
        raise problem
    if len(found) > MOST_FILES:
        raise WorkerLost(f"{path} has more than {MOST_FILES:,} files")
    for entry in found:
        _check_entry(entry)
    return found


def tree_of(entries: list[Record]) -> Tree:
    """The files and links of a recursive list."""
    found: Tree = {}
    for entry in entries:
        kind = _file_entry(entry).kind
        if kind != "folder":
            runs = kind == "file" and bool(entry["mode"] & 0o100)
            target = str(entry.get("target", "")) if kind == "link" else ""
            found[entry["name"]] = Seen(kind, entry["size"], float(entry["mtime"]), entry["ctime_ns"], runs, target)
    return found


def _file_entry(entry: Record) -> FileEntry:
    kind = entry.get("kind")
    known: Literal["file", "folder", "link"] = "folder" if kind == "folder" else "link" if kind == "link" else "file"
    return FileEntry(str(entry["name"]), known, int(entry["size"]))


def _check_entry(entry: Any) -> None:
    """WorkerLost unless it is one, by a name that leads nowhere else."""
    numbers = ("size", "mode", "ctime_ns")
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("name"), str)
        or "\0" in entry["name"]
        or any(part in ("", ".", "..") for part in entry["name"].split("/"))
        or not all(type(entry.get(field)) is int for field in numbers)
        or type(entry.get("mtime")) not in (int, float)
    ):
        raise WorkerLost("the session's command server did not list files as it should")


# --- arguments ------------------------------------------------------------------------------------------------------


def path_text(path: object, name: str = "path") -> str:
    if isinstance(path, str):
        return path
    if isinstance(path, bytes | os.PathLike):
        return os.fsdecode(path)
    raise TypeError(f"{name} is a text (str) or a path, and this is {_shown(path)}")


def content_bytes(data: object, name: str = "data") -> bytes:
    if isinstance(data, str):
        return data.encode("utf-8")
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise TypeError(f"{name} is a text (str) or bytes, and this is {_shown(data)}")


def checked_text(given: object, name: str) -> str:
    if isinstance(given, str):
        return given
    raise TypeError(f"{name} is a text (str), and this is {_shown(given)}")


def whole_number(given: object, name: str) -> int:
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    raise TypeError(f"{name} is a whole number, and this is {_shown(given)}")


def command_words(command: object) -> str | list[str]:
    """A text is for a shell; a list is a program and its arguments."""
    if isinstance(command, str):
        return command
    if not isinstance(command, Sequence) or isinstance(command, bytes | bytearray | memoryview):
        raise TypeError(f"command is a text for a shell (str) or a list of words, and this is {_shown(command)}")
    if not command:
        raise ValueError("command is an empty list; its first word is the program")
    return [_word(word, "a word of the command") for word in command]


def time_limit(timeout: object) -> float | None:
    """None for no limit."""
    if timeout is None:
        return None
    if not is_seconds(timeout):
        raise TypeError(f"timeout is a number of seconds, or None for no limit, and this is {_shown(timeout)}")
    number = float(timeout)  # type: ignore[arg-type]
    return None if number == float("inf") else max(number, 0.0)


def environment_variables(env: object) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"env is a dict of texts by name, and this is {_shown(env)}")
    return {checked_text(name, "a name in env"): _word(value, f"env[{name!r}]") for name, value in env.items()}


def _word(word: Any, name: str) -> str:
    """Numbers are written as Python does."""
    return str(word) if isinstance(word, int | float) else path_text(word, name)


def _shown(given: object) -> str:
    return f"{safe_repr(given, 60)}, {type(given).__name__}" if given is not None else "None"
