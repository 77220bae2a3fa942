"""Which witnesses a sample's test command gets, and the environment by which its runner finds them."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from carrel.execution.settings import Mount
from carrel.tasks.sample import Sample

FOLDER = Path(__file__).with_name("witness")
AT = "/opt/carrel-witness"
MODULES = frozenset(file.stem for file in FOLDER.glob("*.py"))
_PLUGIN = "carrel_witness"
_PYTHON = r"\bpy\.?test\b|-m\s+unittest\b"
_OTHERS = r"\b(cargo|go|node|npm|npx|yarn|pnpm)\b"
_BY_NAME = r"\bcargo\s+(\+\S+\s+)?(test|t)\b|\bgo\s+test\b|\bnode\s[^;&|]*--test(?=\s|$)"
_ITS_OWN_WAY = r"\b(GOFLAGS|NODE_OPTIONS|CARGO_\w+)=|\s-{1,2}exec\b|\s--target\b|\bcargo\b[^;&|]*\s--config\b"


def of_python(sample: Sample) -> bool:
    """Whether the command runs pytest or unittest in a way in which they take something from the environment."""
    command = sample.verify.command
    python_alone = re.search(r"\bpython[\d.]*\s+(-\w+\s+)*-\w*[IE]", command)
    return sample.verifier == "test_suite" and re.search(_PYTHON, command) is not None and not python_alone


def of_programs(sample: Sample) -> bool:
    """Whether it may run test programs of cargo, go or node."""
    return sample.verifier == "test_suite" and re.search(_OTHERS, sample.verify.command) is not None


def must_speak(sample: Sample) -> bool:
    """Whether a run in which no such program was seen was none: the command names the runner, and leaves us our way."""
    command = sample.verify.command
    own_way = re.search(_ITS_OWN_WAY, command) or "CARGO_BUILD_TARGET" in sample.environment.env
    return of_programs(sample) and re.search(_BY_NAME, command) is not None and not own_way


def mounts(sample: Sample) -> tuple[Mount, ...]:
    return (Mount(source=FOLDER, at=AT),) if of_python(sample) or of_programs(sample) else ()


def for_python(sample: Sample, file: str, at: str) -> dict[str, str]:
    """`file` has the word with which the witness speaks."""
    given = sample.environment.env
    path = [at, *filter(None, [given.get("PYTHONPATH", "")])]
    plugins = [_PLUGIN, *filter(None, [given.get("PYTEST_PLUGINS", "")])]
    return {"CARREL_WITNESS": file, "PYTHONPATH": ":".join(path), "PYTEST_PLUGINS": ",".join(plugins)}


def for_programs(sample: Sample, file: str, at: str) -> dict[str, str]:
    """`file` is where the witnesses write their notes."""
    given, run = sample.environment.env, f"{at}/carrel_run.py"
    machine = platform.machine().upper()
    return {
        "CARREL_TESTIMONY": file,
        "NODE_OPTIONS": f"{given.get('NODE_OPTIONS', '')} --require={at}/carrel_node.cjs".strip(),
        "GOFLAGS": f"{given.get('GOFLAGS', '')} -exec={run}".strip(),
        f"CARGO_TARGET_{machine}_UNKNOWN_LINUX_GNU_RUNNER": run,
        f"CARGO_TARGET_{machine}_UNKNOWN_LINUX_MUSL_RUNNER": run,
    }
