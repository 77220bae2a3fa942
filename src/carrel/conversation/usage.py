"""Pure: the tokens and the cost of a conversation, by model; each token is counted once."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from carrel.conversation.log_entries import note_kind
from carrel.conversation.messages import ConversationMessage, meta_of
from carrel.conversation.replay import Numbered
from carrel.errors import ConfigurationError

_NAMES: dict[str, tuple[str, ...]] = {
    "input_tokens": ("input_tokens", "prompt_tokens", "prompt_token_count", "promptTokenCount"),
    "output_tokens": ("output_tokens", "completion_tokens", "candidates_token_count", "candidatesTokenCount"),
    "cache_read_tokens": (
        "cache_read_tokens",
        "cache_read_input_tokens",
        "cached_tokens",
        "cached_content_token_count",
        "cachedContentTokenCount",
        "prompt_cache_hit_tokens",
    ),
    "cache_write_tokens": ("cache_write_tokens", "cache_creation_input_tokens"),
    "reasoning_tokens": ("reasoning_tokens", "thinking_tokens", "thoughts_token_count", "thoughtsTokenCount"),
    "total_tokens": ("total_tokens", "total_token_count", "totalTokenCount"),
}
_DETAILS = ("prompt_tokens_details", "completion_tokens_details", "input_tokens_details", "output_tokens_details")


class Tokens(BaseModel):
    """Tokens of one answer or of many; counts that a provider does not report are 0."""

    input_tokens: int = 0
    """Includes tokens read from a cache or written to one."""
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = 0
    cost: float | None = None
    """In the currency of the price table; None without a known price."""

    def plus(self, other: "Tokens") -> "Tokens":
        sums = {name: getattr(self, name) + getattr(other, name) for name in _NAMES}
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        return Tokens(**sums, cost=sum(costs) if costs else None)


class Usage(BaseModel):
    session_id: str = ""
    total: Tokens = Field(default_factory=Tokens)
    models: dict[str, Tokens] = Field(default_factory=dict)
    inherited_through_seq: int = 0
    """Entries up to here were inherited by a fork and are counted in the parent."""
    unpriced: list[str] = Field(default_factory=list)
    """Models with tokens but no entry in the price table."""


class Price(BaseModel):
    """Per million tokens."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    input: float = Field(default=0.0, ge=0)
    output: float = Field(default=0.0, ge=0)
    cache_read: float | None = Field(default=None, ge=0)
    cache_write: float | None = Field(default=None, ge=0)


def tokens_of(usage: Any) -> Tokens:
    """Convert a provider's usage object, with any of the known field names."""
    if not isinstance(usage, Mapping):
        return Tokens()
    flat: dict[str, Any] = {}
    for detail in _DETAILS:
        if isinstance(usage.get(detail), Mapping):
            flat |= usage[detail]
    flat |= usage
    counts = {name: _first_count(flat, keys) for name, keys in _NAMES.items()}
    apart = "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage
    if apart and "prompt_tokens" not in usage:
        # Anthropic does not include cached tokens in the input; all others do.
        counts["input_tokens"] += counts["cache_read_tokens"] + counts["cache_write_tokens"]
    for spent in map(tokens_of, _compactions(usage)):
        counts |= {name: counts[name] + getattr(spent, name) for name in counts if name != "total_tokens"}
    # Gemini does not include thinking in the output, nor the prompts of its own tools in the input.
    counts["output_tokens"] += _first_count(usage, ("thoughts_token_count", "thoughtsTokenCount"))
    counts["input_tokens"] += _first_count(usage, ("tool_use_prompt_token_count", "toolUsePromptTokenCount"))
    if not counts["total_tokens"]:
        counts["total_tokens"] = counts["input_tokens"] + counts["output_tokens"]
    return Tokens(**counts)


def token_counts(usage: Any) -> dict[str, int] | None:
    """Convert a provider's usage object to our names; None for anything else."""
    return tokens_of(usage).model_dump(exclude={"cost"}) if isinstance(usage, dict) else None


def _compactions(usage: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The usage of Anthropic's own compactions during a response, which its totals do not include."""
    iterations = usage.get("iterations")
    listed = iterations if isinstance(iterations, list) else []
    return [each for each in listed if isinstance(each, dict) and each.get("type") == "compaction"]


def total_after(total: int, entry: ConversationMessage) -> int:
    """Return the tokens of a session after this entry, given those before it; all counting uses this function.

    The usage of a line is added. A fork starts at 0, because its inherited part was counted in the parent. A `meta`
    note may set a larger total, for tokens that are in no line; never a smaller one."""
    meta, kind = meta_of(entry), note_kind(entry)
    if kind in (None, "usage"):
        return total + tokens_of(meta["usage"]).total_tokens if meta.get("usage") else total
    if kind == "fork":
        return 0
    stated = meta["set"].get("total_tokens") if kind == "meta" and isinstance(meta.get("set"), dict) else None
    return max(total, stated) if type(stated) is int else total


def _first_count(usage: Mapping[str, Any], names: Iterable[str]) -> int:
    for name in names:
        value = usage.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**63:
            return int(value)
    return 0


def priced(tokens: Tokens, price: Price | None) -> Tokens:
    if price is None:
        return tokens
    read = price.input if price.cache_read is None else price.cache_read
    write = price.input if price.cache_write is None else price.cache_write
    fresh = max(0, tokens.input_tokens - tokens.cache_read_tokens - tokens.cache_write_tokens)
    cost = (
        fresh * price.input
        + tokens.output_tokens * price.output
        + tokens.cache_read_tokens * read
        + tokens.cache_write_tokens * write
    ) / 1_000_000
    return tokens.model_copy(update={"cost": cost})


def _checked_prices(prices: Mapping[str, Price | Mapping[str, float]]) -> dict[str, Price]:
    if not isinstance(prices, Mapping):
        raise ConfigurationError(f"a price table must be a dict with a price for each model, not {prices!r:.60}")
    checked = {}
    for model, price in prices.items():
        try:
            checked[model] = Price.model_validate(price)
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigurationError(
                f"the price of {model!r} is like {{'input': 3, 'output': 15}}, with cache_read and cache_write where "
                f"they differ{f'; {where}' if where else ''}: {first['msg']}"
            ) from None
    return checked


class UsageCount:
    """Counts the usage of a log entry by entry, without keeping the entries."""

    def __init__(self, session_id: str = "", prices: Mapping[str, Price | Mapping[str, float]] | None = None) -> None:
        self._prices = _checked_prices({} if prices is None else prices)
        self._usage = Usage(session_id=session_id)

    def take(self, seq: int, entry: ConversationMessage) -> None:
        meta, kind = meta_of(entry), note_kind(entry)
        if kind == "fork":
            self._usage = Usage(session_id=self._usage.session_id, inherited_through_seq=seq)
            return
        before = self._usage.total.total_tokens
        total = total_after(before, entry)
        if kind in (None, "usage") and meta.get("usage"):
            self._add(tokens_of(meta["usage"]), meta)
        elif total > before:
            self._add(Tokens(total_tokens=total - before), {})

    def _add(self, tokens: Tokens, meta: dict[str, Any]) -> None:
        model = str(meta.get("model") or "unknown")
        price = self._prices.get(model) or self._prices.get(f"{meta.get('provider')}/{model}")
        spent = priced(tokens, price)
        usage = self._usage
        usage.total = usage.total.plus(spent)
        usage.models[model] = usage.models.get(model, Tokens()).plus(spent)
        if self._prices and price is None and model not in usage.unpriced:
            usage.unpriced.append(model)

    def result(self) -> Usage:
        return self._usage


def count_usage(entries: Iterable[Numbered], prices: Mapping[str, Price | Mapping[str, float]] | None = None) -> Usage:
    count = UsageCount(prices=prices)
    for seq, entry in entries:
        count.take(seq, entry)
    return count.result()
