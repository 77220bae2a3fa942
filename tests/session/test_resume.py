"""Sessions that continue: conversation, files and variables, after a close, a pause or the death of the process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carrel import MemoryStorage, Session, SessionBusy, SessionNotFound, SyncSession
from carrel.errors import ConfigurationError, StateNotSaved
from carrel.execution.config import Limits
from carrel.execution.durable import used_space
from tests.execution.processes import until


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "base"


def report(base: Path, **settings: Any) -> Session:
    return Session.from_base(base, session_id="report", **settings)


async def test_a_session_continues_with_conversation_files_and_variables(base: Path) -> None:
    async with report(base) as session:
        assert session.resumed is None
        conversation = await session.converse("A report")
        conversation.create_user_message("Count.")
        assert (await session.run("class Box: pass\nbox = Box(); box.n = 5; g = (n for n in [])")).state == "kept"
        await session.execute_command("echo made > made; echo home > ~/home")
    async with report(base) as session:
        resumed = session.resumed
        assert resumed is not None
        assert (resumed.messages, resumed.files, resumed.reason) == (1, True, "")
        assert {"Box", "box"} <= set(resumed.variables)
        assert list(resumed.missing) == ["g"]
        assert resumed.saved_at is not None
        assert len((await session.converse()).messages) == 1
        first = await session.run("box.n, open('made').read(), open('/home/agent/home').read()")
        assert first.value == (5, "made\n", "home\n")
        assert first.state == "restored"
        assert "g (g: TypeError: cannot pickle 'generator' object)" in first.state_reason
        assert (await session.run("box.n")).state == "kept"
        assert [step["kind"] for step in await session.trace()] == ["run", "command", "close", "resume", "run", "run"]


async def test_pause_and_resume_with_the_settings_that_it_had(base: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "given"
    workspace.mkdir()
    (workspace / "file").write_text("given")
    session = report(base, workspace=workspace, network=False)
    await session.run("x = 1")
    assert await session.pause() == "report"
    assert (await session.run("x")).error_type == "Closed"
    async with Session.resume(base, "report") as session:
        assert (await session.run("x, open('file').read()")).value == (1, "given")
        assert session.executor.config.network is False  # type: ignore[attr-defined]
    with pytest.raises(SessionNotFound, match="nothing"):
        Session.resume(base, "nothing")
    with pytest.raises(ConfigurationError, match="workspace"):
        await report(base).start()


async def test_pause_interrupts_running_code(base: Path) -> None:
    session = report(base)
    await session.run("x = 1")
    running = asyncio.create_task(session.run("x = 2\nimport time\ntime.sleep(60)"))
    await asyncio.sleep(0.5)
    await session.pause()
    assert (await running).error_type == "KeyboardInterrupt"
    async with report(base) as session:
        assert (await session.run("x")).value == 2


async def test_code_that_runs_while_the_session_is_closed_is_not_waited_for(base: Path) -> None:
    session = report(base)
    await session.run("x = 1")
    await session.save()
    running = asyncio.create_task(session.run("x = 2\nimport time\ntime.sleep(60)"))
    await asyncio.sleep(0.3)
    await session.close()
    assert (await running).error_type == "Closed"
    async with report(base) as session:
        assert (await session.run("x")).value == 1


async def test_the_variables_are_saved_a_second_after_a_run(base: Path) -> None:
    async with report(base) as session:
        await session.run("x = 1")
        record = base / "sessions/report/workspace-state/session.json"
        await until(lambda: json.loads(record.read_bytes())["saved_at"])
        assert json.loads(record.read_bytes())["variables"] == ["x"]


async def test_only_one_opens_a_session(base: Path) -> None:
    async with report(base) as session:
        with pytest.raises(SessionBusy, match=str(os.getpid())) as refused:
            await report(base).start()
        assert refused.value.session_id == "report"
        assert refused.value.owner is not None
        assert (refused.value.owner.pid, refused.value.owner.since is not None) == (os.getpid(), True)
        assert (await session.run("1")).value == 1
    async with report(base):
        pass


async def test_in_process_keeps_files_and_says_why_no_variables(base: Path) -> None:
    async with Session.inprocess(base, session_id="report") as session:
        await session.run("x = 1")
        await session.write_file("made", "made")
    async with Session.resume(base, "report") as session:
        assert type(session.executor).__name__ == "InProcessExecutor"
        assert session.resumed is not None
        assert (session.resumed.files, session.resumed.variables) == (True, [])
        assert "never unpickles" in session.resumed.reason
        assert await session.read_file("made") == b"made"
        assert (await session.run("1")).state == "restored"
        assert (await session.run("x")).error_type == "NameError"


async def test_memory_keeps_nothing_and_says_so() -> None:
    with pytest.raises(ConfigurationError, match="MemoryStorage ends with this process"):
        Session(MemoryStorage(), persist=True)
    async with Session(MemoryStorage(), session_id="report") as session:
        assert session.resumed is not None
        assert "MemoryStorage ends with this process" in session.resumed.reason
        assert (await session.run("1")).state == "kept"
        with pytest.raises(ConfigurationError, match="not durable"):
            await session.save()
        with pytest.raises(ConfigurationError, match="not durable"):
            await session.pause()


async def test_persist_switches_it_on_and_off(base: Path) -> None:
    async with report(base, persist=False) as session:
        await session.run("x = 1")
    assert not (base / "sessions/report/workspace-state").exists()
    async with Session.from_base(base, persist=True) as session:
        await session.run("x = 1")
        name = session.id
    async with Session.resume(base, name) as session:
        assert (await session.run("x")).value == 1


def test_a_synchronous_session_continues(base: Path) -> None:
    with SyncSession.from_base(base, session_id="report") as session:
        session.run("x = 1")
        assert session.save().variables == ["x"]
        assert session.pause() == "report"
    with SyncSession.resume(base, "report") as session:
        assert session.resumed is not None
        assert session.run("x").value == 1


async def test_a_failed_save_is_reported_and_the_last_one_stays(base: Path) -> None:
    async with report(base) as session:
        await session.run("x = 1")
        await session.save()
        await session.run("import os\nclass Dies:\n    def __reduce__(self): os._exit(1)\nx = 2; d = Dies()")
        with pytest.raises(StateNotSaved, match="ended early"):
            await session.save()
    async with report(base) as session:
        assert (await session.run("x")).value == 1


async def test_reset_and_rewind_are_saved(base: Path) -> None:
    async with report(base) as session:
        await session.run("x = 1; open('f', 'w').write('1')")
        point = await session.checkpoint()
        await session.run("x = 2; open('f', 'w').write('2')")
        await session.rewind(point)
    async with report(base) as session:
        assert (await session.run("x, open('f').read()")).value == (1, "1")
        await session.reset()
    async with report(base) as session:
        assert (await session.run("x")).error_type == "NameError"


async def test_a_fork_of_a_durable_session_is_not_durable(base: Path) -> None:
    async with report(base) as session:
        await session.run("x = 1")
        async with await session.fork(session_id="fork") as fork:
            await fork.run("x = 2; open('f', 'w').write('2')")
    assert not (base / "sessions/fork/workspace-state").exists()
    async with report(base) as session:
        assert (await session.run("x, __import__('os').listdir()")).value == (1, [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: (state / "session.json").write_bytes(b"{"),
        lambda state: (state / "session.json").write_bytes(b'{"pid": "x", "variables": 5, "settings": []}'),
        lambda state: (state / "session.json").unlink(),
    ],
)
async def test_a_damaged_record_does_not_keep_a_session_from_opening(
    base: Path, damage: Callable[[Path], object]
) -> None:
    async with report(base) as session:
        await session.run("x = 1; open('f', 'w').write('1')")
    damage(base / "sessions/report/workspace-state")
    async with report(base) as session:
        assert (await session.run("x, open('f').read()")).value == (1, "1")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"generation": "../../..", "parts": 5}'])
async def test_a_damaged_manifest_costs_the_variables_at_most(base: Path, damage: bytes) -> None:
    async with report(base) as session:
        await session.run("x = 1; open('f', 'w').write('1')")
    (base / "sessions/report/workspace-state/manifest.json").write_bytes(damage)
    async with report(base) as session:
        assert session.resumed is not None
        assert "cannot be read" in session.resumed.reason
        assert (await session.run("open('f').read()")).value == "1"


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"\xff" * 8])
async def test_damaged_variables_cost_the_variables_only(base: Path, damage: bytes) -> None:
    async with report(base) as session:
        await session.run("x = 1; open('f', 'w').write('1')")
    (base / "sessions/report/workspace-state/variables").write_bytes(damage)
    async with report(base) as session:
        assert session.resumed is not None
        assert session.resumed.reason
        assert (await session.run("open('f').read()")).value == "1"


PROGRAM = textwrap.dedent("""
    import asyncio, sys
    from carrel import Session

    async def main():
        async with Session.from_base(sys.argv[1], session_id="report") as session:
            await session.run("count = -1")
            number = 0
            while True:
                number += 1
                code = "open('new', 'w').write('{0}'); import os; os.rename('new', 'counter'); count = {0}"
                await session.run(code.format(number))
                print("run", number, flush=True)
                if number % 5 == 0:
                    await session.save()
                    print("save", number, flush=True)

    asyncio.run(main())
""")


async def test_a_killed_process_frees_its_session_at_once_and_loses_only_what_was_not_saved(base: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for _ in range(8):
        await kill_and_resume(base, moments.randrange(1, 20), moments.random() * 0.02)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_two_hundred_kills(base: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for _ in range(200):
        await kill_and_resume(base, moments.randrange(0, 40), moments.random() * 0.05)


async def kill_and_resume(base: Path, lines: int, seconds: float) -> None:
    """Kill a program that counts in a file and in a variable, after so many lines of its output, and continue."""
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(base)], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    shown = [next(program.stdout).split() for _ in range(lines)]
    await asyncio.sleep(seconds)
    program.send_signal(signal.SIGKILL)
    shown += [line.split() for line in program.stdout if line.endswith("\n")]
    program.wait()
    ran = max((int(number) for what, number in shown if what == "run"), default=-1)
    saved = max((int(number) for what, number in shown if what == "save"), default=-1)
    async with report(base) as session:
        result = await session.run(
            "import os\n(int(open('counter').read() or 0) if os.path.exists('counter') else -1), "
            "globals().get('count', -1)"
        )
        assert result.value is not None, result.error
        counter, count = result.value
        assert counter >= ran, shown
        assert saved <= count <= max(counter, 0), shown
        await session.run("count = counter = 0; os.path.exists('counter') and os.remove('counter')")


# --- hostile sessions, and machines in trouble ------------------------------------------------------------------------


async def test_a_session_that_fills_the_disk_is_stopped_and_can_delete_its_files(base: Path) -> None:
    limits = Limits(disk=20 << 20)
    async with report(base, limits=limits) as session:
        await session.run("x = 1")
        await session.save()
        fill = "import time\nfor n in range(400):\n    open(f'f{n}', 'wb').write(bytes(1 << 20)); time.sleep(0.05)"
        result = await session.run(fill)
        assert "limits.disk" in (result.error or ""), result
        assert (result.state, "last save" in result.state_reason) == ("restored", True)
        assert used_space(base / "sessions/report") < 400 << 20
        assert (await session.run("x")).value == 1
        done = await session.execute_command("rm f*; ls")
        assert (done.exit_code, done.stdout) == (0, "")
        assert (await session.run("open('g', 'w').write('1')")).is_ok


async def test_used_space_of_deep_folders_and_links(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "large").write_bytes(bytes(1 << 20))
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "out")
    (inside / "file").write_bytes(bytes(1 << 16))
    (inside / "again").hardlink_to(inside / "file")
    assert used_space(inside) < 1 << 17
    before, fd = os.getcwd(), os.open(inside, os.O_RDONLY)
    try:
        for _ in range(40):
            os.mkdir("d" * 200, dir_fd=fd)
            fd, parent = os.open("d" * 200, os.O_RDONLY, dir_fd=fd), fd
            os.close(parent)
        with open(os.open("deep", os.O_CREAT | os.O_WRONLY, dir_fd=fd), "wb") as file:
            file.write(bytes(1 << 20))
    finally:
        os.close(fd)
        os.chdir(before)
    assert 1 << 20 < used_space(inside) < 2 << 20


async def test_links_of_the_session_lead_the_host_nowhere(base: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("secret")
    async with report(base) as session:
        code = "import os\nos.symlink('{0}', 'link'); os.symlink('{0}', os.path.expanduser('~/link'))\nx = 1"
        await session.run(code.format(secret))
        point = await session.checkpoint()
        await session.run("y = 1")
        await session.rewind(point)
    async with report(base) as session:
        assert (await session.run("os.readlink('link'), os.path.exists('link')")).value == (str(secret), False)
    carrel = subprocess.run(
        [sys.executable, "-m", "carrel", "sessions", "delete", "report", "--yes", "--base", str(base)], check=False
    )
    assert carrel.returncode == 0
    assert (secret / "file").read_text() == "secret"
    assert not (base / "sessions/report").exists()


async def test_the_host_runs_nothing_of_what_was_saved(base: Path, tmp_path: Path) -> None:
    """Even a pickle that was put in the place of the variables runs inside of the sandbox only."""
    code = 'class Evil:\n    def __reduce__(self):\n        return exec, ("import os; found = os.getpid()",)\n'
    async with report(base) as session:
        assert (await session.run(f"{code}evil = Evil(); x = 1")).is_ok
    async with report(base) as session:
        assert (await session.run("x, __import__('os').getuid() != 0 or None")).value == (1, True)


@pytest.mark.parametrize("name", ["a" * 128, "_x.y-z", "0"])
async def test_long_and_odd_ids(base: Path, name: str) -> None:
    for expected in (1, 2):
        async with Session.from_base(base, session_id=name) as session:
            assert (await session.run("x = globals().get('x', 0) + 1; x")).value == expected


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a" * 129, "é", "a\0b"])
async def test_ids_that_are_no_plain_names_are_refused(base: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a session id"):
        Session.from_base(base, session_id=name)
    with pytest.raises(ValueError, match="is not a session id"):
        Session.resume(base, name)


async def test_the_state_of_another_user_is_refused_with_a_reason(base: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    async with report(base) as session:
        await session.run("x = 1")
    os.chown(base / "sessions/report/workspace-state", 12345, 12345)
    with pytest.raises(ConfigurationError, match="was written by the user 12345"):
        await report(base).start()


async def test_a_full_disk_while_saving_keeps_the_last_save(base: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    base.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small", str(base)], check=True)
    try:
        async with report(base) as session:
            await session.run("x = 1")
            await session.save()
            await session.run("x = 2; large = __import__('os').urandom(20_000_000)")
            with pytest.raises(StateNotSaved, match="No space left"):
                await session.save()
            assert (await session.run("x")).value == 2
        async with report(base) as session:
            assert (await session.run("x")).value == 1
    finally:
        subprocess.run(["umount", "-l", str(base)], check=True)


async def test_a_variable_of_a_missing_package_is_named_and_the_others_are_there(base: Path, tmp_path: Path) -> None:
    package = tmp_path / "given"
    package.mkdir()
    (package / "gone.py").write_text("class Thing: pass\n")
    async with report(base, workspace=package) as session:
        await session.run("import gone; thing = gone.Thing(); x = 1")
    (package / "gone.py").unlink()
    async with report(base, workspace=package) as session:
        assert session.resumed is not None
        assert {"gone", "thing"} == set(session.resumed.missing)
        assert "No module named 'gone'" in session.resumed.missing["thing"]
        assert (await session.run("x")).value == 1


async def test_openers_at_the_same_moment(base: Path) -> None:
    async with report(base) as session:
        await session.run("x = 1")
    program = (
        "import asyncio, sys\nfrom carrel import Session, SessionBusy\n"
        "async def main():\n"
        "    try:\n"
        "        async with Session.from_base(sys.argv[1], session_id='report') as session:\n"
        "            print('opened', (await session.run('x')).value, flush=True); await asyncio.sleep(5)\n"
        "    except SessionBusy as problem:\n"
        "        print('busy', problem.owner.pid, flush=True)\n"
        "asyncio.run(main())\n"
    )
    words = [sys.executable, "-c", program, str(base)]
    programs = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    shown = sorted(program.communicate()[0].split() for program in programs)
    assert [line[0] for line in shown] == ["busy", "busy", "opened"]
    assert shown[2] == ["opened", "1"]
