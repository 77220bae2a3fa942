"""`tools` as code sees it: every name is one on the host, and what there is can be looked at as with any object."""

from __future__ import annotations

from time import monotonic  # by name: what code sets on the module time does not matter here
from typing import Any

from .host import Host, Remote
from .records import RecordCall

_VERBS = ("describe", "list", "search")
_WAYS = ("call_async", "call_sync", "list")
_FRESH = 1.0
"""Seconds for which a name that the host has confirmed is not asked for again."""


class ToolNames:
    """Which tools and recipes there are, so that an unknown name is an error as soon as it is written."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._names: set[str] = set()
        self._since = 0.0

    def check(self, name: str) -> None:
        """`ToolNotFoundError`, which is an AttributeError, for a name that the host does not know."""
        if monotonic() > self._since + _FRESH:
            self._names, self._since = set(), monotonic()
        if name not in self._names:
            self._names.update(self._host.call("tools._names", {"args": [name], "kwargs": {}}))


class Tools(Remote):
    """`tools`, and what is below it."""

    __slots__ = ("_names",)
    _names: ToolNames | None

    def __init__(self, host: Host, name: str, names: ToolNames | None = None) -> None:
        """Without `names`, every name is taken to be one, and the call shows whether it is."""
        super().__init__(host, name)
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name: str) -> Remote:
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
