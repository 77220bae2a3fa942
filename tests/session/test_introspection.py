"""`dir`, `help` and docstrings of the four namespaces, and helpful errors for wrong calls."""

from pathlib import Path

import pytest

from carrel import Session

from .conftest import Open

AWAIT = "A plain call waits by itself and returns its value: leave out `await`, or write `await NAME.call_async(…)`."


async def test_dir(session: Session) -> None:
    assert (await session.run("dir(tools)")).value == ["describe", "echo", "list", "search"]
    assert (await session.run("dir(tools.echo)")).value == ["call_async", "call_sync", "list", "say"]
    assert (await session.run("dir(tools.nothing)")).error_type == "ToolNotFoundError"
    assert {"double", "create", "invoke"} <= set((await session.run("dir(skills)")).value)


async def test_help_and_docstrings(session: Session) -> None:
    text = (await session.run("help(tools.echo.say)")).stdout
    assert "tools.echo.say(words: str) -> str" in text
    assert "words: What to say" in text
    assert (await session.run("tools.echo.__doc__")).value.splitlines() == [
        "tools.echo(words: str) -> str",
        "Say words back",
        "  words: What to say",
        "tools.echo.say(words: str) -> str  # Say it",
    ]
    assert (await session.run("tools.nothing.at_all.__doc__")).error_type == "ToolNotFoundError"
    text = (await session.run("help(workflows.double)")).stdout
    assert "workflows.double(number, times)" in text
    assert "times: How often." in text
    assert (await session.run("workflows.nothing.__doc__")).value == "workflows.nothing: there is no such workflow"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("workflows.double(4, tims=3)", "got an unexpected keyword argument 'tims'"),
        ("workflows.double()", "missing a required argument: 'number'"),
        ("await workflows.double.call_async(1, 2, 3)", "too many positional arguments"),
    ],
)
async def test_a_wrong_call_of_a_workflow_shows_its_signature(session: Session, code: str, text: str) -> None:
    error = (await session.run(code)).error or ""
    assert error.endswith(f"TypeError: workflows.double(number: int, times: int = 2) -> int: {text}")


async def test_namespaces_can_be_copied_but_not_pickled(session: Session) -> None:
    code = (
        "import copy\nheld = copy.deepcopy({'a': [tools, artifacts], 'b': [tools.echo.say], 'c': workflows.double})\n"
    )
    assert (await session.run(code + "held['b'][0](words='hi'), held['c'](4), copy.copy(tools).echo('x')")).value == (
        "hi\n",
        8,
        "x\n",
    )
    result = await session.run("import pickle\npickle.dumps(tools.echo)")
    assert (result.error or "").endswith("TypeError: tools.echo is on the host and cannot be pickled")


@pytest.mark.parametrize(
    "code",
    [
        "await tools.echo.say(words='hi')",
        "await workflows.double(4)",
        "import asyncio\nawait asyncio.gather(tools.echo.say(words='hi'))",
        "async def go():\n    return await tools.echo.say(words='hi')\nawait go()",
    ],
)
async def test_awaiting_a_plain_call_explains_call_async(session: Session, code: str) -> None:
    result = await session.run(code)
    assert result.error_type == "TypeError"
    assert (result.error or "").endswith(f"\n{AWAIT}")


async def test_awaiting_something_else_does_not_mention_call_async(session: Session) -> None:
    assert AWAIT not in ((await session.run("await 5")).error or AWAIT)


async def test_a_failed_install_is_written_to_stderr(open_session: Open, wheelhouse: Path) -> None:
    session = await open_session(wheelhouse=wheelhouse)
    result = await session.run("report = deps.add('carrel-not-there')\nimport carrel_not_there")
    assert result.error_type == "ModuleNotFoundError"
    assert "deps.add: carrel-not-there could not be installed" in result.stderr
    result = await session.run("report = await deps.add.call_async('carrel-not-there')")
    assert "deps.add: carrel-not-there could not be installed" in result.stderr
    assert (await session.run("deps.add('carrel-greeting')")).stderr == ""
