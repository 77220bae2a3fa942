"""What a session is put together from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from carrel.conversation.store import SessionStore
from carrel.errors import ExecutorClosed
from carrel.execution.executor import Handler
from carrel.library.artifacts import ArtifactStore
from carrel.library.deps import Deps
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.library.workflows import WorkflowLibrary
from carrel.storage.base import Store


@runtime_checkable
class StorageBackend(Protocol):
    """One place where everything of a program's sessions is kept."""

    store: Store

    def get_session_store(self, durability: Literal["os", "fsync"] = "os") -> SessionStore:
        """The conversations kept here; the same object each time."""

    def get_workflow_library(self) -> WorkflowLibrary:
        """The workflows kept here; the same object each time."""

    def get_artifact_store(self) -> ArtifactStore:
        """The artifacts kept here; the same object each time."""

    async def close(self) -> None:
        """Let go of files and connections; twice is harmless."""


@dataclass
class Library:
    """What a session has at hand."""

    tools: ToolRegistry
    workflows: WorkflowLibrary
    artifacts: ArtifactStore
    deps: Deps
    secrets: Secrets


NAMES = ("tools", "tools._names", "workflows", "skills", "artifacts", "deps")
"""What code finds: each is answered by the session."""


def unanswered() -> dict[str, Handler]:
    """For an executor that is started before its session is there: the names, and nobody behind them yet."""

    async def nobody(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        raise ExecutorClosed(f"{name} cannot be answered: the session has not begun")

    return dict.fromkeys(NAMES, nobody)
