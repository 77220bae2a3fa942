"""A session opens no network connection by itself, and works without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.missing_parts import skip_without

STORY = '''
import asyncio, sys
from carrel import Session

async def main(base, kind):
    make = Session.inprocess if kind == "in-process" else Session.from_base
    async with make(base) as session:
        session.register_tool(lambda a: a * 2, name="twice", description="Twice a number.")
        code = """
workflows.create('four', 'def run(): return tools.twice(2)', 'Gives four')
artifacts.save('a.json', {'n': workflows.four()})
print(deps.list(), tools.search('double a number')[0]['name'], tools.echo.say(words='x'))
deps.sync()
artifacts.load('a.json')['n']
"""
        result = await session.run(code)
        assert result.value == 4, result.error
        assert "double" in [w["name"] for w in await session.search_workflows("multiply a number")]
        await session.describe("numbers")
        await session.execute_command("true")
        conversation = await session.converse("Quiet")
        await conversation.create_user_message("hello")
        [hit] = await session.storage.get_session_store().search("hello")

asyncio.run(main(*sys.argv[1:]))
print("done")
'''

QUIET = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:1"),
    "UV_INDEX_URL": "http://127.0.0.1:1/simple",
    "UV_DEFAULT_INDEX": "http://127.0.0.1:1/simple",
}


@pytest.mark.parametrize("kind_of", ["sandboxed", "in-process"])
def test_no_connection_is_opened(base: Path, tmp_path: Path, kind_of: str) -> None:
    """Every connect of every process it starts is noted by the kernel, from the first instruction on."""
    tracer = subprocess.run(["sh", "-c", "command -v strace"], capture_output=True, text=True).stdout.strip()
    if not tracer:
        skip_without("strace is not here; the test without a network runs all the same")
    noted = tmp_path / "connects"
    watch = [tracer, "-f", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", str(noted)]
    done = run([*watch, sys.executable, "-c", STORY, str(base), kind_of], tmp_path)
    assert done.stdout == "done\n", done.stderr
    lines = noted.read_text().splitlines()
    assert [line for line in lines if "sa_family=AF_INET" in line] == []


@pytest.mark.parametrize("kind_of", ["sandboxed", "in-process"])
def test_everything_works_without_a_network(base: Path, tmp_path: Path, kind_of: str) -> None:
    probe = subprocess.run(["unshare", "-rn", "true"], capture_output=True)
    alone = ["unshare", "-rn"] if probe.returncode == 0 else []
    done = run([*alone, sys.executable, "-c", STORY, str(base), kind_of], tmp_path)
    assert done.stdout == "done\n", done.stderr


def test_a_session_starts_as_fast_without_a_network(tmp_path: Path) -> None:
    """A start that waited for an answer from outside would wait for seconds where nothing answers."""
    code = (
        "import asyncio, sys, time\nfrom carrel import Session\n"
        "async def main():\n"
        "    started = time.monotonic()\n"
        "    async with Session.from_base(sys.argv[1]) as session:\n"
        "        assert (await session.run('1 + 1')).value == 2\n"
        "        print(time.monotonic() - started)\n"
        "asyncio.run(main())\n"
    )
    # 192.0.2.0/24 belongs to no machine: a connection there is never answered.
    unreachable = {name: value.replace("127.0.0.1:1", "192.0.2.1:81") for name, value in QUIET.items()}
    run([sys.executable, "-c", code, str(tmp_path / "base")], tmp_path)  # makes the environment, once
    usual = min(float(run([sys.executable, "-c", code, str(tmp_path / "base")], tmp_path, {}).stdout) for _ in range(2))
    alone = min(
        float(run([sys.executable, "-c", code, str(tmp_path / "base")], tmp_path, unreachable).stdout) for _ in range(2)
    )
    assert alone < 4 * usual + 3


def run(words: list[str], folder: Path, more: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"CARREL_HOME": str(folder / "home")} | (QUIET if more is None else more)
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
