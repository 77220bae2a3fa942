"""The keyword options of the Session constructors, and what they refuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from carrel.embedding import EmbedderOption
from carrel.errors import ConfigurationError
from carrel.execution.config import Limits, Mount, ProcessSettings, SandboxMode, is_seconds
from carrel.execution.executor import BasicExecutor
from carrel.session.recording import Recorded
from carrel.session.storage import FileStorage, StorageBackend
from carrel.text import did_you_mean

if TYPE_CHECKING:
    from carrel.conversation.models.conversation import Conversation
    from carrel.library.tools.approval import Approver


class SessionOptions(TypedDict, total=False):
    """Options that every constructor takes."""

    approve: Approver | None
    """Called before each call of a tool marked `approval: ask`."""
    session_id: str | None
    persist: bool | None
    """Keep files and variables for a later session with the same id; None: if there is a `session_id`."""
    conversation: Conversation | None
    on_error: Literal["raise", "skip"]
    """`skip` leaves out an invalid tool definition and logs a warning."""
    record: Collection[Recorded]
    """What is recorded after runs, commands and checkpoints: "variables", "files", both (default), or neither."""
    embedder: EmbedderOption
    """Finds tools, workflows, artifacts and sessions by meaning; False switches that off."""


class SandboxOptions(SessionOptions, total=False):
    """Options of sessions whose code runs in a process of its own; `SubprocessConfig` describes them."""

    sandbox: SandboxMode | None
    network: bool
    workspace: Path | str | None
    workspace_mode: Literal["overlay", "rw", "ro"]
    mounts: Sequence[Mount]
    env: dict[str, str]
    limits: Limits
    preload: Sequence[str]
    wheelhouse: Path | str | None


class ContainerOptions(SessionOptions, total=False):
    """Options of sessions whose code runs in a container; `ContainerConfig` describes them."""

    runtime: str | None
    network: bool | str
    user: str | None
    workspace: Path | str | None
    workspace_mode: Literal["overlay", "rw", "ro"]
    mounts: Sequence[Mount]
    env: dict[str, str]
    limits: Limits
    wheelhouse: Path | str | None
    docker_host: str | None
    remote_url: str | None
    auth_token: str | None


_NAMED = ("timeout", "extra_deps", "allow_runtime_deps", "sync_deps_on_start")
"""Parameters that the constructors have in addition to these options."""


def split_options(
    base: Path | str, options: Mapping[str, Any], known: type[SessionOptions]
) -> tuple[FileStorage, dict[str, Any], dict[str, Any]]:
    """Return the storage in the folder `base`, the options of the executor, and those of the session."""
    allowed = known.__annotations__
    for name in options.keys() - allowed.keys():
        # Ignoring an unknown option would be dangerous: with `netwrok=False` the session would have the network.
        kind = "whose code runs in this process" if known is SessionOptions else "of this kind"
        raise TypeError(f"a session {kind} has no setting {name}{did_you_mean(name, [*allowed, *_NAMED])}")
    storage = FileStorage(base, embedder=options.get("embedder"))
    try:
        storage.base_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigurationError(f"the base {storage.base_path} is not a folder") from None
    common = {name: value for name, value in options.items() if name in SessionOptions.__annotations__}
    return storage, {name: value for name, value in options.items() if name not in common}, common


def check_storage(storage: object) -> None:
    """Raise TypeError for what is no storage."""
    if not isinstance(storage, StorageBackend):
        raise TypeError(
            f"storage is {_describe_value(storage)}; give a FileStorage, RedisStorage, PostgresStorage or "
            "MemoryStorage, or use Session.from_base(folder)"
        )


def check_executor(executor: object, base: Path | None) -> None:
    """Raise TypeError for what is no executor; refuse one whose code could write into the base."""
    if not isinstance(executor, BasicExecutor):  # An executor of the user's own that cannot rewind is enough.
        raise TypeError(
            f"executor is {_describe_value(executor)}; give a SubprocessExecutor(SubprocessConfig(...)), a "
            "ContainerExecutor(ContainerConfig(...)) or an InProcessExecutor(InProcessConfig(...)), or leave it out"
        )
    config = getattr(executor, "config", None)
    if isinstance(config, ProcessSettings):
        config.keep_apart({"the base": base})


def check_id(session_id: str) -> str:
    """Return the id of a session; SessionIdRefused if it is not a plain name."""
    from carrel.conversation.session_state import checked_id  # noqa: PLC0415 -- loads pydantic

    return checked_id(session_id)


def check_ttl(minutes: float | None) -> None:
    """Raise ConfigurationError for what is no time to live."""
    if minutes is not None and not (is_seconds(minutes) and minutes > 0):
        raise ConfigurationError(f"ttl_minutes is {minutes!r}; it is a number of minutes above 0, or None to stay open")


def _describe_value(value: object) -> str:
    return "None" if value is None else f"{value!r} ({type(value).__name__})"
