"""Harbor tasks as their authors write them, in images of this machine's own Python."""

from __future__ import annotations

from pathlib import Path

from tests.support.real_docker import IMAGE
from tests.support.samples import written

TOML = """
schema_version = "1.4"

[task]
name = "carrel/greeting"
description = "Write a greeting"

[metadata]
difficulty = "easy"
tags = ["files"]

[verifier]
timeout_sec = 90.0
env = { WANTED = "hello world" }

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 300.0
cpus = 1
memory_mb = 512
storage_mb = 64
network_mode = "no-network"
env = { LANGUAGE = "${GREETING_LANGUAGE:-en}" }
"""
TEST = """#!/bin/bash
if [ "$(cat /app/greeting.txt)" = "$WANTED" ] && [ -x /app/greet ] && ! [ -e /solution ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
SOLVE = """#!/bin/bash
cp /solution/answer.txt /app/greeting.txt
printf '#!/bin/sh\\ncat /app/greeting.txt\\n' > /app/greet && chmod +x /app/greet
"""
FILES = {
    "task.toml": TOML,
    "instruction.md": "Write `hello world` to greeting.txt, and a program `greet` that prints it.\n",
    "environment/Dockerfile": f"FROM {IMAGE} AS base\nWORKDIR /other\nFROM base\nWORKDIR /app\nCOPY seed.txt .\n",
    "environment/seed.txt": "seed\n",
    "tests/test.sh": TEST,
    "solution/solve.sh": SOLVE,
    "solution/answer.txt": "hello world\n",
}


def harbor_task(folder: Path, **changed: str | None) -> Path:
    """A task; `changed` are files by their names with `_` for `/` and `.`, None for those that it lacks."""
    names = {name.replace("/", "_").replace(".", "_"): name for name in FILES}
    files = {names[name]: text for name, text in changed.items() if text is not None}
    gone = {names[name] for name, text in changed.items() if text is None}
    return written(folder, {name: text for name, text in {**FILES, **files}.items() if name not in gone})
