"""The same programs on oats-coder and on `carrel.compat.oats`; each reads what the other wrote."""

from pathlib import Path

import pytest

from tests.compat.originals import downloaded, run, shim

pytestmark = pytest.mark.real

PROGRAM = """
import asyncio, json, os, re
from pathlib import Path
from oats.session.session import (
    Session, SessionInfo, SessionStorage, SessionTime, create_session, get_session, get_session_storage, list_sessions)
from oats.session.message import Message
from oats.core.bus import bus, Event, EventType
from oats.core.storage import Storage, StorageError
from oats.core.id import generate_id, generate_short_id
from oats.date import utc

def show(value):
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    text = json.dumps(value, indent=1, sort_keys=True, default=str)
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text)
    print(re.sub(r"20\\\\d\\\\d-\\\\d\\\\d-\\\\d\\\\dT[0-9:.]+(Z|\\\\+00:00)", "TIME", text))

async def on_any(event):
    show([str(event.type).lower().replace("_", ".").replace("eventtype.", ""), event.data])

async def main():
    stop = bus.subscribe_all(on_any)
    session = await create_session(Path("project"), title="Work", model_id="m", provider_id="p")
    show(session)
    session.create_system_message("be brief")
    session.create_user_message("look", images=[
        {"media_type": "image/png", "data": "aGkh" * 20_000}, {"media_type": "image/jpeg", "url": "http://x"}])
    answer = session.create_assistant_message()
    answer.add_text("one")
    answer.add_text("two")
    answer.add_tool_call("c", "bash", {})
    answer.add_tool_result("c", "bash", "List", "line\\\\n" * 20_000, metadata={"exit": 0})
    session.create_assistant_message()
    session.create_user_message("")
    session.add_usage({"total_tokens": 12, "input_tokens": 10})
    session.add_usage({"input_tokens": 10})
    session.update_title("Renamed")
    show(session.get_messages_for_llm())
    await get_session_storage().update(session)
    again = await get_session(session.id)
    show(again)
    print(again == session, again.get_messages_for_llm() == session.get_messages_for_llm())
    again.info.message_count = 99
    again.messages[2].parts.pop()
    again.messages.pop(0)
    again.messages[0].usage = {"total_tokens": 3}
    again.info.time.updated = utc()
    await SessionStorage().update(again)
    show(await get_session(again.id))
    print(await get_session(again.id) == again)
    new = Session(info=SessionInfo(project_dir="/a", working_dir="./b", time=SessionTime(archived=utc())))
    await get_session_storage().update(new)
    print(await get_session(new.id) == new, sorted(info.title for info in await list_sessions()))
    print(len(await SessionStorage().list()))
    try:
        await get_session_storage().create(new)
    except StorageError:
        print("StorageError")
    print(await get_session_storage().delete(new.id), await get_session_storage().delete(new.id))
    print(await get_session(new.id))
    stop()
    for wrong in ({"role": "tool", "session_id": "s"}, {"role": "user"},
                  {"role": "user", "session_id": "s", "parts": [{"type": "video"}]}):
        try:
            Message.model_validate(wrong)
        except ValueError as problem:
            print(type(problem).__name__)
    notes = Storage("notes", SessionTime)
    await notes.create("1", SessionTime(created="2020-01-01T00:00:00Z", updated="2020-01-01T00:00:00Z"))
    print((notes.storage_dir / "1.json").read_text(), await notes.list_ids(), await notes.read("2"))
    print(len(generate_id()), len(generate_short_id()))

asyncio.run(main())
""".replace("\\\\", "\\")

WRITE = """
import asyncio
from pathlib import Path
from oats.session.session import create_session, get_session_storage
async def main():
    session = await create_session(Path("/project"), title="theirs")
    session.create_user_message("look", images=[{"media_type": "image/png", "data": "aGk=" * 50_000}])
    answer = session.create_assistant_message()
    answer.add_tool_call("c", "bash", {"a": [1, None]})
    answer.add_tool_result("c", "bash", "List", "line\\n" * 30_000)
    session.add_usage({"total_tokens": 5})
    await get_session_storage().update(session)
    Path("session.json").write_text(session.model_dump_json(indent=2))
asyncio.run(main())
"""

READ = """
import asyncio
from pathlib import Path
from oats.session.session import Session, get_session, list_sessions
wanted = Session.model_validate_json(Path("session.json").read_text())
async def main():
    [info] = await list_sessions()
    print(info == wanted.info, await get_session(info.id) == wanted)
asyncio.run(main())
"""

READ_FILE = """
import json
from pathlib import Path
from oats.session.session import Session
text = Path("session.json").read_text()
print(json.loads(Session.model_validate_json(text).model_dump_json()) == json.loads(text))
"""


def on_original(program: str, folder: Path) -> list[str]:
    package = downloaded(
        "oats-coder==1.0.19", "aiofiles", "pydantic-settings", "python-dotenv", "typing-inspection", "ujson"
    )
    (folder / "coder.json").write_text("{}")
    settings = {"CODER_DATA_DIR": str(folder / "data"), "CODER_CONFIG_FILE": str(folder / "coder.json")}
    return run(shim(package, "oats", "oats.session", "oats.core", site=True) + program, folder, **settings)


def on_carrel(program: str, folder: Path) -> list[str]:
    return run(program.replace("from oats.", "from carrel.compat.oats."), folder, CODER_DATA_DIR=str(folder / "data"))


def test_a_program_prints_the_same(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    (tmp_path / "carrel").mkdir()
    wanted = on_original(PROGRAM, tmp_path / "original")
    assert len(wanted) > 200
    printed = [line.replace('"{}"', "ARGUMENTS") for line in on_carrel(PROGRAM, tmp_path / "carrel")]
    assert printed == [line.replace('"{}"', "ARGUMENTS") for line in wanted]


def test_sessions_of_the_original_are_read(tmp_path: Path) -> None:
    on_original(WRITE, tmp_path)
    assert on_carrel(READ, tmp_path) == on_original(READ, tmp_path) == ["True True"]


def test_the_original_reads_a_session_written_as_json(tmp_path: Path) -> None:
    on_carrel(WRITE, tmp_path)
    assert on_carrel(READ, tmp_path) == ["True True"]
    assert on_original(READ_FILE, tmp_path) == on_carrel(READ_FILE, tmp_path) == ["True"]
