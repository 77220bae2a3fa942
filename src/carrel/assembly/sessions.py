"""Settings in, a session of a concrete kind out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack

from carrel import session as places
from carrel import tasks
from carrel.assembly.library import read_library
from carrel.assembly.storages import FileStorage, MemoryStorage
from carrel.conversation.models.conversation import Conversation
from carrel.conversation.session_state import checked_id
from carrel.embedding import EmbedderOption, choose_embedder
from carrel.errors import ConfigurationError
from carrel.execution.config import (
    ContainerConfig,
    InProcessConfig,
    Limits,
    Mount,
    PlaceSettings,
    SandboxMode,
    SubprocessConfig,
    is_seconds,
)
from carrel.execution.container_executor import ContainerExecutor
from carrel.execution.executor import Executor, Place
from carrel.execution.in_process import InProcessExecutor
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.library.tools.approval import Approver
from carrel.session import Library, StorageBackend
from carrel.spans import spans
from carrel.text import did_you_mean


class Asked(TypedDict, total=False):
    """What every way to make a session takes beside what is its own."""

    approve: Approver | None
    """Asked before each call of a tool marked `approval: ask`."""
    session_id: str | None
    conversation: Conversation | None
    on_error: Literal["raise", "skip"]
    """`skip` leaves out a tool definition that is wrong and says so in the log."""
    embedder: EmbedderOption
    """What finds tools, workflows, artifacts and sessions by meaning; False switches that off."""


_EVERYWHERE = ("timeout", "extra_deps", "allow_runtime_deps", "sync_deps_on_start")


class Confined(Asked, total=False):
    """The same where code has a process of its own."""

    sandbox: SandboxMode | None
    network: bool
    workspace: Path | str | None
    workspace_mode: Literal["overlay", "rw", "ro"]
    mounts: Sequence[Mount]
    env: dict[str, str]
    limits: Limits
    preload: Sequence[str]
    wheelhouse: Path | str | None


class Contained(Asked, total=False):
    """The same where code has a container."""

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


class Session(places.Session):
    """A complete, isolated place for an agent to work; see `carrel.session.Session` for what it does."""

    def __init__(
        self,
        storage: StorageBackend,
        executor: Executor | None = None,
        sync_deps_on_start: bool = False,
        *,
        owns_storage: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        approve: Approver | None = None,
        session_id: str | None = None,
        conversation: Conversation | None = None,
        embedder: EmbedderOption = None,
    ) -> None:
        """The default executor is the sandboxed SubprocessExecutor. The storage stays open when the session closes,
        unless it `owns` it."""
        if not isinstance(storage, StorageBackend):
            raise TypeError(
                f"storage is {_told(storage)}; give a FileStorage, RedisStorage or MemoryStorage, "
                "or use Session.from_base(folder)"
            )
        if executor is None:
            executor = SubprocessExecutor(SubprocessConfig(base=getattr(storage, "base", None)))
        if not isinstance(executor, Place):  # one of other people's that cannot go back does as well
            raise TypeError(
                f"executor is {_told(executor)}; give a SubprocessExecutor(SubprocessConfig(...)), a "
                "ContainerExecutor(ContainerConfig(...)) or an InProcessExecutor(InProcessConfig(...)), or leave it out"
            )
        config = getattr(executor, "config", None)
        if isinstance(config, PlaceSettings):
            config.keep_apart({"the base": getattr(storage, "base", None)})
        if session_id is not None:
            checked_id(session_id)

        self._approve = approve
        self._on_error: Literal["raise", "skip"] = on_error
        choose_embedder(embedder)
        self._embedder = embedder if embedder is not None else getattr(storage, "embedder", None)

        async def library() -> Library:
            return await read_library(storage, executor, approve=approve, on_error=on_error, embedder=self._embedder)

        super().__init__(
            storage,
            executor,
            library,
            sync_deps_on_start=sync_deps_on_start,
            owns_storage=owns_storage,
            session_id=session_id,
            conversation=conversation,
            watchers=lambda name: [watcher for watcher in (spans(name),) if watcher is not None],
        )

    def _twin(
        self, storage: StorageBackend, executor: Executor, session_id: str, conversation: Conversation | None
    ) -> Self:
        return type(self)(
            storage,
            executor,
            session_id=session_id,
            conversation=conversation,
            approve=self._approve,
            on_error=self._on_error,
            embedder=self._embedder,
        )

    @classmethod
    def from_base(
        cls,
        base: Path | str,
        *,
        timeout: float | None = 30.0,
        extra_deps: Sequence[str] | None = None,
        allow_runtime_deps: bool = True,
        sync_deps_on_start: bool = False,
        **settings: Unpack[Confined],
    ) -> Self:
        """A session on a folder, sandboxed, with a virtualenv of its own; the folder is made when it is missing."""
        return cls.subprocess(
            base,
            timeout=timeout,
            extra_deps=extra_deps,
            allow_runtime_deps=allow_runtime_deps,
            sync_deps_on_start=sync_deps_on_start,
            **settings,
        )

    @classmethod
    def subprocess(
        cls,
        base_path: Path | str,
        *,
        timeout: float | None = 60.0,
        extra_deps: Sequence[str] | None = None,
        allow_runtime_deps: bool = True,
        sync_deps_on_start: bool = False,
        python_version: str | None = None,
        cache_venv: bool = True,
        **settings: Unpack[Confined],
    ) -> Self:
        """The same, with the Python and its virtualenv to be chosen."""
        storage, asked, rest = _placed(base_path, settings, Confined)
        config = SubprocessConfig(
            base=storage.base_path,
            default_timeout=timeout,
            deps=extra_deps or (),
            allow_runtime_deps=allow_runtime_deps,
            python_version=python_version,
            cache_venv=cache_venv,
            **rest,
        )
        return cls(storage, SubprocessExecutor(config), sync_deps_on_start, owns_storage=True, **asked)

    @classmethod
    def inprocess(
        cls,
        base_path: Path | str,
        *,
        timeout: float | None = 30.0,
        extra_deps: Sequence[str] | None = None,
        allow_runtime_deps: bool = True,
        sync_deps_on_start: bool = False,
        workspace: Path | str | None = None,
        wheelhouse: Path | str | None = None,
        **settings: Unpack[Asked],
    ) -> Self:
        """A session whose code runs in this very process: no isolation at all."""
        storage, asked, _ = _placed(base_path, settings, Asked)
        config = InProcessConfig(
            base=storage.base_path,
            default_timeout=timeout,
            deps=extra_deps or (),
            allow_runtime_deps=allow_runtime_deps,
            workspace=workspace,
            wheelhouse=wheelhouse,
        )
        return cls(storage, InProcessExecutor(config), sync_deps_on_start, owns_storage=True, **asked)

    @classmethod
    def container(
        cls,
        base_path: Path | str,
        *,
        image: str | None = None,
        timeout: float | None = 60.0,
        extra_deps: Sequence[str] | None = None,
        allow_runtime_deps: bool = True,
        sync_deps_on_start: bool = False,
        **settings: Unpack[Contained],
    ) -> Self:
        """A session whose code runs in a container of Docker's or Podman's; see `ContainerConfig` for the settings."""
        storage, asked, rest = _placed(base_path, settings, Contained)
        config = ContainerConfig(
            base=storage.base_path,
            image=image,
            default_timeout=timeout,
            deps=extra_deps or (),
            allow_runtime_deps=allow_runtime_deps,
            **rest,
        )
        return cls(storage, ContainerExecutor(config), sync_deps_on_start, owns_storage=True, **asked)

    @staticmethod
    def for_sample(
        dataset: str,
        sample_id: str,
        *,
        datasets: Path | str | None = None,
        ttl_minutes: float | None = 30,
        storage: StorageBackend | None = None,
        cache: Path | str | None = None,
        sandbox: SandboxMode | None = None,
        **settings: Unpack[Asked],
    ) -> TaskSession:
        """A session in the place of a sample: its repository as the workspace, its packages, its limits.

        `datasets` is the folder that holds the dataset (default: `$CARREL_HOME/datasets`, and the demo). After
        `ttl_minutes` the session closes by itself; None leaves it open."""
        sample = tasks.Datasets(datasets).get(dataset).sample(sample_id)
        executor = tasks.SampleExecutor(sample, Path(cache).expanduser() if cache else None, sandbox=sandbox)
        return TaskSession(storage or MemoryStorage(), executor, ttl_minutes=ttl_minutes, **settings)


class TaskSession(Session):
    """A session in the place of a sample, which can be asked for a verdict on what was done there."""

    def __init__(
        self,
        storage: StorageBackend,
        executor: tasks.SampleExecutor,
        *,
        ttl_minutes: float | None = 30,
        **settings: Unpack[Asked],
    ) -> None:
        if ttl_minutes is not None and not (is_seconds(ttl_minutes) and ttl_minutes > 0):
            raise ConfigurationError(
                f"ttl_minutes is {ttl_minutes!r}; it is a number of minutes above 0, or None to stay open"
            )
        super().__init__(storage, executor, **settings)
        self._place = executor
        self._ttl = ttl_minutes
        self._judging = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None

    def _twin(
        self, storage: StorageBackend, executor: Executor, session_id: str, conversation: Conversation | None
    ) -> Self:
        assert isinstance(executor, tasks.SampleExecutor)
        return type(self)(
            storage,
            executor,
            ttl_minutes=self._ttl,
            session_id=session_id,
            conversation=conversation,
            approve=self._approve,
            on_error=self._on_error,
            embedder=self._embedder,
        )

    @property
    def sample(self) -> tasks.Sample:
        return self._place.sample

    @property
    def receipt(self) -> tasks.Receipt | None:
        """What was taken out of the sample's files, so that no future is in them; None before the start."""
        return self._place.prepared.files.receipt if self._place.prepared is not None else None

    async def start(self) -> None:
        await super().start()
        if self._ending is None and self._ttl is not None:
            self._ending = asyncio.create_task(self._end_in(self._ttl * 60))

    async def verify(self, keep: Path | None = None) -> tasks.VerificationResult:
        """Judge the place as it is now, in a copy that its code never sees; the place itself is only read.

        Never raises for what was done in it: the outcome says so. `keep` is a folder for the whole output."""
        await self.start()
        async with self._judging:
            return await tasks.verify(
                self.sample, self._place, cache=self._place.cache, keep=keep, prepared=self._place.prepared
            )

    async def close(self) -> None:
        if self._ending is not None and self._ending is not asyncio.current_task():
            self._ending.cancel()
        await super().close()

    async def _end_in(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        # A verdict that is being found is waited for.
        async with self._judging:
            await self.close()


def _placed(
    base: Path | str, settings: Mapping[str, Any], known: type[Asked]
) -> tuple[FileStorage, dict[str, Any], dict[str, Any]]:
    """The storage of a folder, and the settings: those of the session, and those of its executor."""
    for name in settings.keys() - known.__annotations__.keys():
        # Left out in silence, `network=False` would be a wall that is not there.
        what = "whose code runs in this process" if known is Asked else "of this kind"
        raise TypeError(
            f"a session {what} has no setting {name}{did_you_mean(name, [*known.__annotations__, *_EVERYWHERE])}"
        )
    storage = FileStorage(base, embedder=settings.get("embedder"))
    try:
        storage.base_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigurationError(f"the base {storage.base_path} is no folder") from None
    asked = {name: settings[name] for name in Asked.__annotations__ if name in settings}
    return storage, asked, {name: value for name, value in settings.items() if name not in asked}


def _told(given: object) -> str:
    return "None" if given is None else f"{given!r} ({type(given).__name__})"
