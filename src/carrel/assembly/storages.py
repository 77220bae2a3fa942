"""The places where everything is kept: a folder, a Redis, this process's memory."""

from __future__ import annotations

import hashlib
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from carrel.conversation.store import SessionStore
from carrel.embedding import EmbedderOption, choose_embedder
from carrel.errors import ConfigurationError
from carrel.home import resolve_carrel_home
from carrel.library.artifacts import ArtifactStore
from carrel.library.search import LibrarySearch
from carrel.library.workflows import WorkflowLibrary
from carrel.storage.base import Store
from carrel.storage.files.store import FileStore
from carrel.storage.memory import MemoryStore
from carrel.storage.redis.store import RedisStore


class _Storage:
    """What the kinds share; they differ in the Store alone."""

    _folder: Path | None = None
    """Where what is kept lies as files."""

    def __init__(self, store: Store, base: Path | None, embedder: EmbedderOption) -> None:
        choose_embedder(embedder)
        self.store = store
        self.embedder = embedder
        self.base = base
        """Where the packages of its sessions are kept on this machine; None gives each session its own."""
        self._sessions: dict[str, SessionStore] = {}
        self._workflows: WorkflowLibrary | None = None
        self._artifacts: ArtifactStore | None = None

    def get_session_store(self, durability: Literal["os", "fsync"] = "os") -> SessionStore:
        if durability not in self._sessions:
            self._sessions[durability] = SessionStore(
                durability=durability, store=self.store, prefix="sessions", embedder=self.embedder
            )
        return self._sessions[durability]

    def get_workflow_library(self) -> WorkflowLibrary:
        if self._workflows is None:
            self._workflows = WorkflowLibrary(
                self.store, index=LibrarySearch(self.store, "search/workflows", self.embedder)
            )
        return self._workflows

    get_skill_library = get_workflow_library

    def get_artifact_store(self) -> ArtifactStore:
        if self._artifacts is None:
            self._artifacts = ArtifactStore(
                self.store,
                folder=self._folder,
                index=LibrarySearch(self.store, "search/artifacts", self.embedder),
            )
        return self._artifacts

    async def close(self) -> None:
        # All of it, also where one cannot be closed well: a lock that is not let go of holds up others.
        async with AsyncExitStack() as last:
            last.push_async_callback(self.store.close)
            for kept in (self._artifacts, self._workflows, *self._sessions.values()):
                if kept is not None:
                    last.push_async_callback(kept.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class FileStorage(_Storage):
    """A folder a person can read: `workflows/NAME.py`, `sessions/ID/messages.jsonl` and the like below `base_path`."""

    def __init__(self, base_path: Path | str, *, embedder: EmbedderOption = None) -> None:
        if base_path == "":
            # As a path it would be the current folder: a variable that is not set, most likely.
            raise ConfigurationError("the folder is an empty text; write '.' for the current one")
        self.base_path = self._folder = Path(base_path).expanduser()
        super().__init__(FileStore(self.base_path), self.base_path, embedder)


class RedisStorage(_Storage):
    """A Redis server, shared by any number of machines; all keys begin with `prefix`."""

    def __init__(self, url: str, prefix: str = "carrel", *, embedder: EmbedderOption = None) -> None:
        store = RedisStore(url, prefix)
        # Packages lie on this machine's disk; which ones is in the store.
        name = hashlib.sha256(f"{store.place}\0{prefix}".encode()).hexdigest()[:16]
        super().__init__(store, resolve_carrel_home() / "shared" / name, embedder)


class MemoryStorage(_Storage):
    """This process's memory: gone with it."""

    def __init__(self, *, embedder: EmbedderOption = None) -> None:
        super().__init__(MemoryStore(), None, embedder)
