"""Search over sessions: what was said is found again, in these words or in others, whatever happened to it since."""

import asyncio
import base64
import json
import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carrel.conversation.messages import (
    assistant_message,
    build_message,
    document_block,
    image_block,
    text_block,
    tool_result_block,
    tool_use_block,
    user_text_message,
)
from carrel.conversation.query import judge, parse, snippet
from carrel.conversation.search import SearchHit
from carrel.conversation.searchable import FIELDS, OWNER, Known, kept_meanings, own_parts
from carrel.conversation.store import SessionStore
from carrel.storage.catalogue import Catalogue
from carrel.storage.memory import MemoryStore
from tests.storage.suite import Place


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    async with SessionStore(tmp_path / "sessions", embedder=None) as store:
        yield store


async def say(store: SessionStore, session_id: str, *texts: str, title: str | None = None) -> None:
    """A conversation of the user and the assistant in turn."""
    if title is not None:
        await store.create_session(title, session_id=session_id)
    for number, text in enumerate(texts):
        message = user_text_message(text) if number % 2 == 0 else assistant_message([text_block(text)])
        await store.append_message(session_id, message)


def places(hits: Sequence[SearchHit]) -> list[tuple[str, int]]:
    return [(hit.session_id, hit.seq) for hit in hits]


def marked(hit: SearchHit) -> list[str]:
    return [hit.snippet[start:end] for start, end in hit.marks]


# --- words ----------------------------------------------------------------------------------------------------------


async def test_what_was_said_is_found_with_the_words_marked(store: SessionStore) -> None:
    await say(store, "a", "Why does the login fail?", "The session cookie expires too early.", title="Login")
    await say(store, "b", "Bake me a cake", "With pleasure.", title="Cake")
    [hit] = await store.search("cookie expires")
    assert (hit.session_id, hit.seq, hit.role, hit.title, hit.how) == ("a", 2, "assistant", "Login", "words")
    assert hit.snippet == "The session cookie expires too early."
    assert marked(hit) == ["cookie", "expires"]
    assert hit.visible
    assert not hit.archived
    assert hit.updated_at


async def test_nothing_is_indexed_before_the_first_search(store: SessionStore) -> None:
    await say(store, "a", "hello")
    assert store.data_dir is not None
    assert not list(store.data_dir.glob(".catalogue*"))
    assert await store.search("hello")
    assert list(store.data_dir.glob(".catalogue*"))


async def test_later_messages_and_later_sessions_are_found_at_once(store: SessionStore) -> None:
    await say(store, "a", "about apples")
    assert places(await store.search("apples")) == [("a", 1)]
    await say(store, "a", "about pears")
    await say(store, "b", "about plums")
    assert places(await store.search("pears")) == [("a", 2)]
    assert places(await store.search("plums")) == [("b", 1)]
    assert places(await store.search("apples")) == [("a", 1)]


async def test_one_hit_for_each_session_and_then_more_of_the_same(store: SessionStore) -> None:
    await say(store, "a", *["the pool is empty"] * 6)
    await say(store, "b", "the pool is full")
    assert {session for session, _ in places(await store.search("pool", limit=2))} == {"a", "b"}
    many = await store.search("pool", limit=4)
    assert len(set(places(many))) == 4
    assert [hit.score for hit in many] == sorted((hit.score for hit in many), reverse=True)
    assert len(await store.search("pool", limit=1)) == 1
    assert await store.search("pool", limit=0) == []


async def test_a_word_is_found_while_it_is_being_typed(store: SessionStore) -> None:
    await say(store, "a", "the deployment went well")
    for typed in ("dep", "deploy", "deployment", "the deploy", "went we"):
        assert places(await store.search(typed)) == [("a", 1)], typed
    assert await store.search("deploy well") == [] or places(await store.search("deploy well")) == [("a", 1)]
    assert places(await store.search("deploym*")) == [("a", 1)]


async def test_quotes_ask_for_exactly_that(store: SessionStore) -> None:
    await say(store, "a", "the connection pool is empty")
    await say(store, "b", "a pool without a connection")
    assert places(await store.search('"connection pool"')) == [("a", 1)]
    assert places(await store.search("“connection pool” empty")) == [("a", 1)]
    assert await store.search('"pool connection"') == []
    assert {session for session, _ in places(await store.search("connection pool"))} == {"a", "b"}


async def test_who_has_all_the_words_comes_before_who_has_some(store: SessionStore) -> None:
    await say(store, "some", "the login page")
    await say(store, "all", "the login fails after the deployment")
    await say(store, "none", "the weather is fine")
    assert [session for session, _ in places(await store.search("login fails deployment"))] == ["all", "some"]


async def test_what_was_said_comes_before_what_a_tool_printed(store: SessionStore) -> None:
    result = build_message(
        "user", [tool_result_block(tool_use_id="1", model_text="x " * 500 + "gearbox " + "y " * 500)]
    )
    await say(store, "said", "The gearbox is broken")
    await say(store, "printed", "look")
    await store.append_message("printed", result)
    assert places(await store.search("gearbox")) == [("said", 1), ("printed", 2)]


async def test_titles_are_found_also_after_a_change(store: SessionStore) -> None:
    await say(store, "a", "hello", title="Quarterly numbers")
    [hit] = await store.search("quarterly")
    assert (hit.seq, hit.role, marked(hit)) == (0, "title", ["Quarterly"])
    await store.rename("a", "Annual figures")
    assert places(await store.search("annual")) == [("a", 0)]
    assert await store.search("quarterly") == []


async def test_tools_names_inputs_and_outputs_are_found(store: SessionStore) -> None:
    use = tool_use_block(tool_id="1", name="grep", input={"pattern": "needle", "deep": {"list": ["haystack", 42]}})
    await store.append_message("a", assistant_message([use]))
    await store.append_message(
        "a", build_message("user", [tool_result_block(tool_use_id="1", model_text="found rusty")])
    )
    await store.append_message("a", build_message("user", [document_block("AAAA", mime_type="x/y", name="budget.xls")]))
    for word, seq in (("grep", 1), ("needle", 1), ("haystack", 1), ("rusty", 2), ("budget", 3)):
        assert places(await store.search(word)) == [("a", seq)], word


LONG = "".join(f"line {number} of the build says nothing\n" for number in range(4000))


def printed(text: str) -> Any:
    return build_message("user", [tool_result_block(tool_use_id="t", model_text=text)])


async def test_a_long_output_is_found_by_what_stands_in_its_middle(store: SessionStore) -> None:
    await store.append_message("a", printed(f"{LONG}cannot open quxlib.so\n{LONG}"))
    await store.append_message("a", user_text_message("What went wrong?"))
    assert list(store.session_dir("a").glob("tool-output/*"))
    for asked in ("quxlib", '"cannot open quxlib.so"', "line 3999"):
        hit = (await store.search(asked))[0]
        assert (hit.session_id, hit.seq) == ("a", 1)
        assert marked(hit)
    # One that comes after the first search, and one that is gone.
    await store.append_message("b", printed(f"{LONG}then corgelib\n{LONG}"))
    assert places(await store.search("corgelib")) == [("b", 1)]
    for file in store.session_dir("b").glob("tool-output/*"):
        file.unlink()
    assert places(await store.search("corgelib")) == [("b", 1)]


async def test_of_an_output_without_end_the_ends_are_found(store: SessionStore) -> None:
    filler = "filler " * 100_000
    await store.append_message("a", printed(f"alpha {filler} middle {filler} omega"))
    assert places(await store.search("alpha")) == places(await store.search("omega")) == [("a", 1)]
    assert await store.search("middle") == []


async def test_a_word_that_a_tool_printed_often_does_not_come_before_what_was_said(store: SessionStore) -> None:
    await store.create_session("The walrus", session_id="a")
    await store.append_message("a", printed("walrus " * 300))
    await store.append_message("a", user_text_message("Where is the walrus?"))
    assert places(await store.search("walrus")) == [("a", 0), ("a", 2), ("a", 1)]


async def test_a_picture_is_found_by_its_name_and_not_by_how_it_is_kept(store: SessionStore) -> None:
    picture = image_block(base64.b64encode(os.urandom(90_000)).decode(), mime_type="image/png", name="harbour.png")
    await store.append_message("a", build_message("user", [text_block("Look at this"), picture]))
    assert (await store.search("harbour"))[0].snippet == "Look at this harbour.png"
    assert await store.search("blobs") == []


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("请检查登录模块为什么在部署之后失败", "登录模块"),
        ("请检查登录模块为什么在部署之后失败", "部署失败"),
        ("データベースの接続が切れた", "接続"),
        ("데이터베이스 연결이 끊어졌다", "연결"),
        ("L’été à la plage", "ete plage"),
        ("cafe\u0301 crème", "café creme"),
        ("See src/carrel/errors.py for foo_bar", "errors.py foo_bar"),
    ],
)
async def test_any_language_is_found_and_marked(store: SessionStore, text: str, asked: str) -> None:
    await say(store, "other", "nothing of the kind")
    await say(store, "a", text)
    [hit] = await store.search(asked)
    assert (hit.session_id, hit.seq) == ("a", 1)
    assert hit.marks


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40) | st.text(alphabet='"*()-+:^{}\\\x00\n AND OR NEAR é登🚀', max_size=40))
async def test_any_text_can_be_asked_for(text: str) -> None:
    memory = SessionStore(store=MemoryStore(), embedder=None)
    await memory.append_message("a", user_text_message("some AND words OR 登录 é (near) x"))
    for hit in await memory.search(text):
        assert all(0 <= start < end <= len(hit.snippet) for start, end in hit.marks)
    await memory.close()


@pytest.mark.parametrize("text", ["", " ", '"', '""', "\x00", "🚀", "*", "((", "x" * 100_000, "a " * 50_000, '"' * 999])
async def test_odd_questions_get_an_answer(store: SessionStore, text: str) -> None:
    await say(store, "a", "hello world")
    assert await store.search(text) == []


async def test_odd_messages_can_be_indexed(store: SessionStore) -> None:
    await say(store, "a", "before")
    path = store.messages_path("a")
    await store.close()
    with path.open("ab") as log:
        log.write(b'{"role":"user","content":"plain text here"}\n')
        log.write(b'{"role":"user","content":[{"type":"text","text":"lone \\ud800 surrogate"}]}\n')
        log.write(b"this is no json\n\n[]\n")
        log.write(b'{"role":"critic","content":[{"type":"verdict","text":"splendid"}]}\n')
        log.write(b'{"role":"user","content":[{"type":"text","text":17},null,"x"],"meta":[]}\n')
        log.write(b'{"role":"user","content":[{"type":"text","text":"nul \\u0000 afterwards"}]}\n')
    assert places(await store.search("plain")) == [("a", 2)]
    assert places(await store.search("surrogate")) == [("a", 3)]
    assert [(hit.seq, hit.role) for hit in await store.search("splendid")] == [(7, "critic")]
    assert places(await store.search("afterwards")) == [("a", 9)]


# --- what happened since --------------------------------------------------------------------------------------------


async def test_rewound_messages_are_found_and_said_to_be_so(store: SessionStore) -> None:
    await say(store, "a", "about apples", "about pears", "about plums")
    await store.append_rewind("a", 1)
    assert [(hit.seq, hit.visible) for hit in await store.search("pears")] == [(2, False)]
    assert [(hit.seq, hit.visible) for hit in await store.search("apples")] == [(1, True)]
    await store.append_rewind("a", to_seq=2)
    assert [(hit.seq, hit.visible) for hit in await store.search("pears")] == [(2, True)]
    assert [(hit.seq, hit.visible) for hit in await store.search("plums")] == [(3, False)]


async def test_compacted_history_is_found_and_so_is_the_summary(store: SessionStore) -> None:
    await say(store, "a", "about apples", "about pears", "about plums", "about figs")

    async def summarize(messages: list[Any]) -> str:
        return "They spoke of fruit."

    await store.compact("a", summarize, keep_tokens=0)
    assert [(hit.seq, hit.visible) for hit in await store.search("apples")] == [(1, False)]
    assert [(hit.seq, hit.role, hit.visible) for hit in await store.search("fruit")] == [(5, "compact", True)]
    await say(store, "a", "about grapes")
    assert [(hit.seq, hit.visible) for hit in await store.search("grapes")] == [(6, True)]


async def test_deleted_sessions_are_not_found(store: SessionStore) -> None:
    await say(store, "a", "about apples")
    await say(store, "b", "about apples")
    assert len(await store.search("apples")) == 2
    await store.delete_session("a")
    assert places(await store.search("apples")) == [("b", 1)]
    await say(store, "b2", "more apples")
    await store.delete_session("b2")
    assert places(await store.search("apples")) == [("b", 1)]


async def test_a_session_that_comes_again_under_its_old_name_is_another(store: SessionStore) -> None:
    await say(store, "a", "about apples", "about pears")
    assert await store.search("apples")
    await store.delete_session("a")
    await store.create_session("New", session_id="a")
    await say(store, "a", "about plums", "about figs", "about grapes")
    assert await store.search("apples") == []
    assert places(await store.search("plums")) == [("a", 1)]
    assert places(await store.search("grapes")) == [("a", 3)]


async def test_a_cleared_session_keeps_its_title_and_nothing_else(store: SessionStore) -> None:
    await say(store, "a", "about apples", title="Fruit")
    assert await store.search("apples")
    await store.clear_session("a")
    assert not [hit for hit in await store.search("apples") if hit.visible]
    assert places(await store.search("fruit")) == [("a", 0)]
    await say(store, "a", "about pears", "about plums")
    assert [hit.visible for hit in await store.search("plums")] == [True]


async def test_archived_sessions_are_found_and_said_to_be_so(store: SessionStore) -> None:
    await say(store, "a", "about apples")
    assert [hit.archived for hit in await store.search("apples")] == [False]
    await store.archive("a")
    assert [hit.archived for hit in await store.search("apples")] == [True]
    await store.unarchive("a")
    assert [hit.archived for hit in await store.search("apples")] == [False]


async def test_labels_are_found(store: SessionStore) -> None:
    await say(store, "a", "one", "two")
    await store.label("a", "before the refactoring")
    [hit] = await store.search("refactoring")
    assert (hit.role, hit.visible, marked(hit)) == ("label", True, ["refactoring"])


# --- forks ----------------------------------------------------------------------------------------------------------


async def test_what_forks_share_is_found_once(store: SessionStore) -> None:
    await say(store, "a", "about apples", "about pears", title="Fruit")
    for number in range(5):
        await store.fork_session("a", new_id=f"fork{number}")
        await say(store, f"fork{number}", f"own words number{number} of elephants")
    assert places(await store.search("apples")) == [("a", 1)]
    assert len(await store.search("elephants", limit=20)) == 5
    assert places(await store.search("number3")) == [("fork3", 5)]


async def test_a_fork_of_a_long_session_is_indexed_once(store: SessionStore) -> None:
    for _ in range(4):
        await store.append_many("a", [user_text_message("walrus " + "word " * 250) for _ in range(3000)])
    await store.fork_session("a", new_id="b")
    await store.append_message("b", user_text_message("the penguin"))
    assert places(await store.search("penguin")) == [("b", 12_003)]
    assert {hit.session_id for hit in await store.search("walrus")} == {"a"}
    assert store._search is not None
    assert not store._search._catalogue.worn()


async def test_metadata_that_is_wrong_about_a_fork_hides_nothing(store: SessionStore) -> None:
    await say(store, "a", "the walrus", "a reply")
    for name, at in (("early", 0), ("late", 3), ("never", 1)):
        await store.fork_session("a", at=2, new_id=name)
        await store.append_message(name, user_text_message(f"the {name} penguin"))
        if name == "never":
            await say(store, name + "1", "the never1 penguin")
            name += "1"
        await store.close()
        meta = json.loads(store.meta_path(name).read_bytes())
        store.meta_path(name).write_text(json.dumps(meta | {"parent_session_id": "a", "forked_at_seq": at}))
    assert {hit.session_id for hit in await store.search("penguin")} == {"early", "late", "never", "never1"}
    assert places(await store.search("walrus")) == [("a", 1)]


async def test_forks_that_were_indexed_before_their_parent_went_keep_its_words(store: SessionStore) -> None:
    await say(store, "a", "about apples", "about pears", "about plums")
    await store.fork_session("a", 1, new_id="early")
    await store.fork_session("a", 3, new_id="late")
    await say(store, "late", "about figs")
    await store.fork_session("late", new_id="grandchild")
    assert places(await store.search("pears")) == [("a", 2)]
    assert places(await store.search("figs")) == [("late", 6)]
    await store.delete_session("a")
    assert places(await store.search("pears")) == [("late", 2)]
    assert places(await store.search("apples")) == [("late", 1)]
    await store.delete_session("late")
    assert places(await store.search("pears")) == [("grandchild", 2)]
    assert places(await store.search("figs")) == [("grandchild", 6)]
    assert len(await store.search("apples")) == 2 or places(await store.search("apples")) == [("grandchild", 1)]


def test_who_indexes_what_forks_share() -> None:
    def known(*forks: tuple[str, int, int], head: str = "h", next_seq: int = 100) -> Known:
        return Known(head=head, next_seq=next_seq, forks=list(forks))

    parent, child, other = known(), known(("p", 9, 10)), known(("p", 20, 21))
    assert own_parts({"p": parent, "c": child, "o": other}) == {"c": 10, "o": 21}
    assert own_parts({"c": child, "o": other}) == {"c": 10, "o": 1}
    assert own_parts({"c": child}) == {"c": 1}
    # The parent was cleared and has other words now.
    assert own_parts({"p": known(head="x"), "c": child}) == {"c": 1}
    assert own_parts({"p": known(next_seq=5), "c": child}) == {"c": 1}
    # A fork of a fork whose parent is gone, but not its grandparent.
    grandchild = known(("p", 9, 10), ("c", 30, 31))
    assert own_parts({"p": parent, "g": grandchild}) == {"g": 10}
    assert own_parts({"p": parent, "c": child, "g": grandchild}) == {"c": 10, "g": 31}
    assert own_parts({"s": known(("s", 9, 10))}) == {"s": 1}


# --- meaning --------------------------------------------------------------------------------------------------------


class Fruit:
    """An embedder that knows one thing: whether a text is about fruit or about metal."""

    dimensions = 2
    texts: list[str]

    def __init__(self, name: str = "fruit-1") -> None:
        self.name = name
        self.texts = []

    def embed(self, texts: Sequence[str]) -> Any:
        self.texts += texts
        fruit, metal = {"apple", "pear", "fruit", "juicy"}, {"iron", "copper", "metal", "shiny"}
        rows = [[len(fruit & set(text.lower().split())), len(metal & set(text.lower().split()))] for text in texts]
        vectors = numpy.array(rows, dtype=numpy.float32).reshape(-1, 2)
        return vectors / numpy.maximum(numpy.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


async def test_other_words_with_the_same_meaning_are_found(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=Fruit()) as store:
        await say(store, "a", "I ate an apple", title="Lunch")
        await say(store, "b", "we melted iron", title="Work")
        [hit] = await store.search("juicy")
        assert (hit.session_id, hit.seq, hit.how, hit.marks) == ("a", 1, "meaning", [])
        assert hit.snippet == "I ate an apple"
        both = await store.search("apple")
        assert [(hit.session_id, hit.how) for hit in both] == [("a", "both")]
        assert await store.search('"juicy"') == []


async def test_found_by_both_comes_before_found_by_one(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=Fruit()) as store:
        await say(store, "meaning", "a pear on a plate", title="M")
        await say(store, "words", "the word apple-tree in another sense", title="W")
        await say(store, "both", "an apple a day", title="B")
        assert [(hit.session_id, hit.how) for hit in await store.search("apple")] == [
            ("both", "both"),
            ("words", "words"),
            ("meaning", "meaning"),
        ]


async def test_later_words_are_embedded_once_and_only_what_the_user_said(tmp_path: Path) -> None:
    embedder = Fruit()
    async with SessionStore(tmp_path, embedder=embedder) as store:
        await say(store, "a", "an apple", "shiny copper", title="T")
        await store.search("x")
        assert embedder.texts == ["T", "an apple", "x"]
        await say(store, "a", "a pear")
        await store.search("y")
        assert embedder.texts == ["T", "an apple", "x", "a pear", "y"]
        assert {hit.seq for hit in await store.search("juicy pear")} == {3}
    async with SessionStore(tmp_path, embedder=embedder) as store:
        del embedder.texts[:]
        assert [hit.session_id for hit in await store.search("juicy")] == ["a"]
        assert embedder.texts == ["juicy"]


async def test_sessions_indexed_without_an_embedder_get_their_vectors_later(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=None) as store:
        await say(store, "a", "an apple", title="T")
        assert await store.search("juicy") == []
    async with SessionStore(tmp_path, embedder=Fruit()) as store:
        assert [hit.session_id for hit in await store.search("juicy")] == ["a"]
    async with SessionStore(tmp_path, embedder=None) as store:
        await say(store, "b", "a pear", title="T")
        assert [hit.session_id for hit in await store.search("pear")] == ["b"]
    other = Fruit("fruit-2")
    async with SessionStore(tmp_path, embedder=other) as store:
        assert {hit.session_id for hit in await store.search("juicy")} == {"a", "b"}
        assert sorted(other.texts) == ["T", "T", "a pear", "an apple", "juicy"]
        assert len(await store.search("apple")) == 2


async def test_gibberish_means_nothing_and_finds_nothing(tmp_path: Path) -> None:
    async with SessionStore(tmp_path) as store:
        for number, text in enumerate(["hello", "fix the login", "a quiz about jazz", "q", "buy milk", "QQ plot of z"]):
            await say(store, f"s{number}", text, title="T")
        for query in ("zzzqqq", "xqzjk", "vrtplk lkjhgf", "e3b0c44298fc1c149"):
            assert await store.search(query) == [], query
        assert [hit.session_id for hit in await store.search("log in fails")][:1] == ["s1"]


async def test_a_forgotten_session_is_not_found_by_meaning(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=Fruit()) as store:
        await say(store, "a", "an apple", title="T")
        await say(store, "b", "a pear", title="T")
        assert len(await store.search("juicy")) == 2
        await store.delete_session("a")
        assert [hit.session_id for hit in await store.search("juicy")] == ["b"]
        await store.clear_session("b")
        assert not [hit for hit in await store.search("juicy") if hit.visible]


async def test_the_embedder_that_comes_with_carrel_finds_what_is_meant(tmp_path: Path) -> None:
    async with SessionStore(tmp_path) as store:
        await say(store, "login", "Please look into why the login fails for users with two accounts")
        await say(store, "bread", "How do I bake sourdough bread with a crisp crust?")
        await say(store, "trip", "Plan a three day trip to Lisbon with kids")
        for asked, meant in (("authentication problem", "login"), ("vacation with children", "trip")):
            hits = await store.search(asked)
            assert hits[0].session_id == meant
            assert hits[0].how in ("meaning", "both")


def test_the_first_and_the_newest_are_found_by_meaning() -> None:
    assert kept_meanings([0, 1, 3, 5]) == [0, 1, 3, 5]
    assert kept_meanings(list(range(100))) == [0, 1, 2, 3, 4, *range(88, 100)]
    step_by_step: list[int] = []
    for number in range(1, 100):
        step_by_step = kept_meanings([*step_by_step, number])
    assert step_by_step == [1, 2, 3, 4, *range(88, 100)]


# --- the catalogue is only a derivative -----------------------------------------------------------------------------

QUESTIONS = ("apples", "about", "plums OR figs", '"about pears"', "fruit", "number1", "shared words", "zebra")


async def everything(store: SessionStore) -> list[list[dict[str, Any]]]:
    return [[hit.model_dump() for hit in await store.search(question, limit=30)] for question in QUESTIONS]


async def test_deleting_the_catalogue_changes_no_answer(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    async with SessionStore(folder, embedder=Fruit()) as store:
        for number in range(6):
            await say(store, f"s{number}", f"about apples number{number}", "shared words", f"about pears {number}")
            await store.search("apples")
        await store.fork_session("s1", new_id="fork")
        await say(store, "fork", "about plums", "about figs")
        await store.append_rewind("s2", 1)
        await store.search("pears")
        await say(store, "s3", "about iron")
        await store.rename("s4", "A basket of fruit")
        await store.delete_session("s1")
        await store.archive("s5")
        await store.search("figs")
    async with SessionStore(folder, embedder=Fruit()) as store:
        before = await everything(store)
    assert before[0]
    for file in folder.glob(".catalogue*"):
        file.unlink()
    async with SessionStore(folder, embedder=Fruit()) as store:
        after = await everything(store)
    for question, old, new in zip(QUESTIONS, before, after, strict=True):
        assert new == old, question


async def test_a_catalogue_deleted_under_an_open_store_changes_no_answer(store: SessionStore) -> None:
    await say(store, "a", "about apples")
    assert await store.search("apples")
    assert store.data_dir is not None
    for file in store.data_dir.glob(".catalogue*"):
        file.unlink()
    await say(store, "b", "about apples")
    assert len(await store.search("apples")) == 2


@pytest.mark.parametrize("damage", [b"rubbish", b"SQLite format 3\x00" + b"\xff" * 5000])
async def test_a_damaged_catalogue_is_no_concern_of_the_user(tmp_path: Path, damage: bytes) -> None:
    async with SessionStore(tmp_path, embedder=None) as store:
        await say(store, "a", "about apples")
        (tmp_path / ".catalogue.sqlite3").write_bytes(damage)
        assert places(await store.search("apples")) == [("a", 1)]


async def test_one_very_long_session_does_not_hide_the_others(store: SessionStore) -> None:
    await say(store, "short", "the gearbox is broken")
    await store.append_many("long", [user_text_message(f"gearbox {number}") for number in range(6000)])
    assert {session for session, _ in places(await store.search("gearbox", limit=2))} == {"long", "short"}


async def test_a_session_that_cannot_be_read_does_not_hide_the_others(store: SessionStore) -> None:
    await say(store, "a", "about apples")
    await say(store, "b", "about apples")
    await store._logs.store.put("a/meta.json", b'{"message_format_version": 99}')
    await store.close()
    assert places(await store.search("apples")) == [("b", 1)]


async def test_a_log_that_became_unreadable_does_not_hide_the_others(store: SessionStore) -> None:
    await say(store, "a", "about apples")
    await say(store, "b", "about apples")
    assert len(await store.search("apples")) == 2
    await store.close()
    # A folder in the file's place: nobody, not even root, can read it as a log.
    log = store.messages_path("a")
    log.unlink()
    log.mkdir()
    # Of the first one, only the title is left.
    assert sorted(places(await store.search("apples"))) == [("a", 0), ("b", 1)]
    await say(store, "c", "about apples")
    assert sorted(places(await store.search("apples"))) == [("a", 0), ("b", 1), ("c", 1)]


async def test_what_the_catalogue_remembers_in_another_way_is_read_again(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=None) as store:
        await say(store, "a", "about apples")
        assert await store.search("apples")
    with sqlite3.connect(tmp_path / ".catalogue.sqlite3") as other:
        other.execute("UPDATE sources SET state = ?", (b'{"surprise": 1}',))
    other.close()
    async with SessionStore(tmp_path, embedder=None) as store:
        assert places(await store.search("apples")) == [("a", 1)]


async def test_a_worn_catalogue_is_made_anew(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=None) as store:
        await store.append_many("long", [user_text_message(f"secret {number}") for number in range(3000)])
        await say(store, "a", "about apples")
        assert await store.search("secret")
        await store.delete_session("long")
        assert await store.search("secret") == []
        assert places(await store.search("apples")) == [("a", 1)]
    for file in tmp_path.glob(".catalogue*"):
        assert b"secret" not in file.read_bytes()


async def test_a_catalogue_emptied_by_another_process_is_filled_again(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=None) as store:
        await say(store, "a", "about apples")
        await say(store, "b", "about apples")
        assert len(await store.search("apples")) == 2
        with sqlite3.connect(tmp_path / ".catalogue.sqlite3") as other:
            for table in ("sources", "spans", "vectors"):
                other.execute(f"DELETE FROM {table}")
        other.close()
        await say(store, "c", "about apples")
        assert len(await store.search("apples")) == 3


async def test_while_another_process_keeps_the_catalogue_what_it_has_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SessionStore(tmp_path, embedder=None) as store:
        await say(store, "a", "about apples")
        assert await store.search("apples")
        await say(store, "b", "about apples")
        other = sqlite3.connect(tmp_path / ".catalogue.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with caplog.at_level(logging.WARNING):
            assert places(await store.search("apples")) == [("a", 1)]
        assert "kept by another process" in caplog.text
        other.execute("ROLLBACK")
        other.close()
        assert len(await store.search("apples")) == 2


async def test_while_another_process_fills_the_catalogue_nobody_does_its_work_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SessionStore(tmp_path, embedder=None) as store:
        await say(store, "a", "about ships")
        assert places(await store.search("ships")) == [("a", 1)]
        other = Catalogue(tmp_path / ".catalogue.sqlite3", FIELDS, OWNER)
        with other.file.filling():
            await say(store, "b", "about ships too")
            assert places(await store.search("ships")) == [("a", 1)]
            assert "is being filled by another" in caplog.text
            assert other.held(vectors=False).sources.keys() == {"a"}
        assert sorted(places(await store.search("ships"))) == [("a", 1), ("b", 1)]
        other.close()


async def test_where_nothing_can_be_written_search_works_from_memory(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=None) as store:
        await say(store, "a", "about apples")
        # A folder in the file's place: nobody, not even root, can make the catalogue there.
        (tmp_path / ".catalogue.sqlite3").mkdir()
        assert places(await store.search("apples")) == [("a", 1)]
        await say(store, "b", "about apples")
        assert len(await store.search("apples")) == 2


SEARCHER = """
import asyncio, sys
from carrel.conversation.store import SessionStore
async def main():
    async with SessionStore(sys.argv[1], embedder=None) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        hits = await store.search("common", limit=500)
        print(len({hit.session_id for hit in hits}), flush=True)
asyncio.run(main())
"""


def searcher(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SEARCHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


async def fill(folder: Path, sessions: int, texts: int) -> None:
    async with SessionStore(folder, embedder=None) as store:
        for number in range(sessions):
            messages = [
                user_text_message(f"common words of {number} {turn} " + "padding " * 40) for turn in range(texts)
            ]
            await store.append_many(f"s{number}", messages)


async def test_processes_that_index_at_once_agree(tmp_path: Path) -> None:
    await fill(tmp_path, 120, 30)
    processes = [searcher(tmp_path) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, _ = await asyncio.to_thread(process.communicate, timeout=60)
        assert out.strip() == "120"
    with sqlite3.connect(tmp_path / ".catalogue.sqlite3") as connection:
        assert connection.execute("SELECT count(*) FROM sources").fetchone()[0] == 120
        # Each session's messages are there once.
        assert connection.execute("SELECT sum(last - first + 1) FROM spans").fetchone()[0] == 120 * 30
    connection.close()


def _wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    while not file.exists() and process.poll() is None:
        time.sleep(0.002)


async def test_a_process_killed_while_indexing_leaves_nothing_wrong(tmp_path: Path) -> None:
    await fill(tmp_path, 300, 60)
    process = searcher(tmp_path)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    process.stdin.write("go\n")
    process.stdin.flush()
    await asyncio.to_thread(_wait_for, tmp_path / ".catalogue.sqlite3-wal", process)
    os.kill(process.pid, 9)
    process.communicate()
    async with SessionStore(tmp_path, embedder=None) as store:
        hits = await store.search("common", limit=1000)
        assert len({hit.session_id for hit in hits}) == 300
        assert len(await store.search("words of 7 59", limit=1)) == 1


async def test_many_searches_at_once_are_all_answered(store: SessionStore) -> None:
    for number in range(20):
        await say(store, f"s{number}", f"about apples {number}")
    answers = await asyncio.gather(*(store.search("apples", limit=50) for _ in range(10)))
    assert {len(answer) for answer in answers} == {20}


async def test_sessions_are_found_wherever_they_are_kept(place: Place) -> None:
    async with SessionStore(store=place.open(), prefix="sessions", embedder=None) as store:
        await say(store, "a", "about apples", "about pears", title="Fruit")
        assert places(await store.search("pears")) == [("a", 2)]
        await say(store, "a", "about plums")
        assert places(await store.search("plums")) == [("a", 3)]
        await store.delete_session("a")
        assert await store.search("plums") == []


# --- pure -----------------------------------------------------------------------------------------------------------


def test_what_is_typed_becomes_phrases() -> None:
    query = parse('why does "the pool" of foo_bar leak')
    assert [" ".join(phrase.words) for phrase in query.phrases] == ["why", "does", "the pool", "of", "foo bar", "leak"]
    assert [" ".join(phrase.words) for phrase in query.quoted] == ["the pool"]
    assert [phrase.prefix for phrase in query.phrases] == [False] * 5 + [True]
    assert not parse('ends with "quoted words"').phrases[-1].prefix
    assert not parse("ends with a space ").phrases[0].prefix
    assert [" ".join(word.words) for word in parse("登录模块").words] == ["登 录", "录 模", "模 块"]
    assert parse("🚀 \x00 --").phrases == []


def test_a_better_text_gets_a_better_score() -> None:
    query = parse("connection pool")
    shares = dict.fromkeys(query.words, 0.01)

    def score(text: str, field: str = "said") -> float:
        return judge(query, shares, {field: text}).score

    assert score("the connection pool") > score("a pool, and somewhere far away " + "x " * 200 + "a connection")
    assert score("the connection pool") > score("the connection")
    assert score("connection pool", "title") > score("connection pool") > score("connection pool", "did")
    assert score("connection pool") > score("connections pools")
    assert score("nothing") == 0
    assert judge(query, shares, {"said": "the pool"}).coverage == pytest.approx(0.5, abs=0.05)


def test_the_snippet_is_cut_around_the_words() -> None:
    query = parse("needle")
    text = "hay " * 500 + "the needle in\n\nthe haystack " + "hay " * 500
    piece, marks = snippet(query, text)
    assert piece.startswith("…")
    assert piece.endswith("…")
    assert "\n" not in piece
    assert len(piece) < 260
    assert [piece[start:end] for start, end in marks] == ["needle"]
    assert snippet(query, "no match here") == ("no match here", [])
    assert snippet(query, "") == ("", [])


@settings(deadline=None)
@given(st.text(max_size=300), st.text(alphabet="ab éü登录\n", max_size=400))
def test_marks_are_always_within_the_snippet_and_apart(asked: str, text: str) -> None:
    piece, marks = snippet(parse(asked + " a登"), text, size=60)
    last = -1
    for start, end in marks:
        assert last < start < end <= len(piece)
        last = end
