"""Commands and files, in the same place as the code."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from carrel.errors import ConfigurationError, ExecutorClosed
from carrel.execution.executor import CommandResult, Executor, FileChange, FileEntry, Output
from tests.execution.conftest import Here, Start


async def test_a_command_has_output_and_an_exit_code(executor: Executor) -> None:
    result = await executor.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.success) == ("out\n", "err\n", 3, False)
    assert (await executor.exec(["echo", "a b", "*"])).stdout == "a b *\n"
    assert (await executor.exec("true")).success


async def test_input_environment_and_folder_of_a_command(executor: Executor) -> None:
    await executor.write_file("sub/x", "1")
    result = await executor.exec("cat; echo $WORD; ls", stdin="typed\n", env={"WORD": "hello"}, cwd="sub")
    assert result.stdout == "typed\nhello\nx\n"


async def test_what_a_command_writes_comes_as_it_is_written(executor: Executor) -> None:
    pieces: list[Output] = []
    go_on = asyncio.Event()

    def on_output(piece: Output) -> None:
        pieces.append(piece)
        go_on.set()

    waiting = "echo first; while ! [ -e go ]; do sleep 0.02; done"
    letter = "printf '\\303'; sleep 0.1; printf '\\251'; echo err >&2"
    running = asyncio.create_task(executor.exec(waiting, on_output=on_output))
    await asyncio.wait_for(go_on.wait(), 60)
    assert pieces == [Output("stdout", "first\n")]
    assert not running.done()
    running.cancel()
    await asyncio.wait({running})
    result = await executor.exec(letter, on_output=on_output)
    assert result.stdout == "é"
    assert "".join(piece.text for piece in pieces if piece.stream == "stdout") == "first\né", "no half a letter"
    assert "".join(piece.text for piece in pieces if piece.stream == "stderr") == "err\n"


async def test_a_program_that_is_not_there(executor: Executor) -> None:
    assert (await executor.exec("no-such-program-anywhere")).exit_code == 127, "the shell's own answer"
    with pytest.raises(FileNotFoundError, match="no-such-program-anywhere"):
        await executor.exec(["no-such-program-anywhere"])


async def test_a_command_that_cannot_be_started_raises_what_subprocess_raises(executor: Executor) -> None:
    await executor.write_file("plain", "not a program")
    with pytest.raises(PermissionError, match="plain"):
        await executor.exec(["./plain"])
    with pytest.raises(FileNotFoundError, match="missing"):
        await executor.exec("true", cwd="missing")
    with pytest.raises(NotADirectoryError, match="plain"):
        await executor.exec(["true"], cwd="plain")
    with pytest.raises(ValueError, match="null byte"):
        await executor.exec(["echo", "a\0b"])
    with pytest.raises(OSError, match="too long"):
        await executor.exec(["echo", "x" * 5_000_000])
    assert (await executor.exec("echo on")).stdout == "on\n"


async def test_output_of_both_streams_in_their_order_and_as_bytes(executor: Executor) -> None:
    result = await executor.exec("for n in 1 2 3; do echo out $n; echo err $n >&2; done")
    assert result.output == "out 1\nerr 1\nout 2\nerr 2\nout 3\nerr 3\n"
    assert not result.truncated
    raw = await executor.exec("printf '\\377\\000'; printf '\\376' >&2", text=False)
    assert (raw.stdout, raw.stderr, raw.output) == (b"\xff\0", b"\xfe", b"\xff\0\xfe")


async def test_root_where_there_is_one(executor: Executor) -> None:
    await executor.start()
    assert (await executor.exec("true", user="agent")).success
    with pytest.raises(ConfigurationError, match="'agent' or 'root'"):
        await executor.exec("true", user="daemon")
    if "root_user" not in executor.supported_capabilities():
        with pytest.raises(ConfigurationError, match="'root'"):
            await executor.exec("true", user="root")
        return
    assert (await executor.exec("id -u", user="root")).stdout == "0\n"
    assert (await executor.exec("id -u")).stdout != "0\n"


# --- side by side -----------------------------------------------------------------------------------------------------


async def begun(executor: Executor, command: str) -> asyncio.Task[CommandResult]:
    """A command that has written its first line."""
    wrote = asyncio.Event()
    running = asyncio.create_task(executor.exec(command, on_output=lambda _: wrote.set()))
    waiting = asyncio.create_task(wrote.wait())
    await asyncio.wait_for(asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED), 60)
    return running


async def test_a_command_that_waits_holds_up_neither_commands_nor_files(executor: Executor) -> None:
    await executor.exec(["python3", "-c", "import os; os.mkfifo('fifo')"])
    waiting = await begun(executor, "echo begun; cat fifo")
    assert (await executor.exec("echo second")).stdout == "second\n"
    await executor.write_file("note", "1")
    assert await executor.read_file("note") == b"1"
    (listed,) = await executor.processes()
    assert listed.command == "echo begun; cat fifo"
    await executor.exec("echo released > fifo")
    assert (await waiting).stdout == "begun\nreleased\n"


async def test_a_run_holds_up_neither_commands_nor_files(start: Start) -> None:
    here = Here()
    executor = start(handlers={"here": here})
    await executor.start()
    running = asyncio.create_task(executor.run("here.wait()\n'done'"))
    await asyncio.wait_for(here.came(), 60)
    assert (await executor.exec("echo beside")).stdout == "beside\n"
    await executor.write_file("note", "1")
    assert await executor.read_file("note") == b"1"
    left = await begun(executor, "echo begun; sleep 600")
    (listed,) = await executor.processes()
    assert await executor.kill(listed.pid)
    assert (await left).exit_code == 137
    assert not running.done()
    here.go_on.set()
    assert (await running).value == "done"


async def test_closing_ends_a_running_command_at_once(executor: Executor) -> None:
    running = await begun(executor, "echo begun; sleep 600")
    await asyncio.wait_for(executor.close(), 60)
    with pytest.raises(ExecutorClosed, match="closed"):
        await asyncio.wait_for(running, 60)


async def test_input_of_any_size(executor: Executor) -> None:
    content = os.urandom(1 << 20) * 50
    result = await executor.exec("sha256sum", stdin=content)
    assert result.stdout.split()[0] == hashlib.sha256(content).hexdigest()
    assert (await executor.exec("head -c 5", stdin=content, text=False)).stdout == content[:5]


async def is_not_running(executor: Executor, command: str) -> None:
    """No process has this command line, which no other test has, nor another run of this one."""
    async with asyncio.timeout(60):
        while command in (await executor.exec("ps ax -o args")).stdout:
            pass


async def test_time_is_up_for_the_command_and_all_it_started(executor: Executor) -> None:
    began, nap = time.monotonic(), f"sleep 47.{os.getpid()}"
    result = await executor.exec(f"echo begun; ({nap}; echo never > left) & {nap}", timeout=1)
    assert (result.exit_code, result.timed_out, result.success, result.stdout) == (124, True, False, "begun\n")
    assert time.monotonic() - began < 40
    await is_not_running(executor, nap)


async def test_killed_by_a_signal(executor: Executor) -> None:
    assert (await executor.exec("kill -9 $$")).exit_code == 137


async def test_commands_without_a_waiting_caller_leave_nothing_open(executor: Executor) -> None:
    async def given_up(turns: int) -> None:
        command = asyncio.create_task(executor.exec("sleep 600 & sleep 600"))
        for _ in range(turns):
            await asyncio.sleep(0)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command

    await executor.exec("true")
    await given_up(50)
    before = len(os.listdir("/proc/self/fd"))
    for turns in range(20):
        await given_up(turns)
    for _ in range(2):
        assert (await executor.exec("sleep 600 & sleep 600", timeout=0.1)).timed_out
    async with asyncio.timeout(60):
        while len(os.listdir("/proc/self/fd")) > before + 2:  # noqa: ASYNC110 -- no event says when one is closed
            await asyncio.sleep(0.01)


async def test_what_stays_in_the_background_does_not_hold_up_the_answer(executor: Executor) -> None:
    began = time.monotonic()
    assert (await executor.exec("sleep 47 & echo done")).stdout == "done\n"
    assert time.monotonic() - began < 40


async def test_what_a_command_left_running_is_listed_and_can_be_ended(executor: Executor) -> None:
    tail = f"{random.randrange(10**6):06}"
    assert await executor.processes() == []
    await executor.exec(f"sleep 45.1{tail} & echo $! > pid")
    await executor.exec(["sh", "-c", f"sleep 45.2{tail} >/dev/null 2>&1 &"])
    await executor.exec(f"setsid sleep 45.3{tail} >/dev/null 2>&1 & sleep 45.3{tail} >/dev/null 2>&1 &")
    await executor.exec("true")
    left = await executor.processes()
    first, second = f"sleep 45.1{tail} & echo $! > pid", f"sh -c 'sleep 45.2{tail} >/dev/null 2>&1 &'"
    assert [one.command for one in left[:2]] == [first, second]
    assert len(left) == 3
    now = datetime.now(UTC)
    assert all(now - timedelta(minutes=2) < one.started <= now for one in left)
    for one in left:
        assert await executor.kill(one.pid) is True
        assert await executor.kill(one.pid) is False
    assert await executor.processes() == []
    assert await executor.kill(1) is False
    with pytest.raises(TypeError, match="pid is a whole number"):
        await executor.kill("1")  # type: ignore[arg-type]
    assert (await executor.exec(f"ps ax -o args | grep '^sleep 45.*{tail}' || true")).stdout == ""


async def test_much_output_of_a_command_is_bounded(start: Start) -> None:
    executor = start(output_limit=1000)
    result = await executor.exec("head -c 5000000 /dev/zero | tr '\\0' x")
    assert "4,999,000 bytes left out" in result.stdout


async def test_cancelling_the_caller_ends_the_command(executor: Executor) -> None:
    begun, nap = asyncio.Event(), f"sleep 46.{os.getpid()}"
    running = asyncio.ensure_future(executor.exec(f"echo begun; {nap}", on_output=lambda _: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await is_not_running(executor, nap)


async def test_files_are_written_read_and_listed(executor: Executor) -> None:
    await executor.write_file("a/b.txt", "text")
    await executor.write_file("raw", b"\0\xff")
    assert await executor.read_file("a/b.txt") == b"text"
    assert await executor.read_file("raw") == b"\0\xff"
    assert [(e.name, e.kind) for e in await executor.list_files()] == [("a", "folder"), ("raw", "file")]
    assert await executor.list_files("a") == [FileEntry("b.txt", "file", 4)]


async def test_a_large_file_goes_both_ways(executor: Executor) -> None:
    content = os.urandom(1 << 20) * 50
    await executor.write_file("large", content)
    assert await executor.read_file("large") == content


async def test_errors_of_files_are_those_of_open(executor: Executor) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        await executor.read_file("missing")
    await executor.write_file("folder/x", "1")
    with pytest.raises(IsADirectoryError, match="folder"):
        await executor.read_file("folder")
    with pytest.raises(FileNotFoundError):
        await executor.list_files("nowhere")


async def test_errors_about_kinds_of_files(executor: Executor) -> None:
    await executor.write_file("file", "1")
    await executor.exec(["python3", "-c", "import os; os.mkfifo('fifo')"])
    with pytest.raises(NotADirectoryError):
        await executor.read_file("file/below")
    with pytest.raises(NotADirectoryError):
        await executor.write_file("file/below", "1")
    with pytest.raises(IsADirectoryError):
        await executor.write_file(".", "1")
    with pytest.raises(OSError, match="ot a regular file"):
        await asyncio.wait_for(executor.read_file("fifo"), 60)
    with pytest.raises(OSError, match="ot a regular file"):
        await asyncio.wait_for(executor.write_file("fifo", "1"), 60)


async def test_what_is_known_of_a_file(executor: Executor) -> None:
    await executor.write_file("a/file", "text")
    await executor.exec("chmod 640 a/file; ln -s a/file link; ln -s nowhere dangling")
    about = await executor.stat("a/file")
    assert (about.name, about.kind, about.size, about.mode, about.target) == ("file", "file", 4, 0o640, "")
    assert abs(about.mtime - time.time()) < 3600
    assert (await executor.stat("link")).size == 4
    assert (await executor.stat("link")).target == "a/file"
    assert [await executor.exists(path) for path in ("a", "a/file", "link", "dangling", "none")] == [
        *[True] * 3,
        *[False] * 2,
    ]
    assert (await executor.realpath("link")).endswith("/a/file")
    with pytest.raises(FileNotFoundError):
        await executor.stat("none")
    with pytest.raises(FileNotFoundError):
        await executor.realpath("none")
    await executor.exec("ln -s a out; ln -s one two; ln -s two one")
    assert (await executor.realpath("out/none", strict=False)).endswith("/a/none")
    assert (await executor.realpath("one", strict=False)).endswith("/one")


async def test_folders_are_made_moved_and_removed(executor: Executor) -> None:
    await executor.make_dir("one/two")
    await executor.make_dir("one/two")
    await executor.write_file("one/two/file", "text")
    await executor.move("one/two", "moved")
    assert await executor.read_file("moved/file") == b"text"
    with pytest.raises(OSError, match="not empty"):
        await executor.remove("moved")
    await executor.remove("moved/file")
    await executor.remove("moved")
    await executor.write_file("one/two/file", "text")
    await executor.remove("one", recursive=True)
    assert await executor.list_files() == []
    with pytest.raises(FileNotFoundError):
        await executor.remove("one")
    with pytest.raises(FileNotFoundError):
        await executor.move("one", "two")


async def test_str_replace_wants_exactly_one_place(executor: Executor) -> None:
    await executor.write_file("f", "one two two")
    await executor.str_replace("f", "one", "1")
    assert await executor.read_file("f") == b"1 two two"
    with pytest.raises(ValueError, match="2 times"):
        await executor.str_replace("f", "two", "2")
    with pytest.raises(ValueError, match="0 times"):
        await executor.str_replace("f", "three", "3")
    assert await executor.read_file("f") == b"1 two two"


@pytest.mark.promise("works in its workspace")
async def test_code_commands_and_files_see_the_same_place(executor: Executor) -> None:
    await executor.run("open('from_code', 'w').write('1')")
    await executor.exec("echo 2 > from_command")
    await executor.write_file("from_host", "3")
    code = "[open(n).read().strip() for n in ('from_code', 'from_command', 'from_host')]"
    assert (await executor.run(code)).value == ["1", "2", "3"]


def given(folder: Path) -> Path:
    (folder / "kept.txt").write_text("same\n")
    (folder / "changed.txt").write_text("one\ntwo\nthree\n")
    (folder / "gone.txt").write_text("bye\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "raw").write_bytes(b"\0\1")
    return folder


async def edit(executor: Executor) -> None:
    await executor.write_file("changed.txt", "one\n2\nthree\n")
    await executor.write_file("new.txt", "hello")
    await executor.write_file("sub/raw", b"\0\2\3")
    await executor.exec("rm gone.txt; touch kept.txt")


@pytest.mark.parametrize("mode", ["overlay", "rw"])
async def test_changes_are_compared_with_the_start(start: Start, tmp_path: Path, mode: str) -> None:
    executor = start(workspace=given(tmp_path), workspace_mode=mode)
    assert await executor.changed_files() == []
    await edit(executor)
    assert await executor.changed_files() == [
        FileChange("changed.txt", "modified", 12),
        FileChange("gone.txt", "deleted"),
        FileChange("new.txt", "added", 5),
        FileChange("sub/raw", "modified", 3),
    ]
    assert await executor.diff() == (
        "Binary files a/sub/raw and b/sub/raw differ\n"
        "diff --git a/changed.txt b/changed.txt\nindex 4cb29ea38f..f04eb265eb 100644\n"
        "--- a/changed.txt\n+++ b/changed.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
        "diff --git a/gone.txt b/gone.txt\ndeleted file mode 100644\nindex b023018cab..0000000000\n"
        "--- a/gone.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-bye\n"
        "diff --git a/new.txt b/new.txt\nnew file mode 100644\nindex 0000000000..b6fc4c620b\n"
        "--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+hello\n\\ No newline at end of file\n"
    )


@pytest.mark.parametrize("mode", ["overlay", "rw"])
async def test_links_modes_and_odd_names_are_in_the_diff(start: Start, tmp_path: Path, mode: str) -> None:
    executor = start(workspace=given(tmp_path), workspace_mode=mode)
    (tmp_path / "link").symlink_to("kept.txt")
    await executor.start()
    await executor.exec(["ln", "-sfn", "gone.txt", "link"])
    await executor.exec(
        "ln -s kept.txt more; chmod +x changed.txt; : > empty; mkdir 'a b'; printf 'x\\fy\\n' > 'a b/c d'"
    )
    assert await executor.diff() == (
        'diff --git "a/a b/c d" "b/a b/c d"\nnew file mode 100644\nindex 0000000000..43c0a3642e\n'
        '--- /dev/null\n+++ "b/a b/c d"\n@@ -0,0 +1 @@\n+x\fy\n'
        "diff --git a/changed.txt b/changed.txt\nold mode 100644\nnew mode 100755\n"
        "diff --git a/empty b/empty\nnew file mode 100644\nindex 0000000000..e69de29bb2\n"
        "diff --git a/link b/link\nindex 72ad13cad8..802855760d 120000\n--- a/link\n+++ b/link\n@@ -1 +1 @@\n"
        "-kept.txt\n\\ No newline at end of file\n+gone.txt\n\\ No newline at end of file\n"
        "diff --git a/more b/more\nnew file mode 120000\nindex 0000000000..72ad13cad8\n"
        "--- /dev/null\n+++ b/more\n@@ -0,0 +1 @@\n+kept.txt\n\\ No newline at end of file\n"
    )


@pytest.mark.parametrize("mode", ["overlay", "rw"])
async def test_a_change_that_sets_size_and_time_back_is_found_too(start: Start, tmp_path: Path, mode: str) -> None:
    executor = start(workspace=given(tmp_path), workspace_mode=mode)
    await executor.start()
    await executor.exec(
        "touch -r kept.txt stamp; printf %s SAME > kept.txt; echo >> kept.txt; touch -r stamp kept.txt; rm stamp"
    )
    await executor.exec("chmod 600 gone.txt")
    assert await executor.changed_files() == [FileChange("kept.txt", "modified", 5)]


@pytest.mark.promise("the workspace stays as it was")
async def test_an_overlay_leaves_the_folder_as_it_was(start: Start, tmp_path: Path) -> None:
    executor = start(workspace=given(tmp_path))
    await edit(executor)
    assert (tmp_path / "changed.txt").read_text() == "one\ntwo\nthree\n"
    assert (tmp_path / "gone.txt").exists()
    assert not (tmp_path / "new.txt").exists()


async def test_rw_changes_the_folder_itself(start: Start, tmp_path: Path) -> None:
    executor = start(workspace=given(tmp_path), workspace_mode="rw")
    await edit(executor)
    assert (tmp_path / "changed.txt").read_text() == "one\n2\nthree\n"
    assert not (tmp_path / "gone.txt").exists()


@pytest.mark.promise("only its own environment variables")
async def test_nothing_of_the_hosts_environment_is_inside(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARREL_TEST_SECRET", "s3cret")
    executor = start(env={"GIVEN": "yes"})
    result = await executor.run("import os\n'CARREL_TEST_SECRET' in os.environ, os.environ['GIVEN']")
    assert result.value == (False, "yes")
    assert "s3cret" not in (await executor.exec("env; cat /proc/*/environ 2>/dev/null || true")).stdout


async def test_after_close_they_say_so(executor: Executor) -> None:
    await executor.start()
    await executor.close()
    with pytest.raises(ExecutorClosed):
        await executor.read_file("x")
    with pytest.raises(ExecutorClosed):
        await executor.exec("true")
