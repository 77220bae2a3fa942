"""The keyword options of the Session constructors, and what they refuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from carrel.embedding import EmbedderOption
from carrel.errors import ConfigurationError
from carrel.execution.config import (
    ContainerConfig,
    InProcessConfig,
    Limits,
    Mount,
    ProcessSettings,
    SandboxMode,
    SubprocessConfig,
    is_seconds,
)
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
    except OSError as problem:
        what = f"the base folder {storage.base_path} cannot be created or read: {problem.strerror}"
        raise type(problem)(problem.errno, f"{what}; choose another folder") from None
    common = {name: value for name, value in options.items() if name in SessionOptions.__annotations__}
    return storage, {name: value for name, value in options.items() if name not in common}, common


def check_ttl(minutes: float | None) -> None:
    """Raise ConfigurationError for what is no time to live."""
    if minutes is not None and not (is_seconds(minutes) and minutes > 0):
        raise ConfigurationError(f"ttl_minutes is {minutes!r}; it is a number of minutes above 0, or None to stay open")


# --- settings, for Session.resume -------------------------------------------------------------------------------------

_KEPT_SETTINGS = {
    "network": "network",
    "sandbox": "sandbox",
    "workspace": "workspace",
    "workspace_mode": "workspace_mode",
    "wheelhouse": "wheelhouse",
    "timeout": "default_timeout",
    "allow_runtime_deps": "allow_runtime_deps",
    "python_version": "python_version",
    "cache_venv": "cache_venv",
    "image": "image",
    "runtime": "runtime",
    "user": "user",
    "docker_host": "docker_host",
    "remote_url": "remote_url",
}
"""Names of a constructor's settings, and of the executor's; environment variables, which hold secrets, are not kept."""


def settings_of(executor: object) -> dict[str, Any]:
    """The settings of an executor that a later session needs, as JSON."""
    config = getattr(executor, "config", None)
    kinds = {SubprocessConfig: "subprocess", InProcessConfig: "inprocess", ContainerConfig: "container"}
    if not isinstance(config, SubprocessConfig | InProcessConfig | ContainerConfig):
        return {}
    found: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value
        for name, own in _KEPT_SETTINGS.items()
        if (value := getattr(config, own, None)) is not None or name == "timeout"
    }
    found["extra_deps"] = list(config.deps)
    if isinstance(config, ProcessSettings):
        found["limits"] = asdict(config.limits)
        found["mounts"] = [{"source": str(each.source), "at": each.at, "mode": each.mode} for each in config.mounts]
    return {"kind": kinds[type(config)], **found}


def options_of(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The constructor and its options, from what `settings_of` has returned."""
    options = {name: value for name, value in settings.items() if name in _KEPT_SETTINGS or name == "extra_deps"}
    try:
        if "limits" in settings:
            options["limits"] = Limits(**settings["limits"])
        if "mounts" in settings:
            options["mounts"] = [Mount(**mount) for mount in settings["mounts"]]
    except TypeError:
        raise ConfigurationError(
            "the stored settings of the session are damaged; open it with `session_id=` and its settings"
        ) from None
    return str(settings.get("kind", "subprocess")), options
