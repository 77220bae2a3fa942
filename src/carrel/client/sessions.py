"""Sessions on a server: made, looked at, forked and ended; every call written once, for both clients."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from typing import Any, Generic, Unpack

from carrel.client.answers import Checkpoint, CheckpointList, Closed, S, SessionList
from carrel.client.asking import WAIT, Extra, Waiting, part, session_path, typed
from carrel.client.line import Asked, Wire
from carrel.client.material import Material
from carrel.client.verification import Verification
from carrel.client.work import Work
from carrel.errors import ServerFailed


class Sessions(Work, Material, Generic[S]):
    """`client.sessions`: every call names its session; what `create` returns has the same calls without that."""

    def __init__(self, wire: Wire, kind: Callable[[Sessions[S], Any, Asked], S]) -> None:
        super().__init__(wire)
        self._kind = kind
        self.verify = Verification(wire)

    async def create(
        self,
        *,
        dataset: str | None = None,
        sample_id: str | None = None,
        ttl_minutes: int | None = None,
        version: int | None = None,
        files: Mapping[str, str] | None = None,
        network: bool | None = None,
        wait_for_ready: bool = True,
        on_progress: Callable[[S], object] | None = None,
        **more: Unpack[Waiting],
    ) -> S:
        """A new session of a sample, or an empty one. Returned when it is ready, or when it came to nothing:
        then `status` is "error" and `error` says why.

        `version` is the sample's, the latest by default; `files` are texts by path, written over what the sample has;
        `network` is for a session of no sample, where the server allows it."""
        words = f"make a session of {dataset}/{sample_id}" if sample_id else "make a session"
        body = {
            "dataset": dataset,
            "sample_id": sample_id,
            "ttl_minutes": ttl_minutes,
            "version": version,
            "files": None if files is None else dict(files),
            "network": network,
        }
        asked = self._asked("POST", "/sessions", words, more, body=body, held=WAIT if wait_for_ready else 0)
        return await self._ready(asked, more, wait_for_ready, on_progress)

    async def fork(
        self,
        session_id: str,
        *,
        ttl_minutes: int | None = None,
        **more: Unpack[Waiting],
    ) -> S:
        """Another session that starts from this moment of this one: same conversation, variables and files."""
        path, words = f"{session_path(session_id)}/fork", f"fork session {session_id}"
        asked = self._asked("POST", path, words, more, body={"ttl_minutes": ttl_minutes}, held=WAIT)
        return await self._ready(asked, more, True, None)

    async def checkpoint(self, session_id: str, *, label: str = "", **more: Unpack[Extra]) -> Checkpoint:
        """Keep this moment of it, the conversation, the variables and the files, to go back to."""
        path, words = f"{session_path(session_id)}/checkpoints", f"keep a moment of session {session_id}"
        return await self._typed(Checkpoint, self._asked("POST", path, words, more, body={"label": label}))

    async def checkpoints(self, session_id: str, **more: Unpack[Extra]) -> builtins.list[Checkpoint]:
        """The moments that it can go back to, oldest first."""
        path, words = f"{session_path(session_id)}/checkpoints", f"list the checkpoints of session {session_id}"
        return (await self._typed(CheckpointList, self._asked("GET", path, words, more))).checkpoints

    async def drop_checkpoint(self, session_id: str, *, point: Checkpoint | str, **more: Unpack[Extra]) -> None:
        """Let go of one."""
        id_ = point.id if isinstance(point, Checkpoint) else point
        path, words = f"{session_path(session_id)}/checkpoints/{part('point', id_)}", f"drop checkpoint {id_}"
        await self._data(self._asked("DELETE", path, words, more))

    async def rewind(self, session_id: str, *, to: Checkpoint | str | int, **more: Unpack[Extra]) -> Checkpoint:
        """Go back to a checkpoint, named by itself, its id, its label or its number of messages."""
        path, words = f"{session_path(session_id)}/rewind", f"rewind session {session_id}"
        body = {"to": to.id if isinstance(to, Checkpoint) else to}
        return await self._typed(Checkpoint, self._asked("POST", path, words, more, body=body))

    async def _ready(self, asked: Asked, more: Waiting, wait: bool, tell: Callable[[S], object] | None) -> S:
        made = self._kind(self, await self._data(asked), asked)

        async def look(held: float, more: Extra) -> S:
            return await self._retrieve(made.session_id, held, more)

        whole = made if made.requested_at else await look(WAIT if wait else 0, more)
        if not wait:
            return whole
        return await self._until_finished(whole, lambda session: session.status != "creating", look, asked, more, tell)

    async def retrieve(self, session_id: str, **more: Unpack[Extra]) -> S:
        return await self._retrieve(session_id, 0, more)

    async def _retrieve(self, session_id: str, held: float, more: Extra) -> S:
        asked = self._asked("GET", session_path(session_id), f"look at session {session_id}", more, held=held)
        return self._kind(self, await self._data(asked), asked)

    async def list(self, **more: Unpack[Extra]) -> SessionList[S]:
        """All sessions of the key's owner, those that have ended too."""
        asked = self._asked("GET", "/sessions", "list sessions", more)
        found = await self._data(asked)
        if not isinstance(found, dict) or not isinstance(found.get("sessions"), list):
            raise ServerFailed(f"{asked.words}: the answer has no list of sessions")
        found["sessions"] = [self._kind(self, each, asked) for each in found["sessions"]]
        return typed(SessionList, found, asked)

    async def extend(self, session_id: str, *, ttl_minutes: int, **more: Unpack[Extra]) -> S:
        """Let it live for this many minutes from now."""
        words, body = f"extend session {session_id}", {"ttl_minutes": ttl_minutes}
        asked = self._asked("PATCH", session_path(session_id), words, more, body=body)
        return self._kind(self, await self._data(asked), asked)

    async def close(self, session_id: str, **more: Unpack[Extra]) -> Closed:
        """End it; nothing of it is left running or on the server's disk."""
        asked = self._asked("DELETE", session_path(session_id), f"close session {session_id}", more)
        return await self._typed(Closed, asked)
