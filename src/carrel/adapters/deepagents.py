"""A carrel session as the sandbox of a deepagents agent."""

from __future__ import annotations

import errno
from pathlib import Path
from types import TracebackType
from typing import Self

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from carrel.adapters.sessions import SyncSource
from carrel.session.sync_session import SyncSession

_ERRORS = {
    errno.ENOENT: "file_not_found",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
    errno.EISDIR: "is_directory",
}


class CarrelSandbox(BaseSandbox):
    """The commands and files of one session: `create_deep_agent(backend=CarrelSandbox(base=".carrel"))`.

    It takes a SyncSession, or opens a session in the folder `base` at the first use. It may be called in any thread,
    also where an event loop runs. `timeout` is the time limit of a command that has none of its own."""

    def __init__(
        self,
        session: SyncSession | None = None,
        *,
        base: Path | str | None = None,
        session_id: str | None = None,
        timeout: float | None = 300,
    ) -> None:
        self._source = SyncSource(session, base, session_id)
        self._timeout = timeout

    @property
    def id(self) -> str:
        return self._source.id

    def close(self) -> None:
        """Close the session if it was opened here."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        limit = self._timeout if timeout is None else timeout or None  # 0 means no limit
        done = self._source.open().execute_command(command, timeout=limit)
        late = f"\nThe command had not ended after {limit:g} seconds and was killed." if done.timed_out else ""
        return ExecuteResponse(done.output + late, done.exit_code, done.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path, self._problem(path) or self._upload(path, data)) for path, data in files]

    def _upload(self, path: str, data: bytes) -> str | None:
        try:
            self._source.open().write_file(path, data)
        except OSError as problem:
            return _error(problem)
        return None

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [self._download(path) for path in paths]

    def _download(self, path: str) -> FileDownloadResponse:
        if problem := self._problem(path):
            return FileDownloadResponse(path, None, problem)
        try:
            return FileDownloadResponse(path, self._source.open().read_file(path))
        except OSError as error:
            return FileDownloadResponse(path, None, _error(error))

    def _problem(self, path: str) -> str | None:
        """Return why a path is refused: deepagents works with absolute paths only."""
        return None if path.startswith("/") and "\0" not in path else "invalid_path"


def _error(problem: OSError) -> str:
    return _ERRORS.get(problem.errno or 0, str(problem))
