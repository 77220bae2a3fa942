"""Durable sessions on the command line: `--session NAME`, and `carrel sessions list|show|trace|pause|delete`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.preloaded_python import preloaded_python

HOLDER = """
import asyncio, sys
from carrel import Session

async def main():
    async with Session.from_base(sys.argv[1], session_id="report") as session:
        print((await session.run("x = x + 1; x")).value, flush=True)
        while (await session.run("x")).is_ok:
            await asyncio.sleep(0.05)
        print("closed", flush=True)

asyncio.run(main())
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "base"


def carrel(base: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CARREL_HOME": str(base)}
    return preloaded_python().run(["-m", "carrel", *words], environment, stdin="")


def test_a_named_session_continues_on_the_command_line(base: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "given"
    workspace.mkdir()
    (workspace / "file").write_text("given")
    code = "x = 5; g = (n for n in []); open('made', 'w').write('made')"
    assert carrel(base, "run", "--session", "report", "--workspace", str(workspace), code).stdout == "4\n"
    again = carrel(base, "run", "--session", "report", "x, open('made').read(), open('file').read()")
    assert again.stdout == "(5, 'made', 'given')\n"
    assert "not kept in report: g: g: TypeError" in again.stderr
    listed = json.loads(carrel(base, "sessions", "list", "--json").stdout)
    assert [(each["id"], each["durable"]["state"], each["durable"]["variables"]) for each in listed] == [
        ("report", "paused", ["x"])
    ]
    assert listed[0]["durable"]["bytes"] > 0
    assert "paused" in carrel(base, "sessions", "list").stdout
    assert "1 variable saved" in carrel(base, "sessions", "show", "report").stdout
    assert "resume" in carrel(base, "sessions", "trace", "report").stdout
    assert carrel(base, "sessions", "delete", "report", "--yes").stdout == "Deleted report.\n"
    assert not (base / "sessions" / "report").exists()
    gone = carrel(base, "run", "--session", "report", "x")
    assert "NameError" in gone.stderr


def test_pause_asks_the_process_that_has_the_session_open(base: Path) -> None:
    assert carrel(base, "run", "--session", "report", "x = 5").returncode == 0
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(base)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "6\n"
        refused = carrel(base, "run", "--session", "report", "x")
        assert refused.returncode == 1
        assert f"the process {holder.pid} on " in refused.stderr
        deleted = carrel(base, "sessions", "delete", "report", "--yes")
        assert (deleted.returncode, str(holder.pid) in deleted.stderr) == (1, True)
        assert json.loads(carrel(base, "sessions", "list", "--json").stdout)[0]["durable"]["state"] == "open"
        assert carrel(base, "sessions", "prune", "--older-than", "0m", "--yes").stdout == "No session is that old.\n"
        assert carrel(base, "sessions", "pause", "report").stdout == "Paused report.\n"
        assert holder.stdout.readline() == "closed\n"
    assert carrel(base, "run", "--session", "report", "x").stdout == "6\n"
    assert carrel(base, "sessions", "pause", "report").stdout == "report was not open.\n"


def test_a_process_that_does_not_answer_is_named(base: Path) -> None:
    carrel(base, "run", "--session", "report", "x = 5")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(base)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        os.kill(holder.pid, 19)
        refused = carrel(base, "sessions", "pause", "report", "--timeout", "0.5")
        assert refused.returncode == 1
        assert str(holder.pid) in refused.stderr
        holder.kill()
    assert carrel(base, "run", "--session", "report", "x").stdout in ("5\n", "6\n")
