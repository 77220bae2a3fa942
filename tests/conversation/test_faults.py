"""An acknowledged append is never lost: killed, torn, full, corrupt, deleted, two at once; each for real."""

import asyncio
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from carrel.conversation.messages import flatten_message_text
from carrel.conversation.store import SessionStore
from carrel.errors import KeyRefused, SessionNotFound, StorageWriteError
from tests.support.messages import call, outline, result, user

PROGRAM = "tests.support.conversation_process"
# For a shell: the clone may lie in a path with a space.
PYTHON = shlex.quote(sys.executable)
APPENDING = f"{PYTHON} -m {PROGRAM} append"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    async with SessionStore(tmp_path / "sessions", embedder=False) as store:
        yield store


def start(data_dir: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAM, "append", str(data_dir), *words],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


async def names(store: SessionStore, session_id: str = "s") -> list[str]:
    return [flatten_message_text(entry).split(" ")[0] async for _, entry in store.iter_entries(session_id)]


@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_killed_at_any_moment_nothing_acknowledged_is_lost(tmp_path: Path, durability: str):
    chance = random.Random(4)
    acknowledged: list[str] = []
    for round_ in range(6):
        writer = start(tmp_path, "s", f"r{round_}", "100000", durability)
        assert writer.stdout is not None
        for _ in range(chance.randrange(1, 120)):
            acknowledged.append(writer.stdout.readline().split()[1])
        writer.send_signal(signal.SIGKILL)
        acknowledged += [
            line.split()[1] for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")
        ]
        writer.wait()
        async with SessionStore(tmp_path, embedder=False) as store:
            found = await names(store)
            assert [name for name in found if name in set(acknowledged)] == acknowledged
            data = await store.load_session("s")
            assert data is not None
            assert len(data["messages"]) == len(found)


async def test_two_processes_at_once_lose_and_mix_nothing(tmp_path: Path):
    writers = [start(tmp_path, "s", name, "1500") for name in ("a", "b", "c")]
    acknowledged = [[line.split() for line in writer.communicate()[0].splitlines()] for writer in writers]
    async with SessionStore(tmp_path, embedder=False) as store:
        found = await names(store)
    assert len(found) == 4500
    for lines in acknowledged:
        assert all(found[int(seq) - 1] == name for seq, name in lines)
    for name in "abc":
        assert [entry for entry in found if entry.startswith(name)] == [f"{name}-{n}" for n in range(1500)]


async def test_torn_at_every_byte(store: SessionStore):
    await store.append_many("s", [user("first"), user("second")])
    await store.close()
    path = store.messages_path("s")
    whole = path.read_bytes()
    border = whole.index(b"\n") + 1
    for end in range(border, len(whole)):
        path.write_bytes(whole[:end])
        torn = path.parent / "messages.torn"
        torn.unlink(missing_ok=True)
        async with SessionStore(store.data_dir, embedder=False) as again:
            complete = end == len(whole) - 1
            data = await again.load_session("s")
            assert data is not None
            assert outline(data["messages"]) == (["first", "second"] if complete else ["first"])
            if border < end < len(whole) - 1:
                assert any("torn" in problem for problem in data["problems"])
            assert path.read_bytes() == whole[:end], "reading must not write"
            await again.append_message("s", user("third"))
            data = await again.load_session("s")
            assert data is not None
            assert outline(data["messages"]) == (["first", "second", "third"] if complete else ["first", "third"])
            if border < end and not complete:
                assert whole[border:end] in torn.read_bytes()
    path.write_bytes(whole)


async def test_bad_lines_cost_themselves_and_are_named(store: SessionStore):
    await store.append_many("s", [user("one"), user("two")])
    await store.close()
    path = store.messages_path("s")
    good = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(good[0] + b"\xff\xfe not json\n" + b"[1,2]\n" + b"\n" + b"\x00" * 20 + b"\n" + good[1])
    async with SessionStore(store.data_dir, embedder=False) as again:
        data = await again.load_session("s")
        assert data is not None
        assert outline(data["messages"]) == ["one", "two"]
        assert [problem.split(" is ")[0] for problem in data["problems"]] == ["line 2", "line 3", "line 5"]
        roles = [entry["role"] async for _, entry in again.iter_entries("s")]
        assert roles == ["user", "unreadable", "unreadable", "unreadable", "unreadable", "user"]
        assert await again.append_message("s", user("three")) == 7


async def test_reading_never_writes_while_another_process_works(tmp_path: Path):
    writer = start(tmp_path, "s", "a", "3", "os", "in-tool")
    assert writer.stdout is not None
    while "call" not in writer.stdout.readline():
        pass

    def picture() -> dict[str, tuple[int, int]]:
        files = [path for path in (tmp_path / "s").rglob("*") if path.name != "meta.json"]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}

    async with SessionStore(tmp_path, embedder=False) as store:
        before = picture()
        data = await store.load_session("s")
        assert data is not None
        assert outline(data["messages"])[-2:] == ["call:t1", "stand-in:t1"]
        assert picture() == before
        writer.kill()
        writer.wait()
        assert outline((await store.load_session("s") or {"messages": []})["messages"])[-1] == "stand-in:t1"
        assert len(await names(store)) == 5, "no process waits any more, so the repair is written"


def test_on_a_full_disk_a_session_can_be_deleted_to_make_room(tmp_path: Path):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a file system of its own needs root and unshare")
    script = (
        f"mount -t tmpfs -o size=512k tmpfs {tmp_path} && {APPENDING} {tmp_path} s a 3 > /dev/null; "
        f"dd if=/dev/zero of={tmp_path}/filler bs=1k 2>/dev/null; "
        f"{PYTHON} -m carrel.cli sessions delete s --yes --data {tmp_path}; echo exit $?; ls {tmp_path}"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines()[-2:] == ["exit 0", "filler"], done


async def test_a_full_disk_is_a_clear_error_and_costs_nothing(tmp_path: Path):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a file system of its own needs root and unshare")
    script = (
        f"mount -t tmpfs -o size=256k tmpfs {tmp_path} && "
        f"{APPENDING} {tmp_path} s a 100000; echo exit $?; rm -f {tmp_path}/filler; "
        f"dd if=/dev/zero of={tmp_path}/filler bs=1k 2>/dev/null; rm {tmp_path}/filler; "
        f"cp -r {tmp_path}/s {tmp_path.parent}/copy-of-s"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "exit 3", done
    assert lines[-2].startswith("refused StorageWriteError")
    assert "No space left" in lines[-2] or "full" in lines[-2]
    acknowledged = [line.split()[1] for line in lines[:-2]]
    copy = tmp_path / "again"
    shutil.copytree(tmp_path.parent / "copy-of-s", copy / "s")
    shutil.rmtree(tmp_path.parent / "copy-of-s")
    async with SessionStore(copy, embedder=False) as store:
        assert await names(store) == acknowledged
        assert "problems" not in (await store.load_session("s") or {})


ON_A_FULL_DISK = """
import asyncio, os, sys
from carrel.conversation.store import SessionStore
from tests.support.messages import user

async def main(folder, durability):
    store, kept = SessionStore(folder, durability, embedder=False), []
    for messages in ([user("x" * 20_000)] * 3, [user("x" * 20_000)]):
        try:
            while True:
                await store.append_many(f"s{len(kept)}", messages)
        except OSError as problem:
            kept.append(problem)  # as a program does that reports it later
    await store.close()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    files = [os.readlink(link) for link in links if os.path.lexists(link)]
    print([type(problem).__name__ for problem in kept], [file for file in files if folder in file])

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_no_file_stays_open_after_a_full_disk(tmp_path: Path, durability: str):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a file system of its own needs root and unshare")
    script = f'mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec "$0" "$@"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path), durability]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "['StorageWriteError', 'StorageWriteError'] []\n", done


async def test_appends_work_again_when_there_is_room(store: SessionStore, tmp_path: Path):
    """A limit on the size of files stands for the full disk here: it can be lifted in the same process."""
    code = (
        "import asyncio, resource, sys; from carrel.conversation.store import SessionStore\n"
        "from carrel.conversation.messages import user_text_message as user\n"
        "async def main():\n"
        "    store = SessionStore(sys.argv[1], embedder=False)\n"
        "    await store.append_message('s', user('before'))\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))\n"
        "    try: await store.append_message('s', user('x' * 5000)); print('kept?')\n"
        "    except OSError as e: print(type(e).__name__)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "    print(await store.append_message('s', user('after')))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(store.data_dir)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == [StorageWriteError.__name__, "2"], done
    assert await names(store) == ["before", "after"]


async def test_deleting_while_another_process_appends(tmp_path: Path):
    for _ in range(3):
        writer = start(tmp_path, "s", "a", "100000")
        assert writer.stdout is not None
        for _ in range(30):
            writer.stdout.readline()
        async with SessionStore(tmp_path, embedder=False) as store:
            assert await store.delete_session("s")
            rest = writer.communicate(timeout=30)[0].splitlines()
            assert rest[-1].startswith(f"refused {SessionNotFound.__name__}")
            assert writer.returncode == 3
            assert await store.load_session("s") is None
            assert await store.list_sessions() == []
            assert not (tmp_path / "s").exists()


async def test_deleting_among_gathered_appends(store: SessionStore):
    await store.append_message("s", user("first"))
    outcomes = await asyncio.gather(
        *(store.append_message("s", user(str(n))) for n in range(50)),
        store.delete_session("s"),
        return_exceptions=True,
    )
    assert all(isinstance(outcome, int | SessionNotFound) for outcome in outcomes)
    assert await store.load_session("s") is None
    assert not store.session_dir("s").exists()


async def test_folders_and_files_are_private(store: SessionStore):
    previous = os.umask(0)
    try:
        await store.append_many("s", [call("t"), result("t", text="x" * 60_000)])
        await store.label("s", "x")
        await store.close()
    finally:
        os.umask(previous)
    for path in [store.session_dir("s"), *store.session_dir("s").rglob("*")]:
        assert oct(path.stat().st_mode & 0o777) == ("0o700" if path.is_dir() else "0o600"), path


async def test_a_session_folder_that_is_a_link_out_is_not_followed(store: SessionStore, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    assert store.data_dir is not None
    store.data_dir.mkdir(exist_ok=True)
    (store.data_dir / "s").symlink_to(outside)
    with pytest.raises(KeyRefused, match="leads out of"):
        await store.append_message("s", user("x"))
    assert list(outside.iterdir()) == []


# --- other programs of this format


def read_as_others_do(folder: Path) -> list[str]:
    """The rules of the format, written again: every object is a message; the newest compact, then the rewinds."""
    entries = [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines() if line.strip()]
    compacts = [index for index, entry in enumerate(entries) if entry["role"] == "compact"]
    shown: list[str] = []
    if compacts:
        shown = ["(summary)", "(ack)"]
        entries = entries[compacts[-1] + 1 :]
    for entry in entries:
        if entry["role"] == "rewind":
            shown = shown[: entry["meta"]["rewind_to"]]
        else:
            shown.append(outline([entry])[0])
    return shown


async def test_what_we_write_others_read(store: SessionStore):
    await store.append_many("s", [user("a"), user("b"), user("c")])
    await store.label("s", "here")
    await store.pin("s", 1)
    await store.rename("s", "New name")
    assert read_as_others_do(store.session_dir("s")) == ["a", "b", "c"]
    await store.append_rewind("s", 2)
    await store.append_message("s", user("d"))
    assert read_as_others_do(store.session_dir("s")) == ["a", "b", "d"]
    fork = (await store.fork_session("s"))["session"]["id"]
    assert read_as_others_do(store.session_dir(fork)) == ["a", "b", "d"]
    await store.append_rewind("s", to_seq=1)
    assert read_as_others_do(store.session_dir("s")) == ["a"]

    async def summarize(messages: object) -> str:
        return "s"

    await store.compact(fork, summarize, keep_turns=0)
    await store.append_message(fork, user("e"))
    assert read_as_others_do(store.session_dir(fork)) == ["(summary)", "(ack)", "e"]
    meta = json.loads(store.meta_path("s").read_text())
    assert {"id", "title", "provider", "model", "cwd", "api_base", "created_at", "updated_at"} <= set(meta)
    assert meta["message_format_version"] == 5


async def test_what_others_write_we_read(store: SessionStore):
    folder = store.session_dir("0123456789abcdef0123456789abcdef")
    (folder / "tool-output").mkdir(parents=True)
    meta = {
        "id": folder.name,
        "title": "Theirs",
        "provider": "anthropic",
        "model": "m",
        "cwd": "/tmp",
        "api_base": None,
        "message_format_version": 5,
        "created_at": "2026-01-01T00:00:00+00:00",
        "updated_at": "2026-01-02T00:00:00+00:00",
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))
    old_result = {"type": "tool_result", "tool_use_id": "t", "content": "old style", "is_error": False}
    lines = [
        user("é before"),
        {
            "role": "compact",
            "content": [{"type": "text", "text": "sum"}],
            "meta": {"provider": "p", "model": "m", "compacted_count": 1},
        },
        call("t"),
        {"role": "user", "content": [old_result]},
        user("cut"),
        {"role": "rewind", "meta": {"rewind_to": 4, "created_at": "2026-01-02T00:00:00+00:00"}},
    ]
    (folder / "messages.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    data = await store.load_session(folder.name)
    assert data is not None
    assert data["session"] == meta
    assert [flatten_message_text(message) for message in data["messages"]][:1] == ["[Conversation Summary]\n\nsum"]
    assert data["messages"][2:] == lines[2:4]
    [listed] = await store.list_sessions()
    assert listed == meta
    assert await store.append_message(folder.name, user("ours")) == 7


def test_more_sessions_at_once_than_files_may_be_open(tmp_path: Path):
    command = [sys.executable, "-m", PROGRAM, "use_many", str(tmp_path / "sessions"), "400", "200"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len([path for path in (tmp_path / "sessions").iterdir() if path.name.endswith("-fork")]) == 400
