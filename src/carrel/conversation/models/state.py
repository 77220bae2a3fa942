"""What the log has of one typed conversation, and how its changes are appended to the log."""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple

from carrel.conversation.log_entries import build_note, build_rewind_event, encode
from carrel.conversation.log_reader import collector_paused
from carrel.conversation.messages import ConversationMessage, SessionMeta, meta_of, tool_calls_of, tool_results_of
from carrel.conversation.models.info import SessionInfo, cwd_fields, info_from_meta, meta_fields
from carrel.conversation.models.message import Message, lines_to_messages, message_to_lines, without_counting_again
from carrel.conversation.replay import Numbered, repair_messages, unanswered_calls
from carrel.conversation.repository import SessionRepository
from carrel.conversation.session_state import date_of
from carrel.conversation.session_writer import any_open
from carrel.conversation.usage import tokens_of

logger = logging.getLogger(__name__)

RECENT = 32
"""How many of the last messages each update compares in depth, down to the values inside their dicts."""


class ConversationLog(NamedTuple):
    """What is visible in the log of a session."""

    raw: list[Numbered]
    repaired: list[Numbered]
    """The same, with an error result for every tool call that nothing will answer any more."""
    last_seq: int

    def messages(self, info: SessionInfo) -> list[Message]:
        return lines_to_messages(self.repaired, session_id=info.id, since=info.time.created)


async def read_log(logs: SessionRepository, session_id: str, *, awaits_result: bool = False) -> ConversationLog:
    """Read what is visible in a session, without writing into it; `SessionNotFound` when there is none.

    `awaits_result`: the caller may still answer the last tool call."""
    await logs.require_meta(session_id)
    reading = logs.reader(session_id)
    view = await reading.view()
    lines = await reading.whole(view)
    if view.problems:
        logger.warning("session %s: %s", session_id, "; ".join(view.problems))
    raw = list(zip(view.shown.seqs(), lines, strict=True))
    mended = repair_messages(lines)
    repaired = [
        (raw[origin][0] if origin is not None else 0, line)
        for line, origin in zip(mended.messages, mended.origins, strict=True)
    ]
    missing = unanswered_calls(lines)
    calls = set(missing)
    if calls and None in mended.origins:
        awaits_result = awaits_result or await any_open(logs.store, logs.folder(session_id), missing)
        if awaits_result:
            repaired = [(seq, line) for seq, line in repaired if seq or calls.isdisjoint(tool_results_of(line))]
    return ConversationLog(raw, repaired, view.last_seq)


@dataclass(slots=True)
class WrittenMessage:
    """A message of the conversation as it was last written or read."""

    message: Message
    digests: list[bytes]
    """Of its lines; empty when the log does not show it any more because another process removed it."""
    start: int
    """The place of its first line among the visible lines."""
    live: list[dict[str, Any]]
    """The fields of the message and of its parts as they are now …"""
    saved: list[dict[str, Any]]
    """… and a copy of them as they were."""

    @property
    def is_changed(self) -> bool:
        return self.live != self.saved

    @property
    def counted_usage(self) -> Any:
        """The usage that the log has of it."""
        return self.saved[0]["usage"]


class AppendPlan(NamedTuple):
    """What to append, and what the log shows once that is done."""

    lines: list[ConversationMessage]
    rewind_to: int | None
    """To how many visible lines the log is rewound first; None: not at all."""
    first: int
    """The messages before this one are not touched …"""
    written: list[WrittenMessage]
    """… and these follow them."""
    visible: int
    """How many lines are visible afterwards."""
    is_exact: bool
    """Whether the log shows exactly the messages of the conversation afterwards."""
    created: list[Message]
    updated: list[Message]
    removed: int

    @property
    def entries(self) -> list[ConversationMessage]:
        rewind = [build_rewind_event(self.rewind_to)] if self.rewind_to is not None else []
        return [*rewind, *self.lines]


class _Wanted(NamedTuple):
    """A message that is to be visible, and the lines it is to be visible with."""

    message: Message
    lines: list[ConversationMessage]
    counted_usage: Any
    """The usage that the log has of it already."""


class ConversationState:
    """What the log has of one conversation, as far as it was written or read here."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.written: list[WrittenMessage] = []
        self.last_seq: int | None = 0
        """The entry after which the log shows exactly `written`; None when it shows other messages too."""
        self._must_read = True
        """Whether `written` cannot be relied on: the log was not read yet, or a write failed."""
        self._visible = 0
        self._fields: dict[str, Any] = {}
        """What the metadata of the session holds."""
        self._total_tokens = 0
        """How many tokens the log counts."""
        self._messages: list[Message] = []
        self._places: dict[int, int] = {}
        self._touched: list[Message] = []

    def begin(self, meta: SessionMeta, *, is_new: bool) -> None:
        """Start with a session that has this metadata: an empty one when it is new, else one that was not read yet."""
        info = info_from_meta(meta)
        self.written, self.last_seq, self._must_read = [], 0, not is_new
        self._visible = 0
        self._messages, self._places, self._touched = [], {}, []
        self._fields = meta_fields(info)
        self._total_tokens = info.total_tokens

    def load(self, info: SessionInfo, log: ConversationLog, known: Iterable[Message] = ()) -> list[Message]:
        """Return the messages that the log shows; a `known` message that is unchanged stays the same object."""
        with collector_paused:
            messages = _reuse_objects(log.messages(info), known)
            before = [_digest(line) for message in messages for line in message._source]
            self._commit(_plan([_as_read(message) for message in messages], before), log.last_seq)
        # Results that the repair added or moved are written with the next update.
        lines = [line for message in messages for line in message._source]
        self._must_read = len(lines) != len(log.raw) or not all(map(is_, lines, (line for _, line in log.raw)))
        info.message_count = len(messages)
        return messages

    async def save(
        self, logs: SessionRepository, info: SessionInfo, messages: list[Message], recheck: bool
    ) -> AppendPlan:
        """Append what is new, and update `info`."""
        try:
            plan = await self._save(logs, info, messages, recheck)
        except BaseException:
            self._must_read = True
            raise
        self._must_read = False
        info.message_count = len(messages)
        return plan

    async def _save(
        self, logs: SessionRepository, info: SessionInfo, messages: list[Message], recheck: bool
    ) -> AppendPlan:
        first = self.first_change(messages, recheck=recheck)
        fields = self._changed_fields(logs, info)
        if not self._must_read and first == len(self.written):
            plan, seq, entries = await self._append(logs, info, messages, fields)
        else:
            plan, seq, entries = await self._edit(logs, info, messages, first, fields)
        self._commit(plan, seq if plan.is_exact else None)
        self._total_tokens = max(info.total_tokens, self._total_tokens + _tokens_in(plan.lines))
        if entries:
            await self._follow_metadata(logs, info, plan, flush=bool(fields))
        return plan

    async def _append(
        self, logs: SessionRepository, info: SessionInfo, messages: Sequence[Message], fields: dict[str, Any]
    ) -> "_Appended":
        """Append new messages only; entries that other processes append at the same time do not matter."""
        plan = self.plan(messages, len(self.written))
        entries = [*plan.entries, *self._notes(info, plan, fields)]
        if not entries:
            return _Appended(plan, self.last_seq, entries)
        seq, _ = await logs.append(info.id, entries)
        is_alone = self.last_seq is not None and seq == self.last_seq + len(entries)
        return _Appended(plan, seq if is_alone else None, entries)

    async def _edit(
        self,
        logs: SessionRepository,
        info: SessionInfo,
        messages: Sequence[Message],
        first: int,
        fields: dict[str, Any],
    ) -> "_Appended":
        """Rewind the log to the first change and append the messages from there on.

        This hides what other processes appended meanwhile, so it is written only after the last entry that was
        read; otherwise the log is read again, and messages of others stay where they are."""
        messages = list(messages)
        last_seq = None if self._must_read else self.last_seq
        while True:
            if last_seq is not None:
                plan = self.plan(messages, first)
            else:
                log = await read_log(logs, info.id)
                plan, last_seq = self.plan_with_others(messages, log.messages(info), log.raw), log.last_seq
            entries = [*plan.entries, *self._notes(info, plan, fields)]
            if not entries:
                return _Appended(plan, last_seq, entries)
            seq, _ = await logs.append(info.id, entries, after=last_seq)
            if seq:
                return _Appended(plan, seq, entries)
            last_seq = None

    def first_change(self, messages: list[Message], *, recheck: bool = False) -> int:
        """The place of the first message that differs from what was written; the number of those when none does."""
        same = len(self._messages)
        # Comparing lists of the same objects does not look into them, so this is fast for any length.
        if messages[:same] != self._messages:
            pairs = enumerate(zip(messages, self._messages, strict=False))
            same = next((n for n, (one, other) in pairs if one is not other and one != other), min(len(messages), same))
        if recheck:
            suspects: Iterable[int] = range(same)
        else:
            # Messages that reported a change, and the last ones, where an edit inside a dict or list is likely.
            touched = {self._places.get(id(message), same) for message in self._touched}
            suspects = [*sorted(place for place in touched if place < same), *range(max(0, same - RECENT), same)]
        self._touched.clear()
        return next((place for place in suspects if self.written[place].is_changed), same)

    def plan(self, messages: Sequence[Message], first: int) -> AppendPlan:
        """Plan what to append from the first change on, for a log that shows exactly what was written."""
        before = self.written[first:]
        known = {each.message.id: each for each in before}
        wanted = [_wanted(message, _counted_usage(known, message)) for message in messages[first:]]
        start = before[0].start if before else self._visible
        plan = _plan(wanted, [digest for each in before for digest in each.digests], start)
        visible = {id for id, each in known.items() if each.digests}
        old = [each for each in plan.written if each.message.id in visible]
        return plan._replace(
            first=first,
            created=[each.message for each in plan.written if each.message.id not in visible and each.digests],
            updated=[each.message for each in old if _differs(known[each.message.id], each)],
            removed=len(known.keys() - {each.message.id for each in wanted}),
        )

    def plan_with_others(
        self, messages: Sequence[Message], visible: Sequence[Message], lines: Sequence[Numbered]
    ) -> AppendPlan:
        """Plan what to append to a log that other processes may have written to; it shows these messages now.

        A message that was changed here replaces the one in the log, whatever others made of it. Of all other messages
        the log is right: those that others added or changed stay, those that they removed are gone."""
        known = {each.message.id: each for each in self.written}
        there = {message.id: message for message in visible}
        wanted: dict[str, _Wanted] = {}
        for message in messages:
            other, before = there.get(message.id), known.get(message.id)
            if other is not None and not (before.is_changed if before is not None else message != other):
                wanted[message.id] = _as_read(other)._replace(message=message)
            elif before is None or before.is_changed:
                counted = other.usage if other is not None else _counted_usage(known, message)
                wanted[message.id] = _wanted(message, counted)
        ours = known.keys() or {message.id for message in messages} & there.keys()
        together = _with_others(wanted, (other for other in visible if other.id in wanted or other.id not in ours))
        plan = _plan(together, [_digest(line) for _, line in lines])
        found = {each.message.id: each for each in plan.written}
        for each in self.written:
            if each.message.id not in found:
                each.digests = []
        return plan._replace(
            written=[found.get(message.id) or known[message.id] for message in messages],
            is_exact=len(together) == len(messages)
            and all(each.message is message for each, message in zip(together, messages, strict=True))
            and all(_is_as_here(each, there) for each in together),
            created=[message for message in messages if message.id not in ours and message.id in wanted],
            updated=[message for message in messages if message.id in known and known[message.id].is_changed],
            removed=len(ours & there.keys() - wanted.keys()),
        )

    def _commit(self, plan: AppendPlan, last_seq: int | None) -> None:
        """Remember that the plan was carried out."""
        for message in self._messages[plan.first :]:
            self._places.pop(id(message), None)
        self.written[plan.first :] = plan.written
        self._messages[plan.first :] = [each.message for each in plan.written]
        self._visible, self.last_seq = plan.visible, last_seq
        for place, message in enumerate(self._messages[plan.first :], plan.first):
            self._places[id(message)] = place
            self._observe(message)

    def _observe(self, message: Message) -> None:
        if not hasattr(message, "_on_change"):
            message._on_change = []
        touch = partial(self._touched.append, message)
        if not any(same.func == touch.func for same in message._on_change if isinstance(same, partial)):
            message._on_change.append(touch)
        for part in message.parts:
            part._on_change = message._on_change

    def _changed_fields(self, logs: SessionRepository, info: SessionInfo) -> dict[str, Any]:
        info.title = logs.redacted_value(info.title)
        fields = {key: value for key, value in meta_fields(info).items() if value != self._fields.get(key)}
        if "working_dir" in fields:
            fields |= cwd_fields(info.working_dir)
        if "provider" in fields:
            fields["provider_id"] = fields.pop("provider")
            if info.provider_id is not None:
                fields["provider"] = info.provider_id
        return fields

    def _notes(self, info: SessionInfo, plan: AppendPlan, fields: dict[str, Any]) -> list[ConversationMessage]:
        """Entries for tokens that no message accounts for, and for changed metadata."""
        spent = info.total_tokens - self._total_tokens - _tokens_in(plan.lines)
        notes = [build_note("usage", usage={"total_tokens": spent})] if spent > 0 else []
        return [*notes, build_note("meta", set=fields)] if fields else notes

    async def _follow_metadata(
        self, logs: SessionRepository, info: SessionInfo, plan: AppendPlan, *, flush: bool
    ) -> None:
        """Copy what the metadata holds after the write into `info`."""
        writer = logs.writers.get(info.id)
        if writer is None:
            return
        info.title = writer.meta["title"]
        info.time.updated = date_of(writer.meta["updated_at"]) or info.time.updated
        self._fields = meta_fields(info)
        if plan.rewind_to is not None and not any(map(tool_calls_of, plan.lines)):
            await writer.release_calls()
        if flush:
            await writer.flush()


class _Appended(NamedTuple):
    plan: AppendPlan
    seq: int | None
    """The last entry, when no other process wrote in between."""
    entries: list[ConversationMessage]


def _tokens_in(lines: list[ConversationMessage]) -> int:
    return sum(tokens_of(meta_of(line).get("usage")).total_tokens for line in lines if "meta" in line)


def _reuse_objects(messages: list[Message], known: Iterable[Message]) -> list[Message]:
    """Put known messages in the place of their equals, so that callers who hold one can go on with it."""
    by_id = {message.id: message for message in known}
    for place, message in enumerate(messages):
        before = by_id.get(message.id)
        if before is not None and before == message:
            before._source = message._source
            messages[place] = before
    return messages


def _counted_usage(known: dict[str, WrittenMessage], message: Message) -> Any:
    return known[message.id].counted_usage if message.id in known else None


def _differs(before: WrittenMessage, written: WrittenMessage) -> bool:
    """Whether the content of a message changed; it may also be written again because one before it changed."""
    return before.is_changed if before.message is written.message else before.message != written.message


def _is_as_here(each: _Wanted, there: dict[str, Message]) -> bool:
    """Whether a message that is shown with lines from the log is the same there as here."""
    other = there.get(each.message.id)
    return other is None or each.lines is not other._source or other == each.message


def _with_others(wanted: dict[str, _Wanted], visible: Iterable[Message]) -> list[_Wanted]:
    """The wanted messages, and after each those of others that follow it in the log."""
    followers: dict[str | None, list[_Wanted]] = {}
    place: str | None = None
    for message in visible:
        if message.id in wanted:
            place = message.id
        else:
            followers.setdefault(place, []).append(_as_read(message))
    together = followers.get(None, [])
    for each in wanted.values():
        together += [each, *followers.get(each.message.id, [])]
    return together


def _as_read(message: Message) -> _Wanted:
    """A message that was just read: with the lines that it was read from, and all its usage counted."""
    return _Wanted(message, message._source, message.usage)


def _wanted(message: Message, counted_usage: Any) -> _Wanted:
    return _Wanted(message, message_to_lines(message), counted_usage)


def _plan(wanted: Sequence[_Wanted], before: Sequence[bytes], start: int = 0) -> AppendPlan:
    """Make the visible lines from place `start` on those of `wanted`; now they have the digests `before`."""
    lines: list[ConversationMessage] = []
    written: list[WrittenMessage] = []
    count = 0
    for each in wanted:
        digests: list[bytes] = []
        for line in each.lines:
            there = before[count] if not lines and count < len(before) else None
            digest = _digest(line) if there is not None else None
            if digest is None or digest != there:
                line = _line_to_append(each, line)
                digest = _digest(line)
            if digest != there:
                lines.append(line)
            digests.append(digest)
            count += 1
        live = [each.message.__dict__, *(part.__dict__ for part in each.message.parts)]
        saved = [_copied(fields) for fields in live]
        written.append(WrittenMessage(each.message, digests, start + count - len(digests), live, saved))
    common = count - len(lines)
    rewind_to = start + common if common < len(before) else None
    return AppendPlan(lines, rewind_to, 0, written, start + count, True, [], [], 0)


def _line_to_append(each: _Wanted, line: ConversationMessage) -> ConversationMessage:
    """A line with the id of its message, and without usage that the log has counted already."""
    if line is each.lines[0]:
        line = without_counting_again(line, each.counted_usage)
    return line if meta_of(line).get("id") else {**line, "meta": {**meta_of(line), "id": each.message.id}}


def _digest(line: ConversationMessage) -> bytes:
    return hashlib.blake2b(encode(line), digest_size=16).digest()


def _copied(value: Any) -> Any:
    """A copy of nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value
