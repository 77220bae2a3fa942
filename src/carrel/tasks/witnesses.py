"""The recorders that a sample's test command gets, and the environment by which test runners find them."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from carrel.execution.config import Mount
from carrel.execution.executor import Executor
from carrel.tasks.protection import touched_by
from carrel.tasks.sample import Sample

FOLDER = Path(__file__).with_name("witness")
AT = "/opt/carrel-witness"
_BASE_AT, _PATCHED_AT, _MANIFEST = "/opt/carrel-files", "/opt/carrel-patched", "carrel-files.json"
MODULES = frozenset(file.stem for file in FOLDER.glob("*.py"))
_OUT = 9
"""The descriptor by which recorders write to standard error as it was when the command began."""
_BY_NAME = r"\bcargo\s+(\+\S+\s+)?(test|t)\b|\bgo\s+test\b|\bnode\s[^;&|]*--test(?=\s|$)"
_ITS_OWN_WAY = r"\b(GOFLAGS|NODE_OPTIONS|CARGO_\w+)=|\s-{1,2}exec\b|\s--target\b|\bcargo\b[^;&|]*\s--config\b"


def wanted(sample: Sample) -> bool:
    """Whether the test command gets recorders. Which of them finds its runner is not known before it runs."""
    return sample.verifier == "test_suite" and sample.verify.recorder != "off"


def must_speak(sample: Sample) -> bool:
    """Whether a run in which no such program was seen was none: the command names the runner, and leaves us our way."""
    command = sample.verify.command
    own_way = re.search(_ITS_OWN_WAY, command) or "CARGO_BUILD_TARGET" in sample.environment.env
    return wanted(sample) and re.search(_BY_NAME, command) is not None and not own_way


def mounts(sample: Sample, files: Path, base: Path) -> tuple[Mount, ...]:
    """The recorders and the sample's own files: `base`, and in `files` those that its test patch changes."""
    if not wanted(sample):
        return ()
    return (Mount(source=FOLDER, at=AT), Mount(source=files, at=_PATCHED_AT), Mount(source=base, at=_BASE_AT))


async def show_files(place: Executor, sample: Sample, folder: Path, base: Path, theirs: Iterable[str]) -> str:
    """Put what the recorders compare tests with into `folder`. Returns where in the place they read of it."""
    if not wanted(sample):
        return ""
    inside = "filesystem_isolation" in place.supported_capabilities()
    for path in touched_by(sample.test_patch):
        if path.endswith(".py") and (await place.exec(["test", "-f", path], timeout=60)).success:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(await place.read_file(path))
    told: dict[str, object] = {"workdir": (await place.exec(["pwd", "-P"], timeout=60)).stdout.strip()}
    told |= {"base": _BASE_AT if inside else str(base), "patched": _PATCHED_AT if inside else str(folder)}
    (folder / _MANIFEST).write_text(json.dumps({**told, "theirs": sorted(theirs)}), encoding="utf-8")
    return f"{_PATCHED_AT if inside else folder}/{_MANIFEST}"


def recorded(command: str, at: str) -> str:
    """The command, in which neither a PYTHONPATH of its own hides the recorders nor a `2>` what they write."""
    return f"exec {_OUT}>&2\n" + re.sub(r"\bPYTHONPATH=(?=[^\s;&|])", f"PYTHONPATH={at}:", command)


def variables(sample: Sample, secret: str, notes: str, at: str, files: str = "") -> dict[str, str]:
    """`secret` is a file with the word by which Python's recorders speak, `notes` one that the others write to, and
    `files` says where the sample's own files are."""
    given, run = sample.environment.env, f"{at}/carrel_run.py"
    machine = platform.machine().upper()
    return {
        "CARREL_WITNESS": secret,
        "PYTHONPATH": ":".join([at, *filter(None, [given.get("PYTHONPATH", "")])]),
        "CARREL_RECORDER_FILES": files,
        "CARREL_TESTIMONY": notes,
        "NODE_OPTIONS": f"{given.get('NODE_OPTIONS', '')} --require={at}/carrel_node.cjs".strip(),
        "GOFLAGS": f"{given.get('GOFLAGS', '')} -exec={run}".strip(),
        f"CARGO_TARGET_{machine}_UNKNOWN_LINUX_GNU_RUNNER": run,
        f"CARGO_TARGET_{machine}_UNKNOWN_LINUX_MUSL_RUNNER": run,
    }
