"""Compare signatures with those printed in the documentation of a package."""

import inspect
from collections.abc import Callable, Collection
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


def unchecked(checked: Collection[Any], *owners: Any, names: str = "") -> list[str]:
    """Return the functions of classes, or those of these names of a module, that are not among the checked ones."""
    found = []
    for owner in owners:
        for name in names.split() or [name for name in vars(owner) if name[0] != "_"]:
            member = getattr(owner, name)
            if (inspect.isfunction(member) or inspect.ismethod(member)) and member not in checked:
                found.append(f"{owner.__name__}.{name}")
    return found
