"""`carrel.compat.mycode` has the names, signatures and behavior of mycode-sdk 0.4.2."""

import asyncio
import base64
import dataclasses
import importlib
import inspect
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import carrel
from carrel.compat import mycode
from carrel.compat.mycode import messages, session
from carrel.compat.mycode.messages import build_message, text_block, tool_result_block, tool_use_block
from carrel.compat.mycode.session import SessionStore, apply_compact, apply_rewind
from carrel.errors import RewindRefused, SessionExists, SessionIdRefused
from tests.compat.signatures import plain_signature, unchecked

KEYWORDS: dict[str, Any] = {"provider": "p", "model": "m", "cwd": "/tmp", "api_base": None}


def user(text: str) -> dict[str, Any]:
    return messages.user_text_message(text)


def call(id_: str) -> dict[str, Any]:
    return build_message("assistant", [tool_use_block(tool_id=id_, name="bash", input={"command": "ls"})])


def result(id_: str, text: str) -> dict[str, Any]:
    return build_message("user", [tool_result_block(tool_use_id=id_, model_text=text, display_text=text)])


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


def lines(store: SessionStore, session_id: str) -> list[dict[str, Any]]:
    return list(map(json.loads, store.messages_path(session_id).read_text(encoding="utf-8").splitlines()))


def meta(store: SessionStore, session_id: str) -> dict[str, Any]:
    return dict(json.loads(store.meta_path(session_id).read_text(encoding="utf-8")))


async def loaded(store: SessionStore, session_id: str) -> list[dict[str, Any]]:
    data = await store.load_session(session_id)
    assert data is not None
    assert set(data) == {"session", "messages"}
    return data["messages"]


# --- imports and signatures ------------------------------------------------------------------------------------------

NAMES = {
    "session": (
        "SessionStore SessionMeta SessionMetaDict SessionData should_compact build_compact_event apply_compact "
        "build_rewind_event apply_rewind resolve_mycode_home resolve_sessions_dir COMPACT_SUMMARY_PROMPT "
        "MESSAGE_FORMAT_VERSION DEFAULT_SESSION_PROVIDER DEFAULT_SESSION_TITLE DEFAULT_COMPACT_THRESHOLD"
    ),
    "messages": (
        "ConversationMessage build_message flatten_message_text text_block tool_result_block ContentBlock "
        "thinking_block image_block document_block tool_use_block user_text_message assistant_message"
    ),
}


def test_the_names_are_where_programs_import_them() -> None:
    for module, names in NAMES.items():
        found = importlib.import_module(f"carrel.compat.mycode.{module}")
        assert [name for name in names.split() if not hasattr(found, name)] == []
    for name in [*NAMES["messages"].split(), "SessionStore"]:
        assert hasattr(mycode, name)


def test_the_constants() -> None:
    assert session.MESSAGE_FORMAT_VERSION == 5
    assert session.DEFAULT_SESSION_PROVIDER == "anthropic"
    assert session.DEFAULT_SESSION_TITLE == "New chat"
    assert session.DEFAULT_COMPACT_THRESHOLD == 0.8
    assert "next" in session.COMPACT_SUMMARY_PROMPT.lower()
    assert messages.ConversationMessage == messages.ContentBlock == dict[str, Any]
    assert session.SessionMetaDict == dict[str, object]


def test_the_types() -> None:
    assert list(session.SessionData.__annotations__) == ["session", "messages"]
    fields = dataclasses.fields(session.SessionMeta)
    names = [
        "id",
        "title",
        "provider",
        "model",
        "cwd",
        "api_base",
        "message_format_version",
        "created_at",
        "updated_at",
    ]
    assert [field.name for field in fields] == names
    assert all(field.default is dataclasses.MISSING for field in fields)
    assert dataclasses.is_dataclass(SessionStore)


@pytest.mark.parametrize(
    "name", ["Agent", "Event", "tool", "ToolSpec", "read_tool", "write_tool", "edit_tool", "bash_tool"]
)
def test_names_without_a_counterpart_say_why(name: str) -> None:
    with pytest.raises(ImportError, match=name):
        getattr(mycode, name)
    with pytest.raises(ImportError, match="carrel"):
        exec(f"from carrel.compat.mycode import {name}")
    assert not hasattr(mycode, "unknown")


CREATE = "session_id=None, provider='anthropic', model, cwd, api_base"
FILE = "(data, *, mime_type, name=None, meta=None)"
SIGNATURES = {
    session.should_compact: "(last_usage, context_window, threshold)",
    session.build_compact_event: "(summary_text, *, provider, model, compacted_count, usage=None)",
    session.apply_compact: "(messages)",
    session.apply_rewind: "(messages)",
    session.build_rewind_event: "(rewind_to)",
    session.resolve_mycode_home: "()",
    session.resolve_sessions_dir: "()",
    messages.text_block: "(text, *, meta=None)",
    messages.thinking_block: "(text, *, meta=None)",
    messages.user_text_message: "(text, *, meta=None)",
    messages.image_block: FILE,
    messages.document_block: FILE,
    messages.tool_use_block: "(*, tool_id, name, input=None, meta=None)",
    messages.tool_result_block: ("(*, tool_use_id, model_text, display_text, is_error=False, content=None, meta=None)"),
    messages.build_message: "(role, blocks, *, meta=None)",
    messages.flatten_message_text: "(message, *, include_thinking=True)",
    messages.assistant_message: (
        "(blocks, *, provider=None, model=None, provider_message_id=None, stop_reason=None, usage=None, "
        "native_meta=None)"
    ),
    SessionStore.create_session: f"(title, *, {CREATE})",
    SessionStore.draft_session: "(title, *, provider='anthropic', model, cwd, api_base)",
    SessionStore.append_message: "(session_id, message, *, provider, model, cwd, api_base)",
    SessionStore.append_rewind: "(session_id, rewind_to)",
    SessionStore.load_session: "(session_id)",
    SessionStore.load_session_sync: "(session_id)",
    SessionStore.list_sessions: "(*, cwd=None)",
    SessionStore.latest_session: "(*, cwd=None)",
    SessionStore.clear_session: "(session_id)",
    SessionStore.delete_session: "(session_id)",
    SessionStore.session_dir: "(session_id)",
    SessionStore.meta_path: "(session_id)",
    SessionStore.messages_path: "(session_id)",
}


@pytest.mark.parametrize(("function", "wanted"), SIGNATURES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_signatures(function: Any, wanted: str) -> None:
    assert plain_signature(function) == wanted


def test_every_signature_is_checked() -> None:
    assert unchecked(SIGNATURES, SessionStore) == []
    for module, names in NAMES.items():
        assert unchecked(SIGNATURES, importlib.import_module(f"carrel.compat.mycode.{module}"), names=names) == []


def test_which_methods_are_plain_calls() -> None:
    plain = {"session_dir", "meta_path", "messages_path", "draft_session", "load_session_sync"}
    methods = {name: method for name, method in vars(SessionStore).items() if inspect.isfunction(method)}
    public = {name for name in methods if not name.startswith("_")}
    assert {name for name in public if not inspect.iscoroutinefunction(methods[name])} == plain
    assert list(inspect.signature(SessionStore).parameters) == ["data_dir"]


# --- blocks and messages ---------------------------------------------------------------------------------------------


def test_the_keys_of_blocks() -> None:
    given = {"a": 1}
    assert text_block("t") == {"type": "text", "text": "t"}
    assert messages.thinking_block("t", meta=given) == {"type": "thinking", "text": "t", "meta": {"a": 1}}
    for build, kind in ((messages.image_block, "image"), (messages.document_block, "document")):
        assert build("ZGF0YQ==", mime_type="x/y") == {"type": kind, "data": "ZGF0YQ==", "mime_type": "x/y"}
        assert build("", mime_type="x/y", name="n")["name"] == "n"
        assert "name" not in build("", mime_type="x/y", name="", meta={})
    assert tool_use_block(tool_id="1", name="n") == {"type": "tool_use", "id": "1", "name": "n", "input": {}}
    inner = [text_block("inner")]
    block = tool_result_block(tool_use_id="1", model_text="m", display_text="d", content=inner, meta=given)
    assert block.pop("content") == inner
    assert block == {
        "type": "tool_result",
        "tool_use_id": "1",
        "model_text": "m",
        "display_text": "d",
        "is_error": False,
        "meta": {"a": 1},
    }
    assert block["meta"] is not given
    assert "content" not in tool_result_block(tool_use_id="1", model_text="m", display_text="d", content=[])


@pytest.mark.parametrize(
    "build",
    [
        lambda **more: text_block("t", **more),
        lambda **more: messages.thinking_block("t", **more),
        lambda **more: messages.image_block("ZA==", mime_type="x/y", **more),
        lambda **more: messages.document_block("ZA==", mime_type="x/y", **more),
        lambda **more: tool_use_block(tool_id="1", name="n", **more),
        lambda **more: tool_result_block(tool_use_id="1", model_text="m", display_text="d", **more),
        lambda **more: build_message("user", [], **more),
        lambda **more: messages.user_text_message("t", **more),
    ],
)
def test_meta_is_a_shallow_copy(build: Any) -> None:
    given = {"a": [1]}
    meta = build(meta=given)["meta"]
    assert meta == given
    assert meta is not given
    assert meta["a"] is given["a"]
    assert "meta" not in build()
    assert "meta" not in build(meta={})


def test_the_keys_of_messages() -> None:
    assert build_message("user", [], meta={}) == {"role": "user", "content": []}
    assert messages.assistant_message([]) == {"role": "assistant", "content": []}
    message = messages.assistant_message(
        [],
        provider="p",
        model="m",
        provider_message_id="1",
        stop_reason="end",
        usage={},
        native_meta={"a": None, "b": 1},
    )
    assert message["meta"] == {
        "provider": "p",
        "model": "m",
        "provider_message_id": "1",
        "stop_reason": "end",
        "usage": {},
        "native": {"b": 1},
    }


def test_the_keys_of_events() -> None:
    event = session.build_compact_event("s", provider="p", model="m", compacted_count=2)
    assert event == {
        "role": "compact",
        "content": [{"type": "text", "text": "s"}],
        "meta": {"provider": "p", "model": "m", "compacted_count": 2},
    }
    with_usage = session.build_compact_event("s", provider="p", model="m", compacted_count=2, usage={})
    assert with_usage["meta"]["usage"] == {}
    rewind = session.build_rewind_event(3)
    assert set(rewind) == {"role", "meta"}
    assert set(rewind["meta"]) == {"rewind_to", "created_at"}
    assert datetime.fromisoformat(rewind["meta"]["created_at"]).tzinfo == UTC


def test_flatten() -> None:
    attached = text_block("contents", meta={"attachment": True})
    message = build_message("user", [attached, text_block(" a \n"), messages.thinking_block("b"), text_block("  ")])
    assert messages.flatten_message_text(message) == "a b"
    assert messages.flatten_message_text(message, include_thinking=False) == "a"
    assert messages.flatten_message_text({"role": "rewind"}) == ""


# --- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["create", "append"])
async def test_disk(store: SessionStore, how: str) -> None:
    assert store.data_dir.is_dir()
    if how == "create":
        await store.create_session("t", session_id="a", **KEYWORDS)
    await store.append_message("a", user("größer \u2713"), **KEYWORDS)
    folder = store.session_dir("a")
    assert folder == store.data_dir / "a"
    assert (folder / "tool-output").is_dir()
    assert store.meta_path("a").read_text(encoding="utf-8").startswith('{\n  "id": "a"')
    assert "größer \u2713" in store.messages_path("a").read_text(encoding="utf-8")


def test_one_store_serves_several_loops_and_threads(store: SessionStore) -> None:
    for number in range(3):
        asyncio.run(store.append_message("a", user(f"loop {number}"), **KEYWORDS))
    threads = [
        threading.Thread(target=lambda n=n: asyncio.run(store.append_message("a", user(f"{n}"), **KEYWORDS)))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = store.load_session_sync("a")
    assert data is not None
    assert len(data["messages"]) == 6
    assert data["messages"][2] == user("loop 2")


async def test_values(store: SessionStore) -> None:
    data = await store.create_session("", model="m", cwd=".", api_base="http://x")
    found = session.SessionMeta(**data["session"])  # type: ignore[arg-type]
    assert len(found.id) == 32
    assert found.title == "New chat"
    assert found.provider == "anthropic"
    assert found.cwd == os.getcwd()
    assert found.api_base == "http://x"
    assert found.message_format_version == 5
    assert datetime.fromisoformat(found.created_at).tzinfo == UTC
    assert data["messages"] == []
    assert (await store.create_session(None, model="m", cwd="", api_base=None))["session"]["cwd"] == os.getcwd()
    [latest, _] = await store.list_sessions()
    session.SessionMeta(**latest)  # type: ignore[arg-type]


async def test_create(store: SessionStore) -> None:
    first = await store.create_session("t", session_id="", **KEYWORDS)
    assert len(str(first["session"]["id"])) == 32
    given = await store.create_session("t", session_id="mine", **KEYWORDS)
    assert given["session"]["id"] == "mine"


async def test_draft(store: SessionStore) -> None:
    draft = store.draft_session("Planned", model="m", cwd="/tmp", api_base=None)
    id_ = str(draft["session"]["id"])
    assert draft["session"]["title"] == "Planned"
    assert await store.load_session(id_) is None
    assert list(store.data_dir.glob("*/meta.json")) == []
    await store.append_message(id_, call("c"), **KEYWORDS)
    assert meta(store, id_)["title"] == "New chat"


async def test_append(store: SessionStore) -> None:
    odd = {"role": "moderator", "content": "text", "extra": {"deep": [1, None, 2.5]}}
    before = json.dumps(odd)
    await store.append_message("a", odd, **KEYWORDS)
    assert json.dumps(odd) == before
    assert lines(store, "a") == [odd]
    first = meta(store, "a")
    await store.append_message("a", user("x"), provider="other", model="other", cwd="/other", api_base="other")
    second = meta(store, "a")
    assert second["updated_at"] > first["updated_at"]
    assert {key: second[key] for key in KEYWORDS} == KEYWORDS


async def test_title(store: SessionStore) -> None:
    attached = text_block("attached", meta={"attachment": True})
    await store.append_message("a", call("c"), **KEYWORDS)
    await store.append_message("a", build_message("user", [attached]), **KEYWORDS)
    assert meta(store, "a")["title"] == "New chat"
    await store.append_message("a", build_message("user", [attached, text_block("one\ntwo " + "x" * 60)]), **KEYWORDS)
    assert meta(store, "a")["title"] == ("one two " + "x" * 60)[:48]
    await store.append_message("a", user("later"), **KEYWORDS)
    assert meta(store, "a")["title"].startswith("one two")
    thought = build_message("user", [messages.thinking_block("a thought"), text_block(" words ")])
    await store.append_message("b", thought, **KEYWORDS)
    assert meta(store, "b")["title"] == "words"


async def test_a_title_of_another_program_is_seen_at_once(store: SessionStore) -> None:
    await store.create_session(None, session_id="a", **KEYWORDS)
    store.meta_path("a").write_text(json.dumps({**meta(store, "a"), "title": "theirs"}), encoding="utf-8")
    await store.append_message("a", user("mine"), **KEYWORDS)
    assert meta(store, "a")["title"] == "theirs"
    assert (await store.list_sessions())[0]["title"] == "theirs"


async def test_list(store: SessionStore, tmp_path: Path) -> None:
    assert await store.list_sessions() == []
    assert await store.latest_session() is None
    for id_ in ("a", "b", "c"):
        await store.create_session(None, session_id=id_, model="m", cwd=str(tmp_path / id_), api_base=None)
    await store.append_message("b", user("newest"), **KEYWORDS)
    (store.data_dir / "no-meta").mkdir()
    (store.data_dir / "file").write_text("")
    assert [each["id"] for each in await store.list_sessions()] == ["b", "c", "a"]
    assert [each["id"] for each in await store.list_sessions(cwd="")] == ["b", "c", "a"]
    assert [each["id"] for each in await store.list_sessions(cwd=str(tmp_path / "x" / ".." / "a"))] == ["a"]
    latest = await store.latest_session()
    assert latest is not None
    assert latest["id"] == "b"


async def test_load(store: SessionStore) -> None:
    assert await store.load_session("none") is None
    assert store.load_session_sync("none") is None
    (store.data_dir / "half").mkdir()
    store.messages_path("half").write_text(json.dumps(user("x")) + "\n")
    assert await store.load_session("half") is None
    assert store.load_session_sync("half") is None
    await store.append_message("a", user("one"), **KEYWORDS)
    with store.messages_path("a").open("a") as log:
        log.write("{broken\n[1]\n\n")
    await store.append_message("a", user("two"), **KEYWORDS)
    assert await loaded(store, "a") == [user("one"), user("two")]


async def test_compact(store: SessionStore) -> None:
    log = [user("a"), session.build_compact_event("s", provider="p", model="m", compacted_count=1), user("b")]
    plain = [user("a")]
    assert apply_compact(plain) is plain
    for message in log:
        await store.append_message("a", message, **KEYWORDS)
    assert await loaded(store, "a") == apply_compact(log)
    summary, acknowledgement, rest = apply_compact(log)
    assert summary["content"] == [text_block("[Conversation Summary]\n\ns")]
    assert (summary["role"], acknowledgement["role"]) == ("user", "assistant")
    assert summary["meta"] == acknowledgement["meta"] == {"synthetic": True}
    assert rest == user("b")
    assert apply_compact([{"role": "compact"}])[0]["content"] == [text_block("[Conversation Summary]\n\n")]


async def test_rewind(store: SessionStore) -> None:
    log: list[dict[str, Any]] = [
        user("a"),
        user("b"),
        session.build_rewind_event(1),
        user("c"),
        {"role": "rewind"},
        user("d"),
    ]
    assert apply_rewind(log[:4]) == [user("a"), user("c")]
    assert apply_rewind(log) == [user("d")]
    for message in log:
        await store.append_message("a", message, **KEYWORDS)
    assert await loaded(store, "a") == [user("d")]
    before = meta(store, "a")["updated_at"]
    await store.append_message("a", user("e"), **KEYWORDS)
    await store.append_rewind("a", 1)
    assert await loaded(store, "a") == [user("d")]
    assert meta(store, "a")["updated_at"] > before


async def test_repair(store: SessionStore) -> None:
    await store.append_message("a", user("list"), **KEYWORDS)
    await store.append_message("a", call("c"), **KEYWORDS)
    before = meta(store, "a")["updated_at"]
    repair = (await loaded(store, "a"))[-1]
    assert set(repair) == {"role", "content"}
    [block] = repair["content"]
    assert set(block) == {"type", "tool_use_id", "model_text", "display_text", "is_error"}
    assert (block["tool_use_id"], block["model_text"], block["is_error"]) == (
        "c",
        "error: tool call was interrupted",
        True,
    )
    assert meta(store, "a")["updated_at"] > before
    assert (await loaded(store, "a"))[-1] == repair
    assert len(lines(store, "a")) == 3


async def test_an_unrepaired_session_loads_without_await_in_a_running_loop(store: SessionStore) -> None:
    await store.append_message("a", call("c"), **KEYWORDS)
    data = store.load_session_sync("a")
    assert data is not None
    assert data["messages"][-1]["content"][0]["is_error"]
    assert len(lines(store, "a")) == 1  # written by the next load_session


@pytest.mark.parametrize("name", ["input_tokens", "prompt_tokens", "prompt_token_count"])
def test_should_compact(name: str) -> None:
    assert session.should_compact({name: 80}, 100, 0.8)
    assert session.should_compact({name: "80"}, 100, 0.8)
    assert not session.should_compact({name: 79}, 100, 0.8)
    assert not session.should_compact({name: 80}, None, 0.8)
    assert not session.should_compact({name: 80}, 100, 0)
    assert not session.should_compact(None, 100, 0.8)
    assert not session.should_compact({}, 100, 0.8)


async def test_unknown_ids(store: SessionStore) -> None:
    await store.append_rewind("unknown", 1)
    await store.clear_session("unknown")
    await store.delete_session("unknown")
    assert not store.session_dir("unknown").exists()


async def test_clear(store: SessionStore) -> None:
    await store.append_message("a", user("the title"), **KEYWORDS)
    before = meta(store, "a")
    await store.clear_session("a")
    assert await loaded(store, "a") == []
    after = meta(store, "a")
    assert after["updated_at"] > before["updated_at"]
    assert (after["title"], after["created_at"]) == ("the title", before["created_at"])
    updated = after["updated_at"]
    await store.clear_session("a")  # of an empty one
    assert meta(store, "a")["updated_at"] > updated
    await store.append_message("a", user("new"), **KEYWORDS)
    assert await loaded(store, "a") == [user("new")]


async def test_delete(store: SessionStore) -> None:
    await store.append_message("a", user("x"), **KEYWORDS)
    (store.session_dir("a") / "tool-output" / "bash.log").write_text("theirs")
    await store.delete_session("a")
    assert not store.session_dir("a").exists()
    await store.append_message("a", user("y"), **KEYWORDS)
    assert await loaded(store, "a") == [user("y")]


async def test_images_and_long_outputs_stay_in_the_line(store: SessionStore) -> None:
    data = base64.b64encode(bytes(range(256)) * 400).decode()
    image = build_message("user", [messages.image_block(data, mime_type="image/png")])
    long = result("c", "line\n" * 30_000)
    for message in (image, call("c"), long):
        await store.append_message("a", message, **KEYWORDS)
    assert lines(store, "a") == [image, call("c"), long]
    assert await loaded(store, "a") == [image, call("c"), long]


async def test_values_that_json_has_not(store: SessionStore) -> None:
    with pytest.raises(TypeError, match="JSON"):
        await store.append_message("a", {"role": "user", "content": [object()]}, **KEYWORDS)
    assert await store.load_session("a") is None


def test_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYCODE_HOME", str(tmp_path / "x" / ".." / "home"))
    assert session.resolve_mycode_home() == tmp_path / "home"
    assert SessionStore().data_dir == tmp_path / "home" / "sessions"
    monkeypatch.setenv("MYCODE_HOME", "~/chats")
    assert session.resolve_mycode_home() == Path.home() / "chats"
    monkeypatch.delenv("MYCODE_HOME")
    assert session.resolve_sessions_dir() == Path.home() / ".mycode" / "sessions"


# --- differences that stay (docs/moving-from-mycode.md) ------------------------------------------------------------


async def test_what_differs_on_purpose(store: SessionStore) -> None:
    await store.append_message("a", user("x"), **KEYWORDS)
    with pytest.raises(SessionExists):
        await store.create_session("t", session_id="a", **KEYWORDS)
    with pytest.raises(RewindRefused):
        await store.append_rewind("a", 5)
    with pytest.raises(SessionIdRefused):
        await store.append_message("../a", user("x"), **KEYWORDS)
    with pytest.raises(ValueError, match="role"):
        await store.append_message("a", {"content": []}, **KEYWORDS)
    store.meta_path("a").write_text("{broken")
    assert await loaded(store, "a") == [user("x")]
    assert [each["id"] for each in await store.list_sessions()] == ["a"]


async def test_carrel_reads_what_the_module_writes(store: SessionStore) -> None:
    long = result("c", "line\n" * 30_000)
    for message in (user("x"), call("c"), long):
        await store.append_message("a", message, **KEYWORDS)
    async with carrel.SessionStore(store.data_dir) as own:
        data = await own.load_session("a")
        assert data is not None
        assert data["messages"] == [user("x"), call("c"), long]
        for message in (call("d"), {**long, "content": [{**long["content"][0], "tool_use_id": "d"}]}):
            await own.append_message("a", message)
        assert await loaded(store, "a") == (await own.load_session("a"))["messages"]  # type: ignore[index]
