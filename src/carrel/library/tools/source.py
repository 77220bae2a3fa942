"""One provider as the catalog knows it: its tools by name, how to check their arguments, and why it has none."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from carrel.errors import CarrelError, ToolCallError
from carrel.library.tools.arguments import Checker
from carrel.library.tools.aside import in_a_thread
from carrel.library.tools.last_seen import LastSeen
from carrel.library.tools.seam import SlowToStart, Tool, ToolProvider

STARTING = 60.0
"""Seconds a provider may take to say what it has; its own limits are shorter."""
AGAIN = 30.0
"""Seconds after which one that failed is asked again by somebody who looks around, or by a call if it was slow."""
SLOW = 1.0
"""Seconds that a failure took of which the next call is told at once, rather than to wait for it again."""
PATIENCE = 2.0
"""Seconds that somebody who only looks around waits for a provider that is starting."""


class Source:
    """Asks its provider when it must; a provider that fails costs its own tools only."""

    def __init__(self, provider: ToolProvider, rank: int = 0, last_seen: LastSeen | None = None) -> None:
        """`rank`: of two that have a tool of the same name, the higher is called. `last_seen` remembers what those had
        that are slow to start."""
        self.provider = provider
        self.rank = rank
        self._last_seen = last_seen if isinstance(provider, SlowToStart) else None
        self.problem: ToolCallError | None = None
        self._failed_at = -AGAIN
        self._failed_slowly = False
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = 0.0
        self._remembered: dict[str, Tool] | None = None
        """What it had the last time; None until somebody wants to know."""
        self._given: Sequence[Tool] | None = None
        self._tools: dict[str, Tool] = {}
        self._checkers: dict[str, Checker] = {}
        self._asking = asyncio.Lock()
        self._users = 0
        self._left = asyncio.Event()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """One that is replaced meanwhile is closed only afterwards."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._left.set()

    async def close(self) -> None:
        """Close the provider, and wait no longer for what it has."""
        await self._look_no_more()
        await self.provider.close()

    async def _look_no_more(self) -> None:
        if self._looking is not None and not self._looking.done():
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def retire(self) -> None:
        """Close the provider when nobody uses it any more."""
        await self._look_no_more()
        while self._users:
            self._left.clear()
            await self._left.wait()
        await self.provider.close()

    async def tools(self) -> Mapping[str, Tool]:
        """By their whole names; `ToolCallError` when the provider cannot say."""
        began = time.monotonic()
        with self.in_use():
            async with self._asking:
                return await self._asked(began)

    async def _asked(self, began: float) -> Mapping[str, Tool]:
        # Those who waited while it failed share the answer: each trying again would wait as long again.
        if self.problem is not None:
            told_until = self._failed_at + AGAIN if self._failed_slowly else self._failed_at
            if began < told_until:
                raise self.problem.with_traceback(None)
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(STARTING):
                given = await self.provider.definitions()
        except Exception as problem:
            self._failed_at = time.monotonic()
            self._failed_slowly = self._failed_at - asked_at >= SLOW
            self.problem = ToolCallError(f"{self.provider.name} cannot be used: {_told(problem)}")
            raise self.problem from problem
        self.problem = None
        if given is not self._given:
            self._given, self._checkers = given, {}
            self._tools = {tool.name: tool for tool in given}
            if self._last_seen is not None and isinstance(self.provider, SlowToStart):
                await self._last_seen.keep(self.provider.name, self.provider.fingerprint, given)
        return self._tools

    async def seen(self, patience: float | None = PATIENCE) -> Mapping[str, Tool]:
        """The same for somebody who looks around: none when it fails, and `problem` says why.

        One that takes longer than `patience`, counted from the first who looked, goes on starting: what it had before
        is shown, and `is_starting` is true."""
        if self.problem is not None and time.monotonic() < self._failed_at + AGAIN:
            return {}
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name=f"look at {self.provider.name}")
            self._looked_at = time.monotonic()
        if patience is not None:
            patience = max(0.0, self._looked_at + patience - time.monotonic())
        await asyncio.wait([self._looking], timeout=patience)
        if self.problem is not None:
            return {}
        return await self._from_last_time() if self.is_starting and self._given is None else self._tools

    async def _from_last_time(self) -> Mapping[str, Tool]:
        if self._remembered is None:
            tools = []
            if self._last_seen is not None and isinstance(self.provider, SlowToStart):
                tools = await self._last_seen.recall(self.provider.name, self.provider.fingerprint)
            self._remembered = {tool.name: tool for tool in tools}
        return self._remembered

    async def _look(self) -> None:
        # Its failure is kept as `problem`.
        with suppress(ToolCallError):
            await self.tools()

    @property
    def is_starting(self) -> bool:
        """Whether somebody looked and it has not said yet what it has."""
        return self._looking is not None and not self._looking.done()

    @property
    def has_shown(self) -> bool:
        """Whether its tools are shown, be they those it had before."""
        return bool(self._tools or self._remembered)

    @property
    def trouble(self) -> str:
        """Why its tools are not shown, "" when they are."""
        if self.is_starting and not self.has_shown:
            name = self.provider.name
            return f"{name} is still starting; tools.{name}.list() waits until it has said what it has"
        return str(self.problem) if self.problem is not None else ""

    async def checked(self, tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the tool takes them, or the `ToolCallError` that names what is wrong with them."""
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
