"""The names of py_code_mode 0.10.0: `from carrel.compat.py_code_mode import Session`."""

from carrel.compat import INTERNAL, refuse_missing
from carrel.compat.py_code_mode.errors import (
    ArtifactNotFoundError,
    ArtifactWriteError,
    CodeModeError,
    ConfigurationError,
    DependencyError,
    SkillExecutionError,
    SkillNotFoundError,
    SkillValidationError,
    StorageError,
    StorageReadError,
    StorageWriteError,
    ToolCallError,
    ToolNotFoundError,
    ToolTimeoutError,
)
from carrel.compat.py_code_mode.execution import (
    CONTAINER_AVAILABLE,
    SUBPROCESS_AVAILABLE,
    Capability,
    ContainerConfig,
    ContainerExecutor,
    Executor,
    InProcessConfig,
    InProcessExecutor,
    SubprocessConfig,
    SubprocessExecutor,
)
from carrel.compat.py_code_mode.session import Session
from carrel.compat.py_code_mode.storage import FileStorage, RedisStorage, StorageBackend
from carrel.compat.py_code_mode.types import ExecutionResult, JsonSchema, ToolDefinition

__all__ = [
    "CONTAINER_AVAILABLE",
    "SUBPROCESS_AVAILABLE",
    "ArtifactNotFoundError",
    "ArtifactWriteError",
    "Capability",
    "CodeModeError",
    "ConfigurationError",
    "ContainerConfig",
    "ContainerExecutor",
    "DependencyError",
    "ExecutionResult",
    "Executor",
    "FileStorage",
    "InProcessConfig",
    "InProcessExecutor",
    "JsonSchema",
    "RedisStorage",
    "Session",
    "SkillExecutionError",
    "SkillNotFoundError",
    "SkillValidationError",
    "StorageBackend",
    "StorageError",
    "StorageReadError",
    "StorageWriteError",
    "SubprocessConfig",
    "SubprocessExecutor",
    "ToolCallError",
    "ToolDefinition",
    "ToolNotFoundError",
    "ToolTimeoutError",
]

__getattr__ = refuse_missing(__name__, dict.fromkeys(("NamespaceBundle", "bootstrap_namespaces"), INTERNAL))
