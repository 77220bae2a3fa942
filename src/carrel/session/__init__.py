"""A session: conversation, interpreter and workspace of one agent, and the storages it is kept in."""

from carrel.session.call_handlers import unavailable_handlers
from carrel.session.checkpoints import MAX_CHECKPOINTS, Checkpoint, Checkpoints, ConversationBranch, fork_conversation
from carrel.session.session import Session
from carrel.session.storage import FileStorage, MemoryStorage, RedisStorage, StorageBackend

__all__ = [
    "MAX_CHECKPOINTS",
    "Checkpoint",
    "Checkpoints",
    "ConversationBranch",
    "FileStorage",
    "MemoryStorage",
    "RedisStorage",
    "Session",
    "StorageBackend",
    "fork_conversation",
    "unavailable_handlers",
]
