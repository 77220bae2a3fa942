"""Files, differences, the conversation and the events of a session on a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Unpack

from carrel.client.answers import Difference, FileInfo, Folder, Replaced, Said, SessionEvent
from carrel.client.asking import Asking, Extra, FilePath, file_part, is_folder, json_of, path_text, session_path, typed
from carrel.errors import ServerUnreachable

DROPPED = 5
"""Times that events are asked for again without one having come in between."""


class Material(Asking):
    """What a session holds."""

    async def read_file(self, session_id: str, path: FilePath, **more: Unpack[Extra]) -> bytes:
        """Relative to the workspace. Raises FileNotFoundError, IsADirectoryError, PermissionError as `open` does."""
        asked = self._asked("GET", _file(session_id, path), _reading(session_id, path), more)
        answer = await self._wire.ask(asked)
        if is_folder(answer):
            raise IsADirectoryError(f"{path} is a folder, not a file")
        return answer.content

    async def download_file(
        self,
        session_id: str,
        path: FilePath,
        to: str | Path,
        *,
        on_progress: Callable[[int, int | None], object] | None = None,
        **more: Unpack[Extra],
    ) -> Path:
        """The same into a file here, however large it is; it is there whole or not at all."""
        asked = self._asked("GET", _file(session_id, path), _reading(session_id, path), more)
        return await self._download(asked, Path(to), on_progress)

    async def write_file(
        self, session_id: str, path: FilePath, data: bytes | str | Path, **more: Unpack[Extra]
    ) -> None:
        """Text, bytes, or a file here given as a Path. Missing folders are made."""
        if not isinstance(data, str | bytes | bytearray | memoryview | Path):
            raise TypeError(
                f"data is a text (str), bytes, or the Path of a file here, and this is {type(data).__name__}"
            )
        content = data.encode() if isinstance(data, str) else data if isinstance(data, Path) else bytes(data)
        words = f"write {path} in session {session_id}"
        headers = {"Content-Type": "application/octet-stream"}
        await self._wire.ask(self._asked("PUT", _file(session_id, path), words, more, content=content, headers=headers))

    async def list_files(self, session_id: str, path: FilePath = ".", **more: Unpack[Extra]) -> list[FileInfo]:
        """What is in a folder, by name."""
        asked = self._asked("GET", _file(session_id, path), f"list {path} in session {session_id}", more)
        answer = await self._wire.ask(asked)
        if not is_folder(answer):
            raise NotADirectoryError(f"{path} is a file, not a folder")
        return typed(Folder, json_of(answer, asked), asked).entries

    async def str_replace(
        self, session_id: str, *, file_path: FilePath, str_to_replace: str, str_to_insert: str, **more: Unpack[Extra]
    ) -> Replaced:
        """Replace a text that stands in the file exactly once."""
        body = {"file_path": path_text(file_path), "str_to_replace": str_to_replace, "str_to_insert": str_to_insert}
        words = f"replace a text in {file_path} of session {session_id}"
        return await self._typed(
            Replaced, self._asked("POST", f"{session_path(session_id)}/str_replace", words, more, body=body)
        )

    async def diff(self, session_id: str, **more: Unpack[Extra]) -> Difference:
        """What was changed since the start, and which files those are."""
        asked = self._asked("GET", f"{session_path(session_id)}/diff", f"compare session {session_id}", more)
        return await self._typed(Difference, asked)

    async def conversation(self, session_id: str, **more: Unpack[Extra]) -> dict[str, Any]:
        """What was said: `session` and `messages`, as a SessionStore gives them."""
        path, words = f"{session_path(session_id)}/conversation", f"read the conversation of session {session_id}"
        return dict(await self._data(self._asked("GET", path, words, more)))

    async def add_messages(self, session_id: str, messages: list[dict[str, Any]], **more: Unpack[Extra]) -> int:
        """Append to what was said, all of them or none; returns how many messages there are now."""
        path, words = f"{session_path(session_id)}/conversation", f"add messages to session {session_id}"
        return (await self._typed(Said, self._asked("POST", path, words, more, body={"messages": messages}))).count

    async def events(
        self, session_id: str, *, from_seq: int = 1, follow: bool = True, **more: Unpack[Extra]
    ) -> AsyncGenerator[SessionEvent, None]:
        """What happened in a session and goes on to happen until it is closed; a lost connection is taken up again
        where it was. With `follow=False`, what happened so far."""
        words, dropped = f"follow session {session_id}", 0
        while True:
            asked = self._asked(
                "GET",
                f"{session_path(session_id)}/events",
                words,
                more,
                query={"from_seq": from_seq, "follow": None if follow else 0},
                headers={"Accept": "text/event-stream"},
            )
            try:
                async with aclosing(self._stream(asked)) as events:
                    async for kind, data, seq in events:
                        from_seq, dropped = (from_seq if seq is None else seq) + 1, 0
                        yield typed(SessionEvent, {"seq": from_seq - 1, "kind": kind, "data": data}, asked)
                return
            except ServerUnreachable:
                dropped += 1
                if dropped > DROPPED:
                    raise
                await self._wire.line.sleep(0.1 * 2**dropped)


def _file(session_id: str, path: FilePath) -> str:
    return f"{session_path(session_id)}/files/{file_part(path)}"


def _reading(session_id: str, path: FilePath) -> str:
    return f"read {path} in session {session_id}"
