"""The metadata of a session as a typed object."""

import os
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from carrel.conversation.messages import SessionMeta
from carrel.conversation.session_state import absolute_path, date_of

DEFAULT_TITLE = "New Session"


def now() -> datetime:
    return datetime.now(UTC)


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class SessionTime(BaseModel):
    """When a session was created, last changed and archived, in UTC."""

    created: datetime = Field(default_factory=now)
    updated: datetime = Field(default_factory=now)
    archived: datetime | None = None


class SessionInfo(BaseModel):
    """What a session is called, where it works and how large it is; known without reading its messages."""

    model_config = ConfigDict(protected_namespaces=())

    id: str = Field(default_factory=lambda: str(uuid4()))
    title: str = DEFAULT_TITLE
    project_dir: Annotated[str, BeforeValidator(_path_text)]
    working_dir: Annotated[str, BeforeValidator(_path_text)]
    """As the caller wrote it, which may be relative; the metadata also has the absolute path, as `cwd`."""
    time: SessionTime = Field(default_factory=SessionTime)
    model_id: str | None = None
    provider_id: str | None = None
    root_session_id: str | None = None
    """The topmost ancestor; None for a session without a parent."""
    parent_session_id: str | None = None
    message_count: int = 0
    total_tokens: int = 0
    """All tokens ever used, also by messages that are not visible any more."""


def meta_fields(info: SessionInfo) -> dict[str, Any]:
    """The fields as the metadata names them, without the counts, which follow from the log."""
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


def cwd_fields(working_dir: str) -> dict[str, str | None]:
    """A working folder as the metadata has it: the absolute path, and what the caller wrote if that differs."""
    cwd = absolute_path(working_dir)
    return {"cwd": cwd, "working_dir": working_dir if working_dir != cwd else None}


def info_from_meta(meta: SessionMeta) -> SessionInfo:
    """Convert metadata, also that of a session made by another program."""
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
        # Without a provider, `provider` in the metadata is the default one, for other readers of the format.
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
