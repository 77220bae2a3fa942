"""A session covers /tmp with its own: a Python environment that lies below it works all the same, in every fork."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from carrel.execution.config import SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor

IMPORTED_LATE = "import wave, sys, tomllib, subprocess; subprocess.getoutput(f'{sys.executable} -c \"print(6)\"')"


async def test_forks_of_forks_outlive_each_other_and_their_crashes() -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        config = SubprocessConfig(sandbox="required", base=Path(folder), python_version=version)
        family = [SubprocessExecutor(config)]
        try:
            await family[0].run("trail = [0]; open('/tmp/own', 'w').write('0')")
            for number in range(1, 4):
                family.append(await family[-1].fork())
                grown = await family[-1].run(f"trail.append({number}); open('/tmp/own').read()")
                assert (grown.value, grown.state) == ("0", "kept")
            await asyncio.gather(family[0].close(), family[2].close())
            for number in (1, 3):
                assert (await family[number].run(IMPORTED_LATE)).value == "6"
                assert (await family[number].run("import os; os._exit(1)")).state == "restored"
                assert (await family[number].run("trail")).value == list(range(number + 1))
                assert str(family[number].config.base) in (await family[number].run("sys.prefix")).value
        finally:
            await asyncio.gather(*(member.close() for member in family))
