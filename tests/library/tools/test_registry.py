"""The registry: tools are listed, found and called; a provider that fails costs only its own tools."""

import asyncio
import random
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from carrel.errors import ConfigurationError, ToolCallError, ToolNotFoundError, ToolTimeoutError
from carrel.library.search import LibrarySearch
from carrel.library.tools.python import register
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool, ToolProvider
from carrel.processes import OnOutput
from carrel.text import did_you_mean
from tests.library.tools.test_definitions import CURL
from tests.support.tools import callable_names, catalog

ECHO = "name: echo\ndescription: Say a text\ncommand: echo\nschema: {positional: [{name: text}]}\n"


class Servant:
    """A provider that does what the test says."""

    def __init__(self, name: str, *tools: str, fails: Exception | None = None, answers: Any = "yes") -> None:
        self.name = name
        self.tools = [Tool(name=tool, parameters={"type": "object"}, timeout=60) for tool in tools]
        self.fails = fails
        self.answers = answers
        self.requests = 0
        self.closed = 0

    async def definitions(self) -> Sequence[Tool]:
        self.requests += 1
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return self.tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], on_output: OnOutput | None = None) -> Any:
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    async def close(self) -> None:
        self.closed += 1


def names(found: list[dict[str, Any]]) -> list[str]:
    return [one["name"] for one in found]


def test_providers_satisfy_the_protocol() -> None:
    assert isinstance(Servant("a"), ToolProvider)
    assert isinstance(register(len, name="length"), ToolProvider)


async def test_everything_is_listed_by_name() -> None:
    tools = catalog(CURL, ECHO)
    listed = await tools.list()
    assert names(listed) == ["curl", "echo"]
    get, slow = listed[0]["recipes"]
    assert get == {
        "name": "get",
        "description": "Simple GET",
        "tags": ["http", "network"],
        "parameters": [
            {"name": "url", "type": "str", "description": "URL to request", "required": True, "default": None}
        ],
        "signature": "curl.get(url: str) -> str",
    }
    assert slow["signature"] == "curl.slow(url: str, max_time: int = 30) -> str"
    assert listed[0]["signature"] == (
        "curl(url: str, *, silent: bool = None, header: list[str] = None, max_time: int = None) -> str"
    )


async def test_calls_of_code() -> None:
    tools = catalog(CURL, ECHO)
    assert names(await tools.handle("tools.list", [], {})) == ["curl", "echo"]
    assert names(await tools.handle("tools.curl.list", [], {})) == ["get", "slow"]
    assert await tools.handle("tools.echo.list", [], {}) == []
    assert names(await tools.handle("tools.search", ["text"], {"limit": 1})) == ["echo"]
    assert "def echo(text: str = None) -> str" in await tools.handle("tools.describe", [], {})
    assert await tools.handle("tools.echo", ["hi"], {}) == "hi\n"
    assert await tools.handle("tools.echo", [], {"text": "hi"}) == "hi\n"
    with pytest.raises(ToolCallError, match="tools itself cannot be called"):
        await tools.handle("tools", [], {})


async def test_a_tool_with_the_name_list() -> None:
    tools = ToolRegistry([Servant("box", "box.list", answers=["a"])])
    assert await tools.handle("tools.box.list", [], {}) == ["a"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ecoh", "there is no tool ecoh; did you mean echo?"),
        ("zzz", "there is no tool zzz; there is box, curl, echo"),
        ("curl.gte", "there is no gte in curl; did you mean curl.get"),
        ("curl.get.now", "there is no get.now in curl; did you mean curl.get"),
        ("box", "box itself cannot be called; there is box.open, box.shut"),
    ],
)
async def test_unknown_names_have_similar_names(name: str, expected: str) -> None:
    tools = catalog(CURL, ECHO)
    tools.add(Servant("box", "box.open", "box.shut"))
    with pytest.raises(ToolNotFoundError) as raised:
        await tools.call(name)
    assert str(raised.value).startswith(expected)
    assert isinstance(raised.value, KeyError)


async def test_names_with_a_dash_are_found() -> None:
    tools = ToolRegistry([Servant("box", "box.open_it")])
    assert await tools.call("box.open-it") == "yes"


async def test_a_replaced_tool_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tools = ToolRegistry([Servant("box", "box.open", "box.shut")])
    tools.add(Servant("box", "box.open"))
    for _ in range(2):
        assert callable_names(await tools.list()) == ["box.open", "box.shut"]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["there are two tools box.open; the one that was registered last is called"]


# --- providers that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fails", [ToolCallError("it is down"), ConfigurationError("it is down"), OSError("it is down")]
)
async def test_a_provider_that_fails_affects_only_its_tools(fails: Exception) -> None:
    tools = catalog(ECHO)
    tools.add(Servant("down", fails=fails))
    listed = await tools.list()
    assert names(listed) == ["down", "echo"]
    assert "down cannot be used: " in listed[0]["error"]
    assert "it is down" in listed[0]["error"]
    assert names(await tools.search("text")) == ["echo"]
    assert "echo" in await tools.describe()
    assert await tools.call("echo", {"text": "a"}) == "a\n"
    with pytest.raises(ToolCallError, match="it is down"):
        await tools.call("down.anything")


async def test_a_failed_provider_is_retried_by_calls_and_not_by_listings() -> None:
    servant = Servant("box", "box.open", fails=OSError("not yet"))
    tools = ToolRegistry([servant])
    for _ in range(3):
        await tools.list()
    assert servant.requests == 1
    servant.fails = None
    assert await tools.call("box.open") == "yes"
    assert callable_names(await tools.list()) == ["box.open"]


async def test_concurrent_callers_of_a_failed_provider_share_the_error() -> None:
    servant = Servant("box", fails=OSError("no"))
    tools = ToolRegistry([servant])
    ended = await asyncio.gather(*(tools.call("box.open") for _ in range(20)), return_exceptions=True)
    assert all(isinstance(problem, ToolCallError) for problem in ended)
    assert servant.requests < 20


async def test_the_tools_of_a_provider_may_change() -> None:
    servant = Servant("box", "box.open")
    tools = ToolRegistry([servant])
    assert callable_names(await tools.list()) == ["box.open"]
    servant.tools = [Tool(name="box.shut")]
    assert callable_names(await tools.list()) == ["box.shut"]
    with pytest.raises(ToolNotFoundError):
        await tools.call("box.open")


@pytest.mark.parametrize(
    ("answers", "error", "expected"),
    [
        (OSError("disk gone"), ToolCallError, "box.open failed: OSError: disk gone"),
        (TimeoutError("socket"), ToolCallError, "box.open failed: socket"),
        (ToolTimeoutError("too slow"), ToolTimeoutError, "too slow"),
    ],
)
async def test_exceptions_of_providers(answers: Exception, error: type[Exception], expected: str) -> None:
    with pytest.raises(error) as raised:
        await ToolRegistry([Servant("box", "box.open", answers=answers)]).call("box.open")
    assert str(raised.value) == expected
    assert type(raised.value) is error


async def test_results_errors_and_streams_are_redacted() -> None:
    secrets = Secrets({"KEY": "hunter2"})
    servant = Servant("box", "box.open", answers={"token": "hunter2", "all": [b"hunter2"]})
    tools = ToolRegistry([servant], secrets=secrets)
    secrets.substitute("${KEY}")
    assert await tools.call("box.open") == {"token": "${KEY}", "all": [b"${KEY}"]}
    servant.answers = ToolCallError("401 for hunter2")
    with pytest.raises(ToolCallError) as raised:
        await tools.call("box.open")
    assert str(raised.value) == "401 for ${KEY}"
    servant.fails = OSError("no hunter2")
    assert "hunter2" not in str(await tools.list())


async def test_closing_closes_every_provider() -> None:
    class Stubborn(Servant):
        async def close(self) -> None:
            await super().close()
            raise OSError("will not")

    servants = [Stubborn("a"), Servant("b")]
    tools = ToolRegistry(servants)
    with pytest.raises(OSError, match="will not"):
        await tools.close()
    assert [servant.closed for servant in servants] == [1, 1]


async def test_the_later_of_two_tools_with_the_same_name_is_called() -> None:
    tools = ToolRegistry([Servant("box", "box.open", "box.shut", answers="old")])
    tools.add(Servant("box", "box.open", answers="new"))
    assert await tools.call("box.open") == "new"
    assert await tools.call("box.shut") == "old"
    assert callable_names(await tools.list()) == ["box.open", "box.shut"]


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_streaming_by_definition_and_by_call() -> None:
    for text, wanted, streamed in [
        (ECHO, None, False),
        (ECHO, True, True),
        (ECHO + "stream: true\n", None, True),
        (ECHO + "stream: true\n", False, False),
    ]:
        output: list[str] = []
        arguments = {} if wanted is None else {"_stream": wanted}
        assert await catalog(text).handle("tools.echo", ["hi"], arguments, output.append) == "hi\n"
        assert output == (["hi\n"] if streamed else [])


async def test_streaming_without_a_listener() -> None:
    assert await catalog(ECHO + "stream: true\n").handle("tools.echo", ["hi"], {"_stream": True}) == "hi\n"


# --- searching and describing -----------------------------------------------------------------------------------------


async def test_search_compares_name_description_parameters_and_tags() -> None:
    tools = catalog(CURL, ECHO, search=LibrarySearch(None, "search/tools", embedder=False))
    [found] = await tools.search("simple")
    assert (found["name"], names(found["recipes"])) == ("curl", ["get", "slow"])
    assert "score" in found["recipes"][0]
    assert "score" not in found["recipes"][1]
    assert names(await tools.search("echo"))[0] == "echo"
    assert set(callable_names(await tools.search("network"))) == {"curl", "curl.get", "curl.slow"}
    assert names(await tools.search("silent"))[0] == "curl"
    assert await tools.search("xylophone") == []


async def test_describe_with_a_task() -> None:
    def make(number: int) -> Any:
        def tool(value: int) -> int:
            return value

        tool.__name__ = f"tool_{number}"
        tool.__doc__ = f"Does thing number {number}, with a long description."
        return tool

    def weather(city: str) -> str:
        """Tell the weather of a city."""
        return city

    index = LibrarySearch(None, "search/tools", embedder=False)
    tools = ToolRegistry([*(register(make(number)) for number in range(300)), register(weather)], search=index)
    plain = await tools.describe(limit=3000)
    assert len(plain) <= 3000
    assert "more tools" in plain
    fitting = await tools.describe("what is the weather like?", limit=3000)
    assert len(fitting) <= 3000
    assert fitting.splitlines()[2] == 'def weather(city: str) -> str: "Tell the weather of a city."'
    assert await ToolRegistry().describe() == ""


async def test_tracebacks_of_repeated_errors_do_not_grow() -> None:
    failure = ConfigurationError("it is down")
    tools = ToolRegistry([Servant("down", fails=failure)])
    for _ in range(50):
        with pytest.raises(ToolCallError, match="it is down"):
            await tools.call("down.anything")
    error = tools._providers["down"][0].error
    assert error is not None
    assert len(traceback.extract_tb(error.__traceback__)) < 10


WC = "name: wc\ncommand: wc\nstdin: text"


async def test_a_name_of_millions_of_letters() -> None:
    tools = catalog(WC)
    for name in ("a" * 3_000_000, "wc." + "b" * 3_000_000, "." * 3_000_000):
        with pytest.raises(ToolNotFoundError) as missing:
            await tools.handle(f"tools.{name}", [], {})
        assert len(str(missing.value)) < 500


def test_similar_names_among_thousands() -> None:
    letters = random.Random(1)
    names = ["".join(letters.choices("abcdefgh_", k=90)) for _ in range(8000)]
    assert did_you_mean(names[5000][:-2] + "xx", names) == f"; did you mean {names[5000]}?"
    assert len(did_you_mean("x" * 3_000_000, [*names, "y" * 3_000_000])) < 1000
