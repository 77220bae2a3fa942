"""Where one conversation is kept: what of it is there, and how the rest comes there too."""

import asyncio
from collections.abc import Iterable
from operator import is_
from typing import Any

from carrel.conversation.entries import build_aside, build_rewind_event
from carrel.conversation.logs import SessionLogs
from carrel.conversation.messages import ConversationMessage, SessionMeta, meta_of, tool_calls_of
from carrel.conversation.metadata import date_of
from carrel.conversation.reading import collector_paused
from carrel.conversation.session_info import SessionInfo, info_of, kept_folder, meta_fields
from carrel.conversation.typed_log import Look, look_at
from carrel.conversation.typed_message import Message, lines_to_messages
from carrel.conversation.usage import tokens_of
from carrel.conversation.written import Plan, Written
from carrel.storage.base import Stamp


class Place:
    """One conversation's session in a store; there is none until it was found, made or read."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._written = Written()
        self._is_certain = False
        """Whether `_written` is true: it is not before the log was read, nor after a write that failed."""
        self._fields: dict[str, Any] = {}
        """What the metadata says."""
        self._total_tokens = 0
        """How many tokens the log counts."""
        self._stamp: Stamp | None = None
        """Of the log after the last rewriting; None when something was appended since."""

    def begin(self, meta: SessionMeta, *, is_new: bool) -> None:
        """The session has this metadata; it is empty when it is new, and else not looked at yet."""
        info = info_of(meta)
        self._written, self._is_certain, self._stamp = Written(), is_new, None
        self._fields = meta_fields(info)
        self._total_tokens = info.total_tokens

    def read(self, info: SessionInfo, look: Look, known: Iterable[Message] = ()) -> list[Message]:
        """The messages that are visible in the session; those of them that are `known` as the same objects."""
        with collector_paused:
            messages = _the_same(_messages_in(look, info), known)
            self._written.read(messages, look.last_seq)
        # What was put in for an interrupted call, or is out of its place, is put right with the next write.
        lines = [line for message in messages for line in message._source]
        self._is_certain = len(lines) == len(look.raw) and all(map(is_, lines, (line for _, line in look.raw)))
        info.message_count = len(messages)
        return messages

    async def write(self, logs: SessionLogs, info: SessionInfo, messages: list[Message], recheck: bool) -> Plan:
        """Append what is new, and have `info` say what is true then."""
        try:
            plan = await self._write(logs, info, messages, recheck)
        except BaseException:
            self._is_certain = False
            raise
        self._is_certain = True
        info.message_count = len(messages)
        return plan

    async def _write(self, logs: SessionLogs, info: SessionInfo, messages: list[Message], recheck: bool) -> Plan:
        first = self._written.first_change(messages, recheck=recheck)
        fields = self._changed_fields(logs, info)
        if self._is_certain and first == len(self._written.kept):
            plan, seq = await self._append(logs, info, messages, fields)
        else:
            # One at a time: what somebody else shows again after a cut must not be an older version of ours.
            held = await logs.store.lock(f"{logs.folder(info.id)}/cut")
            assert held is not None
            try:
                plan, seq = await self._rewrite(logs, info, list(messages), first, fields)
            finally:
                await held.release()
        self._written.commit(plan, seq)
        is_spent = info.total_tokens > self._total_tokens
        self._total_tokens = max(info.total_tokens, self._total_tokens + _tokens_in(plan.lines))
        if plan.entries or fields or is_spent:
            await self._note(logs, info, plan, flush=bool(fields))
        return plan

    async def _append(
        self, logs: SessionLogs, info: SessionInfo, messages: list[Message], fields: dict[str, Any]
    ) -> tuple[Plan, int]:
        """Append what is new; what others append at the same time does not matter."""
        written = self._written
        plan = written.plan(messages, len(written.kept))
        asides = self._asides(info, plan, fields)
        seq = await _carry_out(logs, info.id, plan, written.last_seq, asides)
        self._stamp = None
        return plan._replace(in_step=plan.in_step and seq == written.last_seq + plan.entries + len(asides)), seq

    async def _rewrite(
        self, logs: SessionLogs, info: SessionInfo, messages: list[Message], first: int, fields: dict[str, Any]
    ) -> tuple[Plan, int]:
        """Cut the log where the first change is and go on from there, with what others said put in its place."""
        if self._is_certain and self._written.in_step and await self._is_alone(logs, info.id):
            plan, last_seq = self._written.plan(messages, first), self._written.last_seq
        else:
            plan, last_seq = await self._merge(logs, info, messages)
        asides = self._asides(info, plan, fields)
        # Only where nobody has written since: the cut would hide what they said, and for good if we end here.
        while not (seq := await _carry_out(logs, info.id, plan, last_seq, asides, after=last_seq)):
            if not plan.entries and not asides:
                break  # an empty log, and nothing for it
            plan, last_seq = await self._merge(logs, info, messages)
            asides = self._asides(info, plan, fields)
        self._stamp = await logs.store.stamp(logs.log_key(info.id))
        return plan, seq

    async def _merge(self, logs: SessionLogs, info: SessionInfo, messages: list[Message]) -> tuple[Plan, int]:
        """What to append given what others wrote, and the number of the last entry that this goes by."""
        look = await look_at(logs, info.id)
        seen = {message.id: message for message in _messages_in(look, info)}
        return self._written.merge(messages, seen, look.raw), look.last_seq

    async def _is_alone(self, logs: SessionLogs, session_id: str) -> bool:
        """Whether nobody else has written since, and there is nothing to merge."""
        key = logs.log_key(session_id)
        if self._stamp is not None:
            return await logs.store.stamp(key) == self._stamp
        async for block in logs.store.read_back(key):
            return block.first_seq + len(block.records) - 1 == self._written.last_seq
        return self._written.last_seq == 0

    def _changed_fields(self, logs: SessionLogs, info: SessionInfo) -> dict[str, Any]:
        info.title = logs.redacted_text(info.title)
        fields = {key: value for key, value in meta_fields(info).items() if value != self._fields.get(key)}
        if "working_dir" in fields:
            fields |= kept_folder(info.working_dir)
        if "provider" in fields:
            fields["provider_id"] = fields.pop("provider")
            if info.provider_id is not None:
                fields["provider"] = info.provider_id
        return fields

    def _asides(self, info: SessionInfo, plan: Plan, fields: dict[str, Any]) -> list[ConversationMessage]:
        """The entries that say what changed in the metadata, and which tokens were spent that no message has."""
        spent = info.total_tokens - self._total_tokens - _tokens_in(plan.lines)
        asides = [build_aside("usage", usage={"total_tokens": spent})] if spent > 0 else []
        return [*asides, build_aside("meta", set=fields)] if fields else asides

    async def _note(self, logs: SessionLogs, info: SessionInfo, plan: Plan, *, flush: bool) -> None:
        """Take over what the metadata says now."""
        writer = logs.writers.get(info.id)
        if writer is None:
            return
        info.title = writer.meta["title"]
        info.time.updated = date_of(writer.meta["updated_at"]) or info.time.updated
        self._fields = meta_fields(info)
        if plan.cut is not None and not any(map(tool_calls_of, plan.lines)):
            await writer.let_go()
        if flush:
            await writer.flush()


async def _carry_out(
    logs: SessionLogs,
    session_id: str,
    plan: Plan,
    last_seq: int,
    asides: list[ConversationMessage],
    *,
    after: int | None = None,
) -> int:
    """Append what the plan says, all of it or nothing; returns the number of the last entry.

    With `after`, 0 and nothing written unless that is the last entry."""
    cut = [build_rewind_event(plan.cut)] if plan.cut is not None else []
    entries = [*cut, *plan.lines, *asides]
    if entries:
        last_seq, _ = await logs.append(session_id, entries, shown=plan.shown, after=after)
    return last_seq


def _tokens_in(lines: list[ConversationMessage]) -> int:
    return sum(tokens_of(meta_of(line).get("usage")).total_tokens for line in lines if "meta" in line)


def _the_same(messages: list[Message], known: Iterable[Message]) -> list[Message]:
    """The known ones in the place of their equals: whoever has one goes on with it."""
    mine = {message.id: message for message in known}
    for place, message in enumerate(messages):
        before = mine.get(message.id)
        if before is not None and before == message:
            before._source = message._source
            messages[place] = before
    return messages


def _messages_in(look: Look, info: SessionInfo) -> list[Message]:
    return lines_to_messages(look.shown, session_id=info.id, since=info.time.created)
