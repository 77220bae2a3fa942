"""Definitions in a store of every kind: all are read, a bad one costs itself, and a second reading costs little."""

from pathlib import Path

import pytest

from carrel.errors import ConfigurationError
from carrel.library.tools import definition_files
from carrel.library.tools.definition_files import read_definitions, tool_files
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.storage.files.store import FileStore
from tests.library.tools.making import callable_names
from tests.library.tools.test_definition import CURL
from tests.support.stores import Place

ECHO = b"name: echo\ncommand: echo\nschema: {positional: [{name: text}]}\n"
SPEC = b"""\
openapi: 3.1.0
info: {title: Shop, version: "1"}
servers: [{url: "http://127.0.0.1:9"}]
paths: {/items: {get: {operationId: list_items, summary: What is sold, responses: {"200": {description: ok}}}}}
"""


async def test_all_files_below_tools_are_read(place: Place) -> None:
    store = place.open()
    await store.put("tools/curl.yaml", CURL.encode())
    await store.put("tools/more/echo.yml", ECHO)
    await store.put("tools/notes.md", b"no tool")
    await store.put("other/x.yaml", b"name: x\ncommand: x")
    found = await read_definitions(store)
    assert {file: definition.name for file, definition in found.by_file.items()} == {
        "tools/curl.yaml": "curl",
        "tools/more/echo.yml": "echo",
    }


async def test_tools_from_a_store_can_be_called_and_are_shared(place: Place) -> None:
    await place.open().put("tools/echo.yaml", ECHO)
    secrets = Secrets({})
    tools = ToolRegistry(files=[tool_files(place.open(), secrets=secrets)], secrets=secrets)
    assert await tools.call("echo", {"text": "a"}) == "a\n"
    await tools.close()


async def test_a_bad_file_is_an_error_or_costs_itself(place: Place) -> None:
    store = place.open()
    await store.put("tools/echo.yaml", ECHO)
    await store.put("tools/bad.yaml", b"name: bad\ncomand: ls\n")
    with pytest.raises(ConfigurationError, match=r"tools/bad\.yaml, line 2, comand: nobody knows this field"):
        await read_definitions(store)
    found = await read_definitions(store, on_error="skip")
    assert list(found.by_file) == ["tools/echo.yaml"]
    assert list(found.problems) == ["tools/bad.yaml"]


async def test_a_name_that_stands_in_two_files_is_told(place: Place) -> None:
    store = place.open()
    await store.put("tools/a.yaml", ECHO)
    await store.put("tools/b.yaml", ECHO + b"# other\n")
    with pytest.raises(ConfigurationError, match=r"tools/b\.yaml, name: echo is defined in tools/a\.yaml already"):
        await read_definitions(store)
    assert list((await read_definitions(store, on_error="skip")).by_file) == ["tools/a.yaml"]


async def test_what_another_process_has_read_is_not_read_again(place: Place) -> None:
    store = place.open()
    await store.put("tools/curl.yaml", CURL.encode())
    definition_files._parsed.clear()
    first = await read_definitions(store)
    kept = await store.get("library/tools/parsed.json")
    assert kept is not None
    definition_files._parsed.clear()
    assert (await read_definitions(place.open())).by_file == first.by_file
    assert await store.get("library/tools/parsed.json") == kept


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"x": {"name": 5}}'])
async def test_a_damaged_cache_costs_nothing_but_time(tmp_path: Path, damage: bytes) -> None:
    store = FileStore(tmp_path)
    await store.put("tools/curl.yaml", CURL.encode())
    await store.put("library/tools/parsed.json", damage)
    definition_files._parsed.clear()
    assert [definition.name for definition in (await read_definitions(store)).by_file.values()] == ["curl"]


async def test_an_edited_file_is_read_anew(place: Place) -> None:
    store = place.open()
    await store.put("tools/echo.yaml", ECHO)
    await read_definitions(store)
    await store.put("tools/echo.yaml", ECHO + b"description: Now with words\n")
    [definition] = (await read_definitions(store)).by_file.values()
    assert definition.description == "Now with words"


async def test_a_description_of_a_service_beside_its_definition_is_no_definition(place: Place) -> None:
    store = place.open()
    await store.put("tools/shop.yaml", b"name: shop\ntype: openapi\nspec: ./shop.openapi.yaml\n")
    await store.put("tools/shop.openapi.yaml", SPEC)
    secrets = Secrets({})
    tools = ToolRegistry(files=[tool_files(store, secrets=secrets)], secrets=secrets)
    assert callable_names(await tools.list()) == ["shop.list_items"]
    await tools.close()


async def test_a_file_that_a_definition_names_and_nobody_has_costs_that_tool(place: Place) -> None:
    store = place.open()
    await store.put("tools/shop.yaml", b"name: shop\ntype: openapi\nspec: ../../../etc/shop.json\n")
    await store.put("tools/echo.yaml", ECHO)
    secrets = Secrets({})
    tools = ToolRegistry(files=[tool_files(store, secrets=secrets)], secrets=secrets)
    listed = await tools.list()
    assert [one["name"] for one in listed] == ["echo", "shop"]
    assert "shop cannot be used" in listed[1]["error"]
    await tools.close()


async def test_a_store_without_tools_has_none(place: Place) -> None:
    assert (await read_definitions(place.open())).by_file == {}
