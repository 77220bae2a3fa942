"""Verdicts on sessions of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from carrel.client.answers import Job
from carrel.client.asking import WAIT, Asking, Extra, Waiting, part, session_path, typed


class Verification(Asking):
    """`client.sessions.verify`."""

    async def start(
        self,
        session_id: str,
        *,
        wait_for_completion: bool = True,
        on_progress: Callable[[Job], object] | None = None,
        **more: Unpack[Waiting],
    ) -> Job:
        """Judge what was done so far, in a copy; returned when it is completed, or came to nothing:
        then `status` is "error" and `error` says why."""
        path, words = f"{session_path(session_id)}/verify", f"verify session {session_id}"
        asked = self._asked("POST", path, words, more, held=WAIT if wait_for_completion else 0)
        begun = await self._data(asked)
        job_id = begun.get("job_id", "") if isinstance(begun, dict) else ""

        async def look(held: float, more: Extra) -> Job:
            return await self._status(job_id, session_id, held, more)

        whole = isinstance(begun, dict) and "created_at" in begun
        job = typed(Job, begun, asked) if whole else await look(WAIT if wait_for_completion else 0, more)
        if not wait_for_completion:
            return job
        return await self._until_finished(job, lambda job: job.is_finished, look, asked, more, on_progress)

    async def status(self, job_id: str, *, session_id: str, **more: Unpack[Extra]) -> Job:
        return await self._status(job_id, session_id, 0, more)

    async def _status(self, job_id: str, session_id: str, held: float, more: Extra) -> Job:
        path = f"{session_path(session_id)}/verify/{part('job_id', job_id)}"
        words = f"look at verification {job_id} of session {session_id}"
        return await self._typed(Job, self._asked("GET", path, words, more, held=held))

    async def cancel(self, job_id: str, *, session_id: str, **more: Unpack[Extra]) -> Job:
        """Give up on a verdict; the session stays as it is."""
        path = f"{session_path(session_id)}/verify/{part('job_id', job_id)}"
        words = f"cancel verification {job_id} of session {session_id}"
        return await self._typed(Job, self._asked("DELETE", path, words, more))
