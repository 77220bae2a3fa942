"""The names that code finds: `tools`, `workflows`, `skills`, `artifacts`, `deps`, and what else the host answers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

from .artifacts import Artifacts
from .host import Host, Remote
from .records import RecordCall
from .tool_calls import ToolNames, Tools
from .workflows import Workflows


def namespaces(host: Host, names: Iterable[str], builtins: Any) -> dict[str, Any]:
    """One object for each name; `skills` is the same object as `workflows`."""
    given: dict[str, Any] = {}
    whole = list(names)
    asked = list(dict.fromkeys(name.partition(".")[0] for name in whole))
    for name in asked:
        given[name] = _KINDS.get(name, Remote)(host, name)
    if "tools._names" in whole:
        given["tools"] = Tools(host, "tools", ToolNames(host))
    called = [name for name in ("workflows", "skills") if name in asked]
    if called:
        workflows = Workflows(host, called[0], builtins, given)
        given.update(dict.fromkeys(called, workflows))
    return given


class Deps(Remote):
    """`deps`: what is installed can be imported at once."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Remote:
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


_KINDS: dict[str, type[Remote]] = {"artifacts": Artifacts, "deps": Deps, "tools": Tools}
