"""Several at once on one session: who looks at a log and then writes does not pass over what came in between."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from carrel.conversation.entries import build_rewind_event, encode
from carrel.conversation.messages import ConversationMessage
from carrel.conversation.store import SessionStore
from carrel.errors import CompactRefused, RewindRefused, SessionExists
from carrel.storage.memory_store import MemoryStore
from tests.conversation.conftest import Reopen
from tests.conversation.words import assistant, compact, outline, user


class Crowded(MemoryStore):
    """A store where somebody else writes a line just before an append to a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[ConversationMessage] = []

    async def append(self, key: str, records: Sequence[bytes], **how: Any) -> int:
        if key.endswith("messages.jsonl") and self.lines:
            await super().append(key, [encode(self.lines.pop(0))], create=False)
        return await super().append(key, records, **how)


async def crowded(*words: str) -> tuple[Crowded, SessionStore]:
    crowd = Crowded()
    store = SessionStore(store=crowd, embedder=None)
    await store.append_many("s", [user(word) for word in words])
    return crowd, store


async def shown(store: SessionStore, session_id: str = "s") -> list[str]:
    data = await store.load_session(session_id)
    assert data is not None
    return outline(data["messages"])


async def sums(messages: list[Any]) -> str:
    return "sum"


@pytest.mark.parametrize("line", [build_rewind_event(1), compact("theirs")], ids=["rewind", "compact"])
async def test_a_summary_is_refused_when_another_changes_the_view_at_the_last_moment(line: ConversationMessage):
    crowd, store = await crowded("one", "two", "three")
    crowd.lines = [line]
    with pytest.raises(CompactRefused):
        await store.compact("s", sums, keep_turns=1)
    assert "(sum)" not in await shown(store)


async def test_what_is_said_at_the_last_moment_stands_after_the_summary():
    crowd, store = await crowded("one", "two", "three")
    crowd.lines = [user("four"), assistant("5")]
    await store.compact("s", sums, keep_turns=1)
    assert await shown(store) == ["(sum)", "(ack)", "three", "four", "5"]
    assert (await store.read_meta("s", counts=True))["message_count"] == 5


async def test_a_rewind_finds_its_place_in_what_is_visible_when_it_is_written():
    crowd, store = await crowded("one", "two", "three")
    crowd.lines = [compact("theirs")]
    await store.append_rewind("s", 1)
    assert await shown(store) == ["(theirs)"]
    crowd.lines = [build_rewind_event(0)]
    with pytest.raises(RewindRefused):
        await store.append_rewind("s", 1)


async def test_what_is_said_at_the_last_moment_is_rewound_with_the_rest():
    crowd, store = await crowded("one", "two", "three")
    crowd.lines = [user("four")]
    await store.append_rewind("s", 2)
    assert await shown(store) == ["one", "two"]
    assert (await store.read_meta("s", counts=True))["message_count"] == 2


async def test_after_compacting_the_counts_are_known_without_reading_the_log(reopened: Reopen):
    store = reopened()
    await store.append_many("s", [user("one"), assistant("1", usage={"total_tokens": 5}), user("two")])
    await store.compact("s", sums, keep_turns=1)
    await store.append_message("s", user("three"))
    await store.close()
    [meta] = await reopened().list_sessions()
    assert (meta["message_count"], meta["total_tokens"], meta["log_seq"]) == (4, 5, 5)


@pytest.mark.parametrize(
    "makers",
    [
        [lambda store: store.fork_session("s", new_id="new")] * 4,
        [
            lambda store: store.fork_session("s", new_id="new"),
            lambda store: store.create_session(session_id="new"),
            lambda store: store.fork_session("s", at=1, new_id="new"),
        ],
    ],
    ids=["forks", "forks and a new one"],
)
async def test_of_several_who_make_a_session_of_one_name_one_does(
    reopened: Reopen, makers: list[Callable[[SessionStore], Any]]
):
    stores = [reopened() for _ in makers]
    await stores[0].append_many("s", [user("one"), user("two")])
    tries = (make(store) for make, store in zip(makers, stores, strict=True))
    made = await asyncio.gather(*tries, return_exceptions=True)
    assert sorted(isinstance(each, SessionExists) for each in made) == [False] + [True] * (len(makers) - 1)
    [only] = [each for each in made if isinstance(each, dict)]
    assert await shown(reopened(), "new") == outline(only["messages"])


async def test_lists_asked_for_at_once_are_all_whole(reopened: Reopen):
    store = reopened()
    for number in range(100):
        await store.append_message(f"s{number}", user("hello"))
    again = reopened()

    async def listed(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return len(await again.list_sessions())

    for _ in range(3):
        assert await asyncio.gather(*(listed(turns) for turns in range(0, 200, 5))) == [100] * 40


async def test_a_list_that_is_given_up_leaves_the_next_one_whole(reopened: Reopen):
    store = reopened()
    for number in range(100):
        await store.append_message(f"s{number}", user("hello"))
    for turns in range(0, 60, 3):
        again = reopened()
        await again.list_sessions()
        given_up = asyncio.create_task(again.list_sessions())
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert len(await again.list_sessions()) == 100
