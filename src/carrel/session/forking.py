"""What it takes to fork a session, beside its executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from carrel.conversation.store import SessionStore
from carrel.errors import ForkRefused


async def fork_conversation(store: SessionStore, session_id: str, new_id: str) -> bool:
    """Let the fork of a session begin with what was said in it; False where nothing was."""
    if await store.find_meta(session_id) is None:
        return False
    await store.fork_session(session_id, new_id=new_id, load=False)
    return True


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Whatever keeps a session from being forked, kept or rewound, whoever asked is told so in the same way."""
    try:
        yield
    except ForkRefused:
        raise
    except Exception as problem:
        raise ForkRefused(f"the session could not be {what}: {problem}") from problem
