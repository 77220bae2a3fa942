"""The packages of a session: its environment, and beside it what is added while the session lives.

What is added was chosen by code in the session, so nothing from it may run on the host. It is kept outside the
virtualenv, whose Python starts outside the sandbox and executes `.pth` files and `sitecustomize`; nor is it built from
source.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from carrel.errors import DependencyError, EnvironmentFailed
from carrel.execution import temp_dirs
from carrel.execution.config import InProcessConfig, SubprocessConfig, path_of
from carrel.execution.environments import (
    NEUTRAL,
    Environment,
    environment_at,
    has_installer,
    host_environment,
    install,
    locked,
    normal_name,
    own_environment,
    refuse_path_separator,
    shared_environment,
    uninstall,
)
from carrel.guest import worker
from carrel.home import resolve_carrel_home

MARK = "carrel-deps.json"
"""Which requirements of the settings have been installed already, so that the next start need not ask."""
FOR_COMMANDS = Path(worker.__file__).parent / "for_commands" / "sitecustomize.py"
_PATIENCE = 5.0
"""Seconds that an install under way has, when the session is closed, before it is ended."""

Result = TypeVar("Result")


class Packages:
    """Shared by an executor and its forks; what belongs to them alone goes with the last of them.

    The folder `added` is on the code's path: in front of the environment's packages, or with `last` behind them."""

    def __init__(
        self,
        environment: Environment,
        added: Path,
        wheelhouse: Path | None = None,
        *,
        last: bool = False,
        builds: bool = False,
    ) -> None:
        self.environment = environment
        self.added = added
        self._last = last
        self._builds = builds
        self._wheelhouse = wheelhouse
        self._own = [folder for folder in (environment.own,) if folder is not None]
        self.users = 1
        """How many executors have them."""
        self._under_way: set[asyncio.Task[Any]] = set()

    async def give_back(self) -> None:
        self.users -= 1
        if self.users:
            return
        if self._under_way:
            _, late = await asyncio.wait(self._under_way, timeout=_PATIENCE)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for folder in self._own:
            await asyncio.to_thread(temp_dirs.remove, folder)

    def goes_with_the_session(self, folder: Path) -> None:
        """Remove this one too, at the end."""
        self._own.append(folder)

    # --- what is there ----------------------------------------------------------------------------------------------

    async def installed(self) -> dict[str, str]:
        return await asyncio.to_thread(self._installed)

    def _installed(self) -> dict[str, str]:
        layers = [self._found_beside(), self._found_added()]
        behind, front = reversed(layers) if self._last else layers
        return {**behind, **front}

    def _found_beside(self) -> dict[str, str]:
        """What the environment itself has."""
        return _found_in(self.environment.packages)

    def _found_added(self) -> dict[str, str]:
        return _found_in([str(self.added)])

    def can_install(self) -> bool:
        return has_installer() and os.access(self.added, os.W_OK) and os.access(self.added.parent, os.W_OK)

    @property
    def shown(self) -> Path:
        """The folder that must be seen where code runs: `added` itself is another after each change."""
        return self.added.parent

    # --- changing it ------------------------------------------------------------------------------------------------

    async def ensure(self, deps: Sequence[str], deps_file: Path | None, venv: Path | None = None) -> None:
        """Install what the settings name, unless that was done before; EnvironmentFailed has what uv printed.

        It goes into the virtualenv that the author of the program has named, else to the packages that are added."""
        words, names = wanted_words(deps, deps_file)
        if not set(names) <= _ensured(venv or self.added):
            async with locked(self._lock):
                if venv is not None:
                    (venv / MARK).unlink(missing_ok=True)
                    await self._install_for_settings(words)
                    _mark(venv, names)
                    return
                async with changing(self.added) as copy:
                    await self._install_for_settings(["--target", str(copy), *words])
                    _mark(copy, names)

    async def _install_for_settings(self, words: Sequence[str]) -> None:
        # Relative paths in the settings start at the program's folder.
        await self._uv_install(words, folder=os.getcwd())

    def path_of_commands(self) -> str:
        """What Python programs that are run as commands must have as their PYTHONPATH."""
        folder = self.added.with_name(f"{self.added.name}.path")
        file = folder / FOR_COMMANDS.name
        try:
            if not file.exists() or file.read_bytes() != FOR_COMMANDS.read_bytes():
                folder.mkdir(exist_ok=True)
                new = folder / f"{uuid.uuid4().hex}.new"
                new.write_bytes(FOR_COMMANDS.read_bytes())
                new.replace(file)
        except OSError:
            return str(self.added)  # a base that cannot be written: in front of the standard library, then
        return str(folder)

    @property
    def _lock(self) -> Path:
        return self.added.with_name(f"{self.added.name}.lock")

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        return await self._to_its_end(self._install(requirements, constraints))

    async def _install(self, requirements: Sequence[str], constraints: Sequence[str]) -> dict[str, str]:
        try:
            async with locked(self._lock):
                before = self._found_added()
                missing = [text for text in requirements if not self._beside(text)]
                if missing:
                    with _written(constraints) as file:
                        options = [
                            *(["--constraints", file] if file else []),
                            *([] if self._builds else ["--no-build"]),
                        ]
                        async with changing(self.added) as copy:
                            await self._uv_install(["--target", str(copy), *options, "--", *missing])
                after = self._found_added()
        except EnvironmentFailed as problem:
            first, *others = requirements
            beside = f" (with {', '.join(others)})" if others else ""
            raise DependencyError(f"{first}{beside} could not be installed: {problem}") from None
        return {name: version for name, version in after.items() if before.get(name) != version}

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        return await self._to_its_end(self._uninstall(names))

    async def _uninstall(self, names: Sequence[str]) -> list[str]:
        wanted = [normal_name(name) for name in names]
        try:
            async with locked(self._lock):
                here = self._found_added()
                present = [name for name in wanted if name in here]
                fixed = set(wanted).difference(present).intersection(self._installed())
                if fixed:
                    words = ", ".join(sorted(fixed))
                    raise DependencyError(
                        f"{words} was not added here: it comes with the Python or the settings, and stays"
                    )
                if present:
                    async with changing(self.added, makes_room=True) as copy:
                        (copy / MARK).unlink(missing_ok=True)
                        await uninstall(self.environment.python, copy, present)
        except EnvironmentFailed as problem:
            raise DependencyError(f"{', '.join(names)} could not be removed: {problem}") from None
        return present

    async def _uv_install(self, words: Sequence[str], folder: str = NEUTRAL) -> None:
        source = [] if self._wheelhouse is None else _only_from(self._wheelhouse)
        await install(*self._python(), *source, *words, folder=folder)

    def _python(self) -> list[str]:
        """Which Python is installed for."""
        return ["--python", self.environment.python]

    def _beside(self, requirement: str) -> bool:
        """Whether the environment has it already."""
        from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415 -- few sessions install

        try:
            wanted = Requirement(requirement)
        except InvalidRequirement:
            return False
        version = self._found_beside().get(normal_name(wanted.name))
        if version is None:
            return False
        fits = wanted.specifier.contains(version, prereleases=True)
        if self._last and not fits:
            raise DependencyError(
                f"{requirement} cannot be added: {wanted.name} {version} belongs to the program that this code runs "
                "in, and stands in front; use a subprocess, which has packages of its own"
            )
        return fits and not wanted.extras

    async def _to_its_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        """A caller who is cancelled leaves it to finish: ended half way, a package would be torn."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()


async def subprocess_packages(config: SubprocessConfig) -> Packages:
    """What the settings ask for, made where it is missing; EnvironmentFailed has what uv printed."""
    base, venv = path_of(config.base), path_of(config.venv_path)
    wheelhouse, builds = path_of(config.wheelhouse), config.allow_builds
    if not config.cache_venv:
        environment = await own_environment(config.python_version, _wanted_environment(config)[0])
        assert environment.own is not None
        return await made_ready(
            Packages(environment, environment.own / "packages" / "added", wheelhouse, builds=builds)
        )
    if venv is not None:
        environment = await environment_at(venv, config.python_version)
        packages = Packages(environment, venv.absolute() / "added", wheelhouse, builds=builds)
        return await made_ready(packages, config.deps, path_of(config.deps_file), venv.absolute())
    if base is not None:
        version = (config.python_version or _host_version()).replace("/", "_")
        folder = base.absolute() / "environments" / f"packages-{version}" / "added"
        refuse_path_separator(folder)
        return await made_ready(Packages(await environment_for_all(config), folder, wheelhouse, builds=builds))
    environment = await environment_for_all(config)
    folder = temp_dirs.new_folder("packages")
    packages = Packages(environment, folder / "added" / "site", wheelhouse, builds=builds)
    packages.goes_with_the_session(folder)
    return await made_ready(packages)


async def environment_for_all(config: SubprocessConfig) -> Environment:
    """The one that every session of a base, or every one without a base, has with these requirements. Nothing is added
    to it later: other requirements have another."""
    words, names = _wanted_environment(config)
    base = path_of(config.base)
    if not names and config.python_version is None:
        if base is None:
            return host_environment()
        try:
            return await shared_environment(resolve_carrel_home(), None, (), "empty")
        except EnvironmentFailed:
            # The home folder cannot be written, as for a service; the base perhaps can.
            return await shared_environment(base, None, (), "empty")
    home = path_of(config.shared_in) or base or resolve_carrel_home()
    return await shared_environment(home, config.python_version, words, "\n".join(names))


def _wanted_environment(config: SubprocessConfig) -> tuple[list[str], list[str]]:
    """What `wanted_words` returns, for a new virtualenv."""
    words, names = wanted_words(config.deps, path_of(config.deps_file))
    # Made once and used by many: what is compiled now need not be compiled by each.
    words = ["--compile-bytecode", *words] if words else words
    wheelhouse = path_of(config.wheelhouse)
    if words and wheelhouse is not None:
        words = [*_only_from(wheelhouse), *words]
        names.append(f"from {wheelhouse.absolute()}")
    return words, names


def _host_version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _only_from(wheelhouse: Path) -> list[str]:
    return ["--no-index", "--find-links", str(wheelhouse.absolute())]


async def in_process_packages(config: InProcessConfig) -> Packages:
    """The host's own Python, with a folder beside it: of the base, or one that goes with the session."""
    base, wheelhouse = path_of(config.base), path_of(config.wheelhouse)
    folder = temp_dirs.new_folder("packages") if base is None else base.absolute() / "environments"
    added = folder / f"in-process-{_host_version()}"
    packages = Packages(host_environment(), added, wheelhouse, last=True, builds=True)
    if base is None:
        packages.goes_with_the_session(folder)
    return await made_ready(packages, config.deps, path_of(config.deps_file))


async def made_ready(
    packages: Packages, deps: Sequence[str] = (), deps_file: Path | None = None, venv: Path | None = None
) -> Packages:
    try:
        # Readable for all: inside, the session may be another user than the owner of the folder.
        packages.added.mkdir(parents=True, exist_ok=True)
        await packages.ensure(deps, deps_file, venv)
    except OSError as problem:
        await packages.give_back()
        raise EnvironmentFailed(f"no packages can be kept in {packages.added}: {problem.strerror}") from None
    except BaseException:
        await packages.give_back()
        raise
    return packages


def wanted_words(deps: Sequence[str], deps_file: Path | None) -> tuple[list[str], list[str]]:
    """Arguments for uv, and names under which it is remembered that they were used."""
    names, words = sorted(deps), list(deps)
    if deps_file is None:
        return (["--", *words] if words else []), names
    try:
        content = deps_file.read_bytes()
    except FileNotFoundError:
        content = b""
    if content.strip():
        names.append(f"file {hashlib.sha256(content).hexdigest()}")
        return ["--requirements", str(deps_file.absolute()), "--", *words], names
    return (["--", *words] if words else []), names


@contextmanager
def _written(constraints: Sequence[str]) -> Iterator[str]:
    """The constraints in a file, as uv wants them; no name where there are none."""
    if not constraints:
        yield ""
        return
    with tempfile.NamedTemporaryFile("w", prefix="carrel-constraints-", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(constraints))
        file.flush()
        yield file.name


def _ensured(folder: Path) -> set[str]:
    """Which requirements were installed there last."""
    try:
        return set(json.loads((folder / MARK).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return set()


def _mark(folder: Path, names: Sequence[str]) -> None:
    mark = folder / f"{MARK}.new"
    mark.write_text(json.dumps(names), encoding="utf-8")
    mark.replace(folder / MARK)


def _found_in(folders: Sequence[str]) -> dict[str, str]:
    """By the folders that installers leave, `name-1.0.dist-info`; the first on the path is what is imported."""
    found: dict[str, str] = {}
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        found = {**found_in_names(names), **found}
    return found


def found_in_names(names: Sequence[str]) -> dict[str, str]:
    """The packages whose folders have these names."""
    found: dict[str, str] = {}
    for name in names:
        stem, suffix = os.path.splitext(name)
        title, dash, version = stem.partition("-")
        if suffix == ".dist-info" and dash:
            found.setdefault(normal_name(title), version)
    return found


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


@asynccontextmanager
async def changing(folder: Path, *, makes_room: bool = False) -> AsyncIterator[Path]:
    """The copy to work on, for the holder of the folder's lock; EnvironmentFailed when there is no room for it.

    What `makes_room` gets the folder itself where there is none: else nothing could be removed from a full disk.
    Files are replaced and never written to: the two share them. When this fails, or its process is killed at any
    moment, the folder is as it was; what is left of a copy goes with the next one."""
    copy = folder.with_name(f"{folder.name}.new-{uuid.uuid4().hex}")
    try:
        try:
            await asyncio.to_thread(_begin, folder, copy)
        except OSError as problem:
            if not makes_room or problem.errno not in _NO_ROOM:
                raise
            await asyncio.to_thread(_remove, copy)
            yield folder
        else:
            yield copy
            await asyncio.to_thread(_put_in_place, copy, folder)
    except OSError as problem:
        raise EnvironmentFailed(f"{folder} could not be changed: {problem.strerror or problem}") from None
    finally:
        await asyncio.to_thread(_remove, copy)


def _begin(folder: Path, copy: Path) -> None:
    before = sorted(folder.parent.glob(f"{folder.name}.old-*"))
    if before and (not folder.exists() or not any(folder.iterdir())):
        with suppress(FileNotFoundError):
            folder.rmdir()
        before.pop().rename(folder)  # a process was killed between the two steps of `_put_in_place`
    for left in (*before, *folder.parent.glob(f"{folder.name}.new-*")):
        _remove(left)
    _link(str(folder), str(copy))


def _link(folder: str, copy: str) -> None:
    os.mkdir(copy)
    with os.scandir(folder) as entries:
        for entry in entries:
            there = os.path.join(copy, entry.name)
            if entry.is_dir(follow_symlinks=False):
                _link(entry.path, there)
                continue
            try:
                os.link(entry.path, there, follow_symlinks=False)
            except OSError as problem:
                if problem.errno not in _NO_LINKS:
                    raise
                shutil.copy2(entry.path, there, follow_symlinks=False)


def _put_in_place(copy: Path, folder: Path) -> None:
    # A process killed between the two steps leaves the old folder, which `_begin` then puts back.
    old = folder.with_name(f"{folder.name}.old-{copy.name[-32:]}")
    folder.rename(old)
    copy.rename(folder)
    _remove(old)


def _remove(folder: Path) -> None:
    # A process that was killed may have left an uv that still writes there: then the next one removes the rest.
    with suppress(OSError):
        temp_dirs.remove(folder)
