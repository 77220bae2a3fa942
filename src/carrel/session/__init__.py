"""A session: conversation, interpreter and workspace of one agent, and the storages it is kept in."""

from carrel.session.call_handlers import unavailable_handlers
from carrel.session.checkpoints import MAX_CHECKPOINTS, Checkpoint, Checkpoints, ConversationBranch, fork_conversation
from carrel.session.session import Session
from carrel.session.storage import (
    FileStorage,
    MemoryStorage,
    PostgresStorage,
    RedisStorage,
    SharedStorage,
    StorageBackend,
    open_shared_storage,
)

__all__ = [
    "MAX_CHECKPOINTS",
    "Checkpoint",
    "Checkpoints",
    "ConversationBranch",
    "FileStorage",
    "MemoryStorage",
    "PostgresStorage",
    "RedisStorage",
    "Session",
    "SharedStorage",
    "StorageBackend",
    "fork_conversation",
    "open_shared_storage",
    "unavailable_handlers",
]
