"""Canary tests: one that must fail and one that must pass, run by pytest like the sample's own tests.

They are functions in a module, named like existing tests, and go through the same steps to a report, which is not
shown. Hooks of `conftest.py` and of installed plugins are not called for them, since those may count failures or stop
at one. They have no fixtures, and do not touch what is set up for the tests.
"""

import os
import types
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest

_chance = SystemRandom()
_STATE = ("_setupstate", "shouldstop", "shouldfail", "_shouldstop", "_shouldfail", "testsfailed")
"""Attributes of a session: what is set up, and what a hook may set after a failure."""


class Canary(pytest.Function):
    """A test with its own set of hooks."""

    hooks = None  # type: Any

    @property
    def ihook(self) -> Any:
        return self.hooks


class _Hooks:
    """All hooks except those of some plugins."""

    def __init__(self, manager: Any, without: Any) -> None:
        self._manager, self._without = manager, without

    def __getattr__(self, name: str) -> Any:
        return self._manager.subset_hook_caller(name, remove_plugins=self._without)


class _Plain(pytest.Item):
    """A test that cannot pass, for versions of pytest that create function tests in an unknown way."""

    def runtest(self) -> None:
        raise AssertionError("as it should")

    def reportinfo(self) -> Any:
        return self.fspath, 0, self.name

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return "as it should"


def find_lie(session: Any, known: Any, without: Any) -> str:
    """What is wrong with pytest's reports of the two canaries; empty when nothing is. `known` are tests to imitate."""
    ran = []  # type: list[str]

    def failing() -> None:
        ran.append("failing")
        raise AssertionError("as it should")  # `python -O` leaves out what `assert` says

    def passing() -> None:
        ran.append("passing")

    pair = [("failing", failing), ("passing", passing)]
    _chance.shuffle(pair)
    for which, function in pair:
        try:
            item = _made(session, function, known, without)
        except Exception:  # noqa: BLE001 -- each version of pytest creates them in its own way
            if which == "passing":
                continue
            make = getattr(_Plain, "from_parent", None)
            item = make(session, name=_name(known)) if make else _Plain(_name(known), session)
        outcomes = _outcomes(session, item)
        if outcomes.get("setup") != "passed" or session.config.getoption("setuponly", False):
            continue
        if which == "failing" and outcomes.get("call") != "failed":
            return "a test that must fail was reported as " + str(outcomes.get("call"))
        if which == "passing" and outcomes.get("call") == "passed" and "passing" not in ran:
            return "a test was reported as passed, and did not run"
    return ""


def place_of(node: Any) -> Any:
    return getattr(node, "path", None) or node.fspath


def _outcomes(session: Any, item: Any) -> Any:
    from _pytest import runner  # noqa: PLC0415 -- as late as possible, to find what was changed

    state = session.__dict__
    was = {name: state[name] for name in _STATE if name in state}
    if "_setupstate" in was:
        state["_setupstate"] = type(was["_setupstate"])()
    try:
        reports = runner.runtestprotocol(item, log=False, nextitem=None)
    finally:
        state.update(was)
    return {report.when: report.outcome for report in reports}


def _made(session: Any, function: Any, known: Any, without: Any) -> Any:
    name, like = _name(known), _chance.choice(known) if known else None
    folder = os.path.dirname(str(place_of(like))) if like is not None else str(place_of(session))
    module = _module(session, os.path.join(folder, _name(known) + ".py"))
    module._obj = types.ModuleType(module.name)
    function.__name__ = name
    setattr(module._obj, name, function)
    if hasattr(Canary, "from_parent"):
        item = Canary.from_parent(module, name=name, callobj=function)
    else:
        item = Canary(name, module, callobj=function)
    item.fixturenames[:] = []
    item.hooks = _Hooks(session.config.pluginmanager, without)
    return item


def _module(session: Any, path: str) -> Any:
    if hasattr(pytest.Module, "from_parent"):
        try:
            return pytest.Module.from_parent(session, path=Path(path))
        except TypeError:
            return pytest.Module.from_parent(session, fspath=type(session.fspath)(path))
    return pytest.Module(type(session.fspath)(path), session)


def _name(known: Any) -> str:
    """A new random name made of parts of the existing tests' names."""
    parts = {part for item in known for part in str(item.name).partition("[")[0].split("_") if part.isalnum()}
    chosen = _chance.sample(sorted(parts - {"test"}), min(2, len(parts - {"test"})))
    return "_".join(["test", *chosen, _chance.choice("abcdefghkmnp") + str(_chance.randrange(2, 99))])
