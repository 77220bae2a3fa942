"""Loaded by every Python process of a test command: installs a recorder in pytest and `python -m unittest`.

Standard library only; Python 3.6 or later. It is found by PYTHONPATH alone, so a program that changes that variable
for its children only loses the recorder, and nothing breaks.
"""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Pytest:
    """An import hook for pytest's configuration: makes pytest load the recorder with the plugins of PYTEST_PLUGINS."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "_pytest.config":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader if spec is not None else None  # type: Any
        original = getattr(loader, "exec_module", None)
        if original is None:
            return spec

        def exec_module(module: Any) -> None:
            original(module)
            _add_recorder(module.PytestPluginManager)

        loader.exec_module = exec_module
        return spec


def _add_recorder(manager: Any) -> None:
    original = manager.consider_env

    def consider_env(self: Any) -> None:
        if "CARREL_RECORDER" in os.environ:
            named = os.environ.get("PYTEST_PLUGINS", "")
            os.environ["PYTEST_PLUGINS"] = "carrel_pytest," + named if named else "carrel_pytest"
            if _HERE not in sys.path:
                sys.path.append(_HERE)
        original(self)

    manager.consider_env = consider_env


def _watch_other_programs(send: Any, of_the_agent: Any, ended_watch: Any) -> None:
    """Tell the host when the agent's code runs in a program of the test command that is not the test runner.

    Such code can read the recorder's marker. A runner opens the channel, and so ends this, before it loads any code."""

    def hook(event: str, values: Any) -> None:
        if event == "exec" and not ended_watch:
            file = of_the_agent(os.path.abspath(values[0].co_filename))
            if file:
                ended_watch.append(True)
                send(event="early", file=file)

    if send is not None and hasattr(sys, "addaudithook"):
        sys.addaudithook(hook)


def _load_hidden_sitecustomize() -> None:
    """Load the sitecustomize module of the environment, which this one hides."""
    others = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_words = getattr(sys, "orig_argv", [])
_runs_unittest = "-munittest" in _words or ("-m" in _words[:-1] and _words[_words.index("-m") + 1] == "unittest")
if "CARREL_RECORDER" in os.environ and _runs_unittest:
    import carrel_unittest

    carrel_unittest.install()
if "CARREL_RECORDER" in os.environ:
    sys.meta_path.insert(0, _Pytest())  # type: ignore[arg-type]
    import carrel_channel
    import carrel_known_functions

    _send = carrel_channel.lines_for(os.environ["CARREL_RECORDER"])
    _watch_other_programs(_send, carrel_known_functions.of_the_agent, carrel_channel.ended_watch)
    del _send
_load_hidden_sitecustomize()
