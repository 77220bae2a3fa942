"""What of this process's environment a program on the host is given: what it needs to find its way, and no secrets."""

import os
from collections.abc import Mapping

INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")


def surroundings(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The few variables that every program gets, and what its definition adds."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(more or {})
