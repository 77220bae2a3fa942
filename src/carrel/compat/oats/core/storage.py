"""Pydantic objects in files `<data folder>/<namespace>/<id>.json`."""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from carrel.errors import SessionExists
from carrel.storage.base import MISSING
from carrel.storage.files.store import FileStore

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)


class StorageError(Exception):
    """An object exists already, or does not exist."""


class SessionExistsError(StorageError, SessionExists):
    """A session with this id exists; nothing was changed."""


def data_folder() -> Path:
    """Return the `data_dir` of `$CODER_CONFIG_FILE`, else `$CODER_DATA_DIR`, else `~/.local/share/oats`."""
    folder = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        folder = json.loads(Path(os.environ["CODER_CONFIG_FILE"]).read_text(encoding="utf-8"))["data_dir"]
    return Path(folder or os.environ.get("CODER_DATA_DIR") or "~/.local/share/oats").expanduser()


class Storage(Generic[T]):
    """Keeps objects of one class; each is replaced as a whole."""

    def __init__(self, namespace: str, model_class: type[T]) -> None:
        self.namespace = namespace
        self.model_class = model_class

    @property
    def storage_dir(self) -> Path:
        return data_folder() / self.namespace

    async def create(self, id: str, data: T) -> T:
        if await self._store.put(self._key(id), _encode(data), expect=MISSING) is None:
            raise StorageError(f"{self.namespace}/{id} exists already; update or upsert it")
        return data

    async def update(self, id: str, data: T) -> T:
        stamp = await self._store.stamp(self._key(id))
        if stamp is None:
            raise StorageError(f"there is no {self.namespace}/{id} to update; create or upsert it")
        return await self.upsert(id, data)

    async def upsert(self, id: str, data: T) -> T:
        await self._store.put(self._key(id), _encode(data))
        return data

    async def read(self, id: str) -> T | None:
        """Return the object; None if there is none, or it cannot be read."""
        raw = await self._store.get(self._key(id))
        try:
            return None if raw is None else self.model_class.model_validate_json(raw)
        except ValidationError as problem:
            logger.warning("%s/%s cannot be read: %s", self.namespace, id, problem)
            return None

    async def delete(self, id: str) -> bool:
        return await self._store.delete(self._key(id))

    async def list_ids(self) -> list[str]:
        return sorted(path.stem for path in self.storage_dir.glob("*.json"))

    @property
    def _store(self) -> FileStore:
        return FileStore(data_folder())

    def _key(self, id: str) -> str:
        return f"{self.namespace}/{id}.json"

    # The last method, because after it `list` means this method.
    async def list(self) -> list[T]:
        found = [await self.read(id) for id in await self.list_ids()]
        return [each for each in found if each is not None]


def _encode(data: BaseModel) -> bytes:
    return data.model_dump_json(indent=2).encode()
