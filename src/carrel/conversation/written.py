"""Pure: what of a typed conversation is in the log, what changed since, and what must be appended for it."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from carrel.conversation.entries import encode
from carrel.conversation.messages import ConversationMessage, meta_of
from carrel.conversation.replay import Numbered
from carrel.conversation.typed_message import Message, message_to_lines, without_counting_again

RECENT = 32
"""How many of the last messages are compared each time, down to what their dicts hold."""


@dataclass(slots=True)
class Kept:
    """One message as it was last written or read here."""

    message: Message
    digests: list[bytes]
    """Of its lines; none when it is not visible any more because others took it away."""
    start: int
    """The place of its first line among the visible ones."""
    number: int
    """How many messages before it are in the log."""
    live: list[dict[str, Any]]
    """The fields of the message and its parts as they are now …"""
    then: list[dict[str, Any]]
    """… and a copy of them as they were."""

    @property
    def is_changed(self) -> bool:
        return self.live != self.then

    @property
    def counted(self) -> Any:
        """The usage that the log has of it."""
        return self.then[0]["usage"]


class Plan(NamedTuple):
    """What to append, and what is known once that is done."""

    lines: list[ConversationMessage]
    cut: int | None
    """To how many visible lines the log is rewound before they are appended; None: not at all."""
    shown: int
    """How many messages these lines hold."""
    first: int
    """The messages before this one stay as they are …"""
    kept: list[Kept]
    """… and these come after them."""
    visible: int
    """How many lines are visible then …"""
    messages: int
    """… and how many messages they hold."""
    in_step: bool
    created: list[Message]
    updated: list[Message]
    removed: int

    @property
    def entries(self) -> int:
        """How many entries it appends."""
        return len(self.lines) + (self.cut is not None)


class _Wanted(NamedTuple):
    """A message that is to be visible, and the lines it is to be visible with."""

    message: Message
    lines: list[ConversationMessage]
    counted: Any
    """The usage that the log has of it already."""
    is_mine: bool = True


class Written:
    """What of one conversation is in the log, as far as it was written or read here."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self.visible = 0
        self.messages = 0
        self.last_seq = 0
        self.in_step = True
        """Whether the visible lines are those of `kept` and no others: nobody else has written."""
        self._messages: list[Message] = []
        self._places: dict[int, int] = {}
        self._touched: list[Message] = []

    def read(self, messages: list[Message], last_seq: int) -> None:
        """These messages were just read, and are all that is visible."""
        before = [_digest(line) for message in messages for line in message._source]
        self.commit(_plan([_as_read(message) for message in messages], before), last_seq)

    def first_change(self, messages: list[Message], *, recheck: bool = False) -> int:
        """The place of the first message that is not as it was written; the number of those written when all are."""
        same = len(self._messages)
        # The same objects are equal without a look into them, so this is quick for any length.
        if messages[:same] != self._messages:
            pairs = enumerate(zip(messages, self._messages, strict=False))
            same = next((n for n, (one, other) in pairs if one is not other and one != other), min(len(messages), same))
        if recheck:
            suspects: Iterable[int] = range(same)
        else:
            # Those that said they were changed, and those where an edit inside a dict or a list is likely.
            touched = {self._places.get(id(message), same) for message in self._touched}
            suspects = [*sorted(place for place in touched if place < same), *range(max(0, same - RECENT), same)]
        self._touched.clear()
        return next((place for place in suspects if self.kept[place].is_changed), same)

    def plan(self, messages: Sequence[Message], first: int) -> Plan:
        """What to append, from the first change on, when nobody else has written."""
        before = self.kept[first:]
        counted = {kept.message.id: kept.counted for kept in before}
        wanted = [_wanted(message, counted.get(message.id)) for message in messages[first:]]
        start, number = (before[0].start, before[0].number) if before else (self.visible, self.messages)
        plan = _plan(wanted, [digest for kept in before for digest in kept.digests], start, number)
        known = {kept.message.id: kept for kept in before}
        return plan._replace(
            first=first,
            in_step=self.in_step,
            created=[kept.message for kept in plan.kept if kept.digests and not _is_there(known, kept.message)],
            updated=[kept.message for kept in plan.kept if _is_there(known, kept.message) and _differs(known, kept)],
            removed=len(known.keys() - {each.message.id for each in wanted}),
        )

    def merge(self, mine: Sequence[Message], theirs: dict[str, Message], lines: Sequence[Numbered]) -> Plan:
        """What to append to the lines visible now when others may have written too; `theirs` are all that they know.

        What they said stays, and so does what was changed here; of a message that both changed, mine is shown. What
        they took away and nobody changed here is gone."""
        base = {kept.message.id: kept for kept in self.kept}
        known = set(base) or {message.id for message in mine} & set(theirs)
        wanted: dict[str, _Wanted] = {}
        for message in mine:
            other, kept = theirs.get(message.id), base.get(message.id)
            counted = other.usage if other is not None else kept.counted if kept is not None else None
            if other is not None and not (kept.is_changed if kept is not None else message != other):
                wanted[message.id] = _as_read(other)._replace(message=message)
            elif kept is None or kept.is_changed:
                wanted[message.id] = _wanted(message, counted)
        together = _with_others(wanted, theirs, known)
        plan = _plan(together, [_digest(line) for _, line in lines])
        found = {kept.message.id: kept for kept in plan.kept}
        gone = {message.id: base[message.id] for message in mine if message.id not in found}
        for kept in gone.values():
            kept.digests = []
        return plan._replace(
            kept=[found.get(message.id) or gone[message.id] for message in mine],
            in_step=len(together) == len(mine) and all(_as_it_was(each, base) for each in together),
            created=[message for message in mine if message.id not in known and found[message.id].digests],
            updated=[message for message in mine if message.id in base and base[message.id].is_changed],
            removed=len(known & theirs.keys() - wanted.keys()),
        )

    def commit(self, plan: Plan, last_seq: int) -> None:
        """The plan was carried out; the entry appended last has this number."""
        for message in self._messages[plan.first :]:
            self._places.pop(id(message), None)
        self.kept[plan.first :] = plan.kept
        self._messages[plan.first :] = [kept.message for kept in plan.kept]
        self.visible, self.messages, self.last_seq, self.in_step = plan.visible, plan.messages, last_seq, plan.in_step
        for place, message in enumerate(self._messages[plan.first :], plan.first):
            self._places[id(message)] = place
            self._watch(message)

    def _watch(self, message: Message) -> None:
        if not hasattr(message, "_watchers"):
            message._watchers = []
        tell = partial(self._touched.append, message)
        if not any(same.func == tell.func for same in message._watchers if isinstance(same, partial)):
            message._watchers.append(tell)
        for part in message.parts:
            part._watchers = message._watchers


def _is_there(known: dict[str, Kept], message: Message) -> bool:
    return message.id in known and bool(known[message.id].digests)


def _differs(known: dict[str, Kept], kept: Kept) -> bool:
    """Whether a message says something else than before, and is not only written again."""
    before = known[kept.message.id]
    return before.is_changed if before.message is kept.message else before.message != kept.message


def _as_it_was(each: _Wanted, base: dict[str, Kept]) -> bool:
    """Whether a message is visible with the lines that are known here."""
    kept = base.get(each.message.id)
    if not each.is_mine or kept is None or kept.is_changed:
        return each.is_mine
    return kept.digests == [_digest(line) for line in each.lines]


def _with_others(wanted: dict[str, _Wanted], theirs: dict[str, Message], known: set[str]) -> list[_Wanted]:
    """Mine, and after each what others said after it."""
    after: dict[str | None, list[_Wanted]] = {}
    place: str | None = None
    for message in theirs.values():
        if message.id in wanted:
            place = message.id
        elif message.id not in known:
            after.setdefault(place, []).append(_as_read(message)._replace(is_mine=False))
    together = after.get(None, [])
    for each in wanted.values():
        together += [each, *after.get(each.message.id, [])]
    return together


def _as_read(message: Message) -> _Wanted:
    """A message that was just read: with the lines it was read from, and all its usage counted."""
    return _Wanted(message, message._source, message.usage)


def _wanted(message: Message, counted: Any) -> _Wanted:
    return _Wanted(message, message_to_lines(message), counted)


def _plan(wanted: Sequence[_Wanted], before: Sequence[bytes], start: int = 0, number: int = 0) -> Plan:
    """Make the visible lines from place `start` on those of `wanted`, where those of `before` are now."""
    lines: list[ConversationMessage] = []
    kept: list[Kept] = []
    count = 0
    for each in wanted:
        digests: list[bytes] = []
        for line in each.lines:
            there = before[count] if not lines and count < len(before) else None
            digest = _digest(line) if there is not None else None
            if digest is None or digest != there:
                line = _anew(each, line)
                digest = _digest(line)
            if digest != there:
                lines.append(line)
            digests.append(digest)
            count += 1
        live = [each.message.__dict__, *(part.__dict__ for part in each.message.parts)]
        then = [_copied(fields) for fields in live]
        kept.append(Kept(each.message, digests, start + count - len(digests), number, live, then))
        number += bool(digests)
    common = count - len(lines)
    cut = start + common if common < len(before) else None
    shown = next((each.number for each in kept if each.start >= start + common), number)
    return Plan(lines, cut, shown, 0, kept, start + count, number, True, [], [], 0)


def _anew(each: _Wanted, line: ConversationMessage) -> ConversationMessage:
    """A line as it is appended: with the id of its message, and without counting again what was counted."""
    if line is each.lines[0]:
        line = without_counting_again(line, each.counted)
    return line if meta_of(line).get("id") else {**line, "meta": {**meta_of(line), "id": each.message.id}}


def _digest(line: ConversationMessage) -> bytes:
    return hashlib.blake2b(encode(line), digest_size=16).digest()


def _copied(value: Any) -> Any:
    """The same, so that what is changed inside it later does not show here."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value
