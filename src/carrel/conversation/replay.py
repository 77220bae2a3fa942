"""Pure: turn log entries into the messages for a model: replay compacts and rewinds, repair tool calls."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from carrel.conversation.attachments import MARK
from carrel.conversation.log_entries import UNREADABLE, note_kind
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

Numbered = tuple[int, ConversationMessage]
"""An entry and its sequence number; 0 for a message without a line of its own."""

COMPACT_ACKNOWLEDGEMENT = "Understood. I have read the summary of our conversation so far and go on from there."

FILES = ("image", "document")
"""The blocks that a summary may have beside its text: pinned images and documents."""

INTERRUPTED = "error: tool call was interrupted"

_TOOLS = frozenset(("tool_use", "tool_result"))

_EVENTS = frozenset(("compact", "rewind", UNREADABLE))


def apply_compact(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Replace the newest compact and everything before it by the summary and an acknowledgement."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "compact":
            return [*_summary(messages[index]), *messages[index + 1 :]]
    return messages


def apply_rewind(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Apply each rewind, in order, to the list as it is at that moment."""
    shown: list[ConversationMessage] = []
    for message in messages:
        if message.get("role") == "rewind":
            cut = rewind_target_count(message)
            if cut is not None:
                del shown[cut:]
        else:
            shown.append(message)
    return shown


def rewind_target_count(entry: ConversationMessage) -> int | None:
    """Return how many messages a rewind keeps, 0 if it does not say; None if what it says makes no sense."""
    cut = meta_of(entry).get("rewind_to", 0)
    return cut if type(cut) is int and cut >= 0 else None


def rewind_target_seq(entry: ConversationMessage) -> int | None:
    """Return the entry that a rewind returns to, or None if it only keeps a number of messages."""
    jump = meta_of(entry).get("to_seq")
    return jump if type(jump) is int and jump >= 0 else None


def kept_from_seq(entry: ConversationMessage) -> int | None:
    """Return the first entry that a compact keeps unchanged, or None if it keeps none."""
    keep = meta_of(entry).get("keep_from_seq")
    return keep if type(keep) is int and keep > 0 else None


def _summary(compact: ConversationMessage) -> list[ConversationMessage]:
    text = next((str(block.get("text") or "") for block in blocks_of(compact) if block.get("type") == "text"), "")
    files = [block for block in blocks_of(compact) if block.get("type") in FILES or "blob" in meta_of(block)]
    message = build_message("user", [text_block(f"[Conversation Summary]\n\n{text}"), *files], meta={"synthetic": True})
    if MARK in compact:
        message[MARK] = compact[MARK]
    return [message, build_message("assistant", [text_block(COMPACT_ACKNOWLEDGEMENT)], meta={"synthetic": True})]


class VisibleEntries:
    """The visible conversation as ranges of entries, which need no memory until the messages are read."""

    def __init__(self, pieces: list[ConversationMessage | range] | None = None) -> None:
        self.pieces = pieces or []

    def __len__(self) -> int:
        return sum(len(piece) if isinstance(piece, range) else 1 for piece in self.pieces)

    def add(self, run: range) -> None:
        """Append these entries; adjacent ranges become one."""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, range) and last.stop == run.start:
            self.pieces[-1] = range(last.start, run.stop)
        else:
            self.pieces.append(run)

    def cut(self, length: int) -> None:
        """Keep the first `length` messages."""
        for index, piece in enumerate(self.pieces):
            size = len(piece) if isinstance(piece, range) else 1
            if length < size:
                # Slicing a range gives a range.
                self.pieces[index:] = [piece[:length]] if isinstance(piece, range) and length else []
                return
            length -= size

    def since(self, seq: int) -> "VisibleEntries":
        """Return the part from entry `seq` on."""
        runs = [range(max(piece.start, seq), piece.stop) for piece in self.pieces if isinstance(piece, range)]
        return VisibleEntries([run for run in runs if run])

    def before(self, seq: int | None) -> "VisibleEntries":
        """Return the part before entry `seq` (None: all entries), without messages that have no line."""
        runs = [piece for piece in self.pieces if isinstance(piece, range)]
        return VisibleEntries(
            [run for run in (range(run.start, min(run.stop, seq or run.stop)) for run in runs) if run]
        )

    def seqs(self) -> Iterator[int]:
        """Iterate over the entry of each message; 0 for a message without a line of its own."""
        for piece in self.pieces:
            if isinstance(piece, range):
                yield from piece
            else:
                yield 0

    def numbered(self, entries: Mapping[int, ConversationMessage]) -> list[Numbered]:
        """Return the messages with their sequence numbers."""
        found: list[Numbered] = []
        for piece in self.pieces:
            found += [(seq, entries[seq]) for seq in piece] if isinstance(piece, range) else [(0, piece)]
        return found


def events_in(first_seq: int, entries: Sequence[ConversationMessage]) -> list[Numbered]:
    """Return the entries that are not messages, of some consecutive ones."""
    try:
        if _EVENTS.isdisjoint(map(itemgetter("role"), entries)):
            return []
    except (KeyError, TypeError):
        pass  # an entry without a role, or with one that is not a text: check them one by one
    return [(seq, entry) for seq, entry in enumerate(entries, first_seq) if entry.get("role") in _EVENTS]


def visible(path: Sequence[range | Numbered]) -> tuple[VisibleEntries, VisibleEntries]:
    """Return what is visible after ranges of messages and events, oldest first; rewinds to an entry are resolved.

    The second result has the messages that visible summaries replaced, if the path begins with the log."""
    shown, summed = VisibleEntries(), VisibleEntries()
    for item in path:
        if isinstance(item, range):
            shown.add(item)
        elif item[1].get("role") == "compact":
            keep = kept_from_seq(item[1])
            summed = VisibleEntries([*summed.pieces, *shown.before(keep).pieces])
            shown = VisibleEntries([*_summary(item[1]), *(shown.since(keep).pieces if keep is not None else [])])
        elif (cut := rewind_target_count(item[1])) is not None:
            shown.cut(cut)
            if not shown.pieces or isinstance(shown.pieces[0], range):
                summed = VisibleEntries()
    return shown, summed


def visible_after(entries: Sequence[Numbered], seq: int | None = None) -> list[Numbered]:
    """Return what was visible right after entry `seq` of a whole log (None: after the last)."""
    return BackwardReplay(seq).take_all(entries).shown().numbered(dict(entries))


def visible_or_summarized_in(entries: Sequence[Numbered]) -> set[int]:
    """Return the entries of a whole log that are visible now or replaced by a visible summary."""
    return set(BackwardReplay(summed=True).take_all(entries).shown().seqs())


class BackwardReplay:
    """Reads a log from its end, keeps what the visible conversation needs, and sets `enough` when it has that.

    So the cost of opening a long session depends on what is visible, not on the whole log. With `summed`, the
    messages that visible summaries replaced count as visible; for that it reads the whole log."""

    def __init__(self, until: int | None = None, *, summed: bool = False) -> None:
        self.enough = until == 0
        self.problems: list[str] = []
        self._summed = summed
        self._until = until
        self._keep: int | None = None
        self._path: list[range | Numbered] = []

    def take(self, first_seq: int, last_seq: int, events: Sequence[Numbered]) -> None:
        """Take the next older entries; `events` are those that are not messages."""
        end = last_seq
        for seq, entry in reversed(events):
            self._take_run(seq + 1, end)
            if self.enough:
                return
            if self._wanted(seq, entry):
                self._path.append((seq, entry))
            if self.enough:
                return
            end = seq - 1
        self._take_run(first_seq, end)

    def take_all(self, entries: Sequence[Numbered]) -> "BackwardReplay":
        """Take the entries of a whole log, oldest first."""
        if entries:
            first, last = entries[0][0], entries[-1][0]
            self.take(first, last, events_in(first, [entry for _, entry in entries]))
        return self

    def _take_run(self, first: int, last: int) -> None:
        if self._until is not None:
            last = min(last, self._until)
        if self._keep is not None and first <= self._keep:
            self.enough = True
            first = self._keep
        if first <= last:
            self._path.append(range(first, last + 1))

    def _wanted(self, seq: int, entry: ConversationMessage) -> bool:
        if self._until is not None and seq > self._until:
            return False
        role = entry.get("role")
        if role == "rewind":
            return self._wanted_rewind(seq, entry)
        if role == "compact":
            if not self._summed:
                self._keep = kept_from_seq(entry)
                self.enough = self._keep is None
            return True
        reason = meta_of(entry).get("reason") or "its role says that it cannot be read"
        if reason != "blank":
            self.problems.append(f"line {seq} is left out: {reason}")
        return False

    def _wanted_rewind(self, seq: int, entry: ConversationMessage) -> bool:
        if note_kind(entry) is not None:
            return False
        jump = rewind_target_seq(entry)
        if jump is not None and jump < seq:
            self._until = jump
            self.enough = jump == 0
            return False
        if rewind_target_count(entry) is None:
            self.problems.append(f"line {seq} is a rewind to an invalid place; it changes nothing")
            return False
        # The count starts at the first message that was visible then, so all of them are needed.
        self._keep = None
        return True

    def shown(self) -> VisibleEntries:
        shown, summed = visible(self._path[::-1])
        return VisibleEntries([*summed.pieces, *shown.since(0).pieces]) if self._summed else shown


# --- repair -----------------------------------------------------------------------------------------------------------
# Every tool call must have its result right after it, as providers require.


class Repaired(NamedTuple):
    messages: list[ConversationMessage]
    origins: list[int | None]
    """For each message, its index in the input; None for an added one."""


class _Call:
    """A tool call, its message, and the best result found."""

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
    """Build the message with error results for interrupted calls."""
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
    """Return the calls without a result, of the last assistant message that has calls."""
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
    """Return whether a result only replaces one that never came; those of other programs are known by their text."""
    return bool(meta_of(block).get("synthetic")) or (
        block.get("is_error") is True and tool_result_text(block).startswith(INTERRUPTED)
    )


def repair_messages(messages: Sequence[ConversationMessage]) -> Repaired:
    """Put each result right after its call, add a placeholder for a missing one, turn results without a call into text.

    A real result replaces a placeholder wherever it is. Messages are copied when they change, never edited."""
    if is_well_formed(messages):
        return Repaired(list(messages), list(range(len(messages))))
    calls, misplaced = _match(messages)
    moved = [call for call in calls if call.answer is None or not _in_place(call, messages, misplaced)]
    if not moved and not misplaced:
        return Repaired(list(messages), list(range(len(messages))))
    return _rebuild(messages, moved, misplaced)


def _match(messages: Sequence[ConversationMessage]) -> tuple[list[_Call], dict[tuple[int, int], str]]:
    """Return each call with its result, and the result blocks to remove: duplicates ("drop"), or "orphan"."""
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
    """Return whether only results of the same turn are between a call and its result."""
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
