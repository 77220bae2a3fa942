"""The names that code finds: `tools`, `workflows`, `skills`, `artifacts`, `deps`, and what else the host answers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from time import monotonic  # by name: what code sets on the module time does not matter here
from typing import Any

from .artifacts import Artifacts
from .host_calls import HostCallClient, RecordCall, RemoteName
from .workflows import Workflows

_VERBS = ("describe", "list", "search")
_WAYS = ("call_async", "call_sync", "list")
_FRESH = 1.0
"""Seconds for which a name that the host has confirmed is not asked for again."""


def namespaces(host: HostCallClient, names: Iterable[str], builtins: Any) -> dict[str, Any]:
    """One object for each name; `skills` is the same object as `workflows`."""
    given: dict[str, Any] = {}
    whole = list(names)
    asked = list(dict.fromkeys(name.partition(".")[0] for name in whole))
    for name in asked:
        given[name] = _KINDS.get(name, RemoteName)(host, name)
    if "tools._names" in whole:
        given["tools"] = Tools(host, "tools", ToolNames(host))
    called = [name for name in ("workflows", "skills") if name in asked]
    if called:
        workflows = Workflows(host, called[0], builtins, given)
        given.update(dict.fromkeys(called, workflows))
    return given


class Deps(RemoteName):
    """`deps`: what is installed can be imported at once."""

    __slots__ = ()

    def __getattr__(self, name: str) -> RemoteName:
        asked = super().__getattr__(name)
        return _Installing(asked._host, asked._name) if name in ("add", "remove", "sync") else asked


class _Installing(RecordCall):
    """A call after which other packages are there."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._told(super().__call__(*args, **kwargs))
        finally:
            importlib.invalidate_caches()

    def call_async(self, *args: Any, **kwargs: Any) -> Any:
        return self._then(super().call_async(*args, **kwargs))

    async def _then(self, call: Any) -> Any:
        try:
            return self._told(await call)
        finally:
            importlib.invalidate_caches()

    def _told(self, report: Any) -> Any:
        """The report; what failed is said besides, for the import that follows would say less."""
        if isinstance(report, dict) and report.get("failed"):
            print(f"{self._name}: {report.get('message') or report['failed']}", file=sys.stderr)
        return report


# --- tools ------------------------------------------------------------------------------------------------------------


class ToolNames:
    """Which tools and recipes there are, so that an unknown name is an error as soon as it is written."""

    def __init__(self, host: HostCallClient) -> None:
        self._host = host
        self._names: set[str] = set()
        self._since = 0.0

    def check(self, name: str) -> None:
        """`ToolNotFoundError`, which is an AttributeError, for a name that the host does not know."""
        if monotonic() > self._since + _FRESH:
            self._names, self._since = set(), monotonic()
        if name not in self._names:
            self._names.update(self._host.call("tools._names", {"args": [name], "kwargs": {}}))


class Tools(RemoteName):
    """`tools`, and what is below it."""

    __slots__ = ("_names",)
    _names: ToolNames | None

    def __init__(self, host: HostCallClient, name: str, names: ToolNames | None = None) -> None:
        """Without `names`, every name is taken to be one, and the call shows whether it is."""
        super().__init__(host, name)
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name: str) -> RemoteName:
        asked = super().__getattr__(name)
        if (name in _VERBS and not self._word) or (name == "list" and "." not in self._word):
            return RecordCall(asked._host, asked._name)
        if self._names is not None:
            if name.startswith("_"):
                raise AttributeError(f"{self._name} has no {name}")
            self._names.check(asked._name.partition(".")[2])
        return Tools(asked._host, asked._name, self._names)

    def __dir__(self) -> list[str]:
        """What `dir(tools)` and `dir(tools.curl)` show."""
        if not self._word:
            return sorted({*_VERBS, *(str(each["name"]).partition(".")[0] for each in self._listed())})
        return sorted({*_WAYS, *(str(each["name"]).partition(".")[0] for each in self._recipes())})

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # asked for when somebody looks, and not before
        """What `help(tools.curl.get)` shows."""
        group, _, recipe = self._word.partition(".")
        if recipe:
            shown = [in_full(each) for each in self._recipes() if each["name"] == recipe]
        elif group:
            own = [in_full(each) for each in self._listed() if each["name"] == group]
            shown = [*own, *(in_a_line(each) for each in self._recipes())]
        else:
            shown = [in_a_line(call) for each in self._listed() for call in calls_of(each)]
        return "\n".join(shown) or f"{self._name}, on the host"

    @property
    def _word(self) -> str:
        return self._name.partition(".")[2]

    def _recipes(self) -> list[dict[str, Any]]:
        """What can be called below the tool that this name is in, or is."""
        group = self._word.partition(".")[0]
        return [recipe for each in self._listed() if each["name"] == group for recipe in each["recipes"]]

    def _listed(self) -> list[dict[str, Any]]:
        try:
            found = self._host.call("tools.list", {"args": [], "kwargs": {}})
        except Exception:  # noqa: BLE001 - looking at an object raises nothing, whatever the host says
            return []
        return [{"recipes": [], **each} for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    def __repr__(self) -> str:
        if self._word:
            return super().__repr__()
        return "<tools: list(), search(query), describe(task), NAME(…)>"


def calls_of(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """What of a tool can be called, as `tools.list` gives it: itself, if it can be, and its recipes."""
    own = [tool] if "signature" in tool or "error" in tool else []
    return [*own, *tool.get("recipes", ())]


def in_full(tool: dict[str, Any]) -> str:
    """A tool as `tools.list` gives it, for somebody who wants to call it."""
    lines = [f"tools.{tool.get('signature', tool['name'])}", str(tool.get("error") or tool.get("description", ""))]
    lines += [f"  {each['name']}: {each['description']}" for each in tool.get("parameters", ()) if each["description"]]
    return "\n".join(line for line in lines if line.strip())


def in_a_line(tool: dict[str, Any]) -> str:
    """The same for somebody who looks for one: the first sentence, unless it tells what is wrong."""
    call = f"tools.{tool.get('signature', tool['name'])}"
    about = str(tool.get("error") or tool.get("description", "").partition(". ")[0]).partition("\n")[0]
    return f"{call}  # {about}" if about else call


_KINDS: dict[str, type[RemoteName]] = {"artifacts": Artifacts, "deps": Deps, "tools": Tools}
