"""The kinds of executor that the one suite is run on, and where they differ and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from carrel.execution.executor import Executor, Handler
from carrel.execution.in_process import InProcessExecutor
from carrel.execution.settings import InProcessConfig, SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor

KINDS = ("in-process", "subprocess", "sandboxed")

DIFFERENCES: dict[tuple[str, str], str] = {
    ("in-process", "survives the end of its process"): "its process is the host's own",
    (
        "in-process",
        "output below Python",
    ): "what child processes and C code write goes to the host's own output",
    ("in-process", "output of threads"): "Python does not say to which run a thread belongs",
    ("in-process", "works in its workspace"): "the current folder belongs to the whole process",
    ("in-process", "stops anything"): "a thread that does not come back from C cannot be stopped, only left behind",
    ("in-process", "only its own environment variables"): "they belong to the whole process",
    ("in-process", "the workspace stays as it was"): "there is nothing to keep changes apart",
    ("in-process", "forks"): "a part of a process cannot be forked",
    ("subprocess", "forks"): "without a sandbox two sessions cannot have different files at the same path",
    ("in-process", "memory of its own"): "a bomb would take the host with it",
    ("in-process", "packages of its own"): "a process has one import path and one table of modules",
    ("subprocess", "a file system of its own"): "the sandbox is off",
    ("in-process", "a file system of its own"): "it is the host's",
}
"""(kind, promise): why this kind does not give it. A test of that promise is not made for that kind."""


def make(kind: str, handlers: dict[str, Handler] | None = None, **settings: Any) -> Executor:
    """An executor of this kind; settings that only the other kind knows are not for it."""
    if kind == "in-process":
        known = {name: value for name, value in settings.items() if name in InProcessConfig.__dataclass_fields__}
        return InProcessExecutor(InProcessConfig(**known), handlers=handlers)
    mode = "off" if kind == "subprocess" else "required"
    return SubprocessExecutor(SubprocessConfig(**{"sandbox": mode, **settings}), handlers=handlers)


def files_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
