"""Storages: where sessions, workflows and artifacts are kept (a folder, Redis, Postgres, or this process's memory)."""

from __future__ import annotations

import hashlib
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

from carrel.embedding import EmbedderOption, choose_embedder
from carrel.errors import ConfigurationError
from carrel.execution.config import describe_value
from carrel.home import resolve_carrel_home
from carrel.storage.base import Store
from carrel.storage.files.store import FileStore
from carrel.storage.memory import MemoryStore

if TYPE_CHECKING:
    from carrel.conversation.store import SessionStore
    from carrel.library.artifacts import ArtifactStore
    from carrel.library.workflows import WorkflowLibrary


@runtime_checkable
class StorageBackend(Protocol):
    """Keeps everything of a program's sessions; the getters return the same object at each call."""

    store: Store

    def get_session_store(self, durability: Literal["os", "fsync"] = "os") -> SessionStore:
        """Return the conversations."""

    def get_workflow_library(self) -> WorkflowLibrary:
        """Return the workflows."""

    def get_artifact_store(self) -> ArtifactStore:
        """Return the artifacts."""

    async def close(self) -> None:
        """Close files and connections; calling it twice has no effect."""


def check_storage(storage: object) -> None:
    """Raise TypeError for what is no storage."""
    if not isinstance(storage, StorageBackend):
        raise TypeError(
            f"storage is {describe_value(storage)}; give a FileStorage, RedisStorage, PostgresStorage or "
            "MemoryStorage, or use Session.from_base(folder)"
        )


def check_id(session_id: str) -> str:
    """Return the id of a session; SessionIdRefused if it is not a plain name."""
    from carrel.conversation.session_state import checked_id  # noqa: PLC0415 -- loads pydantic

    return checked_id(session_id)


def store_of(storage: StorageBackend) -> Store:
    """Return the store with the conversations of a storage, and with what is known and recorded of its sessions."""
    store: Store = getattr(storage, "trace_store", storage.store)
    return store


class _Storage:
    """Builds the parts of a storage on a Store; the kinds differ only in the Store."""

    _folder: Path | None = None
    """The folder in which the objects are files, if they are."""

    def __init__(self, store: Store, base: Path | None, embedder: EmbedderOption) -> None:
        choose_embedder(embedder)  # Refuse an invalid one now, not at the first search.
        self.embedder = embedder
        self.store = store
        self.base = base
        """The folder for the packages of its sessions on this machine; None gives each session a folder of its own."""
        self.state_base = base
        """The folder below which durable sessions keep their files on this machine; None: they cannot be durable."""
        self._sessions: dict[str, SessionStore] = {}
        self._workflows: WorkflowLibrary | None = None
        self._artifacts: ArtifactStore | None = None

    def get_session_store(self, durability: Literal["os", "fsync"] = "os") -> SessionStore:
        from carrel.conversation.store import SessionStore  # noqa: PLC0415 -- not every program has conversations

        if durability not in self._sessions:
            self._sessions[durability] = SessionStore(
                durability=durability, store=self.store, prefix="sessions", embedder=self.embedder
            )
        return self._sessions[durability]

    def get_workflow_library(self) -> WorkflowLibrary:
        from carrel.library.search import LibrarySearch  # noqa: PLC0415 -- `import carrel` must be quick
        from carrel.library.workflows import WorkflowLibrary  # noqa: PLC0415 -- as above

        if self._workflows is None:
            index = LibrarySearch(self.store, "search/workflows", self.embedder)
            self._workflows = WorkflowLibrary(self.store, index=index)
        return self._workflows

    get_skill_library = get_workflow_library

    def get_artifact_store(self) -> ArtifactStore:
        from carrel.library.artifacts import ArtifactStore  # noqa: PLC0415 -- `import carrel` must be quick
        from carrel.library.search import LibrarySearch  # noqa: PLC0415 -- as above

        if self._artifacts is None:
            index = LibrarySearch(self.store, "search/artifacts", self.embedder)
            self._artifacts = ArtifactStore(self.store, folder=self._folder, index=index)
        return self._artifacts

    async def close(self) -> None:
        # Close every part, even when closing one of them fails: a lock that is kept blocks other processes.
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.store.close)
            for part in (self._artifacts, self._workflows, *self._sessions.values()):
                if part is not None:
                    stack.push_async_callback(part.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class FileStorage(_Storage):
    """A folder of readable files: `workflows/NAME.py`, `sessions/ID/messages.jsonl` and so on below `base_path`."""

    def __init__(self, base_path: Path | str, *, embedder: EmbedderOption = None) -> None:
        if base_path == "":
            # As a path it would be the current folder, but most likely it is a variable that is not set.
            raise ConfigurationError("the folder is an empty text; write '.' for the current one")
        self.base_path = self._folder = Path(base_path).expanduser()
        super().__init__(FileStore(self.base_path), self.base_path, embedder)

    def __repr__(self) -> str:
        return f"FileStorage({str(self.base_path)!r})"


class RedisStorage(_Storage):
    """A Redis server that any number of machines share; all keys begin with `prefix`."""

    def __init__(self, url: str, prefix: str = "carrel", *, embedder: EmbedderOption = None) -> None:
        from carrel.storage.redis.store import RedisStore  # noqa: PLC0415 -- takes 40 ms, and most programs use files

        store = RedisStore(url, prefix)
        self._prefix = prefix
        super().__init__(store, _packages_folder(store.place, prefix), embedder)

    def __repr__(self) -> str:
        return f"RedisStorage(prefix={self._prefix!r})"  # The URL may contain a password.


class PostgresStorage(_Storage):
    """A Postgres database that any number of machines share; all tables are in `schema`."""

    def __init__(self, url: str, schema: str = "carrel", *, embedder: EmbedderOption = None) -> None:
        from carrel.storage.postgres.store import PostgresStore  # noqa: PLC0415 -- as above

        store = PostgresStore(url, schema)
        self._schema = schema
        super().__init__(store, _packages_folder(store.place, schema), embedder)

    def __repr__(self) -> str:
        return f"PostgresStorage(schema={self._schema!r})"  # The URL may contain a password.


def _packages_folder(place: str, name: str) -> Path:
    """Return where packages are installed on this machine's disk; the list of packages is in the store."""
    digest = hashlib.sha256(f"{place}\0{name}".encode()).hexdigest()[:16]
    return resolve_carrel_home() / "shared" / digest


SharedStorage = RedisStorage | PostgresStorage


def open_shared_storage(url: str, name: str = "carrel") -> SharedStorage:
    """Open the server that a URL names; `name` is the prefix in Redis, the schema in Postgres."""
    scheme = url.partition("://")[0]
    if scheme in ("redis", "rediss", "unix"):
        return RedisStorage(url, name)
    if scheme in ("postgresql", "postgres"):
        return PostgresStorage(url, name)
    raise ConfigurationError(
        f"{scheme}:// is not a store; write a folder, redis://host:6379/0 or postgresql://user@host/database"
    )


class MemoryStorage(_Storage):
    """This process's memory; everything is lost when the process ends."""

    def __init__(self, *, embedder: EmbedderOption = None) -> None:
        super().__init__(MemoryStore(), None, embedder)

    def __repr__(self) -> str:
        return "MemoryStorage()"
