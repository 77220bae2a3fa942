"""Services that describe themselves: OpenAPI 3.0 and 3.1, as JSON and YAML, from a file and from a URL."""

import copy
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.errors import ConfigurationError, ToolCallError
from carrel.library.tools.definitions import OpenApiDefinition
from carrel.library.tools.openapi import OpenApiProvider, parse_document
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool, ToolProvider
from tests.support.web_server import Answer, WebRequest, WebServer

Serve = Callable[[Callable[[WebRequest], Answer]], WebServer]
SHOP = (Path(__file__).parent / "shop.yaml").read_bytes()


@pytest.fixture
async def shop() -> AsyncIterator[Callable[..., OpenApiProvider]]:
    """A provider of the shop, or of another description."""
    made: list[OpenApiProvider] = []

    def make(data: bytes | str | dict[str, Any] = SHOP, **fields: Any) -> OpenApiProvider:
        content = (
            json.dumps(data).encode() if isinstance(data, dict) else data.encode() if isinstance(data, str) else data
        )

        async def read(path: str) -> bytes:
            if path != "./shop.yaml":
                raise FileNotFoundError(f"there is no {path}")
            return content

        fields = {"name": "shop", "type": "openapi", "spec": "./shop.yaml", "headers": {"X-Api-Key": "${KEY}"}} | fields
        made.append(OpenApiProvider(OpenApiDefinition(**fields), Secrets({"KEY": "mellon-mellon"}), read=read))
        return made[-1]

    yield make
    for provider in made:
        await provider.close()


async def make_tools(provider: ToolProvider) -> dict[str, Tool]:
    return {tool.name.partition(".")[2]: tool for tool in await provider.definitions()}


async def test_each_operation_is_a_tool(shop: Any, caplog: pytest.LogCaptureFixture) -> None:
    provider = shop()
    assert isinstance(provider, ToolProvider)
    tools = await make_tools(provider)
    assert await provider.definitions() is await provider.definitions()
    assert list(tools) == [
        "listPets",
        "add_pet",
        "get_pets_pet_id_",
        "replacePet",
        "removePet",
        "addPhoto",
        "order",
    ]
    assert "GET /broken: $ref #/components/parameters/Nowhere leads nowhere" in caplog.text
    listed = tools["listPets"]
    assert listed.description == "List pets, newest first."
    assert listed.tags == ("pets",)
    # What the definition sends, and what OpenAPI says to ignore, is no parameter.
    assert list(listed.parameters["properties"]) == ["X_Trace", "limit", "tags", "filter", "session", "where"]
    assert listed.parameters["properties"]["limit"]["description"] == "How many at most"
    assert tools["add_pet"].description == "Deprecated."


async def test_schemas_are_plain_json_schema(shop: Any) -> None:
    tools = await make_tools(shop())
    for tool in tools.values():
        jsonschema.Draft202012Validator.check_schema(tool.parameters)
        assert "#/components" not in json.dumps([tool.parameters, tool.returns])
    pet = tools["add_pet"].parameters
    # `id` is read-only: the service gives it.
    assert (list(pet["properties"]), pet["required"]) == (["name", "X_Trace", "tag", "secret", "parent"], ["name"])
    assert pet["properties"]["tag"] == {"type": ["string", "null"], "enum": ["cat", "dog", None]}
    assert pet["properties"]["parent"] == {"$ref": "#/$defs/Pet"}
    assert "id" not in pet["$defs"]["Pet"]["properties"]
    check = jsonschema.Draft202012Validator(pet)
    assert check.is_valid({"name": "Rex", "tag": None, "parent": {"name": "Max", "parent": {"name": "Old"}}})
    assert not check.is_valid({"name": "Rex", "parent": {"name": 1}})
    assert tools["replacePet"].parameters["properties"]["pet_id"] == {"type": "integer", "exclusiveMinimum": 0}
    returned = tools["listPets"].returns
    assert returned is not None
    assert list(returned["$defs"]["Pet"]["properties"]) == ["id", "name", "tag", "parent"]
    assert tools["order"].parameters["required"] == ["pet"]
    assert list(tools["order"].parameters["properties"]) == ["pet", "note"]
    assert list(tools["replacePet"].parameters["properties"]) == ["pet_id", "body"]


async def test_where_arguments_of_an_operation_are_sent(web: Serve, shop: Any) -> None:
    served = web(lambda request: Answer([request.method, request.path]))
    provider = shop(base_url=f"{served.url}/v1", query={"lang": "en"})
    tools = await make_tools(provider)
    given = {"X_Trace": "t", "limit": 3, "tags": ["a", "b"], "filter": {"age": {"min": 1}}, "session": "s", "where": {}}
    assert await provider.call(tools["listPets"], given) == ["GET", "/v1/pets"]
    assert await provider.call(tools["add_pet"], {"name": "Rex", "tag": None}) == ["POST", "/v1/pets"]
    assert await provider.call(tools["get_pets_pet_id_"], {"pet_id": "7"}) == ["GET", "/v1/pets/7"]
    await provider.call(tools["replacePet"], {"pet_id": 7, "body": ["x"]})
    await provider.call(tools["addPhoto"], {"pet_id": 7, "photo": b"\x89PNG"})
    await provider.call(tools["order"], {"pet": 7})
    listed, added, got, replaced, photo, order = served.requests
    assert listed.query == [("lang", "en"), ("limit", "3"), ("tags", "a,b"), ("filter[age][min]", "1"), ("where", "{}")]
    assert listed.headers["x-trace"] == "t"
    assert listed.headers["cookie"] == "session=s"
    assert listed.headers["x-api-key"] == "mellon-mellon"
    assert added.json == {"name": "Rex", "tag": None}
    assert "content-type" not in got.headers
    assert replaced.json == ["x"]
    assert photo.headers["content-type"].startswith("multipart/form-data; boundary=")
    assert b"\x89PNG" in photo.body
    assert order.json == {"pet": 7}


async def test_the_url_of_the_service(shop: Any) -> None:
    tools = await make_tools(provider := shop())
    with pytest.raises(ToolCallError, match=r"shop\.listPets: GET /pets could not reach the service"):
        await provider.call(tools["listPets"], {})
    assert provider._operations["shop.listPets"].base_url == "http://127.0.0.1:9/api"
    assert provider._operations["shop.removePet"].base_url == "http://127.0.0.1:9/admin"


@pytest.mark.parametrize(
    ("server", "address"),
    [
        ({"url": "//api.example.com/v1"}, "https://api.example.com/v1"),
        ({"url": "{way}://{at}.example.com", "variables": {"way": {"default": "http"}, "at": {"default": "eu"}}}, None),
    ],
)
async def test_server_urls_with_variables_or_without_a_scheme(shop: Any, server: Any, address: str | None) -> None:
    content = {"openapi": "3.0.0", "servers": [server], "paths": {"/a": {"get": {"operationId": "a", "responses": {}}}}}
    await (provider := shop(content)).definitions()
    assert provider._operations["shop.a"].base_url == (address or "http://eu.example.com")
    server["url"] = server["url"].replace("api.", "{region}.").replace("{at}", "{region}")
    with pytest.raises(ConfigurationError, match=r"\{region\}\.example\.com.* is not the address of a service"):
        await shop(content).definitions()


async def test_headers_that_cannot_be_parameters(shop: Any) -> None:
    named = [{"name": name, "in": "header", "schema": {"type": "string"}} for name in ("", "X Y", "X-Y")]
    content = {"openapi": "3.0.0", "paths": {"/a": {"get": {"parameters": named, "responses": {}}}}}
    tools = await make_tools(shop(content, base_url="http://127.0.0.1:9"))
    assert list(tools["get_a"].parameters["properties"]) == ["X_Y"]


async def test_query_method_of_3_2(web: Serve, shop: Any) -> None:
    fields = {"type": "object", "properties": {"words": {"type": "string"}}}
    find = {"requestBody": {"content": {"application/json": {"schema": fields}}}, "responses": {}}
    odd = {"operationId": "odd", "parameters": [{"name": "q", "in": "querystring"}], "responses": {}}
    content = {"openapi": "3.2.0", "paths": {"/books": {"query": find, "get": odd}}}
    served = web(lambda request: Answer(request.json))
    tools = await make_tools(provider := shop(content, base_url=served.url))
    assert list(tools) == ["query_books"]
    assert await provider.call(tools["query_books"], {"words": "white whale"}) == {"words": "white whale"}
    assert served.requests[0].method == "QUERY"


async def test_encodings_of_forms(web: Serve, shop: Any) -> None:
    fields = {"properties": {"card": {"type": "object"}, "expand": {"type": "array", "items": {"type": "string"}}}}
    deep = {"style": "deepObject", "explode": True}
    form = {"schema": fields | {"type": "object"}, "encoding": {"card": deep, "expand": deep}}
    post = {
        "operationId": "pay",
        "requestBody": {"content": {"application/x-www-form-urlencoded": form}},
        "responses": {},
    }
    content = {"openapi": "3.0.0", "paths": {"/pay?by=form": {"post": post}}}
    served = web(lambda _: Answer({}))
    tools = await make_tools(provider := shop(content, base_url=f"{served.url}/v1?key=k"))
    await provider.call(tools["pay"], {"card": {"number": 4}, "expand": ["a", "b"]})
    assert (served.requests[0].path, served.requests[0].query) == ("/v1/pay", [("key", "k"), ("by", "form")])
    assert served.requests[0].body == b"card%5Bnumber%5D=4&expand%5B0%5D=a&expand%5B1%5D=b"


async def test_servers_relative_to_the_url_of_the_document(web: Serve, shop: Any) -> None:
    content = yaml.safe_load(SHOP) | {"openapi": "3.1.0", "servers": [{"url": "/v2"}]}

    def answer(request: WebRequest) -> Answer:
        return Answer(content) if request.path == "/docs/openapi.json" else Answer({"at": request.path})

    served = web(answer)
    provider = shop(spec=f"{served.url}/docs/openapi.json")
    tools = await make_tools(provider)
    assert await provider.call(tools["order"], {"pet": 1}) == {"at": "/v2/orders"}
    # The server of the document does not get the service's secrets.
    assert "x-api-key" not in served.requests[0].headers
    with pytest.raises(ToolCallError, match=r"/gone\.json answered 404 Not Found"):
        await shop(spec=f"{web(lambda _: Answer(status=404)).url}/gone.json").definitions()


@pytest.mark.parametrize("place", ["document", "path", "operation"])
async def test_a_document_cannot_send_secrets_to_another_host(web: Serve, shop: Any, place: str) -> None:
    elsewhere = web(lambda _: Answer({}))
    servers = {"servers": [{"url": elsewhere.url.replace("127.0.0.1", "localhost")}]}
    operation: dict[str, Any] = {"operationId": "a", "responses": {}}
    path: dict[str, Any] = {"get": operation | (servers if place == "operation" else {})}
    content: dict[str, Any] = {"openapi": "3.1.0", "paths": {"/a": path | (servers if place == "path" else {})}}
    content |= servers if place == "document" else {}
    spec = f"{web(lambda _: Answer(content)).url}/spec"
    with pytest.raises(ConfigurationError, match=r"secrets are sent to 127\.0\.0\.1:\d+ only; set base_url"):
        await shop(spec=spec).definitions()
    with pytest.raises(ConfigurationError, match="set base_url"):
        await shop(spec=spec, headers={"Authorization": "Bearer written-out"}).definitions()
    for key in ({"headers": {"X-Shop": "written-out"}}, {"headers": {}, "query": {"api_key": "written-out"}}):
        with pytest.raises(ConfigurationError, match="set base_url"):
            await shop(spec=spec, **key).definitions()
    # There are no secrets, or the definition says where they are sent.
    for settled in ({"headers": {"Accept-Language": "en"}}, {"base_url": elsewhere.url}):
        tools = await make_tools(provider := shop(spec=spec, **settled))
        assert await provider.call(tools["a"], {}) == {}


async def test_schemas_of_3_1_are_unchanged(shop: Any) -> None:
    schema = {"type": ["string", "null"], "const": "x", "exclusiveMinimum": 3}
    post = {
        "operationId": "send",
        "requestBody": {"content": {"text/csv": {"schema": schema}}},
        "responses": {"2XX": {"description": "", "content": {"application/json": {"schema": True}}}},
    }
    content = {"openapi": "3.1.0", "servers": [{"url": "http://127.0.0.1:9"}], "paths": {"/": {"post": post}}}
    tool = (await make_tools(shop(content)))["send"]
    assert tool.parameters["properties"] == {"body": schema}
    assert tool.parameters["required"] == []


async def test_only(shop: Any) -> None:
    assert list(await make_tools(shop(only=["order", "admin"]))) == ["add_pet", "order"]
    with pytest.raises(ConfigurationError, match="shop, only: there is no operation or tag ordr; did you mean order"):
        await shop(only=["ordr"]).definitions()


async def test_two_operations_with_the_same_name(shop: Any) -> None:
    paths = {path: {"get": {"operationId": "get", "responses": {}}} for path in ("/a", "/b")}
    content = {"openapi": "3.0.0", "servers": [{"url": "http://127.0.0.1:9"}], "paths": paths}
    assert list(await make_tools(shop(content))) == ["get", "get_2"]


DOUBLED = "a0: &a0 {}\n" + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"swagger": "2.0", "paths": {}}, "it is Swagger 2.0; convert it to OpenAPI 3"),
        ({"openapi": "4.0", "paths": {}}, r"openapi: expected 3\.0, 3\.1 or 3\.2, not '4\.0'"),
        ({}, "3.2, not 'nothing'"),
        ("{broken", "it is not valid JSON"),
        ("a: [b", "it is neither JSON nor YAML"),
        pytest.param(
            "[" * 100_000, "it is neither JSON nor YAML: document, line 1: it is nested too deeply", id="deep"
        ),
        pytest.param(DOUBLED, "its aliases stand for more than 10,000 values", id="doubled"),
        ("just text", "it is not an OpenAPI document"),
    ],
)
async def test_invalid_documents(shop: Any, content: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"shop, spec \./shop\.yaml: .*{message}"):
        await shop(content).definitions()


async def test_a_missing_file_or_server_is_named(shop: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match=r"shop, spec: there is no \./gone\.json"):
        await shop(spec="./gone.json").definitions()
    content = {"openapi": "3.0.0", "paths": {"/a": {"get": {"responses": {}}}}}
    with pytest.raises(ConfigurationError, match="is not the address of a service; set base_url"):
        await shop(content).definitions()
    assert list(await make_tools(shop(content, base_url="http://127.0.0.1:9"))) == ["get_a"]


async def test_circular_references(shop: Any) -> None:
    circle = {"$ref": "#/components/parameters/B"}
    content = {
        "openapi": "3.0.0",
        "paths": {"/a": {"get": {"parameters": [{"$ref": "#/components/parameters/A"}], "responses": {}}}},
        "components": {"parameters": {"A": circle, "B": {"$ref": "#/components/parameters/A"}}},
    }
    with pytest.raises(ConfigurationError, match="refers to itself"):
        await shop(content, base_url="http://127.0.0.1:9").definitions()


SHOP_READ = yaml.safe_load(SHOP)
JUNK = st.sampled_from(
    [None, True, 0, -1.5, "", "x", "#/nowhere", [], {}, [1], {"a": 1}, {"$ref": "#/paths"}, {"$ref": 7}]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each part of a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in inside for deeper in places(item, (*path, key)))]


@given(st.data())
@settings(max_examples=150)
def test_any_document_can_be_read(data: st.DataObject) -> None:
    content = copy.deepcopy(SHOP_READ)
    for _ in range(data.draw(st.integers(1, 3))):
        found_places = places(content)[1:]
        *way, last = found_places[data.draw(st.integers(0, 10_000)) % len(found_places)]
        part = content
        for step in way:
            part = part[step]
        part[last] = copy.deepcopy(data.draw(JUNK))
    try:
        found = parse_document(content, fixed=frozenset())
    except ConfigurationError:
        return
    for operation in found.operations:
        assert set(operation.parameters["required"]) <= set(operation.parameters["properties"])
        json.dumps([operation.parameters, operation.returns])
