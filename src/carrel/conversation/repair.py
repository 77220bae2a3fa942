"""Pure: repair a conversation so that every tool call has its result right after it, as providers require."""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
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


class Repaired(NamedTuple):
    messages: list[ConversationMessage]
    origins: list[int | None]
    """For each message, its place in the list that was given; None for one put in."""


class _Call:
    """One tool call, the message that makes it, and the best result found."""

    def __init__(self, tool_use_id: str, called_at: int) -> None:
        self.tool_use_id = tool_use_id
        self.called_at = called_at
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


def is_well_formed(messages: Sequence[ConversationMessage]) -> bool:
    """Return whether every tool call has its result in the next message, as in most conversations.

    False also for messages of an unusual form, which need a closer look."""
    calls: list[object] = []
    try:
        if _has_no_tools(messages):
            return True
        for message in messages:
            role = message["role"]
            kind, name = ("tool_use", "id") if role == "assistant" else ("tool_result", "tool_use_id")
            ids = []
            for block in message["content"]:
                if block["type"] in _TOOLS:
                    if block["type"] != kind or role not in ("assistant", "user") or not block[name]:
                        return False
                    ids.append(block[name])
            if role == "assistant":
                if calls or len({*ids}) != len(ids):
                    return False
                calls = ids
            elif len(ids) != len(calls) or (ids != calls and {*ids} != {*calls}):
                return False
            else:
                calls = []
    except (LookupError, TypeError):
        return False
    return not calls


def _has_no_tools(messages: Sequence[ConversationMessage]) -> bool:
    """Return whether no block is a tool call or a result; LookupError or TypeError for messages of an unusual form."""
    return _TOOLS.isdisjoint(map(itemgetter("type"), chain.from_iterable(map(itemgetter("content"), messages))))


@lru_cache
def _plain(role: str, *, is_empty: bool) -> ConversationMessage:
    return {"role": role, "content": [] if is_empty else [{"type": "text"}]}


def without_texts(message: ConversationMessage) -> ConversationMessage:
    """Return what `repair_messages` looks at: the role and the tool blocks, so that a long log needs little memory."""
    role, blocks = str(message.get("role")), blocks_of(message)
    if not any(block.get("type") in ("tool_use", "tool_result") for block in blocks):
        return _plain(role, is_empty=not blocks)
    return {"role": role, "content": list(map(_without_text, blocks))}


def _without_text(block: MessageBlock) -> MessageBlock:
    short: MessageBlock = {name: block[name] for name in ("type", "id", "tool_use_id", "is_error") if name in block}
    if block.get("type") == "tool_result":
        short |= {"model_text": tool_result_text(block)[: len(INTERRUPTED)], "meta": meta_of(block)}
    return short


def unanswered_calls(messages: Sequence[ConversationMessage]) -> list[str]:
    """The calls of the last assistant message with calls that have no result after it."""
    with suppress(LookupError, TypeError):
        if _has_no_tools(messages):
            return []
    answered: set[str] = set()
    for message in reversed(messages):
        calls = tool_calls_of(message)
        if calls:
            return [id_ for id_ in dict.fromkeys(calls) if id_ not in answered]
        answered.update(tool_results_of(message))
    return []


def is_placeholder(block: MessageBlock) -> bool:
    """Whether a result only stands for one that never came; another program's are known by their text."""
    return bool(meta_of(block).get("synthetic")) or (
        block.get("is_error") is True and tool_result_text(block).startswith(INTERRUPTED)
    )


def repair_messages(messages: Sequence[ConversationMessage]) -> Repaired:
    """Put each result right after its call, a stand-in where there is none, and turn results without a call into text.

    A real result beats a stand-in wherever it comes. Messages are copied when they change, never edited."""
    if is_well_formed(messages):
        return Repaired(list(messages), list(range(len(messages))))
    calls, misplaced = _match(messages)
    moved = [call for call in calls if call.answer is None or not _in_place(call, messages, misplaced)]
    if not moved and not misplaced:
        return Repaired(list(messages), list(range(len(messages))))
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
                if id_ not in latest or latest[id_].called_at != index:
                    latest[id_] = _Call(id_, index)
                    calls.append(latest[id_])
            elif kind == "tool_result" and role == "user":
                call = latest.get(str(block.get("tool_use_id") or ""))
                if call is None:
                    misplaced[index, place] = "drop" if is_placeholder(block) else "orphan"
                elif call.answer is None or (is_placeholder(call.answer) and not is_placeholder(block)):
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
        for index in range(call.called_at + 1, call.answered_at)
    )


def _rebuild(
    messages: Sequence[ConversationMessage], moved: list[_Call], misplaced: dict[tuple[int, int], str]
) -> Repaired:
    wanted: dict[int, list[MessageBlock]] = {}
    for call in moved:
        wanted.setdefault(call.called_at, []).append(call.answer or interrupted_result(call.tool_use_id))
    repaired = Repaired([], [])
    waiting: list[MessageBlock] = []
    for index, message in enumerate(messages):
        changed = _without_misplaced(index, message, misplaced)
        if waiting and message.get("role") == "user":
            content = changed.get("content")
            changed = {**changed, "content": [*waiting, *(content if type(content) is list else blocks_of(changed))]}
            waiting = []
        elif waiting:
            repaired.messages.append(build_message("user", waiting, meta={"synthetic": True}))
            repaired.origins.append(None)
            waiting = []
        if changed is message or changed["content"]:
            repaired.messages.append(changed)
            repaired.origins.append(index)
        waiting = waiting + wanted.get(index, [])
    if waiting:
        repaired.messages.append(build_message("user", waiting, meta={"synthetic": True}))
        repaired.origins.append(None)
    return repaired


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
