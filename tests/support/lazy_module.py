"""Import packages that load slowly only when a test uses them."""

import importlib
from typing import Any


class LazyModule:
    """A module that is imported on the first access to one of its names: `agents = LazyModule("agents")`.

    Every test worker collects all tests; only the workers that run the tests of a package then wait for its import."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # pytest looks for its marks on every object in a module
        return getattr(importlib.import_module(self._name), name)
