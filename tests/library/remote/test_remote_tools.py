"""Remote tools as code sees them: defined in YAML, listed together, checked before anything is sent."""

import asyncio
import sys
from collections.abc import Callable

import pytest

from carrel.errors import ToolCallError, ToolNotFoundError
from carrel.library.tools.definition_files import ToolFiles
from carrel.library.tools.mcp import McpProvider
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.storage.memory import MemoryStore
from tests.library.remote.conftest import SERVERS
from tests.support.tools import callable_names
from tests.support.web_server import Answer, WebRequest, WebServer

Serve = Callable[[Callable[[WebRequest], Answer]], WebServer]
SPEC = """{"openapi": "3.1.0", "paths": {"/pets/{id}": {"get": {"operationId": "get-pet", "parameters":
[{"name": "id", "in": "path", "required": true, "schema": {"type": "integer"}}], "responses": {}}}}}"""


async def test_a_server_that_ends_does_not_affect_other_tools(web: Serve) -> None:
    served = web(lambda request: Answer({"path": request.path, "token": request.headers.get("authorization")}))
    store, secrets = MemoryStore(), Secrets({"TOKEN": "mellon-mellon"})
    files = {
        "odd.yaml": f"""
            name: odd
            type: mcp
            command: {sys.executable}
            args: [{SERVERS / "unruly.py"}, ""]
            startup_timeout: 55
            tags: [strange]""",
        "dead.yaml": f"""
            name: dead
            type: mcp
            transport: stdio
            command: {sys.executable}
            args: [{SERVERS / "unruly.py"}, dies]
            startup_timeout: 55""",
        "git.yaml": f"""
            name: git
            type: http
            base_url: {served.url}
            headers: {{Authorization: "Bearer ${{TOKEN}}"}}
            endpoints:
              get_repo: {{method: GET, path: "/repos/{{owner}}/{{repo}}", description: Repository metadata}}""",
        "shop.yaml": f"""
            name: shop
            type: openapi
            spec: ./specs/shop.json
            base_url: {served.url}/shop""",
        "specs/shop.json": SPEC,
    }
    for name, text in files.items():
        await store.put(f"tools/{name}", text.encode())
    tools = ToolRegistry(files=[ToolFiles(store, secrets=secrets)], secrets=secrets, startup_wait=60)
    await tools.reload()
    try:
        listed = {entry["name"]: entry for entry in await tools.list()}
        assert {"odd.echo", "git.get_repo", "shop.get_pet"} <= set(callable_names([*listed.values()]))
        assert listed["odd"]["tags"] == listed["odd"]["recipes"][0]["tags"] == ["strange"]
        assert "no licence" in listed["dead"]["error"]
        assert await tools.handle("tools.odd.echo", ["hi"], {}) == {"text": "hi"}
        # What the service says back has no secret in it either.
        assert await tools.call("git.get_repo", {"owner": "ada", "repo": "x"}) == {
            "path": "/repos/ada/x",
            "token": "Bearer ${TOKEN}",
        }
        assert (await tools.call("shop.get_pet", {"id": 7}))["path"] == "/shop/pets/7"
        sent = len(served.requests)
        with pytest.raises(ToolCallError, match="id"):
            await tools.call("shop.get_pet", {"id": "seven"})
        with pytest.raises(ToolCallError, match="repo is missing"):
            await tools.call("git.get_repo", {"owner": "ada"})
        assert len(served.requests) == sent
        with pytest.raises(ToolCallError, match="no licence"):
            await tools.call("dead.anything", {})
        with pytest.raises(ToolNotFoundError, match="echo"):
            await tools.call("odd.ecko", {})
    finally:
        await tools.close()


async def test_descriptions_of_servers_have_no_secrets(unruly: Callable[..., McpProvider]) -> None:
    secrets = Secrets({"TOKEN_HERE": "mellon-mellon"})
    tools = ToolRegistry(
        [unruly("telltale", env={"TOKEN": "${TOKEN_HERE}"}, secrets=secrets)], secrets=secrets, startup_wait=60
    )
    texts = [
        await tools.list(),
        await tools.handle("tools.list", [], {}),
        await tools.handle("tools.odd.list", [], {}),
        await tools.search("tell a tale"),
        await tools.handle("tools.search", ["tell a tale"], {}),
        await tools.describe(),
        await tools.describe("tell a tale", docs="line"),
    ]
    for one in texts:
        assert "tale" in str(one)
        assert "mellon" not in str(one)
    with pytest.raises(ToolCallError, match="TOKEN_HERE") as failed:
        await tools.call("odd.tell", {})
    assert "mellon" not in str(failed.value)
    await tools.close()


async def test_a_reload_restarts_a_server_only_if_its_definition_has_changed() -> None:
    store, secrets = MemoryStore(), Secrets({})
    server = f"name: odd\ntype: mcp\ncommand: {sys.executable}\nargs: [{SERVERS / 'unruly.py'}, '']\n"
    await store.put("tools/odd.yaml", server.encode())
    tools = ToolRegistry(files=[ToolFiles(store, secrets=secrets)], secrets=secrets)
    try:
        await tools.reload()
        first = await tools.call("odd.do")
        await store.put("tools/other.yaml", b"name: other\ncommand: echo\n")
        await store.put("tools/odd.yaml", f"# the same\n{server}".encode())
        await tools.reload()
        assert await tools.call("odd.do") == first
        await store.put("tools/odd.yaml", f"{server}tags: [new]\n".encode())
        await tools.reload()
        assert await tools.call("odd.do") != first
    finally:
        await tools.close()


async def test_listings_do_not_wait_for_a_server_that_is_starting(unruly: Callable[..., McpProvider]) -> None:
    tools = ToolRegistry([unruly("silent", startup_timeout=3)], startup_wait=0.2)
    async with asyncio.timeout(2.5):
        (listed,) = await tools.list()
        assert listed["error"] == "odd is still starting; tools.odd.list() waits until it is ready"
        assert await tools.search("echo") == []
        assert "# odd is still starting" in await tools.describe()
        assert len(await tools.describe(limit=40)) <= 40
    (waited,) = await tools.handle("tools.odd.list", [], {})
    assert "it did not start within 3 s" in waited["error"]
    # A call now fails at once.
    async with asyncio.timeout(2):
        with pytest.raises(ToolCallError, match="it did not start within 3 s"):
            await tools.call("odd.echo", {"text": "hi"})
    await tools.close()


async def test_a_server_that_is_starting_is_ended_with_the_session(unruly: Callable[..., McpProvider]) -> None:
    server = unruly("silent", startup_timeout=60)
    tools = ToolRegistry([server], startup_wait=0.1)
    await tools.list()
    async with asyncio.timeout(20):
        await tools.close()


async def test_a_slow_server_is_listed_when_it_has_started(unruly: Callable[..., McpProvider]) -> None:
    tools = ToolRegistry([unruly()], startup_wait=0.01)
    assert "still starting" in (await tools.list())[0]["error"]
    assert "echo" in {one["name"] for one in await tools.handle("tools.odd.list", [], {})}
    assert "odd.echo" in callable_names(await tools.list())
    assert "still starting" not in await tools.describe()
    await tools.close()


async def test_a_second_listing_does_not_wait_again(unruly: Callable[..., McpProvider]) -> None:
    tools = ToolRegistry([unruly("silent", startup_timeout=60)], startup_wait=2)
    await tools.list()
    # Waiting each time would take twice as long as this, and longer.
    async with asyncio.timeout(20):
        for _ in range(7):
            await tools.list()
            await tools.search("echo")
            await tools.describe("echo")
    await tools.close()


async def test_ready_waits_for_all_and_for_those_that_fail(unruly: Callable[..., McpProvider]) -> None:
    tools = ToolRegistry([unruly(), unruly("dies")], startup_wait=0.01)
    await tools.ready()
    async with asyncio.timeout(20):
        assert "odd.echo" in callable_names(await tools.list())
    await tools.close()
