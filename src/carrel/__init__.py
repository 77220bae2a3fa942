"""carrel: sessions for AI agents. Each public name is loaded from its module on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from carrel.version import __version__

if TYPE_CHECKING:
    from carrel.client import AsyncClient, Client
    from carrel.client import AsyncRemoteSession as AsyncRemoteSession
    from carrel.client import RemoteSession as RemoteSession
    from carrel.conversation.compaction import COMPACT_SUMMARY_PROMPT as COMPACT_SUMMARY_PROMPT
    from carrel.conversation.compaction import DEFAULT_COMPACT_THRESHOLD as DEFAULT_COMPACT_THRESHOLD
    from carrel.conversation.compaction import should_compact as should_compact
    from carrel.conversation.formats import Converted as Converted
    from carrel.conversation.formats import from_provider as from_provider
    from carrel.conversation.formats import to_provider as to_provider
    from carrel.conversation.importers import ImportReport as ImportReport
    from carrel.conversation.log_entries import build_compact_event as build_compact_event
    from carrel.conversation.log_entries import build_rewind_event as build_rewind_event
    from carrel.conversation.messages import SessionData, assistant_message, user_text_message
    from carrel.conversation.messages import SessionMeta as SessionMeta
    from carrel.conversation.messages import build_message as build_message
    from carrel.conversation.messages import document_block as document_block
    from carrel.conversation.messages import flatten_message_text as flatten_message_text
    from carrel.conversation.messages import image_block as image_block
    from carrel.conversation.messages import text_block as text_block
    from carrel.conversation.messages import thinking_block as thinking_block
    from carrel.conversation.messages import tool_result_block as tool_result_block
    from carrel.conversation.messages import tool_use_block as tool_use_block
    from carrel.conversation.models.conversation import Conversation, create_session, get_session, list_sessions
    from carrel.conversation.models.conversation import ConversationStorage as ConversationStorage
    from carrel.conversation.models.conversation import get_session_storage as get_session_storage
    from carrel.conversation.models.info import SessionInfo
    from carrel.conversation.models.info import SessionTime as SessionTime
    from carrel.conversation.models.message import Message
    from carrel.conversation.models.message import MessageRole as MessageRole
    from carrel.conversation.models.parts import ImagePart as ImagePart
    from carrel.conversation.models.parts import TextPart as TextPart
    from carrel.conversation.models.parts import ToolCallPart as ToolCallPart
    from carrel.conversation.models.parts import ToolResultPart as ToolResultPart
    from carrel.conversation.redaction import Redactor as Redactor
    from carrel.conversation.redaction import redact_secrets as redact_secrets
    from carrel.conversation.replay import apply_compact as apply_compact
    from carrel.conversation.replay import apply_rewind as apply_rewind
    from carrel.conversation.search.search import SearchHit as SearchHit
    from carrel.conversation.session_state import DEFAULT_SESSION_PROVIDER as DEFAULT_SESSION_PROVIDER
    from carrel.conversation.session_state import DEFAULT_SESSION_TITLE as DEFAULT_SESSION_TITLE
    from carrel.conversation.session_state import MESSAGE_FORMAT_VERSION as MESSAGE_FORMAT_VERSION
    from carrel.conversation.store import SessionStore
    from carrel.conversation.usage import Price as Price
    from carrel.conversation.usage import Usage as Usage
    from carrel.embedding import Embedder
    from carrel.errors import (
        ArtifactNotFoundError,
        ArtifactWriteError,
        CarrelError,
        ConfigurationError,
        DependencyError,
        ExecutorClosed,
        ForkRefused,
        MissingExtra,
        RuntimeDepsDisabledError,
        SandboxUnavailable,
        SessionBusy,
        SessionClosed,
        SessionNotFound,
        StorageError,
        StorageReadError,
        StorageWriteError,
        ToolCallError,
        ToolNotFoundError,
        ToolRefusedError,
        ToolTimeoutError,
        WorkflowExecutionError,
        WorkflowNotFoundError,
        WorkflowValidationError,
    )
    from carrel.events import Event, EventType, bus
    from carrel.execution.config import ContainerConfig, InProcessConfig, Limits, Mount, SubprocessConfig
    from carrel.execution.container_executor import ContainerExecutor
    from carrel.execution.docker_engine import pack_image as pack_image
    from carrel.execution.executor import (
        CommandResult,
        ExecutionResult,
        Executor,
        FileChange,
        FileEntry,
        FileStat,
        Output,
    )
    from carrel.execution.executor import RunningCommand as RunningCommand
    from carrel.execution.executor import Variable as Variable
    from carrel.execution.in_process import InProcessExecutor
    from carrel.execution.subprocess_executor import SubprocessExecutor
    from carrel.guest.worker.values import Repr as Repr
    from carrel.home import resolve_carrel_home
    from carrel.home import resolve_sessions_dir as resolve_sessions_dir
    from carrel.library.artifacts import ArtifactStore as ArtifactStore
    from carrel.library.tools.approval import ApprovalRequest, Approve, Refuse
    from carrel.library.workflows import WorkflowLibrary as WorkflowLibrary
    from carrel.session import (
        Checkpoint,
        FileStorage,
        MemoryStorage,
        PostgresStorage,
        RedisStorage,
        Session,
        StorageBackend,
    )
    from carrel.session.sync_session import SyncSession
    from carrel.tasks.dataset import Dataset as Dataset
    from carrel.tasks.dataset import Datasets as Datasets
    from carrel.tasks.sample import Sample as Sample
    from carrel.wire.verification import Receipt as Receipt
    from carrel.wire.verification import VerificationResult

# fmt: off
__all__ = [
    "ApprovalRequest", "Approve", "ArtifactNotFoundError", "ArtifactWriteError", "AsyncClient", "CarrelError",
    "Checkpoint", "Client", "CommandResult", "ConfigurationError", "ContainerConfig", "ContainerExecutor",
    "Conversation", "DependencyError", "Embedder", "Event", "EventType", "ExecutionResult", "Executor",
    "ExecutorClosed", "FileChange", "FileEntry", "FileStat", "FileStorage", "ForkRefused", "InProcessConfig",
    "InProcessExecutor", "Limits", "MemoryStorage", "Message", "MissingExtra", "Mount", "Output", "PostgresStorage",
    "RedisStorage",
    "Refuse", "RuntimeDepsDisabledError", "SandboxUnavailable", "Session", "SessionBusy", "SessionClosed",
    "SessionData", "SessionInfo", "SessionNotFound", "SessionStore", "StorageBackend", "StorageError",
    "StorageReadError", "StorageWriteError", "SubprocessConfig", "SubprocessExecutor", "SyncSession",
    "ToolCallError", "ToolNotFoundError", "ToolRefusedError", "ToolTimeoutError", "VerificationResult",
    "WorkflowExecutionError", "WorkflowNotFoundError", "WorkflowValidationError", "__version__",
    "assistant_message", "bus", "create_session", "get_session", "list_sessions", "resolve_carrel_home",
    "user_text_message",
]
# fmt: on

_MODULES = {
    "carrel.client": "AsyncClient AsyncRemoteSession Client RemoteSession",
    "carrel.conversation.compaction": "COMPACT_SUMMARY_PROMPT DEFAULT_COMPACT_THRESHOLD should_compact",
    "carrel.conversation.formats": "Converted from_provider to_provider",
    "carrel.conversation.importers": "ImportReport",
    "carrel.conversation.log_entries": "build_compact_event build_rewind_event",
    "carrel.conversation.messages": """
        SessionData SessionMeta assistant_message build_message document_block flatten_message_text image_block
        text_block thinking_block tool_result_block tool_use_block user_text_message""",
    "carrel.conversation.models.conversation": """
        Conversation ConversationStorage create_session get_session get_session_storage list_sessions""",
    "carrel.conversation.models.info": "SessionInfo SessionTime",
    "carrel.conversation.models.message": "Message MessageRole",
    "carrel.conversation.models.parts": "ImagePart TextPart ToolCallPart ToolResultPart",
    "carrel.conversation.redaction": "Redactor redact_secrets",
    "carrel.conversation.replay": "apply_compact apply_rewind",
    "carrel.conversation.search.search": "SearchHit",
    "carrel.conversation.session_state": """
        DEFAULT_SESSION_PROVIDER DEFAULT_SESSION_TITLE MESSAGE_FORMAT_VERSION""",
    "carrel.conversation.store": "SessionStore",
    "carrel.conversation.usage": "Price Usage",
    "carrel.embedding": "Embedder",
    "carrel.errors": """
        ArtifactNotFoundError ArtifactWriteError CarrelError ConfigurationError DependencyError ExecutorClosed
        ForkRefused MissingExtra RuntimeDepsDisabledError SandboxUnavailable SessionBusy SessionClosed SessionNotFound
        StorageError StorageReadError StorageWriteError ToolCallError ToolNotFoundError ToolRefusedError
        ToolTimeoutError WorkflowExecutionError WorkflowNotFoundError WorkflowValidationError""",
    "carrel.events": "Event EventType bus",
    "carrel.execution.config": "ContainerConfig InProcessConfig Limits Mount SubprocessConfig",
    "carrel.execution.container_executor": "ContainerExecutor",
    "carrel.execution.executor": """
        CommandResult ExecutionResult Executor FileChange FileEntry FileStat Output RunningCommand Variable""",
    "carrel.execution.in_process": "InProcessExecutor",
    "carrel.execution.docker_engine": "pack_image",
    "carrel.execution.subprocess_executor": "SubprocessExecutor",
    "carrel.guest.worker.values": "Repr",
    "carrel.home": "resolve_carrel_home resolve_sessions_dir",
    "carrel.library.artifacts": "ArtifactStore",
    "carrel.library.tools.approval": "ApprovalRequest Approve Refuse",
    "carrel.library.workflows": "WorkflowLibrary",
    "carrel.session": "Checkpoint FileStorage MemoryStorage PostgresStorage RedisStorage Session StorageBackend",
    "carrel.session.sync_session": "SyncSession",
    "carrel.tasks.dataset": "Dataset Datasets",
    "carrel.tasks.sample": "Sample",
    "carrel.wire.verification": "Receipt VerificationResult",
}
"""The names that can be imported from `carrel`: those in `__all__`, and those of earlier versions."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    module = import_module(_MODULE_OF.get(name, "carrel.errors"))  # Every exception can be imported from here.
    if name.startswith("_") or not hasattr(module, name):
        raise AttributeError(f"module 'carrel' has no attribute {name!r}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
