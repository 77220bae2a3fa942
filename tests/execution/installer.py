"""Installs in a process of its own, which can be killed: BASE WHEELS add|settings REQUIREMENT…; says when it begins."""

import asyncio
import sys

from carrel.execution.config import SubprocessConfig
from carrel.execution.packages import subprocess_packages


async def main(base: str, wheels: str, how: str, *requirements: str) -> None:
    deps = list(requirements) if how == "settings" else []
    await subprocess_packages(SubprocessConfig(base=base))
    print("begins", flush=True)
    packages = await subprocess_packages(SubprocessConfig(base=base, wheelhouse=wheels, deps=deps))
    if how == "add":
        await packages.install(requirements)
    await packages.give_back()


asyncio.run(main(*sys.argv[1:]))
