"""Parsing queries, scoring texts and cutting snippets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.conversation.search.query import parse, score_document, snippet


def test_a_query_is_split_into_phrases() -> None:
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
    frequencies = dict.fromkeys(query.words, 0.01)

    def score(text: str, field: str = "text") -> float:
        return score_document(query, frequencies, {field: text}).value

    assert score("the connection pool") > score("a pool, and somewhere far away " + "x " * 200 + "a connection")
    assert score("the connection pool") > score("the connection")
    assert score("connection pool", "title") > score("connection pool") > score("connection pool", "tools")
    assert score("connection pool") > score("connections pools")
    assert score("nothing") == 0
    assert score_document(query, frequencies, {"text": "the pool"}).coverage == pytest.approx(0.5, abs=0.05)


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
def test_marks_are_within_the_snippet_and_do_not_overlap(query: str, text: str) -> None:
    piece, marks = snippet(parse(query + " a登"), text, size=60)
    last = -1
    for start, end in marks:
        assert last < start < end <= len(piece)
        last = end
