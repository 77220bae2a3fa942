"""A container engine, over its API: Docker's, and Podman's socket speaks it too. Every call waits for its answer.

An image can be packed from this machine's own Python, for engines that can reach no registry.
"""

from __future__ import annotations

import functools
import io
import os
import select
import shutil
import socket
import ssl
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from carrel.errors import SandboxUnavailable
from carrel.execution.connection import SpawnFailed

LABEL = "carrel.session"
"""Every container of ours has it."""
ANSWER = 60
"""Seconds that the engine may take for one answer."""
UNUSED = 600
"""Seconds after which a container that was made and never started is taken for left behind."""
_GONE = 10.0
_ENVIRONMENT = ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")


def connect(address: str | None = None, token: str | None = None) -> Engine:
    """The engine at this address, or where DOCKER_HOST says; SandboxUnavailable when none answers."""
    environment = () if address is not None else tuple(os.environ.get(name) for name in _ENVIRONMENT)
    return _connect(address, token, environment)


@functools.lru_cache(maxsize=16)
def _connect(address: str | None, token: str | None, environment: tuple[str | None, ...]) -> Engine:
    """One connection is shared as long as the variables of the environment that name the engine stay the same."""
    try:
        import docker  # noqa: PLC0415 -- an extra, and slow to load
        from docker.utils import kwargs_from_env  # noqa: PLC0415
    except ImportError:
        raise SandboxUnavailable(
            "containers need packages that are not installed; pip install 'carrel-sessions[container]'"
        ) from None
    settings: dict[str, Any] = {"base_url": address} if address is not None else dict(kwargs_from_env())
    where = settings.get("base_url") or "unix:///var/run/docker.sock"
    try:
        api: Any = docker.APIClient(**settings, version="1.40", timeout=ANSWER)
        # The client keeps a connection open for each address, and every container has its own.
        api.headers["Connection"] = "close"
        if token is not None:
            api.headers["Authorization"] = f"Bearer {token}"
        engine = Engine(api, where)
        engine.info()
    except (docker.errors.DockerException, OSError, ValueError) as problem:
        raise SandboxUnavailable(
            f"no container engine answers at {where}: {_explanation(problem)}. Start Docker or Podman there, or name "
            "another with docker_host or DOCKER_HOST"
        ) from None
    engine.sweep()
    return engine


class Engine:
    """Shared by all sessions of this process; safe from several threads."""

    def __init__(self, api: Any, where: str) -> None:
        self._api = api
        self.where = where
        self._info: dict[str, Any] | None = None

    def info(self) -> dict[str, Any]:
        """What it tells of itself, asked once."""
        if self._info is None:
            self._info = {**self._api.version(), **self._api.info()}
        return self._info

    @property
    def counts_files(self) -> bool:
        """Whether it can limit the number of files on a tmpfs; Podman does not let it be said."""
        return "podman" not in str(self.info().get("Components", "")).lower()

    def version(self) -> str:
        return str(self.info().get("ServerVersion", "?"))

    def has_runtime(self, name: str) -> bool:
        return name in (self.info().get("Runtimes") or {})

    # --- images -----------------------------------------------------------------------------------------------------

    def need_image(self, name: str, otherwise: str) -> None:
        """Have it there, fetched where it is not; SandboxUnavailable says what can be done `otherwise`."""
        import docker  # noqa: PLC0415

        try:
            self._api.inspect_image(name)
            return
        except docker.errors.ImageNotFound:
            pass  # fetched below
        except (docker.errors.DockerException, OSError) as problem:
            raise SandboxUnavailable(
                f"the engine at {self.where} does not tell of the image {name}: {_explanation(problem)}"
            ) from None
        try:
            tagged = name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"
            for step in self._api.pull(tagged, stream=True, decode=True):
                if "error" in step:
                    raise docker.errors.DockerException(step["error"])
        except (docker.errors.DockerException, OSError) as problem:
            raise SandboxUnavailable(
                f"the image {name} is not on the engine at {self.where}, and could not be fetched: "
                f"{_explanation(problem)}. {otherwise}"
            ) from None

    def import_image(self, archive: BinaryIO, name: str, environment: Mapping[str, str]) -> None:
        """An image of one layer, the files of a tar archive."""
        changes = [f"ENV {key}={value}" for key, value in environment.items()]
        with _explained("import an image"):
            answer = self._api.import_image(archive, name, changes=changes)  # Podman reads no tag of its own.
        if '"error"' in answer:
            raise SpawnFailed("import an image", None, answer.strip()[-500:])

    # --- containers -------------------------------------------------------------------------------------------------

    def create(self, container: Mapping[str, Any], host: Mapping[str, Any]) -> str:
        with _explained("make the container"):
            made = self._api.create_container(
                **container, host_config=self._api.create_host_config(**host), use_config_proxy=False
            )
        return str(made["Id"])

    def put(self, container: str, folder: str, archive: bytes) -> None:
        with _explained("put the worker's program into the container"):
            self._api.put_archive(container, folder, io.BytesIO(archive))

    def attach(self, container: str) -> socket.socket:
        """A stream socket: what is sent comes to its standard input, what it writes comes in the engine's frames."""
        with _explained("attach to the container"):
            wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            found: Any = self._api.attach_socket(container, params=wanted)
        held = getattr(found, "_sock", found)
        if isinstance(held, ssl.SSLSocket):
            return plain_socket(held)
        if not isinstance(held, socket.socket):
            raise SpawnFailed(
                "attach to the container",
                None,
                f"{self.where} is not reached by a socket; forward the engine's to here",
            )
        # Taken out of the client's hands, which would keep it open for as long as it lives.
        line = socket.socket(fileno=held.detach())
        if line.family != socket.AF_UNIX:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return line

    def start(self, container: str) -> None:
        try:
            with _explained("start the container"):
                self._api.start(container)
        except SpawnFailed as problem:
            if '"python3"' not in str(problem):
                raise
            raise SpawnFailed(
                problem.step, None, f"{problem.message}; the image needs a Python of 3.9 or newer"
            ) from None

    def remove(self, container: str) -> None:
        """End it, whatever it is doing; returns when it is gone."""
        import docker  # noqa: PLC0415

        end = time.monotonic() + _GONE
        while True:
            try:
                self._api.remove_container(container, v=True, force=True)
                return
            except docker.errors.NotFound:
                return
            except docker.errors.APIError as problem:
                if problem.status_code not in (409, 500) or time.monotonic() > end:
                    raise SpawnFailed("remove the container", None, _explanation(problem)) from None
            except OSError as problem:
                raise SpawnFailed("remove the container", None, _explanation(problem)) from None
            # The engine is at it already: it removes those that end by themselves, which Podman tells as a failure.
            time.sleep(0.02)

    def sweep(self, label: str = LABEL, unused: float = UNUSED) -> None:
        """Remove what a host that was killed has left: containers that were made and not started, or did not go."""
        import docker  # noqa: PLC0415

        wanted = {"label": label, "status": ["created", "exited", "dead"]}
        try:
            found = self._api.containers(all=True, filters=wanted)
            for container in found:
                if time.time() - _made_at(container["Created"]) > unused:
                    self.remove(container["Id"])
        except (docker.errors.DockerException, OSError, SpawnFailed):
            return  # Others may do the same at the same time, and no session waits for it.


@contextmanager
def _explained(step: str) -> Iterator[None]:
    """SpawnFailed with what the engine said."""
    import docker  # noqa: PLC0415

    try:
        yield
    except (docker.errors.DockerException, OSError) as problem:
        raise SpawnFailed(step, None, _explanation(problem)) from None


def _explanation(problem: BaseException) -> str:
    """In a few words: what the engine explained, or else the first cause."""
    inner = next((inner for inner in problem.args if isinstance(inner, BaseException)), None)
    explained = getattr(problem, "explanation", None)
    if inner is not None and not explained:
        return _explanation(inner)
    text = str(explained or getattr(problem, "strerror", None) or problem)
    return text.strip().rstrip(".")[:1000]


def _made_at(created: int | str) -> float:
    return float(created) if isinstance(created, int) else datetime.fromisoformat(created).timestamp()


_CHUNK = 1 << 16


def plain_socket(held: ssl.SSLSocket) -> socket.socket:
    """The other end of it is carried by a thread, as long as both are open. One thread: TLS bears no two at once."""
    ours, theirs = socket.socketpair()
    held.setblocking(False)
    threading.Thread(target=_carry, args=(held, theirs), name="carrel-engine", daemon=True).start()
    return ours


def _carry(held: ssl.SSLSocket, theirs: socket.socket) -> None:
    outgoing = b""
    try:
        while True:
            # What has been decrypted already is not seen by select.
            wait = 0 if held.pending() else None
            select.select([held] if outgoing else [held, theirs], [held] if outgoing else [], [], wait)
            if not _bring_in(held, theirs):
                return
            if not outgoing:
                read, _, _ = select.select([theirs], [], [], 0)
                outgoing = theirs.recv(_CHUNK) if read else b""
                if read and not outgoing:
                    return
            outgoing = _send(held, outgoing)
    except OSError:
        return  # either end is gone, which the other sees by the close
    finally:
        held.close()
        theirs.close()


def _bring_in(held: ssl.SSLSocket, theirs: socket.socket) -> bool:
    """What has come; False at the end."""
    try:
        data = held.recv(_CHUNK)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return True
    theirs.sendall(data)
    return bool(data)


def _send(held: ssl.SSLSocket, data: bytes) -> bytes:
    """What could not be sent now."""
    try:
        return data[held.send(data) :] if data else b""
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return data


# --- an image of this machine's Python -------------------------------------------------------------------------------

PROGRAMS = (
    *("sh", "bash", "env", "true", "false", "echo", "printf", "test", "expr", "sleep", "date", "id", "uname", "kill"),
    *("cat", "head", "tail", "tr", "cut", "sort", "uniq", "wc", "tee", "grep", "sed", "awk", "xargs", "seq", "timeout"),
    *("ls", "cp", "mv", "rm", "ln", "mkdir", "rmdir", "touch", "chmod", "stat", "find", "du", "df", "mktemp", "ps"),
    *("basename", "dirname", "readlink", "realpath", "sha256sum", "tar", "gzip", "diff", "patch", "pwd", "nproc"),
)
"""What a session's commands may count on; those that this machine has are packed."""
_SPARED = {"site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "lib2to3"}
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n",
    "etc/group": "root:x:0:\nagent:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def default_tag() -> str:
    return f"carrel-python:{sys.version_info[0]}.{sys.version_info[1]}"


def pack_image(tag: str | None = None, *, packages: Iterable[str] = (), docker_host: str | None = None) -> str:
    """Make an image of the Python that runs this and a shell with the usual commands; gives its name.

    Nothing is fetched. `packages` are files and folders that are put beside its packages. It runs on machines of the
    same architecture, as `ContainerConfig(image=…)`."""
    name = tag or default_tag()
    engine = connect(docker_host)
    with io.BytesIO() as archive:
        write_archive(archive, [Path(path) for path in packages])
        archive.seek(0)
        engine.import_image(archive, name, _changes())
    return name


def write_archive(to: BinaryIO, packages: Sequence[Path] = ()) -> None:
    """The image's files as a tar archive, each at the path where this machine has it."""
    python = os.path.realpath(sys.executable)
    library = Path(sysconfig.get_path("stdlib"))
    modules = _modules(library)
    commands = {name: path for name in PROGRAMS if (path := shutil.which(name)) is not None}
    extensions = [path for path in modules if path.endswith(".so")]
    needed = _libraries([python, *commands.values(), *extensions])
    with tarfile.open(fileobj=to, mode="w", dereference=True) as archive:
        for path in sorted({python, *modules, *needed}):
            archive.add(path)
        for name, path in commands.items():
            archive.add(os.path.realpath(path), f"bin/{name}")
        for name in ("python", "python3"):
            _link(archive, f"usr/local/bin/{name}", python)
        _link(archive, "usr/bin", "../bin")
        for name, text in _FILES.items():
            _file(archive, name, text)
        for package in packages:
            archive.add(package, str(library / "site-packages" / package.name), filter=_without_bytecode)


def _changes() -> Mapping[str, str]:
    """What a container of it starts with; a Python built with a shared library must find it."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LD_LIBRARY_PATH": f"{sys.base_prefix}/lib"}


def _modules(library: Path) -> list[str]:
    found = []
    for place, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _SPARED and not name.startswith("config-")]
        found += [
            os.path.join(place, name) for name in files if not name.startswith("_tkinter") and ".opt-" not in name
        ]
    return found


def _libraries(programs: Sequence[str]) -> set[str]:
    """What programs need besides themselves, as the loader finds it here."""
    if shutil.which("ldd") is None:
        raise SandboxUnavailable("no image can be packed here: there is no ldd to ask which libraries Python needs")
    listed = subprocess.run(["ldd", *programs], capture_output=True, check=False, text=True).stdout
    words = {word for line in listed.splitlines() if not line.endswith(":") for word in line.split()}
    return {word for word in words if word.startswith("/") and os.path.exists(word)}


def _link(archive: tarfile.TarFile, name: str, to: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, to
    archive.addfile(entry)


def _file(archive: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    archive.addfile(entry, io.BytesIO(text.encode()))


def _without_bytecode(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry
