"""Packages for a Python in a container: installed on the host for that Python's platform, and then brought in.

So the container needs neither a network nor an installer, and nothing of what is installed runs on the host.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from carrel.execution import scratch
from carrel.execution.container_plan import platform_of
from carrel.execution.environments import Environment
from carrel.execution.file_changes import Tree, seen_below
from carrel.execution.packages import MARK, Packages, found_in_names, made_ready
from carrel.execution.settings import ContainerConfig, path_of
from carrel.execution.uv_program import NEUTRAL


class ContainerPackages(Packages):
    """Kept in a folder of the host's; `changes` has what must be brought in for the container to have it too."""

    def __init__(self, facts: Mapping[str, Any], added: Path, wheelhouse: Path | None) -> None:
        super().__init__(Environment(sys.executable, ()), added, wheelhouse)
        self._facts = facts
        self._brought: Tree = {}

    def _found_beside(self) -> dict[str, str]:
        return found_in_names([str(name) for name in self._facts.get("packages") or []])

    def _python(self) -> list[str]:
        version = ".".join(str(part) for part in (self._facts.get("version") or sys.version_info)[:2])
        return [*super()._python(), "--python-version", version, "--python-platform", platform_of(self._facts)]

    async def _uv_install(self, words: Sequence[str], folder: str = NEUTRAL) -> None:
        # What is built here would be for this machine, and run on it.
        await super()._uv_install(words if "--no-build" in words else ["--no-build", *words], folder)

    def changes(self, to: Path, user: tuple[int, int]) -> tuple[list[str], Tree]:
        """Write what is new since the last time as a tar archive; gives what has gone, and what is there now."""
        now = self._now()
        with tarfile.open(to, "w") as archive:
            for name in sorted(name for name, seen in now.items() if self._brought.get(name) != seen):
                self._add(archive, name, user)
        return [name for name in self._brought if name not in now], now

    def brought(self, now: Tree) -> None:
        """So much is in the container; nothing when it is another."""
        self._brought = now

    def is_behind(self) -> bool:
        """Whether something has to be brought in."""
        return self._now() != self._brought

    def _now(self) -> Tree:
        # When the kernel last saw a file change says nothing: it is linked from copy to copy.
        seen = seen_below(self.added).items()
        return {name: replace(one, changed=0) for name, one in seen if name != MARK}

    def _add(self, archive: tarfile.TarFile, name: str, user: tuple[int, int]) -> None:
        path = self.added / name
        entry = archive.gettarinfo(str(path), name)
        entry.uid, entry.gid = user
        entry.uname = entry.gname = ""
        if not entry.isreg():
            archive.addfile(entry)
            return
        if Path(name).parts[0] != "bin":
            with open(path, "rb") as file:
                archive.addfile(entry, file)
            return
        # A command's first line names the Python that it is for.
        inside = str(self._facts.get("python", "python3"))
        content = path.read_bytes().replace(os.fsencode(self.environment.python), os.fsencode(inside), 1)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


async def container_packages(config: ContainerConfig, facts: Mapping[str, Any]) -> ContainerPackages:
    """What the settings ask for, in a folder of the base or one that goes with the session."""
    base, wheelhouse = path_of(config.base), path_of(config.wheelhouse)
    folder = scratch.new_folder("packages") if base is None else base.absolute() / "environments"
    version = ".".join(str(part) for part in (facts.get("version") or sys.version_info)[:2])
    packages = ContainerPackages(facts, folder / f"container-{version}-{platform_of(facts)}", wheelhouse)
    if base is None:
        packages.goes_with_the_session(folder)
    await made_ready(packages, config.deps, path_of(config.deps_file))
    return packages
