"""What a call is given is looked at before anything is asked: names that nobody knows, times that are none."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, get_args, get_type_hints

from carrel.errors import ConfigurationError


def refuse_unknown(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for the first name that is not among the known ones, with the one that was meant."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
            raise TypeError(f"{call}() has no argument {name!r}; {hint}")


def exact(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, which takes no other names than those that it and the type of its `**more` name."""

    @functools.cache
    def known() -> tuple[str, ...]:
        kinds = {each.kind: name for name, each in inspect.signature(method).parameters.items()}
        collected = kinds[inspect.Parameter.VAR_KEYWORD]
        (more,) = get_args(get_type_hints(method)[collected])
        own = [name for name in inspect.signature(method).parameters if name not in ("self", collected)]
        return (*own, *get_type_hints(more))

    def check(given: Iterable[str]) -> None:
        refuse_unknown(method.__name__, given, known())

    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def pieces(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            check(kwargs)
            async with aclosing(method(*args, **kwargs)) as stream:
                async for piece in stream:
                    yield piece

        return pieces

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        check(kwargs)
        return await method(*args, **kwargs)

    return call


def takes_more(method: object) -> bool:
    """Whether it is a call of a client that collects arguments by name."""
    if not (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
        return False
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in inspect.signature(method).parameters.values())


def must_be_seconds(name: str, given: object) -> None:
    """ConfigurationError, which is a ValueError, for what is no length of time; None is no limit."""
    try:
        fits = given is None or (isinstance(given, int | float) and not isinstance(given, bool) and float(given) >= 0)
    except OverflowError:  # an integer beyond all floats
        fits = False
    if not fits:
        raise ConfigurationError(f"{name} is {given!r}; it is a number of seconds from 0 on, or None")
