"""Packages that take long to load."""

import importlib
from typing import Any


class Late:
    """A module that is loaded when one of its names is first asked for: `agents = Late("agents")`.

    Every test worker collects all tests; so only those that run the tests of a package wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # pytest looks for marks of its own at whatever stands in a module
        return getattr(importlib.import_module(self._name), name)
