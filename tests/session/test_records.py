"""Records that the library returns: one entry per tool, keys as attributes, builtin errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from carrel import InProcessExecutor, MemoryStorage, Session
from carrel.errors import ToolNotFoundError, WorkflowNotFoundError
from tests.support.wheels import build_wheel

from .conftest import Open


async def value(session: Session, code: str) -> Any:
    result = await session.run(code)
    assert result.error is None, result.error
    return result.value


async def test_a_tool_is_one_entry_with_its_recipes_inside(session: Session) -> None:
    [tool] = await session.list_tools()
    assert (tool["name"], tool["description"], tool["tags"]) == ("echo", "Say words back", [])
    assert tool["signature"] == "echo(words: str) -> str"
    [recipe] = tool["recipes"]
    assert (recipe["name"], recipe["description"]) == ("say", "Say it")
    assert recipe["signature"] == "echo.say(words: str) -> str"
    assert [parameter["name"] for parameter in recipe["parameters"]] == ["words"]
    assert await value(session, "tools.list()") == [tool]
    assert await value(session, "tools.echo.list()") == [recipe]
    [found] = await session.search_tools("say words")
    assert found["name"] == "echo"
    assert [one["name"] for one in found["recipes"]] == ["say"]
    assert [one["name"] for one in await value(session, "tools.search('say words')")] == ["echo"]
    assert (await session.get_tool("echo.say") or {})["name"] == "echo.say"
    assert [one["name"] for one in (await session.get_tool("echo") or {})["recipes"]] == ["say"]


async def test_functions_of_one_group_are_one_entry(session: Session) -> None:
    for name in ("money.rate", "money.total"):
        session.register_tool(lambda: 1, name=name)
    money = {tool["name"]: tool for tool in await session.list_tools()}["money"]
    assert [recipe["name"] for recipe in money["recipes"]] == ["rate", "total"]
    assert "signature" not in money
    assert await session.get_tool("money") == money


async def test_a_search_shows_the_recipes_that_fit(session: Session) -> None:
    for number in range(12):
        session.register_tool(lambda: 1, name=f"many.n{number}", description=f"Paint the fence {'red' * (number == 7)}")
    session.register_tool(lambda: 1, name="many.sail", description="Sail a boat to the harbour")
    [many] = [tool for tool in await session.search_tools("sail a boat") if tool["name"] == "many"]
    assert many["recipes"][0]["name"] == "sail"
    assert len(many["recipes"]) < 13
    assert len(await session.search_tools("words boat fence", limit=1)) == 1


async def test_records_inside_have_attributes(session: Session) -> None:
    await session.add_workflow("twice", "def run(n: int):\n    return 2 * n\n", "Twice a number")
    assert await value(session, "tools.list()[0].recipes[0].parameters[0].name") == "words"
    assert await value(session, "await tools.list.call_async() == tools.list()") is True
    assert await value(session, "workflows.list()[0].name, workflows.get('twice').parameters[0].name") == (
        "double",
        "n",
    )
    assert await value(session, "artifacts.save('a/b', [1], 'Some').description") == "Some"
    assert await value(session, "artifacts.list()[0].name, artifacts.get('a/b').size, artifacts.get('no')") == (
        "a/b",
        len("[\n 1\n]"),
        None,
    )
    assert await value(session, "deps.sync().installed") == []
    assert await value(session, "hasattr(tools.list()[0], 'nothing'), isinstance(tools.list()[0], dict)") == (
        False,
        True,
    )
    assert json.loads(await value(session, "import json; json.dumps(tools.list())")) == await session.list_tools()
    # What a tool returns stays what it is.
    session.register_tool(lambda: {"a": 1}, name="data")
    assert await value(session, "type(tools.data()) is dict") is True


async def test_an_unknown_tool_is_an_attribute_error(session: Session) -> None:
    names = ("echo", "echo.say", "nothing", "echo.nothing", "echo.say.more", "_x", "list", "echo.list", "nothing.list")
    code = "\n".join(
        [
            "import operator",
            "def there(name):",
            "    try:",
            "        operator.attrgetter(name)(tools)",
            "    except AttributeError:",
            "        return False",
            "    return True",
            f"[there(name) for name in {names!r}]",
        ]
    )
    assert await value(session, code) == [True, True, False, False, False, False, True, True, False]
    result = await session.run("tools.ehco(words='x')")
    assert result.error_type == "ToolNotFoundError"
    assert "did you mean echo" in (result.error or "")
    session.register_tool(lambda: 1, name="late")
    assert await value(session, "hasattr(tools, 'late'), tools.late()") == (True, 1)
    with pytest.raises(AttributeError) as unknown:
        await session.call_tool("nothing")
    assert isinstance(unknown.value, ToolNotFoundError)


async def test_an_unknown_workflow_is_a_value_error(session: Session) -> None:
    code = "try:\n    workflows.invoke('nothing')\nexcept ValueError as error:\n    kind = type(error).__name__\nkind"
    assert await value(session, code) == "WorkflowNotFoundError"
    with pytest.raises(ValueError, match="nothing") as unknown:
        await session.workflow_history("nothing")
    assert isinstance(unknown.value, WorkflowNotFoundError)


async def test_the_path_of_an_artifact_opens(session: Session) -> None:
    saved = await session.save_artifact("d/table.csv", "a,b\n")
    assert Path(saved["path"]).read_text() == "a,b\n"
    assert Path((await session.list_artifacts())[0]["path"]).is_absolute()
    assert await value(session, "open(artifacts.get('d/table.csv').path).read()") == "a,b\n"
    assert await value(session, "open(artifacts.list()[0]['path']).read()") == "a,b\n"
    assert await value(session, "open(artifacts.save('d/table.csv', 'new').path).read()") == "new"
    assert await value(session, "record = artifacts.get('d/table.csv'); open(record.get('path')).read()") == "new"
    assert await value(session, "import pickle, copy; pickle.loads(pickle.dumps(record)).path == record.path") is True
    assert await value(session, "copy.deepcopy(record) == record") is True
    large = "x" * 9_000_000
    await session.save_artifact("large", large)
    assert await value(session, "import os; os.path.getsize(artifacts.get('large').path)") == len(large)


async def test_host_paths_are_not_visible_in_the_sandbox(base: Path) -> None:
    async with Session.subprocess(base, sandbox="required") as session:
        await session.save_artifact("a", "text")
        assert str(base) not in await value(session, "str(artifacts.list()) + artifacts.get('a').path")


async def test_code_sees_a_file_of_an_artifact_in_memory() -> None:
    async with Session(MemoryStorage(), InProcessExecutor()) as session:
        path = await value(session, "saved = artifacts.save('a/b.txt', 'text'); saved.path")
        assert Path(path).read_text() == "text"
        assert await value(session, "artifacts.delete('a/b.txt'); saved.path") == path
    del session


async def test_packages_of_the_settings_are_listed_and_synced(
    open_session: Open, wheelhouse: Path, tmp_path: Path
) -> None:
    build_wheel(wheelhouse, "carrel_other", source="WORD = 'other'\n")
    session = await open_session(extra_deps=["carrel-greeting"], wheelhouse=wheelhouse)
    assert await session.list_deps() == ["carrel-greeting"]
    assert await value(session, "deps.list()") == ["carrel-greeting"]
    report = await session.sync_deps()
    assert (report["already_present"], report["installed"], report["failed"]) == (["carrel-greeting"], [], [])
    await session.add_dep("carrel_other")
    assert await session.list_deps() == ["carrel_other", "carrel-greeting"]
    await session.add_dep("carrel-greeting")
    assert await session.list_deps() == ["carrel_other", "carrel-greeting"]


async def test_supports_takes_a_name(session: Session) -> None:
    assert session.supports(capability="timeout")
    assert not session.supports("wings")
    assert "reset" in session.supported_capabilities()
