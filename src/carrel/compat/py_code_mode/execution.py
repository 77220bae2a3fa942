"""Executors as py_code_mode has them: each runs the code of one session of carrel."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import carrel.session.session
from carrel import errors
from carrel.compat import INTERNAL, refuse_missing
from carrel.compat.py_code_mode.deps import RuntimeDepsDisabledError, checked_package
from carrel.compat.py_code_mode.errors import RPC_ERRORS, rpc_record
from carrel.compat.py_code_mode.skills import inner_dict
from carrel.compat.py_code_mode.tools import callables_of, tool_dict
from carrel.compat.py_code_mode.types import ExecutionResult
from carrel.execution import config
from carrel.execution.executor import ExecutionResult as CarrelResult
from carrel.execution.executor import Handler
from carrel.execution.host_calls import RecordedError, error_record
from carrel.execution.worker_executor import WorkerExecutor
from carrel.session.call_handlers import CallHandlers
from carrel.session.storage import MemoryStorage

SUBPROCESS_AVAILABLE = True
CONTAINER_AVAILABLE = importlib.util.find_spec("docker") is not None


class Capability:
    """What an executor can do, by name."""

    TIMEOUT = "timeout"
    PROCESS_ISOLATION = "process_isolation"
    NETWORK_ISOLATION = "network_isolation"
    NETWORK_FILTERING = "network_filtering"
    FILESYSTEM_ISOLATION = "filesystem_isolation"
    MEMORY_LIMIT = "memory_limit"
    CPU_LIMIT = "cpu_limit"
    RESET = "reset"
    DEPS_INSTALL = "deps_install"
    DEPS_UNINSTALL = "deps_uninstall"

    @classmethod
    def all(cls) -> set[str]:
        return {value for name, value in vars(cls).items() if name.isupper()}


# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InProcessConfig:
    """Settings of code that runs in this process; `ipc_timeout` has no effect."""

    allow_runtime_deps: bool = True
    tools_path: Path | str | None = None
    deps: Sequence[str] | None = None
    deps_file: Path | str | None = None
    default_timeout: float | None = 30.0
    ipc_timeout: float | None = 30.0


@dataclass(frozen=True)
class SubprocessConfig:
    """Settings of code that runs in a sandboxed process; `base_deps` and `ipc_timeout` have no effect."""

    allow_runtime_deps: bool = True
    tools_path: Path | str | None = None
    deps: Sequence[str] | None = None
    deps_file: Path | str | None = None
    python_version: str | None = None
    venv_path: Path | str | None = None
    base_deps: tuple[str, ...] = ("ipykernel",)
    startup_timeout: float = 30.0
    default_timeout: float | None = 60.0
    cleanup_venv_on_close: bool | None = None
    """True makes a virtualenv that is thrown away at close, as `cache_venv=False` does."""
    cache_venv: bool = True
    ipc_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.python_version is None:
            object.__setattr__(self, "python_version", _running_version())
        if re.fullmatch(r"\d+\.\d+", str(self.python_version)) is None:
            raise ValueError(f"python_version is {self.python_version!r}; write it as in 3.12")
        for name in ("startup_timeout", "default_timeout", "ipc_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value!r}; it is a number of seconds above 0")


@dataclass
class ContainerConfig:
    """Settings of code that runs in a container.

    `auto_build`, `port`, `host`, `health_check_interval`, `ipc_timeout`, `remove_on_exit`, `name` and `auth_disabled`
    have no effect: carrel builds no image and opens no port."""

    allow_runtime_deps: bool = True
    tools_path: Path | str | None = None
    deps: Sequence[str] | None = None
    deps_file: Path | str | None = None
    image: str = "py-code-mode-tools:latest"
    """The default stands for carrel's own choice."""
    auto_build: bool = True
    port: int = 0
    host: str = "localhost"
    timeout: float | None = 30.0
    startup_timeout: float = 60.0
    health_check_interval: float = 0.5
    ipc_timeout: float | None = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)
    remove_on_exit: bool = True
    name: str | None = None
    auth_token: str | None = None
    auth_disabled: bool = False
    remote_url: str | None = None


# --- executors --------------------------------------------------------------------------------------------------------


@runtime_checkable
class Executor(Protocol):
    """Runs code; `Session` passes its calls on."""

    async def start(self, storage: Any = None) -> None: ...

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult: ...

    async def reset(self) -> None: ...

    async def close(self) -> None: ...

    async def list_tools(self) -> list[dict[str, Any]]: ...

    async def search_tools(self, query: str, limit: int = 10) -> list[dict[str, Any]]: ...

    async def list_deps(self) -> list[str]: ...

    async def add_dep(self, package: str) -> dict[str, Any]: ...

    async def remove_dep(self, package: str) -> dict[str, Any]: ...

    async def sync_deps(self) -> dict[str, Any]: ...

    async def install_deps(self, packages: Sequence[str]) -> dict[str, Any]: ...

    async def uninstall_deps(self, packages: Sequence[str]) -> dict[str, Any]: ...

    def get_configured_deps(self) -> list[str]: ...

    def supports(self, capability: str) -> bool: ...

    def supported_capabilities(self) -> set[str]: ...


class BaseExecutor:
    """What the kinds share: a session of carrel, made when the executor starts."""

    config: Any
    session: carrel.session.session.Session | None = None
    """The session of carrel, for its other methods; None before the start."""
    _stderr_in_stdout = True
    _timeout_word = "timed out"

    def _make_session(self, storage: Any) -> carrel.session.session.Session:
        raise NotImplementedError

    async def start(self, storage: Any = None) -> None:
        """Start the session on this storage, else one in memory."""
        if self.session is not None:
            return
        self.session = self._make_session(storage.open() if storage is not None else MemoryStorage())
        await self.session.start()

    async def run(self, code: str, timeout: float | None = None) -> ExecutionResult:
        return self._converted(await self.started_session.run(code, timeout))

    async def reset(self) -> None:
        await self.started_session.reset()

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    async def list_tools(self) -> list[dict[str, Any]]:
        return [tool_dict(tool) for tool in await self.started_session.list_tools()]

    async def search_tools(self, query: str, limit: int = 10) -> list[dict[str, Any]]:
        return [tool_dict(tool) for tool in await self.started_session.search_tools(query, limit)]

    async def list_deps(self) -> list[str]:
        """Return one entry for each package, lower case, with `-` for `_`."""
        found: dict[str, str] = {}
        for line in await self.started_session.list_deps():
            name = re.match(r"[\w.-]+", line)
            plain = name[0].lower().replace("_", "-") if name else line
            found.setdefault(plain, plain + line[len(name[0]) :] if name else line)
        return list(found.values())

    async def add_dep(self, package: str) -> dict[str, Any]:
        checked_package(package)
        try:
            return await self.started_session.add_dep(package)
        except errors.RuntimeDepsDisabledError as problem:
            raise RuntimeDepsDisabledError(str(problem)) from problem

    async def remove_dep(self, package: str) -> dict[str, Any]:
        checked_package(package)
        try:
            return await self.started_session.remove_dep(package)
        except errors.RuntimeDepsDisabledError as problem:
            raise RuntimeDepsDisabledError(str(problem)) from problem

    async def sync_deps(self) -> dict[str, Any]:
        return await self.started_session.sync_deps()

    async def install_deps(self, packages: Sequence[str]) -> dict[str, Any]:
        """Add several packages; returns the reports together."""
        return _together([await self.add_dep(package) for package in packages])

    async def uninstall_deps(self, packages: Sequence[str]) -> dict[str, Any]:
        return _together([await self.remove_dep(package) for package in packages])

    def get_configured_deps(self) -> list[str]:
        """Return the packages of the settings."""
        file = self.config.deps_file
        lines = Path(file).read_text(encoding="utf-8").splitlines() if file and Path(file).exists() else []
        return [*(self.config.deps or ()), *(line.strip() for line in lines if line.strip() and line.strip()[0] != "#")]

    def supports(self, capability: str) -> bool:
        return capability in self.supported_capabilities()

    def supported_capabilities(self) -> set[str]:
        """Return what is possible now: nothing before the start and after the end."""
        is_open = self.session is not None and self.session._started and not self.session._closed
        return self.started_session.supported_capabilities() if is_open else set()

    @property
    def started_session(self) -> carrel.session.session.Session:
        if self.session is None:
            raise RuntimeError("the executor has not been started; await start() first")
        return self.session

    def _common(self, storage: Any, timeout: float | None) -> dict[str, Any]:
        """Return the settings that all kinds have in carrel, too."""
        base = getattr(storage, "base_path", None)
        # Where the original keeps the packages of a folder.
        earlier = base / "deps" / "requirements.txt" if base is not None else None
        return {
            "base": getattr(storage, "base", None),
            "allow_runtime_deps": self.config.allow_runtime_deps,
            "tools_path": self.config.tools_path,
            "deps": tuple(self.config.deps or ()),
            "deps_file": self.config.deps_file or (earlier if earlier is not None and earlier.exists() else None),
            "default_timeout": timeout,
        }

    def _converted(self, result: CarrelResult) -> ExecutionResult:
        error = result.error
        if result.error_type == "Timeout":
            error = f"{self._timeout_word}: {error}"
        stdout = result.stdout + result.stderr if self._stderr_in_stdout else result.stdout
        names = ("error_type", "state", "state_reason", "stderr", "display")
        more = {name: getattr(result, name) for name in names}
        return ExecutionResult(result.value, stdout, error, result.duration * 1000, more)


class InProcessExecutor(BaseExecutor):
    """Runs code in this process, without any isolation."""

    _stderr_in_stdout = False
    _timeout_word = "timeout"

    def __init__(self, *, default_timeout: float | None = 30.0, config: InProcessConfig | None = None) -> None:
        self.config = config or InProcessConfig(default_timeout=default_timeout)

    def _make_session(self, storage: Any) -> carrel.session.session.Session:
        from carrel.execution.in_process import InProcessExecutor as Own  # noqa: PLC0415 -- most programs do not use it

        settings = config.InProcessConfig(**self._common(storage, self.config.default_timeout))
        return _Session(storage, Own(settings), owns_storage=True, on_error="skip")


class SubprocessExecutor(BaseExecutor):
    """Runs code in a process of its own, in carrel's sandbox."""

    def __init__(self, config: SubprocessConfig | None = None) -> None:
        self.config = config or SubprocessConfig()

    def _make_session(self, storage: Any) -> carrel.session.session.Session:
        from carrel.execution.subprocess_executor import SubprocessExecutor as Own  # noqa: PLC0415 -- as above

        mine = self.config
        settings = config.SubprocessConfig(
            **self._common(storage, mine.default_timeout),
            python_version=None if mine.python_version == _running_version() else mine.python_version,
            venv_path=mine.venv_path,
            startup_timeout=mine.startup_timeout,
            cache_venv=mine.cache_venv and not mine.cleanup_venv_on_close,
        )
        return _Session(storage, Own(settings), owns_storage=True, on_error="skip")


class ContainerExecutor(BaseExecutor):
    """Runs code in a container of Docker or Podman."""

    def __init__(self, config: ContainerConfig) -> None:
        self.config = config

    def _make_session(self, storage: Any) -> carrel.session.session.Session:
        from carrel.execution.container_executor import ContainerExecutor as Own  # noqa: PLC0415 -- as above

        mine = self.config
        settings = config.ContainerConfig(
            **self._common(storage, mine.timeout),
            image=None if mine.image == ContainerConfig.image else mine.image,
            startup_timeout=mine.startup_timeout,
            env=dict(mine.environment),
            remote_url=mine.remote_url,
            auth_token=mine.auth_token if mine.remote_url else None,
        )
        return _Session(storage, Own(settings), owns_storage=True, on_error="skip")


class _Session(carrel.session.session.Session):
    """A session of carrel, also a fork of one, that answers its code as py_code_mode does."""

    def __init__(self, storage: Any, executor: Any, **settings: Any) -> None:
        super().__init__(storage, executor, **settings)
        self._call_handlers = _Handlers(self._library, self._steps, executor)
        if isinstance(executor, WorkerExecutor):
            executor.errors = {**executor.errors, **RPC_ERRORS}


class _Handlers(CallHandlers):
    """Answers the running code with the keys that py_code_mode has, in addition to those of carrel.

    Code in another process gets failures as errors of the namespace."""

    def handlers(self) -> dict[str, Handler]:
        found = super().handlers()
        if not isinstance(self._executor, WorkerExecutor):
            return {**found, "artifacts.path": self._path_of_artifacts}
        return {name: _with_rpc_errors(handler) for name, handler in found.items()}

    async def _path_of_artifacts(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
        """Return what the store's `path` is."""
        storage: Any = self._library._storage
        return f"{getattr(storage, 'base_path', None) or getattr(storage, '_prefix', 'memory')}/artifacts"

    async def call_tool(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        answer = await super().call_tool(await self._recipe_for(name, kwargs), args, kwargs)
        if name in ("tools.list", "tools.search"):
            return [{**tool, "callables": callables_of(tool)} for tool in answer]
        return answer

    async def call_workflow(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        answer = await super().call_workflow(name, args, kwargs)
        verb = name.rpartition(".")[2]
        if verb == "ended" and "error" in kwargs and isinstance(self._executor, WorkerExecutor):
            # The worker raises this error while it handles that of the skill.
            text = str(kwargs["error"])
            raise RecordedError({"type": text.partition(":")[0], "also": [], "message": text})
        if verb in ("list", "search"):
            return list(map(inner_dict, answer))
        if verb in ("get", "create") and answer is not None:
            return inner_dict(answer)
        return answer

    async def _recipe_for(self, name: str, kwargs: Mapping[str, Any]) -> str:
        """Return the recipe that has the name of its tool, if it takes these arguments; else the name as it is."""
        tools = (await self._library.get()).tools
        tool = name.removeprefix("tools.")
        if not name.startswith("tools.") or "." in tool or await tools.is_query(name):
            return name
        for recipe in (await tools.get(tool) or {}).get("recipes", ()):
            if recipe["name"] == tool and kwargs.keys() <= {each["name"] for each in recipe["parameters"]}:
                return f"{name}.{tool}"
        return name

    async def call_deps(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        answer = await super().call_deps(name, args, kwargs)
        if name.rpartition(".")[2] == "remove":
            return bool(answer["removed"] or answer["removed_from_config"])
        return answer


def _with_rpc_errors(handler: Handler) -> Handler:
    """Return a handler whose failures are errors of the namespace in the running code."""

    async def answer(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return await handler(name, args, kwargs)
        except Exception as problem:
            raise RecordedError(rpc_record(name, error_record(problem))) from problem

    return answer


def _running_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _together(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the lists of several reports as one report."""
    names = {name for report in reports for name, value in report.items() if isinstance(value, list)}
    return {name: [each for report in reports for each in report[name]] for name in sorted(names)}


_MISSING = "FileStorageAccess RedisStorageAccess StorageAccess get_backend list_backends register_backend"
__getattr__ = refuse_missing(__name__, dict.fromkeys(_MISSING.split(), INTERNAL))
