"""What the server remembers: each session as it stands, and in a log of its own what was done in it."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel

from carrel.errors import StorageError
from carrel.server.logs import finish_rewriting, json_object, parse_lines, rewrite
from carrel.storage.base import Block, Store
from carrel.wire.answers import Interaction, SessionRecord
from carrel.wire.odd_values import json_bytes
from carrel.wire.verification import Job

logger = logging.getLogger(__name__)

SESSIONS = "server/sessions.jsonl"
_FORGOTTEN = b'{"forgotten":'
_PLAIN_ID = re.compile(r"[\w.-]{1,200}")
Kind = Literal["session", "interaction", "job", "run", "file", "checkpoint", "rewind"]
Kept = TypeVar("Kept", Interaction, Job)

_INDEXED = 200
"""Logs of ended sessions of which it is known where in them everything is."""


class Ledger:
    """Everything is a line that is only ever appended: what was answered is there after a kill."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.sessions: dict[str, SessionRecord] = {}
        """All there are, oldest first."""
        self._places: OrderedDict[str, dict[str, int]] = OrderedDict()
        """For each log, where the newest line on each interaction and job is."""
        self._unwritten: dict[str, dict[str, tuple[Kind, Interaction | Job]]] = {}
        """What could not be written yet, by session and id."""

    async def open(self) -> None:
        """Read how every session stood last. Lines on sessions that were forgotten are left out for good."""
        await finish_rewriting(self._store, SESSIONS)
        forgotten: set[str] = set()
        async for block in self._store.read(SESSIONS):
            for _, session in parse_lines(SESSIONS, block, _session_or_forgotten):
                if isinstance(session, str):
                    self.sessions.pop(session, None)
                    forgotten.add(session)
                else:
                    self.sessions[session.session_id] = session

        if forgotten:
            for gone in forgotten - self.sessions.keys():
                # Killed right after it was forgotten, a server leaves this behind.
                await self._store.delete(f"server/sessions/{gone}")
            await rewrite(self._store, SESSIONS, [s.model_dump_json().encode() for s in self.sessions.values()])

    async def forget(self, session_id: str) -> None:
        """Remove a session that has ended, with all that is known of it."""
        await self._store.append(SESSIONS, [_FORGOTTEN + orjson.dumps(session_id) + b"}"])
        self.sessions.pop(session_id, None)
        self._places.pop(session_id, None)
        self._unwritten.pop(session_id, None)
        await self._store.delete(f"server/sessions/{session_id}")

    async def keep(self, session: SessionRecord) -> None:
        """How it stands now."""
        await self._store.append(SESSIONS, [session.model_dump_json().encode()])
        if session.session_id not in self.sessions:
            self._places[session.session_id] = {}
        self.sessions[session.session_id] = session
        await self.note(session.session_id, "session", session)

    def lose(self, session_id: str) -> None:
        """It could not be begun: who asks for it once more is to get one that is."""
        self.sessions.pop(session_id, None)
        self._places.pop(session_id, None)

    async def note(self, session_id: str, kind: Kind, what: BaseModel | dict[str, Any]) -> int:
        """One line in the session's log; returns its number."""
        for held_kind, held in self._unwritten.pop(session_id, {}).values():
            await self.note_or_hold(session_id, held_kind, held)
        data = what.model_dump(mode="json") if isinstance(what, BaseModel) else what
        seq = await self._store.append(log_of(session_id), [json_bytes({"type": kind, **data})])
        if isinstance(what, Interaction | Job):
            (await self._index(session_id))[_id_of(what)] = seq
        return seq

    async def note_or_hold(self, session_id: str, kind: Kind, what: Interaction | Job) -> None:
        """`note`; where that fails, what it is about is kept in memory, and written with the session's next line."""
        try:
            await self.note(session_id, kind, what)
        except (StorageError, KeyError) as problem:
            self._unwritten.setdefault(session_id, {})[_id_of(what)] = (kind, what)
            logger.warning("the log of session %s could not be written: %s", session_id, problem)

    async def interaction(self, session_id: str, interaction_id: str) -> Interaction | None:
        return await self._find(Interaction, session_id, interaction_id)

    async def job(self, session_id: str, job_id: str) -> Job | None:
        return await self._find(Job, session_id, job_id)

    async def all_of(self, session_id: str) -> list[Interaction | Job]:
        """Each as it stood last, in the order in which they began."""
        found: dict[str, Interaction | Job] = {}
        async for block in self._store.read(log_of(session_id)):
            for _, what in parse_lines(log_of(session_id), block, _read):
                if what is not None:
                    found[_id_of(what)] = what
        return list(found.values())

    async def watch(self, session_id: str, from_seq: int) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """The lines from a number on, and then each as it comes."""
        log = log_of(session_id)
        async for seq, line in self._store.watch(log, from_seq):
            for entry in parse_lines(log, Block(seq, [line]), json_object):
                yield entry

    async def entries(self, session_id: str, from_seq: int) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Those there are now."""
        async for block in self._store.read(log_of(session_id), from_seq):
            for entry in parse_lines(log_of(session_id), block, json_object):
                yield entry

    async def keep_output(self, session_id: str, job_id: str, name: str, text: bytes) -> None:
        """What a verification wrote, whole, where its result holds only a part."""
        await self._store.put(f"server/sessions/{session_id}/{job_id}/{name}", text)

    async def output(self, session_id: str, job_id: str, name: str) -> bytes | None:
        return await self._store.get(f"server/sessions/{session_id}/{job_id}/{name}")

    async def _find(self, kind: type[Kept], session_id: str, wanted: str) -> Kept | None:
        _, held = self._unwritten.get(session_id, {}).get(wanted, (None, None))
        if isinstance(held, kind):
            return held
        seq = (await self._index(session_id)).get(wanted)
        if seq is None:
            return None
        async for block in self._store.read(log_of(session_id), seq):
            what = _read(block.records[0])
            return what if isinstance(what, kind) else None
        return None

    async def _index(self, session_id: str) -> dict[str, int]:
        known = self._places.get(session_id)
        if known is None:
            known = {}
            async for block in self._store.read(log_of(session_id)):
                for seq, what in parse_lines(log_of(session_id), block, _read):
                    if what is not None:
                        known[_id_of(what)] = seq
            known = self._places.setdefault(session_id, known)
        self._places.move_to_end(session_id)
        while len(self._places) > _INDEXED:
            oldest = next((id_ for id_ in self._places if self.sessions[id_].status not in ("creating", "ready")), None)
            if oldest is None:
                break
            del self._places[oldest]
        return known


def log_of(session_id: str) -> str:
    return f"server/sessions/{session_id}/log.jsonl"


def _session_or_forgotten(line: bytes) -> SessionRecord | str:
    """How a session stands, or the id of one that was forgotten."""
    what: SessionRecord | str
    if line.startswith(_FORGOTTEN):
        what = session_id = str(json_object(line)["forgotten"])
    else:
        what = SessionRecord.model_validate_json(line)
        session_id = what.session_id
    if _PLAIN_ID.fullmatch(session_id) is None:
        raise ValueError(f"{session_id[:80]!r} is not the id of a session")
    return what


def _id_of(what: Interaction | Job) -> str:
    return what.interaction_id if isinstance(what, Interaction) else what.job_id


def _read(line: bytes) -> Interaction | Job | None:
    data = json_object(line)
    match data.pop("type", None):
        case "interaction":
            return Interaction.model_validate(data)
        case "job":
            return Job.model_validate(data)
        case _:
            return None
