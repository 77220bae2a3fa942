"""What it costs to import carrel, in interpreters of their own."""

import os
import subprocess
import sys
import time
from pathlib import Path

from measure import Line, Scale, no_more_than


def _seconds(program: str, compiled: Path) -> float:
    # Bytecode is kept, as where a package is installed and used every day.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(compiled)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    return time.perf_counter() - start


async def measure(scale: Scale) -> list[Line]:
    repeats = 5 if scale.quick else 15
    programs = {
        "empty": "pass",
        "import": "import carrel",
        "store": "from carrel import SessionStore",
        "session": "from carrel import Session",
    }
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, program in programs.items():
            seconds = _seconds(program, scale.folder / "bytecode")
            if turn:
                taken[name].append(seconds)
    least = {name: min(samples) for name, samples in taken.items()}
    how = f"the shortest of {repeats}, less an interpreter that does nothing ({1e3 * least['empty']:.0f} ms)"
    taken_ms = {name: 1e3 * (seconds - least["empty"]) for name, seconds in least.items()}
    return [
        *(
            no_more_than(programs[name], taken_ms[name], 150, "ms", repeats=repeats, how=how)
            for name in ("import", "session")
        ),
        Line(programs["store"], taken_ms["store"], None, "ms", "(only to know)", True, repeats=repeats, how=how),
    ]
