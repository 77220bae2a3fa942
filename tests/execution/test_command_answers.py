"""What a command server answers is checked before it is believed: code of the session may have taken its place."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from carrel.errors import WorkerLost
from carrel.execution.channels import CommandClient, error_of
from carrel.execution.commands_and_files import CommandsAndFiles
from carrel.execution.packages import Packages
from carrel.guest.channel import encode_record


class Lying(CommandsAndFiles):
    """An executor whose command server answers every request with the same bytes."""

    def __init__(self, *answers: dict[str, Any] | bytes) -> None:
        super().__init__()
        self._answers = answers
        self.client = CommandClient()
        self.client.use(self)

    def write(self, data: bytes) -> None:
        record = json.loads(data[4:])
        for answer in self._answers:
            frame = answer if isinstance(answer, bytes) else encode_record({"id": record["id"], **answer})
            asyncio.get_running_loop().call_soon(self.client.data_received, frame)

    def close(self) -> None:  # type: ignore[override]
        """The stream is closed."""

    async def start(self) -> None:
        """Nothing has to be started."""

    async def _with_packages(self) -> Packages:
        raise NotImplementedError

    async def _command_client(self, user: str) -> CommandClient:
        return self.client

    async def _server_gone(self, client: CommandClient) -> Exception:
        return WorkerLost("it is gone")

    def _output_limit(self) -> int:
        return 1000


ENTRY = {"name": "a", "kind": "file", "size": 1, "mtime": 1.5, "ctime_ns": 2, "mode": 0o644}
DONE = {"op": "done"}


@pytest.mark.parametrize(
    "entry",
    [
        5,
        {},
        {**ENTRY, "name": 5},
        {**ENTRY, "name": ".."},
        {**ENTRY, "name": "a/../b"},
        {**ENTRY, "name": "/etc"},
        {**ENTRY, "name": "a\0b"},
        {**ENTRY, "size": "1"},
        {**ENTRY, "mtime": None},
        {**ENTRY, "mode": 1.5},
    ],
)
async def test_a_list_of_files_that_is_none_is_refused(entry: Any) -> None:
    for look in (Lying({"op": "entries", "entries": [entry]}, DONE).list_files, Lying({**DONE, "x": 1}).stat):
        with pytest.raises(WorkerLost, match="as it should"):
            await look("x")


async def test_processes_that_are_none_are_refused() -> None:
    with pytest.raises(WorkerLost, match="as it should"):
        await Lying({**DONE, "processes": [{"pid": "many"}]}).processes()


@pytest.mark.parametrize(
    "frame", [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\2{]", b"\0\0\0\2[]", encode_record({"a": 1})]
)
async def test_frames_that_no_server_sends_end_the_connection(frame: bytes) -> None:
    lying = Lying(frame, DONE)
    if frame == b"\0\0\0\2[]":  # a piece for nothing that was asked
        assert await lying.exists("x") is False
        return
    with pytest.raises(WorkerLost, match="gone"):
        await asyncio.wait_for(lying.exists("x"), 60)
    assert lying.client.closed


def test_an_error_is_the_builtin_that_was_raised() -> None:
    found = error_of({"error": "No such file", "errno": 2, "filename": "a", "filename2": "b"})
    assert isinstance(found, FileNotFoundError)
    assert (found.errno, found.strerror, found.filename, found.filename2) == (2, "No such file", "a", "b")
    assert type(error_of({"error": "odd", "error_type": "SystemExit"})) is ValueError
    assert type(error_of({"error": "odd", "errno": "2"})) is ValueError
    assert error_of({"exit_code": 0}) is None
