"""What the file store's own tests share: the other program, and places that only a namespace of its own can have."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.missing_parts import skip_without
from tests.support.stores import OtherProcess

_ROOT = Path(__file__).parents[2]


def command(verb: str, root: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.file_store_process", verb, str(root), *words]


async def start(verb: str, root: Path, *words: str) -> OtherProcess:
    """Start the other program; the caller kills it."""
    pipe = asyncio.subprocess.PIPE
    return OtherProcess(
        await asyncio.create_subprocess_exec(*command(verb, root, *words), stdin=pipe, stdout=pipe, cwd=_ROOT)
    )


def run(verb: str, root: Path, *words: str, before: str = "") -> list[str]:
    """Run the other program to its end; with `before`, after this shell command in namespaces of its own."""
    line = command(verb, root, *words)
    if before:
        line = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", *line]
    ended = subprocess.run(line, cwd=_ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Exception ignored" not in ended.stderr, ended.stderr
    return ended.stdout.splitlines()


def needs_namespaces(before: str, root: Path) -> None:
    """Skip, with the reason, where this machine does not let us have such a place."""
    if shutil.which("unshare") is None:
        skip_without("no `unshare` here to make a place of its own")
    line = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", before]
    tried = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode:
        pytest.skip(f"`{before}` is not allowed in a namespace here: {tried.stderr.strip()}")
