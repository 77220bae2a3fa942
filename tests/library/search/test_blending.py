"""One order from two, with literals."""

from carrel.library.search.blending import blended


def keys(by_words: dict[str, float], near: dict[str, float], limit: int = 9) -> list[str]:
    return [hit.key for hit in blended(by_words, near, limit)]


def test_what_both_say_comes_first() -> None:
    assert keys({"a": 0.6, "b": 0.5}, {"b": 0.9, "c": 0.8})[0] == "b"


def test_a_stray_word_does_not_beat_the_meaning() -> None:
    assert keys({"stray": 0.2}, {"meant": 0.5, "other": 0.4}) == ["meant", "other", "stray"]


def test_all_the_words_beat_what_is_only_near() -> None:
    assert keys({"said": 0.95}, {"x": 0.6, "said": 0.29})[0] == "said"


def test_how_near_counts_and_not_only_who_is_nearer() -> None:
    assert keys({"b": 0.6}, {"a": 0.8, "b": 0.3})[0] == "a"
    assert keys({"b": 0.6}, {"a": 0.4, "b": 0.3})[0] == "b"


def test_all_the_words_are_enough_without_a_vector() -> None:
    assert keys({"new": 0.97}, {"old": 0.8})[0] == "new"


def test_either_list_alone_is_enough_and_none_is_nothing() -> None:
    assert keys({"a": 0.1, "b": 0.3}, {}) == ["b", "a"]
    assert keys({}, {"a": 0.5}) == ["a"]
    assert keys({}, {}) == []
    assert keys({"a": 1.0}, {}, limit=0) == []


def test_a_hit_says_what_it_was_found_by() -> None:
    hits = {hit.key: hit.how for hit in blended({"a": 0.5, "b": 0.5}, {"b": 0.5, "c": 0.5}, 9)}
    assert hits == {"a": "words", "b": "both", "c": "meaning"}


def test_equals_come_in_the_order_of_their_names() -> None:
    assert keys({"b": 0.5, "a": 0.5}, {}) == ["a", "b"]
