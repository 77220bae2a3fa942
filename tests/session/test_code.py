"""A session of every kind runs code, keeps its state, and has the four namespaces at hand."""

import asyncio
from pathlib import Path

import pytest

from carrel import ExecutionResult, Output, Session
from tests.support.wheels import build_wheel

from .conftest import Open


async def test_it_runs_code_and_keeps_its_state(session: Session) -> None:
    assert (await session.run("x = sum(range(10))")).is_ok
    assert (await session.run("x")).value == 45


async def test_an_error_is_a_result(session: Session) -> None:
    result = await session.run("1/0")
    assert result.error_type == "ZeroDivisionError"
    assert "1/0" in (result.error or "")


async def test_a_tool_called_by_code(session: Session) -> None:
    result = await session.run("tools.echo.say(words='good morning')")
    assert result.value == "good morning\n", result.error


async def test_a_tool_awaited_and_gathered(session: Session) -> None:
    code = "import asyncio\nawait asyncio.gather(*[tools.echo.say.call_async(words=str(i)) for i in range(5)])"
    result = await session.run(code)
    assert result.value == [f"{i}\n" for i in range(5)], result.error


async def test_a_wrong_argument_is_named_before_anything_runs(session: Session) -> None:
    result = await session.run(
        "try:\n    tools.echo.say(word='x')\nexcept ToolCallError as e:\n    said = str(e)\nsaid"
    )
    assert "word" in result.value


async def test_an_unknown_tool_has_near_names(session: Session) -> None:
    result = await session.run("tools.ecko.say(words='x')")
    assert result.error_type == "ToolNotFoundError"
    assert "echo" in (result.error or "")


async def test_a_workflow_by_name_by_attribute_and_by_invoke(session: Session) -> None:
    code = "(workflows.double(4), workflows.invoke('double', number=5, times=3), skills.double(number=1))"
    result = await session.run(code)
    assert result.value == (8, 15, 2), result.error


async def test_a_workflow_that_calls_a_tool_and_another_workflow(session: Session) -> None:
    source = "async def run(n: int) -> str:\n    return tools.echo.say(words=str(workflows.double(n))).strip()\n"
    made = await session.add_workflow("twice", source, "Doubles and prints it")
    assert made["description"] == "Doubles and prints it"
    result = await session.run("workflows.twice(21)")
    assert result.value == "42", result.error


async def test_a_workflow_created_by_code_is_visible_to_the_host(session: Session) -> None:
    code = "workflows.create('seven', 'def run():\\n    return 7\\n', 'Gives seven')\nworkflows.seven()"
    assert (await session.run(code)).value == 7
    assert [each["name"] for each in await session.list_workflows()] == ["double", "seven"]


@pytest.mark.parametrize("data", ["text", b"\x00\xff", 7, None, True, {"a": [1, 2.5, None]}, [1, "x"]])
async def test_an_artifact_saved_by_code_can_be_loaded_by_both(session: Session, data: object) -> None:
    result = await session.run(f"artifacts.save('folder/thing', {data!r}, 'A thing')\nartifacts.load('folder/thing')")
    assert result.value == data, result.error
    assert await session.load_artifact("folder/thing") == data
    assert [each["name"] for each in await session.list_artifacts()] == ["folder/thing"]


async def test_a_package_added_by_code_can_be_imported_at_once(open_session: Open, wheelhouse: Path) -> None:
    session = await open_session(wheelhouse=wheelhouse)
    result = await session.run("deps.add('carrel-greeting')\nimport carrel_greeting\ncarrel_greeting.WORD")
    assert result.value == "hello", result.error
    assert await session.list_deps() == ["carrel-greeting"]
    removed = await session.remove_dep("carrel-greeting")
    assert removed["removed"] == ["carrel-greeting"]
    assert await session.list_deps() == []


async def test_packages_may_be_refused(open_session: Open) -> None:
    session = await open_session(allow_runtime_deps=False)
    assert (await session.run("deps.add('numpy')")).error_type == "RuntimeDepsDisabledError"
    assert (await session.run("deps.list()")).value == []


async def test_a_registered_function_is_a_tool(session: Session) -> None:
    def area(width: float, height: float = 1.0) -> float:
        """The area of a rectangle."""
        return width * height

    session.register_tool(area)
    result = await session.run("tools.area(3, height=2)")
    assert result.value == 6.0, result.error
    assert "area" in [tool["name"] for tool in await session.list_tools()]


async def test_a_stream_ends_with_its_result(session: Session) -> None:
    pieces = [piece async for piece in session.stream("print('a')\nprint('b')\n3")]
    assert "".join(piece.text for piece in pieces if isinstance(piece, Output)) == "a\nb\n"
    assert isinstance(pieces[-1], ExecutionResult)
    assert pieces[-1].value == 3


async def test_reset_clears_only_the_variables(session: Session) -> None:
    await session.run("x = 1\nartifacts.save('a', 1)")
    await session.reset()
    assert (await session.run("x")).error_type == "NameError"
    assert (await session.run("artifacts.load('a')")).value == 1


async def test_a_timeout_keeps_the_variables(session: Session) -> None:
    await session.run("x = 5")
    result = await session.run("while True: pass", timeout=0.3)
    assert (result.error_type, result.state) == ("Timeout", "kept")
    assert (await session.run("x")).value == 5


async def test_a_call_in_flight_ends_with_its_run(session: Session, tmp_path: Path) -> None:
    done = asyncio.Event()
    ended: list[str] = []

    async def forever() -> None:
        """Never comes back by itself."""
        done.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cancelled")

    session.register_tool(forever)
    running = asyncio.create_task(session.run("tools.forever()", timeout=60))
    await done.wait()
    assert await session.interrupt()
    assert (await running).error_type == "KeyboardInterrupt"
    for _ in range(6000):
        if ended:
            break
        await asyncio.sleep(0.01)
    assert ended == ["cancelled"]


async def test_code_waits_for_approval_while_other_calls_continue(open_session: Open) -> None:
    requested: list[str] = []
    others_done = asyncio.Event()

    async def approve(request: object) -> object:
        requested.append(request.tool)  # type: ignore[attr-defined]
        await others_done.wait()
        return {"what": "the other door"}

    session = await open_session(approve=approve)

    def free(what: str) -> str:
        return what

    def guarded(what: str) -> str:
        return what

    async def tell() -> None:
        others_done.set()

    session.register_tool(free)
    session.register_tool(guarded, approval="ask")
    session.register_tool(tell)
    code = """
import asyncio
async def free():
    got = await tools.free.call_async(what='mine')
    await tools.tell.call_async()
    return got
await asyncio.gather(tools.guarded.call_async(what='the door'), free())
"""
    result = await session.run(code)
    assert result.value == ["the other door", "mine"], result.error
    assert requested == ["guarded"]


async def test_a_refused_call_raises_the_reason(open_session: Open) -> None:
    session = await open_session(approve=lambda request: "not on a Sunday")
    session.register_tool(lambda: 1, name="launch", approval="ask")
    result = await session.run("tools.launch()")
    assert "not on a Sunday" in (result.error or "")
    assert result.error_type == "ToolRefusedError"


async def test_describe(session: Session) -> None:
    await session.save_artifact("report.txt", "x", "The report")
    page = await session.describe()
    for word in ("echo", "say", "double", "number: int", "report.txt", "The report"):
        assert word in page
    assert len(await session.describe(limit=1000)) < 1600


async def test_a_traceback_leaves_out_the_lines_of_added_packages(open_session: Open, tmp_path: Path) -> None:
    source = "def deep(call):\n    return call() if call else {}['inside of it']\n"
    build_wheel(tmp_path / "wheels", "carrel_deep", source=source)
    session = await open_session(wheelhouse=tmp_path / "wheels")
    result = await session.run("deps.add('carrel_deep')\nimport carrel_deep\ncarrel_deep.deep(None)")
    assert result.error_type == "KeyError", result.error
    assert "carrel_deep.py" not in (result.error or "")
    assert "carrel_deep.deep(None)" in (result.error or "")
    result = await session.run("def mine():\n    return 1 / 0\ncarrel_deep.deep(mine)")
    assert "carrel_deep.py" not in (result.error or "")
    assert "in mine" in (result.error or "")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("deps.add('one', 'two')", "deps.add(package): too many positional arguments"),
        ("artifacts.save({'a': 1})", "artifacts.save() missing 1 required positional argument: 'data'"),
        ("artifacts.delete()", "artifacts.delete(name): missing a required argument: 'name'"),
        ("workflows.create('x')", "workflows.create(name, source, description=''): missing a required argument"),
        ("skills.get()", "workflows.get(name): missing a required argument: 'name'"),
        ("tools.search('x', top=3)", "tools.search(query, limit=10): got an unexpected keyword argument 'top'"),
    ],
)
async def test_wrong_arguments_are_errors_in_terms_of_the_call(session: Session, code: str, message: str) -> None:
    result = await session.run(code)
    assert result.error_type == "TypeError"
    assert message in (result.error or "").splitlines()[-1]


@pytest.mark.parametrize("name", ["{'a': 1}", "__import__('re').compile('a')", "None", "5"])
async def test_swapped_name_and_data_are_not_saved(session: Session, name: str) -> None:
    result = await session.run(f"artifacts.save({name}, 'report.json')")
    assert result.error_type == "ArtifactNameRefused"
    assert "artifacts.save(name, data): the name must be a str" in (result.error or "")
    code = f"try:\n    artifacts.save({name}, 'report.json')\nexcept ArtifactWriteError as e:\n    said = str(e)\nsaid"
    assert "the name must be a str" in (await session.run(code)).value
    assert await session.list_artifacts() == []


async def test_a_query_of_another_type_is_searched_as_text(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    for namespace in ("tools", "workflows", "artifacts"):
        assert (await session.run(f"{namespace}.search(b'echo')")).is_ok
    assert caplog.text == ""
