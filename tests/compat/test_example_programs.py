"""A program for each package runs on carrel after its import line was changed, and nothing else."""

import sys
from pathlib import Path

import pytest

from tests.compat.originals import run
from tests.support.server_process import ServerProcess

CODE_MODE = """
import asyncio, pathlib
from py_code_mode import FileStorage, Session, SubprocessConfig, SubprocessExecutor

async def main():
    tools = pathlib.Path("tools")
    tools.mkdir()
    (tools / "echo.yaml").write_text('''
name: echo
description: Print words
command: echo
schema: {positional: [{name: text, type: string, required: true}]}
recipes: {say: {description: Print a text, params: {text: {}}}}
''')
    storage = FileStorage(base_path=pathlib.Path("data"))
    executor = SubprocessExecutor(config=SubprocessConfig(tools_path=tools))
    async with Session(storage=storage, executor=executor) as session:
        found = await session.search_tools("print", limit=10)
        print(found[0]["name"], found[0]["callables"][0]["name"])
        source = "async def run(word: str) -> str:\\n    return tools.echo.say(text=word).strip() * 2\\n"
        await session.add_skill("twice", source, "Say a word twice")
        result = await session.run("word = 'ab'\\nskills.twice(word=word)")
        print(result.is_ok, result.value)
        failed = await session.run("1 / 0")
        print(failed.is_ok, "ZeroDivisionError" in failed.error)
        await session.save_artifact("report.json", {"word": "ab"}, "What was said")
        print(await session.load_artifact("report.json"), [each["name"] for each in await session.list_artifacts()])
        print(session.supports("timeout"), (await session.run("word")).value)

asyncio.run(main())
"""
CHAT = """
import asyncio
from mycode.session import SessionStore, build_compact_event, build_message, should_compact, text_block

where = dict(provider="openai", model="m", cwd=".", api_base=None)

async def main():
    store = SessionStore()
    draft = store.draft_session(None, **where)
    id = draft["session"]["id"]
    for number in range(3):
        await store.append_message(id, build_message("user", [text_block(f"question {number}")]), **where)
        await store.append_message(id, build_message("assistant", [text_block(f"answer {number}")]), **where)
    await store.append_rewind(id, 4)
    print([m["content"][0]["text"] for m in (await store.load_session(id))["messages"]])
    if should_compact({"input_tokens": 900}, 1000, 0.8):
        await store.append_message(id, build_compact_event(
            "two questions", provider="openai", model="m", compacted_count=4), **where)
    await store.append_message(id, build_message("user", [text_block("and now?")]), **where)
    data = await store.load_session(id)
    print([m["role"] for m in data["messages"]], data["messages"][0]["content"][0]["text"])
    print((await store.latest_session())["title"], store.messages_path(id).exists())

asyncio.run(main())
"""
TYPED = """
import asyncio, pathlib
from oats.session.session import bus, create_session, EventType, get_session, get_session_storage, list_sessions

async def main():
    events = []

    async def note(event):
        events.append((str(event.type.value if hasattr(event.type, "value") else event.type), sorted(event.data)))

    for kind in (EventType.SESSION_CREATED, EventType.SESSION_UPDATED, EventType.SESSION_DELETED):
        bus.subscribe(kind, note)
    session = await create_session(pathlib.Path("."), title="Reading", model_id="m", provider_id="p")
    session.create_user_message("look", images=[{"media_type": "image/png", "data": "aGkh"}])
    answer = session.create_assistant_message()
    answer.add_tool_call("1", "read", {"path": "a.txt"})
    answer.add_tool_result("1", "read", "a.txt", "milk")
    session.add_usage({"total_tokens": 40})
    await get_session_storage().update(session)
    again = await get_session(session.id)
    print(again == session, again.info.total_tokens, [len(message.parts) for message in again.messages])
    print(again.get_messages_for_llm()[0]["content"][1]["type"], [info.title for info in await list_sessions()])
    await get_session_storage().delete(session.id)
    print(events)

asyncio.run(main())
"""
TASK = """
import time
from codeset import Codeset

client = Codeset()
session = client.sessions.create(dataset="demo", sample_id="calc-1")
print(client.sessions.execute_command(session_id=session.session_id, command="echo hello").stdout)
job = client.sessions.verify.start(session_id=session.session_id)
while True:
    status = client.sessions.verify.status(job_id=job.job_id, session_id=session.session_id)
    if status.status in ("completed", "error", "cancelled"):
        break
    time.sleep(0.1)
print(status.status, status.result.is_success)
client.sessions.close(session_id=session.session_id)
"""
PROGRAMS = {
    "py_code_mode": (
        CODE_MODE,
        ["echo say", "True abab", "False True", "{'word': 'ab'} ['report.json']", "True ab"],
    ),
    "mycode": (
        CHAT,
        [
            "['question 0', 'answer 0', 'question 1', 'answer 1']",
            "['user', 'assistant', 'user'] [Conversation Summary]",
            "",
            "two questions",
            "question 0 True",
        ],
    ),
    "oats": (
        TYPED,
        [
            "True 40 [2, 2]",
            "image_url ['Reading']",
            "[('session.created', ['session_id', 'title']), ('session.updated', ['session_id']), "
            "('session.deleted', ['session_id'])]",
        ],
    ),
    "codeset": (TASK, ["hello", "", "completed False"]),
}


@pytest.mark.parametrize("package", PROGRAMS)
def test_a_program_runs_with_one_changed_line(package: str, tmp_path: Path, server: ServerProcess) -> None:
    program, wanted = PROGRAMS[package]
    lines = program.splitlines()
    changed = [line.replace(f"from {package}", f"from carrel.compat.{package}") for line in lines]
    assert sum(one != other for one, other in zip(lines, changed, strict=True)) == 1
    settings = {"MYCODE_HOME": str(tmp_path / "home"), "CODER_DATA_DIR": str(tmp_path / "data")}
    settings |= {"CODESET_BASE_URL": server.url, "CODESET_API_KEY": server.key}
    assert run("\n".join(changed), tmp_path, sys.executable, **settings) == wanted
