"""Python environments: the host's own, or virtualenvs, which are cached and created once by uv or venv and pip."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import site
import sys
import sysconfig
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from carrel.errors import ConfigurationError, EnvironmentFailed
from carrel.execution import temp_dirs
from carrel.processes import run_on_host

READY = "carrel-ready.json"
_FACTS = """
import json, sys, sysconfig
folders = [sys.prefix, sys.base_prefix, sys.base_exec_prefix]
packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
print(json.dumps({"folders": folders, "packages": packages, "version": list(sys.version_info[:3])}))
"""
_LOCK_PAUSE = 0.02
_OLDEST = [3, 9]


@dataclass(frozen=True)
class Environment:
    """An interpreter, the folders it needs, and where its packages are."""

    python: str
    folders: tuple[str, ...]
    packages: tuple[str, ...] = ()
    own: Path | None = None
    """A folder that only one session has, to be removed with it."""


@functools.cache
def host_environment() -> Environment:
    """The interpreter that runs this program; nothing has to be made."""
    folders = _folders([sys.prefix, sys.base_prefix, sys.base_exec_prefix], sys.executable)
    return Environment(sys.executable, folders, tuple(site.getsitepackages()))


def _folders(named: list[str], python: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*named, os.path.dirname(os.path.dirname(os.path.realpath(python)))]))


async def shared_environment(home: Path, version: str | None, words: Sequence[str], name: str) -> Environment:
    """With packages that were fixed before it was made, for all sessions that want the same ones; none is added to it.

    `words` are the arguments for uv, and `name` says what they come to. It is a link to a folder that is made under
    another name each time: when a process is killed while it makes one, its uv may go on writing there for a while."""
    wanted = json.dumps([version or sys.executable, sys.version_info[:2], name])
    link = home.absolute() / "environments" / f"python-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
    found = _ready_behind(link)
    if found is not None:
        return found
    _make_parent(link)
    async with locked(link.with_name(f"{link.name}.lock")):
        found = _ready_behind(link)
        if found is None:
            link.unlink(missing_ok=True)
            for left in link.parent.glob(f"{link.name}-*"):
                with contextlib.suppress(OSError):  # such a uv still writes there: the next one removes it
                    temp_dirs.remove(left)
            folder = link.with_name(f"{link.name}-{uuid.uuid4().hex[:8]}")
            found = await _make(folder, version, words)
            link.symlink_to(folder.name)
        return found


def _ready_behind(link: Path) -> Environment | None:
    return _ready(link.with_name(os.readlink(link))) if link.is_symlink() else None


async def environment_at(folder: Path, version: str | None) -> Environment:
    """A virtualenv where a person wants it, or has it already; what is something else is left alone."""
    folder = folder.absolute()
    found = _ready(folder)
    if found is None and folder.exists() and any(folder.iterdir()):
        if not os.access(folder / "bin" / "python", os.X_OK) or not (folder / "pyvenv.cfg").exists():
            raise ConfigurationError(f"venv_path is {folder}, which is neither empty nor a virtualenv; name another")
        found = await _marked(folder)
    if found is None:
        _make_parent(folder)
        async with locked(folder.with_name(f"{folder.name}.lock")):
            found = _ready(folder) or await _make(folder, version)
    if version is not None and re.fullmatch(r"[\d.]+", version):
        has = json.loads((folder / READY).read_text(encoding="utf-8")).get("version", [])
        if has[: version.count(".") + 1] != [int(part) for part in version.split(".") if part]:
            is_now = ".".join(map(str, has))
            raise ConfigurationError(f"venv_path is {folder}, a virtualenv of Python {is_now}; {version} is wanted")
    return found


async def own_environment(version: str | None, words: Sequence[str]) -> Environment:
    """A virtualenv for one session, thrown away with it."""
    folder = temp_dirs.new_folder("environment")
    try:
        return replace(await _make(folder / "venv", version, words), own=folder)
    except BaseException:
        temp_dirs.remove(folder)
        raise


def _make_parent(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise EnvironmentFailed(f"no virtualenv can be kept in {folder.parent}: {problem.strerror}") from None


def _ready(folder: Path) -> Environment | None:
    """What is there, if it was made whole and made here: a virtualenv that was moved does not work."""
    try:
        facts = json.loads((folder / READY).read_text(encoding="utf-8"))
        python = str(folder / "bin" / "python")
        if facts["folders"][0] != str(folder) or not os.access(python, os.X_OK):
            return None
        return Environment(python, tuple(facts["folders"]), tuple(facts["packages"]))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


@asynccontextmanager
async def locked(file: Path) -> AsyncIterator[None]:
    """The lock goes with the process that holds it, however it ends."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise EnvironmentFailed(
            f"the session's Python cannot be kept in {file.parent}: {problem.strerror}; use a base you may write to"
        ) from None
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)


def refuse_path_separator(folder: Path) -> None:
    if os.pathsep in str(folder):
        raise EnvironmentFailed(
            f"no packages can be kept in {folder}: their programs would not be found, as a list of folders (PATH) is"
            f" divided by {os.pathsep!r}; use another folder"
        )


async def _make(folder: Path, version: str | None, words: Sequence[str] = ()) -> Environment:
    refuse_path_separator(folder)
    temp_dirs.remove(folder)  # What is there without its mark was left half made.
    if find_uv() is not None:
        await uv("venv", "--quiet", "--no-project", "--python", version or sys.executable, str(folder))
    else:
        await output([_find_python(version), "-m", "venv", "--without-pip", "--symlinks", str(folder)])
    if words:
        # Relative paths in the settings start at the program's folder.
        await install("--python", str(folder / "bin" / "python"), *words, folder=os.getcwd())
    return await _marked(folder)


async def _marked(folder: Path) -> Environment:
    python = str(folder / "bin" / "python")
    facts = json.loads(await output([python, "-I", "-c", _FACTS]))
    if facts["version"] < _OLDEST:
        has, wanted = (".".join(map(str, version)) for version in (facts["version"], _OLDEST))
        raise EnvironmentFailed(f"{folder} has Python {has}; {wanted} is the oldest that code can run in")
    facts["folders"] = _folders([str(folder), *facts["folders"]], python)
    facts["packages"] = list(dict.fromkeys(facts["packages"]))
    mark = folder / f"{READY}.new"
    mark.write_text(json.dumps(facts), encoding="utf-8")
    mark.replace(folder / READY)
    return Environment(python, tuple(facts["folders"]), tuple(facts["packages"]))


_MOST_SAID = 2000
_LONGEST = 30 * 60.0
"""Seconds. It gives up by itself where a network does not answer; what it builds from source may never end."""
_CERTIFICATE = re.compile(r"invalid peer certificate|certificate.verify.failed|SSLCertVerificationError", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"error sending request|dns error|client error \(connect\)|connection refused|network is unreachable"
    r"|operation timed out|connect timeout|tunnel error|407 proxy|proxyerror|name resolution|newconnectionerror",
    re.IGNORECASE,
)
NEUTRAL = "/"
"""Where it runs: no folder that code inside may write to, from which uv would take settings."""


@functools.cache
def find_uv() -> str | None:
    """Return the path of uv: of the package, else on PATH."""
    try:
        import uv as package  # noqa: PLC0415 -- an extra
    except ImportError:
        return shutil.which("uv")
    return str(package.find_uv_bin())


@functools.cache
def _find_pip() -> list[str] | None:
    """Return the command of pip: the one beside this Python, else the one that Python brings for virtualenvs."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    bundled = importlib.util.find_spec("ensurepip")
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]
    if bundled is not None and bundled.origin is not None:
        folders.append(os.path.join(os.path.dirname(bundled.origin), "_bundled"))
    wheels = [wheel for folder in folders if folder for wheel in sorted(Path(folder).glob("pip-*.whl"))]
    return [sys.executable, str(wheels[-1] / "pip")] if wheels else None


@functools.cache
def has_installer() -> bool:
    """Return whether packages can be installed on this machine: with uv or with pip."""
    return find_uv() is not None or _find_pip() is not None


def _find_python(version: str | None) -> str:
    if version is None or version in (f"{sys.version_info[0]}.{sys.version_info[1]}", sys.version.partition(" ")[0]):
        return sys.executable
    found = shutil.which(version if "/" in version else f"python{version}")
    if found is None:
        raise EnvironmentFailed(
            f"there is no Python {version} on PATH; pip install 'carrel-sessions[uv]' lets carrel download it"
        )
    return found


_PIP_OPTIONS = {
    "--quiet": ["--quiet"],
    "--no-index": ["--no-index"],
    "--no-build": ["--only-binary", ":all:"],
    "--compile-bytecode": ["--compile"],
    "--reinstall": ["--force-reinstall"],
}
"""Options of `uv pip install`, and what pip calls them."""
_PIP_VALUES = {
    "--find-links": "--find-links",
    "--target": "--target",
    "--constraints": "--constraint",
    "--requirements": "--requirement",
}


async def install(*words: str, folder: str = NEUTRAL) -> None:
    """Run `uv pip install` with these words, or pip where there is no uv; EnvironmentFailed has what it printed."""
    if find_uv() is not None:
        await uv("pip", "install", "--quiet", *words, folder=folder)
        return
    pip = _find_pip()
    if pip is None:
        raise EnvironmentFailed("packages cannot be installed without uv or pip; pip install 'carrel-sessions[uv]'")
    rest, python, options = list(words), sys.executable, ["--quiet", "--disable-pip-version-check", "--no-input"]
    while rest and rest[0].startswith("--"):
        word = rest.pop(0)
        if word == "--":
            break
        if word == "--python":
            python = rest.pop(0)
        elif word in _PIP_OPTIONS:
            options += _PIP_OPTIONS[word]
        elif word in _PIP_VALUES:
            options += [_PIP_VALUES[word], rest.pop(0), *(["--upgrade"] if word == "--target" else [])]
        else:
            raise EnvironmentFailed(f"installing with {word} needs uv; pip install 'carrel-sessions[uv]'")
    try:
        await output([*pip, "--python", python, "install", *options, *(["--", *rest] if rest else [])], folder)
    except EnvironmentFailed as problem:
        raise EnvironmentFailed(f"{problem}{network_advice(str(problem))}") from None


async def uninstall(python: str, target: Path, names: Sequence[str]) -> None:
    """Remove packages from a folder; EnvironmentFailed has what uv printed."""
    if find_uv() is not None:
        await uv("pip", "uninstall", "--quiet", "--python", python, "--target", str(target), "--", *names)
        return
    await asyncio.to_thread(_remove_packages, target, {normal_name(name) for name in names})


def _remove_packages(target: Path, names: set[str]) -> None:
    """Remove the files that the RECORDs of these packages list: pip cannot uninstall from a target folder."""
    from importlib.metadata import distributions  # noqa: PLC0415 -- slow to load, and needed without uv only

    for package in distributions(path=[str(target)]):
        if normal_name(package.metadata["Name"]) not in names:
            continue
        for file in package.files or ():
            path = Path(os.path.abspath(target / file))
            if target in path.parents:  # A RECORD is not trusted to stay in its folder.
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty yet
                    if path.parent != target:
                        path.parent.rmdir()


def normal_name(name: str) -> str:
    """Return the one spelling that stands for all spellings of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


async def uv(*words: str, folder: str = NEUTRAL) -> None:
    """Run it; EnvironmentFailed has what it output.

    What it is set to comes from the host's environment (`UV_…`) and the user's and the machine's own uv.toml: one that
    happens to lie in a folder of the program's says nothing. Relative paths are those of `folder`."""
    # In the neutral folder uv finds no project, so that nothing but the user's own settings is read.
    settings = [] if folder == NEUTRAL or os.environ.get("UV_CONFIG_FILE") else ["--no-config"]
    try:
        await output([find_uv() or "uv", *words[:1], *settings, *words[1:]], folder)
    except EnvironmentFailed as problem:
        raise EnvironmentFailed(f"{problem}{network_advice(str(problem))}") from None


def network_advice(printed: str) -> str:
    """Which environment variables let an installer that printed this reach its index, and where they are set; ""
    where it failed for another reason."""
    if _CERTIFICATE.search(printed):
        advice = (
            "the certificate of the package index is not trusted: set SSL_CERT_FILE to the file with the certificates "
            "of your network"
        )
    elif _UNREACHABLE.search(printed):
        advice = (
            "the package index cannot be reached: set HTTPS_PROXY (and HTTP_PROXY, NO_PROXY) to your network's proxy, "
            "or UV_INDEX_URL to an index that can be reached"
        )
    else:
        return ""
    return (
        f"\n{advice}, in the environment of the program that uses carrel. An MCP client passes few variables on to the "
        'servers it starts: where carrel runs as an MCP server, set them under "env" in its entry of the client\'s '
        "configuration"
    )


async def output(command: list[str], folder: str | None = None, longest: float = _LONGEST) -> bytes:
    """What a program prints; a caller that is cancelled takes it with him, and what it has started."""
    name = os.path.basename(command[0])
    done = await run_on_host(command, cwd=folder, env=_environment(), timeout=longest)
    if done.timed_out:
        raise EnvironmentFailed(f"{name} did not end within {longest / 60:g} minutes and was given up")
    if done.exit_code != 0:
        printed = done.stderr.strip() or done.stdout.decode("utf-8", "replace").strip()
        words = [name, *(word for word in command[1:4] if word.isalpha())]
        raise EnvironmentFailed(f"{' '.join(words)} failed: {printed[-_MOST_SAID:]}")
    return done.stdout


def _environment() -> dict[str, str]:
    """The host's own, without the virtualenv that the host happens to be in; its paths hold in any folder."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    if kept.get("UV_LINK_MODE") == "symlink":
        del kept["UV_LINK_MODE"]  # the links would lead to its cache, which is not there where code runs
    for name in ("UV_CONFIG_FILE", "UV_CACHE_DIR"):
        if kept.get(name):
            kept[name] = os.path.abspath(kept[name])
    if not kept.get("UV_CACHE_DIR") and not _may_make(_cache()):
        kept.setdefault("UV_NO_CACHE", "1")  # a service has no folder of its own, and uv would give up
    return kept


def _cache() -> str:
    """Where uv keeps what it downloaded, unless it is set elsewhere."""
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return os.path.join(os.path.expanduser(above), "uv")


def _may_make(folder: str) -> bool:
    """Whether a folder can be written, or made where it is not there yet."""
    while not os.path.lexists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return os.access(folder, os.W_OK | os.X_OK)
