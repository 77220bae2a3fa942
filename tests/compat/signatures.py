"""Compare signatures with those printed in the documentation of a package."""

import inspect
from collections.abc import Callable
from typing import Any


def plain_signature(function: Callable[..., Any]) -> str:
    """Return the parameters without annotations and without self, as `(a, *, b=None)`."""
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
