"""Whether the tests were left alone while they ran: code under test can write to their files, too."""

from __future__ import annotations

import re
from dataclasses import dataclass

from carrel.execution.executor import Executor
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.execution.upper_layer import Upper
from carrel.tasks.place import Prepared
from carrel.tasks.protection import Folder, Protection

_WRITES_ITSELF = r"\b(cp|mv|ln|git|patch|sed|tee|tar|unzip|rsync|install|tsc|chmod|touch)\b|>"


@dataclass(frozen=True)
class Watch:
    """The place as it was when the tests began."""

    base: Folder
    guard: Protection
    before: Upper

    async def written(self, place: Executor) -> str:
        """The first file of the tests that is not as it was, or was written to and put back; empty for none."""
        now = await _look(place, self.base)
        if now is None:
            return ""
        for path in sorted(now.seen.keys() | now.hidden):
            was = self.before.seen.get(path)
            there = was is not None or (self.base.kind(path) is not None and path not in self.before.hidden)
            # The kernel sets the time of a change, and nobody else can.
            if there and now.seen.get(path) != was and self.guard.is_test_code(path):
                return path
        return ""


async def watch(place: Executor, prepared: Prepared, guard: Protection) -> Watch | None:
    """None where it cannot be told, or where the test command itself may write to them."""
    base = Folder(prepared.workspace)
    if re.search(_WRITES_ITSELF, prepared.sample.verify.command):
        return None
    before = await _look(place, base)
    return None if before is None else Watch(base, guard, before)


async def _look(place: Executor, base: Folder) -> Upper | None:
    return await place.upper(base.folder) if isinstance(place, SubprocessExecutor) else None
