"""The second half of the tour: an agent's Python, with a tool, a workflow, an artifact, a package, and trouble."""

from pathlib import Path
from time import perf_counter
from typing import Any

import carrel
from carrel.cli.demo_package import write_wheel
from carrel.cli.exit_codes import TaskFailed
from carrel.cli.telling import Teller

TOOL = """\
name: weather
description: The weather of a town, as text
command: echo
schema:
  positional:
    - {name: town, type: string, required: true, description: Which town}
recipes:
  today: {description: The weather of today, params: {town: {}}}
"""

WORKFLOW = '''\
"""What to pack for some towns."""

async def run(towns: list[str]) -> dict[str, str]:
    """Ask for the weather of each town, all at once.

    Args:
        towns: Where the journey goes.
    """
    import asyncio

    told = await asyncio.gather(*[tools.weather.today.call_async(town=town) for town in towns])
    return {town: f"an umbrella for {text.strip()}" for town, text in zip(towns, told)}
'''


class SessionTour:
    """One step after another, in one session on a folder."""

    def __init__(self, folder: Path, teller: Teller) -> None:
        self._folder = folder
        self._begin, self._tell = teller.begin, teller.tell

    async def take(self) -> None:
        base = self._folder
        (base / "tools").mkdir(parents=True, exist_ok=True)
        (base / "tools" / "weather.yaml").write_text(TOOL, encoding="utf-8")
        wheels = base / "wheels"
        wheels.mkdir(exist_ok=True)
        write_wheel(wheels, "carrel_demo_units", "def fahrenheit(celsius):\n    return celsius * 9 / 5 + 32\n")
        self._begin("A session of its own for an agent's Python")
        began = perf_counter()
        async with carrel.Session.from_base(base, wheelhouse=wheels) as session:
            took = perf_counter() - began
            kept = sorted(session.supported_capabilities() & {"filesystem_isolation", "process_isolation", "fork"})
            self._tell(f"Ready in {took * 1000:.0f} ms, its virtualenv included; in force: {', '.join(kept)}.")
            await self._code(session)
            await self._library(session)
            if session.supports("rewind"):
                await self._branching(session)
            await self._trouble(session)
        self._begin("Another session on the same folder, later")
        async with carrel.Session.from_base(base, wheelhouse=wheels) as session:
            found = await session.search_workflows("pack for a journey", 1)
            if not found:
                raise TaskFailed("the workflow that was kept is not found")
            packed = await self._value(session, "workflows.packing(artifacts.load('journey.json')['towns'])")
            self._tell(f"It finds the workflow `{found[0]['name']}` by what it is for, and runs it: {packed}")

    async def _code(self, session: "carrel.Session") -> None:
        self._begin("Code runs, and what it leaves is there for the next")
        await self._value(session, "towns = ['Oslo', 'Porto']")
        value = await self._value(session, "[town.upper() for town in towns]")
        self._tell(f"towns = ['Oslo', 'Porto'], and then: {value}")
        told = await self._value(session, "tools.weather.today(town=towns[0])")
        self._tell(f"A tool, defined in eight lines of YAML, called from the code: {told.strip()!r}")

    async def _library(self, session: "carrel.Session") -> None:
        self._begin("What worked is kept")
        made = await session.add_workflow("packing", WORKFLOW, "")
        value = await self._value(session, "workflows.packing(towns)")
        self._tell(f"The workflow `{made['name']}` calls the tool for all towns at once: {value}")
        await self._value(session, "artifacts.save('journey.json', {'towns': towns}, 'Where the journey goes')")
        self._tell("An artifact, journey.json, is a file in the folder that a person can open.")
        began = perf_counter()
        warm = await self._value(
            session, "deps.add('carrel-demo-units')\nimport carrel_demo_units as u\nu.fahrenheit(20)"
        )
        self._tell(f"A package, installed and used in one cell, in {perf_counter() - began:.1f} s: 20 °C is {warm} °F.")

    async def _branching(self, session: "carrel.Session") -> None:
        self._begin("Try something, and go back")
        await session.write_file("plan.txt", "first Oslo")
        began = perf_counter()
        point = await session.checkpoint("before")
        kept = perf_counter() - began
        branch = await session.fork()
        await self._value(branch, "towns.append('Rome')")
        value = await self._value(branch, "towns")
        await branch.close()
        self._tell(f"A fork, a live session of its own, goes to {value}.")
        await self._value(session, "towns.clear()\nopen('plan.txt', 'w').write('stay at home')")
        began = perf_counter()
        await session.rewind(point)
        back = perf_counter() - began
        value = await self._value(session, "towns, open('plan.txt').read()")
        self._tell(
            f"The session itself lost towns and plan.txt, went back to a checkpoint, and has both: {value}. "
            f"To keep it took {kept * 1000:.0f} ms, to go back {back * 1000:.0f} ms.",
            "green",
        )

    async def _trouble(self, session: "carrel.Session") -> None:
        self._begin("Trouble, and the variables are still there")
        endless = await session.run("while True: pass", timeout=0.3)
        self._tell(f"`while True: pass` was stopped ({endless.error_type}); its variables are {endless.state}.")
        killed = await session.run("import os\nos._exit(1)")
        self._tell(f"`os._exit(1)` ended the interpreter ({killed.error_type}); its variables are {killed.state}.")
        outside = await session.run("open('/etc/shadow').read()")
        self._tell(f"A look at the host's secrets: {(outside.error or 'it could read them').splitlines()[-1]}")
        value = await self._value(session, "towns")
        self._tell(f"And towns is still {value}.", "green")
        steps = await session.trace()
        self._tell(f"All {len(steps)} steps are in trace.jsonl, with times, outcomes and sizes.")

    async def _value(self, session: "carrel.Session", code: str) -> Any:
        result = await session.run(code)
        if result.error is not None:
            raise TaskFailed(f"the tour's own code failed: {result.error}")
        return result.value
