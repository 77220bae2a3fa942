"""The names for calls of the host: `tools`, `workflows`, `skills`, `artifacts`, `deps` and others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from time import monotonic  # by name: what code sets on the module time does not matter here
from typing import Any

from .artifacts import Artifacts, ArtifactsWithPath
from .host_calls import HostCallClient, RecordCall, RemoteName
from .workflows import Workflows

_TOOLS_METHODS = ("describe", "list", "search")
_CALL_METHODS = ("call_async", "call_sync", "list")
_FRESH = 1.0
"""Seconds for which a name that the host has confirmed is not checked again."""


def namespaces(host: HostCallClient, names: Iterable[str], builtins: Any) -> dict[str, Any]:
    """Return an object for each name; `skills` is the same object as `workflows`."""
    found: dict[str, Any] = {}
    full_names = list(names)
    words = list(dict.fromkeys(name.partition(".")[0] for name in full_names))
    for name in words:
        found[name] = _KINDS.get(name, RemoteName)(host, name)
    if "tools._names" in full_names:
        found["tools"] = Tools(host, "tools", ToolNames(host))
    if "artifacts.path" in full_names:
        found["artifacts"] = ArtifactsWithPath(host, "artifacts")
    both = [name for name in ("workflows", "skills") if name in words]
    if both:
        workflows = Workflows(host, both[0], builtins, found)
        found.update(dict.fromkeys(both, workflows))
    return found


class Deps(RemoteName):
    """`deps`: packages can be imported as soon as they are installed."""

    __slots__ = ()

    def __getattr__(self, name: str) -> RemoteName:
        call = super().__getattr__(name)
        return _InstallCall(call._host, call._name) if name in ("add", "remove", "sync") else call


class _InstallCall(RecordCall):
    """A call that changes the installed packages."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._print_failures(super().__call__(*args, **kwargs))
        finally:
            importlib.invalidate_caches()

    def call_async(self, *args: Any, **kwargs: Any) -> Any:
        return self._later(super().call_async(*args, **kwargs))

    async def _later(self, call: Any) -> Any:
        try:
            return self._print_failures(await call)
        finally:
            importlib.invalidate_caches()

    def _print_failures(self, report: Any) -> Any:
        """Print what failed, because the error of the import that follows would say less; return the report."""
        if isinstance(report, dict) and report.get("failed"):
            print(f"{self._name}: {report.get('message') or report['failed']}", file=sys.stderr)
        return report


# --- tools ------------------------------------------------------------------------------------------------------------


class ToolNames:
    """The names of tools and recipes, so that an unknown one is an error before it is called."""

    def __init__(self, host: HostCallClient) -> None:
        self._host = host
        self._names: set[str] = set()
        self._since = 0.0

    def check(self, name: str) -> None:
        """Raise `ToolNotFoundError`, which is an AttributeError, for a name that the host does not know."""
        if monotonic() > self._since + _FRESH:
            self._names, self._since = set(), monotonic()
        if name not in self._names:
            self._names.update(self._host.call("tools._names", {"args": [name], "kwargs": {}}))


class Tools(RemoteName):
    """`tools`, and each tool and recipe."""

    __slots__ = ("_names",)
    _names: ToolNames | None

    def __init__(self, host: HostCallClient, name: str, names: ToolNames | None = None) -> None:
        """Without `names`, any name is accepted, and the call shows whether it exists."""
        super().__init__(host, name)
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name: str) -> RemoteName:
        child = super().__getattr__(name)
        if (name in _TOOLS_METHODS and not self._word) or (name == "list" and "." not in self._word):
            return RecordCall(child._host, child._name)
        if self._names is not None:
            if name.startswith("_"):
                raise AttributeError(f"{self._name} has no {name}")
            self._names.check(child._name.partition(".")[2])
        return Tools(child._host, child._name, self._names)

    def __dir__(self) -> list[str]:
        """Return the names for `dir(tools)` and `dir(tools.curl)`."""
        if not self._word:
            return sorted({*_TOOLS_METHODS, *(str(each["name"]).partition(".")[0] for each in self._listed())})
        return sorted({*_CALL_METHODS, *(str(each["name"]).partition(".")[0] for each in self._recipes())})

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # loaded when it is read
        """The text of `help(tools.curl.get)`."""
        group, _, recipe = self._word.partition(".")
        if recipe:
            shown = [details_of(each) for each in self._recipes() if each["name"] == recipe]
        elif group:
            own = [details_of(each) for each in self._listed() if each["name"] == group]
            shown = [*own, *(summary_line(each) for each in self._recipes())]
        else:
            shown = [summary_line(call) for each in self._listed() for call in calls_of(each)]
        return "\n".join(shown) or f"{self._name}, on the host"

    @property
    def _word(self) -> str:
        return self._name.partition(".")[2]

    def _recipes(self) -> list[dict[str, Any]]:
        """Return the recipes of the tool that this name is, or is below."""
        group = self._word.partition(".")[0]
        return [recipe for each in self._listed() if each["name"] == group for recipe in each["recipes"]]

    def _listed(self) -> list[dict[str, Any]]:
        try:
            found = self._host.call("tools.list", {"args": [], "kwargs": {}})
        except Exception:  # noqa: BLE001 - inspecting an object must not raise
            return []
        return [{"recipes": [], **each} for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    def __repr__(self) -> str:
        if self._word:
            return super().__repr__()
        return "<tools: list(), search(query), describe(task), NAME(…)>"


def calls_of(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what can be called of an entry of `tools.list`: the tool itself, if it can be, and its recipes."""
    own = [tool] if "signature" in tool or "error" in tool else []
    return [*own, *tool.get("recipes", ())]


def details_of(tool: dict[str, Any]) -> str:
    """Return signature, description and parameters of an entry of `tools.list`."""
    lines = [f"tools.{tool.get('signature', tool['name'])}", str(tool.get("error") or tool.get("description", ""))]
    lines += [f"  {each['name']}: {each['description']}" for each in tool.get("parameters", ()) if each["description"]]
    return "\n".join(line for line in lines if line.strip())


def summary_line(tool: dict[str, Any]) -> str:
    """Return signature and first sentence of an entry of `tools.list`, or its error."""
    call = f"tools.{tool.get('signature', tool['name'])}"
    about = str(tool.get("error") or tool.get("description", "").partition(". ")[0]).partition("\n")[0]
    return f"{call}  # {about}" if about else call


_KINDS: dict[str, type[RemoteName]] = {"artifacts": Artifacts, "deps": Deps, "tools": Tools}
