"""One provider as the catalog knows it: its tools by name, how to check their arguments, and why it has none."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from carrel.errors import CarrelError, ToolCallError
from carrel.library.tools.arguments import Checker
from carrel.library.tools.aside import in_a_thread
from carrel.library.tools.seam import Tool, ToolProvider

STARTING = 60.0
"""Seconds a provider may take to say what it has; its own limits are shorter."""
AGAIN = 30.0
"""Seconds after which one that failed is asked again by somebody who only looks around."""


class Source:
    """Asks its provider when it must; a provider that fails costs its own tools only."""

    def __init__(self, provider: ToolProvider) -> None:
        self.provider = provider
        self.problem: ToolCallError | None = None
        self._failed_at = -AGAIN
        self._given: Sequence[Tool] | None = None
        self._tools: dict[str, Tool] = {}
        self._checkers: dict[str, Checker] = {}
        self._asking = asyncio.Lock()

    async def tools(self) -> Mapping[str, Tool]:
        """By their whole names; `ToolCallError` when the provider cannot say."""
        began = time.monotonic()
        async with self._asking:
            # Those who waited while it failed share the answer: each trying again would wait as long again.
            if self.problem is not None and self._failed_at > began:
                raise self.problem
            try:
                async with asyncio.timeout(STARTING):
                    given = await self.provider.definitions()
            except Exception as problem:
                self._failed_at = time.monotonic()
                self.problem = ToolCallError(f"{self.provider.name} cannot be used: {_told(problem)}")
                raise self.problem from problem
            self.problem = None
            if given is not self._given:
                self._given, self._checkers = given, {}
                self._tools = {tool.name: tool for tool in given}
        return self._tools

    async def seen(self) -> Mapping[str, Tool]:
        """The same for somebody who looks around: none when it fails, and `problem` says why."""
        if self.problem is not None and time.monotonic() < self._failed_at + AGAIN:
            return {}
        try:
            return await self.tools()
        except ToolCallError:
            return {}

    async def checked(self, tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as plain data, or the `ToolCallError` that names what is wrong with them."""
        checker = self._checkers.get(tool.name)
        if checker is None or checker.tool is not tool:
            checker = self._checkers[tool.name] = Checker(tool)
        if checker.takes_long(arguments):
            return await in_a_thread(lambda: checker.checked(arguments))
        return checker.checked(arguments)


def _told(problem: Exception) -> str:
    if isinstance(problem, TimeoutError) and not str(problem):
        return f"it did not say within {STARTING:g} s what it has"
    return str(problem) if isinstance(problem, CarrelError) else f"{type(problem).__name__}: {problem}"
