"""Measures carrel against the plain way of doing the same, in one run, and says which targets are met.

python bench/run.py [--quick] [SUBJECT …]
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

import appending
import calling
import containers
import describing
import finding
import importing
import library
import listing
import loading
import paging
import searching
import serving
import verifying
from measure import Line, Scale

SUBJECTS = {
    "append": appending.measure,
    "load": loading.measure,
    "list": listing.measure,
    "search": searching.measure,
    "find": finding.measure,
    "import": importing.measure,
    "describe": describing.measure,
    "call": calling.measure,
    "verify": verifying.measure,
    "library": library.measure,
    "serve": serving.measure,
    "containers": containers.measure,
    "page": paging.measure,
}
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; all when none is given"
    )
    parser.add_argument("--quick", action="store_true", help="a twentieth of the work, for a first look")
    parser.add_argument("--folder", type=Path, help="where to work; on the disk that is to be measured")
    parser.add_argument("--strict", action="store_true", help="end with 1 when a target is missed")
    options = parser.parse_args()
    unknown = set(options.subjects) - set(SUBJECTS)
    if unknown:
        parser.error(f"no subject {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    folder = Path(tempfile.mkdtemp(prefix="carrel-bench-", dir=options.folder))
    try:
        lines = asyncio.run(_measure(options.subjects or list(SUBJECTS), Scale(options.quick, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(lines, quick=options.quick))
    for line in lines:
        console.print(f"{line.what}: {line.how}", style="dim", highlight=False)
    return int(options.strict and not all(line.met for line in lines))


async def _measure(subjects: list[str], scale: Scale) -> list[Line]:
    RESULTS.mkdir(exist_ok=True)
    lines: list[Line] = []
    progress = Console(stderr=True)
    for subject in subjects:
        start = time.perf_counter()
        progress.print(f"measuring {subject} …", style="dim")
        measured = await SUBJECTS[subject](scale)
        lines += measured
        record = {
            "subject": subject,
            "quick": scale.quick,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "took_seconds": round(time.perf_counter() - start, 1),
            "machine": {
                "system": platform.platform(),
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "load": os.getloadavg(),
            },
            "lines": [asdict(line) for line in measured],
        }
        name = f"{subject}-quick.json" if scale.quick else f"{subject}.json"
        (RESULTS / name).write_text(json.dumps(record, indent=1, ensure_ascii=False))
        await asyncio.to_thread(_empty, scale.folder)
    return lines


def _empty(folder: Path) -> None:
    for item in folder.iterdir():
        shutil.rmtree(item, ignore_errors=True)


def _table(lines: list[Line], *, quick: bool) -> Table:
    title = "carrel against the plain way" + (" (a twentieth of the work)" if quick else "")
    table = Table(
        title=title, caption=f"medians; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for name in ("what", "ours", "plain way", "times", "by CPU", "target", "met"):
        table.add_column(name, justify="right" if name in ("ours", "plain way", "times", "by CPU") else "left")
    for line in lines:
        plain = f"{_short(line.plain)} {line.unit}" if line.plain is not None else ""
        met = "[green]yes[/green]" if line.met else "[red]missed[/red]"
        times, by_cpu = (f"{ratio:.1f}" if ratio is not None else "" for ratio in (line.times, line.times_cpu))
        table.add_row(line.what, f"{_short(line.ours)} {line.unit}", plain, times, by_cpu, line.target, met)
    return table


def _short(number: float) -> str:
    """Three digits that tell something."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


if __name__ == "__main__":
    sys.exit(main())
