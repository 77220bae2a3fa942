"""Words of texts, and the search by words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.library.search.words import WordIndex, joined_words, query_terms, terms


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fetchJSONFiles", "fetching a json file"),
        ("compress", "compressing compressed compresses compression"),
        ("copy", "copies copied copying"),
        ("resize_image", "resizing images"),
        ("Résumé", "resume"),
        ("HTTPServer", "http server"),
        ("validate", "validation validator validating"),
        ("run", "running runs"),
        ("ＡＢＣ", "abc"),
    ],
)
def test_forms_of_a_word_are_the_same(one: str, other: str) -> None:
    assert set(terms(one)) & set(terms(other)) == set(terms(one))


@pytest.mark.parametrize(("one", "other"), [("class", "clas"), ("status", "statu"), ("bus", "bu")])
def test_different_words_are_different(one: str, other: str) -> None:
    assert terms(one) != terms(other)


def test_texts_without_spaces() -> None:
    index = WordIndex()
    index.put("a", {"name": "登录页面"})
    index.put("b", {"name": "数据库"})
    assert list(index.coverage("登录")) == ["a"]
    assert list(index.coverage("库")) == ["b"]


def test_common_words_are_ignored_unless_there_are_no_others() -> None:
    assert query_terms("how do I resize the image") == ["resiz", "imag"]
    assert query_terms("what is it") == ["what", "is", "it"]


def small() -> WordIndex:
    index = WordIndex()
    index.put("resize_image", {"name": "resize_image", "description": "Scale an image to a given width"})
    index.put("crop_image", {"name": "crop_image", "description": "Cut a region out of an image"})
    index.put("fetch_json", {"name": "fetch_json", "description": "Request a document", "parameters": "url timeout"})
    index.put("tag", {"name": "tag", "text": "Writes the artist into music files"})
    return index


def best(index: WordIndex, query: str) -> str | None:
    coverage = index.coverage(query)
    return max(coverage, key=lambda key: coverage[key], default=None)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("crop image", "crop_image"),
        ("IMAGE WIDTH", "resize_image"),
        ("fetchjson", "fetch_json"),
        ("fetch_json", "fetch_json"),
        ("fetch-json", "fetch_json"),
        ("timeout", "fetch_json"),
        ("artist", "tag"),
        ("docum", "fetch_json"),
        ("zebra", None),
        ("", None),
        ("\x00 \ud800 …", None),
    ],
)
def test_an_entry_with_the_words_is_found(query: str, key: str | None) -> None:
    assert best(small(), query) == key


def test_all_words_count_more_than_some() -> None:
    coverage = small().coverage("crop image")
    assert coverage["crop_image"] > coverage["resize_image"]
    assert small().coverage("crop image quickly for zebras")["crop_image"] < coverage["crop_image"]


def test_a_name_counts_more_than_a_text() -> None:
    index = WordIndex()
    index.put("a", {"name": "backup"})
    index.put("b", {"name": "other", "text": "backup"})
    coverage = index.coverage("backup")
    assert coverage["a"] > coverage["b"] > 0


words = st.text(alphabet="abcdé日 _-AB", max_size=20)


@given(st.dictionaries(st.sampled_from("pqrs"), words), st.dictionaries(st.sampled_from("pqrs"), words), words)
def test_a_changed_index_equals_a_new_one(before: dict[str, str], after: dict[str, str], query: str) -> None:
    changed, new = WordIndex(), WordIndex()
    for key, text in before.items():
        changed.put(key, {"name": key, "description": text})
    changed.coverage(query)
    for key in before.keys() - after.keys():
        changed.remove(key)
    for key, text in after.items():
        changed.put(key, {"name": key, "description": text})
        new.put(key, {"name": key, "description": text})
    assert changed.coverage(query) == pytest.approx(new.coverage(query))
    assert len(changed) == len(after)


@given(st.text())
def test_any_text_can_be_split(text: str) -> None:
    for term in terms(text):
        assert term
        assert term == term.strip()
    joined_words(text)
