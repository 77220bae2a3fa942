"""The moments that a session can go back to."""

from __future__ import annotations

import asyncio

from carrel.errors import ForkRefused
from carrel.execution.executor import Executor, Moment
from carrel.session.forking import refusing
from carrel.session.said import Checkpoint, Said

MOST = 32
"""Each has a process and a copy of the changed files."""


class Checkpoints:
    """Those of one session, oldest first; they end with its executor."""

    def __init__(self, executor: Executor, said: Said) -> None:
        self._executor = executor
        self._said = said
        self._kept: dict[str, tuple[Checkpoint, Moment]] = {}
        self._making = asyncio.Lock()

    def all(self) -> list[Checkpoint]:
        return [point for point, _ in self._kept.values()]

    async def make(self, label: str) -> Checkpoint:
        """Keep this moment; ForkRefused changes nothing."""
        async with self._making:
            if len(self._kept) >= MOST:
                raise ForkRefused(
                    f"a session keeps at most {MOST} checkpoints, and these are there; drop_checkpoint lets go of one"
                )
            with refusing("kept"):
                moment = await self._executor.checkpoint()
                try:
                    point = await self._said.moment(label)
                except BaseException:
                    await moment.close()
                    raise
            self._kept[point.id] = (point, moment)
            return point

    async def rewind(self, to: Checkpoint) -> None:
        """Go back to it in all three, or in none."""
        _, moment = self._found(to)
        with refusing("rewound"):
            await self._executor.rewind(moment, lambda: self._said.rewind(to))

    def find(self, wanted: Checkpoint | str | int) -> Checkpoint:
        """By itself, by its id, else by its label or by how many messages were visible: the newest that fits."""
        return self._found(wanted)[0]

    def _found(self, wanted: Checkpoint | str | int) -> tuple[Checkpoint, Moment]:
        if isinstance(wanted, bool) or not isinstance(wanted, Checkpoint | str | int):
            raise TypeError(
                f"{wanted!r} is no place to go back to; give a checkpoint, its id or label, or a number of messages"
            )
        id_ = wanted.id if isinstance(wanted, Checkpoint) else wanted
        if isinstance(id_, str) and id_ in self._kept:
            return self._kept[id_]
        for point, moment in reversed(self._kept.values()):
            if wanted != "" and wanted == (point.messages if isinstance(wanted, int) else point.label):
                return point, moment
        there = ", ".join(f"{point} at {point.messages} messages" for point in self.all()) or "none"
        what = f"at {wanted} messages" if isinstance(wanted, int) else f"{wanted}" or "without a name"
        raise ForkRefused(f"there is no checkpoint {what}; there are: {there}")

    async def drop(self, wanted: Checkpoint | str | int) -> Checkpoint:
        """Let go of one."""
        point, moment = self._found(wanted)
        del self._kept[point.id]
        await moment.close()
        return point
