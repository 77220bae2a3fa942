"""The error classes of py_code_mode; where carrel has one for the same, each is that one too."""

from collections.abc import Mapping, Sequence
from typing import Any

from carrel import errors
from carrel.guest.worker import values


class CodeModeError(Exception):
    """The base of these errors."""


class ToolNotFoundError(CodeModeError, errors.ToolNotFoundError):
    def __init__(self, tool_name: str, available_tools: Sequence[str] | None = None) -> None:
        self.tool_name = tool_name
        self.available_tools = list(available_tools or ())
        known = f"; there is {', '.join(self.available_tools)}" if self.available_tools else ""
        super().__init__(f"there is no tool {tool_name}{known}")


class ToolCallError(CodeModeError, errors.ToolCallError):
    def __init__(self, tool_name: str, tool_args: dict[str, Any], cause: Exception) -> None:
        self.tool_name, self.tool_args, self.cause = tool_name, tool_args, cause
        super().__init__(f"the tool {tool_name} failed: {cause}")


class ToolTimeoutError(CodeModeError, errors.ToolTimeoutError):
    def __init__(self, tool_name: str, timeout_seconds: float) -> None:
        self.tool_name, self.timeout_seconds = tool_name, timeout_seconds
        super().__init__(f"the tool {tool_name} did not end within {timeout_seconds:g} seconds")


class ArtifactNotFoundError(CodeModeError, errors.ArtifactNotFoundError):
    def __init__(self, artifact_name: str) -> None:
        self.artifact_name = artifact_name
        super().__init__(f"there is no artifact {artifact_name!r}")


class ArtifactWriteError(CodeModeError, errors.ArtifactWriteError):
    def __init__(self, artifact_name: str, reason: str) -> None:
        self.artifact_name, self.reason = artifact_name, reason
        super().__init__(f"the artifact {artifact_name!r} cannot be written: {reason}")


class SkillNotFoundError(CodeModeError, errors.WorkflowNotFoundError):
    def __init__(self, skill_name: str) -> None:
        self.skill_name = skill_name
        super().__init__(f"there is no skill {skill_name}")


class SkillValidationError(CodeModeError, errors.WorkflowValidationError):
    def __init__(self, skill_name: str, reason: str) -> None:
        self.skill_name, self.reason = skill_name, reason
        super().__init__(f"the skill {skill_name} is not valid: {reason}")


class SkillExecutionError(CodeModeError, errors.WorkflowExecutionError):
    def __init__(self, skill_name: str, cause: Exception) -> None:
        self.skill_name, self.cause = skill_name, cause
        super().__init__(f"the skill {skill_name} failed: {cause}")


class DependencyError(CodeModeError, errors.DependencyError):
    def __init__(self, package: str, required_by: str | None = None) -> None:
        self.package, self.required_by = package, required_by
        super().__init__(f"the package {package} is missing{f', {required_by} needs it' if required_by else ''}")


class ConfigurationError(CodeModeError, errors.ConfigurationError):
    """A setting is wrong."""


class StorageError(CodeModeError, errors.StorageError):
    """Stored data could not be read or written."""


class StorageReadError(StorageError, errors.StorageReadError):
    def __init__(self, message: str, path: Any = None) -> None:
        self.path = path
        super().__init__(message)


class StorageWriteError(StorageError, errors.StorageWriteError):
    def __init__(self, message: str, path: Any = None) -> None:
        self.path = path
        super().__init__(message)


class RPCError(CodeModeError):
    """A call between the running code and the host failed."""


class RPCTransportError(RPCError):
    """The connection was lost."""


class NamespaceError(RPCError):
    """A call of the running code to one of the four namespaces failed."""

    def __init__(self, namespace: str, operation: str, message: str, original_type: str = "RuntimeError") -> None:
        self.namespace, self.operation, self.original_type = namespace, operation, original_type
        super().__init__(f"{namespace}.{operation}: {message}")


class SkillError(NamespaceError):
    def __init__(self, operation: str, message: str, original_type: str = "RuntimeError") -> None:
        super().__init__("skills", operation, message, original_type)


class ToolError(NamespaceError):
    def __init__(self, operation: str, message: str, original_type: str = "RuntimeError") -> None:
        super().__init__("tools", operation, message, original_type)


class ArtifactError(NamespaceError):
    def __init__(self, operation: str, message: str, original_type: str = "RuntimeError") -> None:
        super().__init__("artifacts", operation, message, original_type)


class DepsError(NamespaceError):
    def __init__(self, operation: str, message: str, original_type: str = "RuntimeError") -> None:
        super().__init__("deps", operation, message, original_type)


RPC_ERRORS = {
    kind.__name__: [parent.__name__ for parent in kind.__mro__[1:] if issubclass(parent, RPCError)]
    for kind in (RPCError, RPCTransportError, NamespaceError, SkillError, ToolError, ArtifactError, DepsError)
}
"""The classes that running code has without importing them, parents first, and what else each is."""


def rpc_record(call: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a failed call of the running code as an error of its namespace; `record` is the error as carrel has it.

    It is the error of carrel too: `except ToolError` and `except AttributeError` both catch an unknown tool."""
    namespace = call.partition(".")[0].replace("workflows", "skills")
    attributes = values.decode(record["attributes"]) if "attributes" in record else {}
    attributes |= {"namespace": namespace, "operation": operation_of(call), "original_type": record["type"]}
    return {
        "type": _NAMESPACE_ERRORS[namespace].__name__,
        "also": [record["type"], *record["also"]],
        "message": record["message"],
        "attributes": values.encode(attributes),
    }


def operation_of(call: str) -> str:
    """Return what py_code_mode names the operation of a call such as `tools.curl.get`."""
    namespace, _, word = call.partition(".")
    if namespace == "tools":
        if word.endswith(".list"):
            return "list_recipes"
        return word if word in ("list", "search", "describe") else "call"
    return _OPERATIONS.get(word, word)


_NAMESPACE_ERRORS = {"skills": SkillError, "tools": ToolError, "artifacts": ArtifactError, "deps": DepsError}
_OPERATIONS = {
    **dict.fromkeys(("begin", "ended"), "invoke"),
    **dict.fromkeys(("keep", "begin_upload", "upload", "end_upload", "drop_upload"), "save"),
    **dict.fromkeys(("fetch", "piece"), "load"),
}
"""The operations that the running code carries out by calls of other names."""
