"""The log under a typed conversation: what is visible in it, and what its metadata should say."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from carrel.conversation.logs import SessionLogs
from carrel.conversation.messages import SessionMeta, tool_results_of
from carrel.conversation.metadata import has_sums, later, when_written
from carrel.conversation.open_calls import any_open
from carrel.conversation.repair import mend, unanswered
from carrel.conversation.replay import Numbered
from carrel.errors import StorageReadError

logger = logging.getLogger(__name__)


class Look(NamedTuple):
    """What is visible in a log."""

    raw: list[Numbered]
    shown: list[Numbered]
    """The same with every tool call answered, unless somebody is still waiting for the answer."""
    last_seq: int


async def look_at(logs: SessionLogs, session_id: str, until: int | None = None, *, waits: bool = False) -> Look:
    """Look at a session as it is, or was after entry `until`, without writing into it; `SessionNotFound`.

    `waits`: who looks may still answer the last call."""
    await logs.known_meta(session_id)
    reading = logs.reading(session_id)
    view = await reading.view(until)
    lines = await reading.whole(view)
    if view.problems:
        logger.warning("session %s: %s", session_id, "; ".join(view.problems))
    raw = list(zip(view.shown.seqs(), lines, strict=True))
    mended = mend(lines)
    shown = [
        (raw[origin][0] if origin is not None else 0, line)
        for line, origin in zip(mended.messages, mended.origins, strict=True)
    ]
    missing = unanswered(lines)
    calls = set(missing)
    if calls and None in mended.origins:
        waits = waits or await any_open(logs.store, logs.folder(session_id), missing)
        shown = [(seq, line) for seq, line in shown if seq or not waits or calls.isdisjoint(tool_results_of(line))]
    return Look(raw, shown, view.last_seq)


async def up_to_date(logs: SessionLogs, metas: Sequence[SessionMeta]) -> None:
    """Count again where the log is ahead of its metadata: several are writing, or the one who was has been killed.

    Sessions of other programs have no counts, and get none: that would be to read every log for a list."""
    ours = [meta for meta in metas if "message_count" in meta or "project_dir" in meta]
    stamps = await logs.store.stamps([logs.log_key(meta["id"]) for meta in ours])
    for meta, stamp in zip(ours, stamps, strict=True):
        if stamp is None or has_sums(meta, stamp.size):
            continue
        reading = logs.reading(meta["id"])
        meta["updated_at"] = later(when_written(stamp), meta["updated_at"])
        try:
            messages, tokens = (await reading.outline()).messages(), await reading.tokens_spent()
        except StorageReadError as problem:
            logger.warning("session %s: its messages cannot be counted: %s", meta["id"], problem)
            continue
        meta["message_count"], meta["total_tokens"] = messages, tokens
