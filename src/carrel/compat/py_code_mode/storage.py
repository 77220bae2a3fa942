"""Storages as py_code_mode has them: their libraries and stores are plain calls."""

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote

from carrel.compat import INTERNAL, refuse_missing
from carrel.compat.py_code_mode.artifacts import FileArtifactStore, RedisArtifactStore
from carrel.compat.py_code_mode.skills import SkillLibrary
from carrel.session import storage


@runtime_checkable
class StorageBackend(Protocol):
    """Keeps skills and artifacts."""

    def open(self) -> storage.StorageBackend:
        """Return carrel's storage, for one session, which closes it."""

    def get_skill_library(self) -> SkillLibrary: ...

    def get_workflow_library(self) -> SkillLibrary: ...

    def get_artifact_store(self) -> FileArtifactStore: ...


class FileStorage:
    """A folder: `workflows/` and `skills/`, `artifacts/`, `tools/`."""

    def __init__(self, base_path: Path | str) -> None:
        self.root = Path(base_path).expanduser()

    def open(self) -> storage.FileStorage:
        """Return carrel's storage, for one session."""
        return storage.FileStorage(self.root)

    @cached_property
    def _own(self) -> storage.FileStorage:
        """The storage of the plain calls; sessions have their own, because they run on other event loops."""
        return self.open()

    def get_skill_library(self) -> SkillLibrary:
        return SkillLibrary(self._own.get_workflow_library())

    get_workflow_library = get_skill_library

    def get_artifact_store(self) -> FileArtifactStore:
        return FileArtifactStore(self._own.get_artifact_store(), str(self.root / "artifacts"))


class RedisStorage:
    """A Redis server, by its URL or a client of redis-py."""

    def __init__(self, url: str | None = None, redis: Any = None, prefix: str = "py_code_mode") -> None:
        if (url is None) == (redis is None):
            raise ValueError("give a url or a redis client, one of the two")
        self.prefix = prefix
        self._given = redis
        self._url = _url_of(redis) if url is None else url

    @cached_property
    def client(self) -> Any:
        """The client that was given, else one of redis-py for the URL; carrel itself has its own connections."""
        from redis import Redis  # noqa: PLC0415 -- an extra, and only programs that use the client need it here

        return Redis.from_url(self._url) if self._given is None else self._given

    def open(self) -> storage.RedisStorage:
        """Return carrel's storage, for one session."""
        return storage.RedisStorage(self._url, self.prefix)

    @cached_property
    def _own(self) -> storage.RedisStorage:
        return self.open()

    def get_skill_library(self) -> SkillLibrary:
        return SkillLibrary(self._own.get_workflow_library())

    get_workflow_library = get_skill_library

    def get_artifact_store(self) -> RedisArtifactStore:
        return RedisArtifactStore(self._own.get_artifact_store(), f"{self.prefix}/artifacts")


def _url_of(client: Any) -> str:
    """Return the URL of a client's server; its other settings are not used."""
    known = client.connection_pool.connection_kwargs
    user, password = known.get("username") or "", known.get("password") or ""
    login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    database = known.get("db") or 0
    if "path" in known:
        return f"unix://{login}{known['path']}?db={database}"
    return f"redis://{login}{known.get('host', 'localhost')}:{known.get('port', 6379)}/{database}"


_MISSING = "RedisToolStore registry_from_redis"
__getattr__ = refuse_missing(__name__, dict.fromkeys(_MISSING.split(), INTERNAL))
