"""From a coroutine on a line that blocks to a plain function, with its arguments and types."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")


def finished(work: Awaitable[R]) -> R:
    """What a coroutine returns that never pauses."""
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    steps.close()
    raise RuntimeError("a call of the blocking client paused; this is a mistake in carrel")


def pieces_of(stream: AsyncGenerator[R, None]) -> Iterator[R]:
    """The same for one that yields; leaving early ends it."""
    try:
        while True:
            try:
                piece = finished(anext(stream))
            except StopAsyncIteration:
                return
            yield piece
    finally:
        finished(stream.aclose())


class blocking(Generic[P, R]):  # used like a decorator
    """A method that waits, as one that blocks; it is called on `_under` of the object."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> blocking[P, R]: ...
    @overload
    def __get__(self, instance: Any, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: Any, owner: type) -> blocking[P, R] | Callable[P, R]:
        if instance is None:
            return self
        under = instance._under

        @functools.wraps(self.method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return finished(self.method(under, *args, **kwargs))

        return call


class blocking_stream(Generic[P, R]):
    """A method that yields as things come, as a plain iterator."""

    def __init__(self, method: Callable[Concatenate[Any, P], AsyncGenerator[R, None]]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> blocking_stream[P, R]: ...
    @overload
    def __get__(self, instance: Any, owner: type) -> Callable[P, Iterator[R]]: ...
    def __get__(self, instance: Any, owner: type) -> blocking_stream[P, R] | Callable[P, Iterator[R]]:
        if instance is None:
            return self
        under = instance._under

        @functools.wraps(self.method)
        def call(*args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
            return pieces_of(self.method(under, *args, **kwargs))

        return call
