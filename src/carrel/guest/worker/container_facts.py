"""What the first process of a container finds out about it for the host."""

from __future__ import annotations

import os
import site
import sys
from typing import Any

_OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def killed_for_memory() -> int:
    """How often the kernel has killed a process in this container for lack of memory."""
    for name in _OOM_FILES:
        try:
            with open(name, encoding="ascii") as file:
                rows = [line.split() for line in file]
        except OSError:
            continue
        return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == "oom_kill"), 0)
    return 0


def python_facts() -> dict[str, Any]:
    """What the host must know about this Python to install packages for it."""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = ""
    names = []
    for folder in site.getsitepackages():
        if os.path.isdir(folder):
            names += [name for name in os.listdir(folder) if name.endswith(".dist-info")]
    return {
        "python": sys.executable,
        "version": list(sys.version_info[:3]),
        "machine": os.uname().machine,
        "libc": libc,
        "path": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        "packages": names,
    }
