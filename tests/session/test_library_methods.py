"""What the library methods of Session return, on every storage, also after a restart."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from carrel import (
    ArtifactNotFoundError,
    InProcessExecutor,
    RuntimeDepsDisabledError,
    Session,
    StorageBackend,
    ToolCallError,
    ToolNotFoundError,
)

from .conftest import DOUBLE, ECHO, KINDS, Storage, executor_of

RATED = '''\
"""What money is worth."""
import a_module_that_is_nowhere

async def run(amount: float, currency: str = "EUR", *, notes: list[str] | None = None) -> float:
    """Convert it.

    Args:
        amount: How much.
        currency: Its three letters.
    """
    return amount
'''


@pytest.fixture
async def session(storage: StorageBackend) -> Any:
    await storage.store.put("tools/echo.yaml", ECHO.encode())
    await storage.store.put("workflows/double.py", DOUBLE.encode())
    async with Session(storage, InProcessExecutor()) as session:
        yield session


async def test_tools(session: Session) -> None:
    tools = await session.list_tools()
    assert [tool["name"] for tool in tools] == ["echo"]
    [say] = tools[0]["recipes"]
    for tool in [*tools, say]:
        assert isinstance(tool["name"], str)
        assert isinstance(tool["description"], str)
        assert tool["tags"] == []
        for parameter in tool["parameters"]:
            assert set(parameter) >= {"name", "type", "description", "required", "default"}
    assert (say["name"], say["description"]) == ("say", "Say it")
    [found] = await session.search_tools("say it", limit=1)
    assert found["name"] == "echo"
    assert await session.search_tools("", limit=3) is not None
    assert await session.call_tool("echo.say", words="hi") == "hi\n"
    with pytest.raises(ToolNotFoundError, match="echo"):
        await session.call_tool("ecko.say", words="hi")
    with pytest.raises(KeyError):
        await session.call_tool("echo.shout", words="hi")
    with pytest.raises(ToolCallError, match="wrods"):
        await session.call_tool("echo.say", wrods="hi")
    with pytest.raises(TypeError, match="the name of a tool is a string"):
        await session.call_tool(None)  # type: ignore[arg-type]


async def test_workflows(session: Session) -> None:
    [double] = await session.list_workflows()
    assert {"name", "description", "parameters"} <= set(double)
    assert "source" not in double
    assert double["name"] == "double"
    assert double["description"]
    assert double["parameters"] == [
        {"name": "number", "type": "int", "description": "The number.", "required": True, "default": None},
        {"name": "times", "type": "int", "description": "How often.", "required": False, "default": 2},
    ]
    whole = await session.get_workflow("double")
    assert whole is not None
    assert {**whole, **double, "source": DOUBLE} == whole
    assert await session.get_workflow("missing") is None
    made = await session.add_workflow("rated", RATED, "Money of other countries")
    assert (made["name"], made["description"]) == ("rated", "Money of other countries")
    assert [parameter["name"] for parameter in made["parameters"]] == ["amount", "currency", "notes"]
    assert [parameter["required"] for parameter in made["parameters"]] == [True, False, False]
    assert [each["name"] for each in await session.list_workflows()] == ["double", "rated"]
    found = await session.search_workflows("money", limit=1)
    assert [(each["name"], "source" in each) for each in found] == [("rated", False)]
    assert await session.remove_workflow("rated") is True
    assert await session.remove_workflow("rated") is False
    assert [each["name"] for each in await session.list_workflows()] == ["double"]
    for name, source, error in (
        ("a-b", "def run(): pass", ValueError),
        ("w", "run = 7", ValueError),
        ("w", "def", SyntaxError),
    ):
        with pytest.raises(error):
            await session.add_workflow(name, source)
    assert await session.get_workflow("w") is None


async def test_skills_are_the_same_five(session: Session) -> None:
    assert await session.list_skills() == await session.list_workflows()
    assert await session.get_skill("double") == await session.get_workflow("double")
    made = await session.add_skill("seven", "def run(): return 7", "Gives seven")
    assert made["name"] == "seven"
    assert [each["name"] for each in await session.search_skills("gives seven", limit=1)] == ["seven"]
    assert (await session.run("(skills.seven(), workflows.seven())")).value == (7, 7)
    assert await session.remove_skill("seven") is True
    assert await session.remove_skill("seven") is False


async def test_artifacts(session: Session) -> None:
    assert await session.list_artifacts() == []
    made = await session.save_artifact("r/may.json", {"a": 1}, "The report", {"author": "ada", "pages": 3})
    assert {"name", "path", "description", "metadata", "created_at"} <= set(made)
    assert (made["name"], made["description"]) == ("r/may.json", "The report")
    assert made["metadata"] == {"author": "ada", "pages": 3}
    assert isinstance(made["path"], str)
    assert datetime.datetime.fromisoformat(made["created_at"]).tzinfo is not None
    assert await session.list_artifacts() == [made]
    plain = await session.save_artifact("plain", "x")
    assert (plain["description"], plain["metadata"]) == ("", {})
    await session.delete_artifact("plain")
    await session.delete_artifact("plain")
    with pytest.raises(ValueError, match="relative path"):
        await session.save_artifact("../x", "x")
    for kind in (ArtifactNotFoundError, KeyError):
        with pytest.raises(kind, match="plain"):
            await session.load_artifact("plain")


async def test_deps(session: Session) -> None:
    assert await session.list_deps() == []
    report = await session.sync_deps()
    assert {"installed", "already_present", "failed"} <= set(report)
    gone = await session.remove_dep("not-there-at-all")
    assert {"removed", "not_found", "failed", "removed_from_config"} <= set(gone)
    assert gone["not_found"] == ["not-there-at-all"]
    for wrong in (
        "",
        "a b",
        "https://example.com/x.whl",
        "./x",
        "-r other.txt",
        "x; python_version>'3'",
        "x @ file:///x",
        None,
        5,
    ):
        with pytest.raises(ValueError, match=r".+"):
            await session.add_dep(wrong)  # type: ignore[arg-type]
    assert await session.list_deps() == []


async def test_runtime_deps_may_be_refused(storage: StorageBackend) -> None:
    await storage.store.put("requirements.txt", b"# none yet\n")
    async with Session(storage, executor_of("in-process", allow_runtime_deps=False)) as session:
        for asking in (session.add_dep("x"), session.remove_dep("x")):
            with pytest.raises(RuntimeDepsDisabledError):
                await asking
        assert await session.list_deps() == []
        assert (await session.sync_deps())["failed"] == []


# --- the same place again, by another session -------------------------------------------------------------------------


@pytest.mark.parametrize("executor_kind", KINDS)
async def test_the_library_is_shared_by_two_sessions(
    storage_again: Storage, executor_kind: str, wheelhouse: Path
) -> None:
    first = storage_again()
    await first.store.put("tools/echo.yaml", ECHO.encode())
    settings: dict[str, Any] = {"wheelhouse": wheelhouse, "base": getattr(first, "base", None)}
    code = """
workflows.create('greet', '''
def run(name: str) -> str:
    import carrel_greeting
    return tools.echo.say(words=f"{carrel_greeting.WORD} {name}").strip()
''', 'Greets a person')
deps.add('carrel-greeting')
artifacts.save('met/ada.json', {'said': workflows.greet('Ada')}, 'Whom we met', {'n': 1})
artifacts.load('met/ada.json')
"""
    async with Session(first, executor_of(executor_kind, **settings)) as session:
        result = await session.run(code)
        assert result.value == {"said": "hello Ada"}, result.error
        name = session.id
        conversation = await session.converse("A meeting")
        await conversation.create_user_message("Greet Ada")
        [described] = await session.list_workflows()

    again = storage_again()
    async with Session(
        again, executor_of(executor_kind, **settings), sync_deps_on_start=True, session_id=name
    ) as session:
        assert (await session.list_workflows()) == [described]
        assert described["description"] == "Greets a person"
        [artifact] = await session.list_artifacts()
        assert (artifact["name"], artifact["description"], artifact["metadata"]) == (
            "met/ada.json",
            "Whom we met",
            {"n": 1},
        )
        assert await session.list_deps() == ["carrel-greeting"]
        result = await session.run("workflows.greet(name='Bob')")
        assert result.value == "hello Bob", result.error
        assert [message.get_text_content() for message in (await session.converse()).messages] == ["Greet Ada"]
        assert "Greets a person" in await session.describe()
        removed = await session.remove_dep("carrel-greeting")
        assert (removed["removed"], removed["removed_from_config"]) == (["carrel-greeting"], True)
        result = await session.run(
            "import importlib, sys\nsys.modules.pop('carrel_greeting', None)\nimport carrel_greeting"
        )
        assert result.error_type == "ModuleNotFoundError"
