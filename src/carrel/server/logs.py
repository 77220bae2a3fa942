"""What the server's logs have in common: a damaged line affects only itself, and a rewrite survives a kill."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import orjson

from carrel.storage.base import Block, Store

logger = logging.getLogger(__name__)

T = TypeVar("T")
_WHOLE = b'{"whole":true}'
"""The last line of a rewritten log that was written to its end."""


def parse_lines(log: str, block: Block, parse: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
    """The records of a block with their numbers; one that cannot be parsed is reported and left out."""
    for number, line in enumerate(block.records, block.first_seq):
        try:
            yield number, parse(line)
        except (ValueError, KeyError, TypeError) as problem:
            reason = str(problem).partition("\n")[0][:200] or type(problem).__name__
            logger.warning("%s, line %d is damaged and ignored: %s", log, number, reason)


def json_object(line: bytes) -> dict[str, Any]:
    """The line as a JSON object, else ValueError."""
    data = orjson.loads(line)
    if not isinstance(data, dict):
        raise ValueError("expected a JSON object")
    return data


async def rewrite(store: Store, log: str, lines: Iterable[bytes]) -> None:
    """Replace a log; a kill at any moment leaves the old one or the new one."""
    await store.delete(_rewritten(log))
    await store.append(_rewritten(log), [*lines, _WHOLE])
    await finish_rewriting(store, log)


async def finish_rewriting(store: Store, log: str) -> None:
    """Put a rewritten log in the place of the old one, if it was written to its end."""
    lines = [line async for block in store.read(_rewritten(log)) for line in block.records]
    if lines and lines[-1] == _WHOLE:
        await store.delete(log)
        await store.append(log, lines[:-1])
    await store.delete(_rewritten(log))


def _rewritten(log: str) -> str:
    return f"{log.removesuffix('.jsonl')}-rewritten.jsonl"
