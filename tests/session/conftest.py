"""A session of each kind, on a base with a tool, a workflow and a package to install."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from carrel import Session
from carrel.cli.demo_package import write_wheel

KINDS = ("sandboxed", "in-process")

ECHO = """\
name: echo
description: Say words back
command: echo
schema:
  positional:
    - {name: words, type: string, required: true, description: What to say}
recipes:
  say: {description: Say it, params: {words: {}}}
"""

DOUBLE = '''\
"""Twice a number."""

def run(number: int, times: int = 2) -> int:
    """Multiply a number.

    Args:
        number: The number.
        times: How often.
    """
    return number * times
'''


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "carrel_greeting", "WORD = 'hello'\n")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    (folder / "tools").mkdir(parents=True)
    (folder / "tools" / "echo.yaml").write_text(ECHO)
    (folder / "workflows").mkdir()
    (folder / "workflows" / "double.py").write_text(DOUBLE)
    return folder


Open = Callable[..., Awaitable[Session]]


@pytest.fixture(params=KINDS)
async def open_session(request: pytest.FixtureRequest, base: Path) -> AsyncIterator[Open]:
    """Open a session of the kind under test: `await open_session(timeout=5)`; closed after the test."""
    made: list[Session] = []

    async def open_it(folder: Path = base, **settings: Any) -> Session:
        if request.param == "in-process":
            session = Session.inprocess(folder, **settings)
        else:
            session = Session.subprocess(folder, sandbox="required", **settings)
        made.append(session)
        await session.start()
        return session

    yield open_it
    for session in made:
        await session.close()


@pytest.fixture
async def session(open_session: Open) -> Session:
    return await open_session()
