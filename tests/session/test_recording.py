"""What is recorded of variables and files, and what they were at each point."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carrel import (
    FileStorage,
    MemoryStorage,
    Session,
    SessionStore,
    SubprocessConfig,
    SubprocessExecutor,
    redact_secrets,
    user_text_message,
)
from carrel.errors import PointNotFound
from carrel.session.points import RecordedState, compare_files, compare_variables, find_point, read_state, read_text
from carrel.session.recording import states_key


async def state_at(session: Session, point: str) -> RecordedState:
    await session.flush_trace()
    return await read_state(session.storage.store, session.id, await find_point(session.storage, session.id, point))


async def until(is_there: Callable[[RecordedState], bool], session: Session) -> None:
    async with asyncio.timeout(60):
        while True:
            if is_there(await state_at(session, "now")):
                return
            await asyncio.sleep(0.01)


async def recorded(session: Session, name: str, preview: str) -> None:
    """Wait until the newest state has this variable."""
    await until(lambda state: name in state.variables and state.variables[name].preview == preview, session)


async def file_recorded(session: Session, path: str, size: int) -> None:
    await until(lambda state: path in state.files and state.files[path][1] == size, session)


async def test_each_point_has_its_variables_and_files(tmp_path: Path) -> None:
    async with Session.from_base(tmp_path, session_id="main") as session:
        store = session.storage.get_session_store()
        await store.create_session("a title", session_id="main")
        await store.append_message("main", user_text_message("one"))
        await session.run("x = 1\ngone = 2")
        await recorded(session, "gone", "2")
        await store.append_message("main", user_text_message("two"))
        await session.run("x = [1, 2]\ndel gone\nopen('a.txt', 'w').write('first\\n')")
        await file_recorded(session, "a.txt", 6)
        point = await session.checkpoint("before")
        await session.execute_command("echo second >> a.txt; echo new > b.txt")
        await file_recorded(session, "b.txt", 4)
        await session.run("y = 3")
        fork = await session.fork(session_id="branch")
        await fork.run("x = 'of the fork'")
        await recorded(fork, "x", "'of the fork'")
        await session.rewind(point)
        start, one, two, before, now = [await state_at(session, at) for at in ("start", "1", "2", "before", "now")]
        of_fork, fork_at_1 = await state_at(fork, "now"), await state_at(fork, "1")
        diff = await compare_files(session.storage.store, before, of_fork)
        first = await read_text(session.storage.store, "main", before.files["a.txt"][2])
        await fork.close()
    assert (start.variables, start.files, start.at) == ({}, {}, None)
    assert {name: variable.preview for name, variable in one.variables.items()} == {"x": "1", "gone": "2"}
    assert fork_at_1.variables == one.variables, "before the fork, it is what the session was that it comes from"
    assert {name: variable.preview for name, variable in before.variables.items()} == {"x": "[1, 2]"}
    assert before.files.keys() == {"a.txt"}
    assert first == b"first\n"
    assert (now.variables, now.files) == (before.variables, before.files), "a rewind takes both back"
    assert two.files.keys() == {"a.txt"}
    assert of_fork.variables["y"].preview == "3"
    kinds = [(change.name, change.kind) for change in compare_variables(one, of_fork)]
    assert kinds == [("gone", "gone"), ("x", "changed"), ("y", "new")]
    assert [(change.path, change.kind) for change in diff.changes] == [("a.txt", "modified"), ("b.txt", "added")]
    assert " first\n+second\n" in diff.diff
    assert "--- /dev/null\n+++ b/b.txt\n" in diff.diff


async def test_what_changed_in_a_given_workspace(tmp_path: Path) -> None:
    given = tmp_path / "project"
    given.mkdir()
    (given / "kept.py").write_text("a\nb\n")
    (given / "old.py").write_text("old\n")
    (given / "data").write_bytes(b"\0" * 10)
    async with Session.from_base(tmp_path / "base", workspace=given) as session:
        await session.execute_command(
            "sed -i s/b/c/ kept.py; rm old.py; echo more >> data; head -c 70000 /dev/zero > big"
        )
        await file_recorded(session, "big", 70000)
        start, now = await state_at(session, "start"), await state_at(session, "now")
        found = await compare_files(session.storage.store, start, now)
        back = await compare_files(session.storage.store, now, start)
    kinds = {change.path: change.kind for change in found.changes}
    assert kinds == {"kept.py": "modified", "old.py": "deleted", "data": "modified", "big": "added"}
    assert "-b\n+c\n" in found.diff
    assert "-old\n" in found.diff
    assert "The file was modified; its text was not kept." in found.diff
    assert "-c\n+b\n" in back.diff


async def test_a_run_that_is_followed_at_once_is_known_at_the_checkpoint(tmp_path: Path) -> None:
    async with Session.from_base(tmp_path) as session:
        for number in range(5):
            await session.run(f"x = {number}")
        await session.checkpoint("here")
        await session.set_variables(x=9)
        await session.checkpoint("there")
        assert (await state_at(session, "here")).variables["x"].preview == "4"
        assert (await state_at(session, "there")).variables["x"].preview == "9"
        await session.reset()
        assert (await state_at(session, "now")).variables == {}


@pytest.mark.parametrize(("record", "has"), [((), False), (("variables",), True), (("files",), True)])
async def test_it_can_be_switched_off(tmp_path: Path, record: Any, has: bool) -> None:
    async with Session.from_base(tmp_path, record=record) as session:
        await session.run("x = 1\nopen('a', 'w').write('x')")
        await session.checkpoint("c")
        state = await state_at(session, "c") if has else RecordedState("")
        assert (bool(state.variables), bool(state.files)) == ("variables" in record, has and "files" in record)
        assert (await session.storage.store.stamp(states_key(session.id)) is not None) == has


async def test_a_storage_in_memory_records_nothing() -> None:
    async with Session(MemoryStorage()) as session:
        await session.run("x = 1")
        await session.checkpoint("c")
        assert await session.storage.store.stamp(states_key(session.id)) is None


async def test_secrets_are_replaced_as_in_the_conversation(tmp_path: Path) -> None:
    class Storage(FileStorage):
        def get_session_store(self, durability: Any = "os") -> Any:
            return SessionStore(store=self.store, prefix="sessions", redact=redact_secrets)

    key = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
    async with Session(Storage(tmp_path), SubprocessExecutor(SubprocessConfig())) as session:
        session.storage.get_session_store()
        await session.run(f"x = {key!r}\nopen('a', 'w').write(x)")
        await session.checkpoint("c")
        await session.flush_trace()
    folder = tmp_path / "sessions" / session.id
    written = [folder / "states.jsonl", *(folder / "texts").iterdir()]
    assert len(written) == 2
    for path in written:
        assert "[redacted:" in path.read_text()
        assert key not in path.read_text()


async def test_a_fork_does_not_record_the_secrets_of_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARCEL_TOKEN", "correct-horse-battery-1")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "parcel.yaml").write_text(
        "name: parcel\ncommand: echo\nenv: {TOKEN: '${PARCEL_TOKEN}'}\nschema: {positional: [{name: text}]}\n"
    )
    async with Session.from_base(tmp_path) as session:
        await session.run("tools.parcel(text='x')\nx = 'correct-horse-' + 'battery-1'")
        await session.checkpoint("c")
        async with await session.fork() as fork:
            await fork.checkpoint("d")
            assert (await state_at(fork, "d")).variables["x"].preview == "'${PARCEL_TOKEN}'"


async def test_points_that_do_not_exist(tmp_path: Path) -> None:
    async with Session.from_base(tmp_path) as session:
        for text in ("7", "nothing", "\ud800"):
            with pytest.raises(PointNotFound):
                await find_point(session.storage, session.id, text)


async def test_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    async with Session.from_base(tmp_path) as session:
        await session.run("x = 1")
        await session.checkpoint("c")
        await session.flush_trace()
        await session.storage.store.append(states_key(session.id), [b"{broken", b"[]", b'{"at": 1}'])
        assert (await state_at(session, "now")).variables["x"].preview == "1"
