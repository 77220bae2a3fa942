"""Settings of the executors."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from carrel.errors import ConfigurationError
from carrel.execution.executor import BasicExecutor
from carrel.home import resolve_carrel_home
from carrel.processes import LIMIT

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size_in_bytes(text: str) -> int:
    """`512MiB`, `2GiB`, `2g`, or a plain number of bytes."""
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if found is None or int(found[1]) == 0:
        raise ConfigurationError(f"{text!r} is not a size: write a whole number and a unit, such as 512MiB or 2GiB")
    return int(found[1]) * _UNITS[found[2]]


def refuse_writable(writable: Iterable[tuple[str, Path]], kept: Mapping[str, Path | None]) -> None:
    """Raise ConfigurationError if the session's code could write files that the host reads and runs.

    `writable` are the folders that the code can write, each with a description; `kept` are those it must not."""
    for what, folder in writable:
        for name, place in kept.items():
            if place is not None and (within(place, folder) or within(folder, place)):
                where = "the same folder" if within(place, folder) and within(folder, place) else "one inside the other"
                raise ConfigurationError(
                    f"{what} {folder} can be written by the session's code, and {name} {place} is read and run by the "
                    f"host: they are {where}. Keep {name} elsewhere, or use workspace_mode='overlay' (or 'ro'), which "
                    "leaves the folder as it is"
                )


def within(place: Path, folder: Path) -> bool:
    """Whether a path is the folder or in it: by its name, or after following links."""
    real = os.path.realpath(folder)
    # By name too: code could change the target of a link that lies in the folder.
    return any(_below(found, real) for found in (os.path.realpath(place), *_names(place)))


def _names(place: Path) -> list[str]:
    """The location of each link on the way to a path."""
    parts = Path(os.path.abspath(place)).parts
    ways = [os.path.join(*parts[:count]) for count in range(1, len(parts) + 1)]
    return [
        os.path.join(os.path.realpath(os.path.dirname(way)), os.path.basename(way))
        for way in ways
        if os.path.islink(way)
    ]


def _below(path: str, folder: str) -> bool:
    return os.path.commonpath((path, folder)) == folder


SandboxMode = Literal["auto", "required", "off"]
MODES: tuple[SandboxMode, ...] = ("auto", "required", "off")
MIB = 1024 * 1024
T = TypeVar("T", bound="ExecutorSettings")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one session; None means that carrel sets no limit."""

    memory: int | str | None = None
    """Bytes, or `512MiB`; all processes of the session together where a cgroup can be made, else each of them."""
    cpus: float | None = None
    """Processors' worth of time; needs a cgroup."""
    processes: int | None = 512
    """Processes and threads at one time."""
    open_files: int | None = 4096
    """Descriptors of one process."""
    disk: int | str | None = 1024 * MIB
    """Bytes that the session writes, or a text such as `2GiB`."""
    files: int | None = 200_000
    """Files, folders and links that the session makes."""

    def __post_init__(self) -> None:
        for name in ("memory", "disk"):
            given = getattr(self, name)
            if isinstance(given, str):
                try:
                    _set(self, name, size_in_bytes(given))
                except ConfigurationError as problem:
                    raise ConfigurationError(f"limits.{name}: {problem}") from None
        for name, value in vars(self).items():
            wanted = (int, float) if name == "cpus" else (int,)
            if value is not None and (
                not isinstance(value, wanted) or isinstance(value, bool) or not 0 < value < math.inf
            ):
                unit = ", in bytes, or a text such as 512MiB" if name in ("memory", "disk") else ""
                raise ConfigurationError(
                    f"limits.{name} is {value!r}; it is a number above 0{unit}, or None for no limit"
                )


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of the host that the session sees."""

    source: Path | str
    at: str
    mode: Literal["ro", "rw"] = "ro"

    def __post_init__(self) -> None:
        _set(self, "source", path_of(self.source))


@dataclass(frozen=True, kw_only=True)
class ExecutorSettings:
    """Settings of every kind of executor. Paths may be texts; `~` is expanded."""

    default_timeout: float | None = None
    """Seconds a run may take when it names none; None is no limit."""
    tools_path: Path | str | None = None
    """A folder with tool definitions, for the session of this executor."""
    deps: Sequence[str] = ()
    """Requirements that are installed before the first run."""
    deps_file: Path | str | None = None
    """A requirements.txt whose requirements are installed too; it may be created later."""
    allow_runtime_deps: bool = True
    """Whether packages may be added and removed during the session."""
    wheelhouse: Path | str | None = None
    """A folder of wheels to install from, instead of the package index: for machines without a network."""
    base: Path | str | None = None
    """The folder that the session belongs to, which holds its packages; other sessions do not use them."""
    workspace: Path | str | None = None
    """The folder that code and commands work in; None is an empty one, deleted with the session."""
    output_limit: int = LIMIT
    """Bytes kept of each stream of a run or a command."""
    grace: float = 1.0
    """Seconds between the interrupt of a run that reached its time limit and the kill."""

    def __post_init__(self) -> None:
        if isinstance(self.deps, str):
            raise ConfigurationError(f"deps is {self.deps!r}; it is a list of requirements, as in [{self.deps!r}]")
        if self.default_timeout is not None and not is_seconds(self.default_timeout):
            raise ConfigurationError(
                f"the timeout is {self.default_timeout!r}; it is a number of seconds from 0 on, or None for no limit"
            )
        if not is_seconds(self.grace):
            raise ConfigurationError(f"grace is {self.grace!r}; it is a number of seconds from 0 on")
        _set(self, "deps", tuple(self.deps))
        for name in ("tools_path", "deps_file", "wheelhouse", "base", "workspace"):
            _set(self, name, path_of(getattr(self, name)))
        for name in ("workspace", "wheelhouse"):
            folder = path_of(getattr(self, name))
            if folder is not None and not folder.is_dir():
                raise ConfigurationError(f"the {name} {folder} is not a folder")


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(ExecutorSettings):
    """Settings of the executors whose code has a process and files of its own."""

    default_timeout: float | None = 60.0
    """Seconds a run may take when it names none; None is no limit."""
    workspace_mode: Literal["overlay", "rw", "ro"] = "overlay"
    """`overlay` leaves the given folder unchanged and keeps the session's changes apart."""
    workspace_at: str = "/workspace"
    """The path of the workspace in the session, where it has a file system of its own."""
    mounts: Sequence[Mount] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the session; those of the host are not passed on."""
    limits: Limits = field(default_factory=Limits)
    startup_timeout: float = 60.0
    """Seconds until its Python must be ready; creating the virtualenv and pulling an image do not count."""
    hostname: str = "carrel"
    snapshots: bool = True
    """Whether a snapshot of the Python is kept between runs, to continue from after a crash."""
    max_snapshot_bytes: int = 2048 * MIB
    """Bytes of memory of the session's Python above which no snapshot is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "mounts", tuple(self.mounts))
        if not is_seconds(self.startup_timeout):
            raise ConfigurationError(
                f"startup_timeout is {self.startup_timeout!r}; it is a number of seconds from 0 on"
            )
        if self.workspace_mode not in ("overlay", "rw", "ro"):
            raise ConfigurationError(f"workspace_mode is {self.workspace_mode!r}; it can be overlay, rw or ro")
        for what, path in (
            ("workspace_at", self.workspace_at),
            *(("a mount's `at`", mount.at) for mount in self.mounts),
        ):
            if not _is_inside(path):
                raise ConfigurationError(
                    f"{what} is {path!r}; it must be an absolute path without `..`, and not /, such as /data"
                )
        for name, value in self.env.items():
            if not _is_variable(name, value):
                raise ConfigurationError(
                    f"env has the invalid variable {name!r}: a name is a str without =, a value is a str, "
                    "and neither has a NUL"
                )
        if not isinstance(self.limits, Limits):
            raise ConfigurationError(
                f"limits is {self.limits!r}; pass an object such as Limits(memory=512 * 1024 * 1024)"
            )
        self.keep_apart(
            {
                "the base": path_of(self.base),
                "tools_path": path_of(self.tools_path),
                "the wheelhouse": path_of(self.wheelhouse),
            }
        )

    def keep_apart(self, kept: Mapping[str, Path | None]) -> None:
        """Raise ConfigurationError if the session's code could write one of these folders of the host."""
        writable = [("the mount", mount.source) for mount in self.mounts if mount.mode == "rw"]
        if self.workspace is not None and self.workspace_mode == "rw":
            writable.append(("the workspace", self.workspace))
        refuse_writable([(what, Path(folder)) for what, folder in writable], kept)


@dataclass(frozen=True, kw_only=True)
class SubprocessConfig(ProcessSettings):
    """Settings of sessions whose code runs in a subprocess.

    Without `base`, `venv_path`, `deps`, `deps_file` and `python_version` the host's own Python is used, and nothing
    is created."""

    sandbox: SandboxMode | None = None
    """`required` fails if a part is missing, `auto` uses what this machine offers; None reads CARREL_SANDBOX."""
    network: bool = True
    """Whether the session has the host's network; False leaves loopback only, if the sandbox can."""
    python_version: str | None = None
    """The Python of its virtualenv, such as `3.12`; None is the version that runs this program."""
    venv_path: Path | str | None = None
    """The folder of its virtualenv, created if missing; None: one below `base` for each version of Python."""
    home: Path | str | None = None
    """A folder whose files the home folder starts with, as an overlay; None is an empty home."""
    shared_in: Path | str | None = None
    """The folder of virtualenvs that sessions without a base share; None is carrel's own folder."""
    cache_venv: bool = True
    """False creates a virtualenv that is deleted when the session closes."""
    state_folder: Path | str | None = None
    """A folder that keeps the changes of the workspace, and the variables when they are saved, for a later session that
    continues this one; None keeps nothing. One session at a time can use it."""
    allow_builds: bool = False
    """Whether packages that code adds may be built from source: a build runs on the host, outside of the sandbox."""
    preload: Sequence[str] = ()
    """Modules that are imported once for all sessions, so that importing them takes no time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "venv_path", path_of(self.venv_path))
        _set(self, "home", path_of(self.home))
        _set(self, "shared_in", path_of(self.shared_in))
        _set(self, "state_folder", path_of(self.state_folder))
        _set(self, "preload", tuple(self.preload))
        if self.sandbox is not None and self.sandbox not in MODES:
            raise ConfigurationError(f"sandbox is {self.sandbox!r}; it can be {', '.join(MODES)}")
        shared = path_of(self.shared_in)
        if shared is None and self.base is None and self.venv_path is None and (self.deps or self.python_version):
            shared = resolve_carrel_home()
        self.keep_apart(
            {
                "venv_path": path_of(self.venv_path),
                "state_folder": path_of(self.state_folder),
                "the environments of shared_in": shared and shared / "environments",
            }
        )


@dataclass(frozen=True, kw_only=True)
class ContainerConfig(ProcessSettings):
    """Settings of sessions in containers.

    An `overlay` workspace is copied into it; `rw`, `ro` and `mounts` are folders of the machine that the engine is on.
    """

    image: str | None = None
    """The image; code needs Python 3.9 or newer in it, as `python3`. None is `python:3.x-slim` of this version."""
    runtime: str | None = None
    """A runtime of the engine, such as `runsc` (gVisor); None is its default."""
    network: bool | str = False
    """False: no network; True: the engine's default network; a str: the engine's network of that name."""
    writable: tuple[str, ...] = ()
    """Further folders that code may write to, empty at the start; the rest of the image is read-only."""
    user: str | None = None
    """User and group of the code; None is `1000:1000`, or the owner of a workspace that is `rw` or `ro`."""
    docker_host: str | None = None
    """The engine's address, such as `unix:///run/podman/podman.sock`; None reads DOCKER_HOST, else Docker's own."""
    remote_url: str | None = None
    """The address of an engine that is reached over HTTP, such as `https://engine.example:2376`."""
    auth_token: str | None = None
    """The bearer token for a proxy in front of that engine."""
    startup_timeout: float = 120.0
    """Seconds until its Python must be ready; pulling the image does not count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.docker_host is not None and self.remote_url is not None:
            raise ConfigurationError(
                "docker_host and remote_url are both set; they name the same engine, so set only one"
            )
        if self.auth_token is not None and self.remote_url is None:
            raise ConfigurationError("auth_token is set without remote_url, the engine that it is for")
        if self.user is not None and re.fullmatch(r"\d+(:\d+)?", self.user) is None:
            raise ConfigurationError(f"user is {self.user!r}; it must be one number or two, such as 1000:1000")


@dataclass(frozen=True, kw_only=True)
class InProcessConfig(ExecutorSettings):
    """Settings of sessions whose code runs in this process."""

    default_timeout: float | None = 30.0
    """Seconds a run may take when it names none; None is no limit."""


def settings_of(executor: object, wanted: type[T], given: T | None) -> T:
    """The settings of an executor, or its defaults; TypeError for those of another kind."""
    if given is None:
        return wanted()
    if isinstance(given, wanted):
        return given
    name, text = type(executor).__name__, f"and this is {given!r:.100}"
    if isinstance(given, dict):
        fields = ", ".join(f"{field}=…" for field in given)
        text = f"as in {name}({wanted.__name__}({fields})), and this is a dict"
    elif isinstance(given, ExecutorSettings):
        text = f"and this is a {type(given).__name__}"
    raise TypeError(f"{name} takes a {wanted.__name__}, {text}")


def check_executor(executor: object, base: Path | None) -> None:
    """Raise TypeError for what is no executor; refuse one whose code could write into the base."""
    if not isinstance(executor, BasicExecutor):  # An executor of the user's own that cannot rewind is enough.
        raise TypeError(
            f"executor is {describe_value(executor)}; give a SubprocessExecutor(SubprocessConfig(...)), a "
            "ContainerExecutor(ContainerConfig(...)) or an InProcessExecutor(InProcessConfig(...)), or leave it out"
        )
    config = getattr(executor, "config", None)
    if isinstance(config, ProcessSettings):
        config.keep_apart({"the base": base})


def describe_value(value: object) -> str:
    return "None" if value is None else f"{value!r} ({type(value).__name__})"


def is_seconds(given: object) -> bool:
    """Whether it is a duration: a number of 0 or more, also infinity, but not NaN."""
    if not isinstance(given, int | float) or isinstance(given, bool):
        return False
    try:
        return not math.isnan(given) and given >= 0
    except OverflowError:  # an integer beyond all floats
        return False


def path_of(given: Path | str | None) -> Path | None:
    """A path as a Path, with `~` expanded."""
    return None if given is None else Path(given).expanduser()


def _set(config: object, name: str, value: Any) -> None:
    """Set a field in `__post_init__` of a frozen dataclass."""
    object.__setattr__(config, name, value)


def sandbox_mode(wanted: SandboxMode | None) -> SandboxMode:
    """The mode of the settings, else of CARREL_SANDBOX, else `auto`; the variable never weakens the settings."""
    if wanted is not None:
        return wanted
    named = os.environ.get("CARREL_SANDBOX", "auto")
    for mode in MODES:
        if mode == named:
            return mode
    raise ConfigurationError(f"CARREL_SANDBOX is {named!r}; it can be {', '.join(MODES)}")


def _is_inside(path: object) -> bool:
    return isinstance(path, str) and re.fullmatch(r"/+[^/\0][^\0]*", path) is not None and ".." not in path.split("/")


def _is_variable(name: object, value: object) -> bool:
    """Whether it is a valid environment variable."""
    both = isinstance(name, str) and isinstance(value, str) and "\0" not in name + value
    return both and name != "" and "=" not in str(name)
