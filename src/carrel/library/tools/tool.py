"""What a tool is, the protocol of a provider of tools, and a provider with the tools that it has listed."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from carrel.errors import CarrelError, ToolCallError
from carrel.processes import OnOutput

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

RETRY_AFTER = 30.0
"""Seconds after which a listing tries a failed provider again, and a call too if the failure was slow."""
SLOW_FAILURE = 1.0
"""Seconds; the next callers get the error of a failure that took longer at once, instead of waiting each."""
LONGEST_START = 60.0
"""Seconds a provider may take to list its tools; its own limits are shorter."""
STARTUP_WAIT = 2.0
"""Seconds that a listing or a search waits for a provider that is starting."""


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


class LoadedProvider:
    """A provider with its tools as they are known; if it fails, only its own tools are missing."""

    def __init__(self, provider: ToolProvider, rank: int = 0) -> None:
        """Of two providers with a tool of the same name, the one with the higher `rank` is called."""
        self.provider = provider
        self.rank = rank
        self.error: ToolCallError | None = None
        self._failed_at = -RETRY_AFTER
        self._failed_slowly = False
        self._loading: asyncio.Task[None] | None = None
        self._loading_since = 0.0
        self._definitions: Sequence[Tool] | None = None
        self._tools: dict[str, Tool] = {}
        self._lock = asyncio.Lock()
        self._users = 0
        self._unused = asyncio.Event()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the provider open, even if a reload replaces it."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._unused.set()

    async def close(self) -> None:
        """Close the provider at once."""
        await self._stop_loading()
        await self.provider.close()

    async def close_when_unused(self) -> None:
        """Close the provider after the calls that use it."""
        await self._stop_loading()
        while self._users:
            self._unused.clear()
            await self._unused.wait()
        await self.provider.close()

    async def _stop_loading(self) -> None:
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
            await asyncio.wait([self._loading])

    async def tools(self) -> Mapping[str, Tool]:
        """Return the tools by their full names; raises `ToolCallError` when the provider fails."""
        called_at = time.monotonic()
        with self.in_use():
            async with self._lock:
                # Callers that waited while it failed get the same error: each trying again would wait as long again.
                if self.error is not None:
                    retry_at = self._failed_at + RETRY_AFTER if self._failed_slowly else self._failed_at
                    if called_at < retry_at:
                        raise self.error.with_traceback(None)
                await self._read_definitions()
                return self._tools

    async def _read_definitions(self) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(LONGEST_START):
                definitions = await self.provider.definitions()
        except Exception as error:
            self._failed_at = time.monotonic()
            self._failed_slowly = self._failed_at - started >= SLOW_FAILURE
            self.error = ToolCallError(f"{self.provider.name} cannot be used: {_describe_failure(error)}")
            raise self.error from error
        self.error = None
        if definitions is not self._definitions:
            self._definitions = definitions
            self._tools = {tool.name: tool for tool in definitions}

    async def available_tools(self, wait: float | None = STARTUP_WAIT) -> Mapping[str, Tool]:
        """Return the tools for a listing: none while the provider starts or after it failed (see `error_text`).

        `wait`: seconds to wait for a provider that is starting, counted from the first listing; None: until it is
        ready or has failed."""
        if self.error is not None and time.monotonic() < self._failed_at + RETRY_AFTER:
            return {}
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load(), name=f"load tools of {self.provider.name}")
            self._loading_since = time.monotonic()
        if wait is not None:
            wait = max(0.0, self._loading_since + wait - time.monotonic())
        await asyncio.wait([self._loading], timeout=wait)
        return self._tools if self.error is None else {}

    async def _load(self) -> None:
        # A failure is kept in `error`.
        with suppress(ToolCallError):
            await self.tools()

    @property
    def is_starting(self) -> bool:
        """Whether a listing has asked for the tools and the provider has not returned them yet."""
        return self._loading is not None and not self._loading.done()

    @property
    def error_text(self) -> str:
        """Why its tools are not listed; empty when they are."""
        if self.is_starting and not self._tools:
            name = self.provider.name
            return f"{name} is still starting; tools.{name}.list() waits until it is ready"
        return str(self.error) if self.error is not None else ""


def _describe_failure(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"it did not list its tools within {LONGEST_START:g} s"
    return str(error) if isinstance(error, CarrelError) else f"{type(error).__name__}: {error}"
