"""`tools` as code sees it: every name is one on the host, and what there is can be looked at as with any object."""

from __future__ import annotations

from typing import Any

from .host import Remote

_VERBS = ("describe", "list", "search")
_WAYS = ("call_async", "call_sync", "list")


class Tools(Remote):
    """`tools`, and what is below it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Remote:
        asked = super().__getattr__(name)
        return Tools(asked._host, asked._name)

    def __dir__(self) -> list[str]:
        """What `dir(tools)` and `dir(tools.curl)` show."""
        own = _VERBS if self._word == "" else _WAYS
        return sorted({*own, *(str(each["name"]).partition(".")[0] for each in self._below())})

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # asked for when somebody looks, and not before
        """What `help(tools.curl.get)` shows."""
        group, _, recipe = self._word.partition(".")
        if not recipe:
            below = [in_a_line(each) for each in self._below()]
            return "\n".join([*self._told(group), *below]) or f"{self._name}, on the host"
        return "\n".join(self._told(self._word)) or f"{self._name}, on the host"

    @property
    def _word(self) -> str:
        return self._name.partition(".")[2]

    def _told(self, name: str) -> list[str]:
        """What is known of the tool of this whole name."""
        found = [each for each in self._asked("tools.list") if name and each["name"] == name]
        return [in_full(found[0])] if found else []

    def _below(self) -> list[dict[str, Any]]:
        """What can be called below this name; nothing below a recipe."""
        found = [] if "." in self._word else self._asked(f"{self._name}.list")
        return [each for each in found if each["name"] != self._word]

    def _asked(self, name: str) -> list[dict[str, Any]]:
        try:
            found = self._host.call(name, {"args": [], "kwargs": {}})
        except Exception:  # noqa: BLE001 - looking at an object raises nothing, whatever the host says
            return []
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    def __repr__(self) -> str:
        if self._word:
            return super().__repr__()
        return "<tools: list(), search(query), describe(task), NAME(…)>"


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
