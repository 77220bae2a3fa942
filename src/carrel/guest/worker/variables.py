"""A session's variables as a list: name, type, size and a short preview of each."""

from __future__ import annotations

import sys
from typing import Any

from .values import safe_repr

MOST = 1000
"""Variables in a list; the newest ones beyond are left out."""
PREVIEW = 200
"""Characters of a preview."""
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


class ListVariables:
    """Takes the place of a `Cell`: it runs as code does, because previews call `__repr__` methods of the user's.

    After an interrupt it goes on without those."""

    is_async = harmless = False

    def __init__(self, own: dict[str, Any]) -> None:
        """`own` are the names that every session has; they are listed only where code has replaced them."""
        self._own = own

    def run(self, names: dict[str, Any]) -> list[dict[str, Any]]:
        calls_repr = True
        while True:
            try:
                return self._list(names, calls_repr=calls_repr)
            except KeyboardInterrupt:
                calls_repr = False

    async def run_async(self, names: dict[str, Any]) -> list[dict[str, Any]]:
        return self.run(names)

    def _list(self, names: dict[str, Any], *, calls_repr: bool) -> list[dict[str, Any]]:
        found = []
        for name, value in list(names.items()):
            if not isinstance(name, str) or name.startswith("_") or (name in self._own and self._own[name] is value):
                continue
            shown = calls_repr or type(value) in _SCALARS
            found.append(
                {
                    "name": name,
                    "type": str(type(value).__name__),
                    "size": _size(value),
                    "preview": safe_repr(value, PREVIEW) if shown else "",
                }
            )
            if len(found) == MOST:
                break
        return found


def _size(value: Any) -> int:
    """Bytes of the object itself, without what it refers to."""
    try:
        return sys.getsizeof(value)
    except Exception:  # noqa: BLE001 - the user's own __sizeof__ may raise anything
        return 0
