"""The names of four earlier packages, so that their programs run on carrel after a change of the import line."""

from collections.abc import Callable, Mapping
from typing import NoReturn

INTERNAL = "it is an internal part of the original"


def refuse_missing(module: str, reasons: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__`, which raises an ImportError with the reason for a name that is left out."""

    def __getattr__(name: str) -> NoReturn:
        if name in reasons:
            raise ImportError(f"{module} has no {name}: {reasons[name]}", name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
