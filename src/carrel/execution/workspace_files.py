"""The files of an executor's workspace, the same way for every kind: asked of whoever is at them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from carrel.execution import file_changes, requests
from carrel.execution.executor import FileChange, FileEntry, FilePath
from carrel.execution.host_line import Record


class WorkspaceFiles(ABC):
    """What `Executor` promises of files; each kind says how it asks and how it looks at all of them."""

    def __init__(self) -> None:
        self._before: file_changes.Before = file_changes.Empty()

    @abstractmethod
    async def _ask(self, record: Record) -> Record:
        """One request, in its turn."""

    @abstractmethod
    async def _seen(self) -> file_changes.Tree:
        """All files as they are now."""

    async def read_file(self, path: FilePath) -> bytes:
        return await requests.read_file(self._ask, path)

    async def write_file(self, path: FilePath, data: bytes | str) -> None:
        await requests.write_file(self._ask, path, data)

    async def list_files(self, path: FilePath = ".") -> list[FileEntry]:
        return await requests.list_files(self._ask, path)

    async def str_replace(self, path: FilePath, old: str, new: str) -> None:
        await requests.str_replace(self._ask, path, old, new)

    async def changed_files(self) -> list[FileChange]:
        before, now = await self._before_and_now()
        return await file_changes.changes(before, now, self.read_file)

    async def diff(self) -> str:
        before, now = await self._before_and_now()
        return await file_changes.unified(before, now, self.read_file)

    async def _before_and_now(self) -> tuple[file_changes.Before, file_changes.Tree]:
        """What is to be compared; files that certainly have not changed may be left out of both."""
        now = await self._seen()
        return self._before, now
