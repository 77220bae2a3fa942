"""What it takes to fork a session, beside its executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from carrel.conversation.store import SessionStore
from carrel.errors import ForkRefused

NO_WAY_BACK = (
    "{}: a session does not take its variables and files back yet, and nothing has changed. To be able to go back, "
    "`fork()` before what may go wrong and go on in the fork; to take back what was said alone, use `append_rewind` of "
    "its session store"
)


async def fork_conversation(store: SessionStore, session_id: str, new_id: str) -> bool:
    """Let the fork of a session begin with what was said in it; False where nothing was."""
    if await store.find_meta(session_id) is None:
        return False
    await store.fork_session(session_id, new_id=new_id, load=False)
    return True


@contextmanager
def refusing() -> Iterator[None]:
    """Whatever keeps a session from being forked, whoever asked is told so in the same way."""
    try:
        yield
    except ForkRefused:
        raise
    except Exception as problem:
        raise ForkRefused(f"the session could not be forked: {problem}") from problem
