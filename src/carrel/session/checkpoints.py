"""The moments that a session can go back to."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import uuid4

from carrel.errors import ForkRefused
from carrel.execution.executor import Moment

MOST = 32
"""Each has a process and a copy of the changed files."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A moment of a session: what was said, what was known and what was made by then."""

    label: str
    messages: int
    """How many messages were visible."""
    seq: int
    """The last entry of the conversation's log."""
    conversation_id: str
    id: str = field(default_factory=lambda: uuid4().hex[:12])
    made_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __str__(self) -> str:
        return f"{self.label!r} ({self.id})" if self.label else self.id


class Checkpoints:
    """Those of one session, oldest first; they end with its executor."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Checkpoint, Moment]] = {}

    def all(self) -> list[Checkpoint]:
        return [point for point, _ in self._kept.values()]

    def refuse_too_many(self) -> None:
        if len(self._kept) >= MOST:
            raise ForkRefused(
                f"a session keeps at most {MOST} checkpoints, and these are there; drop_checkpoint lets go of one"
            )

    def add(self, point: Checkpoint, moment: Moment) -> None:
        self._kept[point.id] = (point, moment)

    def find(self, wanted: Checkpoint | str | int) -> tuple[Checkpoint, Moment]:
        """By itself, by its id, by its label, or by how many messages were visible: the newest that fits."""
        for point, moment in reversed(self._kept.values()):
            if isinstance(wanted, Checkpoint):
                fits = point.id == wanted.id
            elif isinstance(wanted, str):
                fits = wanted in (point.id, point.label)
            elif isinstance(wanted, int) and not isinstance(wanted, bool):
                fits = point.messages == wanted
            else:
                raise TypeError(
                    f"{wanted!r} is no place to go back to; give a checkpoint, its id or label, or a number of messages"
                )
            if fits:
                return point, moment
        there = ", ".join(f"{point} at {point.messages} messages" for point in self.all()) or "none"
        what = f"at {wanted} messages" if isinstance(wanted, int) else str(wanted)
        raise ForkRefused(f"there is no checkpoint {what}; there are: {there}")

    async def drop(self, wanted: Checkpoint | str | int) -> None:
        point, moment = self.find(wanted)
        del self._kept[point.id]
        await moment.close()
