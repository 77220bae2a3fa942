"""Durable sessions for `carrel sessions`: which are open, what is kept of them, and `carrel sessions pause`."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import carrel
from carrel.cli.exit_codes import WrongUsage
from carrel.cli.options import resolve_base
from carrel.cli.output import print_text
from carrel.errors import SessionOwner
from carrel.execution.durable import used_space
from carrel.session.durable import StateRecord, busy, owner_of, read_record, remove_volumes, request_pause, state_key
from carrel.storage.files.store import FileStore
from carrel.text import count_variables, neutralize_control_chars, readable_size, readable_time

WorkspaceMode = Literal["overlay", "rw", "ro"]
NO_MESSAGES = "(no messages)"
"""The title of a durable session without a conversation."""


@dataclass(frozen=True)
class DurableSession:
    """What is kept of one durable session."""

    record: StateRecord
    owner: SessionOwner | None
    size: int
    """Bytes on the disk."""

    @property
    def status(self) -> str:
        return "open" if self.owner is not None else "paused"

    def as_json(self) -> dict[str, Any]:
        owner = self.owner
        return {
            "state": self.status,
            "owner": None if owner is None else {"host": owner.host, "pid": owner.pid},
            "bytes": self.size,
            "saved_at": self.record.saved_at or None,
            "variables": self.record.variables,
            "missing": self.record.missing,
            "not_saved": self.record.not_saved,
        }


class SessionStates:
    """The durable sessions in the folder of a store of conversations."""

    def __init__(self, store: "carrel.SessionStore") -> None:
        assert store.data_dir is not None
        self._folder = store.data_dir
        self._store = FileStore(store.data_dir.parent)

    async def find(self, session_id: str) -> DurableSession | None:
        """The state of one session; None if it is not durable."""
        if self._folder.name != "sessions":
            return None
        record = await read_record(self._store, session_id)
        if record is None:
            return None
        folder = self._folder / session_id / "workspace-state"
        owner = await owner_of(self._store, session_id)
        return DurableSession(record, owner, await asyncio.to_thread(used_space, folder))

    async def all(self) -> dict[str, DurableSession]:
        """The durable sessions, by id."""
        if self._folder.name != "sessions":
            return {}
        ids = await self._store.folders("sessions")
        stamps = await self._store.stamps([state_key(id_, "session.json") for id_ in ids])
        found = {id_: await self.find(id_) for id_, stamp in zip(ids, stamps, strict=True) if stamp is not None}
        return {id_: state for id_, state in found.items() if state is not None}

    async def check_closed(self, session_id: str) -> None:
        """SessionBusy if a process has the session open."""
        owner = await owner_of(self._store, session_id) if self._folder.name == "sessions" else None
        if owner is not None:
            raise busy(session_id, owner)

    async def remove_volumes(self, session_id: str) -> None:
        """Remove the volumes of a session in a container, before its folder is deleted, which has their names.

        SessionBusy if a process has it open."""
        if self._folder.name != "sessions":
            return
        lock = await self._store.lock(state_key(session_id, "open"), wait=False)
        if lock is None:
            raise busy(session_id, await owner_of(self._store, session_id))
        try:
            await asyncio.to_thread(remove_volumes, session_id, self._folder / session_id / "workspace-state")
        finally:
            await lock.release()

    async def pause(self, session_id: str, seconds: float) -> bool:
        """Ask the process that has it open to save and close it; False if none had."""
        return await request_pause(self._store, session_id, seconds)


def unsaid_meta(session_id: str, state: DurableSession) -> dict[str, Any]:
    """The metadata with which a session without a conversation is listed."""
    updated = state.record.saved_at or state.record.since
    return {"id": session_id, "title": NO_MESSAGES, "message_count": 0, "updated_at": updated, "cwd": ""}


async def with_states(
    store: "carrel.SessionStore", metas: list[Any], states: Mapping[str, DurableSession]
) -> list[dict[str, Any]]:
    """The metadata of sessions with exact counts, and what is kept of those that are durable."""
    counted = await store.counted([meta for meta in metas if meta["title"] != NO_MESSAGES])
    by_id = {meta["id"]: meta for meta in counted}
    shown: list[dict[str, Any]] = [{**(by_id.get(meta["id"]) or meta)} for meta in metas]
    for meta in shown:
        if meta["id"] in states:
            meta["durable"] = states[meta["id"]].as_json()
    return shown


def print_state(state: DurableSession) -> None:
    """Print whether the session is open, and what a later one would have of it."""
    record = state.record
    facts = [f"open in {state.owner}" if state.owner is not None else "paused", readable_size(state.size)]
    if record.saved_at:
        facts.append(f"{count_variables(len(record.variables))} saved {readable_time(record.saved_at)}")
    print_text(" · ".join(facts), "dim")
    if record.not_saved:
        print_text(f"not saved: {record.not_saved}", "yellow")
    for name, why in record.missing.items():
        print_text(f"not kept: {name} ({why})", "yellow")
    print_text("")


def settings_of_workspace(
    base: Path | None, session: str | None, workspace: Path | None, mode: WorkspaceMode
) -> tuple[Path | None, WorkspaceMode]:
    """The workspace of `carrel run --session`: the given one, else that with which the session was begun."""
    if session is None or workspace is not None:
        return workspace, mode
    path = resolve_base(base) / state_key(session, "session.json")
    try:
        record = StateRecord.read(path.read_bytes())
    except OSError:
        return None, mode
    settings = record.settings if record is not None else {}
    if settings.get("kind") == "inprocess":
        raise WrongUsage(f"the session {session} runs in a program's own process; use Session.resume there")
    found = settings.get("workspace")
    saved: WorkspaceMode = settings.get("workspace_mode", mode)
    return (Path(found), saved) if found else (None, mode)


def note_resumed(session: "carrel.Session") -> None:
    """Say what a session that continues could not keep."""
    resumed = session.resumed
    if resumed is not None and (resumed.reason or resumed.missing):
        missing = "; ".join(f"{name}: {why}" for name, why in resumed.missing.items())
        sys.stderr.write(neutralize_control_chars(f"not kept in {session.id}: {resumed.reason or missing}") + "\n")
