"""The keyword options of the Session constructors, and what they refuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from carrel.embedding import EmbedderOption
from carrel.errors import ConfigurationError
from carrel.execution.config import Limits, Mount, SandboxMode, is_seconds
from carrel.session.recording import Recorded
from carrel.session.storage import FileStorage
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


def check_ttl(minutes: float | None) -> None:
    """Raise ConfigurationError for what is no time to live."""
    if minutes is not None and not (is_seconds(minutes) and minutes > 0):
        raise ConfigurationError(f"ttl_minutes is {minutes!r}; it is a number of minutes above 0, or None to stay open")
