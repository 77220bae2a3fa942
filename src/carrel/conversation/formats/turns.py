"""Pure: what every provider's format needs first: turns in an order nobody refuses, tool ids, and a report."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    build_message,
    meta_of,
    text_block,
    tool_result_text,
)

MAKERS: dict[str, frozenset[str]] = {
    "anthropic": frozenset({"anthropic", "claude"}),
    "openai_chat": frozenset({"openai_chat", "openai"}),
    "openai_responses": frozenset({"openai_responses", "openai"}),
    "gemini": frozenset({"gemini", "google"}),
}
"""Whose `meta.native` each format may send back, by the name in `meta.provider`."""

OPENING = "[The conversation begins with the assistant's message.]"
"""What the user is made to say where a provider wants the user to speak first."""
SHAPES = frozenset({"plain", "parts", "in_place", "role", "no_role", "no_content", "untyped", "bare"})
"""What `meta.native.message` says only about the form: a string or a list, this place or that."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_SAYS: dict[str, frozenset[str]] = {
    "system": frozenset({"text"}),
    "user": frozenset({"text", "image", "document", "tool_result", "native"}),
    "assistant": frozenset({"text", "thinking", "image", "document", "tool_use", "native"}),
}


class Note(NamedTuple):
    """One thing that is not in the payload as it is in the conversation."""

    message: int
    """Its place in the list of messages that was given."""
    block: int | None
    """Its place in that message; None for the message itself."""
    what: str
    """`thinking`, `image`, `role`, `cache_control`, …"""
    why: str


@dataclass
class Converted:
    """A part of a request, and what it does not say."""

    payload: dict[str, Any]
    dropped: list[Note] = field(default_factory=list)
    """Not in the payload."""
    changed: list[Note] = field(default_factory=list)
    """In the payload, but in another place or form."""
    unanswered: list[str] = field(default_factory=list)
    """The calls at the very end that wait for their results, by the id in the payload: do not send it yet."""

    def drop(self, at: tuple[int, int | None], what: str, why: str) -> None:
        self.dropped.append(Note(*at, what, why))

    def change(self, at: tuple[int, int | None], what: str, why: str) -> None:
        self.changed.append(Note(*at, what, why))


@dataclass(eq=False)
class Piece:
    """A block on its way to a provider."""

    block: MessageBlock
    at: tuple[int, int]
    maker: str | None
    native: dict[str, Any]
    """What this provider itself keeps with the block; empty when another one made it."""
    call_id: str = ""
    """For a call and for its result: the id in the payload."""
    name: str = ""
    """The same for the tool's name."""
    call: "Piece | None" = None
    """For a result: its call."""

    @property
    def kind(self) -> str:
        return str(self.block.get("type"))

    @property
    def text(self) -> str:
        return as_text(self.block.get("text"))


@dataclass(eq=False)
class Turn:
    """What one side says at one go; `results` are the answers to the calls of the turn before."""

    role: Literal["system", "user", "results", "assistant"]
    pieces: list[Piece]
    index: int
    """The message it is from; -1 when it is from several."""
    native: dict[str, Any] = field(default_factory=dict)
    leading: bool = False
    """A system message before anybody has spoken."""


@dataclass(eq=False)
class Said:
    """A turn in a provider's own words."""

    role: str
    content: list[dict[str, Any]]
    native: dict[str, Any] = field(default_factory=dict)
    index: int = -1


class Spelling:
    """Tool ids and names as one provider accepts them: the same for a call and its result, another for another call."""

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


def _sayable(value: Any) -> Any:
    """The value with U+FFFD for each lone surrogate, which no request can carry."""
    match value:
        case str():
            return _SURROGATE.sub("\ufffd", value)
        case dict():
            return {_sayable(key): _sayable(inner) for key, inner in value.items()}
        case list():
            return [_sayable(inner) for inner in value]
    return value


def _is_sayable(value: Any) -> bool:
    match value:
        case str():
            return value.isascii() or not _SURROGATE.search(value)
        case dict():
            return all(map(_is_sayable, value)) and all(map(_is_sayable, value.values()))
        case list():
            return all(map(_is_sayable, value))
    return True


def native_of(block_or_message: dict[str, Any]) -> dict[str, Any]:
    native = meta_of(block_or_message).get("native")
    return native if isinstance(native, dict) else {}


def keep_native(thing: dict[str, Any], provider: str, native: dict[str, Any]) -> dict[str, Any]:
    """The block or message with what only this provider understands beside it."""
    if native:
        thing["meta"] = {**meta_of(thing), "provider": provider, "native": native}
    return thing


def keep_shape(message: ConversationMessage, provider: str, shape: dict[str, Any]) -> ConversationMessage:
    """The message with the fields and the form that a request of this provider gave it."""
    return keep_native(message, provider, {**native_of(message), "message": shape} if shape else {})


def native_block(provider: str, value: dict[str, Any]) -> MessageBlock:
    """Something a provider said that has no block of ours; only this provider gets it back."""
    return {"type": "native", "provider": provider, "value": value}


def rest(wire: dict[str, Any], *known: str) -> dict[str, Any]:
    """The fields that are not among the known ones."""
    return {key: value for key, value in wire.items() if key not in known}


def arrange(
    messages: Sequence[ConversationMessage], provider: str, spelling: Spelling, report: Converted, *, lone: bool = False
) -> list[Turn]:
    """The conversation as turns: results right after their calls, ids mapped, what nobody can say reported.

    With `lone`, calls and results need not meet: a single message is converted on its own."""
    turns = _joined_calls([turn for turn in _turns(messages, provider, report) if turn.pieces])
    shapes = {turn.index: turn.native for turn in turns}
    results = _pair(turns, spelling, report, lone=lone)
    last = next((turn for turn in reversed(turns) if turn.pieces), None)
    arranged: list[Turn] = []
    spoken = False
    for turn in turns:
        answers = results.get(id(turn), [])
        if turn.role == "assistant" and not lone:
            _settle(turn, answers, pending=turn is last and not answers, report=report)
        turn.leading = turn.role == "system" and not spoken
        spoken = spoken or turn.role != "system"
        sources = {piece.at[0] for piece in answers}
        source = sources.pop() if len(sources) == 1 else -1
        results_turn = Turn("results", answers, source, shapes.get(source, {}))
        # A lone message of results and words has no call before it: the results still come first.
        ordered = [turn, results_turn] if turn.role == "assistant" else [results_turn, turn]
        arranged += [each for each in ordered if each.pieces]
    return arranged


def _turns(messages: Sequence[ConversationMessage], provider: str, report: Converted) -> Iterator[Turn]:
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant"):
            report.drop((index, None), "role", f"no provider has the role {role!r}")
            continue
        content = message.get("content")
        blocks = [text_block(content)] if isinstance(content, str) else content if isinstance(content, list) else []
        maker = meta_of(message).get("provider")
        pieces = (_piece(block, (index, place), maker, provider, report) for place, block in enumerate(blocks))
        said = [piece for piece in pieces if piece is not None and _may_say(role, piece, report)]
        shape = native_of(message).get("message")
        shape = shape if isinstance(shape, dict) else {}
        mine = maker in MAKERS[provider]
        if lost := sorted(set(shape) - SHAPES) if not mine else []:
            report.drop((index, None), "native", f"{', '.join(lost)}: kept by {maker}")
        yield Turn(role, said, index, shape if mine else {})


def _joined_calls(turns: list[Turn]) -> list[Turn]:
    """Calls made side by side are one turn, also where a log has a line for each of them."""
    together: list[Turn] = []
    for turn in turns:
        before = together[-1] if together and together[-1].role == turn.role == "assistant" else None
        if before and any(piece.kind == "tool_use" for piece in before.pieces):
            before.pieces += turn.pieces
        else:
            together.append(turn)
    return together


def _piece(block: Any, at: tuple[int, int], maker: Any, provider: str, report: Converted) -> Piece | None:
    if not isinstance(block, dict):
        report.drop(at, "block", "it is no object")
        return None
    if not _is_sayable(block):
        report.change(at, "text", "half a character (a lone surrogate) is sent as U+FFFD")
        block = _sayable(block)
    maker = meta_of(block).get("provider") or maker
    native = native_of(block)
    mine = maker in MAKERS[provider]
    kind = block.get("type")
    if kind == "native":
        mine = block.get("provider") in MAKERS[provider] and isinstance(block.get("value"), dict)
        if not mine:
            report.drop(at, "native", f"only {block.get('provider')} understands it")
            return None
    if kind == "thinking" and not mine:
        report.drop(at, "thinking", f"it was made by {maker or 'an unknown provider'}; only that provider may have it")
        return None
    if native and not mine:
        report.drop(at, "native", f"{', '.join(sorted(map(str, native)))}: kept by {maker or 'an unknown provider'}")
        if kind == "text" and not block.get("text"):
            # Gemini hangs a signature on a text with nothing in it.
            return None
    if meta_of(block).get("cache_control") and provider != "anthropic":
        report.drop(at, "cache_control", "only Anthropic has this hint")
    if meta_of(block).get("detail", "auto") != "auto" and provider in ("anthropic", "gemini"):
        report.drop(at, "detail", "only OpenAI has this hint")
    return Piece(block, at, str(maker) if maker else None, native if mine else {})


def _may_say(role: str, piece: Piece, report: Converted) -> bool:
    if piece.kind in _SAYS[role]:
        return True
    known = any(piece.kind in kinds for kinds in _SAYS.values())
    report.drop(piece.at, piece.kind, f"a message of the {role} cannot have it" if known else "nobody knows this block")
    return False


def _pair(turns: list[Turn], spelling: Spelling, report: Converted, *, lone: bool) -> dict[int, list[Piece]]:
    """Take the results out of the user's turns; those of each assistant turn, by its identity."""
    open_calls: dict[str, list[tuple[Turn, Piece]]] = {}
    results: dict[int, list[Piece]] = {}
    in_place = False
    for turn in turns:
        if turn.role == "assistant":
            in_place = True
            for piece in turn.pieces:
                if piece.kind == "tool_use":
                    open_calls.setdefault(_spell(piece, spelling, report), []).append((turn, piece))
        stay: list[Piece] = []
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
            asked, call = found or (turn, None)
            piece.call, piece.call_id = call, call.call_id if call else spelling.id(original)
            piece.name = call.name if call else ""
            results.setdefault(id(asked), []).append(piece)
            if not in_place and not lone:
                report.change(piece.at, "tool_result", "moved up, right after its call")
        turn.pieces = stay
    return results


def _spell(call: Piece, spelling: Spelling, report: Converted) -> str:
    """Give a call the id and the name of the payload; returns the id of the log."""
    original, name = as_text(call.block.get("id")), as_text(call.block.get("name"))
    call.call_id, call.name = spelling.new_id(original), spelling.name(name)
    if call.call_id != original:
        report.change(call.at, "id", f"the tool id {original!r} is {call.call_id!r} in the payload")
    if call.name != name:
        report.change(call.at, "name", f"the tool name {name!r} is {call.name!r} in the payload")
    return original


def _latest(calls: list[tuple[Turn, Piece]]) -> tuple[Turn, Piece] | None:
    """The first call of the newest turn among the open ones; it is open no longer."""
    if not calls:
        return None
    newest = calls[-1][0]
    return calls.pop(next(place for place, (turn, _) in enumerate(calls) if turn is newest))


def _settle(turn: Turn, answers: list[Piece], *, pending: bool, report: Converted) -> None:
    """Take out the calls that were never answered, or name them when the answers are still to come."""
    answered = {id(piece.call) for piece in answers}
    waiting = [piece for piece in turn.pieces if piece.kind == "tool_use" and id(piece) not in answered]
    if pending:
        report.unanswered += [piece.call_id for piece in waiting]
        return
    for piece in waiting:
        report.drop(piece.at, "tool_use", "the call has no result; repair the conversation first")
    turn.pieces = [piece for piece in turn.pieces if piece not in waiting]


def merged(said: Iterable[Said]) -> list[Said]:
    """Neighbours of one role as one turn, empty ones left out."""
    turns: list[Said] = []
    for turn in said:
        if not turn.content:
            continue
        if turns and turns[-1].role == turn.role:
            one = turn.index == turns[-1].index != -1
            turns[-1] = Said(turn.role, turns[-1].content + turn.content, turn.native if one else {}, turn.index)
        else:
            turns.append(turn)
    return turns


def opened(turns: list[Said], opening: dict[str, Any], report: Converted) -> list[Said]:
    """The turns with the user speaking first, who is made to where there is need."""
    if not turns or turns[0].role == "user":
        return turns
    report.change((turns[0].index, None), "opening", "the user must speak first; a line was put before it")
    return [Said("user", [opening]), *turns]


def without_opening(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """The messages without the line that `opened` put before them."""
    roles = [message["role"] for message in messages]
    first = next((place for place, role in enumerate(roles) if role != "system"), len(roles))
    if roles[first : first + 2] != ["user", "assistant"] or messages[first] != build_message(
        "user", [text_block(OPENING)]
    ):
        return messages
    return messages[:first] + messages[first + 1 :]


def inside(piece: Piece, provider: str, report: Converted) -> list[Piece]:
    """What a tool result gives the model: its `content`, with `model_text` for the words where they differ."""
    block = piece.block
    content = block.get("content")
    text = tool_result_text(block)
    inner = content if isinstance(content, list) else []
    pieces = [_piece(part, piece.at, piece.maker, provider, report) for part in inner]
    parts = [part for part in pieces if part is not None]
    if inner and (not text or joined(part.block for part in parts) == text):
        return parts
    words = [Piece(text_block(text), piece.at, piece.maker, {})] if text else []
    return words + [part for part in parts if part.kind != "text"]


def joined(blocks: Iterable[MessageBlock]) -> str:
    texts = (as_text(block.get("text")) for block in blocks if block.get("type") == "text")
    return "\n".join(text for text in texts if text)


def count_of(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def compactions(usage: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What Anthropic's own compactions cost on the way to an answer, which its sums leave out."""
    iterations = usage.get("iterations")
    listed = iterations if isinstance(iterations, list) else []
    return [each for each in listed if isinstance(each, dict) and each.get("type") == "compaction"]
