"""A session: one conversation, one executor, one library, one workspace; forking and rewinding them together."""

from carrel.session.checkpoints import Checkpoints
from carrel.session.forking import fork_conversation
from carrel.session.said import Checkpoint, Said
from carrel.session.seam import Library, StorageBackend, unanswered
from carrel.session.session import Session

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "Library",
    "Said",
    "Session",
    "StorageBackend",
    "fork_conversation",
    "unanswered",
]
