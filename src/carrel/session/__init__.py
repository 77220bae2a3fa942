"""A session: conversation, interpreter and workspace of one agent, and the storages it is kept in."""

from carrel.session.call_handlers import unavailable_handlers
from carrel.session.checkpoints import MAX_CHECKPOINTS, Checkpoint, Checkpoints, ConversationBranch, fork_conversation
from carrel.session.durable import Resumed, SavedState
from carrel.session.points import (
    Point,
    RecordedDiff,
    RecordedPoint,
    RecordedState,
    VariableChange,
    compare_files,
    compare_variables,
    find_point,
    read_recorded,
    read_state,
    read_text,
    recorded_checkpoints,
)
from carrel.session.recording import RECORDED, Recorded
from carrel.session.session import Session
from carrel.session.storage import (
    FileStorage,
    MemoryStorage,
    PostgresStorage,
    RedisStorage,
    SharedStorage,
    StorageBackend,
    open_shared_storage,
    store_of,
)

__all__ = [
    "MAX_CHECKPOINTS",
    "RECORDED",
    "Checkpoint",
    "Checkpoints",
    "ConversationBranch",
    "FileStorage",
    "MemoryStorage",
    "Point",
    "PostgresStorage",
    "Recorded",
    "RecordedDiff",
    "RecordedPoint",
    "RecordedState",
    "RedisStorage",
    "Resumed",
    "SavedState",
    "Session",
    "SharedStorage",
    "StorageBackend",
    "VariableChange",
    "compare_files",
    "compare_variables",
    "find_point",
    "fork_conversation",
    "open_shared_storage",
    "read_recorded",
    "read_state",
    "read_text",
    "recorded_checkpoints",
    "store_of",
    "unavailable_handlers",
]
