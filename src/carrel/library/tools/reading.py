"""The definitions that a store holds, each file read only when its content is new."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from pydantic import ValidationError

from carrel.errors import ConfigurationError, StorageError
from carrel.library.tools.definition import AnyDefinition, adapter, parse
from carrel.library.tools.definition_remote import Definition
from carrel.storage.base import Store

logger = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]

_MOST_KEPT = 5000
_parsed: dict[str, AnyDefinition] = {}
"""By the hash of the file; all sessions of this process share it, because definitions never change."""


@dataclass(frozen=True)
class Definitions:
    """What was found, and what was wrong with the rest, by file."""

    by_file: dict[str, AnyDefinition] = field(default_factory=dict)
    problems: dict[str, ConfigurationError] = field(default_factory=dict)


async def definition_files(store: Store, prefix: str = "tools") -> list[str]:
    """All of `prefix/**/*.yaml` and `.yml`."""
    return [key for key in await store.list(prefix) if key.endswith((".yaml", ".yml"))]


async def read_definitions(
    store: Store, prefix: str = "tools", on_error: OnError = "raise", files: Sequence[str] | None = None
) -> Definitions:
    """What the files define. A bad one, or a name that stands in two, is a `ConfigurationError`;

    with `on_error="skip"` it is logged and the others are there. `files`: as `definition_files` found them just now."""
    files = await definition_files(store, prefix) if files is None else files
    contents = {file: data for file, data in zip(files, await store.get_many(files), strict=True) if data is not None}
    hashes = {file: hashlib.blake2b(data, digest_size=16).hexdigest() for file, data in contents.items()}
    place = f"library/{prefix}/parsed.json"
    if not _parsed.keys() >= set(hashes.values()):
        await _recall(store, place)
    found, new = Definitions(), False
    named: dict[str, str] = {}
    for file, data in contents.items():
        try:
            definition = _parsed.get(hashes[file])
            if definition is None:
                if _is_openapi(data):
                    continue
                definition, new = parse(data, file), True
                _keep(hashes[file], definition)
            if definition.name in named:
                raise ConfigurationError(
                    f"{file}, name: {definition.name} is defined in {named[definition.name]} already"
                )
        except ConfigurationError as problem:
            if on_error == "raise":
                raise
            logger.warning("a tool was left out: %s", problem)
            found.problems[file] = problem
            continue
        named[definition.name] = file
        found.by_file[file] = definition
    if new:
        await _remember(store, place, hashes.values())
    return found


def _is_openapi(data: bytes) -> bool:
    """Whether a file is what a definition with `type: openapi` refers to, and no definition itself."""
    return any(line.startswith((b"openapi:", b"swagger:", b'"openapi"')) for line in data[:20_000].splitlines())


def _keep(key: str, definition: AnyDefinition) -> None:
    while len(_parsed) >= _MOST_KEPT:
        _parsed.pop(next(iter(_parsed)))
    _parsed[key] = definition


async def _recall(store: Store, place: str) -> None:
    """What another process has read already; reading it is thirty times quicker than reading YAML."""
    try:
        data = await store.get(place)
        known: Any = orjson.loads(data) if data else {}
        for key, fields in known.items() if isinstance(known, dict) else ():
            if key not in _parsed:
                _keep(str(key), adapter().validate_python(fields))
    except (StorageError, ValidationError, orjson.JSONDecodeError) as problem:
        logger.debug("the tools read before are read again: %s", problem)


async def _remember(store: Store, place: str, hashes: Iterable[str]) -> None:
    kept = {key: _dumped(_parsed[key]) for key in hashes if key in _parsed}
    try:
        await store.put(place, orjson.dumps(kept))
    except StorageError as problem:
        logger.debug("the tools that were read cannot be kept for the next time: %s", problem)


def _dumped(definition: Definition) -> dict[str, Any]:
    return definition.model_dump(mode="json", by_alias=True, exclude_unset=True)
