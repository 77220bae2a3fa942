"""Every command is on docs/command-line.md and has an example, and every example works."""

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from carrel import Session, SessionStore, assistant_message, text_block, user_text_message
from carrel.cli import app
from carrel.session import open_shared_storage
from carrel.storage.leases import Leases
from carrel.wire.answers import NodeInfo
from tests.support.preloaded_python import preloaded_python
from tests.support.real_redis import RealRedis
from tests.support.wheels import build_wheel

ROOT = Path(__file__).parents[2]
TOOL = """\
name: greet
description: Greet a person
command: echo hello
schema:
  positional: [{name: name, type: string}]
"""
SERVERS = ("carrel serve", "carrel web", "carrel mcp", "carrel gateway")
ON_RAY = ("carrel cluster up", "carrel cluster down")
"""These need a Ray cluster; tests/cluster/test_ray.py runs them."""
STORE = "redis://127.0.0.1:6379/0"
"""The store that examples name."""


def commands(group: Any, path: str = "carrel") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if getattr(command, "commands", None):
            yield from commands(command, f"{path} {name}")


EVERY = dict(commands(typer.main.get_command(app)))
EXAMPLES = {name: (command.epilog or "").removeprefix("Example: ") for name, command in EVERY.items()}


def test_the_page_is_generated_from_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate-command-line", "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_has_a_description_and_an_example_of_itself() -> None:
    assert [name for name, command in EVERY.items() if not command.help] == []
    assert [name for name, example in EXAMPLES.items() if not f"{example} ".startswith(f"{name} ")] == []


def test_every_option_has_a_description() -> None:
    parameters = [(name, each) for name, command in EVERY.items() for each in command.params]
    assert [(name, each.name) for name, each in parameters if not each.help] == []


def test_an_option_has_one_meaning_everywhere() -> None:
    meanings: dict[str, set[str]] = {}
    for command in EVERY.values():
        for each in command.params:
            for option in each.opts:
                meanings.setdefault(option, set()).add(each.help)
    for option in ("--base", "--json", "--datasets", "--cache", "--data", "--older-than", "--full"):
        assert len(meanings[option]) == 1, option


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with `base`, its base folder, and the files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    base = folder / "base"
    (base / "tools").mkdir(parents=True)
    (base / "tools" / "greet.yaml").write_text(TOOL)
    (folder / "twice.py").write_text('def run(n: int) -> int:\n    """Double a number."""\n    return 2 * n\n')
    (folder / "totals.csv").write_text("may,12\n")
    for name in ("mine", "ours"):
        (folder / name / "workflows").mkdir(parents=True)
        (folder / name / "workflows" / "add.py").write_text(f"def run(a, b):\n    return a + b  # {name}\n")
    build_wheel(folder / "wheels", "humanize")
    _write_repository(folder / "my-repository")
    _write_claude_session(folder / "user" / ".claude" / "projects" / "-home-ada")
    return folder


@pytest.fixture(scope="module")
def filled(prepared: Path) -> Path:
    """The same with sessions, a workflow, an artifact, two runs and a key in the base folder."""
    asyncio.run(_fill(prepared, prepared / "base"))
    for name in ("first", "second"):
        _carrel("task run demo calc-1 --agent true --output base/runs/" + name, prepared)
    _carrel("keys add ada", prepared)
    _carrel("deps add humanize", prepared)
    return prepared


async def _fill(folder: Path, base: Path) -> None:
    async with SessionStore(base / "sessions") as store:
        await store.create_session("Stars", session_id="stars", model="some-model")
        await store.append_message("stars", user_text_message("Why do stars twinkle?"))
        answer = assistant_message([text_block("Because moving air bends their light.")])
        await store.append_message("stars", answer)
        await store.append_message("stars", user_text_message("And planets?"))
    async with Session.from_base(base) as session:
        await session.add_workflow("twice", (folder / "twice.py").read_text(), "Double a number")
        await session.save_artifact("answer.json", {"answer": 42})
        await session.run("1 + 1")
    (base / "sessions" / session.id).rename(base / "sessions" / "work")
    async with Session.from_base(base, session_id="report") as durable:
        await durable.run("x = 1")


def _write_repository(folder: Path) -> None:
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for result in ("n", "2 * n"):
        (folder / "double.py").write_text(f"def double(n):\n    return {result}\n")
        (folder / "test_double.py").write_text(
            f"from double import double\n\ndef test_double():\n    assert double(2) == {eval(result, {'n': 2})}\n"
        )
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", "Change double"], check=True)


def _write_claude_session(folder: Path) -> None:
    folder.mkdir(parents=True)
    line = (
        '{"type":"user","uuid":"1","parentUuid":null,"sessionId":"s","timestamp":"2026-01-01T00:00:00Z",'
        '"cwd":"/home/ada","version":"2","message":{"role":"user","content":"Hello"}}'
    )
    (folder / "s.jsonl").write_text(line + "\n")


async def _take_lease(url: str) -> None:
    """Put a node into the store."""
    async with open_shared_storage(url) as storage:
        await storage.store.delete("cluster/nodes/node-1")
        info = NodeInfo(name="node-1", url="http://127.0.0.1:8765")
        assert await Leases(storage.store).take("node-1", info.model_dump_json().encode())


def _environment(folder: Path) -> dict[str, str]:
    offline = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(folder / "wheels"), "PIP_NO_INDEX": "1"}
    return os.environ | offline | {"CARREL_HOME": str(folder / "base"), "HOME": str(folder / "user")}


def _carrel(words: str, folder: Path) -> None:
    done = preloaded_python().run(["-m", "carrel", *shlex.split(words)], _environment(folder), folder, 120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in (*SERVERS, *ON_RAY)])
def test_the_example_of_a_command_works(name: str, filled: Path, tmp_path: Path, redis_server: RealRedis) -> None:
    if STORE in EXAMPLES[name]:
        asyncio.run(_take_lease(redis_server.url))
    folder = tmp_path / "copy"
    shutil.copytree(filled, folder, symlinks=True)
    example = EXAMPLES[name].replace(STORE, redis_server.url)
    words = [str(folder / "user" / word[2:]) if word.startswith("~/") else word for word in shlex.split(example)]
    done = preloaded_python().run(["-m", "carrel", *words[1:]], _environment(folder), folder, 120)
    allowed = (0, 3) if name == "carrel doctor" else (0,)
    assert done.returncode in allowed, done.stdout + done.stderr
    assert name == "carrel repl" or done.stdout


@pytest.mark.parametrize("name", SERVERS)
def test_the_example_of_a_server_works(name: str, filled: Path, redis_server: RealRedis) -> None:
    example = EXAMPLES[name].replace("8765", "0").replace("8700", "0").replace(STORE, redis_server.url)
    words = shlex.split(example)
    process = preloaded_python().start(["-m", "carrel", *words[1:]], _environment(filled), filled)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline().startswith("Listening on http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
