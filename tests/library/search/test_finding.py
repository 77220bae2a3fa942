"""The questions that search is measured on are what they say they are, and the default answers as many as it did."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from carrel.library.search import LibrarySearch
from carrel.library.search.words import query_terms, terms

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import finding

ENTRIES = {entry.key: entry for entry in finding.entries()}
HALVES = ("dev", "held-out")


def test_there_are_two_thousand_entries_and_no_two_of_a_name() -> None:
    assert len(ENTRIES) == len(finding.entries()) == 2000


@pytest.mark.parametrize("half", HALVES)
def test_there_are_as_many_questions_of_each_kind(half: str) -> None:
    asked = finding.questions(half)
    assert Counter(question.kind for question in asked) == dict.fromkeys(finding.KINDS, 32)
    assert {question.key for question in asked} <= ENTRIES.keys()
    assert len({question.text for question in asked}) == len(asked)


def test_no_entry_is_asked_for_in_both_halves() -> None:
    tuned, more, measured = (
        {question.key for question in finding.questions(part)} for part in ("dev", "more", "held-out")
    )
    assert (tuned | more) & measured == set()


@pytest.mark.parametrize("half", [*HALVES, "more"])
def test_questions_in_other_words_have_none_of_the_entry(half: str) -> None:
    for question in finding.questions(half):
        entry = ENTRIES[question.key]
        shared = set(query_terms(question.text)) & set(terms(f"{entry.name} {entry.description}"))
        assert bool(shared) == (question.kind == "words"), f"{question}: {shared}"


async def test_the_default_answers_as_many_as_it_did() -> None:
    index = LibrarySearch(None, "search/x")
    index.set_entries(ENTRIES.values())
    await index.ready()
    found = await finding.quality(index, finding.questions("dev"))
    assert found["words"].first >= 95
    assert found["other"].first >= 40
    assert found["other"].among_five >= 65
    await index.close()
