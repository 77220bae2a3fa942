"""Settings of a session in a container in, what the engine is asked for out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carrel.execution.settings import ContainerConfig, Mount

PROGRAM = "/opt/carrel"
"""Where the worker's program is, on a volume that goes with the container."""
PACKAGES = "/opt/packages"
FOR_COMMANDS = f"{PROGRAM}/packages.path"
"""What Python programs that are run as commands have as their PYTHONPATH; beside it, `packages` leads to those."""
HOME = "/home/agent"
USER = "1000:1000"
MIB = 1024 * 1024


def image_of(config: ContainerConfig) -> str:
    return config.image or f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim"


def container_of(config: ContainerConfig, user: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """What it is, wherever it runs."""
    return {
        "image": image_of(config),
        "entrypoint": ["python3", "-I", PROGRAM],
        "hostname": config.hostname,
        "user": user,
        "stdin_open": True,
        # Its first process takes no other, so that code inside cannot end it.
        "stop_signal": "SIGKILL",
        "working_dir": "/",
        "volumes": [PROGRAM],
        "labels": dict(labels),
    }


def host_of(config: ContainerConfig, *, counts_files: bool = True) -> dict[str, Any]:
    """What the engine's machine gives it, and what not; `counts_files` where the engine can limit their number."""
    limits = config.limits
    # Whoever the code is may write there; an owner cannot be named to every engine.
    own = "rw,exec,nosuid,nodev,mode=1777"
    own += "" if limits.disk is None else f",size={limits.disk}"
    own += "" if limits.files is None or not counts_files else f",nr_inodes={limits.files}"
    tmpfs = dict.fromkeys(("/tmp", HOME, PACKAGES), own)
    mounts = list(config.mounts)
    if config.workspace is not None and config.workspace_mode != "overlay":
        mounts.append(Mount(source=config.workspace, at=config.workspace_at, mode=config.workspace_mode))
    else:
        tmpfs[config.workspace_at] = own
    asked = {
        "network_mode": config.network if isinstance(config.network, str) else "default" if config.network else "none",
        "read_only": True,
        "tmpfs": tmpfs,
        "mounts": [_bind(mount) for mount in mounts],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "auto_remove": True,
        # What it says is the line to the host, and nothing for a log.
        "log_config": {"type": "none", "config": {}},
        "pids_limit": limits.processes,
        "mem_limit": limits.memory,
        # Swap would only put off the end.
        "memswap_limit": limits.memory,
        "nano_cpus": None if limits.cpus is None else int(limits.cpus * 1e9),
        "runtime": config.runtime,
    }
    if limits.open_files is not None:
        asked["ulimits"] = [{"name": "nofile", "soft": limits.open_files, "hard": limits.open_files}]
    return {name: value for name, value in asked.items() if value is not None}


def _bind(mount: Mount) -> dict[str, Any]:
    """Not as `source:at:mode`, for which an engine makes what is missing, and which no colon may be in."""
    source = str(Path(mount.source).absolute())
    return {"Type": "bind", "Source": source, "Target": mount.at, "ReadOnly": mount.mode == "ro"}


def environment_of(config: ContainerConfig, path: str) -> dict[str, str]:
    """What the code finds, on top of what the image sets; `path` is the image's own."""
    own = {"HOME": HOME, "USER": "agent", "LOGNAME": "agent", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    own |= {"PATH": f"{path}:{PACKAGES}/bin", "PYTHONPATH": FOR_COMMANDS}
    return {**own, **config.env}


def user_of(config: ContainerConfig) -> str:
    """Who the code is; in a folder of the machine, whoever the folder belongs to."""
    if config.user is not None:
        return config.user if ":" in config.user else f"{config.user}:{config.user}"
    if config.workspace is not None and config.workspace_mode != "overlay":
        owner = Path(config.workspace).stat()
        return f"{owner.st_uid}:{owner.st_gid}"
    return USER


def platform_of(facts: Mapping[str, Any]) -> str:
    """What uv calls the platform that a Python inside has told of."""
    machine, libc = str(facts.get("machine", "x86_64")), str(facts.get("libc", ""))
    if not libc.startswith("glibc 2."):
        return f"{machine}-unknown-linux-musl"
    minor = libc.removeprefix("glibc 2.").partition(".")[0]
    has = int(minor) if minor.isdigit() else 17
    known = max((number for number in (17, 28, *range(31, 41)) if number <= has), default=17)
    return f"{machine}-manylinux_2_{known}"
