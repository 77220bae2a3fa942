"""A session: one conversation, one executor, one library, one workspace; forking them together."""

from carrel.session.forking import fork_conversation
from carrel.session.seam import Library, StorageBackend, unanswered
from carrel.session.session import Session

__all__ = ["Library", "Session", "StorageBackend", "fork_conversation", "unanswered"]
