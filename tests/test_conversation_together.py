"""One conversation in several hands: what each of them says is there afterwards, once."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.conversation.conversation import Conversation, ConversationStorage
from carrel.conversation.entries import encode
from carrel.conversation.messages import user_text_message
from carrel.conversation.session_info import SessionInfo
from carrel.conversation.store import SessionStore
from carrel.conversation.typed_parts import TextPart
from carrel.events import Bus
from carrel.storage.memory import MemoryStore
from tests.storage.suite import Place


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[list[ConversationStorage]]:
    """Three that know nothing of each other, on one folder."""
    stores = [SessionStore(tmp_path, embedder=None) for _ in range(3)]
    yield [ConversationStorage(store, bus=Bus()) for store in stores]
    for store in stores:
        await store.close()


async def begin(storage: ConversationStorage, *texts: str) -> Conversation:
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


async def test_two_add_messages_and_both_are_there(stores: list[ConversationStorage]) -> None:
    mine = await begin(stores[0], "one")
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


async def test_a_message_changed_by_one_does_not_hide_what_the_other_said(stores: list[ConversationStorage]) -> None:
    mine = await begin(stores[0], "one", "two")
    theirs = await opened(stores[1])
    theirs.create_user_message("theirs")
    await stores[1].update(theirs)
    reword(mine, 1, "two, changed")
    mine.create_user_message("mine")
    await stores[0].update(mine)
    assert sorted(await texts(stores[2])) == ["mine", "one", "theirs", "two, changed"]
    reword(mine, 0, "one, changed")
    await stores[0].update(mine)
    assert sorted(await texts(stores[2])) == ["mine", "one, changed", "theirs", "two, changed"]
    theirs.create_user_message("theirs again")
    reword(theirs, 2, "theirs, changed")
    await stores[1].update(theirs)
    assert sorted(await texts(stores[2])) == [
        "mine",
        "one, changed",
        "theirs again",
        "theirs, changed",
        "two, changed",
    ]


async def test_their_change_and_mine_to_other_messages_are_both_there(stores: list[ConversationStorage]) -> None:
    mine = await begin(stores[0], "one", "two", "three")
    theirs = await opened(stores[1])
    reword(theirs, 0, "one of theirs")
    await stores[1].update(theirs)
    mine.create_user_message("four")
    await stores[0].update(mine)
    reword(mine, 2, "three of mine")
    await stores[0].update(mine)
    assert await texts(stores[2]) == ["one of theirs", "two", "three of mine", "four"]


async def test_what_one_takes_out_is_out_and_what_the_other_added_stays(stores: list[ConversationStorage]) -> None:
    mine = await begin(stores[0], "one", "two", "three")
    theirs = await opened(stores[1])
    theirs.create_user_message("theirs")
    await stores[1].update(theirs)
    del mine.messages[1]
    await stores[0].update(mine)
    assert await texts(stores[2]) == ["one", "three", "theirs"]
    theirs.create_user_message("more")
    await stores[1].update(theirs)
    reword(theirs, 3, "theirs, changed")
    await stores[1].update(theirs)
    assert await texts(stores[2]) == ["one", "three", "theirs, changed", "more"]


async def test_a_summary_made_elsewhere_stays_and_the_new_message_comes_after_it(
    stores: list[ConversationStorage],
) -> None:
    mine = await begin(stores[0], "one", "two", "three", "four")

    async def summarize(messages: object) -> str:
        return "it was said"

    await stores[1].store.compact("shared", summarize, keep_turns=1)
    message = mine.create_user_message("five")
    await stores[0].update(mine)
    message.add_text("changed")
    await stores[0].update(mine)
    found = await texts(stores[2])
    assert "it was said" in found[0]
    assert found[2:] == ["four", "five\nchanged"]


async def test_a_program_that_uses_the_plain_store_and_a_typed_one_get_along(stores: list[ConversationStorage]) -> None:
    mine = await begin(stores[0], "one")
    await stores[1].store.append_message("shared", user_text_message("plain"))
    reword(mine, 0, "one, changed")
    await stores[0].update(mine)
    assert sorted(await texts(stores[2])) == ["one, changed", "plain"]
    await stores[1].store.append_rewind("shared", 0)
    mine.create_user_message("on")
    await stores[0].update(mine)
    assert await texts(stores[2]) == ["on"]


async def test_tokens_are_counted_once_when_messages_are_written_again_for_others(
    stores: list[ConversationStorage],
) -> None:
    mine = await begin(stores[0], "one")
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
from carrel.conversation.conversation import ConversationStorage
from carrel.conversation.store import SessionStore

async def main(folder, name):
    storage = ConversationStorage(SessionStore(folder, embedder=None))
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


async def test_three_processes_write_and_change_at_once_and_lose_nothing(
    stores: list[ConversationStorage], tmp_path: Path
) -> None:
    await begin(stores[0], "one")
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


class Crowded(MemoryStore):
    """A store where others get in a word just before and just after each append to a log."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    async def append(self, key: str, records: Sequence[bytes], **how: Any) -> int:
        await self._put_in(key)
        seq = await super().append(key, records, **how)
        await self._put_in(key)
        return seq

    async def _put_in(self, key: str) -> None:
        if self.words and (word := self.words.pop(0)):
            await super().append(key, [encode(user_text_message(word))], create=False)


@pytest.mark.parametrize(
    "moments", [(1,), (0, 1), (1, 1), (1, 0, 1), (1, 1, 1), (1, 1, 1, 1), (1, 1, 0, 1, 1), (1,) * 9]
)
async def test_words_that_come_in_at_any_moment_of_a_change_stay(moments: tuple[int, ...]) -> None:
    crowd = Crowded()
    storage = ConversationStorage(SessionStore(store=crowd, embedder=None), bus=Bus())
    conversation = await begin(storage, "one", "two", "three")
    words = [f"word {n}" for n in range(sum(moments))]
    ready = iter(words)
    crowd.words = [next(ready) if moment else "" for moment in moments]
    reword(conversation, 1, "two, changed")
    conversation.create_user_message("four")
    await storage.update(conversation)
    found = await texts(storage)
    assert [text for text in found if not text.startswith("word")] == ["one", "two, changed", "three", "four"]
    assert sorted(text for text in found if text.startswith("word")) == [
        word for word in words if word not in crowd.words
    ]
    crowd.words = ["last"]
    await conversation.create_user_message("five")
    assert (await texts(storage))[-2:] == ["last", "five"]


async def test_it_is_the_same_in_every_kind_of_store(place: Place) -> None:
    mine_in, theirs_in, look = (
        ConversationStorage(SessionStore(store=place.open(), prefix="sessions", embedder=None), bus=Bus())
        for _ in range(3)
    )
    mine = await begin(mine_in, "one", "two")
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


STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["add", "add", "change", "grow", "remove", "insert", "save", "save", "reload", "title"]),
        st.integers(0, 30),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_one_writer_reads_exactly_what_it_has(steps: list[tuple[int, str, int]]) -> None:
    async def run() -> None:
        storage = ConversationStorage(SessionStore(store=MemoryStore(), embedder=None), bus=Bus())
        conversation = await begin(storage, "start")
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
def test_two_writers_in_turn_lose_nothing_that_nobody_took_out(steps: list[tuple[int, str, int]]) -> None:
    async def run() -> None:
        store = MemoryStore()
        storages = [ConversationStorage(SessionStore(store=store, embedder=None), bus=Bus()) for _ in range(2)]
        await begin(storages[0], "start")
        hands = [await opened(storage) for storage in storages]
        for number, (who, step, place) in enumerate(steps):
            step = "add" if step == "remove" else step
            hands[who] = await _step(storages[who], hands[who], step, place, f"text {number}")
        for storage, conversation in zip(storages, hands, strict=True):
            await storage.update(conversation)
        found = [message.id for message in (await opened(storages[0])).messages]
        assert len(found) == len(set(found))
        for conversation in hands:
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
