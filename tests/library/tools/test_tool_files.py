"""Tool files that come, change, break and go while somebody uses them."""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from carrel.errors import ConfigurationError, StorageUnavailable, ToolCallError, ToolNotFoundError
from carrel.library.tools.definition_files import AnyDefinition, Broken, OnError, ToolFiles, tool_files
from carrel.library.tools.python import register
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool
from carrel.processes import OnOutput
from carrel.storage.base import Stamp, Store
from carrel.storage.memory import MemoryStore
from tests.library.tools.making import callable_names
from tests.support.stores import Place


def echo(name: str = "echo", says: str = "", about: str = "Say it") -> bytes:
    return f"name: {name}\ndescription: {about}\ncommand: echo -n {says}\n".encode()


def catalog(store: Store, on_error: OnError = "raise") -> ToolRegistry:
    secrets = Secrets({})
    return ToolRegistry(files=[tool_files(store, secrets=secrets, on_error=on_error)], secrets=secrets)


@pytest.fixture
async def tools(place: Place) -> AsyncIterator[ToolRegistry]:
    store = place.open()
    await store.put("tools/a.yaml", echo("a", "one"))
    tools = catalog(store)
    await tools.look()
    yield tools
    await tools.close()


async def test_a_file_that_comes_can_be_called_listed_and_found(tools: ToolRegistry, place: Place) -> None:
    await place.open().put("tools/b.yaml", echo("b", "two"))
    assert await tools.call("b") == "two"
    await place.open().put("tools/c.yaml", echo("c", about="Count the sheep"))
    assert [one["name"] for one in await tools.list()] == ["a", "b", "c"]
    await place.open().put("tools/d.yaml", echo("d", about="Draw a sheep"))
    assert [one["name"] for one in await tools.search("draw")] == ["d"]
    await place.open().put("tools/e.yaml", echo("e", about="Eat a sheep"))
    assert "Eat a sheep" in await tools.describe()
    await place.open().put("tools/f.yaml", b"name: f\ncommand: echo\nrecipes: {g: {}}\n")
    assert [one["name"] for one in await tools.handle("tools.f.list", [], {})] == ["g"]


async def test_a_file_that_changes_is_called_as_it_is_now(tools: ToolRegistry, place: Place) -> None:
    assert await tools.call("a") == "one"
    await place.open().put("tools/a.yaml", echo("a", "another", about="Something else"))
    assert await tools.call("a") == "another"
    assert [one["description"] for one in await tools.list()] == ["Something else"]


async def test_a_file_that_goes_takes_its_tools_along(tools: ToolRegistry, place: Place) -> None:
    assert await tools.call("a") == "one"
    await place.open().delete("tools/a.yaml")
    with pytest.raises(ToolNotFoundError, match=r"there is no tool a$"):
        await tools.call("a")
    assert await tools.list() == []


async def test_a_file_that_breaks_says_why_and_costs_only_itself(
    tools: ToolRegistry, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    await place.open().put("tools/b.yaml", echo("b", "two"))
    assert await tools.call("b") == "two"
    why = "tools/b.yaml, line 2, comand: nobody knows this field; did you mean command?"
    with caplog.at_level(logging.WARNING):
        await place.open().put("tools/b.yaml", b"name: b\ncomand: echo\n")
        with pytest.raises(ToolCallError, match=why):
            await tools.call("b")
    assert why in caplog.text
    assert [(one["name"], why in one.get("error", "")) for one in await tools.list()] == [("a", False), ("b", True)]
    assert await tools.call("a") == "one"
    await place.open().put("tools/b.yaml", echo("b", "three"))
    assert await tools.call("b") == "three"


async def test_a_name_that_a_second_file_takes_stays_with_the_first(tools: ToolRegistry, place: Place) -> None:
    await place.open().put("tools/b.yaml", echo("a", "two"))
    told = {one["name"]: one.get("error", "") for one in await tools.list()}
    assert "tools/b.yaml, name: a is defined in tools/a.yaml already" in told["b"]
    assert await tools.call("a") == "one"
    await place.open().delete("tools/a.yaml")
    assert [one["name"] for one in await tools.list()] == ["a"]
    assert await tools.call("a") == "two"


async def test_a_file_that_was_never_right_is_an_error_or_left_out(place: Place) -> None:
    await place.open().put("tools/a.yaml", echo("a", "one"))
    await place.open().put("tools/bad.yaml", b"name: bad\ncomand: ls\n")
    with pytest.raises(ConfigurationError, match=r"tools/bad\.yaml, line 2, comand"):
        await catalog(place.open()).look()
    tools = catalog(place.open(), "skip")
    await tools.look()
    assert [one["name"] for one in await tools.list()] == ["a"]
    await place.open().put("tools/bad.yaml", echo("bad", "good"))
    assert await tools.call("bad") == "good"
    await place.open().put("tools/bad.yaml", b"name: bad\ncomand: ls\n")
    assert [(one["name"], "error" in one) for one in await tools.list()] == [("a", False), ("bad", True)]
    await tools.close()


async def test_a_registered_function_is_called_rather_than_a_file_of_its_name(
    tools: ToolRegistry, place: Place
) -> None:
    def a() -> str:
        return "a function"

    def b() -> str:
        return "another"

    tools.add(register(a))
    tools.add(register(b))
    await place.open().put("tools/a.yaml", echo("a", "two"))
    await place.open().put("tools/b.yaml", echo("b", "two"))
    await tools.list()
    assert await tools.call("a") == "a function"
    assert await tools.call("b") == "another"


async def test_the_description_of_a_service_is_read_again_when_it_changes(place: Place) -> None:
    spec = b"""{"openapi": "3.1.0", "paths": {"/x": {"get": {"operationId": "one", "responses": {}}}}}"""
    store = place.open()
    await store.put("tools/shop.yaml", b"name: shop\ntype: openapi\nspec: ./specs/shop.json\nbase_url: http://x\n")
    await store.put("tools/specs/shop.json", spec)
    tools = catalog(store)
    assert callable_names(await tools.list()) == ["shop.one"]
    await store.put("tools/specs/shop.json", spec.replace(b"one", b"other"))
    assert (await tools.find("shop.other")).name == "shop.other"
    assert callable_names(await tools.list()) == ["shop.other"]
    await tools.close()


class Counted:
    """Answers with its number; a call waits until it may end."""

    def __init__(self, number: int, definition: AnyDefinition) -> None:
        self.name = definition.name
        self.number = number
        self.closed = 0
        self.may_end = asyncio.Event()
        self.began = asyncio.Event()
        self.over = asyncio.Event()
        self._tools = [Tool(name=self.name)]

    async def definitions(self) -> Sequence[Tool]:
        return self._tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: OnOutput | None = None) -> int:
        self.began.set()
        await self.may_end.wait()
        return self.number

    async def close(self) -> None:
        self.closed += 1
        self.may_end.set()
        self.over.set()


class Counting:
    """Makes providers and remembers them."""

    def __init__(self, store: Store) -> None:
        self.made: list[Counted] = []
        self._more = asyncio.Event()
        self.tools = ToolRegistry(files=[ToolFiles(store, "tools", self._make)])

    def _make(self, file: str, definition: AnyDefinition) -> Counted:
        self.made.append(Counted(len(self.made), definition))
        self._more.set()
        return self.made[-1]

    async def number(self, number: int) -> Counted:
        """That one, as soon as it is there."""
        while len(self.made) <= number:
            self._more.clear()
            await self._more.wait()
        return self.made[number]


async def test_what_says_the_same_is_left_alone_and_what_changed_is_replaced() -> None:
    store = MemoryStore()
    await store.put("tools/a.yaml", echo("a"))
    await store.put("tools/b.yaml", echo("b"))
    counting = Counting(store)
    await counting.tools.look()
    first, second = counting.made
    await store.put("tools/a.yaml", b"# a comment\n" + echo("a"))
    await store.put("tools/b.yaml", echo("b", "more"))
    await counting.tools.list()
    await second.over.wait()
    assert [one.number for one in counting.made] == [0, 1, 2]
    assert (first.closed, second.closed) == (0, 1)
    await counting.tools.close()
    assert [one.closed for one in counting.made] == [1, 1, 1]


async def test_a_call_under_way_ends_with_what_it_began_with() -> None:
    store = MemoryStore()
    await store.put("tools/a.yaml", echo("a"))
    counting = Counting(store)
    call = asyncio.create_task(counting.tools.call("a"))
    first = await counting.number(0)
    await first.began.wait()
    await store.put("tools/a.yaml", echo("a", "more"))
    newer = asyncio.create_task(counting.tools.call("a"))
    (await counting.number(1)).may_end.set()
    assert await newer == 1
    assert not call.done()
    assert first.closed == 0
    first.may_end.set()
    assert await call == 0
    await first.over.wait()
    await counting.tools.close()


async def test_closing_ends_what_was_replaced_and_is_still_at_work() -> None:
    store = MemoryStore()
    await store.put("tools/a.yaml", echo("a"))
    counting = Counting(store)
    await counting.tools.look()
    call = asyncio.create_task(counting.tools.call("a"))
    await counting.made[0].began.wait()
    await store.delete("tools/a.yaml")
    await counting.tools.look()
    await counting.tools.close()
    assert counting.made[0].over.is_set()
    assert await call == 0


class Failing(MemoryStore):
    """A store whose server goes."""

    gone = False

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        if self.gone:
            raise StorageUnavailable("the server is gone")
        return await super().stamps(keys)


async def test_a_store_that_does_not_answer_leaves_the_tools_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    store = Failing()
    await store.put("tools/a.yaml", echo("a", "one"))
    tools = catalog(store)
    assert await tools.call("a") == "one"
    store.gone = True
    assert await tools.call("a") == "one"
    assert [one["name"] for one in await tools.list()] == ["a"]
    assert "whether tool files changed cannot be seen: the server is gone" in caplog.text
    await tools.close()
    with pytest.raises(StorageUnavailable):
        await catalog(store).look()


async def test_many_at_once_see_one_change_once() -> None:
    store = MemoryStore()
    await store.put("tools/a.yaml", echo("a"))
    counting = Counting(store)
    await counting.tools.look()
    await store.put("tools/a.yaml", echo("a", "more"))
    calls = [asyncio.create_task(counting.tools.call("a")) for _ in range(20)]
    (await counting.number(1)).may_end.set()
    assert await asyncio.gather(*calls) == [1] * 20
    assert len(counting.made) == 2
    await counting.tools.close()


async def test_the_error_of_a_file_that_is_wrong_does_not_grow_with_each_call() -> None:
    problem = ConfigurationError("tools/bad.yaml, line 1: no YAML")
    tools = ToolRegistry([Broken("bad", problem)])
    for _ in range(50):
        with pytest.raises(ToolCallError, match="no YAML"):
            await tools.call("bad")
    frames = len(traceback.extract_tb(problem.__traceback__))
    assert frames < 10
