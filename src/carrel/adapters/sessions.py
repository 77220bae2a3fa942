"""What the adapters share: the session that they stand for, and keys of a store for names of any kind."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

from carrel.errors import ConfigurationError
from carrel.session.session import Session
from carrel.session.sync_session import SyncSession

_LONGEST_PART = 150


def check_source(session: object, base: Path | str | None, session_id: str | None) -> None:
    """Raise ConfigurationError unless there is either a session, or the folder (and perhaps the id) to open one."""
    if (session is None) == (base is None) or (session is not None and session_id is not None):
        raise ConfigurationError("give either a session, or base= (a folder) and, if wanted, session_id=")


def open_session(base: Path | str, session_id: str | None) -> Session:
    """Return a session of its own for an adapter; it has an id, so what it keeps can be found again."""
    return Session.from_base(base, session_id=session_id or uuid4().hex)


class SyncSource:
    """The SyncSession of an adapter whose framework calls it without asyncio, opened at the first use.

    It can be called from any thread, also where an event loop runs; a `Session` belongs to its event loop, which a
    synchronous call would block."""

    def __init__(self, session: SyncSession | None, base: Path | str | None, session_id: str | None) -> None:
        check_source(session, base, session_id)
        if session is not None and not isinstance(session, SyncSession):
            raise TypeError(
                f"session is {session!r}; this framework calls without asyncio, so give a SyncSession, which can be "
                "used where an event loop runs too"
            )
        self._base, self._id, self._session = base, session_id or uuid4().hex, session
        self._is_own = session is None
        self._opening = threading.Lock()

    @property
    def id(self) -> str:
        return self._id if self._session is None else self._session.id

    def open(self) -> SyncSession:
        """Return the session; opens it at the first call, also when several threads call at once."""
        with self._opening:
            if self._session is None:
                assert self._base is not None
                self._session = SyncSession.from_base(self._base, session_id=self._id)
            return self._session

    def close(self) -> None:
        """Close the session if the adapter opened it."""
        if self._is_own and self._session is not None:
            self._session.close()


def key_part(text: object) -> str:
    """Return a part of a store's key for any text; long ones, such as the namespaces of nested graphs, are hashed."""
    part = "_" + quote(str(text), safe="")
    return part if len(part) <= _LONGEST_PART else "h" + hashlib.sha256(str(text).encode()).hexdigest()
