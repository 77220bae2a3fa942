"""Several attempts at a task side by side, each in a fork; the best one is kept. `python best_of_n.py`"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import carrel

Attempt = Callable[[carrel.Session], Awaitable[object]]


async def best_of(session: carrel.Session, attempts: Sequence[Attempt]) -> tuple[carrel.Session, float]:
    """Let each attempt work in a fork of the session; return the fork with the best score, and close the others."""
    forks = [await session.fork() for _ in attempts]

    async def score(fork: carrel.Session, attempt: Attempt) -> float:
        await attempt(fork)
        return (await fork.verify()).score

    scores = await asyncio.gather(*(score(fork, attempt) for fork, attempt in zip(forks, attempts, strict=True)))
    best = max(range(len(forks)), key=lambda number: scores[number])
    for number, fork in enumerate(forks):
        if number != best:
            await fork.close()
    return forks[best], scores[best]


async def main() -> None:
    async with carrel.Session.for_sample("demo", "calc-1") as task:
        assert task.sample is not None
        await task.run("notes = ['read the tests']")  # what all attempts know
        patch = task.sample.patch

        async def gives_up(fork: carrel.Session) -> None:
            await fork.run("notes.append('too hard')")

        async def solves(fork: carrel.Session) -> None:
            await fork.execute_command("git apply -", stdin=patch)
            await fork.run("notes.append('applied a patch')")

        best, score = await best_of(task, [gives_up, solves, gives_up])
        async with best:
            print(f"best score: {score:g}, its notes: {(await best.run('notes')).value}")
        print(f"the session itself is unchanged: {(await task.run('notes')).value}, {await task.changed_files()}")


if __name__ == "__main__":
    asyncio.run(main())
