"""All tools of a session: listed, searched, described and called."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from carrel.errors import CarrelError, ToolCallError, ToolNotFoundError, ToolTimeoutError
from carrel.library.names import check_call_signature, python_name
from carrel.library.search import LibrarySearch, SearchEntry
from carrel.library.tools.approval import Approval, Approver
from carrel.library.tools.arguments import ArgumentValidator, bind_arguments
from carrel.library.tools.definition_files import ToolFiles
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.stubs import Docs, describe, parameters_of, signature_of
from carrel.library.tools.tool import STARTUP_WAIT, LoadedProvider, Tool, ToolProvider
from carrel.processes import OnOutput, run_in_thread
from carrel.text import did_you_mean

CONCURRENT_CALLS = 64
"""Calls that run at the same time; further ones wait."""
_GRACE = 5.0
"""Seconds that a provider has beyond the tool's own timeout to end a call itself."""
_SLICE = 0.02
"""Seconds after which work on many tools lets other tasks run."""
_LONGEST_NAME = 300
_MOST_MATCHES = 100
"""Tools and recipes that a search considers."""
_MOST_RECIPES = 10
"""Recipes of one tool that a search shows; `list` shows all."""

ToolEntries = list[dict[str, Any]]

logger = logging.getLogger(__name__)


class ToolRegistry:
    """The tools of all providers."""

    def __init__(
        self,
        providers: Iterable[ToolProvider] = (),
        *,
        files: Sequence[ToolFiles] = (),
        approve: Approver | None = None,
        search: LibrarySearch | None = None,
        secrets: Secrets | None = None,
        startup_wait: float = STARTUP_WAIT,
        session_id: str = "",
    ) -> None:
        """`files`: definition files, read by `reload`; of two files with the same tool, the later one in this list is
        called. `secrets`: the object with which the providers substitute secrets, so that results can be redacted."""
        self._files = files
        self._providers: dict[str, list[LoadedProvider]] = {}
        self._closing: dict[asyncio.Task[None], LoadedProvider] = {}
        self._reloading = asyncio.Lock()
        self._approval = Approval(approve, session_id)
        self._search = search if search is not None else LibrarySearch(None, "search/tools")
        self._summaries: dict[str, ToolSummary] = {}
        self._validators: dict[str, ArgumentValidator] = {}
        self._secrets = secrets if secrets is not None else Secrets()
        self._startup_wait = startup_wait
        self._warned: set[str] = set()
        self._slots = asyncio.Semaphore(CONCURRENT_CALLS)
        for provider in providers:
            self.add(provider)

    def add(self, provider: ToolProvider) -> None:
        """Add the tools of a provider; of two tools with the same name, the later one is called."""
        self._insert(LoadedProvider(provider, len(self._files)))

    def _insert(self, loaded: LoadedProvider) -> None:
        others = self._providers.setdefault(loaded.provider.name, [])
        others.insert(sum(1 for other in others if other.rank > loaded.rank), loaded)

    async def reload(self) -> None:
        """Read the definition files; a provider whose definition is unchanged stays as it is.

        A call under way ends with the provider it began with. Where a file is wrong, and wrong files are not left
        out, raises `ConfigurationError`, and all tools stay as they were."""
        async with self._reloading:
            changes = [await files.read_changes() for files in self._files]
            for rank, (files, change) in enumerate(zip(self._files, changes, strict=True)):
                files.apply(change)
                for provider in change.removed:
                    self._remove(provider)
                for provider in change.added:
                    self._insert(LoadedProvider(provider, rank))

    def _remove(self, provider: ToolProvider) -> None:
        name = provider.name
        for loaded in [one for one in self._providers.get(name, ()) if one.provider is provider]:
            self._providers[name].remove(loaded)
            task = asyncio.create_task(loaded.close_when_unused(), name=f"close {name}")
            self._closing[task] = loaded
            task.add_done_callback(self._on_closed)
        if not self._providers.get(name):
            self._providers.pop(name, None)
        self._summaries = {full: one for full, one in self._summaries.items() if _first_word(full) != name}
        self._validators = {full: one for full, one in self._validators.items() if _first_word(full) != name}

    def _on_closed(self, task: asyncio.Task[None]) -> None:
        loaded = self._closing.pop(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("%s could not be closed: %s", loaded.provider.name, task.exception())

    async def close(self) -> None:
        """End everything the providers started; closing twice has no effect."""
        closing = dict(self._closing)
        loaded = [*chain.from_iterable(self._providers.values()), *closing.values()]
        results = await asyncio.gather(*(one.close() for one in loaded), return_exceptions=True)
        for task in closing:
            task.cancel()
        await self._search.close()
        for error in results:
            if isinstance(error, BaseException):
                raise error

    # --- listing ----------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until every provider has listed its tools or failed."""
        await self._available(self._providers, None)

    async def list(self, group: str = "") -> ToolEntries:
        """Return every tool as a dict with name, description, tags, parameters, signature and recipes, by name.

        Recipes are what can be called below a tool's name: the recipes of a program, the tools of an MCP server, the
        operations of a service. A tool that can be called only by its recipes has no signature; one that cannot be
        used, or not yet, has an `error`. With `group`, returns the recipes of that tool, and waits for it to start."""
        names = [group] if group else sorted(self._providers)
        available = await self._available(names, None if group else self._startup_wait)
        groups = await self._grouped(available)
        entries = [self._entry(name, groups.get(name, ())) for name in names]
        if not group:
            return entries
        [entry] = entries
        failed = [{**entry, "parameters": [], "recipes": []}] if "error" in entry else []
        return [*entry["recipes"], *failed]

    async def search(self, query: str, limit: int = 10) -> ToolEntries:
        """Return the tools that match best, the best first, as in `list`, each with its score.

        Recipes that match come first, with their scores; of more than ten, only matching ones are returned."""
        available = await self._available(self._providers, self._startup_wait)
        scores = await self._scores(available, query, _MOST_MATCHES)
        names = [*dict.fromkeys(map(_first_word, scores))][: max(0, int(limit))]
        groups = await self._grouped({name: tool for name, tool in available.items() if _first_word(name) in names})
        return [_ranked(self._entry(name, groups[name]), scores) for name in names]

    async def _scores(self, tools: Mapping[str, Tool], query: str, limit: int) -> dict[str, float]:
        """Return the scores of the tools and recipes that match, by their full names, the best first."""
        self._search.set_entries([summary.entry async for summary in self._summarize(tools)])
        return {match.key: match.score for match in await self._search.search(str(query), limit) if match.key in tools}

    async def _grouped(self, tools: Mapping[str, Tool]) -> dict[str, Sequence["ToolSummary"]]:
        groups: dict[str, list[ToolSummary]] = {}
        async for summary in self._summarize(tools):
            groups.setdefault(_first_word(summary.tool.name), []).append(summary)
        return {**groups}

    def _entry(self, name: str, summaries: Sequence["ToolSummary"]) -> dict[str, Any]:
        """Return what `list` shows of one tool, with its recipes."""
        providers = self._providers.get(name, ())
        own = next((one for one in summaries if one.tool.name == name), None)
        if own is not None:
            entry = own.as_dict()
        else:
            description = next((str(getattr(one.provider, "description", "")) for one in providers), "")
            tags = dict.fromkeys(tag for one in summaries for tag in one.tool.tags)
            entry = {
                "name": name,
                "description": self._secrets.redact(description),
                "tags": [*tags],
                "parameters": [],
            }
        entry["recipes"] = [
            {**one.as_dict(), "name": one.tool.name.removeprefix(f"{name}.")} for one in summaries if one is not own
        ]
        error = next((one.error_text for one in providers if one.error_text), "")
        return {**entry, "error": self._secrets.redact(error)} if error else entry

    async def describe(self, task: str | None = None, limit: int = 8000, docs: Docs = "all") -> str:
        """Return typed Python stubs with docs in at most `limit` characters, the tools that fit the task first."""
        available = await self._available(self._providers, self._startup_wait)
        starting = [one.provider.name for one in chain.from_iterable(self._providers.values()) if one.is_starting]
        note = _starting_note(starting, limit // 4)
        ranked = [*await self._scores(available, task, 30)] if task else ()
        tools = [summary.redacted async for summary in self._summarize(available)]
        # Many tools with long docs take a while; other tasks run meanwhile.
        stubs = await run_in_thread(lambda: describe(tools, limit - len(note), ranked, docs))
        return self._secrets.redact(f"{stubs.rstrip()}\n\n{note}".lstrip() if note else stubs)

    async def get(self, name: str) -> dict[str, Any] | None:
        """Return one tool as in `list`, or one recipe, with the JSON `schema` of its arguments where it can be called;
        None if there is no tool of this name."""
        try:
            summary = self._summary(await self.find(name))
        except ToolNotFoundError:
            group = python_name(name)
            return await self._group(group) if group in self._providers else None
        full_name = summary.tool.name
        entry = summary.as_dict() if "." in full_name else await self._group(full_name)
        return {**entry, "schema": dict(summary.redacted.parameters)}

    async def _group(self, name: str) -> dict[str, Any]:
        groups = await self._grouped(await self._available([name], None))
        return self._entry(name, groups.get(name, ()))

    async def names_near(self, name: str) -> Sequence[str]:
        """Return the names in the same tool as this name, itself included; raises `ToolNotFoundError` if there is none.

        A provider that is starting or has failed may have any names; a call shows it."""
        full_name = ".".join(map(python_name, name[:_LONGEST_NAME].split(".")))
        group = _first_word(full_name)
        providers = self._providers.get(group, ())
        available = await self._available([group], 0.0 if full_name == group else self._startup_wait)
        if any(one.is_starting or one.error_text for one in providers):
            return [full_name]
        known = (*available, *([group] if providers else []))
        names = {one.rsplit(".", count)[0] for one in known for count in range(5)}
        if full_name not in names:
            await self._find(name)
        return [*names]

    async def find(self, name: str) -> Tool:
        """Return the tool of this name; raises `ToolNotFoundError` with similar names, `ToolCallError` when its
        provider fails."""
        return (await self._find(name))[1]

    async def _available(self, names: Iterable[str], wait: float | None) -> dict[str, Tool]:
        """Return the tools of these providers, which are loaded side by side."""
        loaded = [one for name in names for one in reversed(self._providers.get(name, ()))]
        found: dict[str, Tool] = {}
        results = await asyncio.gather(*(one.available_tools(wait) for one in loaded))
        for one, tools in zip(loaded, results, strict=True):
            # A file may replace another on purpose; a function may have the name of another tool by mistake.
            if one.rank == len(self._files):
                for name in (found.keys() & tools.keys()) - self._warned:
                    self._warned.add(name)
                    logger.warning("there are two tools %s; the one that was registered last is called", name)
            found.update(tools)
        return found

    async def _summarize(self, tools: Mapping[str, Tool]) -> AsyncIterator["ToolSummary"]:
        """Yield the summary of each tool, by name; other tasks run meanwhile."""
        slice_end = time.monotonic() + _SLICE
        for _, tool in sorted(tools.items()):
            yield self._summary(tool)
            if time.monotonic() > slice_end:
                await asyncio.sleep(0)
                slice_end = time.monotonic() + _SLICE

    def _summary(self, tool: Tool) -> "ToolSummary":
        summary = self._summaries.get(tool.name)
        if summary is None or summary.tool is not tool or summary.known_secrets != self._secrets.known:
            summary = self._summaries[tool.name] = ToolSummary(tool, self._secrets)
        return summary

    # --- calling ----------------------------------------------------------------------------------------------------

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        on_output: OnOutput | None = None,
        *,
        args: Sequence[Any] = (),
        stream: bool | None = True,
    ) -> Any:
        """Call a tool and return its result.

        Before anything runs: `ToolNotFoundError`, `ToolCallError` naming a wrong argument, `ToolRefusedError`; then
        `ToolCallError` when the call fails and `ToolTimeoutError` when it takes too long. `args`: positional arguments.
        `on_output` gets output as it comes, if `stream` is true, or None and the tool's definition says so."""
        redacting: Any = None
        try:
            loaded, tool = await self._find(name)
            if on_output is not None and (tool.stream if stream is None else stream):
                redacting = self._secrets.redacting(on_output)
            with loaded.in_use():
                values = await self._validate(tool, bind_arguments(tool, args, arguments or {}))
                if tool.approval == "ask":
                    values = await self._validate(tool, await self._approval.request(tool, values))
                async with self._slots:
                    return self._secrets.redact_data(await _call_provider(loaded.provider, tool, values, redacting))
        except CarrelError as error:
            error.args = (self._secrets.redact(str(error)), *error.args[1:])
            raise
        finally:
            if redacting is not None:
                redacting.end()

    async def _validate(self, tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the tool takes them; raises `ToolCallError` naming what is wrong with them."""
        validator = self._validators.get(tool.name)
        if validator is None or validator.tool is not tool:
            validator = self._validators[tool.name] = ArgumentValidator(tool)
        if validator.is_slow(arguments):
            return await run_in_thread(lambda: validator.validated(arguments))
        return validator.validated(arguments)

    async def handle(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], on_output: OnOutput | None = None
    ) -> Any:
        """Answer a call of code: `tools.list`, `tools.search`, `tools.describe`, `tools.curl.list`, or a tool.

        `on_output` gets the output of a call as it comes, if the tool's definition or `_stream=True` says so."""
        query = await self._query(name)
        if query is not None:
            check_call_signature(name, query, args, kwargs)
            return await query(*args, **kwargs)
        called = name.partition(".")[2]
        if not called:
            raise ToolCallError("tools itself cannot be called; tools.list() shows what there is")
        arguments = dict(kwargs)
        stream = arguments.pop("_stream", None)
        return await self.call(called, arguments, on_output, args=args, stream=stream)

    async def is_query(self, name: str) -> bool:
        """Whether a call of code lists, searches or describes tools instead of calling one."""
        return name == "tools" or await self._query(name) is not None

    async def _query(self, name: str) -> Callable[..., Awaitable[Any]] | None:
        match name.split(".", 5)[1:]:
            case ["list"]:
                return self.list
            case ["search"]:
                return self.search
            case ["describe"]:
                return self.describe
            case ["_names"]:
                return self.names_near
            case [group, "list"] if group in self._providers:
                # The group may have a tool of that name.
                if f"{group}.list" not in await self._available([group], None):
                    return lambda: self.list(group)
        return None

    async def _find(self, name: str) -> tuple[LoadedProvider, Tool]:
        if not isinstance(name, str):
            raise TypeError(f"the name of a tool is a string such as 'curl.get', not {type(name).__name__}")
        if len(name) > _LONGEST_NAME:
            raise ToolNotFoundError(f"there is no tool {name[:40]}…: a name of {len(name):,} characters")
        full_name = ".".join(map(python_name, name.split(".")))
        group = _first_word(full_name)
        providers = self._providers.get(group, [])
        if not providers:
            known = [*self._providers, *self._summaries]
            raise ToolNotFoundError(f"there is no tool {name}{did_you_mean(full_name, known)}")
        failure: ToolCallError | None = None
        names: list[str] = []
        for loaded in providers:
            try:
                tools = await loaded.tools()
            except ToolCallError as error:
                failure = error
                continue
            if full_name in tools:
                return loaded, tools[full_name]
            names += tools
        if failure is not None:
            raise ToolCallError(self._secrets.redact(str(failure)))
        if full_name == group:
            raise ToolNotFoundError(f"{name} itself cannot be called{did_you_mean('', names)}")
        below = full_name.removeprefix(f"{group}.")
        raise ToolNotFoundError(f"there is no {below} in {group}{did_you_mean(full_name, names)}")


def _first_word(name: str) -> str:
    return name.partition(".")[0]


def _ranked(entry: dict[str, Any], scores: Mapping[str, float]) -> dict[str, Any]:
    """Return what a search shows of a tool: the recipes that match first."""
    name = entry["name"]
    for recipe in entry["recipes"]:
        if (score := scores.get(f"{name}.{recipe['name']}")) is not None:
            recipe["score"] = score
    recipes = sorted(entry["recipes"], key=lambda recipe: -recipe.get("score", 0.0))
    if len(recipes) > _MOST_RECIPES:
        recipes = [recipe for recipe in recipes if "score" in recipe][:_MOST_RECIPES]
    best = max(score for full_name, score in scores.items() if _first_word(full_name) == name)
    return {**entry, "recipes": recipes, "score": best}


def _starting_note(names: Sequence[str], limit: int) -> str:
    """Return a line that names the providers that are starting, if it fits."""
    if not names:
        return ""
    one = len(names) == 1
    note = (
        f"# {', '.join(names)} {'is' if one else 'are'} still starting; "
        f"tools.{names[0] if one else 'NAME'}.list() waits until it is ready\n"
    )
    return note if len(note) <= limit else ""


async def _call_provider(
    provider: ToolProvider, tool: Tool, arguments: Mapping[str, Any], on_output: OnOutput | None
) -> Any:
    try:
        async with asyncio.timeout(None if tool.timeout is None else tool.timeout + _GRACE) as limit:
            return await provider.call(tool, arguments, on_output)
    except CarrelError:
        raise
    except TimeoutError as error:
        if limit.expired():
            raise ToolTimeoutError(f"{tool.name} took longer than {tool.timeout:g} s and did not end") from None
        raise ToolCallError(f"{tool.name} failed: {error or 'TimeoutError'}") from error
    except Exception as error:
        raise ToolCallError(f"{tool.name} failed: {type(error).__name__}: {error}") from error


class ToolSummary:
    """What listings show of a tool, computed once and without secrets."""

    def __init__(self, tool: Tool, secrets: Secrets) -> None:
        self.tool = tool
        self.known_secrets = secrets.known
        self.redacted = replace(
            tool,
            description=secrets.redact(tool.description),
            parameters=secrets.redact_data(tool.parameters),
            returns=secrets.redact_data(tool.returns),
        )
        self._parameters = secrets.redact_data(parameters_of(self.redacted))
        about = " ".join(f"{one['name']} {one['description']}" for one in self._parameters)
        self.entry = SearchEntry(tool.name, tool.name, self.redacted.description, about, " ".join(tool.tags))
        self._signature = secrets.redact(f"{tool.name}{signature_of(self.redacted)}")

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of a listing, a new dict each time."""
        entry: dict[str, Any] = {
            "name": self.tool.name,
            "description": self.redacted.description,
            "tags": [*self.tool.tags],
            "parameters": [dict(one) for one in self._parameters],
            "signature": self._signature,
        }
        return {**entry, "approval": "ask"} if self.tool.approval == "ask" else entry
