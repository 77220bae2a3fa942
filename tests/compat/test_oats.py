"""`carrel.compat.oats` has the names, signatures and behavior of the session parts of oats-coder 1.0.19."""

import asyncio
import importlib
import inspect
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import carrel
from carrel.compat.oats import core
from carrel.compat.oats.core.bus import Event, EventBus, EventType, bus
from carrel.compat.oats.core.id import generate_id, generate_short_id
from carrel.compat.oats.core.storage import Storage, StorageError
from carrel.compat.oats.date import utc
from carrel.compat.oats.session.message import (
    ImagePart,
    Message,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from carrel.compat.oats.session.session import (
    Session,
    SessionInfo,
    SessionStorage,
    SessionTime,
    create_session,
    get_session,
    get_session_storage,
    list_sessions,
)
from carrel.conversation.models.conversation import ConversationStorage
from carrel.conversation.store import SessionStore
from carrel.errors import SessionExists
from tests.compat.signatures import plain_signature, unchecked


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CODER_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def published() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    stop = bus.subscribe_all(lambda event: events.append((event.type, event.data)))
    yield events
    stop()


def sample() -> Session:
    """A session with every kind of part."""
    session = Session(info=SessionInfo(project_dir="project", working_dir="./work", model_id="m", provider_id="p"))
    session.create_system_message("be brief")
    session.create_user_message("look", images=[{"media_type": "image/png", "data": "aGk=" * 50_000}])
    answer = session.create_assistant_message()
    answer.add_text("one")
    answer.add_text("two")
    answer.add_tool_call("c", "bash", {"command": "ls", "deep": [1, {"a": None}]})
    answer.add_tool_result("c", "bash", "List", "line\n" * 30_000, metadata={"exit": 0})
    answer.add_tool_result("d", "bash", "", "", error="")
    answer.usage = {"total_tokens": 5}
    session.create_assistant_message()  # empty
    session.create_assistant_message().add_tool_call("e", "ls", {})  # without a result
    return session


# --- imports and signatures ------------------------------------------------------------------------------------------

NAMES = {
    "session.session": (
        "SessionTime SessionInfo Session SessionStorage get_session_storage create_session get_session list_sessions"
    ),
    "session": (
        "SessionInfo Session SessionStorage create_session get_session list_sessions Message MessagePart TextPart "
        "ToolCallPart ToolResultPart"
    ),
    "session.message": "Message ImagePart MessagePart TextPart ToolCallPart ToolResultPart",
    "core.bus": "bus Event EventType EventBus EventHandler",
    "core.id": "generate_id generate_short_id",
    "core.storage": "Storage StorageError",
    "date": "utc",
    "core": "bus EventBus Storage generate_id",
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_where_programs_import_them(module: str) -> None:
    found = importlib.import_module(f"carrel.compat.oats.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_the_bus_of_core_is_the_object() -> None:
    assert core.bus is bus
    assert isinstance(bus, EventBus)
    with pytest.raises(ImportError, match="SessionProcessor"):
        exec("from carrel.compat.oats.session import SessionProcessor")
    with pytest.raises(ImportError, match="get_config"):
        exec("from carrel.compat.oats.core import get_config")


SIGNATURES = {
    create_session: (
        "(project_dir, working_dir=None, title='New Session', model_id=None, provider_id=None, root_session_id=None)"
    ),
    get_session: "(session_id)",
    list_sessions: "()",
    get_session_storage: "()",
    SessionStorage: "()",
    SessionStorage.create: "(session)",
    SessionStorage.update: "(session)",
    SessionStorage.get: "(session_id)",
    SessionStorage.delete: "(session_id)",
    SessionStorage.list: "()",
    SessionStorage.list_infos: "()",
    Session.add_message: "(message)",
    Session.add_usage: "(usage)",
    Session.create_user_message: "(content, images=None)",
    Session.create_assistant_message: "()",
    Session.create_system_message: "(content)",
    Session.get_messages_for_llm: "()",
    Session.update_title: "(title)",
    Message.add_text: "(content)",
    Message.add_image: "(media_type, *, data=None, url=None, detail='auto')",
    Message.add_tool_call: "(tool_call_id, tool_name, arguments)",
    Message.add_tool_result: "(tool_call_id, tool_name, title, output, error=None, metadata=None)",
    Message.to_llm_format: "()",
    EventBus.subscribe: "(event_type, handler)",
    EventBus.once: "(event_type, handler)",
    EventBus.subscribe_all: "(handler)",
    EventBus.publish: "(event)",
    EventBus.publish_sync: "(event)",
    EventBus.clear: "()",
    Storage: "(namespace, model_class)",
    Storage.create: "(id, data)",
    Storage.update: "(id, data)",
    Storage.upsert: "(id, data)",
    Storage.read: "(id)",
    Storage.delete: "(id)",
    Storage.list: "()",
    Storage.list_ids: "()",
    Event: "(type, data=<factory>, source=None)",
    Message.get_text_content: "()",
    Message.get_images: "()",
    Message.has_images: "()",
    Message.get_tool_calls: "()",
    Message.get_tool_results: "()",
    generate_id: "()",
    generate_short_id: "()",
    utc: "()",
}


@pytest.mark.parametrize(("function", "wanted"), SIGNATURES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_signatures(function: Any, wanted: str) -> None:
    assert plain_signature(function) == wanted


def test_every_signature_is_checked() -> None:
    assert unchecked(SIGNATURES, Session, SessionStorage, Message, EventBus, Storage) == []
    for module, names in NAMES.items():
        assert unchecked(SIGNATURES, importlib.import_module(f"carrel.compat.oats.{module}"), names=names) == []


def test_which_calls_are_awaited() -> None:
    for name in ("create", "update", "get", "delete", "list", "list_infos"):
        assert inspect.iscoroutinefunction(getattr(SessionStorage, name))
    for name in ("create", "update", "upsert", "read", "delete", "list", "list_ids"):
        assert inspect.iscoroutinefunction(getattr(Storage, name))
    assert inspect.iscoroutinefunction(EventBus.publish)
    assert not any(map(inspect.iscoroutinefunction, vars(Session).values()))
    assert (Event("x").data, Event("x").source) == ({}, None)


# --- models ----------------------------------------------------------------------------------------------------------


def test_the_fields_of_models() -> None:
    time = SessionTime()
    assert list(time.model_dump()) == ["created", "updated", "archived"]
    assert time.created.tzinfo == UTC
    assert time.archived is None
    info = SessionInfo(project_dir="/a", working_dir="b")
    assert len(info.id) == 36
    assert info.model_dump(exclude={"id", "time"}) == {
        "title": "New Session",
        "project_dir": "/a",
        "working_dir": "b",
        "model_id": None,
        "provider_id": None,
        "root_session_id": None,
        "parent_session_id": None,
        "message_count": 0,
        "total_tokens": 0,
    }
    session = Session(info=info)
    assert session.model_dump() == {"info": info.model_dump(), "messages": []}
    assert (session.id, session.title) == (info.id, "New Session")
    assert set(SessionInfo.model_json_schema()["required"]) == {"project_dir", "working_dir"}
    assert set(Message.model_json_schema()["required"]) == {"session_id", "role"}


def test_the_fields_of_messages_and_parts() -> None:
    message = Message(session_id="s", role="user")
    names = ["id", "session_id", "role", "parts", "created_at", "model", "provider", "usage"]
    assert list(message.model_dump()) == names
    assert message.created_at.tzinfo == UTC
    fields: dict[type[Any], dict[str, Any]] = {
        TextPart: {"content": "x"},
        ImagePart: {"media_type": "image/png"},
        ToolCallPart: {"tool_call_id": "1", "tool_name": "n", "arguments": {}},
        ToolResultPart: {"tool_call_id": "1", "tool_name": "n", "title": "t", "output": "o"},
    }
    defaults: dict[type[Any], dict[str, Any]] = {
        ImagePart: {"data": None, "url": None, "detail": "auto"},
        ToolResultPart: {"error": None, "metadata": {}},
    }
    kinds: dict[type[Any], str]
    kinds = {TextPart: "text", ImagePart: "image", ToolCallPart: "tool_call", ToolResultPart: "tool_result"}
    for model, given in fields.items():
        part = model(**given)
        dumped = part.model_dump(exclude={"id"})
        assert dumped == {"type": kinds[model], **given, **defaults.get(model, {})}
        assert len(part.id) == 36
        for name in given:
            with pytest.raises(ValidationError):
                model(**{key: value for key, value in given.items() if key != name})
    read = Message.model_validate({"session_id": "s", "role": "user", "parts": [{"content": "no type"}]})
    assert isinstance(read.parts[0], TextPart)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SessionInfo(project_dir="/a"),  # type: ignore[call-arg]
        lambda: SessionInfo(working_dir="/a"),  # type: ignore[call-arg]
        lambda: Message(role="user"),  # type: ignore[call-arg]
        lambda: Message(session_id="s", role="tool"),
        lambda: Message.model_validate({"session_id": "s", "role": "user", "parts": [{"type": "video"}]}),
    ],
)
def test_what_is_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError):
        wrong()


def test_the_methods_of_a_session() -> None:
    session = Session(info=SessionInfo(project_dir="/a", working_dir="/a", model_id="m", provider_id="p"))
    before = session.info.time.updated
    message = session.create_user_message("hi", images=[{"media_type": "image/png", "url": "http://x"}])
    assert session.messages == [message]
    assert message.session_id == session.id
    assert session.info.message_count == 1
    assert session.info.time.updated > before
    answer = session.create_assistant_message()
    assert (answer.role, answer.parts, answer.model, answer.provider) == ("assistant", [], "m", "p")
    assert session.create_system_message("s").get_text_content() == "s"
    foreign = Message(session_id="other", role="user")
    assert session.add_message(foreign) is foreign
    assert foreign.session_id == "other"
    assert session.info.message_count == 4
    session.update_title("t")
    assert session.title == "t"
    session.add_usage({"input_tokens": 7})
    assert session.info.total_tokens == 0
    session.add_usage({"total_tokens": 5})
    assert session.info.total_tokens == 5
    assert all(each.usage is None for each in session.messages)
    with pytest.raises(KeyError):
        session.create_user_message("x", images=[{"data": "aGk="}])


def test_the_methods_of_a_message() -> None:
    message = Message(session_id="s", role="assistant")
    text, call = message.add_text("a"), message.add_tool_call("1", "n", {"x": 1})
    result, image = message.add_tool_result("1", "n", "t", "o"), message.add_image("image/png", url="u", detail="low")
    message.add_text("b")
    assert message.parts[:4] == [text, call, result, image]
    assert message.get_text_content() == "a\nb"
    assert message.get_tool_calls() == [call]
    assert message.get_tool_results() == [result]
    assert message.get_images() == [image]
    assert message.has_images()
    assert not Message(session_id="s", role="user").has_images()


def test_the_format_for_a_model() -> None:
    session = Session(info=SessionInfo(project_dir="/a", working_dir="/a"))
    session.create_system_message("s")
    session.create_user_message("two").add_text("lines")
    session.create_user_message("see", images=[{"media_type": "image/png", "data": "aGk="}])
    session.create_user_message("", images=[{"media_type": "image/png", "url": "http://x"}])
    session.messages[-1].get_images()[0].detail = "low"
    session.create_assistant_message().add_text("answer")
    calls = session.create_assistant_message()
    calls.add_tool_call("1", "bash", {"command": "ls", "n": None})
    calls.add_tool_result("1", "bash", "t", "o")
    session.create_assistant_message()
    url = {"url": "data:image/png;base64,aGk=", "detail": "auto"}
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls", "n": null}'}}
    got = session.get_messages_for_llm()
    arguments = got[5]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"command": "ls", "n": None}
    call["function"]["arguments"] = arguments  # type: ignore[index]
    assert got == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "two\nlines"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": url}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x", "detail": "low"}}]},
        {"role": "assistant", "content": "answer"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": ""},
    ]


# --- sessions --------------------------------------------------------------------------------------------------------


async def test_what_comes_back_equals_what_went_in() -> None:
    session = sample()
    session.info.message_count = 77
    session.info.total_tokens = 3
    session.info.time = SessionTime(created=datetime(2020, 1, 1, tzinfo=UTC), updated=datetime(2021, 1, 1, tzinfo=UTC))
    session.messages[0].session_id = "another"
    before = session.model_dump()
    assert await get_session_storage().create(session) is session
    assert session.model_dump() == before
    again = await get_session(session.id)
    assert again == session
    assert again is not session
    again.create_user_message("more")
    del again.messages[1]
    again.messages[0].add_text("changed")
    again.info.total_tokens = 1
    again.info.title = ""
    before = again.model_dump()
    assert await get_session_storage().update(again) is again
    assert again.model_dump() == before
    assert await SessionStorage().get(session.id) == again
    assert await list_sessions() == [again.info]


async def test_another_process_finds_unanswered_calls_as_they_are() -> None:
    session = sample()
    session.messages = session.messages[-1:]
    await get_session_storage().create(session)
    await get_session_storage()._storage.store.close()  # releases the open call, as the end of the process does
    assert (await SessionStorage().get(session.id)) == session


async def test_an_update_appends_only_what_is_new(data_folder: Path) -> None:
    session = sample()
    storage = SessionStorage()
    await storage.create(session)
    log = data_folder / "sessions" / session.id / "messages.jsonl"
    before = log.read_bytes()
    session.create_user_message("new")
    await storage.update(session)
    after = log.read_bytes()
    assert after.startswith(before)
    assert len(after) - len(before) < 1000
    await storage.update(session)
    copy = Session.model_validate(session.model_dump())  # knows nothing of the log
    await SessionStorage().update(copy)
    assert log.read_bytes() == after


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"log_bytes": 0}', "null"])
async def test_damaged_info_is_made_from_the_log(data_folder: Path, damage: str) -> None:
    session = sample()
    await get_session_storage().create(session)
    (data_folder / "sessions" / session.id / "oats-info.json").write_text(damage)
    again = await get_session(session.id)
    assert again is not None
    assert again.messages == session.messages
    assert again.info.message_count == len(session.messages)


async def test_a_copy_replaces_the_whole_session() -> None:
    session = sample()
    await get_session_storage().create(session)
    copy = Session.model_validate(session.model_dump())
    copy.messages = copy.messages[1:3]
    await get_session_storage().update(copy)
    assert await get_session(session.id) == copy


async def test_folders_are_kept_as_given(data_folder: Path) -> None:
    session = await create_session(Path("relative"), title="t", model_id="m", provider_id="p", root_session_id="r")
    assert (session.info.project_dir, session.info.working_dir) == ("relative", "relative")
    assert (session.info.model_id, session.info.provider_id, session.info.root_session_id) == ("m", "p", "r")
    other = await create_session(Path("/a"), Path("b"))
    again = await get_session(other.id)
    assert again is not None
    assert (again.info.project_dir, again.info.working_dir) == ("/a", "b")
    assert again.title == "New Session"


async def test_events(published: list[tuple[str, dict[str, Any]]]) -> None:
    storage = get_session_storage()
    assert get_session_storage() is storage
    session = await create_session(Path("/a"), title="t")
    assert published == [("session.created", {"session_id": session.id, "title": "t"})]
    session.create_user_message("hi")
    await storage.update(session)
    await storage.update(session)
    unknown = Session(info=SessionInfo(project_dir="/a", working_dir="/a"))
    await storage.update(unknown)
    assert published[1:] == [("session.updated", {"session_id": each.id}) for each in (session, session, unknown)]
    assert await get_session(unknown.id) == unknown
    del published[:]
    assert await storage.delete(session.id) is True
    assert await storage.delete(session.id) is False
    assert await storage.delete("unknown") is False
    assert published == [("session.deleted", {"session_id": session.id})]
    assert await get_session(session.id) is None
    await storage.update(session)  # stores it again
    assert await get_session(session.id) == session


async def test_an_event_comes_after_the_write() -> None:
    found: list[Session | None] = []

    async def look(event: Event) -> None:
        found.append(await get_session(event.data["session_id"]))

    stop = bus.subscribe(EventType.SESSION_UPDATED, look)
    session = await create_session(Path("/a"))
    session.create_user_message("hi")
    await get_session_storage().update(session)
    stop()
    assert found == [session]


async def test_an_id_that_exists() -> None:
    session = await create_session(Path("/a"))
    with pytest.raises(StorageError) as caught:
        await get_session_storage().create(session)
    assert isinstance(caught.value, SessionExists)


def test_one_storage_serves_several_loops() -> None:
    session = asyncio.run(create_session(Path("/a")))
    session.create_user_message("hi").add_tool_call("1", "n", {})
    asyncio.run(get_session_storage().update(session))
    assert asyncio.run(get_session(session.id)) == session


async def test_files_of_the_original_are_read(data_folder: Path) -> None:
    session = sample()
    file = data_folder / "sessions" / f"{session.id}.json"
    file.parent.mkdir(parents=True)
    file.write_text(session.model_dump_json(indent=2))
    (file.parent / "broken.json").write_text("{")
    storage = SessionStorage()
    assert await storage.get(session.id) == session
    assert await storage.list() == [session]
    assert await storage.get("broken") is None
    with pytest.raises(StorageError):
        await storage.create(session)
    session.create_user_message("more")
    await storage.update(session)
    assert await storage.list_infos() == [session.info]
    assert await storage.get(session.id) == session
    assert await storage.delete(session.id)
    assert await storage.get(session.id) is None
    assert Session.model_validate_json(session.model_dump_json()) == session


async def test_carrel_reads_and_continues_the_session(data_folder: Path) -> None:
    session = sample()
    await get_session_storage().create(session)
    async with SessionStore(data_folder / "sessions") as store:
        own = ConversationStorage(store)
        conversation = await own.get(session.id)
        assert conversation is not None
        assert conversation.title == session.title
        assert conversation.messages[2].get_tool_results()[0].output == "line\n" * 30_000
        await store.rename(session.id, "renamed")
        conversation = await own.get(session.id)
        assert conversation is not None
        conversation.create_user_message("from carrel")
        await own.update(conversation)
    again = await get_session(session.id)
    assert again is not None
    assert again.title == "renamed"
    assert again.messages[-1].get_text_content() == "from carrel"
    again.create_user_message("and back")
    await get_session_storage().update(again)
    assert (await get_session(session.id)) == again


# --- bus, ids, storage -----------------------------------------------------------------------------------------------


async def test_the_bus() -> None:
    own, seen = EventBus(), []

    async def on_type(event: Event) -> None:
        await asyncio.sleep(0.01)
        seen.append("type")

    async def fails(event: Event) -> None:
        raise RuntimeError("no")

    def on_all(event: Event) -> None:
        seen.append("all")

    stop = own.subscribe("mine", on_type)
    own.subscribe("mine", fails)
    own.once("mine", lambda event: seen.append("once"))
    own.subscribe_all(on_all)
    await own.publish(Event(type="mine", data={"a": 1}, source="test"))
    assert sorted(seen) == ["all", "once", "type"]  # all have run when publish returns
    stop()
    await own.publish(Event("mine"))
    assert seen[3:] == ["all"]
    own.clear()
    await own.publish(Event("mine"))
    assert seen[4:] == []


def test_the_bus_without_a_loop() -> None:
    seen = []
    own = EventBus()
    own.subscribe(EventType.SESSION_CREATED, lambda event: seen.append(event.type))
    own.publish_sync(Event("session.created"))
    assert seen == ["session.created"]


def test_event_types() -> None:
    theirs = (
        "SESSION_CREATED SESSION_UPDATED SESSION_DELETED SESSION_BUDGET SESSION_COMPACTED SESSION_TASK_BUDGET "
        "MESSAGE_CREATED MESSAGE_UPDATED MESSAGE_PART_CREATED MESSAGE_PART_UPDATED TOOL_START TOOL_COMPLETE TOOL_ERROR "
        "PROVIDER_REQUEST PROVIDER_RESPONSE PROVIDER_ERROR PERMISSION_REQUEST PERMISSION_GRANTED PERMISSION_DENIED "
        "HOOK_FIRED HOOK_BLOCKED FILE_CHANGED AGENT_STARTED AGENT_COMPLETED"
    )
    for name in theirs.split():
        assert isinstance(EventType[name], str)
    assert EventType.SESSION_CREATED.value == "session.created"
    assert EventType is carrel.EventType


def test_ids_and_times() -> None:
    assert len({generate_id(), generate_id()}) == 2
    assert len(generate_id()) == 36
    assert len(generate_short_id()) == 8
    assert utc().tzinfo == UTC


class Note(BaseModel):
    text: str


async def test_storage(data_folder: Path) -> None:
    storage = Storage("notes", Note)
    note = Note(text="a")
    assert await storage.list() == []
    assert await storage.create("1", note) is note
    assert (data_folder / "notes" / "1.json").read_text() == '{\n  "text": "a"\n}'
    with pytest.raises(StorageError):
        await storage.create("1", note)
    with pytest.raises(StorageError):
        await storage.update("2", note)
    await storage.update("1", Note(text="b"))
    await storage.upsert("2", Note(text="c"))
    assert await storage.read("1") == Note(text="b")
    assert await storage.read("3") is None
    (data_folder / "notes" / "broken.json").write_text("[")
    assert sorted(await storage.list_ids()) == ["1", "2", "broken"]
    assert await storage.list() == [Note(text="b"), Note(text="c")]
    assert await storage.delete("1") is True
    assert await storage.delete("1") is False


def test_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage("notes", Note)
    assert storage.storage_dir == tmp_path / "data" / "notes"
    config = tmp_path / "coder.json"
    monkeypatch.setenv("CODER_CONFIG_FILE", str(config))
    assert storage.storage_dir == tmp_path / "data" / "notes"  # there is no such file
    config.write_text(json.dumps({"data_dir": str(tmp_path / "configured")}))
    assert storage.storage_dir == tmp_path / "configured" / "notes"
    monkeypatch.delenv("CODER_CONFIG_FILE")
    monkeypatch.delenv("CODER_DATA_DIR")
    assert storage.storage_dir == Path.home() / ".local/share/oats/notes"
