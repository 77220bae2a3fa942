"""Loaded by every Python of a test command: brings a recorder into pytest and into `python -m unittest`.

Standard library only, and any Python from 3.6 on. It needs no variable but the one with which it is found, so that
a program that changes PYTHONPATH for what it starts takes the recorder away, and breaks nothing.
"""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Pytest:
    """Finds pytest's configuration, once, and has it load the recorder with the plugins that variables name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "_pytest.config":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader if spec is not None else None  # type: Any
        honest = getattr(loader, "exec_module", None)
        if honest is None:
            return spec

        def exec_module(module: Any) -> None:
            honest(module)
            _call_recorder(module.PytestPluginManager)

        loader.exec_module = exec_module
        return spec


def _call_recorder(manager: Any) -> None:
    honest = manager.consider_env

    def consider_env(self: Any) -> None:
        if "CARREL_WITNESS" in os.environ:
            named = os.environ.get("PYTEST_PLUGINS", "")
            os.environ["PYTEST_PLUGINS"] = "carrel_witness," + named if named else "carrel_witness"
            if _HERE not in sys.path:
                sys.path.append(_HERE)
        honest(self)

    manager.consider_env = consider_env


def _load_the_next() -> None:
    """The customization that the environment has itself, which this one hides."""
    others = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_words = getattr(sys, "orig_argv", [])
_runs_unittest = "-munittest" in _words or ("-m" in _words[:-1] and _words[_words.index("-m") + 1] == "unittest")
if "CARREL_WITNESS" in os.environ and _runs_unittest:
    import carrel_unittest

    carrel_unittest.attend()
if "CARREL_WITNESS" in os.environ:
    sys.meta_path.insert(0, _Pytest())  # type: ignore[arg-type]
_load_the_next()
