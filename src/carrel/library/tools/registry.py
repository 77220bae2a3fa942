"""All tools of a session: listed, searched, described and called."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from carrel.errors import CarrelError, ToolCallError, ToolNotFoundError, ToolTimeoutError
from carrel.library.names import check_call_signature, python_name
from carrel.library.search import LibrarySearch, SearchEntry
from carrel.library.tools.approval import Approval, Approver
from carrel.library.tools.arguments import ArgumentValidator, bind_arguments
from carrel.library.tools.definition_files import ToolFiles
from carrel.library.tools.last_seen import LastSeen, redacted_tool
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.stubs import Docs, describe, parameters_of, signature_of
from carrel.library.tools.tool import RETRY_AFTER, SLOW_FAILURE, SlowToStart, Tool, ToolProvider
from carrel.processes import OnOutput, run_in_thread
from carrel.text import did_you_mean

STARTING = 60.0
"""Seconds a provider may take to say what it has; its own limits are shorter."""
PATIENCE = 2.0
"""Seconds that somebody who only looks around waits for a provider that is starting."""


class LoadedProvider:
    """Asks its provider when it must; a provider that fails costs its own tools only."""

    def __init__(self, provider: ToolProvider, rank: int = 0, last_seen: LastSeen | None = None) -> None:
        """`rank`: of two that have a tool of the same name, the higher is called. `last_seen` remembers what those had
        that are slow to start."""
        self.provider = provider
        self.rank = rank
        self._last_seen = last_seen if isinstance(provider, SlowToStart) else None
        self.problem: ToolCallError | None = None
        self._failed_at = -RETRY_AFTER
        self._failed_slowly = False
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = 0.0
        self._remembered: dict[str, Tool] | None = None
        """What it had the last time; None until somebody wants to know."""
        self._given: Sequence[Tool] | None = None
        self._tools: dict[str, Tool] = {}
        self._checkers: dict[str, ArgumentValidator] = {}
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
            told_until = self._failed_at + RETRY_AFTER if self._failed_slowly else self._failed_at
            if began < told_until:
                raise self.problem.with_traceback(None)
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(STARTING):
                given = await self.provider.definitions()
        except Exception as problem:
            self._failed_at = time.monotonic()
            self._failed_slowly = self._failed_at - asked_at >= SLOW_FAILURE
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
        if self.problem is not None and time.monotonic() < self._failed_at + RETRY_AFTER:
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
            checker = self._checkers[tool.name] = ArgumentValidator(tool)
        if checker.takes_long(arguments):
            return await run_in_thread(lambda: checker.checked(arguments))
        return checker.checked(arguments)


def _told(problem: Exception) -> str:
    if isinstance(problem, TimeoutError) and not str(problem):
        return f"it did not say within {STARTING:g} s what it has"
    return str(problem) if isinstance(problem, CarrelError) else f"{type(problem).__name__}: {problem}"


AT_ONCE = 64
"""Calls that run at the same time; more wait for their turn."""
_GRACE = 5.0
"""Seconds that a provider has beyond the tool's own timeout to end a call in its own words."""
_TURN = 0.02
"""Seconds after which work on many tools lets others go on."""
_LONGEST_NAME = 300
_MOST_HITS = 100
"""ToolRegistry and recipes that a search looks at, to find the tools that answer best."""
_MOST_RECIPES = 10
"""Recipes of one tool that a search shows; `list` shows all."""

Found = list[dict[str, Any]]

logger = logging.getLogger(__name__)


class ToolRegistry:
    """The tools of all providers under one roof."""

    def __init__(
        self,
        providers: Iterable[ToolProvider] = (),
        *,
        files: Sequence[ToolFiles] = (),
        approve: Approver | None = None,
        index: LibrarySearch | None = None,
        secrets: Secrets | None = None,
        last_seen: LastSeen | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """`files`: definitions that are looked at again with each question, the more important last. `secrets`: the
        one that the providers fill in from, so that what they say can be cleared of it. `patience`: seconds that
        whoever only looks around waits for a provider that is starting; after that, `last_seen` may know what it had
        before."""
        self._files = files
        self._looking = asyncio.Lock()
        self._sources: dict[str, list[LoadedProvider]] = {}
        self._leaving: dict[asyncio.Task[None], LoadedProvider] = {}
        self._approval = Approval(approve)
        self._index = index if index is not None else LibrarySearch(None, "search/tools")
        self._known: dict[str, _Known] = {}
        self._secrets = secrets if secrets is not None else Secrets()
        self._last_seen = last_seen
        self._patience = patience
        self._twice: set[str] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        for provider in providers:
            self.add(provider)

    def add(self, provider: ToolProvider) -> None:
        """Its tools are there from now on; where two have one of the same name, the later is called.

        The log says so when they are looked at."""
        self._place(LoadedProvider(provider, len(self._files), self._last_seen))

    def _place(self, source: LoadedProvider) -> None:
        sources = self._sources.setdefault(source.provider.name, [])
        sources.insert(sum(1 for other in sources if other.rank > source.rank), source)

    async def look(self) -> None:
        """Take up the tool files that came, changed or went. A call under way ends with the provider it began with.

        The first time a bad file is a `ConfigurationError`, where that was wanted; later it costs its own tools."""
        async with self._looking:
            for rank, files in enumerate(self._files):
                for change in await files.look():
                    if change.old is not None:
                        self._drop(change.old)
                    if change.new is not None:
                        self._place(LoadedProvider(change.new, rank, self._last_seen))

    def _drop(self, provider: ToolProvider) -> None:
        word = provider.name
        for source in [one for one in self._sources.get(word, ()) if one.provider is provider]:
            self._sources[word].remove(source)
            leaving = asyncio.create_task(source.retire(), name=f"end of {word}")
            self._leaving[leaving] = source
            leaving.add_done_callback(self._left)
        if not self._sources.get(word):
            self._sources.pop(word, None)
        self._known = {name: known for name, known in self._known.items() if name.partition(".")[0] != word}

    def _left(self, leaving: asyncio.Task[None]) -> None:
        source = self._leaving.pop(leaving)
        if not leaving.cancelled() and leaving.exception() is not None:
            logger.warning("%s did not end as it should: %s", source.provider.name, leaving.exception())

    async def _look_if_changed(self, word: str) -> None:
        """The same at the cost of a stamp, for somebody who knows what is wanted."""
        sources = [*self._sources.get(word, ())]
        for source in sources:
            if source.rank < len(self._files) and not await self._files[source.rank].is_as_read(source.provider):
                break
        else:
            if sources:
                return
        await self.look()

    async def close(self) -> None:
        """End everything the providers started; twice is harmless."""
        leaving = dict(self._leaving)
        sources = [*chain.from_iterable(self._sources.values()), *leaving.values()]
        ended = await asyncio.gather(*(source.close() for source in sources), return_exceptions=True)
        for task in leaving:
            task.cancel()
        await self._index.close()
        for problem in ended:
            if isinstance(problem, BaseException):
                raise problem

    # --- looking around ---------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Every provider has said what it has, or why it cannot."""
        await self.look()
        await self._seen(self._sources, None)

    async def list(self, under: str = "") -> Found:
        """Every tool as a dict with name, description, tags, parameters, signature and recipes, by name.

        Recipes are what can be called below its name: a program's recipes, an MCP server's tools, the operations of a
        service. A tool that can only be called by them has no signature, and one that cannot be used, or not yet, has
        an `error`. `under`: the recipes of this one; this waits for a provider that is starting."""
        await self.look()
        words = [under] if under else sorted(self._sources)
        below = await self._by_word(await self._seen(words, None if under else self._patience))
        entries = [self._entry(word, below.get(word, ())) for word in words]
        if not under:
            return entries
        [entry] = entries
        failed = [{**entry, "parameters": [], "recipes": []}] if "error" in entry else []
        return [*entry["recipes"], *failed]

    async def search(self, query: str, limit: int = 10) -> Found:
        """The tools that answer best, the best first, as in `list`, each with its score.

        The recipes that answer come first, with their scores; of more than ten, only those of them that do."""
        await self.look()
        found = await self._seen(self._sources, self._patience)
        scores = await self._scores(found, query, _MOST_HITS)
        words = [*dict.fromkeys(map(_word, scores))][: max(0, int(limit))]
        below = await self._by_word({name: tool for name, tool in found.items() if _word(name) in words})
        return [_ranked(self._entry(word, below[word]), scores) for word in words]

    async def _scores(self, found: Mapping[str, Tool], query: str, limit: int) -> dict[str, float]:
        """Of everything that can be called and answers, by its whole name, the best first."""
        self._index.set_entries([known.entry async for known in self._all(found)])
        return {hit.key: hit.score for hit in await self._index.search(str(query), limit) if hit.key in found}

    async def _by_word(self, found: Mapping[str, Tool]) -> dict[str, Sequence["_Known"]]:
        below: dict[str, list[_Known]] = {}
        async for known in self._all(found):
            below.setdefault(_word(known.tool.name), []).append(known)
        return {**below}

    def _entry(self, word: str, known: Sequence["_Known"]) -> dict[str, Any]:
        """What `list` says of one tool, with its recipes inside."""
        sources = self._sources.get(word, ())
        own = next((one for one in known if one.tool.name == word), None)
        if own is not None:
            entry = own.told()
        else:
            about = next((str(getattr(source.provider, "description", "")) for source in sources), "")
            tags = dict.fromkeys(tag for one in known for tag in one.tool.tags)
            entry = {"name": word, "description": self._secrets.hide(about), "tags": [*tags], "parameters": []}
        entry["recipes"] = [
            {**one.told(), "name": one.tool.name.removeprefix(f"{word}.")} for one in known if one is not own
        ]
        trouble = next((source.trouble for source in sources if source.trouble), "")
        return {**entry, "error": self._secrets.hide(trouble)} if trouble else entry

    async def describe(self, task: str | None = None, limit: int = 8000, docs: Docs = "all") -> str:
        """Typed Python stubs with their docs in at most `limit` characters, what fits the task first and whole."""
        await self.look()
        found = await self._seen(self._sources, self._patience)
        starting = [one for one in chain.from_iterable(self._sources.values()) if one.is_starting]
        told = _starting(starting, limit // 4)
        ranked = [*await self._scores(found, task, 30)] if task else ()
        tools = [known.clear async for known in self._all(found)]
        # Many and long ones take a while, in which others go on.
        stubs = await run_in_thread(lambda: describe(tools, limit - len(told), ranked, docs))
        return self._secrets.hide(f"{stubs.rstrip()}\n\n{told}".lstrip() if told else stubs)

    async def get(self, name: str) -> dict[str, Any] | None:
        """One as in `list`, or one recipe, with the JSON `schema` of its arguments where it can be called; None when
        there is none of this name."""
        try:
            known = self._of(await self.find(name))
        except ToolNotFoundError:
            word = python_name(name)
            return await self._one(word) if word in self._sources else None
        word = known.tool.name
        told = known.told() if "." in word else await self._one(word)
        return {**told, "schema": dict(known.clear.parameters)}

    async def _one(self, word: str) -> dict[str, Any]:
        below = await self._by_word(await self._seen([word], None))
        return self._entry(word, below.get(word, ()))

    async def known_names(self, name: str) -> Sequence[str]:
        """The names in the tool that this name is in, itself among them; `ToolNotFoundError` when there is no such.

        One that has not said yet what it has, or cannot, may have any: what is called shows it."""
        called = ".".join(map(python_name, name[:_LONGEST_NAME].split(".")))
        word = _word(called)
        await self._look_if_changed(word)
        sources = self._sources.get(word, ())
        found = await self._seen([word], 0.0 if called == word else self._patience) if sources else {}
        if any(source.is_starting or source.trouble for source in sources):
            return [called]
        names = {one.rsplit(".", count)[0] for one in (*found, *([word] if sources else [])) for count in range(5)}
        if called not in names:
            await self._found(name)
        return [*names]

    async def find(self, name: str) -> Tool:
        """The tool of this name; `ToolNotFoundError` with near names, `ToolCallError` when its provider fails."""
        return (await self._found(name))[1]

    async def _seen(self, words: Iterable[str], patience: float | None) -> dict[str, Tool]:
        """Nobody is waited for one after the other: a slow server costs its own time only."""
        sources = [source for word in words for source in reversed(self._sources.get(word, ()))]
        found: dict[str, Tool] = {}
        for source, tools in zip(
            sources, await asyncio.gather(*(source.seen(patience) for source in sources)), strict=True
        ):
            # A file that stands in the place of another is meant to; a function may have come there by chance.
            if source.rank == len(self._files):
                for name in (found.keys() & tools.keys()) - self._twice:
                    self._twice.add(name)
                    logger.warning("there are two tools %s; the one that was registered last is called", name)
            found.update(tools)
        return found

    async def _all(self, found: Mapping[str, Tool]) -> AsyncIterator["_Known"]:
        """What is known of each, by name; others have their turn meanwhile."""
        began = time.monotonic()
        for _, tool in sorted(found.items()):
            yield self._of(tool)
            if time.monotonic() > began + _TURN:
                await asyncio.sleep(0)
                began = time.monotonic()

    def _of(self, tool: Tool) -> "_Known":
        known = self._known.get(tool.name)
        if known is None or known.tool is not tool or known.secrets != self._secrets.known:
            known = self._known[tool.name] = _Known(tool, self._secrets)
        return known

    # --- calling ----------------------------------------------------------------------------------------------------

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        stream: OnOutput | None = None,
        *,
        args: Sequence[Any] = (),
    ) -> Any:
        """What the tool returns. Before anything runs: `ToolNotFoundError`, `ToolCallError` naming a wrong argument,
        `ToolRefusedError`; then `ToolCallError` when it fails and `ToolTimeoutError` when it is too slow.

        With `stream`, output is given out while it comes, too. `args`: arguments without a name."""
        hiding = self._secrets.hiding(stream) if stream is not None else None
        try:
            source, tool = await self._found(name)
            with source.in_use():
                given = await source.checked(tool, bind_arguments(tool, args, arguments or {}))
                if self._approval.wanted(tool):
                    given = await source.checked(tool, await self._approval.of(tool, given))
                async with self._slots:
                    return self._secrets.hide_in(await _called(source.provider, tool, given, hiding))
        except CarrelError as problem:
            problem.args = (self._secrets.hide(str(problem)), *problem.args[1:])
            raise
        finally:
            if hiding is not None:
                hiding.end()

    async def handle(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], stream: OnOutput | None = None
    ) -> Any:
        """Answers what code inside calls: `tools.list`, `tools.search`, `tools.describe`, `tools.curl.list`, and tools.

        `stream` takes the output of a call while it comes, where the tool's definition wants that or the code says
        `_stream=True`."""
        words = name.split(".", 5)[1:]
        own: dict[str, Callable[..., Awaitable[Any]]] = {
            "list": self.list,
            "search": self.search,
            "describe": self.describe,
            "_names": self.known_names,
        }
        verb = own.get(".".join(words))
        if verb is not None:
            check_call_signature(name, verb, args, kwargs)
            return await verb(*args, **kwargs)
        match words:
            case []:
                raise ToolCallError("tools itself cannot be called; tools.list() shows what is there")
            case [word, "list"] if await self._is_list_of(word):
                return await self.list(word)
        called = ".".join(words)
        given = dict(kwargs)
        wanted = given.pop("_stream", None)
        if stream is not None and wanted is None:
            wanted = (await self.find(called)).stream
        return await self.call(called, given, stream if wanted else None, args=args)

    async def is_question(self, name: str) -> bool:
        """Whether code that calls this name looks around, rather than call a tool."""
        match name.split(".", 5)[1:]:
            case [] | ["list" | "search" | "describe" | "_names"]:
                return True
            case [word, "list"]:
                return await self._is_list_of(word)
        return False

    async def _is_list_of(self, word: str) -> bool:
        """Whether `tools.WORD.list` lists what is below it; it may have a tool of that name."""
        await self._look_if_changed(word)
        return word in self._sources and f"{word}.list" not in await self._seen([word], None)

    async def _found(self, name: str) -> tuple[LoadedProvider, Tool]:
        if not isinstance(name, str):
            raise TypeError(f"a tool is called by its name, a text such as 'curl.get', not {type(name).__name__}")
        if len(name) > _LONGEST_NAME:
            raise ToolNotFoundError(f"there is no tool {name[:40]}…: a name of {len(name):,} characters")
        called = ".".join(map(python_name, name.split(".")))
        word = called.partition(".")[0]
        await self._look_if_changed(word)
        sources = self._sources.get(word, [])
        if not sources:
            known = [*self._sources, *self._known]
            raise ToolNotFoundError(f"there is no tool {name}{did_you_mean(called, known)}")
        failed: ToolCallError | None = None
        names: list[str] = []
        for source in sources:
            try:
                tools = await source.tools()
            except ToolCallError as problem:
                failed = problem
                continue
            if called in tools:
                return source, tools[called]
            names += tools
        if failed is not None:
            raise ToolCallError(self._secrets.hide(str(failed)))
        if called == word:
            raise ToolNotFoundError(f"{name} itself cannot be called{did_you_mean('', names)}")
        raise ToolNotFoundError(f"there is no {called.removeprefix(f'{word}.')} in {word}{did_you_mean(called, names)}")


def _word(name: str) -> str:
    return name.partition(".")[0]


def _ranked(entry: dict[str, Any], scores: Mapping[str, float]) -> dict[str, Any]:
    """What a search shows of a tool: the recipes that answer first."""
    word = entry["name"]
    for recipe in entry["recipes"]:
        if (score := scores.get(f"{word}.{recipe['name']}")) is not None:
            recipe["score"] = score
    recipes = sorted(entry["recipes"], key=lambda recipe: -recipe.get("score", 0.0))
    if len(recipes) > _MOST_RECIPES:
        recipes = [recipe for recipe in recipes if "score" in recipe][:_MOST_RECIPES]
    best = max(score for name, score in scores.items() if _word(name) == word)
    return {**entry, "recipes": recipes, "score": best}


def _starting(sources: Iterable[LoadedProvider], limit: int) -> str:
    """Lines that say whose tools may be others in a moment, as many as there is room for."""
    lines: list[str] = []
    for known in (True, False):
        names = [one.provider.name for one in sources if one.has_shown is known]
        if names:
            are = f"# {', '.join(names)} {'is' if len(names) == 1 else 'are'} still starting"
            name = names[0] if len(names) == 1 else "NAME"
            waits = f"tools.{name}.list() waits until it has said what it has"
            had = f"these are the tools {'it' if len(names) == 1 else 'they'} had before"
            lines.append(f"{are}; {had if known else waits}\n")
    return "".join(lines) if len("".join(lines)) <= limit else ""


async def _called(provider: ToolProvider, tool: Tool, arguments: Mapping[str, Any], stream: OnOutput | None) -> Any:
    try:
        async with asyncio.timeout(None if tool.timeout is None else tool.timeout + _GRACE) as net:
            return await provider.call(tool, arguments, stream)
    except CarrelError:
        raise
    except TimeoutError as problem:
        if net.expired():
            raise ToolTimeoutError(f"{tool.name} took longer than {tool.timeout:g} s and did not end") from None
        raise ToolCallError(f"{tool.name} failed: {problem or 'TimeoutError'}") from problem
    except Exception as problem:
        raise ToolCallError(f"{tool.name} failed: {type(problem).__name__}: {problem}") from problem


class _Known:
    """What is said of a tool, made once: with six hundred of them it adds up. Nothing secret is in it."""

    def __init__(self, tool: Tool, secrets: Secrets) -> None:
        self.tool = tool
        self.secrets = secrets.known
        clear = self.clear = redacted_tool(tool, secrets)
        self._parameters = secrets.hide_in(parameters_of(clear))
        spoken = " ".join(f"{one['name']} {one['description']}" for one in self._parameters)
        self.entry = SearchEntry(tool.name, tool.name, clear.description, spoken, " ".join(tool.tags))
        self._signature = secrets.hide(f"{tool.name}{signature_of(clear)}")

    def told(self) -> dict[str, Any]:
        """As `list` gives it; whoever gets it may change it."""
        told: dict[str, Any] = {
            "name": self.tool.name,
            "description": self.clear.description,
            "tags": [*self.tool.tags],
            "parameters": [dict(one) for one in self._parameters],
            "signature": self._signature,
        }
        return {**told, "approval": "ask"} if self.tool.approval == "ask" else told
