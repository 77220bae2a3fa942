"""Reloading of tool files while a session uses them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from carrel.errors import ConfigurationError, ToolNotFoundError
from carrel.library.tools.definition_files import AnyDefinition, OnError, ToolFiles
from carrel.library.tools.python import register
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool, ToolProvider
from carrel.processes import OnOutput
from carrel.storage.base import Stamp, Store
from carrel.storage.memory import MemoryStore
from tests.support.stores import Backend
from tests.support.tools import callable_names


def echo(name: str = "echo", text: str = "", about: str = "Say it") -> bytes:
    return f"name: {name}\ndescription: {about}\ncommand: echo -n {text}\n".encode()


def registry(store: Store, on_error: OnError = "raise") -> ToolRegistry:
    secrets = Secrets({})
    return ToolRegistry(files=[ToolFiles(store, secrets=secrets, on_error=on_error)], secrets=secrets)


@pytest.fixture
async def tools(backend: Backend) -> AsyncIterator[ToolRegistry]:
    store = backend.open()
    await store.put("tools/a.yaml", echo("a", "one"))
    tools = registry(store)
    await tools.reload()
    yield tools
    await tools.close()


async def test_a_new_file_is_used_after_a_reload(tools: ToolRegistry, backend: Backend) -> None:
    await backend.open().put("tools/b.yaml", echo("b", "two", about="Draw a sheep"))
    with pytest.raises(ToolNotFoundError):
        await tools.call("b")
    await tools.reload()
    assert await tools.call("b") == "two"
    assert [one["name"] for one in await tools.list()] == ["a", "b"]
    assert [one["name"] for one in await tools.search("draw")] == ["b"]
    assert "Draw a sheep" in await tools.describe()


async def test_a_changed_file_is_used_after_a_reload(tools: ToolRegistry, backend: Backend) -> None:
    assert await tools.call("a") == "one"
    await backend.open().put("tools/a.yaml", echo("a", "another", about="Something else"))
    assert await tools.call("a") == "one"
    await tools.reload()
    assert await tools.call("a") == "another"
    assert [one["description"] for one in await tools.list()] == ["Something else"]


async def test_the_tools_of_a_deleted_file_are_gone_after_a_reload(tools: ToolRegistry, backend: Backend) -> None:
    await backend.open().delete("tools/a.yaml")
    await tools.reload()
    with pytest.raises(ToolNotFoundError, match=r"there is no tool a$"):
        await tools.call("a")
    assert await tools.list() == []


async def test_a_reload_with_a_wrong_file_changes_nothing(tools: ToolRegistry, backend: Backend) -> None:
    await backend.open().put("tools/a.yaml", echo("a", "two"))
    await backend.open().put("tools/b.yaml", b"name: b\ncomand: echo\n")
    with pytest.raises(ConfigurationError, match=r"tools/b\.yaml, line 2, comand: unknown field"):
        await tools.reload()
    assert await tools.call("a") == "one"
    await backend.open().put("tools/b.yaml", echo("b", "three"))
    await tools.reload()
    assert (await tools.call("a"), await tools.call("b")) == ("two", "three")


async def test_a_wrong_file_can_be_left_out(backend: Backend) -> None:
    await backend.open().put("tools/a.yaml", echo("a", "one"))
    await backend.open().put("tools/bad.yaml", b"name: bad\ncomand: ls\n")
    with pytest.raises(ConfigurationError, match=r"tools/bad\.yaml, line 2, comand"):
        await registry(backend.open()).reload()
    tools = registry(backend.open(), "skip")
    await tools.reload()
    assert [one["name"] for one in await tools.list()] == ["a"]
    await backend.open().put("tools/bad.yaml", echo("bad", "good"))
    await tools.reload()
    assert await tools.call("bad") == "good"
    await tools.close()


async def test_a_registered_function_is_called_instead_of_a_file_of_its_name(
    tools: ToolRegistry, backend: Backend
) -> None:
    def a() -> str:
        return "a function"

    tools.add(register(a))
    await backend.open().put("tools/a.yaml", echo("a", "two"))
    await tools.reload()
    assert await tools.call("a") == "a function"


async def test_the_document_of_a_service_is_read_again(backend: Backend) -> None:
    spec = b"""{"openapi": "3.1.0", "paths": {"/x": {"get": {"operationId": "one", "responses": {}}}}}"""
    store = backend.open()
    await store.put("tools/shop.yaml", b"name: shop\ntype: openapi\nspec: ./specs/shop.json\nbase_url: http://x\n")
    await store.put("tools/specs/shop.json", spec)
    tools = registry(store)
    await tools.reload()
    assert callable_names(await tools.list()) == ["shop.one"]
    await store.put("tools/specs/shop.json", spec.replace(b"one", b"other"))
    await tools.reload()
    assert (await tools.find("shop.other")).name == "shop.other"
    await tools.close()


class CountingStore(MemoryStore):
    """Counts the requests for versions and lists."""

    requests = 0

    async def stamps(self, keys: Sequence[str]) -> list[Stamp | None]:
        self.requests += 1
        return await super().stamps(keys)

    async def list(self, prefix: str = "") -> list[str]:
        self.requests += 1
        return await super().list(prefix)


async def test_a_call_does_not_read_the_store() -> None:
    store = CountingStore()
    await store.put("tools/a.yaml", echo("a", "one"))
    tools = registry(store)
    await tools.reload()
    store.requests = 0
    assert await tools.handle("tools.a", [], {}, print) == "one"
    assert store.requests == 0
    await tools.close()


class NumberedProvider:
    """Returns its number; a call waits until it may end."""

    def __init__(self, number: int, definition: AnyDefinition) -> None:
        self.name = definition.name
        self.number = number
        self.closed = 0
        self.may_end = asyncio.Event()
        self.started = asyncio.Event()
        self.is_closed = asyncio.Event()
        self._tools = [Tool(name=self.name)]

    async def definitions(self) -> Sequence[Tool]:
        return self._tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], on_output: OnOutput | None = None) -> int:
        self.started.set()
        await self.may_end.wait()
        return self.number

    async def close(self) -> None:
        self.closed += 1
        self.may_end.set()
        self.is_closed.set()


class NumberingFiles(ToolFiles):
    """Makes numbered providers."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, secrets=Secrets({}))
        self.made: list[NumberedProvider] = []

    def make_provider(self, file: str, definition: AnyDefinition) -> ToolProvider:
        self.made.append(NumberedProvider(len(self.made), definition))
        return self.made[-1]


@pytest.fixture
async def files() -> NumberingFiles:
    store = MemoryStore()
    await store.put("tools/a.yaml", echo("a"))
    await store.put("tools/b.yaml", echo("b"))
    return NumberingFiles(store)


async def test_only_changed_definitions_get_new_providers(files: NumberingFiles) -> None:
    tools = ToolRegistry(files=[files])
    await tools.reload()
    first, second = files.made
    await files._store.put("tools/a.yaml", b"# a comment\n" + echo("a"))
    await files._store.put("tools/b.yaml", echo("b", "more"))
    await tools.reload()
    await second.is_closed.wait()
    assert (first.closed, second.closed, len(files.made)) == (0, 1, 3)
    await tools.close()
    assert all(one.closed for one in files.made)


async def test_a_call_ends_with_the_provider_it_began_with(files: NumberingFiles) -> None:
    tools = ToolRegistry(files=[files])
    await tools.reload()
    call = asyncio.create_task(tools.call("a"))
    await files.made[0].started.wait()
    await files._store.put("tools/a.yaml", echo("a", "more"))
    await tools.reload()
    files.made[2].may_end.set()
    assert await tools.call("a") == 2
    assert (call.done(), files.made[0].closed) == (False, 0)
    files.made[0].may_end.set()
    assert await call == 0
    await files.made[0].is_closed.wait()
    await tools.close()


async def test_closing_ends_replaced_providers_that_are_still_used(files: NumberingFiles) -> None:
    tools = ToolRegistry(files=[files])
    await tools.reload()
    call = asyncio.create_task(tools.call("a"))
    await files.made[0].started.wait()
    await files._store.delete("tools/a.yaml")
    await tools.reload()
    await tools.close()
    assert files.made[0].is_closed.is_set()
    assert await call == 0
