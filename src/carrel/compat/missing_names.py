"""Explain names of an original package that its compatibility module leaves out."""

from collections.abc import Callable, Mapping
from typing import NoReturn


def refuse_missing(module: str, reasons: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__`, which raises an ImportError with the reason for a name that is left out."""

    def __getattr__(name: str) -> NoReturn:
        if name in reasons:
            raise ImportError(f"{module} has no {name}: {reasons[name]}", name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
