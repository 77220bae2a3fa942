"""Conversations as typed objects: short programs, what the log holds afterwards, and that nothing is lost."""

import asyncio
import base64
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from carrel.conversation.messages import ConversationMessage, build_message, text_block, user_text_message
from carrel.conversation.models.conversation import (
    Conversation,
    ConversationStorage,
    create_session,
    get_session,
    get_session_storage,
    list_sessions,
    set_session_storage,
)
from carrel.conversation.models.info import SessionInfo, SessionTime
from carrel.conversation.models.message import Message
from carrel.conversation.models.parts import TextPart
from carrel.conversation.store import SessionStore
from carrel.errors import RewindRefused, SessionExists, SessionIdRefused, SessionNotFound
from carrel.events import Bus, Delivery, Event, EventType
from carrel.storage.memory import MemoryStore


class PatientDelivery(Delivery):
    async def settle(self, timeout: float = 60) -> None:
        await super().settle(timeout)


class PatientBus(Bus):
    """Waits for handlers longer than a storage usually does, because the machine of a test may be busy."""

    def publish(self, event: Event) -> Delivery:
        return PatientDelivery(super().publish(event)._calls)


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[ConversationStorage]:
    async with SessionStore(tmp_path / "sessions", embedder=False) as store:
        yield ConversationStorage(store, bus=PatientBus())


@pytest.fixture
async def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ConversationStorage]:
    """The shared storage, in a home of its own."""
    monkeypatch.setenv("CARREL_HOME", str(tmp_path / "home"))
    yield get_session_storage()
    await get_session_storage().store.close()
    set_session_storage(None)


def begun(**fields: Any) -> Conversation:
    return Conversation(info=SessionInfo(project_dir="/project", working_dir="/project", **fields))


def log(storage: ConversationStorage, conversation: Conversation) -> list[ConversationMessage]:
    text = storage.store.messages_path(conversation.id).read_text()
    return [json.loads(line) for line in text.splitlines()]


def texts(conversation: Conversation | None) -> list[str]:
    assert conversation is not None
    return [message.get_text_content() for message in conversation.messages]


async def again(storage: ConversationStorage, conversation: Conversation) -> Conversation:
    """The conversation as another process reads it, from the files alone."""
    await storage.store.close()
    async with SessionStore(storage.store.data_dir, embedder=False) as store:
        found = await ConversationStorage(store, bus=Bus()).get(conversation.id)
    assert found is not None
    return found


def run_program(home: Path, text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=os.environ | {"CARREL_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- programs as people write them


def test_an_agent_with_a_tool_and_its_resumption_in_another_process(tmp_path: Path) -> None:
    first = run_program(
        tmp_path,
        """
        import asyncio
        from pathlib import Path
        from carrel.conversation.models.conversation import create_session, get_session_storage
        from carrel.events import Event, EventType, bus

        async def on_update(event):
            print("updated", event.data["session_id"] == session.id)

        async def main():
            global session
            session = await create_session(Path("/project"), title="Sums", model_id="m-1", provider_id="openai")
            bus.subscribe(EventType.SESSION_UPDATED, on_update)
            storage = get_session_storage()
            user_message = session.create_user_message("What is 6 times 7?")
            print(len(user_message.id) > 8, user_message.role)
            await storage.update(session)
            assistant_message = session.create_assistant_message()
            assistant_message.add_text("Let me see.")
            session.add_usage({"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25})
            assistant_message.add_tool_call(tool_call_id="c1", tool_name="times", arguments={"a": 6, "b": 7})
            assistant_message.add_tool_result(tool_call_id="c1", tool_name="times", title="6 x 7", output="42")
            await storage.update(session)
            await bus.publish(Event(type=EventType.TOOL_COMPLETE, data={"session_id": session.id}))
            last = session.create_assistant_message()
            last.add_text("It is 42.")
            session.update_title("Six times seven")
            await storage.update(session)

        asyncio.run(main())
        """,
    )
    assert first == "True user\nupdated True\nupdated True\nupdated True\n"
    second = run_program(
        tmp_path,
        """
        import asyncio
        from carrel.conversation.models.conversation import get_session, list_sessions

        async def main():
            sessions = sorted(await list_sessions(), key=lambda s: s.time.updated, reverse=True)
            info = sessions[0]
            print(info.title, info.message_count, info.total_tokens, info.model_id, info.provider_id)
            session = await get_session(info.id)
            for message in session.get_messages_for_llm():
                print(message["role"], message.get("tool_call_id"), message["content"])
            print(await get_session("missing"))

        asyncio.run(main())
        """,
    )
    assert second.splitlines() == [
        "Six times seven 3 25 m-1 openai",
        "user None What is 6 times 7?",
        "assistant None Let me see.",
        "tool c1 42",
        "assistant None It is 42.",
        "None",
    ]


def test_a_program_that_awaits_each_message_is_there_when_it_is_killed(tmp_path: Path) -> None:
    run_program(
        tmp_path,
        """
        import asyncio, os
        from carrel.conversation.models.conversation import create_session

        async def main():
            conversation = await create_session("/project", session_id="killed")
            await conversation.create_user_message("hello")
            answer = conversation.create_assistant_message()
            answer.add_text("good ")
            await answer
            answer.parts[0].content += "day"
            await answer
            await conversation.update_title("Greeting")
            await conversation.add_usage({"total_tokens": 7})
            os._exit(0)

        asyncio.run(main())
        """,
    )
    listed = run_program(
        tmp_path,
        """
        import asyncio
        from carrel.conversation.models.conversation import get_session, list_sessions

        async def main():
            info, = await list_sessions()
            print(info.title, info.message_count, info.total_tokens)
            conversation = await get_session("killed")
            print([message.get_text_content() for message in conversation.messages], conversation.info == info)

        asyncio.run(main())
        """,
    )
    assert listed == "Greeting 2 7\n['hello', 'good day'] True\n"


async def test_a_message_made_by_hand_is_added_and_given_back(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    message = Message(session_id=conversation.id, role="user")
    message.add_text("hi")
    assert conversation.add_message(message) is message
    assert conversation.info.message_count == 1
    assert await storage.update(conversation) is conversation
    assert (await again(storage, conversation)).messages == [message]


async def test_awaiting_what_a_method_gives_back_writes_it(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    message = await conversation.create_user_message("hi")
    assert message.role == "user"
    assert texts(await again(storage, conversation)) == ["hi"]
    assert (
        await conversation.add_message(Message(session_id="", role="user", parts=[TextPart(content="more")]))
        is not message
    )
    assert texts(await again(storage, conversation)) == ["hi", "more"]


async def test_images_come_with_a_user_message(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message(
        "Look",
        images=[
            {"media_type": "image/png", "data": "AAAA"},
            {"media_type": "image/jpeg", "url": "https://example.com/a.jpg", "detail": "low"},
        ],
    )
    conversation.create_user_message("", images=[{"media_type": "image/png", "data": "BBBB"}])
    await storage.update(conversation)
    found = await again(storage, conversation)
    assert found.messages == conversation.messages
    assert [len(message.get_images()) for message in found.messages] == [2, 1]
    assert found.messages[1].get_text_content() == ""


@pytest.mark.parametrize("image", ["shot.png", b"AAAA", None, {"media_type": "image/png"}, {"path": "shot.png"}])
async def test_an_invalid_image_is_refused_and_nothing_is_added(storage: ConversationStorage, image: Any) -> None:
    conversation = await storage.create(begun())
    with pytest.raises(ValueError, match="media_type and data"):
        conversation.create_user_message("Look", images=[image])
    assert conversation.messages == []


async def test_a_system_message_is_in_the_log(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_system_message("Be kind.")
    conversation.create_user_message("hi")
    await storage.update(conversation)
    assert [line["role"] for line in log(storage, conversation)] == ["system", "user"]
    found = await again(storage, conversation)
    assert found.get_messages_for_llm() == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]
    assert [wire["role"] for wire in found.get_messages_for_llm("anthropic")] == ["user"]
    assert found.get_messages_for_llm("gemini")[-1]["parts"] == [{"text": "hi"}]
    assert [item["role"] for item in found.get_messages_for_llm("openai_responses")] == ["system", "user"]


async def test_what_is_read_is_what_was_written(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun(title="T", model_id="m", provider_id="anthropic"))
    conversation.create_user_message("one")
    answer = conversation.create_assistant_message()
    answer.add_text("two")
    answer.add_tool_call("c", "t", {"a": 1})
    answer.add_tool_result("c", "t", "T", "x", error="e", metadata={"k": [1]})
    conversation.add_usage({"total_tokens": 3})
    await storage.update(conversation)
    assert await again(storage, conversation) == conversation


async def test_json_and_schema_work_for_the_whole_conversation(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("one")
    await storage.update(conversation)
    assert Conversation.model_validate_json(conversation.model_dump_json()) == conversation
    assert SessionInfo.model_validate(conversation.info.model_dump()) == conversation.info
    assert Conversation.model_json_schema()["properties"].keys() == {"info", "messages"}


# --- the log grows by what is new


async def test_one_more_message_costs_the_same_bytes_in_a_long_conversation(storage: ConversationStorage) -> None:
    grown: list[int] = []
    for length in (1, 2000):
        conversation = await storage.create(begun())
        for _ in range(length):
            conversation.create_user_message("written before")
        await storage.update(conversation)
        path = storage.store.messages_path(conversation.id)
        before = path.read_bytes()
        conversation.create_user_message("one more")
        await storage.update(conversation)
        after = path.read_bytes()
        assert after.startswith(before)
        assert after[len(before) :].count(b"\n") == 1
        grown.append(len(after) - len(before))
    assert grown[0] == grown[1]


async def test_an_update_without_news_writes_nothing(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("hi")
    await storage.update(conversation)
    before = log(storage, conversation)
    await storage.update(conversation)
    await storage.update(await again(storage, conversation))
    assert log(storage, conversation) == before


async def test_a_result_that_comes_later_is_one_more_line(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    answer = conversation.create_assistant_message()
    answer.add_tool_call("c1", "t", {})
    await storage.update(conversation)
    answer.add_tool_result("c1", "t", "T", "42")
    await storage.update(conversation)
    assert [line["role"] for line in log(storage, conversation)] == ["assistant", "user"]
    assert await again(storage, conversation) == conversation


# --- what was written is never edited, and never lost


def edit_text(conversation: Conversation) -> None:
    conversation.messages[1].parts[0].content = "changed"


def add_part(conversation: Conversation) -> None:
    conversation.messages[1].add_text("changed")


def append_to_the_list_of_parts(conversation: Conversation) -> None:
    conversation.messages[1].parts.append(TextPart(content="changed"))


def replace_the_message(conversation: Conversation) -> None:
    conversation.messages[1] = conversation.messages[1].model_copy(update={"parts": [TextPart(content="changed")]})


def take_out(conversation: Conversation) -> None:
    del conversation.messages[1]


def take_out_the_last(conversation: Conversation) -> None:
    conversation.messages.pop()


def put_in(conversation: Conversation) -> None:
    conversation.messages.insert(
        1, Message(session_id=conversation.id, role="user", parts=[TextPart(content="changed")])
    )


def turn_around(conversation: Conversation) -> None:
    conversation.messages.reverse()


def clear(conversation: Conversation) -> None:
    conversation.messages.clear()


def summarize(conversation: Conversation) -> None:
    summary = Message(session_id=conversation.id, role="user", parts=[TextPart(content="a summary")])
    conversation.messages = [conversation.messages[0], summary, *conversation.messages[-2:]]


def change_inside_a_dict(conversation: Conversation) -> None:
    conversation.messages[1].meta["seen"] = True


def change_model(conversation: Conversation) -> None:
    conversation.messages[1].model = "another"


CHANGES = [
    edit_text,
    add_part,
    append_to_the_list_of_parts,
    replace_the_message,
    take_out,
    take_out_the_last,
    put_in,
    turn_around,
    clear,
    summarize,
    change_inside_a_dict,
    change_model,
]


@pytest.mark.parametrize("read_first", [False, True])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_to_a_written_message_is_seen_and_the_log_keeps_the_old_one(
    storage: ConversationStorage, change: Callable[[Conversation], None], read_first: bool
) -> None:
    conversation = await storage.create(begun())
    for text in ("one", "two", "three", "four"):
        conversation.create_user_message(text)
    await storage.update(conversation)
    before = storage.store.messages_path(conversation.id).read_bytes()
    if read_first:
        conversation = await storage.get(conversation.id) or conversation
    change(conversation)
    await storage.update(conversation)
    found = await again(storage, conversation)
    assert found.messages == conversation.messages
    after = storage.store.messages_path(conversation.id).read_bytes()
    assert after.startswith(before)
    assert len(after) > len(before)
    listed = {info.id: info.message_count for info in await storage.list_infos()}
    assert listed[conversation.id] == len(conversation.messages)
    conversation.create_user_message("and on")
    await storage.update(conversation)
    assert (await again(storage, conversation)).messages == conversation.messages


async def test_changing_the_last_message_writes_only_that_one_again(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    for n in range(50):
        conversation.create_user_message(f"message {n}")
    answer = conversation.create_assistant_message()
    for chunk in ("to", "geth", "er"):
        answer.parts = [TextPart(content=answer.get_text_content() + chunk)]
        await storage.update(conversation)
    lines = log(storage, conversation)
    assert len(lines) == 51 + 2 * 2
    assert texts(await again(storage, conversation))[-1] == "together"


async def test_an_old_message_is_changed_too(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    for n in range(100):
        conversation.create_user_message(f"message {n}")
    await storage.update(conversation)
    conversation.messages[3].parts[0].content = "changed"
    await storage.update(conversation)
    assert texts(await again(storage, conversation))[3] == "changed"
    conversation.messages[4].meta["why"] = "inside a dict"
    await storage.update(conversation)
    assert (await again(storage, conversation)).messages[4].meta == {}
    await storage.update(conversation, recheck=True)
    assert (await again(storage, conversation)).messages[4].meta == {"why": "inside a dict"}
    conversation.messages[5].meta["why"] = "and why not"
    conversation.messages[5].touch()
    await storage.update(conversation)
    assert (await again(storage, conversation)).messages[5].meta == {"why": "and why not"}


async def test_a_change_made_while_the_last_one_is_being_written_is_not_lost(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    message = conversation.create_user_message("0")
    for n in range(1, 30):
        writing = asyncio.create_task(storage.update(conversation))
        await asyncio.sleep(0)
        message.parts[0].content = str(n)
        await writing
    await storage.update(conversation)
    assert texts(await again(storage, conversation)) == ["29"]


async def test_title_and_whereabouts_are_kept_and_only_the_changed_is_written(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun(title="First"))
    conversation.update_title("Second")
    conversation.info.working_dir = "/elsewhere"
    conversation.info.model_id = "m2"
    conversation.info.provider_id = "openai"
    conversation.info.time.archived = datetime(2026, 1, 1, tzinfo=UTC)
    await storage.update(conversation)
    (line,) = log(storage, conversation)
    assert line["meta"]["set"].keys() == {
        *("title", "cwd", "working_dir", "model", "provider", "provider_id", "archived_at")
    }
    assert await again(storage, conversation) == conversation
    conversation.info.time.archived = None
    conversation.info.provider_id = None
    await storage.update(conversation)
    assert await again(storage, conversation) == conversation


async def test_a_title_changed_elsewhere_is_not_put_back(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun(title="Mine"))
    async with SessionStore(storage.store.data_dir, embedder=False) as other:
        await other.rename(conversation.id, "Theirs")
    conversation.create_user_message("hi")
    await storage.update(conversation)
    titles = [line["meta"]["set"]["title"] for line in log(storage, conversation) if "set" in line["meta"]]
    assert titles == ["Theirs"]


async def test_dates_given_at_the_start_are_kept(storage: ConversationStorage) -> None:
    then = datetime(2020, 5, 17, 8, 30, tzinfo=UTC)
    conversation = await storage.create(begun(time=SessionTime(created=then, updated=then + timedelta(days=1))))
    found = await again(storage, conversation)
    assert found.info.time == SessionTime(created=then, updated=then + timedelta(days=1))


# --- usage is counted once


@pytest.mark.parametrize("change", CHANGES)
async def test_tokens_are_counted_once_whatever_is_changed(
    storage: ConversationStorage, change: Callable[[Conversation], None]
) -> None:
    conversation = await storage.create(begun(model_id="m"))
    for text in ("one", "two", "three", "four"):
        message = conversation.create_assistant_message()
        message.add_text(text)
        message.usage = {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}
        conversation.add_usage(message.usage)
    await storage.update(conversation)
    usages = [message.usage for message in conversation.messages]
    assert all(usages)
    change(conversation)
    await storage.update(conversation)
    assert conversation.info.total_tokens == 40
    found = await again(storage, conversation)
    assert found.messages == conversation.messages
    assert found.info.total_tokens == 40
    assert (await storage.store.usage(conversation.id)).total.total_tokens == 40


async def test_usage_may_come_before_its_message_after_it_or_with_it(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("hi")
    conversation.add_usage({"total_tokens": 1})
    answer = conversation.create_assistant_message()
    answer.add_text("hello")
    assert answer.usage is None
    await storage.update(conversation)
    conversation.add_usage({"total_tokens": 2})
    await storage.update(conversation)
    both = conversation.create_assistant_message()
    both.add_text("again")
    both.usage = {"input_tokens": 3, "output_tokens": 1}
    await storage.update(conversation)
    assert conversation.info.total_tokens == 3, "what the user of the object counts is not changed"
    conversation.add_usage({"input_tokens": 3, "output_tokens": 1, "total_tokens": 4})
    await storage.update(conversation)
    assert await tokens(storage, conversation) == {7}
    assert [message.usage for message in conversation.messages[:2]] == [None, None]


async def test_usage_with_no_answer_and_tokens_added_by_hand_are_kept(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("hi")
    conversation.add_usage({"total_tokens": 5})
    await storage.update(conversation)
    assert (await again(storage, conversation)).info.total_tokens == 5
    conversation.info.total_tokens += 100
    await storage.update(conversation)
    assert (await again(storage, conversation)).info.total_tokens == 105
    assert (await storage.store.usage(conversation.id)).total.total_tokens == 105


async def tokens(storage: ConversationStorage, conversation: Conversation) -> set[int]:
    """What each of those who count says, as soon as it was written and when it is read again."""
    await storage.update(conversation)
    spent = (await storage.store.usage(conversation.id)).total.total_tokens
    (counted,) = await storage.store.list_sessions(counts=True)
    infos = (conversation.info, (await again(storage, conversation)).info)
    reopened = ConversationStorage(SessionStore(store=storage.store._logs.store))
    fresh = await again(reopened, conversation)
    return {spent, counted["total_tokens"], fresh.info.total_tokens, *(info.total_tokens for info in infos)}


async def test_only_total_tokens_are_counted(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    answer = conversation.create_assistant_message()
    answer.add_text("x")
    conversation.add_usage({"total_tokens": 12, "prompt_tokens": 10, "completion_tokens": 2})
    conversation.add_usage({"prompt_tokens": 10, "completion_tokens": 3})
    conversation.add_usage({})
    assert await tokens(storage, conversation) == {12}
    assert answer.usage is None
    assert (await again(storage, conversation)).messages == [answer]


async def test_the_same_usage_twice_is_twice_as_much(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.add_usage({"total_tokens": 5})
    conversation.add_usage({"total_tokens": 5})
    assert await tokens(storage, conversation) == {10}
    conversation.create_user_message("and before an answer")
    conversation.add_usage({"total_tokens": 5})
    conversation.create_assistant_message().add_text("y")
    conversation.add_usage({"total_tokens": 5})
    assert await tokens(storage, conversation) == {20}


async def test_the_tokens_that_two_count_are_added_up(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    other = await storage.get(conversation.id)
    assert other is not None
    for each in (conversation, other):
        each.add_usage({"total_tokens": 5})
        await storage.update(each)
    assert (await again(storage, conversation)).info.total_tokens == 10


async def test_tokens_known_at_the_start_are_kept(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun(total_tokens=5))
    assert await tokens(storage, conversation) == {5}


# --- objects are kept as they are given


async def test_an_empty_message_is_kept(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("hi")
    empty = conversation.create_assistant_message()
    await storage.update(conversation)
    found = await again(storage, conversation)
    assert found == conversation
    assert found.info.message_count == 2
    empty.add_text("filled")
    await storage.update(conversation)
    assert texts(await again(storage, conversation)) == ["hi", "filled"]


@pytest.mark.parametrize("folders", [("p", "p/./w"), ("~/p", "/w/../x"), ("/p", "/w"), ("", ""), ("..", "~")])
async def test_folders_stay_as_they_are_given(storage: ConversationStorage, folders: tuple[str, str]) -> None:
    info = SessionInfo(project_dir=folders[0], working_dir=folders[1])
    conversation = await storage.create(Conversation(info=info))
    assert (info.project_dir, info.working_dir) == folders
    assert (await again(storage, conversation)).info == info
    cwd = (await storage.store.read_meta(conversation.id))["cwd"]
    assert cwd == (os.path.abspath(os.path.expanduser(folders[1])) if folders[1] else "")
    info.working_dir = "elsewhere"
    await storage.update(conversation)
    assert (await again(storage, conversation)).info.working_dir == "elsewhere"
    assert (await storage.store.read_meta(conversation.id))["cwd"] == os.path.abspath("elsewhere")
    info.working_dir = "/whole"
    await storage.update(conversation)
    assert (await again(storage, conversation)).info.working_dir == "/whole"


async def test_the_working_folder_is_the_projects_by_default(shared: ConversationStorage) -> None:
    conversation = await create_session(Path("some/project"))
    assert (conversation.info.project_dir, conversation.info.working_dir) == ("some/project", "some/project")
    assert await get_session(conversation.id) == conversation
    assert (await create_session("p", session_id="")).id != ""


async def test_the_storage_takes_and_gives_back_a_session(storage: ConversationStorage) -> None:
    conversation = begun()
    assert await storage.create(session=conversation) is conversation
    assert await storage.update(session=conversation) is conversation


# --- when something goes wrong


async def test_a_conversation_that_was_deleted_does_not_come_back(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("hi")
    await storage.update(conversation)
    assert await storage.delete(conversation.id) is True
    assert await storage.delete(conversation.id) is False
    conversation.create_user_message("still there?")
    with pytest.raises(SessionNotFound):
        await storage.update(conversation)
    with pytest.raises(SessionNotFound):
        await storage.update(conversation)
    assert await storage.get(conversation.id) is None
    assert await storage.list_infos() == []


async def test_an_id_that_is_taken_or_no_name_is_refused(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    with pytest.raises(SessionExists):
        await storage.create(begun(id=conversation.id))
    with pytest.raises(SessionIdRefused):
        await storage.create(begun(id="../outside"))
    with pytest.raises(SessionIdRefused):
        await storage.get("../outside")
    assert await storage.get("missing") is None


async def test_update_keeps_a_conversation_that_is_not_there_yet(storage: ConversationStorage) -> None:
    conversation = begun()
    conversation.create_user_message("hi")
    await storage.update(conversation)
    assert await again(storage, conversation) == conversation


async def test_a_write_that_failed_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    trouble = [OSError("the disk is full")]

    def redact(message: ConversationMessage) -> ConversationMessage:
        if trouble and "second" in str(message):
            raise trouble.pop()
        return message

    async with SessionStore(tmp_path, redact=redact, embedder=False) as store:
        storage = ConversationStorage(store, bus=Bus())
        conversation = await storage.create(begun())
        conversation.create_user_message("first")
        await storage.update(conversation)
        conversation.create_user_message("second")
        with pytest.raises(OSError, match="full"):
            await storage.update(conversation)
        conversation.create_user_message("third")
        await storage.update(conversation)
        assert texts(await again(storage, conversation)) == ["first", "second", "third"]


async def test_an_update_that_is_cancelled_is_neither_lost_nor_doubled(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    for n in range(40):
        conversation.create_user_message(str(n))
        writing = asyncio.create_task(storage.update(conversation))
        for _ in range(n % 5):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    await storage.update(conversation)
    assert texts(await again(storage, conversation)) == [str(n) for n in range(40)]
    assert len(log(storage, conversation)) == 40


async def test_many_updates_at_once_write_each_message_once(storage: ConversationStorage) -> None:
    conversation = begun()

    async def say(n: int) -> None:
        conversation.create_user_message(str(n))
        await storage.update(conversation)

    await asyncio.gather(*(say(n) for n in range(50)))
    assert texts(await again(storage, conversation)) == [str(n) for n in range(50)]
    assert len(log(storage, conversation)) == 50


async def test_a_message_that_is_no_json_is_refused_and_the_rest_goes_on(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("fine")
    bad = conversation.create_user_message("not fine")
    bad.meta["object"] = object()
    with pytest.raises(ValueError, match="JSON"):
        await storage.update(conversation)
    del bad.meta["object"]
    await storage.update(conversation)
    assert texts(await again(storage, conversation)) == ["fine", "not fine"]


async def test_a_call_that_was_interrupted_has_a_result_when_it_is_read_again(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("go")
    conversation.create_assistant_message().add_tool_call("c1", "t", {})
    await storage.update(conversation)
    running = await storage.get(conversation.id)
    assert running is not None
    assert len(running.messages) == 2, "its result is still awaited"
    await storage.store.close()
    before = log(storage, conversation)
    found = await again(storage, conversation)
    assert [wire["role"] for wire in found.get_messages_for_llm()] == ["user", "assistant", "tool"]
    assert log(storage, conversation) == before, "reading writes nothing"
    found = await storage.get(conversation.id) or found
    found.create_user_message("what happened?")
    await storage.update(found)
    assert [line["role"] for line in log(storage, conversation)] == ["user", "assistant", "user", "user"]
    assert (await again(storage, conversation)).messages == found.messages


# --- conversations that other programs wrote


async def test_a_session_of_another_program_is_read_and_only_what_is_changed_is_written(
    storage: ConversationStorage,
) -> None:
    session_id = "theirs"
    theirs: list[ConversationMessage] = [
        {"role": "user", "content": "plain words", "timestamp": 17},
        build_message(
            "assistant",
            [text_block("hello"), {"type": "sketch", "strokes": [1]}],
            meta={"mood": "fine", "usage": {"total_tokens": 9}},
        ),
        user_text_message("bye"),
    ]
    folder = storage.store.session_dir(session_id)
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"id": session_id, "title": "Theirs", "cwd": "/theirs"}))
    (folder / "messages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in theirs))
    conversation = await storage.get(session_id)
    assert conversation is not None
    assert texts(conversation) == ["plain words", "hello", "bye"]
    assert (conversation.info.message_count, conversation.info.total_tokens) == (3, 9)
    assert conversation.info.working_dir == conversation.info.project_dir == "/theirs"
    await storage.update(conversation)
    assert log(storage, conversation) == theirs
    conversation.messages[1].add_text("more")
    await storage.update(conversation)
    lines = log(storage, conversation)
    assert lines[:3] == theirs
    assert lines[3]["role"] == "rewind"
    assert lines[4]["content"] == [*theirs[1]["content"], text_block("more")]
    assert lines[5] == {**theirs[2], "meta": {"id": "seq-3"}}, "the same message keeps its id in another line"
    found = await again(storage, conversation)
    assert found.messages == conversation.messages
    assert conversation.info.total_tokens == (await again(storage, conversation)).info.total_tokens == 9


async def test_a_compacted_a_forked_and_a_rewound_session_are_read(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    for n in range(6):
        conversation.create_user_message(f"message {n}")
        conversation.create_assistant_message().add_text(f"answer {n}")
    await storage.update(conversation)

    async def summarize(messages: list[ConversationMessage]) -> str:
        return f"{len(messages)} messages"

    fork = await storage.store.fork_session(conversation.id)
    await storage.store.compact(conversation.id, summarize, keep_turns=1)
    found = await again(storage, conversation)
    assert texts(found)[0].startswith("[Conversation Summary]")
    assert texts(found)[-2:] == ["message 5", "answer 5"]
    conversation = await storage.get(conversation.id) or conversation
    conversation.messages[-1].add_text("and more")
    conversation.create_user_message("go on")
    await storage.update(conversation)
    assert (await again(storage, conversation)).messages == conversation.messages
    assert texts(await storage.get(fork["session"]["id"])) == texts(await storage.get(fork["session"]["id"]))
    await storage.store.append_rewind(fork["session"]["id"], 2)
    assert texts(await storage.get(fork["session"]["id"])) == ["message 0", "answer 0"]


async def test_large_results_and_images_come_back_whole_and_can_be_written_again(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    picture = base64.b64encode(os.urandom(100_000)).decode()
    conversation.create_user_message("look", images=[{"media_type": "image/png", "data": picture}])
    answer = conversation.create_assistant_message()
    answer.add_tool_call("c", "t", {})
    answer.add_tool_result("c", "t", "T", "x" * 200_000)
    await storage.update(conversation)
    assert storage.store.messages_path(conversation.id).stat().st_size < 160_000
    found = await again(storage, conversation)
    assert found == conversation
    found = await storage.get(conversation.id) or found
    found.messages[0].add_text("again")
    await storage.update(found)
    assert (await again(storage, conversation)).messages == found.messages


async def test_a_copy_through_json_is_written_where_it_belongs(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("hi")
    conversation.create_assistant_message().add_text("hello")
    conversation.add_usage({"total_tokens": 4})
    await storage.update(conversation)
    before = log(storage, conversation)
    copy = Conversation.model_validate_json(conversation.model_dump_json())
    await storage.update(copy)
    assert log(storage, conversation) == before
    copy.messages[1].parts[0].content = "good day"
    copy.create_user_message("bye")
    await storage.update(copy)
    assert texts(await again(storage, conversation)) == ["hi", "good day", "bye"]
    assert (await storage.store.usage(conversation.id)).total.total_tokens == 4
    conversation.create_user_message("and I?")
    await storage.update(conversation)
    assert texts(await again(storage, conversation)) == ["hi", "good day", "bye", "and I?"]


async def test_a_conversation_can_be_kept_in_another_storage_too(storage: ConversationStorage, tmp_path: Path) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("hi")
    await storage.update(conversation)
    async with SessionStore(store=MemoryStore(), embedder=False) as store:
        other = ConversationStorage(store, bus=Bus())
        await other.update(conversation)
        conversation.create_user_message("there")
        await other.update(conversation)
        assert texts(await other.get(conversation.id)) == ["hi", "there"]
    await storage.update(conversation)
    assert texts(await again(storage, conversation)) == ["hi", "there"]


async def test_it_goes_back_to_an_entry_and_on_from_there(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("one").usage = {"input_tokens": 5}
    await storage.update(conversation)
    then = await storage.store.last_seq(conversation.id)
    held = conversation.messages
    conversation.create_user_message("two, not yet written")
    conversation.update_title("Two")
    assert await storage.rewind(conversation, to_seq=then) is conversation
    assert conversation.messages is held
    assert (texts(conversation), conversation.info.message_count, conversation.title) == (["one"], 1, "Two")
    assert any("two, not yet written" in str(line) for line in log(storage, conversation))
    before = len(log(storage, conversation))
    conversation.create_user_message("three")
    await storage.update(conversation)
    assert len(log(storage, conversation)) == before + 1
    assert texts(await again(storage, conversation)) == ["one", "three"]
    with pytest.raises(RewindRefused):
        await storage.rewind(conversation, to_seq=99)
    assert texts(conversation) == ["one", "three"]


async def test_what_may_not_be_written_is_not(tmp_path: Path) -> None:
    def redact(message: ConversationMessage) -> ConversationMessage:
        return json.loads(json.dumps(message).replace("secret", "******"))

    async with SessionStore(tmp_path, redact=redact, embedder=False) as store:
        storage = ConversationStorage(store, bus=Bus())
        conversation = await storage.create(begun(title="my secret"))
        conversation.create_user_message("the secret word")
        conversation.create_user_message("hi")
        await storage.update(conversation)
        conversation.messages[1].add_text("there")
        conversation.update_title("another secret")
        await storage.update(conversation)
        assert texts(await again(storage, conversation)) == ["the ****** word", "hi\nthere"]
        assert b"secret" not in store.messages_path(conversation.id).read_bytes()
        assert b"secret" not in store.meta_path(conversation.id).read_bytes()


# --- lists


async def test_the_list_is_newest_first_and_reads_no_messages(storage: ConversationStorage) -> None:
    first, second = await storage.create(begun(title="A")), await storage.create(begun(title="B"))
    for conversation in (second, first):
        conversation.create_user_message("hi")
        await storage.update(conversation)
    await storage.store.close()
    path = storage.store.messages_path(second.id)
    path.write_bytes(b"x" * path.stat().st_size)
    async with SessionStore(storage.store.data_dir, embedder=False) as store:
        infos = await ConversationStorage(store, bus=Bus()).list_infos()
    assert [(info.title, info.message_count) for info in infos] == [("A", 1), ("B", 1)]
    assert infos[0] == first.info


async def test_the_counts_in_the_list_are_those_of_the_conversation(storage: ConversationStorage) -> None:
    conversation = await storage.create(begun())
    conversation.create_user_message("hi")
    answer = conversation.create_assistant_message()
    answer.add_tool_call("c", "t", {})
    answer.add_tool_result("c", "t", "T", "x")
    conversation.create_assistant_message()
    conversation.add_usage({"total_tokens": 12})
    await storage.update(conversation)
    assert [(info.message_count, info.total_tokens) for info in await storage.list_infos()] == [(3, 12)]
    await storage.store.close()
    assert [(info.message_count, info.total_tokens) for info in await storage.list_infos()] == [(3, 12)]


async def test_all_conversations_with_their_messages(storage: ConversationStorage) -> None:
    for text in ("a", "b"):
        conversation = await storage.create(begun(title=text))
        await conversation.create_user_message(text)
    assert [texts(conversation) for conversation in await storage.list()] == [["b"], ["a"]]


async def test_a_session_from_the_future_hides_no_other(
    storage: ConversationStorage, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = await storage.create(begun()), await storage.create(begun())
    await storage.store.close()
    path = storage.store.meta_path(new.id)
    path.write_text(json.dumps({**json.loads(path.read_text()), "message_format_version": 99}))
    assert [conversation.id for conversation in await storage.list()] == [old.id]
    assert len(await storage.list_infos()) == 2
    assert new.id in caplog.text


# --- the shared storage, and sub-sessions


async def test_sessions_are_made_found_and_listed_in_the_shared_storage(
    shared: ConversationStorage, tmp_path: Path
) -> None:
    conversation = await create_session(tmp_path, title="Here", model_id="m")
    assert conversation.info.project_dir == conversation.info.working_dir == str(tmp_path)
    assert (conversation.id, conversation.title) == (conversation.info.id, "Here")
    assert await get_session(conversation.id) == conversation
    assert await list_sessions() == [conversation.info]
    assert (tmp_path / "home" / "sessions" / conversation.id / "meta.json").exists()
    plain = await create_session(tmp_path, tmp_path / "deeper")
    assert (plain.title, plain.info.model_id, plain.info.provider_id) == ("New Session", None, None)
    assert plain.info.working_dir == str(tmp_path / "deeper")
    assert plain.info.root_session_id is None
    assert (await get_session(plain.id)) == plain


async def test_another_home_has_another_shared_storage(
    shared: ConversationStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_session(tmp_path)
    monkeypatch.setenv("CARREL_HOME", str(tmp_path / "other"))
    assert await list_sessions() == []
    assert get_session_storage() is get_session_storage()


async def test_the_shared_storage_can_be_set(shared: ConversationStorage, storage: ConversationStorage) -> None:
    set_session_storage(storage)
    conversation = await create_session("/project")
    assert get_session_storage() is storage
    assert await storage.get(conversation.id) == conversation
    set_session_storage(None)
    assert await get_session(conversation.id) is None


async def test_sub_sessions_know_where_they_come_from(shared: ConversationStorage, tmp_path: Path) -> None:
    root = await create_session(tmp_path, title="root")
    child = await create_session(tmp_path, title="child", parent_session_id=root.id)
    grandchild = await create_session(tmp_path, title="grandchild", parent_session_id=child.id)
    other = await create_session(tmp_path, title="other", root_session_id=root.id)
    assert (child.info.parent_session_id, child.info.root_session_id) == (root.id, root.id)
    assert (grandchild.info.parent_session_id, grandchild.info.root_session_id) == (child.id, root.id)
    assert (other.info.parent_session_id, other.info.root_session_id) == (None, root.id)
    assert [info.title for info in await shared.children(root.id)] == ["child"]
    other.info.parent_session_id = root.id
    await shared.update(other)
    assert {info.title for info in await shared.children(root.id)} == {"child", "other"}
    assert await get_session(grandchild.id) == grandchild


# --- events


async def test_subscribers_have_been_called_when_the_call_returns(storage: ConversationStorage) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []

    async def hear(event: Event) -> None:
        heard.append((str(event.type), event.data))

    storage.bus.subscribe_all(hear)
    conversation = await storage.create(begun(title="T"))
    about = {"session_id": conversation.id, "title": "T"}
    assert heard == [("session.created", about)]
    message = conversation.create_user_message("hi")
    await storage.update(conversation)
    message.add_text("there")
    await storage.update(conversation)
    conversation.messages.clear()
    await storage.update(conversation)
    await storage.delete(conversation.id)
    on_message = {**about, "message_id": message.id, "role": "user"}
    assert heard[1:] == [
        ("message.created", on_message),
        ("session.updated", about),
        ("message.updated", on_message),
        ("session.updated", about),
        ("session.rewound", about),
        ("session.updated", about),
        ("session.deleted", about),
    ]


@pytest.mark.parametrize("text", ["", "hi"])
async def test_an_update_of_a_new_one_publishes_session_updated(storage: ConversationStorage, text: str) -> None:
    heard: list[str] = []
    storage.bus.subscribe_all(lambda event: heard.append(str(event.type)))
    updated, created = begun(), begun()
    for conversation in (updated, created):
        if text:
            conversation.create_user_message(text)
    created_messages = ["message.created"] if text else []
    await storage.update(updated)
    assert heard == [*created_messages, "session.updated"]
    heard.clear()
    await storage.update(updated)
    assert heard == ["session.updated"]
    heard.clear()
    await storage.create(created)
    assert heard == ["session.created", *created_messages]


async def test_one_who_never_ends_or_raises_does_not_hold_up_the_writer(storage: ConversationStorage) -> None:
    storage.bus = Bus()
    let_go = asyncio.Event()
    heard: list[str] = []

    async def stuck(event: Event) -> None:
        await let_go.wait()

    def clumsy(event: Event) -> None:
        raise RuntimeError("oh dear")

    storage.bus.subscribe_all(stuck)
    storage.bus.subscribe_all(clumsy)
    storage.bus.subscribe(EventType.MESSAGE_CREATED, lambda event: heard.append(event.data["message_id"]))
    conversation = await storage.create(begun())
    for n in range(20):
        conversation.create_user_message(str(n))
        await storage.update(conversation)
    let_go.set()
    await asyncio.to_thread(storage.bus.drain, 60)
    assert heard == [message.id for message in conversation.messages]


async def test_events_go_to_the_shared_bus_by_default(shared: ConversationStorage) -> None:
    heard: list[str] = []
    unsubscribe = shared.bus.subscribe_all(lambda event: heard.append(f"{event.type} {event.data['session_id']}"))
    conversation = await create_session("/project")
    id_ = conversation.id
    await conversation.create_user_message("hi")
    await shared.delete(id_)
    await asyncio.to_thread(shared.bus.drain, 60)
    unsubscribe()
    assert heard == [
        f"session.created {id_}",
        f"message.created {id_}",
        f"session.updated {id_}",
        f"session.deleted {id_}",
    ]
