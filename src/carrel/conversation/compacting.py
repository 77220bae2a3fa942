"""Compacts a session: what leaves is handed to the user's function, and its summary becomes an entry of the log."""

from collections.abc import Awaitable, Callable
from typing import Any

from carrel.conversation.compaction import choose_cut, pinned_files, pinned_text, report_of, summary_and_usage
from carrel.conversation.entries import build_compact_event
from carrel.conversation.logs import SessionLogs
from carrel.conversation.messages import ConversationMessage, goes_on
from carrel.conversation.reading import LogReading
from carrel.conversation.repair import mend
from carrel.conversation.replay import Numbered, apply_compact
from carrel.errors import CompactRefused

Summarize = Callable[[list[ConversationMessage]], Awaitable[Any]]


async def compact(
    logs: SessionLogs,
    session_id: str,
    summarize: Summarize,
    *,
    keep_tokens: int,
    keep_turns: int | None,
    provider: str | None,
    model: str | None,
    now: Callable[[], str],
) -> tuple[int, ConversationMessage]:
    """Write the entry and return it with its number; `CompactRefused` when the view it goes by is no longer true."""
    view = await logs.view(session_id)
    reading = logs.reading(session_id)
    # Measured as the model sees them, with what was spilled.
    whole = await reading.whole(view)
    shown = list(zip(view.shown.seqs(), whole, strict=True))
    cut = choose_cut(shown, keep_tokens=keep_tokens, keep_turns=keep_turns)
    leaving = [message for _, message in cut.summarized]
    text, usage = summary_and_usage(await summarize(mend(leaving).messages))
    meta = await logs.known_meta(session_id)
    # Also when nothing is kept: what others say while the summary is being written comes after it.
    keep_from = cut.kept[0][0] if cut.kept else view.last_seq + 1
    pinned = await _pinned(reading, [seq for seq in meta.get("pins", []) if seq < keep_from])
    event = build_compact_event(
        text + pinned_text(pinned),
        provider=provider or meta["provider"],
        model=model or meta["model"],
        compacted_count=len(cut.summarized),
        usage=usage,
    )
    event["content"] += pinned_files(pinned)
    event["meta"] |= {"keep_from_seq": keep_from, "created_at": now(), "report": report_of(cut.summarized)}
    left = len(apply_compact([event])) + sum(1 for _, message in cut.kept if not goes_on(message))
    seq = await logs.append_event(session_id, event, since=view.last_seq, shown=left, keeps=True)
    if not seq:
        raise CompactRefused(
            f"session {session_id} was changed meanwhile: somebody went back in it, or compacted it, while the "
            "summary was being written; nothing was written, and the summary may tell of what is gone"
        )
    return seq, event


async def _pinned(reading: LogReading, pins: list[int]) -> list[Numbered]:
    """The pinned messages that are part of the conversation still, visible or summed up, and whole."""
    if not pins:
        return []
    runs = [piece for piece in (await reading.stood_for()).pieces if isinstance(piece, range)]
    return await reading.some(seq for seq in pins if any(seq in run for run in runs))
