"""Tokens and cost by model, each counted once."""

from typing import Any

import pytest

from carrel.conversation.formats import normalize_usage
from carrel.conversation.log_entries import build_compact_event, build_note
from carrel.conversation.usage import count_usage, tokens_of
from carrel.errors import ConfigurationError
from tests.support.messages import assistant, result, rewind, user

FIVE = {"input_tokens": 3, "output_tokens": 2}


def spent(text: str, model: str = "m", usage: object = None) -> dict:
    return assistant(text, model=model, usage=usage or FIVE)


def test_tokens_by_model():
    log = [user("first"), spent("a"), result("x"), spent("b", "n"), user("second"), spent("c")]
    usage = count_usage(enumerate(log, 1))
    assert usage.total.total_tokens == 15
    assert {name: tokens.total_tokens for name, tokens in usage.models.items()} == {"m": 10, "n": 5}


def test_what_was_rewound_was_still_paid_for():
    assert count_usage(enumerate([user("a"), spent("b"), rewind(0)], 1)).total.total_tokens == 5


def test_every_line_that_says_what_was_spent_counts():
    lines = [user("a") | {"meta": {"usage": FIVE}}, result("x") | {"meta": {"usage": FIVE}}, spent("b")]
    usage = count_usage(enumerate(lines, 1))
    assert usage.total.total_tokens == 15


def test_a_sum_that_the_session_says_may_be_larger_than_that_of_the_lines():
    note = build_note("meta", set={"total_tokens": 9})
    assert count_usage(enumerate([spent("a"), note, spent("b")], 1)).total.total_tokens == 14
    assert count_usage(enumerate([spent("a"), spent("b"), note], 1)).total.total_tokens == 10


@pytest.mark.parametrize("wrong", [{"m": {"in": 3}}, {"m": 3}, {"m": {"input": "x"}}, ["m"], {"m": {"Input": 3.0}}])
def test_a_price_table_with_a_mistake_is_refused(wrong: Any):
    with pytest.raises(ConfigurationError, match="price"):
        count_usage([], wrong)


def test_a_summary_is_paid_for_too():
    event = build_compact_event("s", provider="p", model="m", compacted_count=1, usage=FIVE)
    assert count_usage([(1, event)]).models["m"].total_tokens == 5


def test_a_fork_counts_only_what_it_added():
    log = [user("a"), spent("b"), build_note("fork", parent_session_id="p", at_seq=2), user("c"), spent("d")]
    usage = count_usage(enumerate(log, 1))
    assert usage.total.total_tokens == 5
    assert usage.inherited_through_seq == 3


def test_cost_from_the_users_prices():
    prices = {"m": {"input": 2.0, "output": 10.0, "cache_read": 0.5}}
    big = {"input_tokens": 1_000_000, "output_tokens": 100_000, "cache_read_input_tokens": 2_000_000}
    usage = count_usage(enumerate([user("a"), spent("b", usage=big), spent("c", "unknown-model")], 1), prices)
    assert usage.total.cost == pytest.approx(4.0)
    assert usage.models["unknown-model"].cost is None
    assert usage.unpriced == ["unknown-model"]


@pytest.mark.parametrize(
    ("given", "total"),
    [
        ({"input_tokens": 3, "output_tokens": 2}, 5),
        ({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 6}, 6),
        ({"promptTokenCount": 3, "candidatesTokenCount": 2, "totalTokenCount": 9}, 9),
        ({"input_tokens": "many", "output_tokens": None}, 0),
        ({"input_tokens": -5}, 0),
        ({"input_tokens": float("inf"), "output_tokens": float("nan")}, 0),
        ({"input_tokens": 1, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 3}, 9),
        (None, 0),
        ([], 0),
        ("x", 0),
    ],
)
def test_usage_in_every_providers_words(given: object, total: int):
    assert tokens_of(given).total_tokens == total


def test_details_are_found_one_level_down():
    tokens = tokens_of({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}})
    assert tokens.cache_read_tokens == 4


RAW: dict[str, dict[str, Any]] = {
    "anthropic": {
        "input_tokens": 3,
        "cache_read_input_tokens": 60,
        "cache_creation_input_tokens": 30,
        "output_tokens": 47,
        "output_tokens_details": {"thinking_tokens": 20},
        "iterations": [
            {"type": "message", "input_tokens": 3},
            {"type": "compaction", "input_tokens": 7, "output_tokens": 3},
        ],
    },
    "openai_chat": {
        "prompt_tokens": 100,
        "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30, "audio_tokens": 5},
        "completion_tokens": 50,
        "completion_tokens_details": {"reasoning_tokens": 20, "audio_tokens": 4},
    },
    "openai_responses": {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
        "output_tokens": 50,
        "output_tokens_details": {"reasoning_tokens": 20},
    },
    "gemini": {
        "promptTokenCount": 90,
        "toolUsePromptTokenCount": 10,
        "cachedContentTokenCount": 60,
        "candidatesTokenCount": 30,
        "thoughtsTokenCount": 20,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 90}],
    },
}


def test_a_cache_that_is_named_apart_and_counted_within_is_counted_once() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "cache_read_input_tokens": 60}
    assert tokens_of(usage).input_tokens == 100


@pytest.mark.parametrize("provider", RAW)
def test_a_providers_own_count_costs_the_same_as_ours_of_it(provider: str) -> None:
    prices = {"m": {"input": 1, "output": 10, "cache_read": 0.1, "cache_write": 2}}
    raw, ours = (
        count_usage(list(enumerate([user("q"), spent("a", usage=usage)], 1)), prices)
        for usage in (RAW[provider], normalize_usage(RAW[provider], provider))
    )
    assert raw == ours
    assert (raw.total.input_tokens, raw.total.output_tokens, raw.total.reasoning_tokens) == (100, 50, 20)
    written = 0 if provider == "gemini" else 30
    assert raw.total.cost == pytest.approx((40 - written + 500 + 6 + 2 * written) / 1_000_000)


def test_usage_in_a_later_note_is_counted_with_its_model() -> None:
    log = [user("first"), assistant("a", model="m"), build_note("usage", usage=FIVE, model="m")]
    usage = count_usage(list(enumerate(log, 1)))
    assert usage.models["m"].total_tokens == 5
