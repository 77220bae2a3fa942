"""All exceptions of carrel, in one tree; each is also the builtin exception that callers catch."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


class CarrelError(Exception):
    """The base of all exceptions that carrel raises on purpose."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a message is for reading.
        return str(self.args[0]) if self.args else ""


class ConfigurationError(CarrelError, ValueError):
    """A setting or a definition file is wrong; the message names the file, the field and what was expected."""


class MissingExtra(ConfigurationError, ImportError):
    """A feature needs packages that are not installed; the message has the command that installs them."""

    def __init__(self, feature: str, extra: str = "") -> None:
        """`feature` ends with a verb (`the server needs`); without an extra it is the whole message."""
        missing = f" packages that are not installed; pip install 'carrel-sessions[{extra}]'" if extra else ""
        super().__init__(f"{feature}{missing}")


class StorageError(CarrelError):
    """Stored data could not be read or written."""


class StorageReadError(StorageError, OSError):
    """Stored data exists but cannot be read."""


class StorageWriteError(StorageError, OSError):
    """A write failed: the disk is full or read-only, or the connection is lost. The previous data is unchanged."""


class GuardLost(StorageWriteError):
    """A write was refused because the object that guards it was changed or deleted."""


class LeaseHeld(StorageError, TimeoutError):
    """Another living process holds the lease of this name."""


LockLost = GuardLost
"""The earlier name of `GuardLost`, for one release."""


class StorageUnavailable(StorageError, ConnectionError):
    """The server with the data does not answer."""


class KeyRefused(StorageError, ValueError):
    """A key is not a plain relative path; nothing was changed."""


class SessionError(CarrelError):
    """The base of errors about one session."""


class SessionNotFound(SessionError, KeyError):
    """The session does not exist, or was deleted meanwhile."""


class PointNotFound(SessionError, KeyError):
    """The session has no such entry, checkpoint or label, or nothing was recorded there."""


class SessionExists(SessionError, FileExistsError):
    """A session with this id exists; nothing was changed."""


@dataclass(frozen=True, slots=True)
class SessionOwner:
    """The process that has a session open."""

    host: str
    pid: int
    since: datetime | None = None

    def __str__(self) -> str:
        since = f" since {self.since:%Y-%m-%d %H:%M:%S} UTC" if self.since is not None else ""
        return f"the process {self.pid} on {self.host}{since}"


class SessionBusy(SessionError, TimeoutError):
    """Another process uses the session and did not release it in time."""

    session_id: str = ""
    owner: SessionOwner | None = None
    """Who has it open, where that is known."""


class SessionClosed(SessionError):
    """The session can no longer be used; the base of all errors with this effect."""


class SessionIdRefused(SessionError, ValueError):
    """A session id is not a plain name; nothing was changed."""


class SessionTooNew(SessionError, ValueError):
    """The session was written in a newer format version; nothing was changed."""

    @property
    def version(self) -> int:
        """The version it was written in, 0 if that is not known."""
        return int(self.args[1]) if len(self.args) > 1 else 0


class MetadataRefused(SessionError, ValueError):
    """A field of a session's metadata cannot have this value; nothing was written."""


class MessageRefused(SessionError, ValueError):
    """A message cannot be stored as one line of JSON; nothing was written."""


class RewindRefused(SessionError, ValueError):
    """The target of a rewind does not exist; nothing was written."""


class CompactRefused(SessionError, ValueError):
    """Nothing to compact, an empty summary, or a conversation that was changed meanwhile; nothing was written."""


class ImportRefused(SessionError, ValueError):
    """A file is not a conversation of a known kind."""


class KeyMissing(StorageError, KeyError):
    """The key does not exist, or was deleted during the write; nothing was stored."""


class CatalogueBusy(StorageError, TimeoutError):
    """Another process locked the search index for too long; its present content can still be searched."""


class CatalogueLost(StorageError):
    """The search index was missing or damaged and was created empty; it must be filled again."""


class FormatRefused(CarrelError, ValueError):
    """The provider is unknown, or the payload is not in its format."""


class ExecutionError(CarrelError, RuntimeError):
    """An error of the environment in which code runs, not of the code."""


class SandboxUnavailable(ExecutionError):
    """A sandbox is required and not possible on this machine; the message says what is missing and how to get it."""


class NoPython(ExecutionError):
    """The image of a container has no Python that can run code; commands and files work. The message says why."""


class ForkRefused(ExecutionError):
    """A live fork is not possible now; the message says why. Nothing has changed."""


class ExecutorClosed(ExecutionError, SessionClosed):
    """The session or its executor was closed before or during the call."""


class WorkerLost(ExecutionError):
    """The session's Python process ended during a request of the host; the message says how."""


class StateNotSaved(ExecutionError):
    """The variables were not saved; the state that was saved before is as it was. The message says why."""


class WorkspaceLost(WorkerLost):
    """All processes of a session were ended, and the changes in its files are lost."""


PlaceLost = WorkspaceLost
"""The name of `WorkspaceLost` in 0.1, for one more release."""


class EnvironmentFailed(ExecutionError):
    """A Python environment could not be created; the message has the output of the installer."""


class ToolNotFoundError(CarrelError, KeyError, AttributeError):
    """There is no such tool or recipe; the message names similar ones. `hasattr(tools, "x")` is False then."""


class ToolCallError(CarrelError, RuntimeError):
    """A call was refused before anything ran, or failed; the message says which and why."""

    exit_code: int | None = None
    """The exit code of the program, if one was run."""
    stderr: str = ""
    """The end of its error output."""
    status: int | None = None
    """The status of the HTTP response, if there was one."""


class ToolTimeoutError(ToolCallError, TimeoutError):
    """A call exceeded the time limit of its tool; its processes have been ended."""


class ToolRefusedError(ToolCallError, PermissionError):
    """The approval of a call was denied, or could not be requested; nothing was run."""


class WorkflowNotFoundError(CarrelError, KeyError, ValueError, AttributeError):
    """There is no workflow of this name; the message names similar ones."""


class WorkflowValidationError(CarrelError, ValueError):
    """A name or a source is not valid for a workflow; nothing was stored."""


class WorkflowSyntaxError(WorkflowValidationError, SyntaxError):
    """The source of a workflow has a syntax error; nothing was stored."""


class WorkflowExecutionError(CarrelError, RuntimeError):
    """A workflow could not be run. Exceptions of its own code are raised unchanged."""


class WorkflowRecursionError(WorkflowExecutionError, RecursionError):
    """Workflows call each other too deeply."""


class ArtifactNotFoundError(CarrelError, KeyError, FileNotFoundError):
    """There is no artifact of this name."""


class ArtifactReadError(CarrelError, OSError):
    """An artifact exists but could not be read completely."""


class ArtifactWriteError(CarrelError, OSError):
    """An artifact could not be stored; the previous version is unchanged."""


class ArtifactNameRefused(ArtifactWriteError, ValueError):
    """The name of an artifact is not a plain relative path; nothing was changed."""


class DependencyError(CarrelError, RuntimeError):
    """A package could not be installed or removed; the message has the output of the installer. Nothing has changed."""


class RequirementRefused(DependencyError, ValueError):
    """A requirement is not a plain name with versions; the message says what is allowed. Nothing was changed."""


class RuntimeDepsDisabledError(DependencyError, PermissionError):
    """Packages may not be added or removed in a running session; declared ones can still be synced."""


class DatasetInvalid(ConfigurationError):
    """The file of a dataset is invalid; the message names the file, the line and the field."""


class NoSamplesMade(DatasetInvalid):
    """An import made no sample; `left_out` has what it left out, each with the reason."""

    def __init__(self, message: str, left_out: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.left_out = tuple(left_out)


class DatasetNotFound(CarrelError, KeyError):
    """There is no dataset of this name; the message names the existing ones and their folder."""

    @property
    def public_message(self) -> str:
        """The message without the folder, for clients of a server."""
        return str(self.args[-1]) if self.args else ""


class SampleNotFound(CarrelError, KeyError):
    """The dataset has no such sample in this version."""


class FilesRefused(CarrelError, ValueError):
    """The files of a sample are not available or not safe: no archive, too large, a path or link out of the folder."""


class SetupFailed(ExecutionError):
    """A set-up command of a sample failed; the message has the command and the end of its output."""

    @property
    def output(self) -> str:
        """The output of all commands."""
        return str(self.args[1]) if len(self.args) > 1 else ""


class PatchRefused(CarrelError, ValueError):
    """A patch does not apply to the files of a sample; the message has the output of git."""


class ReportUnreadable(CarrelError, ValueError):
    """The output of a test runner, linter or grader is not a complete report of that kind."""


class ProgramMissing(ExecutionError, FileNotFoundError):
    """A required program is missing on this machine; the message names it."""


class ResultsRefused(ConfigurationError):
    """A run cannot continue in this folder, because it has results of another run or none. Nothing was changed."""


class DatasetExists(CarrelError, FileExistsError):
    """A dataset of this name exists; nothing was changed."""


class SessionNotReady(SessionError, RuntimeError):
    """The session is not in a state for this: it is being created, closed, or ended; the message says which."""


class TooManySessions(SessionError, RuntimeError):
    """The limit of concurrent sessions is reached; one has to end first."""


class JobNotFound(CarrelError, KeyError):
    """The session has no such verification or, as InteractionNotFound, no such command."""


class InteractionNotFound(JobNotFound):
    """The session has no such interaction: no command was started with this id."""


class ApprovalNotFound(CarrelError, KeyError):
    """The user has no approval with this id."""


class ApprovalAnswered(CarrelError, RuntimeError):
    """The approval was answered before, or the call does not wait any more."""


class ApiKeyNotFound(CarrelError, KeyError):
    """No user of the server has this name; the message names the existing ones."""


class ServerBusy(CarrelError, RuntimeError):
    """Another server uses the same data."""


class RemoteError(CarrelError, RuntimeError):
    """A server did not carry out a request; the message has its answer."""

    def __init__(self, message: str, status_code: int | None = None, detail: object = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        """The HTTP status; None without an answer."""
        self.detail = detail
        """The `detail` of the server's answer."""
        self.retry_after: float | None = None
        """Seconds after which the request may be repeated, if the server says so."""
        self.request_id: str | None = None
        """The id of the request, which the server's logs and traces have too."""


class KeyNotAccepted(RemoteError, PermissionError):
    """The API key is missing or not known to the server."""


class NotFoundThere(RemoteError, KeyError):
    """The server does not have it, or it belongs to another user."""


class NotNow(RemoteError):
    """The request is not possible in the present state of the session or job."""


class RequestRefused(RemoteError, ValueError):
    """A field of the request is invalid; the message names it."""


class TooMany(RemoteError):
    """There are too many sessions or requests; `retry_after` says when to try again."""


class ServerFailed(RemoteError):
    """The server failed, or its answer is invalid."""


class ServerUnreachable(RemoteError, ConnectionError):
    """The server does not answer, or the connection was lost and repeating the request is not safe."""


class NodeUnreachable(ServerFailed, ConnectionError):
    """The node of a session cannot be reached or takes nothing new at the moment. Nothing was done: repeat it."""


class NodeUncertain(ServerFailed, ConnectionError):
    """A node broke off during a request, which may have been done: repeat it with the same Idempotency-Key."""


class NodeLost(RemoteError, SessionClosed):
    """The node of the session is lost, with the session's processes. A durable session can be resumed elsewhere."""


class NodeNotFound(CarrelError, KeyError):
    """The cluster has no node of this name; the message names the existing ones."""


class SessionElsewhere(SessionError, RuntimeError):
    """Another node has the session; the message names it."""


class WaitedTooLong(RemoteError, TimeoutError):
    """The time limit of a wait has passed; the job continues."""


class CommandNotRun(RemoteError):
    """A command could not be run, because its session is lost."""
