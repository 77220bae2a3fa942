"""Control characters, "did you mean", and readable sizes and times."""

import json

import pytest

from carrel.text import (
    count_messages,
    did_you_mean,
    escape_control_chars_in_json,
    neutralize_control_chars,
    readable_size,
    readable_time,
    refuse_misspelled_fields,
    single_line,
)


def test_control_characters_are_made_visible_and_others_kept() -> None:
    assert neutralize_control_chars("a\x1b[31mb\x9b\u202e\r\nc\td") == "a␛[31mb⟦U+009B⟧⟦U+202E⟧\nc\td"
    assert single_line(" a \n\n b\x00 ") == "a b␀"
    for left in ("grüße 你好 👩‍💻 שלום", "❤️‍🔥", "می‌خواهم", "葛\U000e0100城", "ខ្ញុំ\u200bទៅ"):
        assert neutralize_control_chars(left) == left
    assert (
        neutralize_control_chars("a\u200b\u200c\u2060b\ufe0f\ufe01\U000e0101")
        == "a\u200b⟦U+200C⟧⟦U+2060⟧b\ufe0f⟦U+FE01⟧⟦U+E0101⟧"
    )
    shown = json.dumps({"a\x9b": "\u202e\U000e0041 é\n"}, ensure_ascii=False)
    assert json.loads(escape_control_chars_in_json(shown)) == json.loads(shown)
    assert neutralize_control_chars(escape_control_chars_in_json(shown)) == escape_control_chars_in_json(shown)


def test_similar_or_existing_names_are_suggested() -> None:
    assert did_you_mean("serch", ["search", "list"]) == "; did you mean search?"
    assert did_you_mean("GET", ["get"]) == "; did you mean get?"
    assert did_you_mean("issue", ["create_issue", "close_issue"]) == "; did you mean close_issue or create_issue?"
    assert did_you_mean("xyz", ["alpha", "beta"]) == "; there is alpha, beta"
    assert did_you_mean("xyz", [f"tool{n}" for n in range(20)]).endswith("and 12 more")
    assert did_you_mean("xyz", []) == ""


def test_only_an_almost_known_field_is_refused() -> None:
    refuse_misspelled_fields({"name": 1, "x_custom": 2}, ["name", "size"])
    refuse_misspelled_fields(["nmae"], ["name"])
    with pytest.raises(ValueError, match="there is no field 'smaple_id'; did you mean 'sample_id'"):
        refuse_misspelled_fields({"smaple_id": 1}, ["sample_id", "size"])


def test_sizes_counts_and_times_are_readable() -> None:
    sizes = [readable_size(size) for size in (0, 1, 1023, 1024, 1536 * 1024, 5 * 1024**3)]
    assert sizes == ["0 bytes", "1 byte", "1023 bytes", "1.0 KB", "1.5 MB", "5.0 GB"]
    assert [count_messages(1), count_messages(2000)] == ["1 message", "2,000 messages"]
    assert readable_time("2025-03-04T10:02:00+01:00") == "4 Mar 2025, 09:02 UTC"
    assert [readable_time("yesterday"), readable_time(None)] == ["yesterday", ""]
