"""The settings of a container, as its engine takes them, from those of an executor."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carrel.execution.config import ContainerConfig, Mount
from carrel.execution.container_transport import PACKAGES
from carrel.execution.docker_engine import volume_mount

PROGRAM = "/opt/carrel"
"""The folder of the worker's program, on a volume that is removed with the container."""
FOR_COMMANDS = f"{PROGRAM}/packages.path"
"""The PYTHONPATH of Python programs that are run as commands; beside it, the link `packages` leads to the packages."""
HOME = "/home/agent"
USER = "1000:1000"
MIB = 1024 * 1024
_PROCESSES = 32_768
"""Processes of one user in all containers of Podman; `pids_limit` is that of the session."""


def image_of(config: ContainerConfig) -> str:
    return config.image or f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim"


def container_of(config: ContainerConfig, user: str, python: Sequence[str]) -> dict[str, Any]:
    """The settings of the container itself; `python` are the words that start its Python."""
    return {
        "image": image_of(config),
        "entrypoint": [*python, "-I", PROGRAM],
        "hostname": config.hostname,
        "user": user,
        "stdin_open": True,
        # The first process handles no other signal, so that code cannot end it.
        "stop_signal": "SIGKILL",
        "working_dir": "/",
        "volumes": [PROGRAM],
    }


def host_of(
    config: ContainerConfig, *, counts_files: bool = True, volumes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The settings of the container on its host; `counts_files` where the engine can limit the number of files.

    `volumes` are those that take the place of folders in memory, by path."""
    limits = config.limits
    own = "rw,exec,nosuid,nodev,mode=1777"
    own += "" if limits.disk is None else f",size={limits.disk}"
    own += "" if limits.files is None or not counts_files else f",nr_inodes={limits.files}"
    uid, _, gid = user_of(config).partition(":")
    # Where the image has a folder, runc gives the mount its mode, so the owner must be the session's user; Podman would
    # also copy what is in it.
    owned = own + (f",uid={uid},gid={gid}" if counts_files else ",notmpcopyup,U")
    tmpfs = {**dict.fromkeys(("/tmp", HOME, PACKAGES), own), **dict.fromkeys(config.writable, owned)}
    mounts = list(config.mounts)
    if config.workspace is not None and config.workspace_mode != "overlay":
        mounts.append(Mount(source=config.workspace, at=config.workspace_at, mode=config.workspace_mode))
    else:
        tmpfs[config.workspace_at] = owned
    for path in volumes or {}:
        tmpfs.pop(path, None)
    settings = {
        "network_mode": config.network if isinstance(config.network, str) else "default" if config.network else "none",
        "read_only": True,
        "tmpfs": tmpfs,
        "mounts": [
            *(_bind(mount) for mount in mounts),
            *(volume_mount(name, at) for at, name in (volumes or {}).items()),
        ],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "auto_remove": True,
        # Its output is the connection to the host, and not a log.
        "log_config": {"type": "none", "config": {}},
        "pids_limit": limits.processes,
        "mem_limit": limits.memory,
        # Swap would only delay the end.
        "memswap_limit": limits.memory,
        "nano_cpus": None if limits.cpus is None else int(limits.cpus * 1e9),
        "runtime": config.runtime,
    }
    if limits.open_files is not None:
        bounds = {"nofile": limits.open_files}
        if not counts_files:
            # Podman would add one of a million processes, which only a host with CAP_SYS_RESOURCE can set.
            bounds["nproc"] = _PROCESSES
        settings["ulimits"] = [{"name": name, "soft": most, "hard": most} for name, most in bounds.items()]
    return {name: value for name, value in settings.items() if value is not None}


def _bind(mount: Mount) -> dict[str, Any]:
    """Not as `source:at:mode`, which allows no colon in a path, and creates missing folders."""
    source = str(Path(mount.source).absolute())
    return {"Type": "bind", "Source": source, "Target": mount.at, "ReadOnly": mount.mode == "ro"}


def environment_of(config: ContainerConfig, path: str, *, with_packages: bool = True) -> dict[str, str]:
    """Environment variables in addition to those of the image; `path` is the image's PATH."""
    own = {"HOME": HOME, "USER": "agent", "LOGNAME": "agent", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    own |= {"PATH": f"{path}:{PACKAGES}/bin", "PYTHONPATH": FOR_COMMANDS} if with_packages else {"PATH": path}
    return {**own, **config.env}


def user_of(config: ContainerConfig) -> str:
    """The user that code runs as; with a workspace on the host, the owner of that folder."""
    if config.user is not None:
        return config.user if ":" in config.user else f"{config.user}:{config.user}"
    if config.workspace is not None and config.workspace_mode != "overlay":
        owner = Path(config.workspace).stat()
        return f"{owner.st_uid}:{owner.st_gid}"
    return USER
