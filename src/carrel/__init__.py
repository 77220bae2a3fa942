"""A private place for every AI agent to work; the public names, each loaded when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from carrel.client import (
        AsyncClient,
        AsyncRemoteSession,
        Client,
        RemoteSession,
    )
    from carrel.conversation.compaction import (
        COMPACT_SUMMARY_PROMPT,
        DEFAULT_COMPACT_THRESHOLD,
        should_compact,
    )
    from carrel.conversation.formats import (
        Converted,
        from_provider,
        to_provider,
    )
    from carrel.conversation.importers import (
        ImportReport,
    )
    from carrel.conversation.log_entries import (
        build_compact_event,
        build_rewind_event,
    )
    from carrel.conversation.messages import (
        SessionData,
        SessionMeta,
        assistant_message,
        build_message,
        document_block,
        flatten_message_text,
        image_block,
        text_block,
        thinking_block,
        tool_result_block,
        tool_use_block,
        user_text_message,
    )
    from carrel.conversation.models.conversation import (
        Conversation,
        ConversationStorage,
        create_session,
        get_session,
        get_session_storage,
        list_sessions,
    )
    from carrel.conversation.models.info import (
        SessionInfo,
        SessionTime,
    )
    from carrel.conversation.models.message import (
        Message,
        MessageRole,
    )
    from carrel.conversation.models.parts import (
        ImagePart,
        TextPart,
        ToolCallPart,
        ToolResultPart,
    )
    from carrel.conversation.redaction import (
        Redactor,
        redact_secrets,
    )
    from carrel.conversation.replay import (
        apply_compact,
        apply_rewind,
    )
    from carrel.conversation.search.search import (
        SearchHit,
    )
    from carrel.conversation.session_state import (
        DEFAULT_SESSION_PROVIDER,
        DEFAULT_SESSION_TITLE,
        MESSAGE_FORMAT_VERSION,
    )
    from carrel.conversation.store import (
        SessionStore,
    )
    from carrel.conversation.usage import (
        Price,
        Usage,
    )
    from carrel.errors import (
        ApiKeyNotFound,
        ArtifactNameRefused,
        ArtifactNotFoundError,
        ArtifactReadError,
        ArtifactWriteError,
        CarrelError,
        CatalogueBusy,
        CatalogueLost,
        CommandNotRun,
        CompactRefused,
        ConfigurationError,
        DatasetExists,
        DatasetInvalid,
        DatasetNotFound,
        DependencyError,
        EnvironmentFailed,
        ExecutionError,
        ExecutorClosed,
        FilesRefused,
        ForkRefused,
        FormatRefused,
        GuardLost,
        ImportRefused,
        InteractionNotFound,
        JobNotFound,
        KeyMissing,
        KeyNotAccepted,
        KeyRefused,
        LockLost,
        MessageRefused,
        MetadataRefused,
        NotFoundThere,
        NotNow,
        PatchRefused,
        PlaceLost,
        ProgramMissing,
        RemoteError,
        ReportUnreadable,
        RequestRefused,
        RequirementRefused,
        ResultsRefused,
        RewindRefused,
        RuntimeDepsDisabledError,
        SampleNotFound,
        SandboxUnavailable,
        ServerBusy,
        ServerFailed,
        ServerUnreachable,
        SessionBusy,
        SessionClosed,
        SessionError,
        SessionExists,
        SessionIdRefused,
        SessionNotFound,
        SessionNotReady,
        SessionTooNew,
        SetupFailed,
        StorageError,
        StorageReadError,
        StorageUnavailable,
        StorageWriteError,
        ToolCallError,
        ToolNotFoundError,
        ToolRefusedError,
        ToolTimeoutError,
        TooMany,
        TooManySessions,
        WaitedTooLong,
        WorkerLost,
        WorkflowExecutionError,
        WorkflowNotFoundError,
        WorkflowRecursionError,
        WorkflowSyntaxError,
        WorkflowValidationError,
    )
    from carrel.events import (
        Event,
        EventType,
        bus,
    )
    from carrel.execution.config import (
        ContainerConfig,
        InProcessConfig,
        Limits,
        Mount,
        SubprocessConfig,
    )
    from carrel.execution.container_executor import (
        ContainerExecutor,
    )
    from carrel.execution.executor import (
        CommandResult,
        ExecutionResult,
        Executor,
        FileChange,
        FileEntry,
        Output,
        RunningCommand,
    )
    from carrel.execution.in_process import (
        InProcessExecutor,
    )
    from carrel.execution.packed_image import (
        pack_image,
    )
    from carrel.execution.subprocess_executor import (
        SubprocessExecutor,
    )
    from carrel.guest.worker.values import (
        Repr,
    )
    from carrel.home import (
        resolve_carrel_home,
        resolve_sessions_dir,
    )
    from carrel.library.artifacts import (
        ArtifactStore,
    )
    from carrel.library.tools.approval import (
        ApprovalRequest,
        Approve,
        Refuse,
    )
    from carrel.library.workflows import (
        WorkflowLibrary,
    )
    from carrel.session import (
        Checkpoint,
        FileStorage,
        MemoryStorage,
        RedisStorage,
        Session,
        StorageBackend,
    )
    from carrel.tasks.dataset import (
        Dataset,
        Datasets,
    )
    from carrel.tasks.sample import (
        Sample,
    )
    from carrel.wire.verification import (
        Receipt,
        VerificationResult,
    )

__all__ = [
    "COMPACT_SUMMARY_PROMPT",
    "DEFAULT_COMPACT_THRESHOLD",
    "DEFAULT_SESSION_PROVIDER",
    "DEFAULT_SESSION_TITLE",
    "MESSAGE_FORMAT_VERSION",
    "ApiKeyNotFound",
    "ApprovalRequest",
    "Approve",
    "ArtifactNameRefused",
    "ArtifactNotFoundError",
    "ArtifactReadError",
    "ArtifactStore",
    "ArtifactWriteError",
    "AsyncClient",
    "AsyncRemoteSession",
    "CarrelError",
    "CatalogueBusy",
    "CatalogueLost",
    "Checkpoint",
    "Client",
    "CommandNotRun",
    "CommandResult",
    "CompactRefused",
    "ConfigurationError",
    "ContainerConfig",
    "ContainerExecutor",
    "Conversation",
    "ConversationStorage",
    "Converted",
    "Dataset",
    "DatasetExists",
    "DatasetInvalid",
    "DatasetNotFound",
    "Datasets",
    "DependencyError",
    "EnvironmentFailed",
    "Event",
    "EventType",
    "ExecutionError",
    "ExecutionResult",
    "Executor",
    "ExecutorClosed",
    "FileChange",
    "FileEntry",
    "FileStorage",
    "FilesRefused",
    "ForkRefused",
    "FormatRefused",
    "GuardLost",
    "ImagePart",
    "ImportRefused",
    "ImportReport",
    "InProcessConfig",
    "InProcessExecutor",
    "InteractionNotFound",
    "JobNotFound",
    "KeyMissing",
    "KeyNotAccepted",
    "KeyRefused",
    "Limits",
    "LockLost",
    "MemoryStorage",
    "Message",
    "MessageRefused",
    "MessageRole",
    "MetadataRefused",
    "Mount",
    "NotFoundThere",
    "NotNow",
    "Output",
    "PatchRefused",
    "PlaceLost",
    "Price",
    "ProgramMissing",
    "Receipt",
    "Redactor",
    "RedisStorage",
    "Refuse",
    "RemoteError",
    "RemoteSession",
    "ReportUnreadable",
    "Repr",
    "RequestRefused",
    "RequirementRefused",
    "ResultsRefused",
    "RewindRefused",
    "RunningCommand",
    "RuntimeDepsDisabledError",
    "Sample",
    "SampleNotFound",
    "SandboxUnavailable",
    "SearchHit",
    "ServerBusy",
    "ServerFailed",
    "ServerUnreachable",
    "Session",
    "SessionBusy",
    "SessionClosed",
    "SessionData",
    "SessionError",
    "SessionExists",
    "SessionIdRefused",
    "SessionInfo",
    "SessionMeta",
    "SessionNotFound",
    "SessionNotReady",
    "SessionStore",
    "SessionTime",
    "SessionTooNew",
    "SetupFailed",
    "StorageBackend",
    "StorageError",
    "StorageReadError",
    "StorageUnavailable",
    "StorageWriteError",
    "SubprocessConfig",
    "SubprocessExecutor",
    "TextPart",
    "TooMany",
    "TooManySessions",
    "ToolCallError",
    "ToolCallPart",
    "ToolNotFoundError",
    "ToolRefusedError",
    "ToolResultPart",
    "ToolTimeoutError",
    "Usage",
    "VerificationResult",
    "WaitedTooLong",
    "WorkerLost",
    "WorkflowExecutionError",
    "WorkflowLibrary",
    "WorkflowNotFoundError",
    "WorkflowRecursionError",
    "WorkflowSyntaxError",
    "WorkflowValidationError",
    "__version__",
    "apply_compact",
    "apply_rewind",
    "assistant_message",
    "build_compact_event",
    "build_message",
    "build_rewind_event",
    "bus",
    "create_session",
    "document_block",
    "flatten_message_text",
    "from_provider",
    "get_session",
    "get_session_storage",
    "image_block",
    "list_sessions",
    "pack_image",
    "redact_secrets",
    "resolve_carrel_home",
    "resolve_sessions_dir",
    "should_compact",
    "text_block",
    "thinking_block",
    "to_provider",
    "tool_result_block",
    "tool_use_block",
    "user_text_message",
]

_ROOMS = {
    "carrel.client": "AsyncClient AsyncRemoteSession Client RemoteSession",
    "carrel.conversation.compaction": "COMPACT_SUMMARY_PROMPT DEFAULT_COMPACT_THRESHOLD should_compact",
    "carrel.conversation.models.conversation": """
        Conversation ConversationStorage create_session get_session get_session_storage list_sessions""",
    "carrel.conversation.log_entries": "build_compact_event build_rewind_event",
    "carrel.conversation.formats": "Converted from_provider to_provider",
    "carrel.conversation.importers": "ImportReport",
    "carrel.conversation.messages": """
        SessionData SessionMeta assistant_message build_message document_block flatten_message_text image_block
        text_block thinking_block tool_result_block tool_use_block user_text_message""",
    "carrel.conversation.session_state": "DEFAULT_SESSION_PROVIDER DEFAULT_SESSION_TITLE MESSAGE_FORMAT_VERSION",
    "carrel.conversation.redaction": "Redactor redact_secrets",
    "carrel.conversation.replay": "apply_compact apply_rewind",
    "carrel.conversation.search.search": "SearchHit",
    "carrel.conversation.models.info": "SessionInfo SessionTime",
    "carrel.conversation.store": "SessionStore",
    "carrel.conversation.models.message": "Message MessageRole",
    "carrel.conversation.models.parts": "ImagePart TextPart ToolCallPart ToolResultPart",
    "carrel.conversation.usage": "Price Usage",
    "carrel.errors": """
        ApiKeyNotFound ArtifactNameRefused ArtifactNotFoundError ArtifactReadError ArtifactWriteError CarrelError
        CatalogueBusy CatalogueLost CommandNotRun CompactRefused ConfigurationError DatasetExists DatasetInvalid
        DatasetNotFound DependencyError EnvironmentFailed ExecutionError ExecutorClosed FilesRefused ForkRefused
        FormatRefused GuardLost ImportRefused InteractionNotFound JobNotFound KeyMissing KeyNotAccepted KeyRefused
        LockLost MessageRefused MetadataRefused NotFoundThere NotNow PatchRefused PlaceLost ProgramMissing RemoteError
        ReportUnreadable RequestRefused RequirementRefused ResultsRefused RewindRefused RuntimeDepsDisabledError
        SampleNotFound SandboxUnavailable ServerBusy ServerFailed ServerUnreachable SessionBusy SessionClosed
        SessionError SessionExists SessionIdRefused SessionNotFound SessionNotReady SessionTooNew SetupFailed
        StorageError
        StorageReadError StorageUnavailable StorageWriteError TooMany TooManySessions ToolCallError ToolNotFoundError
        ToolRefusedError ToolTimeoutError WaitedTooLong WorkerLost WorkflowExecutionError WorkflowNotFoundError
        WorkflowRecursionError WorkflowSyntaxError WorkflowValidationError""",
    "carrel.events": "Event EventType bus",
    "carrel.execution.container_executor": "ContainerExecutor",
    "carrel.execution.executor": "CommandResult ExecutionResult Executor FileChange FileEntry Output RunningCommand",
    "carrel.execution.in_process": "InProcessExecutor",
    "carrel.execution.packed_image": "pack_image",
    "carrel.execution.config": "ContainerConfig InProcessConfig Limits Mount SubprocessConfig",
    "carrel.execution.subprocess_executor": "SubprocessExecutor",
    "carrel.home": "resolve_carrel_home resolve_sessions_dir",
    "carrel.library.artifacts": "ArtifactStore",
    "carrel.library.tools.approval": "ApprovalRequest Approve Refuse",
    "carrel.library.workflows": "WorkflowLibrary",
    "carrel.session": "Checkpoint FileStorage MemoryStorage RedisStorage Session StorageBackend",
    "carrel.tasks.dataset": "Dataset Datasets",
    "carrel.tasks.sample": "Sample",
    "carrel.guest.worker.values": "Repr",
    "carrel.wire.verification": "Receipt VerificationResult",
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'carrel' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(room), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
