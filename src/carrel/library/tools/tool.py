"""What a tool is, and the protocol of its provider."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from carrel.processes import OnOutput

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

RETRY_AFTER = 30.0
"""Seconds after which a provider that failed is tried again by a listing, or by a call if the failure was slow."""
SLOW_FAILURE = 1.0
"""A failure that took longer is repeated to the next callers at once, instead of making each of them wait."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One thing that can be called."""

    name: str
    """As code calls it: `curl`, `curl.get`, `time.convert_time`."""
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    """The JSON Schema of its arguments, an object; its properties are named as in Python."""
    returns: Mapping[str, Any] | None = None
    """The JSON Schema of its result, where it is known."""
    positional: tuple[str, ...] = ()
    """Which parameters may be given without a name; the required ones come first, and then in this order."""
    tags: tuple[str, ...] = ()
    approval: Literal["never", "ask"] = "never"
    timeout: float | None = 60.0
    """Seconds a call may take; None is no limit."""
    stream: bool = False
    """Whether code that calls it sees its output while it comes."""
    takes_values: bool = False
    """Whether it is given Python's values as they are: tuples, sets, dates. Else it gets what JSON knows."""

    @property
    def in_order(self) -> tuple[str, ...]:
        """The parameters that arguments without a name fill, in the order in which they do."""
        listed = self.parameters.get("required")
        required = listed if isinstance(listed, list | tuple) else ()
        return tuple(sorted(self.positional, key=lambda name: name not in required))


@runtime_checkable
class ToolProvider(Protocol):
    """Whoever has tools: a definition file, an MCP server, a Python function.

    A `description`, where it has one, is what a list says of a provider that cannot be called by its name alone."""

    name: str
    """The first word of all its tools' names."""

    async def definitions(self) -> Sequence[Tool]:
        """What it has; starts what has to run for that. `ConfigurationError` or `ToolCallError` when it cannot say."""

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: OnOutput | None = None) -> Any:
        """The result as data. Arguments have been checked against `tool.parameters`.

        `ToolCallError` when it fails, `ToolTimeoutError` when it takes longer than `tool.timeout`; cancelling the
        caller ends what it started. With `stream`, output is given out while it comes, too."""

    async def close(self) -> None:
        """End everything it started; twice is harmless."""


@runtime_checkable
class SlowToStart(Protocol):
    """A provider that takes a while to say what it has: what it said is kept for whoever looks before it does again."""

    fingerprint: str
    """Another one when it may have other tools."""
