"""A private Docker engine for the tests: one for all test workers of a run, in a folder of its own, gone with them."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from carrel.execution.docker_engine import connect, pack_image
from carrel.execution.portable_python import shared_libraries

IMAGE = "carrel-tests:1"
RUNNING_ENGINE = "CARREL_TESTS_ENGINE"
"""The variable with the address of an engine that runs already, such as Podman's; without it one is started."""
_STARTS = 60.0
_IN_IMAGE = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


_AFTERWARDS = """
exec 9> "$2/used"; flock -x 9
kill -TERM "$1"
while [ -e "/proc/$1" ] && ! grep -q "State:.Z" "/proc/$1/status"; do sleep 0.1; done
rm -rf "$2/ready" "$2/data" "$2/exec"
"""


class NoEngine(Exception):
    """No engine can run here; the message says why."""


def why_none() -> str | None:
    """Why this machine can run no engine for the tests, or None."""
    if os.geteuid() != 0:
        return "only root can start a private Docker engine"
    if shutil.which("dockerd") is None:
        return "dockerd is not in PATH (Debian: apt-get install docker.io)"
    return None


@contextlib.contextmanager
def shared_engine(folder: Path) -> Iterator[str]:
    """The address of the engine in this folder: started by the first who comes, ended when the last has gone."""
    if (running := os.environ.get(RUNNING_ENGINE)) is not None:
        if connect(running).find_image(IMAGE) is None:
            pack_image(IMAGE, packages=[str(path) for path in _packages()], docker_host=running)
        yield running
        return
    with private_engine(folder) as address:
        yield address


@contextlib.contextmanager
def private_engine(folder: Path) -> Iterator[str]:
    """The same, and never one that runs already: for tests that stop it, by the process in the file `pid`."""
    why = why_none()
    if why is not None:
        raise NoEngine(why)
    folder.mkdir(parents=True, exist_ok=True)
    address = f"unix://{folder}/engine.sock"
    with open(folder / "used", "w") as used:
        with open(folder / "turn", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(used, fcntl.LOCK_SH)
            if not (folder / "ready").exists():
                _start(folder, address)
                (folder / "ready").touch()
        yield address


def _start(folder: Path, address: str) -> None:
    settings: dict[str, object] = {}
    if (runsc := shutil.which("runsc")) is not None:
        arguments = ["--platform=ptrace", "--ignore-cgroups", "--network=none"]
        settings["runtimes"] = {"runsc": {"path": runsc, "runtimeArgs": arguments}}
    (folder / "daemon.json").write_text(json.dumps(settings))
    command = ["dockerd", "--config-file", str(folder / "daemon.json"), "--data-root", str(folder / "data")]
    command += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid"), "-H", address]
    # No network is given to any container here, so none has to be made.
    command += ["--bridge", "none", "--iptables=false", "--ip6tables=false", "--ip-masq=false"]
    with open(folder / "log", "wb") as log:
        # A session of its own: Ctrl-C in the terminal ends the tests, and they end it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
        )
    try:
        _wait_for(process, folder)
        pack_image(IMAGE, packages=[str(path) for path in _packages()], docker_host=address)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    # Each user locks the file; when the last one has ended, in any way, the engine is stopped.
    subprocess.Popen(
        ["/bin/sh", "-c", _AFTERWARDS, "carrel-tests-engine", str(process.pid), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _wait_for(process: subprocess.Popen[bytes], folder: Path) -> None:
    end = time.monotonic() + _STARTS
    while "API listen on" not in (output := (folder / "log").read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > end:
            last = output.strip().splitlines()[-1:] or ["no output"]
            raise NoEngine(f"dockerd does not start: {last[0][:300]}")
        time.sleep(0.05)


def _packages() -> list[Path]:
    """What a Python in the image has beside its library: pytest, and what it needs."""
    found: set[Path] = set()
    for name in _IN_IMAGE:
        distribution = importlib.metadata.distribution(name)
        folder = Path(str(distribution.locate_file("")))
        tops = {Path(file).parts[0] for file in distribution.files or []}
        found |= {folder / top for top in tops if top not in ("..", "__pycache__")}
    return sorted(found)


def containers(address: str) -> list[str]:
    """All that are on the engine, in whatever state."""
    return [container["Id"] for container in connect(address)._api.containers(all=True)]


def make_bare_image(address: str, name: str, programs: list[str], files: dict[str, str] | None = None) -> None:
    """An image from scratch that has only these programs of this machine, as /bin/NAME, and these scripts.

    `python3` is this Python without its library."""
    paths = {program: os.path.realpath(str(shutil.which(program))) for program in programs}
    if "python3" in paths:
        paths["python3"] = os.path.realpath(sys.executable)
    libraries, loader = shared_libraries(list(paths.values()) or ["/bin/sh"])
    with io.BytesIO() as out:
        with tarfile.open(fileobj=out, mode="w", dereference=True) as archive:
            archive.addfile(tarfile.TarInfo("there"))  # An image must have something.
            for program, path in paths.items():
                archive.add(path, f"bin/{program}")
            for path in sorted({*libraries, loader} if paths else ()):
                archive.add(path)
            for path, text in (files or {}).items():
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode = len(text.encode()), 0o755
                archive.addfile(entry, io.BytesIO(text.encode()))
        out.seek(0)
        connect(address).import_image(out, name, {"PATH": "/bin"})
