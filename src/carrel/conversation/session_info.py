"""A session as a typed object, and the metadata of the log that holds it."""

import os
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from carrel.conversation.messages import SessionMeta
from carrel.conversation.metadata import date_of, whole_path

DEFAULT_TITLE = "New Session"


def now() -> datetime:
    return datetime.now(UTC)


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class SessionTime(BaseModel):
    """When a session was made, last changed, and put away; all UTC."""

    created: datetime = Field(default_factory=now)
    updated: datetime = Field(default_factory=now)
    archived: datetime | None = None


class SessionInfo(BaseModel):
    """What is known of a session without reading its messages."""

    model_config = ConfigDict(protected_namespaces=())

    id: str = Field(default_factory=lambda: str(uuid4()))
    title: str = DEFAULT_TITLE
    project_dir: Annotated[str, BeforeValidator(_path_text)]
    working_dir: Annotated[str, BeforeValidator(_path_text)]
    """As it was given, also where it is relative; the metadata of the session has the whole path too, as `cwd`."""
    time: SessionTime = Field(default_factory=SessionTime)
    model_id: str | None = None
    provider_id: str | None = None
    root_session_id: str | None = None
    """The session that the first parent of all came from; None for one that has no parent."""
    parent_session_id: str | None = None
    message_count: int = 0
    total_tokens: int = 0
    """All that was ever spent, also on messages that are not visible any more."""


def meta_fields(info: SessionInfo) -> dict[str, Any]:
    """What of it is kept in the session's metadata, under the names it has there; the counts follow from the log."""
    return {
        "title": info.title,
        "working_dir": info.working_dir,
        "project_dir": info.project_dir,
        "model": info.model_id or "",
        "provider": info.provider_id,
        "parent_session_id": info.parent_session_id,
        "root_session_id": info.root_session_id,
        "archived_at": info.time.archived.isoformat() if info.time.archived else None,
    }


def kept_folder(working_dir: str) -> dict[str, str | None]:
    """A working folder as the metadata has it: whole, and as it was given where that is something else."""
    cwd = whole_path(working_dir)
    return {"cwd": cwd, "working_dir": working_dir if working_dir != cwd else None}


def info_of(meta: SessionMeta) -> SessionInfo:
    """The typed form of metadata, also of a session that another program made."""
    created = date_of(meta.get("created_at")) or datetime.fromtimestamp(0, UTC)
    fields: dict[str, Any] = dict(meta)
    return SessionInfo(
        id=meta["id"],
        title=meta["title"],
        project_dir=fields.get("project_dir", meta["cwd"]),
        working_dir=_text(fields.get("working_dir")) or meta["cwd"],
        time=SessionTime(
            created=created,
            updated=date_of(meta.get("updated_at")) or created,
            archived=date_of(meta.get("archived_at")),
        ),
        model_id=meta["model"] or None,
        # A session made without a provider has the default one in its metadata, for the other readers of the format.
        provider_id=_text(fields["provider_id"] if "provider_id" in fields else meta["provider"]),
        root_session_id=_text(fields.get("root_session_id")),
        parent_session_id=_text(fields.get("parent_session_id")),
        message_count=_count(fields.get("message_count")),
        total_tokens=_count(fields.get("total_tokens")),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
