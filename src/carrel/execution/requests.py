"""Commands and files, asked of a worker: each function is one request and what its answer means."""

from __future__ import annotations

import base64
import builtins
import codecs
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import uuid4

from carrel.errors import CarrelError, WorkerLost
from carrel.execution import arguments
from carrel.execution.executor import CommandResult, FileEntry, FilePath, OnOutput, Output, RunningCommand
from carrel.execution.file_changes import Seen, Tree
from carrel.execution.host_line import Record
from carrel.execution.output import BoundedOutput

PIECE = 16 * 1024 * 1024
"""Bytes of a file that go into one record."""
LARGEST_FILE = 2 * 1024 * 1024 * 1024
"""Bytes of a file that are read; a session's Python could send pieces for ever."""
MOST_FILES = 2_000_000
"""Files and folders that are looked at; it could list folders in folders for ever too."""
LONGEST_PATH = 4096

Ask = Callable[[Record], Awaitable[Record]]
_DECODER = codecs.getincrementaldecoder("utf-8")


def command_request(
    command: str | Sequence[str],
    timeout: float | None,
    cwd: FilePath | None,
    env: Mapping[str, str] | None,
    stdin: bytes | str | None,
) -> Record:
    return {
        "op": "exec",
        "command": arguments.command_words(command),
        "timeout": arguments.seconds(timeout),
        "cwd": None if cwd is None else arguments.path_text(cwd, "cwd"),
        "env": arguments.variables(env),
        "stdin": None if stdin is None else base64.b64encode(arguments.content_bytes(stdin, "stdin")).decode("ascii"),
    }


class CommandOutput:
    """Collects the pieces of one command's output, and hands each on to who wants it as it comes."""

    def __init__(self, limit: int, told: OnOutput | None = None) -> None:
        self._streams = {"stdout": BoundedOutput(limit), "stderr": BoundedOutput(limit)}
        self._told = told
        self._decoders = {name: _DECODER("replace") for name in self._streams}

    def add(self, record: Record) -> None:
        try:
            data = base64.b64decode(str(record.get("data", "")))
        except ValueError:
            data = b"[a piece that could not be read]"
        match record.get("stream"):
            case "stdout" | "stderr" as name:
                self.add_piece(name, data)

    def add_piece(self, name: Literal["stdout", "stderr"], data: bytes) -> None:
        self._streams[name].add(data)
        if self._told is not None and (text := self._decoders[name].decode(data)):
            self._told(Output(name, text))

    def text(self, name: str) -> str:
        return self._streams[name].text()

    def result(self, record: Record, duration: float) -> CommandResult:
        code, error = record.get("exit_code"), record.get("error")
        result = CommandResult(
            stdout=self._streams["stdout"].text(),
            stderr=self._streams["stderr"].text(),
            exit_code=code if type(code) is int else 126,
            duration=duration,
            timed_out=record.get("timed_out") is True,
        )
        if isinstance(error, str):
            result.stderr += error + "\n"
        return result


async def processes(ask: Ask) -> list[RunningCommand]:
    """By how long they have been there; the session's clock may be another."""
    told, now = (await ask({"op": "processes"})).get("processes"), datetime.now(UTC)
    try:
        found = [
            RunningCommand(int(one["pid"]), str(one["command"]), now - timedelta(seconds=float(one["seconds"])))
            for one in told or ()
        ]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise WorkerLost("the session's Python did not list its commands as it should") from None
    return sorted(found, key=lambda command: command.started)


async def kill(ask: Ask, pid: int) -> bool:
    return (await ask({"op": "kill", "pid": arguments.whole_number(pid, "pid")})).get("killed") is True


async def read_file(ask: Ask, path: FilePath) -> bytes:
    """Piece by piece; a file that grows meanwhile is read as far as it was at the last look."""
    path = arguments.path_text(path)
    data = bytearray()
    while True:
        answer = await _file(ask, "read", path, offset=len(data))
        piece = _decoded(answer)
        data += piece
        if len(data) > LARGEST_FILE:
            raise ValueError(f"{path} has more than {LARGEST_FILE >> 30} GiB; read it in parts, by code or a command")
        if answer.get("end") is not False or not piece:
            return bytes(data)


async def write_file(ask: Ask, path: FilePath, data: bytes | str) -> None:
    """All of it or none: content of several pieces is put together beside the file."""
    path, content = arguments.path_text(path), arguments.content_bytes(data)
    if len(content) <= PIECE:
        await _file(ask, "write", path, data=base64.b64encode(content).decode("ascii"))
        return
    part, beside = uuid4().hex, True
    try:
        for offset in range(0, len(content), PIECE):
            piece = base64.b64encode(content[offset : offset + PIECE]).decode("ascii")
            if beside:
                first, more = offset == 0, offset + PIECE < len(content)
                answer = await _file(ask, "write", path, data=piece, part=part, first=first, more=more)
                beside = answer.get("beside") is not False
            if not beside:
                await _file(ask, "write", path, data=piece, append=offset > 0)
    except BaseException:
        if beside:
            with contextlib.suppress(CarrelError, OSError, ValueError):
                await _file(ask, "write", path, part=part, forget=True)
        raise


async def list_files(ask: Ask, path: FilePath) -> list[FileEntry]:
    entries = await _entries(ask, arguments.path_text(path))
    return [FileEntry(entry["name"], _kind(entry), int(entry["size"])) for entry in entries]


async def str_replace(ask: Ask, path: FilePath, old: str, new: str) -> None:
    await _file(
        ask, "replace", arguments.path_text(path), old=arguments.text(old, "old"), new=arguments.text(new, "new")
    )


async def seen_inside(ask: Ask, path: str = ".") -> Tree:
    """Every file and link below the folder, as the session sees them."""
    found: Tree = {}
    folders = [""]
    seen = 0
    while folders:
        folder = folders.pop()
        entries = await _entries(ask, f"{path}/{folder}" if folder else path)
        seen += len(entries)
        if seen > MOST_FILES or len(folder) > LONGEST_PATH:
            raise WorkerLost(f"the workspace has more than {MOST_FILES:,} files, or folders too deep to look into")
        for entry in entries:
            name = f"{folder}/{entry['name']}" if folder else str(entry["name"])
            if entry.get("kind") == "folder":
                folders.append(name)
            else:
                kind, runs = _kind(entry), bool(int(entry.get("mode", 0)) & 0o100)
                times = float(entry.get("modified", 0.0)), int(entry.get("changed", 0))
                target = str(entry.get("target", "")) if kind == "link" else ""
                found[name] = Seen(kind, int(entry["size"]), *times, runs and kind == "file", target)
    return found


async def _entries(ask: Ask, path: str) -> list[dict[str, Any]]:
    entries = (await _file(ask, "list", path)).get("entries")
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise WorkerLost(f"the session's Python did not list {path} as it should")
    return entries


def _is_entry(entry: Any) -> bool:
    """Whether it is one, by a name that leads nowhere else."""
    if not isinstance(entry, dict):
        return False
    name, numbers = entry.get("name"), [entry.get(field, 0) for field in ("size", "mode", "changed")]
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and "\0" not in name
        and "size" in entry
        and all(type(number) is int for number in numbers)
        and type(entry.get("modified", 0.0)) in (int, float)
    )


def _kind(entry: dict[str, Any]) -> Literal["file", "folder", "link"]:
    kind = entry.get("kind")
    return "folder" if kind == "folder" else "link" if kind == "link" else "file"


async def _file(ask: Ask, do: str, path: str, **more: Any) -> Record:
    answer = await ask({"op": "file", "do": do, "path": path, **more})
    if answer.get("error") is not None:
        raise _error(str(answer.get("error_type")), str(answer["error"]))
    return answer


def _error(name: str, text: str) -> Exception:
    """As `open` would have raised it here."""
    kind = getattr(builtins, name, OSError)
    if isinstance(kind, type) and issubclass(kind, OSError | ValueError) and not issubclass(kind, UnicodeError):
        return kind(text)
    return ValueError(text)


def _decoded(answer: Record) -> bytes:
    try:
        return base64.b64decode(str(answer.get("data", "")), validate=True)
    except ValueError:
        raise WorkerLost("the session's Python answered with what is no file content") from None
