"""One tree of errors; each is also the builtin people already catch."""


class CarrelError(Exception):
    """The root: everything carrel raises on purpose is below it."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a message is for reading.
        return str(self.args[0]) if self.args else ""


class ConfigurationError(CarrelError, ValueError):
    """A setting or a definition file is wrong; the message names the file, the field and what was expected."""


class MissingExtra(ConfigurationError, ImportError):
    """A feature needs packages that are not installed; the message has the command that installs them."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} packages that are not installed; pip install 'carrel-sessions[{extra}]'")


class StorageError(CarrelError):
    """Something kept could not be read or written."""


class StorageReadError(StorageError, OSError):
    """What is stored is there but cannot be read."""


class StorageWriteError(StorageError, OSError):
    """Nothing was written: the disk is full, read-only, or the connection is gone. What was there before is whole."""


class GuardLost(StorageWriteError):
    """Nothing was written: the object that guards this write was changed or deleted."""


LockLost = GuardLost
"""The earlier name of `GuardLost`, for one release."""


class StorageUnavailable(StorageError, ConnectionError):
    """The server that keeps the data does not answer."""


class KeyRefused(StorageError, ValueError):
    """A key that is no plain relative path; nothing was touched."""


class SessionError(CarrelError):
    """Something about one session."""


class SessionNotFound(SessionError, KeyError):
    """There is no such session (or it was deleted meanwhile)."""


class SessionExists(SessionError, FileExistsError):
    """A session of this id is there already; nothing was changed."""


class SessionBusy(SessionError, TimeoutError):
    """Somebody else holds the session and did not let go in time."""


class SessionClosed(SessionError):
    """The session can no longer be used: the base of every error after which that is so."""


class SessionIdRefused(SessionError, ValueError):
    """A session id that is no plain name; nothing was touched."""


class SessionTooNew(SessionError, ValueError):
    """Written by a newer version of the format; left untouched."""

    @property
    def version(self) -> int:
        """The format it was written in, 0 when that is not known."""
        return int(self.args[1]) if len(self.args) > 1 else 0


class MetadataRefused(SessionError, ValueError):
    """A field of a session's metadata that cannot be set so; nothing was written."""


class MessageRefused(SessionError, ValueError):
    """A message that cannot be kept as one line of JSON; nothing was written."""


class RewindRefused(SessionError, ValueError):
    """A rewind to a place that is not there; nothing was written."""


class CompactRefused(SessionError, ValueError):
    """Nothing to compact, an empty summary, or one of what was changed meanwhile; nothing was written."""


class ImportRefused(SessionError, ValueError):
    """A file that is no conversation of a known kind."""


class KeyMissing(StorageError, KeyError):
    """There is nothing under this key, or it was deleted while it was being written; nothing was kept."""


class CatalogueBusy(StorageError, TimeoutError):
    """Another process held the search index for too long; what is indexed can still be searched."""


class CatalogueLost(StorageError):
    """The search index was missing or damaged and was begun empty; it must be filled again."""


class FormatRefused(CarrelError, ValueError):
    """A provider nobody knows, or a payload that is not in its shape."""


class ExecutionError(CarrelError, RuntimeError):
    """Something about the place where code runs, not about the code."""


class SandboxUnavailable(ExecutionError):
    """A sandbox was required and this machine cannot give it; the message says what is missing and how to get it."""


class ForkRefused(ExecutionError):
    """A live fork is not possible now; the message says why, and nothing has changed."""


class ExecutorClosed(ExecutionError, SessionClosed):
    """The session or its executor was closed before the call, or while it ran."""


class WorkerLost(ExecutionError):
    """The session's Python ended while it was doing something for the host; the message says how."""


class PlaceLost(WorkerLost):
    """All processes of a session were ended, and what it had changed in its files is gone with them."""


class EnvironmentFailed(ExecutionError):
    """A Python environment could not be made; the message has what the installer said."""


class ToolNotFoundError(CarrelError, KeyError, AttributeError):
    """There is no such tool or recipe; the message names near ones. `hasattr(tools, "x")` goes by it."""


class ToolCallError(CarrelError, RuntimeError):
    """A call that was refused before anything ran, or that failed; the message says which and why."""

    exit_code: int | None = None
    """Of the program that was run, where one was."""
    stderr: str = ""
    """The end of what it wrote there."""
    status: int | None = None
    """Of the HTTP answer, where there was one."""


class ToolTimeoutError(ToolCallError, TimeoutError):
    """A call took longer than its tool may; what it started has been ended."""


class ToolRefusedError(ToolCallError, PermissionError):
    """Whoever was asked before the call said no, or nobody could be asked; nothing was run."""


class WorkflowNotFoundError(CarrelError, KeyError, ValueError):
    """There is no workflow of this name; the message names those that are near."""


class WorkflowValidationError(CarrelError, ValueError):
    """A name or a source that is no workflow; nothing was kept."""


class WorkflowSyntaxError(WorkflowValidationError, SyntaxError):
    """A source that Python cannot read; nothing was kept."""


class WorkflowExecutionError(CarrelError, RuntimeError):
    """A workflow could not be run; what its own code raises comes as it is."""


class WorkflowRecursionError(WorkflowExecutionError, RecursionError):
    """Workflows call each other without an end in sight."""


class ArtifactNotFoundError(CarrelError, KeyError, FileNotFoundError):
    """There is no artifact of this name."""


class ArtifactReadError(CarrelError, OSError):
    """An artifact is there but could not be read whole."""


class ArtifactWriteError(CarrelError, OSError):
    """An artifact could not be kept; what was there before is whole."""


class ArtifactNameRefused(ArtifactWriteError, ValueError):
    """A name that is no plain relative path; nothing was touched."""


class DependencyError(CarrelError, RuntimeError):
    """A package could not be installed or removed; the message has what the installer said, and nothing has changed."""


class RequirementRefused(DependencyError, ValueError):
    """A requirement that is no plain name with versions; the message says what it may be. Nothing was touched."""


class RuntimeDepsDisabledError(DependencyError, PermissionError):
    """Packages may not be added or removed while the session lives; what a person wrote down can still be synced."""


class DatasetInvalid(ConfigurationError):
    """A dataset's file cannot be read as one; the message names the file, the line and the field."""


class DatasetNotFound(CarrelError, KeyError):
    """There is no dataset of this name; the message names those there are, and the folder they are in."""

    @property
    def told(self) -> str:
        """The same for somebody elsewhere, without the folder."""
        return str(self.args[-1]) if self.args else ""


class SampleNotFound(CarrelError, KeyError):
    """The dataset has no such sample, or not in this version."""


class FilesRefused(CarrelError, ValueError):
    """A sample's files cannot be had or cannot be trusted: no archive, too large, a path or a link out of the tree."""


class SetupFailed(ExecutionError):
    """A sample's set-up commands did not succeed; the message has the command and the end of what it printed."""

    @property
    def output(self) -> str:
        """All that the commands printed."""
        return str(self.args[1]) if len(self.args) > 1 else ""


class PatchRefused(CarrelError, ValueError):
    """A patch does not apply to the sample's files; the message has what git said."""


class ReportUnreadable(CarrelError, ValueError):
    """What a test runner, linter or grader wrote is no report of that kind, or not a whole one."""


class ProgramMissing(ExecutionError, FileNotFoundError):
    """This machine lacks a program that is needed; the message names it."""


class ResultsRefused(ConfigurationError):
    """A results file cannot be gone on with: it is another run's, or no results; nothing in it was changed."""


class DatasetExists(CarrelError, FileExistsError):
    """A dataset of this name is there already; nothing was changed."""


class SessionNotReady(SessionError, RuntimeError):
    """The session is in no state for this: still being made, closed, or ended; the message says which."""


class TooManySessions(SessionError, RuntimeError):
    """No more sessions at one time; one has to end first."""


class JobNotFound(CarrelError, KeyError):
    """The session has no such verification, or, as InteractionNotFound, no such command."""


class InteractionNotFound(JobNotFound):
    """The session has no such interaction: no command was begun under this id."""


class ApiKeyNotFound(CarrelError, KeyError):
    """No user of the server has this name; the message names those there are."""


class ServerBusy(CarrelError, RuntimeError):
    """Another server works on the same data."""


class RemoteError(CarrelError, RuntimeError):
    """A server did not do what was asked of it; the message has its own words."""

    def __init__(self, message: str, status_code: int | None = None, detail: object = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        """Of HTTP; None when no answer came."""
        self.detail = detail
        """The server's own words, as it sent them."""
        self.retry_after: float | None = None
        """Seconds after which it may be asked again, when it says so."""


class KeyNotAccepted(RemoteError, PermissionError):
    """No key, or not one that the server knows."""


class NotFoundThere(RemoteError, KeyError):
    """The server has no such thing, or it belongs to somebody else."""


class NotNow(RemoteError):
    """What was asked cannot be done in the state that the session or the job is in."""


class RequestRefused(RemoteError, ValueError):
    """A field of the request is wrong; the message names it."""


class TooMany(RemoteError):
    """Too many sessions or requests; `retry_after` says when to ask again."""


class ServerFailed(RemoteError):
    """The server failed, or what it answered is no answer to what was asked."""


class ServerUnreachable(RemoteError, ConnectionError):
    """Nobody answers there, or the connection was lost and it is not safe to ask again."""


class WaitedTooLong(RemoteError, TimeoutError):
    """What was waited for is not finished yet; it goes on."""


class CommandNotRun(RemoteError):
    """A command could not be run at all: its place is gone."""
