"""The packages of a session: its environment, and what is added to it while the session lives."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from carrel.errors import DependencyError, EnvironmentFailed
from carrel.execution import scratch
from carrel.execution.environments import (
    Environment,
    environment_at,
    environment_of_base,
    host_environment,
    locked,
    own_environment,
    shared_environment,
)
from carrel.execution.settings import InProcessConfig, SubprocessConfig, path_of
from carrel.execution.uv_program import has_uv, uv
from carrel.home import resolve_carrel_home

MARK = "carrel-deps.json"
"""Which requirements of the settings have been installed already, so that the next start need not ask."""
_PATIENCE = 5.0
"""Seconds that an install under way has, when the session is closed, before it is ended."""

Result = TypeVar("Result")


class Packages:
    """Shared by an executor and its forks; what belongs to them alone goes with the last of them.

    Packages are added to the environment's own virtualenv, or where others have that too, to the folder `added`
    beside it, which code has on its path as well: in front of the environment's packages, or with `last` behind them.
    """

    def __init__(
        self,
        environment: Environment,
        wheelhouse: Path | None = None,
        added: Path | None = None,
        *,
        last: bool = False,
    ) -> None:
        self.environment = environment
        self.added = added
        self._last = last
        self._wheelhouse = wheelhouse
        self._own = [folder for folder in (environment.own,) if folder is not None]
        self._users = 1
        self._under_way: set[asyncio.Task[Any]] = set()

    def take(self) -> Packages:
        """For one more user."""
        self._users += 1
        return self

    async def give_back(self) -> None:
        self._users -= 1
        if self._users:
            return
        if self._under_way:
            _, late = await asyncio.wait(self._under_way, timeout=_PATIENCE)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for folder in self._own:
            await asyncio.to_thread(scratch.remove, folder)

    def goes_with_the_session(self, folder: Path) -> None:
        """Remove this one too, at the end."""
        self._own.append(folder)

    # --- what is there ----------------------------------------------------------------------------------------------

    async def installed(self) -> dict[str, str]:
        return await asyncio.to_thread(self._installed)

    def _installed(self) -> dict[str, str]:
        layers = [_found_in(self.environment.packages), self._added_here()]
        behind, front = reversed(layers) if self._last else layers
        return {**behind, **front}

    def _added_here(self) -> dict[str, str]:
        return _found_in(self.environment.packages if self.added is None else (str(self.added),))

    def can_install(self) -> bool:
        return has_uv() and os.access(self._folder, os.W_OK)

    @property
    def _folder(self) -> Path:
        folder = self.added or self.environment.venv
        assert folder is not None, "an environment that others share has a folder beside it"
        return folder

    # --- changing it ------------------------------------------------------------------------------------------------

    async def ensure(self, deps: Sequence[str], deps_file: Path | None) -> None:
        """Install what the settings name, unless that was done before; EnvironmentFailed has what uv said."""
        words, names = wanted_words(deps, deps_file)
        if not words or set(names) <= self._ensured():
            return
        async with locked(self._folder / "carrel.lock"):
            if not set(names) <= self._ensured():
                await self._uv_install(words)
                self._mark(self._ensured() | set(names))

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        return await self._to_its_end(self._install(requirements, constraints))

    async def _install(self, requirements: Sequence[str], constraints: Sequence[str]) -> dict[str, str]:
        try:
            async with locked(self._folder / "carrel.lock"):
                before = self._added_here()
                missing = [text for text in requirements if not self._beside(text)]
                if missing:
                    with _written(constraints) as file:
                        limits = ["--constraints", file] if file else []
                        await self._uv_install([*limits, "--", *missing])
                after = self._added_here()
        except EnvironmentFailed as problem:
            raise DependencyError(f"{', '.join(requirements)} could not be installed: {problem}") from None
        return {name: version for name, version in after.items() if before.get(name) != version}

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        return await self._to_its_end(self._uninstall(names))

    async def _uninstall(self, names: Sequence[str]) -> list[str]:
        wanted = [_normal(name) for name in names]
        try:
            async with locked(self._folder / "carrel.lock"):
                here = self._added_here()
                present = [name for name in wanted if name in here]
                fixed = set(wanted).difference(present).intersection(self._installed())
                if fixed:
                    words = ", ".join(sorted(fixed))
                    raise DependencyError(f"{words} belongs to a Python that others use too and stays there")
                if present:
                    self._mark(set())
                    await uv("pip", "uninstall", "--quiet", *self._where(), "--", *present)
        except EnvironmentFailed as problem:
            raise DependencyError(f"{', '.join(names)} could not be removed: {problem}") from None
        return present

    async def _uv_install(self, words: Sequence[str]) -> None:
        source = [] if self._wheelhouse is None else ["--no-index", "--find-links", str(self._wheelhouse.absolute())]
        await uv("pip", "install", "--quiet", *self._where(), *source, *words)

    def _where(self) -> list[str]:
        beside = [] if self.added is None else ["--target", str(self.added)]
        return ["--python", self.environment.python, *beside]

    def _beside(self, requirement: str) -> bool:
        """Whether the environment has it already, where packages are added beside it."""
        if self.added is None:
            return False
        from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415 -- few sessions install

        try:
            wanted = Requirement(requirement)
        except InvalidRequirement:
            return False
        version = _found_in(self.environment.packages).get(_normal(wanted.name))
        if version is None:
            return False
        fits = wanted.specifier.contains(version, prereleases=True)
        if self._last and not fits:
            raise DependencyError(
                f"{requirement} cannot be added: {wanted.name} {version} belongs to the program that this code runs "
                "in, and stands in front; use a subprocess, which has packages of its own"
            )
        return fits and not wanted.extras

    def _ensured(self) -> set[str]:
        try:
            return set(json.loads((self._folder / MARK).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return set()

    def _mark(self, names: set[str]) -> None:
        mark = self._folder / f"{MARK}.new"
        mark.write_text(json.dumps(sorted(names)), encoding="utf-8")
        mark.replace(self._folder / MARK)

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
    """What the settings ask for, made where it is missing; EnvironmentFailed has what uv said."""
    version, wheelhouse = config.python_version, path_of(config.wheelhouse)
    venv, base, deps_file = path_of(config.venv_path), path_of(config.base), path_of(config.deps_file)
    if not config.cache_venv:
        packages = Packages(await own_environment(version), wheelhouse)
    elif venv is not None:
        packages = Packages(await environment_at(venv, version), wheelhouse)
    elif base is not None:
        packages = Packages(await environment_of_base(base, version), wheelhouse)
    else:
        words, names = wanted_words(config.deps, deps_file)
        found = host_environment()
        if words or version is not None:
            if wheelhouse is not None:
                words = ["--no-index", "--find-links", str(wheelhouse.absolute()), *words]
            found = await shared_environment(resolve_carrel_home(), version, words, "\n".join(names))
        return _with_a_folder_beside(found, wheelhouse)
    try:
        await packages.ensure(config.deps, deps_file)
    except BaseException:
        await packages.give_back()
        raise
    return packages


async def in_process_packages(config: InProcessConfig) -> Packages:
    """The host's own Python, with a folder beside it: of the base, or one that goes with the session."""
    base, wheelhouse = path_of(config.base), path_of(config.wheelhouse)
    if base is None:
        packages = _with_a_folder_beside(host_environment(), wheelhouse, last=True)
    else:
        folder = base.absolute() / "environments" / f"in-process-{sys.version_info[0]}.{sys.version_info[1]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise EnvironmentFailed(f"no packages can be kept in {folder}: {problem.strerror}") from None
        packages = Packages(host_environment(), wheelhouse, added=folder, last=True)
    try:
        await packages.ensure(config.deps, path_of(config.deps_file))
    except BaseException:
        await packages.give_back()
        raise
    return packages


def _with_a_folder_beside(environment: Environment, wheelhouse: Path | None, *, last: bool = False) -> Packages:
    folder = scratch.new_folder("packages")
    # The folder around it is for this user only; inside, the session may be somebody else.
    (folder / "site").mkdir()
    packages = Packages(environment, wheelhouse, added=folder / "site", last=last)
    packages.goes_with_the_session(folder)
    return packages


def wanted_words(deps: Sequence[str], deps_file: Path | None) -> tuple[list[str], list[str]]:
    """What uv is to be told, and names under which it can be remembered that it was."""
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


def _normal(name: str) -> str:
    """As all spellings of a package's name are written."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _found_in(folders: Sequence[str]) -> dict[str, str]:
    """By the folders that installers leave, `name-1.0.dist-info`; the first on the path is what is imported."""
    found: dict[str, str] = {}
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            stem, suffix = os.path.splitext(name)
            title, dash, version = stem.partition("-")
            if suffix == ".dist-info" and dash:
                found.setdefault(_normal(title), version)
    return found
