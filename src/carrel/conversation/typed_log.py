"""The log under a typed conversation: what is visible in it, and what must be said again in it."""

import logging
from typing import NamedTuple

from carrel.conversation.entries import UNREADABLE, aside_of
from carrel.conversation.logs import SessionLogs
from carrel.conversation.messages import ConversationMessage
from carrel.conversation.repair import mend, unanswered, uses_tools
from carrel.conversation.replay import Numbered
from carrel.conversation.typed_message import usage_of, without_counting_again
from carrel.conversation.writer import tool_loop_key

logger = logging.getLogger(__name__)


class Look(NamedTuple):
    """What is visible in a log."""

    raw: list[Numbered]
    shown: list[Numbered]
    """The same with every tool call answered, unless somebody is still waiting for the answer."""
    last_seq: int


async def look_at(logs: SessionLogs, session_id: str) -> Look:
    """Look at a session without writing into it; `SessionNotFound`."""
    view = await logs.view(session_id)
    lines = view.messages
    if view.spilled:
        lines = await logs.reading(session_id).whole(lines, view.problems)
    if view.problems:
        logger.warning("session %s: %s", session_id, "; ".join(view.problems))
    raw = list(zip(view.shown.seqs(), lines, strict=True))
    if not uses_tools(lines):
        return Look(raw, raw, view.last_seq)
    mended = mend(lines)
    shown = [
        (raw[origin][0] if origin is not None else 0, line)
        for line, origin in zip(mended.messages, mended.origins, strict=True)
    ]
    if mended.origins[-1] is None and unanswered(lines):
        waiting = await logs.store.holder(tool_loop_key(logs.folder(session_id)))
        shown = shown[:-1] if waiting is not None else shown
    return Look(raw, shown, view.last_seq)


async def say_again(logs: SessionLogs, session_id: str, first: int, last: int) -> int | None:
    """Append once more what others said in these entries, which a rewind of ours hid; returns the last one's number."""
    hidden: list[ConversationMessage] = []
    async for seq, entry in logs.reading(session_id).entries(first):
        if seq > last:
            break
        if entry.get("role") in ("rewind", "compact"):
            if aside_of(entry) is None:
                hidden.clear()
        elif entry.get("role") != UNREADABLE:
            hidden.append(without_counting_again(entry, usage_of(entry)))
    return await logs.append(session_id, hidden) if hidden else None
