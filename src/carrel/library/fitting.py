"""Whether the arguments that code gave fit what it called."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def refuse_misfit(name: str, called: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """TypeError that shows how it is called, in the words that the code used."""
    signature = inspect.signature(called)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as problem:
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        raise TypeError(f"{name}{inspect.Signature(bare)}: {problem}") from None
