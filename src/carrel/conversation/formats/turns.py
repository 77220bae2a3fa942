"""What the provider formats share: turns in an accepted order, tool ids, arguments, media and the report. Pure."""

import hashlib
import json
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import orjson

from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    build_message,
    meta_of,
    text_block,
    tool_result_block,
    tool_result_text,
)

PROVIDER_NAMES: dict[str, frozenset[str]] = {
    "anthropic": frozenset({"anthropic", "claude"}),
    "openai_chat": frozenset({"openai_chat", "openai"}),
    "openai_responses": frozenset({"openai_responses", "openai"}),
    "gemini": frozenset({"gemini", "google"}),
}
"""The values of `meta.provider` with which each format may send `meta.native` back."""

OPENING = "[The conversation begins with the assistant's message.]"
"""The text of the user message that is added where a provider requires the user to speak first."""
FORM_FIELDS = frozenset({"plain", "parts", "in_place", "role", "no_role", "no_content", "untyped", "bare"})
"""Keys of `meta.native.message` that describe only the form of a request, such as a string instead of a list."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_ALLOWED_KINDS: dict[str, frozenset[str]] = {
    "system": frozenset({"text"}),
    "user": frozenset({"text", "image", "document", "tool_result", "native"}),
    "assistant": frozenset({"text", "thinking", "image", "document", "tool_use", "native"}),
}


class Note(NamedTuple):
    """One difference between the conversation and the payload."""

    message: int
    """The index of the message."""
    block: int | None
    """The index of the block in that message; None for the message itself."""
    what: str
    """`thinking`, `image`, `role`, `cache_control`, …"""
    why: str


@dataclass
class Converted:
    """The part of a request that carries the conversation, and a report of what differs from the conversation."""

    payload: dict[str, Any]
    dropped: list[Note] = field(default_factory=list)
    """Not in the payload."""
    changed: list[Note] = field(default_factory=list)
    """In the payload, but at another position or in another form."""
    unanswered: list[str] = field(default_factory=list)
    """Ids (as in the payload) of the calls at the end that have no result yet: do not send the payload before."""

    def drop(self, at: tuple[int, int | None], what: str, why: str) -> None:
        self.dropped.append(Note(*at, what, why))

    def change(self, at: tuple[int, int | None], what: str, why: str) -> None:
        self.changed.append(Note(*at, what, why))


@dataclass(eq=False)
class WireBlock:
    """A block on its way to a provider."""

    block: MessageBlock
    at: tuple[int, int]
    maker: str | None
    native: dict[str, Any]
    """The provider's own fields of the block; empty if another provider made it."""
    call_id: str = ""
    """The tool id in the payload, for a call and its result."""
    name: str = ""
    """The tool name in the payload, for a call and its result."""
    call: "WireBlock | None" = None
    """The call, for a result."""

    @property
    def kind(self) -> str:
        return str(self.block.get("type"))

    @property
    def text(self) -> str:
        return as_text(self.block.get("text"))


@dataclass(eq=False)
class ArrangedTurn:
    """Consecutive blocks of one side; `results` are the results of the calls of the previous turn."""

    role: Literal["system", "user", "results", "assistant"]
    pieces: list[WireBlock]
    index: int
    """The index of the message; -1 if the blocks come from several messages."""
    native: dict[str, Any] = field(default_factory=dict)
    leading: bool = False
    """Whether this is a system message before the first user or assistant message."""


@dataclass(eq=False)
class WireTurn:
    """A turn in the format of a provider."""

    role: str
    content: list[dict[str, Any]]
    native: dict[str, Any] = field(default_factory=dict)
    index: int = -1


class IdMapper:
    """Maps tool ids and names to ones that a provider accepts: equal for a call and its result, unique per call."""

    def __init__(self, ids: int, names: int, *, bad_in_id: str = r"(?!)", bad_in_name: str = r"[^a-zA-Z0-9_-]") -> None:
        self._ids, self._names = ids, names
        self._bad_in_id, self._bad_in_name = re.compile(bad_in_id), re.compile(bad_in_name)
        self._used: set[str] = set()

    def name(self, original: str) -> str:
        return self._bad_in_name.sub("_", original)[: self._names] or "unnamed"

    def id(self, original: str) -> str:
        clean = self._bad_in_id.sub("_", original)
        if clean == original and 0 < len(clean) <= self._ids:
            return clean
        digest = hashlib.sha256(original.encode("utf-8", "surrogatepass")).hexdigest()[:10]
        return f"{(clean or 'call')[: self._ids - 11]}_{digest}"

    def new_id(self, original: str) -> str:
        first = candidate = self.id(original)
        again = 1
        while candidate in self._used:
            again += 1
            candidate = f"{first[: self._ids - len(str(again)) - 1]}_{again}"
        self._used.add(candidate)
        return candidate


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _replace_surrogates(value: Any) -> Any:
    """Replace each lone surrogate, which no request can carry, with U+FFFD."""
    match value:
        case str():
            return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
        case dict():
            return {_replace_surrogates(key): _replace_surrogates(inner) for key, inner in value.items()}
        case list():
            return [_replace_surrogates(inner) for inner in value]
    return value


def native_of(block_or_message: dict[str, Any]) -> dict[str, Any]:
    native = meta_of(block_or_message).get("native")
    return native if isinstance(native, dict) else {}


def keep_native(thing: dict[str, Any], provider: str, native: dict[str, Any]) -> dict[str, Any]:
    """Store the fields that only this provider understands in the meta of a block or message."""
    if native:
        thing["meta"] = {**meta_of(thing), "provider": provider, "native": native}
    return thing


def keep_request_form(message: ConversationMessage, provider: str, shape: dict[str, Any]) -> ConversationMessage:
    """Store the other fields and the form of a request's message in the meta of our message."""
    return keep_native(message, provider, {**native_of(message), "message": shape} if shape else {})


def native_block(provider: str, value: dict[str, Any]) -> MessageBlock:
    """A block for provider content without an equivalent here; it is sent back only to this provider."""
    return {"type": "native", "provider": provider, "value": value}


def rest(wire: dict[str, Any], *known: str) -> dict[str, Any]:
    """The fields of a payload except the known ones."""
    return {key: value for key, value in wire.items() if key not in known}


def arrange_turns(
    messages: Sequence[ConversationMessage],
    provider: str,
    id_mapper: IdMapper,
    report: Converted,
    *,
    lone: bool = False,
) -> list[ArrangedTurn]:
    """Arrange messages as turns: results right after their calls, ids mapped, what cannot be sent reported.

    With `lone`, a single message is converted, so calls and results need not be paired."""
    turns = _joined_calls([turn for turn in _turns(messages, provider, report) if turn.pieces])
    shapes = {turn.index: turn.native for turn in turns}
    results = _pair_results(turns, id_mapper, report, lone=lone)
    last = next((turn for turn in reversed(turns) if turn.pieces), None)
    arranged: list[ArrangedTurn] = []
    spoken = False
    for turn in turns:
        answers = results.get(id(turn), [])
        if turn.role == "assistant" and not lone:
            _settle_calls(turn, answers, pending=turn is last and not answers, report=report)
        turn.leading = turn.role == "system" and not spoken
        spoken = spoken or turn.role != "system"
        sources = {piece.at[0] for piece in answers}
        source = sources.pop() if len(sources) == 1 else -1
        results_turn = ArrangedTurn("results", answers, source, shapes.get(source, {}))
        # A lone user message with results and text has no turn with the calls before it: results still come first.
        ordered = [turn, results_turn] if turn.role == "assistant" else [results_turn, turn]
        arranged += [each for each in ordered if each.pieces]
    return arranged


def _turns(messages: Sequence[ConversationMessage], provider: str, report: Converted) -> Iterator[ArrangedTurn]:
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant"):
            report.drop((index, None), "role", f"no provider has the role {role!r}")
            continue
        content = message.get("content")
        blocks = [text_block(content)] if isinstance(content, str) else content if isinstance(content, list) else []
        maker = meta_of(message).get("provider")
        pieces = (_piece(block, (index, place), maker, provider, report) for place, block in enumerate(blocks))
        allowed = [piece for piece in pieces if piece is not None and _is_allowed(role, piece, report)]
        shape = native_of(message).get("message")
        shape = shape if isinstance(shape, dict) else {}
        mine = maker in PROVIDER_NAMES[provider]
        if lost := sorted(set(shape) - FORM_FIELDS) if not mine else []:
            report.drop((index, None), "native", f"{', '.join(lost)}: kept by {maker}")
        yield ArrangedTurn(role, allowed, index, shape if mine else {})


def _joined_calls(turns: list[ArrangedTurn]) -> list[ArrangedTurn]:
    """Join consecutive assistant messages with calls into one turn; some logs have one line per parallel call."""
    together: list[ArrangedTurn] = []
    for turn in turns:
        before = together[-1] if together and together[-1].role == turn.role == "assistant" else None
        if before and any(piece.kind == "tool_use" for piece in before.pieces):
            before.pieces += turn.pieces
        else:
            together.append(turn)
    return together


def _piece(block: Any, at: tuple[int, int], maker: Any, provider: str, report: Converted) -> WireBlock | None:
    if not isinstance(block, dict):
        report.drop(at, "block", "it is not an object")
        return None
    sendable = _replace_surrogates(block)
    if sendable != block:
        report.change(at, "text", "a lone surrogate (half a character) is sent as U+FFFD")
        block = sendable
    maker = meta_of(block).get("provider") or maker
    native = native_of(block)
    mine = maker in PROVIDER_NAMES[provider]
    kind = block.get("type")
    if kind == "native":
        mine = block.get("provider") in PROVIDER_NAMES[provider] and isinstance(block.get("value"), dict)
        if not mine:
            report.drop(at, "native", f"only {block.get('provider')} understands it")
            return None
    if kind == "thinking" and not mine:
        report.drop(at, "thinking", f"it was made by {maker or 'an unknown provider'}; only that provider may have it")
        return None
    if native and not mine:
        report.drop(at, "native", f"{', '.join(sorted(map(str, native)))}: kept by {maker or 'an unknown provider'}")
        if kind == "text" and not block.get("text"):
            # Gemini attaches a signature to an empty text.
            return None
    if meta_of(block).get("cache_control") and provider != "anthropic":
        report.drop(at, "cache_control", "only Anthropic has this hint")
    if meta_of(block).get("detail", "auto") != "auto" and provider in ("anthropic", "gemini"):
        report.drop(at, "detail", "only OpenAI has this hint")
    return WireBlock(block, at, str(maker) if maker else None, native if mine else {})


def _is_allowed(role: str, piece: WireBlock, report: Converted) -> bool:
    if piece.kind in _ALLOWED_KINDS[role]:
        return True
    known = any(piece.kind in kinds for kinds in _ALLOWED_KINDS.values())
    report.drop(
        piece.at, piece.kind, f"a message of the {role} cannot have it" if known else "this kind of block is unknown"
    )
    return False


def _pair_results(
    turns: list[ArrangedTurn], id_mapper: IdMapper, report: Converted, *, lone: bool
) -> dict[int, list[WireBlock]]:
    """Take the results out of the user turns and return them by the `id()` of the assistant turn with their calls."""
    open_calls: dict[str, list[tuple[ArrangedTurn, WireBlock]]] = {}
    results: dict[int, list[WireBlock]] = {}
    in_place = False
    for turn in turns:
        if turn.role == "assistant":
            in_place = True
            for piece in turn.pieces:
                if piece.kind == "tool_use":
                    open_calls.setdefault(_assign_id(piece, id_mapper, report), []).append((turn, piece))
        stay: list[WireBlock] = []
        for piece in turn.pieces:
            if piece.kind != "tool_result":
                stay.append(piece)
                in_place = in_place and turn.role == "assistant"
                continue
            original = as_text(piece.block.get("tool_use_id"))
            found = _latest(open_calls.get(original, []))
            if found is None and not lone:
                report.drop(piece.at, "tool_result", f"there is no open call {original!r} before it")
                continue
            call_turn, call = found or (turn, None)
            piece.call, piece.call_id = call, call.call_id if call else id_mapper.id(original)
            piece.name = call.name if call else ""
            results.setdefault(id(call_turn), []).append(piece)
            if not in_place and not lone:
                report.change(piece.at, "tool_result", "moved up, right after its call")
        turn.pieces = stay
    return results


def _assign_id(call: WireBlock, id_mapper: IdMapper, report: Converted) -> str:
    """Set the id and name that a call has in the payload; return its id in the log."""
    original, name = as_text(call.block.get("id")), as_text(call.block.get("name"))
    call.call_id, call.name = id_mapper.new_id(original), id_mapper.name(name)
    if call.call_id != original:
        report.change(call.at, "id", f"the tool id {original!r} is {call.call_id!r} in the payload")
    if call.name != name:
        report.change(call.at, "name", f"the tool name {name!r} is {call.name!r} in the payload")
    return original


def _latest(calls: list[tuple[ArrangedTurn, WireBlock]]) -> tuple[ArrangedTurn, WireBlock] | None:
    """Remove and return the first open call of the newest turn."""
    if not calls:
        return None
    newest = calls[-1][0]
    return calls.pop(next(place for place, (turn, _) in enumerate(calls) if turn is newest))


def _settle_calls(turn: ArrangedTurn, answers: list[WireBlock], *, pending: bool, report: Converted) -> None:
    """Drop calls without a result; list them as unanswered if they are at the end of the conversation."""
    answered = {id(piece.call) for piece in answers}
    waiting = [piece for piece in turn.pieces if piece.kind == "tool_use" and id(piece) not in answered]
    if pending:
        report.unanswered += [piece.call_id for piece in waiting]
        return
    for piece in waiting:
        report.drop(piece.at, "tool_use", "the call has no result; repair the conversation first")
    turn.pieces = [piece for piece in turn.pieces if piece not in waiting]


def merge_turns(wire_turns: Iterable[WireTurn]) -> list[WireTurn]:
    """Merge neighbouring turns of one role and leave out empty ones."""
    turns: list[WireTurn] = []
    for turn in wire_turns:
        if not turn.content:
            continue
        if turns and turns[-1].role == turn.role:
            one = turn.index == turns[-1].index != -1
            turns[-1] = WireTurn(turn.role, turns[-1].content + turn.content, turn.native if one else {}, turn.index)
        else:
            turns.append(turn)
    return turns


def start_with_user(turns: list[WireTurn], opening: dict[str, Any], report: Converted) -> list[WireTurn]:
    """Add a user turn before the others if the assistant speaks first."""
    if not turns or turns[0].role == "user":
        return turns
    report.change((turns[0].index, None), "opening", "the user must speak first; a user message was added before it")
    return [WireTurn("user", [opening]), *turns]


def remove_opening(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Remove the user message that `start_with_user` added."""
    roles = [message["role"] for message in messages]
    first = next((place for place, role in enumerate(roles) if role != "system"), len(roles))
    if roles[first : first + 2] != ["user", "assistant"] or messages[first] != build_message(
        "user", [text_block(OPENING)]
    ):
        return messages
    return messages[:first] + messages[first + 1 :]


def result_blocks(piece: WireBlock, provider: str, report: Converted) -> list[WireBlock]:
    """What the model sees of a tool result: its `content`, with `model_text` instead of its texts if they differ."""
    block = piece.block
    content = block.get("content")
    text = tool_result_text(block)
    inner = content if isinstance(content, list) else []
    pieces = [_piece(part, piece.at, piece.maker, provider, report) for part in inner]
    parts = [part for part in pieces if part is not None]
    if inner and (not text or join_texts(part.block for part in parts) == text):
        return parts
    words = [WireBlock(text_block(text), piece.at, piece.maker, {})] if text else []
    return words + [part for part in parts if part.kind != "text"]


def read_result(
    tool_use_id: Any, content: Any, read_parts: Callable[[Any], list[MessageBlock]], *, is_error: bool = False
) -> MessageBlock:
    """Read a tool result whose content is a text or a list of parts."""
    inner = read_parts(content) if isinstance(content, list) else None
    return tool_result_block(
        tool_use_id=as_text(tool_use_id),
        model_text=join_texts(inner) if inner is not None else as_text(content),
        is_error=is_error,
        content=inner,
    )


def join_texts(blocks: Iterable[MessageBlock]) -> str:
    texts = (as_text(block.get("text")) for block in blocks if block.get("type") == "text")
    return "\n".join(text for text in texts if text)


def wire_name(name: str) -> str:
    """The name of a field in JSON; clients add an underscore to names that are Python keywords."""
    return name[:-1] if name.endswith("_") and keyword.iskeyword(name[:-1]) else name


# The arguments of tool calls

INVALID_JSON = "INVALID_JSON"
"""The only key of a tool call's input whose arguments were not a JSON object."""


def as_json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        # Integers over 64 bits, lone surrogates, keys that are not strings.
        return json.dumps(value, default=str)


def parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def arguments_text(piece: WireBlock) -> str:
    """A tool call's input as JSON text; the model's original text if it still has the same meaning."""
    value, raw = piece.block.get("input"), meta_of(piece.block).get("raw_arguments")
    if isinstance(raw, str) and (parse_object(raw) or {}) == (value or {}):
        return raw
    return value if isinstance(value, str) else as_json({} if value is None else value)


def arguments_object(piece: WireBlock, report: Converted) -> dict[str, Any]:
    """A tool call's input as an object; text that is not a JSON object is wrapped (see `unwrap_arguments`)."""
    value = piece.block.get("input")
    if isinstance(value, dict) and value:
        return value
    text = arguments_text(piece)
    if (known := parse_object(text)) is not None or not text.strip():
        return known or {}
    report.change(piece.at, "arguments", f"they are not a JSON object; sent as text under {INVALID_JSON!r}")
    return {INVALID_JSON: text}


def unwrap_arguments(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The input and meta of a tool call from arguments that came as an object."""
    if not isinstance(value, dict):
        return {}, {"raw_arguments": as_json(value)}
    if set(value) == {INVALID_JSON} and isinstance(value[INVALID_JSON], str):
        return {}, {"raw_arguments": value[INVALID_JSON]}
    return value, {}


# Images and documents


class Media(NamedTuple):
    """An image or document: base64 data with its MIME type, or a URL."""

    mime_type: str
    data: str
    url: str
    name: str

    @property
    def address(self) -> str:
        return self.url or f"data:{self.mime_type};base64,{self.data}"

    @property
    def is_text(self) -> bool:
        return bool(TEXT_KINDS.match(self.mime_type))


_COMMON_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
IMAGES = {
    **dict.fromkeys(("anthropic", "openai_chat", "openai_responses"), _COMMON_IMAGES),
    "gemini": ("image/jpeg", "image/png", "image/webp", "image/heic", "image/heif"),
}
"""Accepted image types; an image of another type makes the provider refuse the whole request."""

_NAMES = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-png": "image/png"}
TEXT_KINDS = re.compile(r"text/|application/(?:[\w.-]+\+)?(?:json|xml|yaml|toml|javascript|x-yaml|x-ndjson)$")
_ANY_DATA_URL = re.compile(r"data:([^;,]+)(?:;[^;,]*)*;base64,(.*)", re.DOTALL)
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")


def media_of(piece: WireBlock, provider: str, report: Converted) -> Media | None:
    mime_type, data, url, name = (as_text(piece.block.get(key)) for key in ("mime_type", "data", "url", "name"))
    mime_type, data = split_data_url(url) or (mime_type, data)
    kind = mime_type.partition(";")[0].strip().lower()
    kind = _NAMES.get(kind, kind)
    if piece.kind == "image" and kind and kind not in IMAGES[provider]:
        report.drop(piece.at, "image", f"{provider} does not accept images of type {kind}")
        return None
    if data and kind:
        clean = normalize_base64(data)
        if clean is None:
            report.drop(piece.at, piece.kind, "its data is not base64")
            return None
        return Media(kind, clean, "", name)
    if not url:
        report.drop(piece.at, piece.kind, "it has neither data with a mime_type nor a url")
    return Media(kind, "", url, name) if url else None


def split_data_url(address: str) -> tuple[str, str] | None:
    """The MIME type and base64 data of a data URL; None for any other URL."""
    inline = _ANY_DATA_URL.fullmatch(address)
    return (inline[1], inline[2]) if inline else None


def normalize_base64(data: str) -> str | None:
    """Standard base64 with padding and without line breaks; None if the text is not base64."""
    if len(data) % 4 == 0 and _BASE64.fullmatch(data):
        return data
    clean = "".join(data.split()).rstrip("=").replace("-", "+").replace("_", "/")
    clean += "=" * (-len(clean) % 4)
    return clean if len(clean.rstrip("=")) % 4 != 1 and _BASE64.fullmatch(clean) else None
