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
        self.asked = 0
        self.closed = 0

    async def definitions(self) -> Sequence[Tool]:
        self.asked += 1
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


def test_a_provider_is_what_the_seam_says() -> None:
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


async def test_code_inside_lists_searches_describes_and_calls() -> None:
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


async def test_a_tool_that_is_called_list_is_called() -> None:
    tools = ToolRegistry([Servant("box", "box.list", answers=["a"])])
    assert await tools.handle("tools.box.list", [], {}) == ["a"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ecoh", "there is no tool ecoh; did you mean echo?"),
        ("zzz", "there is no tool zzz; there is box, curl, echo"),
        ("curl.gte", "there is no gte in curl; did you mean curl.get"),
        ("curl.get.now", "there is no get.now in curl; did you mean curl.get"),
        ("box", "box itself cannot be called; there is box.open, box.shut"),
    ],
)
async def test_what_is_not_there_is_told_with_what_is_near(name: str, told: str) -> None:
    tools = catalog(CURL, ECHO)
    tools.add(Servant("box", "box.open", "box.shut"))
    with pytest.raises(ToolNotFoundError) as raised:
        await tools.call(name)
    assert str(raised.value).startswith(told)
    assert isinstance(raised.value, KeyError)


async def test_names_with_a_dash_are_found() -> None:
    tools = ToolRegistry([Servant("box", "box.open_it")])
    assert await tools.call("box.open-it") == "yes"


async def test_a_tool_in_the_place_of_another_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tools = ToolRegistry([Servant("box", "box.open", "box.shut")])
    tools.add(Servant("box", "box.open"))
    for _ in range(2):
        assert callable_names(await tools.list()) == ["box.open", "box.shut"]
    told = [record.getMessage() for record in caplog.records]
    assert told == ["there are two tools box.open; the one that was registered last is called"]


# --- providers that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fails", [ToolCallError("it is down"), ConfigurationError("it is down"), OSError("it is down")]
)
async def test_a_provider_that_fails_costs_its_own_tools_only(fails: Exception) -> None:
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


async def test_one_that_failed_is_tried_again_when_it_is_called_and_not_when_somebody_looks_around() -> None:
    servant = Servant("box", "box.open", fails=OSError("not yet"))
    tools = ToolRegistry([servant])
    for _ in range(3):
        await tools.list()
    assert servant.asked == 1
    servant.fails = None
    assert await tools.call("box.open") == "yes"
    assert callable_names(await tools.list()) == ["box.open"]


async def test_those_who_wait_for_one_that_fails_share_its_answer() -> None:
    servant = Servant("box", fails=OSError("no"))
    tools = ToolRegistry([servant])
    ended = await asyncio.gather(*(tools.call("box.open") for _ in range(20)), return_exceptions=True)
    assert all(isinstance(problem, ToolCallError) for problem in ended)
    assert servant.asked < 20


async def test_what_a_provider_has_may_change() -> None:
    servant = Servant("box", "box.open")
    tools = ToolRegistry([servant])
    assert callable_names(await tools.list()) == ["box.open"]
    servant.tools = [Tool(name="box.shut")]
    assert callable_names(await tools.list()) == ["box.shut"]
    with pytest.raises(ToolNotFoundError):
        await tools.call("box.open")


@pytest.mark.parametrize(
    ("answers", "error", "told"),
    [
        (OSError("disk gone"), ToolCallError, "box.open failed: OSError: disk gone"),
        (TimeoutError("socket"), ToolCallError, "box.open failed: socket"),
        (ToolTimeoutError("too slow"), ToolTimeoutError, "too slow"),
    ],
)
async def test_whatever_a_provider_raises_is_an_error_of_the_call(
    answers: Exception, error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as raised:
        await ToolRegistry([Servant("box", "box.open", answers=answers)]).call("box.open")
    assert str(raised.value) == told
    assert type(raised.value) is error


async def test_secrets_are_in_no_result_no_error_and_no_stream() -> None:
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


async def test_closing_ends_every_provider_also_when_one_fails() -> None:
    class Stubborn(Servant):
        async def close(self) -> None:
            await super().close()
            raise OSError("will not")

    servants = [Stubborn("a"), Servant("b")]
    tools = ToolRegistry(servants)
    with pytest.raises(OSError, match="will not"):
        await tools.close()
    assert [servant.closed for servant in servants] == [1, 1]


async def test_of_two_of_one_name_the_later_is_called() -> None:
    tools = ToolRegistry([Servant("box", "box.open", "box.shut", answers="old")])
    tools.add(Servant("box", "box.open", answers="new"))
    assert await tools.call("box.open") == "new"
    assert await tools.call("box.shut") == "old"
    assert callable_names(await tools.list()) == ["box.open", "box.shut"]


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_output_is_streamed_when_the_definition_or_the_code_asks() -> None:
    for text, wanted, streamed in [
        (ECHO, None, False),
        (ECHO, True, True),
        (ECHO + "stream: true\n", None, True),
        (ECHO + "stream: true\n", False, False),
    ]:
        said: list[str] = []
        asked = {} if wanted is None else {"_stream": wanted}
        assert await catalog(text).handle("tools.echo", ["hi"], asked, said.append) == "hi\n"
        assert said == (["hi\n"] if streamed else [])


async def test_nobody_to_stream_to_is_fine() -> None:
    assert await catalog(ECHO + "stream: true\n").handle("tools.echo", ["hi"], {"_stream": True}) == "hi\n"


# --- searching and describing -----------------------------------------------------------------------------------------


async def test_search_finds_by_name_description_parameter_and_tag() -> None:
    tools = catalog(CURL, ECHO, search=LibrarySearch(None, "search/tools", embedder=False))
    [found] = await tools.search("simple")
    assert (found["name"], names(found["recipes"])) == ("curl", ["get", "slow"])
    assert "score" in found["recipes"][0]
    assert "score" not in found["recipes"][1]
    assert names(await tools.search("echo"))[0] == "echo"
    assert set(callable_names(await tools.search("network"))) == {"curl", "curl.get", "curl.slow"}
    assert names(await tools.search("silent"))[0] == "curl"
    assert await tools.search("xylophone") == []


async def test_describe_puts_what_fits_the_task_first_and_keeps_its_length() -> None:
    def make(number: int) -> Any:
        def tool(value: int) -> int:
            return value

        tool.__name__ = f"tool_{number}"
        tool.__doc__ = f"Does thing number {number}, which nobody needs to know much about."
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


async def test_the_error_of_a_provider_that_fails_does_not_grow_with_each_call() -> None:
    failure = ConfigurationError("it is down")
    tools = ToolRegistry([Servant("down", fails=failure)])
    for _ in range(50):
        with pytest.raises(ToolCallError, match="it is down"):
            await tools.call("down.anything")
    error = tools._providers["down"][0].error
    assert error is not None
    assert len(traceback.extract_tb(error.__traceback__)) < 10


WC = "name: wc\ncommand: wc\nstdin: text"


async def test_a_name_of_millions_of_letters_is_not_looked_at_long() -> None:
    tools = catalog(WC)
    for name in ("a" * 3_000_000, "wc." + "b" * 3_000_000, "." * 3_000_000):
        with pytest.raises(ToolNotFoundError) as missing:
            await tools.handle(f"tools.{name}", [], {})
        assert len(str(missing.value)) < 500


def test_near_names_are_found_among_thousands_of_long_ones() -> None:
    letters = random.Random(1)
    names = ["".join(letters.choices("abcdefgh_", k=90)) for _ in range(8000)]
    assert did_you_mean(names[5000][:-2] + "xx", names) == f"; did you mean {names[5000]}?"
    assert len(did_you_mean("x" * 3_000_000, [*names, "y" * 3_000_000])) < 1000
