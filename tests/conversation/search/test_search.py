"""Searching sessions: messages are found by words and by meaning, whatever happened to the session since."""

import base64
import json
import os
from pathlib import Path
from typing import Any

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
from carrel.conversation.store import SessionStore
from carrel.storage.memory import MemoryStore
from tests.support.search import FruitEmbedder, add_turns, marked, places
from tests.support.stores import Backend

# --- words ------------------------------------------------------------------------------------------------------------


async def test_a_message_is_found_with_its_words_marked(store: SessionStore) -> None:
    await add_turns(store, "a", "Why does the login fail?", "The session cookie expires too early.", title="Login")
    await add_turns(store, "b", "Bake me a cake", "With pleasure.", title="Cake")
    [hit] = await store.search("cookie expires")
    assert (hit.session_id, hit.seq, hit.role, hit.title, hit.how) == ("a", 2, "assistant", "Login", "words")
    assert hit.snippet == "The session cookie expires too early."
    assert marked(hit) == ["cookie", "expires"]
    assert hit.visible
    assert not hit.archived
    assert hit.updated_at


async def test_nothing_is_indexed_before_the_first_search(store: SessionStore) -> None:
    await add_turns(store, "a", "hello")
    assert store.data_dir is not None
    assert not list(store.data_dir.glob(".catalogue*"))
    assert await store.search("hello")
    assert list(store.data_dir.glob(".catalogue*"))


async def test_later_messages_and_later_sessions_are_found_at_once(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples")
    assert places(await store.search("apples")) == [("a", 1)]
    await add_turns(store, "a", "about pears")
    await add_turns(store, "b", "about plums")
    assert places(await store.search("pears")) == [("a", 2)]
    assert places(await store.search("plums")) == [("b", 1)]
    assert places(await store.search("apples")) == [("a", 1)]


async def test_each_session_comes_once_before_more_of_the_same(store: SessionStore) -> None:
    await add_turns(store, "a", *["the pool is empty"] * 6)
    await add_turns(store, "b", "the pool is full")
    assert {session for session, _ in places(await store.search("pool", limit=2))} == {"a", "b"}
    many = await store.search("pool", limit=4)
    assert len(set(places(many))) == 4
    assert [hit.score for hit in many] == sorted((hit.score for hit in many), reverse=True)
    assert len(await store.search("pool", limit=1)) == 1
    assert await store.search("pool", limit=0) == []


async def test_a_word_is_found_while_it_is_being_typed(store: SessionStore) -> None:
    await add_turns(store, "a", "the deployment went well")
    for typed in ("dep", "deploy", "deployment", "the deploy", "went we"):
        assert places(await store.search(typed)) == [("a", 1)], typed
    assert await store.search("deploy well") == [] or places(await store.search("deploy well")) == [("a", 1)]
    assert places(await store.search("deploym*")) == [("a", 1)]


async def test_quoted_words_must_stand_together(store: SessionStore) -> None:
    await add_turns(store, "a", "the connection pool is empty")
    await add_turns(store, "b", "a pool without a connection")
    assert places(await store.search('"connection pool"')) == [("a", 1)]
    assert places(await store.search("“connection pool” empty")) == [("a", 1)]
    assert await store.search('"pool connection"') == []
    assert {session for session, _ in places(await store.search("connection pool"))} == {"a", "b"}


async def test_messages_with_all_words_come_before_those_with_some(store: SessionStore) -> None:
    await add_turns(store, "some", "the login page")
    await add_turns(store, "all", "the login fails after the deployment")
    await add_turns(store, "none", "the weather is fine")
    assert [session for session, _ in places(await store.search("login fails deployment"))] == ["all", "some"]


async def test_messages_come_before_tool_output(store: SessionStore) -> None:
    result = build_message(
        "user", [tool_result_block(tool_use_id="1", model_text="x " * 500 + "gearbox " + "y " * 500)]
    )
    await add_turns(store, "text", "The gearbox is broken")
    await add_turns(store, "printed", "look")
    await store.append_message("printed", result)
    assert places(await store.search("gearbox")) == [("text", 1), ("printed", 2)]


async def test_titles_are_found_after_a_change(store: SessionStore) -> None:
    await add_turns(store, "a", "hello", title="Quarterly numbers")
    [hit] = await store.search("quarterly")
    assert (hit.seq, hit.role, marked(hit)) == (0, "title", ["Quarterly"])
    await store.rename("a", "Annual figures")
    assert places(await store.search("annual")) == [("a", 0)]
    assert await store.search("quarterly") == []


async def test_names_inputs_and_outputs_of_tools_are_found(store: SessionStore) -> None:
    use = tool_use_block(tool_id="1", name="grep", input={"pattern": "needle", "deep": {"list": ["haystack", 42]}})
    await store.append_message("a", assistant_message([use]))
    await store.append_message(
        "a", build_message("user", [tool_result_block(tool_use_id="1", model_text="found rusty")])
    )
    await store.append_message("a", build_message("user", [document_block("AAAA", mime_type="x/y", name="budget.xls")]))
    for word, seq in (("grep", 1), ("needle", 1), ("haystack", 1), ("rusty", 2), ("budget", 3)):
        assert places(await store.search(word)) == [("a", seq)], word


LONG = "".join(f"line {number} of the build says nothing\n" for number in range(4000))


def tool_output(text: str) -> Any:
    return build_message("user", [tool_result_block(tool_use_id="t", model_text=text)])


async def test_a_long_output_is_found_by_its_middle(store: SessionStore) -> None:
    await store.append_message("a", tool_output(f"{LONG}cannot open quxlib.so\n{LONG}"))
    await store.append_message("a", user_text_message("What went wrong?"))
    assert list(store.session_dir("a").glob("tool-output/*"))
    for query in ("quxlib", '"cannot open quxlib.so"', "line 3999"):
        hit = (await store.search(query))[0]
        assert (hit.session_id, hit.seq) == ("a", 1)
        assert marked(hit)
    # One added after the first search, and one deleted after it.
    await store.append_message("b", tool_output(f"{LONG}then corgelib\n{LONG}"))
    assert places(await store.search("corgelib")) == [("b", 1)]
    for file in store.session_dir("b").glob("tool-output/*"):
        file.unlink()
    assert places(await store.search("corgelib")) == [("b", 1)]


async def test_a_very_long_output_is_found_by_its_ends(store: SessionStore) -> None:
    filler = "filler " * 100_000
    await store.append_message("a", tool_output(f"alpha {filler} middle {filler} omega"))
    assert places(await store.search("alpha")) == places(await store.search("omega")) == [("a", 1)]
    assert await store.search("middle") == []


async def test_a_word_repeated_in_tool_output_does_not_come_first(store: SessionStore) -> None:
    await store.create_session("The walrus", session_id="a")
    await store.append_message("a", tool_output("walrus " * 300))
    await store.append_message("a", user_text_message("Where is the walrus?"))
    assert places(await store.search("walrus")) == [("a", 0), ("a", 2), ("a", 1)]


async def test_an_image_is_found_by_its_name_only(store: SessionStore) -> None:
    picture = image_block(base64.b64encode(os.urandom(90_000)).decode(), mime_type="image/png", name="harbour.png")
    await store.append_message("a", build_message("user", [text_block("Look at this"), picture]))
    assert (await store.search("harbour"))[0].snippet == "Look at this harbour.png"
    assert await store.search("blobs") == []


@pytest.mark.parametrize(
    ("text", "query"),
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
async def test_any_language_is_found_and_marked(store: SessionStore, text: str, query: str) -> None:
    await add_turns(store, "other", "nothing of the kind")
    await add_turns(store, "a", text)
    [hit] = await store.search(query)
    assert (hit.session_id, hit.seq) == ("a", 1)
    assert hit.marks


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40) | st.text(alphabet='"*()-+:^{}\\\x00\n AND OR NEAR é登🚀', max_size=40))
async def test_any_text_is_a_valid_query(text: str) -> None:
    memory = SessionStore(store=MemoryStore(), embedder=False)
    await memory.append_message("a", user_text_message("some AND words OR 登录 é (near) x"))
    for hit in await memory.search(text):
        assert all(0 <= start < end <= len(hit.snippet) for start, end in hit.marks)
    await memory.close()


@pytest.mark.parametrize("text", ["", " ", '"', '""', "\x00", "🚀", "*", "((", "x" * 100_000, "a " * 50_000, '"' * 999])
async def test_odd_queries_find_nothing(store: SessionStore, text: str) -> None:
    await add_turns(store, "a", "hello world")
    assert await store.search(text) == []


async def test_odd_messages_can_be_indexed(store: SessionStore) -> None:
    await add_turns(store, "a", "before")
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


async def test_one_very_long_session_does_not_hide_other_sessions(store: SessionStore) -> None:
    await add_turns(store, "short", "the gearbox is broken")
    await store.append_many("long", [user_text_message(f"gearbox {number}") for number in range(6000)])
    assert {session for session, _ in places(await store.search("gearbox", limit=2))} == {"long", "short"}


# --- later changes ----------------------------------------------------------------------------------------------------


async def test_rewound_messages_are_found_as_not_visible(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples", "about pears", "about plums")
    await store.append_rewind("a", 1)
    assert [(hit.seq, hit.visible) for hit in await store.search("pears")] == [(2, False)]
    assert [(hit.seq, hit.visible) for hit in await store.search("apples")] == [(1, True)]
    await store.append_rewind("a", to_seq=2)
    assert [(hit.seq, hit.visible) for hit in await store.search("pears")] == [(2, True)]
    assert [(hit.seq, hit.visible) for hit in await store.search("plums")] == [(3, False)]


async def test_compacted_messages_and_their_summary_are_found(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples", "about pears", "about plums", "about figs")

    async def summarize(messages: list[Any]) -> str:
        return "They talked about fruit."

    await store.compact("a", summarize, keep_tokens=0)
    assert [(hit.seq, hit.visible) for hit in await store.search("apples")] == [(1, False)]
    assert [(hit.seq, hit.role, hit.visible) for hit in await store.search("fruit")] == [(5, "compact", True)]
    await add_turns(store, "a", "about grapes")
    assert [(hit.seq, hit.visible) for hit in await store.search("grapes")] == [(6, True)]


async def test_deleted_sessions_are_not_found(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples")
    await add_turns(store, "b", "about apples")
    assert len(await store.search("apples")) == 2
    await store.delete_session("a")
    assert places(await store.search("apples")) == [("b", 1)]
    await add_turns(store, "b2", "more apples")
    await store.delete_session("b2")
    assert places(await store.search("apples")) == [("b", 1)]


async def test_a_session_created_again_under_its_id_is_indexed_again(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples", "about pears")
    assert await store.search("apples")
    await store.delete_session("a")
    await store.create_session("New", session_id="a")
    await add_turns(store, "a", "about plums", "about figs", "about grapes")
    assert await store.search("apples") == []
    assert places(await store.search("plums")) == [("a", 1)]
    assert places(await store.search("grapes")) == [("a", 3)]


async def test_a_cleared_session_keeps_its_title_and_nothing_else(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples", title="Fruit")
    assert await store.search("apples")
    await store.clear_session("a")
    assert not [hit for hit in await store.search("apples") if hit.visible]
    assert places(await store.search("fruit")) == [("a", 0)]
    await add_turns(store, "a", "about pears", "about plums")
    assert [hit.visible for hit in await store.search("plums")] == [True]


async def test_archived_sessions_are_found_as_archived(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples")
    assert [hit.archived for hit in await store.search("apples")] == [False]
    await store.archive("a")
    assert [hit.archived for hit in await store.search("apples")] == [True]
    await store.unarchive("a")
    assert [hit.archived for hit in await store.search("apples")] == [False]


async def test_labels_are_found(store: SessionStore) -> None:
    await add_turns(store, "a", "one", "two")
    await store.label("a", "before the refactoring")
    [hit] = await store.search("refactoring")
    assert (hit.role, hit.visible, marked(hit)) == ("label", True, ["refactoring"])


# --- forks ------------------------------------------------------------------------------------------------------------


async def test_inherited_messages_are_found_once(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples", "about pears", title="Fruit")
    for number in range(5):
        await store.fork_session("a", new_id=f"fork{number}")
        await add_turns(store, f"fork{number}", f"own words number{number} of elephants")
    assert places(await store.search("apples")) == [("a", 1)]
    assert len(await store.search("elephants", limit=20)) == 5
    assert places(await store.search("number3")) == [("fork3", 5)]


@pytest.mark.parametrize("meta", [None, {"parent_session_id": "a", "forked_at_seq": 0}, {"forked_at_seq": 5}])
async def test_lost_or_wrong_metadata_of_a_fork_hides_nothing(store: SessionStore, meta: dict[str, Any] | None) -> None:
    await add_turns(store, "a", "the walrus", "a reply")
    await store.fork_session("a", new_id="fork")
    await store.append_message("fork", user_text_message("the penguin"))
    await store.close()
    path = store.meta_path("fork")
    if meta is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_bytes()) | meta))
    assert places(await store.search("penguin")) == [("fork", 5)]
    assert places(await store.search("walrus")) == [("a", 1)]


@pytest.mark.parametrize("words", ["elephants", "about"])
async def test_forks_do_not_crowd_out_other_sessions(store: SessionStore, words: str) -> None:
    await add_turns(store, "other", "about elephants")
    await add_turns(store, "a", *["about elephants"] * 20)
    for number in range(60):
        await store.fork_session("a", new_id=f"fork{number}", load=False)
    assert {hit.session_id for hit in await store.search(words, limit=2)} == {"a", "other"}


async def test_inherited_messages_are_found_after_the_parent_is_deleted(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples", "about pears", "about plums")
    await store.fork_session("a", 1, new_id="early")
    await store.fork_session("a", 3, new_id="late")
    await add_turns(store, "late", "about figs")
    await store.fork_session("late", new_id="grandchild")
    assert places(await store.search("pears")) == [("a", 2)]
    assert places(await store.search("figs")) == [("late", 6)]
    await store.delete_session("a")
    assert places(await store.search("pears")) == [("late", 2)]
    assert [hit.seq for hit in await store.search("apples")] == [1]
    await store.delete_session("late")
    assert places(await store.search("pears")) == [("grandchild", 2)]
    assert places(await store.search("figs")) == [("grandchild", 6)]
    assert [hit.seq for hit in await store.search("apples")] == [1]


async def test_messages_are_found_after_a_session_in_the_middle_of_forks_is_deleted(store: SessionStore) -> None:
    await add_turns(store, "a", "about apples")
    await store.fork_session("a", new_id="b")
    await add_turns(store, "b", "about pears")
    await store.fork_session("b", new_id="c")
    await store.delete_session("b")
    assert places(await store.search("apples")) == [("a", 1)]
    assert places(await store.search("pears")) == [("c", 4)]


# --- meaning ----------------------------------------------------------------------------------------------------------


async def test_other_words_with_the_same_meaning_are_found(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=FruitEmbedder()) as store:
        await add_turns(store, "a", "I ate an apple", title="Lunch")
        await add_turns(store, "b", "we melted iron", title="Work")
        [hit] = await store.search("juicy")
        assert (hit.session_id, hit.seq, hit.how, hit.marks) == ("a", 1, "meaning", [])
        assert hit.snippet == "I ate an apple"
        both = await store.search("apple")
        assert [(hit.session_id, hit.how) for hit in both] == [("a", "both")]
        assert await store.search('"juicy"') == []


async def test_hits_by_words_and_meaning_come_first(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=FruitEmbedder()) as store:
        await add_turns(store, "meaning", "a pear on a plate", title="M")
        await add_turns(store, "words", "the word apple-tree in another sense", title="W")
        await add_turns(store, "both", "an apple a day", title="B")
        assert [(hit.session_id, hit.how) for hit in await store.search("apple")] == [
            ("both", "both"),
            ("words", "words"),
            ("meaning", "meaning"),
        ]


async def test_each_user_message_is_embedded_once(tmp_path: Path) -> None:
    embedder = FruitEmbedder()
    async with SessionStore(tmp_path, embedder=embedder) as store:
        await add_turns(store, "a", "an apple", "shiny copper", title="T")
        await store.search("x")
        assert embedder.texts == ["T", "an apple", "x"]
        await add_turns(store, "a", "a pear")
        await store.search("y")
        assert embedder.texts == ["T", "an apple", "x", "a pear", "y"]
        assert {hit.seq for hit in await store.search("juicy pear")} == {3}
    async with SessionStore(tmp_path, embedder=embedder) as store:
        del embedder.texts[:]
        assert [hit.session_id for hit in await store.search("juicy")] == ["a"]
        assert embedder.texts == ["juicy"]


async def test_sessions_indexed_without_an_embedder_get_their_vectors_later(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=False) as store:
        await add_turns(store, "a", "an apple", title="T")
        assert await store.search("juicy") == []
    async with SessionStore(tmp_path, embedder=FruitEmbedder()) as store:
        assert [hit.session_id for hit in await store.search("juicy")] == ["a"]
    async with SessionStore(tmp_path, embedder=False) as store:
        await add_turns(store, "b", "a pear", title="T")
        assert [hit.session_id for hit in await store.search("pear")] == ["b"]
    other = FruitEmbedder("fruit-2")
    async with SessionStore(tmp_path, embedder=other) as store:
        assert {hit.session_id for hit in await store.search("juicy")} == {"a", "b"}
        assert sorted(other.texts) == ["T", "T", "a pear", "an apple", "juicy"]
        assert len(await store.search("apple")) == 2


async def test_gibberish_finds_nothing(tmp_path: Path) -> None:
    async with SessionStore(tmp_path) as store:
        for number, text in enumerate(["hello", "fix the login", "a quiz about jazz", "q", "buy milk", "QQ plot of z"]):
            await add_turns(store, f"s{number}", text, title="T")
        for query in ("zzzqqq", "xqzjk", "vrtplk lkjhgf", "e3b0c44298fc1c149"):
            assert await store.search(query) == [], query
        assert [hit.session_id for hit in await store.search("log in fails")][:1] == ["s1"]


async def test_a_deleted_session_is_not_found_by_meaning(tmp_path: Path) -> None:
    async with SessionStore(tmp_path, embedder=FruitEmbedder()) as store:
        await add_turns(store, "a", "an apple", title="T")
        await add_turns(store, "b", "a pear", title="T")
        assert len(await store.search("juicy")) == 2
        await store.delete_session("a")
        assert [hit.session_id for hit in await store.search("juicy")] == ["b"]
        await store.clear_session("b")
        assert not [hit for hit in await store.search("juicy") if hit.visible]


async def test_the_packaged_word_vectors_find_related_words(tmp_path: Path) -> None:
    async with SessionStore(tmp_path) as store:
        await add_turns(store, "login", "Please look into why the login fails for users with two accounts")
        await add_turns(store, "bread", "How do I bake sourdough bread with a crisp crust?")
        await add_turns(store, "trip", "Plan a three day trip to Lisbon with kids")
        for query, meant in (("authentication problem", "login"), ("vacation with children", "trip")):
            hits = await store.search(query)
            assert hits[0].session_id == meant
            assert hits[0].how in ("meaning", "both")


# --- backends ---------------------------------------------------------------------------------------------------------
async def test_search_works_with_every_backend(backend: Backend) -> None:
    async with SessionStore(store=backend.open(), prefix="sessions", embedder=False) as store:
        await add_turns(store, "a", "about apples", "about pears", title="Fruit")
        assert places(await store.search("pears")) == [("a", 2)]
        await add_turns(store, "a", "about plums")
        assert places(await store.search("plums")) == [("a", 3)]
        await store.delete_session("a")
        assert await store.search("plums") == []
