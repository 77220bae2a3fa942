"""An image packed from this machine's own Python: for engines that can reach no registry."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from carrel.errors import SandboxUnavailable
from carrel.execution.docker_engine import connect

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
