"""What the host's lists and reports look like to code: dicts whose keys are attributes too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .host import Remote


class AttributeDict(dict[str, Any]):
    """A dict whose keys can be read as attributes: `tools.list()[0].name`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r} in it; there is {', '.join(map(str, self))}") from None

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *map(str, self)})


def with_attributes(value: Any) -> Any:
    """The same data, each dict in it as an `AttributeDict`."""
    if isinstance(value, dict):
        return AttributeDict({key: with_attributes(item) for key, item in value.items()})
    if isinstance(value, list):
        return [with_attributes(item) for item in value]
    return value


class RecordCall(Remote):
    """A call of the host that returns records: dicts, or lists of them."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return with_attributes(super().__call__(*args, **kwargs))

    def call_async(self, *args: Any, **kwargs: Any) -> Any:
        return self._converted(super().call_async(*args, **kwargs))

    async def _converted(self, call: Any) -> Any:
        return with_attributes(await call)
