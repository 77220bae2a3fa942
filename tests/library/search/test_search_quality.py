"""The questions that search is measured on are what they say they are, and the default answers as many as it did."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from carrel.library.search import LibrarySearch
from carrel.library.search.words import query_terms, terms

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import finding  # type: ignore[import-not-found]

ENTRIES = {entry.key: entry for entry in finding.entries()}
HALVES = ("dev", "held-out")


def test_there_are_two_thousand_entries_with_different_names() -> None:
    assert len(ENTRIES) == len(finding.entries()) == 2000


@pytest.mark.parametrize("half", HALVES)
def test_there_are_as_many_questions_of_each_kind(half: str) -> None:
    questions = finding.questions(half)
    assert Counter(question.kind for question in questions) == dict.fromkeys(finding.KINDS, 32)
    assert {question.key for question in questions} <= ENTRIES.keys()
    assert len({question.text for question in questions}) == len(questions)


def test_no_entry_is_in_both_halves() -> None:
    tuned, more, measured = (
        {question.key for question in finding.questions(part)} for part in ("dev", "more", "held-out")
    )
    assert (tuned | more) & measured == set()


@pytest.mark.parametrize("half", [*HALVES, "more"])
def test_questions_in_other_words_have_no_word_of_the_entry(half: str) -> None:
    for question in finding.questions(half):
        entry = ENTRIES[question.key]
        shared = set(query_terms(question.text)) & set(terms(f"{entry.name} {entry.description}"))
        assert bool(shared) == (question.kind == "words"), f"{question}: {shared}"


async def test_the_default_embedder_finds_as_many_as_before() -> None:
    index = LibrarySearch(None, "search/x")
    index.set_entries(ENTRIES.values())
    await index.ready()
    found = await finding.quality(index, finding.questions("dev"))
    assert found["words"].first >= 95
    assert found["other"].first >= 40
    assert found["other"].among_five >= 65
    await index.close()
