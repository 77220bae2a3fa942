"""Holds numpy's matrix threads to one while we multiply: on a busy machine they wait for each other.

Measured with four busy processes on two cores: a text in 7 ms with one thread, in 30 to 150 ms with two."""

import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

_guard = threading.Lock()
_inside = 0
_held: Any = None


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Several threads may be inside; what was set before is set again when the last has left."""
    global _inside, _held
    with _guard:
        if _inside == 0:
            _held = _controller().limit(limits=1, user_api="blas")
        _inside += 1
    try:
        yield
    finally:
        with _guard:
            _inside -= 1
            if _inside == 0:
                _held.restore_original_limits()


@cache
def _controller() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # noqa: PLC0415 - looks at all loaded libraries: after numpy

    return ThreadpoolController()
