"""The only file that names concrete kinds: a place in, everything that is kept there out."""

from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

from carrel.conversation.store import SessionStore
from carrel.storage.file_store import FileStore
from carrel.storage.memory_store import MemoryStore
from carrel.storage.redis_store import RedisStore
from carrel.storage.seam import Store


@runtime_checkable
class StorageBackend(Protocol):
    """One place where everything of a program's sessions is kept."""

    store: Store

    def get_session_store(self, durability: Literal["os", "fsync"] = "os") -> SessionStore:
        """The conversations kept here; the same object each time."""

    async def close(self) -> None:
        """Let go of files and connections; twice is harmless."""


class _Storage:
    """What the kinds share; they differ in the Store alone."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._sessions: dict[str, SessionStore] = {}

    def get_session_store(self, durability: Literal["os", "fsync"] = "os") -> SessionStore:
        if durability not in self._sessions:
            self._sessions[durability] = SessionStore(durability=durability, store=self.store, prefix="sessions")
        return self._sessions[durability]

    async def close(self) -> None:
        for sessions in self._sessions.values():
            await sessions.close()
        await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class FileStorage(_Storage):
    """A folder a person can read: `sessions/<id>/messages.jsonl` and the like below `base_path`."""

    def __init__(self, base_path: Path | str) -> None:
        self.base_path = Path(base_path).expanduser()
        super().__init__(FileStore(self.base_path))


class RedisStorage(_Storage):
    """A Redis server, shared by any number of machines; all keys begin with `prefix`."""

    def __init__(self, url: str, prefix: str = "carrel") -> None:
        super().__init__(RedisStore(url, prefix))


class MemoryStorage(_Storage):
    """This process's memory: gone with it."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
