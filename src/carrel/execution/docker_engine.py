"""A container engine (Docker or Podman), used through its API. Every call blocks until it is answered.

`pack_image` makes an image from this machine's own Python, for engines that cannot reach a registry.
"""

from __future__ import annotations

import functools
import io
import os
import re
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from carrel.errors import EnvironmentFailed, SandboxUnavailable
from carrel.execution.connection import SpawnFailed
from carrel.text import readable_size

LABEL = "carrel.session"
"""The label of every container that carrel creates."""
VOLUME_LABEL = "carrel.volume"
"""The label of the volumes of durable sessions, with the folder of their state; nothing sweeps them."""
ANSWER = 60
"""Seconds within which the engine must answer."""
UNUSED = 600
"""Seconds after which a container that was created and never started counts as abandoned."""
_GONE = 10.0
_MAX_OUTPUT = 2000
"""Characters of the output of a failed build that its error shows."""
OnStep = Callable[[str], None]
"""Gets a line for each step of something that takes long."""
_ENVIRONMENT = ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")


def connect(address: str | None = None, token: str | None = None) -> Engine:
    """The engine at this address, or at DOCKER_HOST; SandboxUnavailable if none answers."""
    environment = () if address is not None else tuple(os.environ.get(name) for name in _ENVIRONMENT)
    return _connect(address, token, environment)


@functools.lru_cache(maxsize=16)
def _connect(address: str | None, token: str | None, environment: tuple[str | None, ...]) -> Engine:
    """One connection is shared while the environment variables that name the engine stay the same."""
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
        raise _unreachable(where, problem) from None
    engine.sweep()
    return engine


def _unreachable(where: str, problem: BaseException) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"no container engine answers at {where}: {_explanation(problem)}. Start Docker or Podman there, or name "
        "another with docker_host or DOCKER_HOST"
    )


class Engine:
    """Shared by all sessions of this process; safe from several threads."""

    def __init__(self, api: Any, where: str) -> None:
        self._api = api
        self.where = where
        self._info: dict[str, Any] | None = None

    def info(self) -> dict[str, Any]:
        """Its version and settings, requested once."""
        if self._info is None:
            self._info = {**self._api.version(), **self._api.info()}
        return self._info

    @property
    def counts_files(self) -> bool:
        """Whether it can limit the number of files on a tmpfs; Podman cannot."""
        return "podman" not in str(self.info().get("Components", "")).lower()

    def version(self) -> str:
        return str(self.info().get("ServerVersion", "?"))

    def has_runtime(self, name: str) -> bool:
        return name in (self.info().get("Runtimes") or {})

    # --- images -----------------------------------------------------------------------------------------------------

    def find_image(self, name: str) -> dict[str, Any] | None:
        """What the engine knows of an image: its Id, Size, Config and more; None if it does not have it."""
        import docker  # noqa: PLC0415

        try:
            return dict(self._api.inspect_image(name))
        except docker.errors.ImageNotFound:
            return None
        except docker.errors.DockerException as problem:
            raise SandboxUnavailable(
                f"the engine at {self.where} cannot inspect the image {name}: {_explanation(problem)}"
            ) from None
        except OSError as problem:
            raise _unreachable(self.where, problem) from None

    def need_image(self, name: str, otherwise: str) -> str:
        """The digest of an image, which is pulled if the engine does not have it.

        SandboxUnavailable ends with the advice `otherwise`."""
        found = self.find_image(name)
        if found is not None:
            return str(found["Id"])
        self.pull(name, otherwise)
        return self.image_id(name)

    def pull(self, name: str, otherwise: str, on_step: OnStep | None = None) -> None:
        """Pull an image, also if there is one of this name; SandboxUnavailable ends with the advice `otherwise`."""
        import docker  # noqa: PLC0415

        got: dict[str, int] = {}
        try:
            tagged = name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"
            for step in self._api.pull(tagged, stream=True, decode=True):
                if "error" in step:
                    raise docker.errors.DockerException(step["error"])
                if step.get("status") == "Downloading" and on_step is not None:
                    got[step.get("id", "")] = int((step.get("progressDetail") or {}).get("current") or 0)
                    on_step(f"pulled {readable_size(sum(got.values()))}")
        except (docker.errors.DockerException, OSError) as problem:
            raise SandboxUnavailable(
                f"the image {name} is not on the engine at {self.where}, and could not be pulled: "
                f"{_explanation(problem)}. {otherwise}"
            ) from None

    def build_image(self, dockerfile: Path, context: Path, name: str, *, timeout: float, on_step: OnStep) -> None:
        """Build an image; EnvironmentFailed has the end of the build's output. `timeout` is for each of its steps."""
        import docker  # noqa: PLC0415

        output, problem = "", ""
        inside = os.path.relpath(dockerfile, context)
        try:
            steps = self._api.build(
                path=str(context),
                dockerfile=str(dockerfile) if inside.startswith("..") else inside,
                tag=name,
                rm=True,
                forcerm=True,
                decode=True,
                timeout=timeout,
                use_config_proxy=False,
                labels={LABEL: "build"},
            )
            for step in steps:
                problem = problem or str(step.get("error", "")).strip()
                line = str(step.get("stream", ""))
                output = (output + line)[-_MAX_OUTPUT:]
                if re.match(r"(?i)(\[\d+/\d+\] )?step \d+/\d+", line):
                    on_step(line.strip())
        except (docker.errors.DockerException, OSError, TypeError) as failure:
            problem = _explanation(failure)
        if not problem and self.find_image(name) is None:
            problem = "the engine ended the build without an image"
        if problem:
            raise EnvironmentFailed(f"no image could be built from {dockerfile}: {problem}\n{output}".rstrip())

    def image_id(self, name: str) -> str:
        """The digest of an image that the engine has."""
        with _explained(f"inspect the image {name}"):
            return str(self._api.inspect_image(name)["Id"])

    def read_folder(self, image: str, folder: str, to: BinaryIO) -> None:
        """Write a folder of an image as a tar archive; nothing of the image is run."""
        import docker  # noqa: PLC0415

        with _explained(f"read {folder} of the image {image}"):
            made = self._api.create_container(image, ["/"], labels={LABEL: "read"}, use_config_proxy=False)
        try:
            with _explained(f"read {folder} of the image {image}"):
                for piece in self._api.get_archive(made["Id"], folder)[0]:
                    to.write(piece)
        except SpawnFailed as problem:
            if isinstance(problem.__context__, docker.errors.NotFound):
                raise EnvironmentFailed(
                    f"the image {image} has no folder {folder}, the workdir of a sample without files of its own; "
                    "name another as environment.workdir"
                ) from None
            raise
        finally:
            self.remove(str(made["Id"]))

    def import_image(self, archive: BinaryIO, name: str, environment: Mapping[str, str]) -> None:
        """Create an image of one layer from the files of a tar archive."""
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
        """A socket to the container's standard input; its output arrives in the engine's frames."""
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
                f"{self.where} is not reached through a socket; forward the engine's socket to this machine",
            )
        # Taken from the client, which would keep it open.
        line = socket.socket(fileno=held.detach())
        if line.family != socket.AF_UNIX:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return line

    def start(self, container: str) -> None:
        with _explained("start the container"):
            self._api.start(container)

    def remove(self, container: str) -> None:
        """Kill and remove a container; returns when it is gone."""
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
            # The engine is removing it already, because it has ended; Podman reports that as a failure.
            time.sleep(0.02)

    # --- volumes ----------------------------------------------------------------------------------------------------

    def has_volume(self, name: str) -> bool:
        import docker  # noqa: PLC0415

        try:
            with _explained(f"inspect the volume {name}"):
                self._api.inspect_volume(name)
        except SpawnFailed as problem:
            if isinstance(problem.__context__, docker.errors.NotFound):
                return False
            raise
        return True

    def make_volumes(self, folders: Mapping[str, str], user: tuple[int, int], image: str, label: str) -> None:
        """Create volumes, by the paths of the folders that they will be, which belong to this user."""
        for name in folders.values():
            with _explained(f"create the volume {name}"):
                self._api.create_volume(name, labels={VOLUME_LABEL: label})
        mounts = [volume_mount(name, at) for at, name in folders.items()]
        # Only a container has the folders to be given away; it is never started.
        container = {"image": image, "command": ["/"], "labels": {LABEL: "volumes"}}
        made = self.create(container, {"mounts": mounts})
        try:
            self.put(made, "/", _folders_of(user, folders))
        finally:
            self.remove(made)

    def remove_volume(self, name: str) -> None:
        """Remove a volume and the containers that have it; returns when it is gone."""
        import docker  # noqa: PLC0415

        self.end_users_of(name)
        try:
            with _explained(f"remove the volume {name}"):
                self._api.remove_volume(name, force=True)
        except SpawnFailed as problem:
            if not isinstance(problem.__context__, docker.errors.NotFound):
                raise

    def end_users_of(self, volume: str) -> None:
        """Remove the containers that have a volume: those of a killed host may not have ended yet."""
        with _explained(f"list the containers with the volume {volume}"):
            found = self._api.containers(all=True, filters={"volume": volume})
        for container in found:
            self.remove(container["Id"])

    def sweep(self, label: str = LABEL, unused: float = UNUSED) -> None:
        """Remove the containers of killed hosts: those that were never started, or were not removed at their end."""
        import docker  # noqa: PLC0415

        try:
            # Podman knows no state `dead`, and refuses the whole question.
            wanted = {"label": label, "status": ["created", "exited", *(["dead"] if self.counts_files else [])]}
            found = self._api.containers(all=True, filters=wanted)
            for container in found:
                if time.time() - _made_at(container["Created"]) > unused:
                    self.remove(container["Id"])
        except (docker.errors.DockerException, OSError, SpawnFailed):
            return  # Another process may do the same at the same time, and no session needs it.


def volume_mount(name: str, at: str) -> dict[str, Any]:
    """The mount of a volume; nothing of the image is copied into it."""
    return {"Type": "volume", "Source": name, "Target": at, "VolumeOptions": {"NoCopy": True}}


def _folders_of(user: tuple[int, int], paths: Iterable[str]) -> bytes:
    """An archive with these folders, owned by a user."""
    with io.BytesIO() as out, tarfile.open(fileobj=out, mode="w") as archive:
        for path in paths:
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            entry.uid, entry.gid = user
            archive.addfile(entry)
        end = archive.offset + 2 * tarfile.BLOCKSIZE
        archive.close()
        return out.getvalue()[:end]  # Podman does not read the padding that Python adds.


@contextmanager
def _explained(step: str) -> Iterator[None]:
    """Raise SpawnFailed with the engine's message."""
    import docker  # noqa: PLC0415

    try:
        yield
    except (docker.errors.DockerException, OSError) as problem:
        raise SpawnFailed(step, None, _explanation(problem)) from None


def _explanation(problem: BaseException) -> str:
    """The engine's explanation, or else the first cause."""
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
    """A plain socket for a TLS connection: one thread copies both directions, because TLS is not safe from two."""
    ours, theirs = socket.socketpair()
    held.setblocking(False)
    threading.Thread(target=_carry, args=(held, theirs), name="carrel-engine", daemon=True).start()
    return ours


def _carry(held: ssl.SSLSocket, theirs: socket.socket) -> None:
    outgoing = b""
    try:
        while True:
            # select does not see what was decrypted already.
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
        return  # either end is gone; the other sees that it is closed
    finally:
        held.close()
        theirs.close()


def _bring_in(held: ssl.SSLSocket, theirs: socket.socket) -> bool:
    """Copy what has arrived; False at the end."""
    try:
        data = held.recv(_CHUNK)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return True
    theirs.sendall(data)
    return bool(data)


def _send(held: ssl.SSLSocket, data: bytes) -> bytes:
    """Send, and return the rest that could not be sent."""
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
"""Programs for the session's commands; those that this machine has are packed."""
_SPARED = {"site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "lib2to3"}
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n",
    "etc/group": "root:x:0:\nagent:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def default_tag() -> str:
    return f"carrel-python:{sys.version_info[0]}.{sys.version_info[1]}"


def pack_image(tag: str | None = None, *, packages: Iterable[str] = (), docker_host: str | None = None) -> str:
    """Make an image of the Python that runs this program and a shell with the usual commands; return its name.

    Nothing is downloaded. `packages` are files and folders that are added to its packages. The image runs on machines
    of the same architecture, as `ContainerConfig(image=…)`."""
    name = tag or default_tag()
    engine = connect(docker_host)
    with io.BytesIO() as archive:
        write_archive(archive, [Path(path) for path in packages])
        archive.seek(0)
        engine.import_image(archive, name, _changes())
    return name


def write_archive(to: BinaryIO, packages: Sequence[Path] = ()) -> None:
    """Write the image's files as a tar archive, each at its path on this machine."""
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
    """The environment of its containers; a Python built with a shared library must find that."""
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
    """The shared libraries of programs, as the loader finds them here."""
    if shutil.which("ldd") is None:
        raise SandboxUnavailable(
            "no image can be packed here: the program ldd is missing, which lists the libraries that Python needs"
        )
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
