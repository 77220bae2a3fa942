"""Pure: a conversation in, one that no provider refuses out: every tool call has its result, right after it."""

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    blocks_of,
    build_message,
    meta_of,
    text_block,
    tool_calls_of,
    tool_result_block,
    tool_result_text,
    tool_results_of,
)

INTERRUPTED = "error: tool call was interrupted"

_TOOLS = frozenset(("tool_use", "tool_result"))


class Mended(NamedTuple):
    messages: list[ConversationMessage]
    origins: list[int | None]
    """For each message, its place in the list that was given; None for one put in."""


class _Call:
    """One tool call, the message that makes it, and the best result found."""

    def __init__(self, tool_use_id: str, asked_at: int) -> None:
        self.tool_use_id = tool_use_id
        self.asked_at = asked_at
        self.answer: MessageBlock | None = None
        self.answered_at = -1


def interrupted_result(tool_use_id: str) -> MessageBlock:
    return tool_result_block(
        tool_use_id=tool_use_id,
        model_text=INTERRUPTED,
        display_text="The tool call was interrupted before it gave a result",
        is_error=True,
        meta={"synthetic": True},
    )


def interrupted_message(tool_use_ids: Sequence[str]) -> ConversationMessage:
    """The message that stands for the results that never came."""
    return build_message("user", [interrupted_result(id_) for id_ in tool_use_ids], meta={"synthetic": True})


class ToolOrder:
    """Fed a log block by block from its end, tells whether every tool call has its results in the message after it.

    Most logs are so, and then nothing needs mending. What it cannot tell at a glance counts as not in order."""

    def __init__(self) -> None:
        self.kept = True
        self._asked_for: tuple[object, ...] = ()

    def take(self, messages: Sequence[ConversationMessage]) -> None:
        """The next older messages, in order."""
        if not self.kept:
            return
        try:
            first, last = _answers_and_questions(messages)
            self.kept = self._asked_for == last or {*self._asked_for} == {*last}
            self._asked_for = first
        except (AttributeError, LookupError, TypeError, ValueError):
            self.kept = False

    def whole(self) -> bool:
        """After the oldest: no result may stand before all calls."""
        return self.kept and not self._asked_for


def _answers_and_questions(messages: Sequence[ConversationMessage]) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """The calls that the first message answers and that the last one makes; an error when order is broken between."""
    if _TOOLS.isdisjoint(map(itemgetter("type"), chain.from_iterable(map(itemgetter("content"), messages)))):
        return (), ()
    first: tuple[object, ...] | None = None
    asked: list[object] = []
    for message in messages:
        role = message["role"]
        found: list[object] = []
        if role == "assistant":
            for block in message["content"]:
                kind = block["type"]
                if kind == "tool_use":
                    found.append(block["id"])
                elif kind == "tool_result":
                    raise ValueError("a result where none can be")
            if asked:
                raise ValueError("a call without its result")
            first = first or ()
            asked = found
        else:
            for block in message["content"]:
                kind = block["type"]
                if kind == "tool_result" and role == "user":
                    found.append(block["tool_use_id"])
                elif kind in _TOOLS:
                    raise ValueError("a call or a result where none can be")
            if first is None:
                first = tuple(found)
            elif found != asked and (len(found) != len(asked) or {*found} != {*asked}):
                raise ValueError("a call without its result, or a result without its call")
            asked = []
    return first or (), tuple(asked)


def unanswered(messages: Sequence[ConversationMessage]) -> list[str]:
    """The calls of the last assistant message with calls that have no result after it."""
    answered: set[str] = set()
    for message in reversed(messages):
        calls = tool_calls_of(message)
        if calls:
            return [id_ for id_ in dict.fromkeys(calls) if id_ not in answered]
        answered.update(tool_results_of(message))
    return []


def is_stand_in(block: MessageBlock) -> bool:
    """Whether a result only stands for one that never came; another program's are known by their text."""
    return bool(meta_of(block).get("synthetic")) or (
        block.get("is_error") is True and tool_result_text(block).startswith(INTERRUPTED)
    )


def mend(messages: Sequence[ConversationMessage]) -> Mended:
    """Put each result right after its call, a stand-in where there is none, and turn results without a call into text.

    A real result beats a stand-in wherever it comes. Messages are copied when they change, never edited."""
    calls, misplaced = _match(messages)
    moved = [call for call in calls if call.answer is None or not _in_place(call, messages, misplaced)]
    if not moved and not misplaced:
        return Mended(list(messages), list(range(len(messages))))
    return _rebuild(messages, moved, misplaced)


def _match(messages: Sequence[ConversationMessage]) -> tuple[list[_Call], dict[tuple[int, int], str]]:
    """Each call with its result, and the result blocks that must go: doubled or superseded ("drop"), or "orphan"."""
    calls: list[_Call] = []
    latest: dict[str, _Call] = {}
    misplaced: dict[tuple[int, int], str] = {}
    places: dict[int, tuple[int, int]] = {}
    for index, message in enumerate(messages):
        content, role = message.get("content"), message.get("role")
        if type(content) is not list:
            continue
        for place, block in enumerate(content):
            kind = block.get("type") if type(block) is dict else None
            if kind == "tool_use" and role == "assistant" and block.get("id"):
                id_ = str(block["id"])
                if id_ not in latest or latest[id_].asked_at != index:
                    latest[id_] = _Call(id_, index)
                    calls.append(latest[id_])
            elif kind == "tool_result" and role == "user":
                call = latest.get(str(block.get("tool_use_id") or ""))
                if call is None:
                    misplaced[index, place] = "drop" if is_stand_in(block) else "orphan"
                elif call.answer is None or (is_stand_in(call.answer) and not is_stand_in(block)):
                    if call.answer is not None:
                        misplaced[places[id(call)]] = "drop"
                    call.answer, call.answered_at = block, index
                    places[id(call)] = (index, place)
                else:
                    misplaced[index, place] = "drop"
    for call in calls:
        if call.answer is not None and not _in_place(call, messages, misplaced):
            misplaced[places[id(call)]] = "drop"
    return calls, misplaced


def _in_place(call: _Call, messages: Sequence[ConversationMessage], misplaced: dict[tuple[int, int], str]) -> bool:
    """Whether only results of the same turn stand between a call and its result."""
    return all(
        messages[index].get("role") == "user"
        and all(block.get("type") == "tool_result" for block in blocks_of(messages[index]))
        and "orphan" not in [misplaced.get((index, place)) for place in range(len(blocks_of(messages[index])))]
        for index in range(call.asked_at + 1, call.answered_at)
    )


def _rebuild(
    messages: Sequence[ConversationMessage], moved: list[_Call], misplaced: dict[tuple[int, int], str]
) -> Mended:
    wanted: dict[int, list[MessageBlock]] = {}
    for call in moved:
        wanted.setdefault(call.asked_at, []).append(call.answer or interrupted_result(call.tool_use_id))
    mended = Mended([], [])
    waiting: list[MessageBlock] = []
    for index, message in enumerate(messages):
        changed = _without_misplaced(index, message, misplaced)
        if waiting and message.get("role") == "user":
            content = changed.get("content")
            changed = {**changed, "content": [*waiting, *(content if type(content) is list else blocks_of(changed))]}
            waiting = []
        elif waiting:
            mended.messages.append(build_message("user", waiting, meta={"synthetic": True}))
            mended.origins.append(None)
            waiting = []
        if changed is message or changed["content"]:
            mended.messages.append(changed)
            mended.origins.append(index)
        waiting = waiting + wanted.get(index, [])
    if waiting:
        mended.messages.append(build_message("user", waiting, meta={"synthetic": True}))
        mended.origins.append(None)
    return mended


def _without_misplaced(
    index: int, message: ConversationMessage, misplaced: dict[tuple[int, int], str]
) -> ConversationMessage:
    blocks = message.get("content")
    if type(blocks) is not list:
        return message
    fates = [misplaced.get((index, place)) for place in range(len(blocks))]
    if not any(fates):
        return message
    kept = [
        text_block(f"[result of a tool call that is not in view]\n{tool_result_text(block)}") if fate else block
        for block, fate in zip(blocks, fates, strict=True)
        if fate != "drop"
    ]
    return {**message, "content": kept}
