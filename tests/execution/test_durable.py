"""A session that continues: files and variables of an executor, in a folder, for another executor."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import ConfigurationError, SessionBusy, StateNotSaved
from carrel.execution.config import SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def executor_of(state: Path, **settings: Any) -> SubprocessExecutor:
    return SubprocessExecutor(SubprocessConfig(state_folder=state, **{"sandbox": "required", **settings}))


DEFINITIONS = """
import math
from dataclasses import dataclass

@dataclass
class Point:
    x: float
    def length(self):
        return math.hypot(self.x, half(self.x))

def half(number):
    return number / 2

double = lambda number: 2 * number
"""


async def test_variables_and_files_are_there_again(state: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "given"
    workspace.mkdir()
    (workspace / "kept").write_text("given")
    (workspace / "deleted").write_text("given")
    async with executor_of(state, workspace=workspace) as executor:
        assert (await executor.run(DEFINITIONS)).is_ok
        assert (await executor.run("calls = []")).is_ok
        assert (await executor.run("'é'; calls.append(1); late = lambda: 'é'; calls.append(2)")).is_ok
        assert (
            await executor.run("a = [1]; b = {'same': a}; p = Point(3.0); big = 2**100\nimport os; os.chdir('/tmp')")
        ).is_ok
        await executor.exec("echo new > new; rm deleted", cwd="/workspace")
        saved = await executor.save()
        assert saved.missing == {}
        assert {"a", "b", "p", "Point", "half", "double", "math"} <= set(saved.kept)
    async with executor_of(state, workspace=workspace) as other:
        assert other.resumed is not None
        assert other.resumed.missing == {}
        result = await other.run("b['same'] is a, p.length(), double(big), type(p) is Point, os.getcwd()")
        assert result.value == (True, 3.3541019662496847, 2**101, True, "/tmp"), result.error
        assert [entry.name for entry in await other.list_files()] == ["kept", "new"]
        assert {change.path: change.kind for change in await other.changed_files()} == {
            "deleted": "deleted",
            "new": "added",
        }
        # What was loaded can be saved again.
        assert (await other.save()).missing == {}
    async with executor_of(state, workspace=workspace) as third:
        assert (await third.run("double(3), p.x, late(), calls")).value == (6, 3.0, "é", [1, 2])


async def test_what_cannot_be_kept_is_named_and_everything_else_is_there(state: Path) -> None:
    code = (
        "class Job: pass\nimport socket\njobs = [Job(), Job(), Job()]\njobs[2].sock = socket.socketpair()[0]\n"
        "g = (n for n in range(3)); x = 5; f = [lambda: 1]\nif True:\n    def hidden(): pass"
    )
    async with executor_of(state) as executor:
        assert (await executor.run(code)).is_ok
        saved = await executor.save()
    assert saved.missing["jobs"].startswith("jobs[2].sock: TypeError")
    assert saved.missing["g"].startswith("g: TypeError")
    assert saved.missing["f"].startswith("f[0]: ")
    assert "source" in saved.missing["hidden"]
    async with executor_of(state) as other:
        assert other.resumed is not None
        assert other.resumed.missing == saved.missing
        assert (await other.run("x, Job().__class__.__name__")).value == (5, "Job")


async def test_a_killed_session_has_its_files_and_the_variables_of_the_last_save(state: Path) -> None:
    executor = executor_of(state)
    await executor.run("x = 1")
    await executor.save()
    await executor.run("x = 2; open('counter', 'w').write('2')")
    assert executor._connection is not None
    assert executor._connection.transport.init is not None
    os.kill(executor._connection.transport.init.pid, signal.SIGKILL)
    await executor.close()
    async with executor_of(state) as other:
        assert (await other.run("x, open('counter').read()")).value == (1, "2")


async def test_a_state_that_harms_python_does_not_keep_the_session_from_starting(state: Path) -> None:
    code = "import os\nclass Evil:\n    def __reduce__(self): return os._exit, (3,)\nevil = Evil(); x = 5"
    async with executor_of(state) as executor:
        await executor.run(code)
        await executor.save()
        await executor.write_file("file", "there")
    async with executor_of(state) as other:
        assert other.resumed is not None
        assert "exit code 3" in other.resumed.missing["*"]
        assert (await other.run("open('file').read()")).value == "there"


async def test_code_of_the_session_cannot_prevent_or_forge_more_than_its_own_save(state: Path) -> None:
    async with executor_of(state) as executor:
        await executor.run("x = 5")
        await executor.save()
        await executor.run("import os\nclass Dies:\n    def __reduce__(self): os._exit(1)\nd = Dies()")
        with pytest.raises(StateNotSaved, match="ended early"):
            await executor.save()
        assert (await executor.run("x")).value == 5
        await executor.run(
            "del d\nimport threading\nt = threading.Thread(target=threading.Event().wait, daemon=True); t.start()"
        )
        with pytest.raises(StateNotSaved, match="thread"):
            await executor.save(may_block=False)
        assert sorted(path.name for path in state.iterdir()) == ["files", "lock", "manifest.json", "variables"]
        assert (await executor.run("x = 6")).is_ok
        saved = await executor.save()
        assert "x" in saved.kept
        assert "lock" in saved.missing["t"]
    async with executor_of(state) as other:
        assert (await other.run("x")).value == 6


async def test_one_session_at_a_time(state: Path) -> None:
    async with executor_of(state) as executor:
        with pytest.raises(SessionBusy, match=str(os.getpid())):
            await executor_of(state).start()
        await executor.run("x = 5; open('f', 'w').write('1')")
        async with await executor.fork() as fork:
            await fork.run("x = 6; open('f', 'w').write('2')")
            with pytest.raises(ConfigurationError, match="state_folder"):
                await fork.save()
        assert (await executor.run("x, open('f').read()")).value == (5, "1")
    async with executor_of(state) as other:
        assert other.resumed is None
        assert (await other.run("open('f').read()")).value == "1"


async def test_variables_are_not_loaded_into_a_weaker_sandbox(state: Path) -> None:
    async with executor_of(state, network=False) as executor:
        await executor.run("x = 5")
        await executor.save()
    async with executor_of(state, network=True) as other:
        assert other.resumed is not None
        assert "network" in other.resumed.missing["*"]
        assert (await other.run("x")).error_type == "NameError"


@pytest.mark.parametrize("settings", [{"sandbox": "off"}, {"workspace_mode": "rw"}, {}])
async def test_variables_and_files_are_kept_in_every_mode(
    state: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    workspace = tmp_path / "given"
    workspace.mkdir()
    (workspace / "deleted").write_text("given")
    options = {"workspace": workspace, **settings}
    async with executor_of(state, **options) as executor:
        code = "import os; x = 5; open('f', 'w').write('1'); os.remove('deleted')"
        assert (await executor.run(code)).is_ok
        await executor.save()
    async with executor_of(state, **options) as other:
        assert (await other.run("x, open('f').read(), os.listdir()")).value == (5, "1", ["f"])


async def test_a_rewound_session_continues_with_the_files_of_the_checkpoint(state: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "given"
    workspace.mkdir()
    (workspace / "deleted").write_text("given")
    code = "x = {0}; import os, pathlib; open('f', 'w').write('{0}'); (pathlib.Path.home() / 'h').write_text('{0}')"
    async with executor_of(state, workspace=workspace) as executor:
        await executor.run(code.format(1))
        point = await executor.checkpoint()
        assert (await executor.run(code.format(2) + "; os.remove('deleted')")).is_ok
        await executor.rewind(point)
        look = "x, open('f').read(), (pathlib.Path.home() / 'h').read_text(), sorted(os.listdir())"
        result = await executor.run(look)
        assert result.value == (1, "1", "1", ["deleted", "f"]), result.error
        await executor.run("open('later', 'w').write('3')")
        await executor.rewind(point)
        await executor.run("open('latest', 'w').write('4')")
        await executor.save()
        assert (await executor.exec("cat ~/h")).stdout == "1"
    async with executor_of(state, workspace=workspace) as other:
        assert len(list((state / "files").iterdir())) == 1
        assert (await other.run(look)).value == (1, "1", "1", ["deleted", "f", "latest"])
