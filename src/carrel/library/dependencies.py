"""The packages of a session: requirements.txt lists them, and the session's Python is changed to match it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from carrel.errors import DependencyError, RequirementRefused, RuntimeDepsDisabledError
from carrel.library.names import check_call_signature
from carrel.storage.base import MISSING, Store, locked


class Installer(Protocol):
    """Installs packages where the session's code can import them; every executor does."""

    async def install(self, requirements: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, str]:
        """Return the versions of what was added or changed, by name; after a DependencyError nothing has changed."""

    async def uninstall(self, names: Sequence[str]) -> list[str]:
        """Return the names that were installed; DependencyError for one that the session must not remove."""

    async def installed(self) -> dict[str, str]:
        """Return the version of each package, by its normalized name."""


class Dependencies:
    """The requirements of a base or a store, and the Python in which they are installed.

    `message` in what `add`, `remove` and `sync` return is the output of the installer about what failed."""

    def __init__(
        self,
        store: Store,
        installer: Installer,
        *,
        allow_runtime: bool = True,
        cut_off: Callable[[], bool] = lambda: False,
        key: str = "requirements.txt",
        settings: Sequence[str] = (),
        settings_file: Path | None = None,
    ) -> None:
        """`cut_off`: whether running code has no network; then it must not send package names to the index.

        `settings` and `settings_file`: requirements from the session's settings, which the installer installs at its
        start; they are listed after those of the file."""
        self._store = store
        self._installer = installer
        self._allow_runtime = allow_runtime
        self._cut_off = cut_off
        self._key = key
        self._settings = settings
        self._settings_file = settings_file
        self._removed: set[str] = set()
        """Packages of the settings that were uninstalled in this session."""

    async def list(self) -> list[str]:
        """Return the requirements as they are written, without comments: those of the file, then of the settings."""
        lines = parse_requirements(await self._read())
        return [line.text for line in (*lines, *await self._from_settings(lines))]

    async def _from_settings(self, lines: Sequence[RequirementLine]) -> Sequence[RequirementLine]:
        """Return the requirements of the settings whose packages are not in the file."""
        data = b""
        if self._settings_file is not None:
            with suppress(FileNotFoundError):
                data = await asyncio.to_thread(self._settings_file.read_bytes)
        found = {line.name or line.text: line for line in lines}
        in_file = len(found)
        for line in parse_requirements("\n".join([*self._settings, data.decode("utf-8", "replace")])):
            # Lines such as `-r more.txt` are options of the installer.
            if line.name not in self._removed and not line.text.startswith("-"):
                found.setdefault(line.name or line.text, line)
        return [*found.values()][in_file:]

    async def add(self, package: str) -> dict[str, Any]:
        """Install a package and add it to the file; it can be imported at once.

        Returns lists of requirements: `installed`, `already_present`, `failed`. If it fails, nothing has changed.
        Raises RequirementRefused and RuntimeDepsDisabledError."""
        self._check_allowed("added")
        requirement, name = validate_requirement(package), package_name(package)
        async with locked(self._store, self._key):
            lines = [line for line in parse_requirements(await self._read()) if line.name]
            same = [line.text for line in lines if line.name == name]
            others = [line for line in lines if line.name != name]
            if same:
                # A name without versions accepts the versions in the file.
                wanted = same if is_bare(requirement) else [merge_requirements(same[-1], requirement)]
            else:
                wanted = [requirement]
            present = await self._installer.installed()
            # Packages that are installed are resolved together with it, because a constraint would ignore what they
            # need themselves.
            together = [line.text for line in others if line.name in present]
            constraints = [_to_constraint(line.text) for line in others if line.name not in present]
            try:
                changed = await self._installer.install([*wanted, *together], constraints)
            except DependencyError as error:
                return _report(failed=[requirement], message=str(error))
            await self._edit(lambda text: with_requirement(text, requirement))
            self._removed.discard(name)
        return _report(installed=[requirement]) if changed else _report(already_present=[requirement])

    async def remove(self, package: str) -> dict[str, Any]:
        """Uninstall a package and remove it from the file; the packages it needed stay.

        Returns lists of names: `removed`, `not_found`, `failed`; and `removed_from_config`, whether it was in the
        file."""
        self._check_allowed("removed")
        name = package_name(package)
        report: dict[str, Any] = {"removed": [], "not_found": [], "failed": [], "message": ""}
        async with locked(self._store, self._key):
            # The file first, so that what is listed is installed, also if this is interrupted.
            was_listed = await self._edit(lambda text: without_requirement(text, name))
            try:
                removed = await self._installer.uninstall([name])
                report["removed" if removed else "not_found"] = [name]
                self._removed.update(removed)
            except DependencyError as error:
                report["failed"], report["message"] = [name], str(error)
            # Uninstalling takes a while, and the file may have been edited by hand meanwhile.
            was_listed |= await self._edit(lambda text: without_requirement(text, name))
        return {**report, "removed_from_config": was_listed}

    async def sync(self) -> dict[str, Any]:
        """Install what is listed and not installed; returns the same as `add`.

        Requirements that cannot be installed, and invalid lines, are in `failed`; the others are installed."""
        lines = parse_requirements(await self._read())
        invalid = [line for line in lines if not line.name]
        report = _report(failed=[line.text for line in invalid])
        messages = [line.error for line in invalid]
        wanted: Sequence[str] = [line.text for line in lines if line.name]
        settings = await self._from_settings(lines)
        present = await self._installer.installed() if settings else {}
        # Requirements of the settings were installed at the start, also those by address.
        report["already_present"] += [line.text for line in settings if not line.name or line.name in present]
        wanted = [*wanted, *(line.text for line in settings if line.name and line.name not in present)]
        if not wanted:
            return {**report, "message": "\n".join(messages)}
        try:
            changed = await self._installer.install(wanted)
        except DependencyError:
            wanted, changed, failed = await self._install_individually(wanted)
            report["failed"] += failed
            messages += failed.values()
        for text in wanted:
            report["installed" if package_name(text) in changed else "already_present"].append(text)
        return {**report, "message": "\n".join(messages)}

    async def _install_individually(
        self, wanted: Sequence[str]
    ) -> tuple[Sequence[str], dict[str, str], dict[str, str]]:
        """Install each together with those before it that could be installed, so that all fit together."""
        good: list[str] = []
        changed: dict[str, str] = {}
        failed: dict[str, str] = {}
        for requirement in wanted:
            try:
                changed |= await self._installer.install([*good, requirement])
                good.append(requirement)
            except DependencyError as error:
                failed[requirement] = str(error)
        return good, changed, failed

    async def installed(self) -> dict[str, str]:
        """Return the version of each package that can be imported, listed or not, by its name."""
        return await self._installer.installed()

    async def handle(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Answer a call of code: `deps.add("pandas")`."""
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "list": self.list,
            "add": self.add,
            "remove": self.remove,
            "sync": self.sync,
        }
        verb = name.partition(".")[2]
        if verb not in methods:
            raise AttributeError(f"deps has no method {verb!r}; it has {', '.join(methods)}")
        check_call_signature(name, methods[verb], args, kwargs)
        if verb in ("add", "sync") and self._allow_runtime and self._cut_off():
            raise DependencyError(
                f"code in this session cannot call deps.{verb}: it has no network, and the name of a package would be"
                " sent to the index. The program that has the session can install packages (add_dep, sync_deps) or"
                " give it a wheelhouse"
            )
        return await methods[verb](*args, **kwargs)

    # --- the file ---------------------------------------------------------------------------------------------------

    def _check_allowed(self, what: str) -> None:
        if not self._allow_runtime:
            raise RuntimeDepsDisabledError(
                f"packages cannot be {what} in this session (allow_runtime_deps is off); "
                f"edit {self._key} by hand, then sync installs what it lists"
            )

    async def _read(self) -> str:
        data = await self._store.get(self._key)
        try:
            return (data or b"").decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequirementRefused(
                f"{self._key} is not UTF-8 text (byte {error.start}); correct it by hand"
            ) from None

    async def _edit(self, change: Callable[[str], str]) -> bool:
        """Change the file as it is now; return whether it changed.

        It may have been edited by hand since it was read, because an install takes long."""
        while True:
            stamp = await self._store.stamp(self._key)
            before = await self._read()
            after = change(before)
            if after == before:
                return False
            if await self._store.put(self._key, after.encode("utf-8"), expect=stamp or MISSING):
                return True


def _to_constraint(requirement: str) -> str:
    """Return a requirement without extras, which constraints cannot have."""
    name, bracket, rest = requirement.partition("[")
    return name + rest.partition("]")[2] if bracket else requirement


def _report(**lists: Any) -> dict[str, Any]:
    return {"installed": [], "already_present": [], "failed": [], "message": "", **lists}


# --- requirements.txt -------------------------------------------------------------------------------------------------

_COMMENT = re.compile(r"(?:^|\s+)#.*$")
_ARCHIVE = re.compile(r"\.(whl|zip|egg|tgz|tbz|txz|tar(\.\w+)?)$", re.IGNORECASE)
"""What an installer takes for a file, though a package may have such a name."""
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
"""Removed from addresses, because code in the sandbox can read the list."""
_EXAMPLES = "use a name with versions, such as pandas, pandas>=2 or requests[socks]==2.32.3"
_LONGEST = 500


@dataclass(frozen=True)
class RequirementLine:
    """A requirement in the file."""

    first: int
    """Its first line, from 0; a line that ends with a backslash continues in the next."""
    after: int
    """The line after its last."""
    text: str
    """Without its comment."""
    name: str = ""
    """Normalized; empty if carrel does not install such a line."""
    error: str = ""


def validate_requirement(requirement: str) -> str:
    """Return a requirement without surrounding white space; RequirementRefused says what is wrong with it."""
    from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415 -- few sessions install

    if not isinstance(requirement, str):
        raise RequirementRefused(f"a requirement must be a str, not {type(requirement).__name__}; {_EXAMPLES}")
    text = requirement.strip()
    short = text if len(text) <= 80 else f"{text[:80]}…"
    shown = f"invalid requirement {short!r}"
    if not text:
        raise RequirementRefused(f"the requirement is empty; {_EXAMPLES}")
    if len(text) > _LONGEST or re.search(r"[\x00-\x1f\x7f]", text):
        raise RequirementRefused(f"{shown}: it is longer than {_LONGEST} characters or has control characters")
    if text.startswith("-"):
        raise RequirementRefused(f"{shown}: options of the installer are not allowed; {_EXAMPLES}")
    before_address = text.partition("@")[0].rstrip()
    if re.search(r"[/\\]|^[.~]", before_address) or _ARCHIVE.search(before_address.partition("[")[0]):
        raise RequirementRefused(f"{shown}: addresses and paths are not allowed; {_EXAMPLES}")
    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise RequirementRefused(f"{shown}: {reason}; {_EXAMPLES}") from None
    if not found.name[-1].isalnum():
        raise RequirementRefused(f"{shown}: the name must end with a letter or a digit; {_EXAMPLES}")
    if found.url is not None:
        raise RequirementRefused(f"{shown}: addresses are not allowed; {_EXAMPLES}")
    if found.marker is not None:
        raise RequirementRefused(f"{shown}: conditions after a semicolon are not allowed; leave the condition out")
    return text


def package_name(requirement: str) -> str:
    """Return the normalized name of a requirement's package."""
    from packaging.requirements import Requirement  # noqa: PLC0415 -- few sessions install

    return re.sub(r"[-_.]+", "-", Requirement(validate_requirement(requirement)).name).lower()


def is_bare(requirement: str) -> bool:
    """Whether a requirement is only a name."""
    return re.fullmatch(r"[\w.-]+", requirement.strip()) is not None


def merge_requirements(old: str, new: str) -> str:
    """Return the new requirement with the extras of the old one, and with its versions if the new one has none."""
    from packaging.requirements import Requirement  # noqa: PLC0415 -- few sessions install

    before, after = Requirement(old), Requirement(new)
    if before.extras <= after.extras and (after.specifier or not before.specifier):
        return new
    extras = ",".join(sorted(before.extras | after.extras))
    return f"{after.name}{f'[{extras}]' if extras else ''}{after.specifier or before.specifier}"


def parse_requirements(text: str) -> list[RequirementLine]:
    """Return the requirements of a file in order; a line that cannot be installed has an `error`."""
    lines = text.splitlines()
    found: list[RequirementLine] = []
    number = 0
    while number < len(lines):
        first, parts = number, []
        while True:
            line = _COMMENT.sub("", lines[number].lstrip("\ufeff"))
            number += 1
            continues = line.endswith("\\") and number < len(lines)
            parts.append(line.removesuffix("\\") if continues else line)
            if not continues:
                break
        requirement = " ".join(part.strip() for part in parts if part.strip())
        if requirement:
            found.append(_parse_line(first, number, requirement))
    return found


def _parse_line(first: int, after: int, text: str) -> RequirementLine:
    text = _CREDENTIALS.sub("://***@", text)
    try:
        return RequirementLine(first, after, text, package_name(text))
    except RequirementRefused as error:
        return RequirementLine(first, after, text, error=f"line {first + 1}: {error}")


def with_requirement(text: str, requirement: str) -> str:
    """Return the file with a requirement: in the line of its package, or in a new last line.

    A name without versions does not change the line of its package; extras in that line stay."""
    requirement = validate_requirement(requirement)
    name, line_end = package_name(requirement), "\r\n" if "\r\n" in text else "\n"
    lines = text.splitlines(keepends=True)
    same = [line for line in parse_requirements(text) if line.name == name]
    if same and (is_bare(requirement) or same[0].text == requirement):
        return text
    if not same:
        if lines and not lines[-1].endswith(("\n", "\r")):
            lines[-1] += line_end
        return "".join(lines) + requirement + line_end
    requirement = merge_requirements(same[-1].text, requirement)
    first, *more = same
    for line in reversed(more):
        del lines[line.first : line.after]
    comment = _COMMENT.search(lines[first.after - 1].rstrip("\r\n"))
    bom = "\ufeff" if lines[first.first].startswith("\ufeff") else ""
    end = line_end if lines[first.after - 1].endswith(("\n", "\r")) else ""
    lines[first.first : first.after] = [f"{bom}{requirement}{comment[0] if comment else ''}{end}"]
    return "".join(lines)


def without_requirement(text: str, name: str) -> str:
    """Return the file without the lines of a package."""
    lines = text.splitlines(keepends=True)
    for line in reversed([line for line in parse_requirements(text) if line.name == name]):
        del lines[line.first : line.after]
    return "".join(lines)
