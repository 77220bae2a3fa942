"""The last part of the tour: a task, worked on and judged."""

from pathlib import Path
from time import perf_counter

import carrel
from carrel.cli.exit_codes import TaskFailed
from carrel.cli.telling import Teller


class TaskTour:
    """A sample of the demo dataset, as an agent would meet it."""

    def __init__(self, folder: Path, teller: Teller) -> None:
        self._cache = folder / "cache"
        self._begin, self._tell = teller.begin, teller.tell

    async def take(self) -> None:
        self._begin("A task: a repository, a problem, hidden tests")
        began = perf_counter()
        async with carrel.Session.for_sample("demo", "calc-1", cache=self._cache) as session:
            took = perf_counter() - began
            sample = session.sample
            assert sample is not None, "for_sample gives the session its sample"
            problem = sample.problem_statement.strip().splitlines()[0]
            self._tell(f"Its place was open in {took * 1000:.0f} ms. “{problem}”")
            before = await session.verify()
            self._tell(
                f"Judged as it is: {before.outcome.replace('_', ' ')}, {before.failed} of {before.total} tests fail."
            )
            await session.execute_command("git apply -", stdin=sample.patch)
            after = await session.verify()
            if not after.is_success:
                raise TaskFailed(f"the sample's own solution is not judged as one: {after.evidence}")
            self._tell(f"Repaired, and judged again in a copy of its own: {after.outcome}.", "green")
            self._tell("`carrel task run` gives such places to an agent, `carrel serve` to everybody with a key.")
