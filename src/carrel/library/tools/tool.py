"""What a tool is, and the protocol of its provider."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from carrel.processes import OnOutput

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

RETRY_AFTER = 30.0
"""Seconds after which a listing tries a failed provider again, and a call too if the failure was slow."""
SLOW_FAILURE = 1.0
"""Seconds; the next callers get the error of a failure that took longer at once, instead of waiting each."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that code can call."""

    name: str
    """As code calls it: `curl`, `curl.get`, `time.convert_time`."""
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    """JSON Schema of its arguments, an object whose properties have Python names."""
    returns: Mapping[str, Any] | None = None
    """JSON Schema of its result, if it is known."""
    positional: tuple[str, ...] = ()
    """Parameters that may be passed without a name: required ones first, then in this order."""
    tags: tuple[str, ...] = ()
    approval: Literal["never", "ask"] = "never"
    timeout: float | None = 60.0
    """Seconds a call may take; None for no limit."""
    stream: bool = False
    """Whether code that calls it gets its output as it comes."""
    takes_values: bool = False
    """Whether it takes Python values as they are: tuples, sets, dates. Otherwise it gets JSON values."""

    @property
    def in_order(self) -> tuple[str, ...]:
        """The parameters that positional arguments fill, in order."""
        listed = self.parameters.get("required")
        required = listed if isinstance(listed, list | tuple) else ()
        return tuple(sorted(self.positional, key=lambda name: name not in required))


@runtime_checkable
class ToolProvider(Protocol):
    """A source of tools: a definition file, an MCP server, a Python function.

    Listings show its `description`, if it has one, where it cannot be called by its name alone."""

    name: str
    """The first word of the names of all its tools."""

    async def definitions(self) -> Sequence[Tool]:
        """Return its tools, and start what is needed for that; `ConfigurationError` or `ToolCallError` when it fails.

        The same list object means that nothing has changed."""

    async def call(self, tool: Tool, arguments: Mapping[str, Any], on_output: OnOutput | None = None) -> Any:
        """Return the result as data. The arguments are valid for `tool.parameters`.

        `ToolCallError` when it fails, `ToolTimeoutError` when it takes longer than `tool.timeout`; cancelling the
        caller ends what the call started. `on_output` gets output as it comes."""

    async def close(self) -> None:
        """End everything it started; closing twice has no effect."""
