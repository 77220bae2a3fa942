"""The same programs on mycode-sdk and on `carrel.compat.mycode`; each reads what the other wrote."""

from pathlib import Path

import pytest

from tests.compat.originals import downloaded, python_of, run, shim

pytestmark = pytest.mark.real

PROGRAM = """
import asyncio, json, os, sys
from mycode.session import (
    SessionStore, apply_compact, apply_rewind, build_compact_event, build_rewind_event, resolve_sessions_dir,
    should_compact)
from mycode.messages import build_message, flatten_message_text, text_block, tool_result_block, tool_use_block
import mycode.messages as messages

KEYWORDS = dict(provider="openai", model="m", cwd="work/../here", api_base=None)
VARYING = ("created_at", "updated_at")

def show(value):
    text = json.dumps(value, indent=1, sort_keys=True, default=str, ensure_ascii=False)
    print(text.replace(os.getcwd(), "HERE"))

def plain(data):
    if data is None:
        return None
    meta = {key: value for key, value in data["session"].items() if key not in VARYING}
    texts = [dict(each) for each in data["messages"]]
    for each in texts:
        if (each.get("meta") or {}).get("synthetic") and each["role"] == "assistant":
            each["content"] = "acknowledged"  # the wording is free
        for block in each["content"] if isinstance(each["content"], list) else []:
            if block.get("is_error"):
                block["display_text"] = "interrupted"
    return [meta, texts]

async def main():
    store = SessionStore(resolve_sessions_dir())
    show(plain(await store.create_session("Plan", session_id="one", **KEYWORDS)))
    draft = store.draft_session(None, model="m", cwd=".", api_base="http://x")
    show({key: value for key, value in draft["session"].items() if key not in (*VARYING, "id")})
    show(len(draft["session"]["id"]))
    image = messages.image_block("aGk=" * 50_000, mime_type="image/png", name="a.png")
    await store.append_message("one", build_message("user", [text_block("Look\\nat it, größer"), image]), **KEYWORDS)
    await store.append_message("two", build_message("user", [
        text_block("attached", meta={"attachment": True}), text_block("What is\\nthis? " + "x" * 60)]), **KEYWORDS)
    await store.append_message("two", messages.assistant_message(
        [messages.thinking_block("hm"), tool_use_block(tool_id="c", name="bash", input={"command": "ls"})],
        provider="openai", usage={"input_tokens": 7}, native_meta={"a": None, "b": 1}), **KEYWORDS)
    show(plain(await store.load_session("two")))  # an interrupted call
    show(plain(await store.load_session("two")))
    await store.append_message("one", build_message("assistant", [tool_use_block(tool_id="d", name="ls")]), **KEYWORDS)
    long = tool_result_block(
        tool_use_id="d", model_text="line\\n" * 30_000, display_text="short", content=[text_block("part")])
    await store.append_message("one", build_message("user", [long]), **KEYWORDS)
    show(plain(await store.load_session("one")))
    await store.append_rewind("one", 1)
    show(plain(store.load_session_sync("one"))[1][0]["content"][0])
    await store.append_message("one", build_compact_event(
        "all of it", provider="p", model="m", compacted_count=1, usage={"input_tokens": 1}), **KEYWORDS)
    await store.append_message("one", messages.user_text_message("and then?"), **KEYWORDS)
    show(plain(await store.load_session("one")))
    show([each["id"] for each in await store.list_sessions()])
    show([each["id"] for each in await store.list_sessions(cwd="here")])
    show((await store.latest_session(cwd="nowhere")))
    await store.clear_session("two")
    show(plain(await store.load_session("two")))
    await store.append_message("two", {"role": "other", "content": "text"}, **KEYWORDS)
    show(plain(await store.load_session("two")))
    await store.delete_session("two")
    show(await store.load_session("two"))
    await store.clear_session("two")
    await store.append_rewind("two", 3)
    show(sorted(each.name for each in store.data_dir.iterdir() if not each.name.startswith(".")))
    try:
        await store.append_message("one", {"role": "user", "content": {1, 2}}, **KEYWORDS)
    except TypeError:
        show("TypeError")

asyncio.run(main())
asyncio.run(SessionStore().append_message("one", messages.user_text_message("another loop"), **KEYWORDS))
show(plain(SessionStore().load_session_sync("one")))
log = [messages.user_text_message("a"), build_rewind_event(0), messages.user_text_message("b"), {"role": "rewind"}]
show([apply_rewind(log), apply_compact(log) is log, flatten_message_text(log[0])])
show([should_compact({"prompt_tokens": "80"}, 100, 0.8), should_compact({}, 100, 0.8), should_compact(None, None, 1)])
"""

WRITE = """
import asyncio
from mycode.session import SessionStore, build_compact_event
from mycode.messages import *
from mycode.messages import image_block, tool_use_block, tool_result_block, build_message, user_text_message
KEYWORDS = dict(provider="p", model="m", cwd="/tmp", api_base=None)
async def main():
    store = SessionStore()
    long = tool_result_block(tool_use_id="c", model_text="line\\n" * 30_000, display_text="d" * 90_000)
    for message in [
        user_text_message("gone"),
        build_compact_event("before", provider="p", model="m", compacted_count=1),
        build_message("user", [image_block("aGk=" * 60_000, mime_type="image/png")]),
        user_text_message("größer"),
        build_message("assistant", [tool_use_block(tool_id="c", name="bash")]),
        build_message("user", [long]),
        user_text_message("taken back"),
    ]:
        await store.append_message("s", message, **KEYWORDS)
    await store.append_rewind("s", 6)
    (store.session_dir("s") / "tool-output" / "bash-1.log").write_text("the whole output")
asyncio.run(main())
"""

READ = """
import asyncio, hashlib, json
from mycode.session import SessionStore
store = SessionStore()
data = asyncio.run(store.load_session("s"))
meta = data["session"]
print([meta[key] for key in ("id", "title", "provider", "model", "cwd", "created_at", "message_format_version")])
for message in data["messages"]:
    if not message.get("meta", {}).get("synthetic") or message["role"] == "user":
        text = json.dumps(message, sort_keys=True)
        print(message["role"], len(text), hashlib.sha256(text.encode()).hexdigest())
print((store.session_dir("s") / "tool-output" / "bash-1.log").read_text())
"""


def on_original(program: str, folder: Path) -> list[str]:
    package = downloaded("mycode-sdk==0.4.2")
    return run(shim(package, "mycode") + program, folder, python_of("3.12"), MYCODE_HOME=str(folder / "home"))


def on_carrel(program: str, folder: Path) -> list[str]:
    changed = program.replace("from mycode", "from carrel.compat.mycode").replace(
        "import mycode.messages as", "import carrel.compat.mycode.messages as"
    )
    return run(changed, folder, MYCODE_HOME=str(folder / "home"))


def test_a_program_prints_the_same(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    (tmp_path / "carrel").mkdir()
    wanted = on_original(PROGRAM, tmp_path / "original")
    assert len(wanted) > 200
    assert on_carrel(PROGRAM, tmp_path / "carrel") == wanted


@pytest.mark.parametrize(("write", "read"), [(on_original, on_carrel), (on_carrel, on_original)])
def test_each_reads_what_the_other_wrote(write, read, tmp_path: Path) -> None:
    write(WRITE, tmp_path)
    mine = write(READ, tmp_path)
    theirs = read(READ, tmp_path)
    assert theirs == mine
    assert len(theirs) == 7
    assert theirs[-1] == "the whole output"
