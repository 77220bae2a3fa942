"""Several writers of one conversation: appends of all stay, and of two edits the later one wins."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.conversation.log_entries import encode
from carrel.conversation.messages import user_text_message
from carrel.conversation.models.conversation import Conversation, ConversationStorage
from carrel.conversation.models.info import SessionInfo
from carrel.conversation.models.parts import TextPart
from carrel.conversation.store import SessionStore
from carrel.events import Bus
from carrel.storage.memory import MemoryStore
from tests.support.stores import Backend


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[list[ConversationStorage]]:
    """Three independent storages of one folder."""
    stores = [SessionStore(tmp_path, embedder=False) for _ in range(3)]
    yield [ConversationStorage(store, bus=Bus()) for store in stores]
    for store in stores:
        await store.close()


async def created(storage: ConversationStorage, *texts: str) -> Conversation:
    conversation = Conversation(info=SessionInfo(id="shared", project_dir="/project", working_dir="/project"))
    for text in texts:
        conversation.create_user_message(text)
    return await storage.create(conversation)


async def opened(storage: ConversationStorage) -> Conversation:
    conversation = await storage.get("shared")
    assert conversation is not None
    return conversation


async def texts(storage: ConversationStorage) -> list[str]:
    return [message.get_text_content() for message in (await opened(storage)).messages]


def reword(conversation: Conversation, place: int, text: str) -> None:
    conversation.messages[place].parts = [TextPart(content=text)]


async def test_messages_added_by_two_writers_are_all_there_in_order(stores: list[ConversationStorage]) -> None:
    mine = await created(stores[0], "one")
    theirs = await opened(stores[1])
    for n in range(5):
        mine.create_user_message(f"mine {n}")
        theirs.create_user_message(f"theirs {n}")
        await asyncio.gather(stores[0].update(mine), stores[1].update(theirs))
    found = await texts(stores[2])
    assert found[0] == "one"
    assert [text for text in found if text.startswith("mine")] == [f"mine {n}" for n in range(5)]
    assert [text for text in found if text.startswith("theirs")] == [f"theirs {n}" for n in range(5)]
    assert len(found) == 11


async def test_an_edit_does_not_hide_what_the_other_writer_added(stores: list[ConversationStorage]) -> None:
    mine = await created(stores[0], "one", "two", "three")
    theirs = await opened(stores[1])
    theirs.create_user_message("theirs")
    await stores[1].update(theirs)
    reword(mine, 1, "two, changed")
    mine.create_user_message("mine")
    await stores[0].update(mine)
    assert await texts(stores[2]) == ["one", "two, changed", "three", "theirs", "mine"]
    theirs.create_user_message("theirs again")
    reword(theirs, 3, "theirs, changed")
    await stores[1].update(theirs)
    del mine.messages[2]
    await stores[0].update(mine)
    assert await texts(stores[2]) == ["one", "two, changed", "theirs, changed", "mine", "theirs again"]


async def test_of_two_edits_of_one_message_the_later_wins_and_the_log_keeps_the_other(
    stores: list[ConversationStorage],
) -> None:
    mine = await created(stores[0], "one", "two", "three")
    theirs = await opened(stores[1])
    reword(theirs, 0, "one of theirs")
    reword(theirs, 2, "three of theirs")
    await stores[1].update(theirs)
    reword(mine, 2, "three of mine")
    mine.create_user_message("four")
    await stores[0].update(mine)
    assert await texts(stores[2]) == ["one of theirs", "two", "three of mine", "four"]
    assert "three of theirs" in stores[2].store.messages_path("shared").read_text()
    reword(theirs, 2, "three of theirs again")
    await stores[1].update(theirs)
    assert await texts(stores[2]) == ["one of theirs", "two", "three of theirs again", "four"]


async def test_a_message_removed_by_another_writer_stays_removed_unless_it_is_changed_here(
    stores: list[ConversationStorage],
) -> None:
    mine = await created(stores[0], "one", "two", "three", "four")
    theirs = await opened(stores[1])
    del theirs.messages[1:3]
    await stores[1].update(theirs)
    reword(mine, 2, "three, changed")
    await stores[0].update(mine)
    assert await texts(stores[2]) == ["one", "three, changed", "four"]


async def test_a_summary_made_elsewhere_stays(stores: list[ConversationStorage]) -> None:
    mine = await created(stores[0], "one", "two", "three", "four")

    async def summarize(messages: object) -> str:
        return "the summary"

    await stores[1].store.compact("shared", summarize, keep_turns=1)
    message = mine.create_user_message("five")
    await stores[0].update(mine)
    message.add_text("changed")
    await stores[0].update(mine)
    found = await texts(stores[2])
    assert "the summary" in found[0]
    assert found[2:] == ["four", "five\nchanged"]


async def test_entries_of_a_plain_session_store_count_as_another_writer(stores: list[ConversationStorage]) -> None:
    mine = await created(stores[0], "one")
    await stores[1].store.append_message("shared", user_text_message("plain"))
    reword(mine, 0, "one, changed")
    await stores[0].update(mine)
    assert await texts(stores[2]) == ["one, changed", "plain"]
    await stores[1].store.append_rewind("shared", 0)
    mine.create_user_message("on")
    await stores[0].update(mine)
    assert await texts(stores[2]) == ["on"]


async def test_tokens_are_counted_once_when_messages_are_written_again(stores: list[ConversationStorage]) -> None:
    mine = await created(stores[0], "one")
    theirs = await opened(stores[1])
    for conversation, storage in ((mine, stores[0]), (theirs, stores[1])):
        answer = conversation.create_assistant_message()
        answer.add_text("answer")
        answer.usage = {"total_tokens": 10}
        conversation.add_usage(answer.usage)
        await storage.update(conversation)
    for n in range(3):
        reword(mine, 0, f"one {n}")
        await stores[0].update(mine)
    assert (await stores[2].store.usage("shared")).total.total_tokens == 20
    found = await opened(stores[2])
    assert [message.usage for message in found.messages] == [None, {"total_tokens": 10}, {"total_tokens": 10}]


PROGRAM = """
import asyncio, sys
from carrel.conversation.models.conversation import ConversationStorage
from carrel.conversation.store import SessionStore

async def main(folder, name):
    storage = ConversationStorage(SessionStore(folder, embedder=False))
    conversation = await storage.get("shared")
    print("ready", flush=True)
    sys.stdin.readline()
    for n in range(40):
        message = conversation.create_user_message(f"{name} {n}")
        await storage.update(conversation)
        if n % 2 == 0:
            message.add_text("changed")
            await storage.update(conversation)
        if n % 5 == 4:
            conversation.messages[-3].add_text("later")
            await storage.update(conversation)

asyncio.run(main(*sys.argv[1:]))
"""


def expected_of(name: str) -> list[str]:
    return [f"{name} {n}" + "\nchanged" * (n % 2 == 0) + "\nlater" * (n % 5 == 2) for n in range(40)]


async def test_three_processes_append_and_edit_at_once_and_nothing_is_lost(
    stores: list[ConversationStorage], tmp_path: Path
) -> None:
    await created(stores[0], "one")
    await stores[0].store.close()
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, str(tmp_path), name, stdin=PIPE, stdout=PIPE
        )
        for name in ("a", "b", "c")
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        async with asyncio.timeout(100):
            await asyncio.gather(*(process.communicate(b"go\n") for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(await texts(stores[2])) == sorted(["one", *expected_of("a"), *expected_of("b"), *expected_of("c")])
    assert [info.message_count for info in await stores[2].list_infos()] == [121]


class InterruptedStore(MemoryStore):
    """A store in which another writer appends just before and just after the appends of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[str] = []

    async def append(self, key: str, records: Sequence[bytes], **options: Any) -> int:
        await self._append_other(key)
        seq = await super().append(key, records, **options)
        await self._append_other(key)
        return seq

    async def _append_other(self, key: str) -> None:
        if self.others and (text := self.others.pop(0)):
            await super().append(key, [encode(user_text_message(text))], create=False)


@pytest.mark.parametrize("moments", [(1,), (0, 1), (1, 1), (1, 0, 1), (1, 1, 0, 1, 1), (1,) * 9])
async def test_messages_that_others_append_at_any_moment_of_an_edit_stay(moments: tuple[int, ...]) -> None:
    store = InterruptedStore()
    storage = ConversationStorage(SessionStore(store=store, embedder=False), bus=Bus())
    conversation = await created(storage, "one", "two", "three")
    store.others = [f"other {n}" if moment else "" for n, moment in enumerate(moments)]
    expected = [text for text in store.others if text]
    reword(conversation, 1, "two, changed")
    conversation.create_user_message("four")
    await storage.update(conversation)
    found = await texts(storage)
    assert [text for text in found if not text.startswith("other")] == ["one", "two, changed", "three", "four"]
    assert [text for text in found if text.startswith("other")] == [
        text for text in expected if text not in store.others
    ]
    store.others = ["last"]
    await conversation.create_user_message("five")
    assert (await texts(storage))[-2:] == ["last", "five"]


async def test_it_is_the_same_in_every_kind_of_store(backend: Backend) -> None:
    mine_in, theirs_in, look = (
        ConversationStorage(SessionStore(store=backend.open(), prefix="sessions", embedder=False), bus=Bus())
        for _ in range(3)
    )
    mine = await created(mine_in, "one", "two")
    theirs = await opened(theirs_in)
    theirs.create_user_message("theirs")
    await theirs_in.update(theirs)
    reword(mine, 1, "two, changed")
    answer = mine.create_assistant_message()
    answer.add_tool_call("c", "t", {"a": 1})
    await mine_in.update(mine)
    answer.add_tool_result("c", "t", output="x" * 100_000)
    mine.add_usage({"total_tokens": 5})
    await mine_in.update(mine)
    found = await opened(look)
    assert [message.get_text_content() for message in found.messages] == ["one", "two, changed", "theirs", ""]
    assert found.messages[3] == answer
    assert [(info.message_count, info.total_tokens) for info in await look.list_infos()] == [(4, 5)]
    assert await mine_in.delete("shared")
    assert await look.get("shared") is None


ACTIONS = ["add", "add", "change", "grow", "remove", "insert", "save", "save", "reload", "title"]
STEPS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(ACTIONS), st.integers(0, 30)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_one_writer_reads_exactly_what_it_has(steps: list[tuple[int, str, int]]) -> None:
    async def run() -> None:
        storage = ConversationStorage(SessionStore(store=MemoryStore(), embedder=False), bus=Bus())
        conversation = await created(storage, "start")
        for number, (_, step, place) in enumerate(steps):
            conversation = await _step(storage, conversation, step, place, f"text {number}")
            if step in ("save", "reload"):
                found = await opened(storage)
                assert found.messages == conversation.messages
                assert found.info.message_count == len(conversation.messages)
                assert found.title == conversation.title

    asyncio.run(run())


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_two_writers_in_turn_lose_nothing_unless_one_removed_it(steps: list[tuple[int, str, int]]) -> None:
    async def run() -> None:
        store = MemoryStore()
        storages = [ConversationStorage(SessionStore(store=store, embedder=False), bus=Bus()) for _ in range(2)]
        await created(storages[0], "start")
        conversations = [await opened(storage) for storage in storages]
        for number, (writer, step, place) in enumerate(steps):
            step = "add" if step == "remove" else step
            conversations[writer] = await _step(storages[writer], conversations[writer], step, place, f"text {number}")
        for storage, conversation in zip(storages, conversations, strict=True):
            await storage.update(conversation)
        found = [message.id for message in (await opened(storages[0])).messages]
        assert len(found) == len(set(found))
        for conversation in conversations:
            assert {message.id for message in conversation.messages} <= set(found)

    asyncio.run(run())


async def _step(
    storage: ConversationStorage, conversation: Conversation, step: str, place: int, text: str
) -> Conversation:
    messages = conversation.messages
    match step:
        case "add":
            conversation.create_user_message(text)
        case "change" if messages:
            messages[place % len(messages)].parts = [TextPart(content=text)]
        case "grow" if messages:
            messages[-1].add_text(text)
        case "remove" if messages:
            del messages[place % len(messages)]
        case "insert":
            message = conversation.create_user_message(text)
            messages.pop()
            messages.insert(place % (len(messages) + 1), message)
        case "title":
            conversation.update_title(text)
        case "save":
            await storage.update(conversation)
        case "reload":
            await storage.update(conversation)
            return await opened(storage)
    return conversation
