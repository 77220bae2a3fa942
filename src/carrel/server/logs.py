"""Reads the lines of the server's logs; a damaged line affects only itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import orjson

from carrel.storage.base import Block

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
