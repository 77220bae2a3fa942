"""Where carrel keeps things on this machine."""

import os
from pathlib import Path


def resolve_carrel_home() -> Path:
    """`$CARREL_HOME`, else `~/.carrel`; always absolute, never created here."""
    given = os.environ.get("CARREL_HOME", "").strip()
    return Path(os.path.abspath(os.path.expanduser(given or "~/.carrel")))


def resolve_sessions_dir() -> Path:
    """The folder with one folder per session."""
    return resolve_carrel_home() / "sessions"
