"""Artifacts as objects, as dicts, and their stores, whose methods are plain calls."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from carrel import errors
from carrel.compat import INTERNAL, refuse_missing
from carrel.compat.py_code_mode.errors import ArtifactNotFoundError
from carrel.compat.py_code_mode.skills import wait_for
from carrel.library.artifacts import ArtifactStore


@dataclass
class Artifact:
    name: str
    path: str
    description: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))


class PathTraversalError(ValueError):
    """The name of an artifact leads outside of the store."""


class FileArtifactStore:
    """The artifacts of a folder; its methods are plain calls, also while an event loop runs."""

    def __init__(self, store: ArtifactStore, path: str) -> None:
        self._store = store
        self.path = path

    def _shown(self, artifact: Mapping[str, Any]) -> Artifact:
        shown = artifact_dict(artifact, read_index(self.path))
        return Artifact(**{**shown, "created_at": datetime.fromisoformat(shown["created_at"])})

    def save(self, name: str, data: Any, description: str = "", metadata: dict[str, Any] | None = None) -> Artifact:
        checked_name(name)
        return self._shown(wait_for(self._store.save(name, data, description, metadata)))

    def load(self, name: str) -> Any:
        try:
            return wait_for(self._store.load(name))
        except errors.ArtifactNotFoundError as problem:
            raise ArtifactNotFoundError(name) from problem

    def get(self, name: str) -> Artifact | None:
        found = wait_for(self._store.get(name))
        return None if found is None else self._shown(found)

    def exists(self, name: str) -> bool:
        return wait_for(self._store.exists(name))

    def delete(self, name: str) -> None:
        wait_for(self._store.delete(name))

    def list(self) -> list[Artifact]:
        return sorted(map(self._shown, wait_for(self._store.list())), key=lambda each: (each.created_at, each.name))


class RedisArtifactStore(FileArtifactStore):
    """The same for Redis."""


def checked_name(name: str) -> str:
    """Return the name of an artifact; an error that names path traversal if it leads outside."""
    if isinstance(name, str) and (name.startswith("/") or ".." in name.split("/")):
        raise PathTraversalError(f"path traversal: the artifact {name!r} would be outside of the store")
    return name


def read_index(folder: str | Path) -> dict[str, Any]:
    """Return what the original noted of the artifacts in a folder; nothing if it has not used the folder."""
    try:
        index = json.loads((Path(folder) / ".artifacts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}


def artifact_dict(artifact: Mapping[str, Any], index: Mapping[str, Any]) -> dict[str, Any]:
    """Return an artifact of carrel as a session has it; one that the original saved is described in its index."""
    shown = {name: artifact[name] for name in ("name", "path", "description", "metadata", "created_at")}
    known = index.get(shown["name"])
    if isinstance(known, dict) and not shown["description"] and not shown["metadata"]:
        shown |= {name: known[name] for name in ("description", "metadata", "created_at") if known.get(name)}
    return shown


def by_age(artifact: Mapping[str, Any]) -> tuple[datetime, str]:
    """The key for the order of the first save."""
    return datetime.fromisoformat(artifact["created_at"]), artifact["name"]


_MISSING = "ArtifactStoreProtocol"
__getattr__ = refuse_missing(__name__, dict.fromkeys(_MISSING.split(), INTERNAL))
