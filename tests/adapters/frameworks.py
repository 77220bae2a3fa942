"""What the tests of an adapter do when its framework is not installed, and programs that are killed."""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.missing_parts import skip_without


def require(package: str) -> None:
    """Skip the module that calls this, or fail it under CARREL_TESTS_NEED=all, when the package is missing."""
    if importlib.util.find_spec(package) is None:
        try:
            skip_without(f"{package} is not installed; `make test-real` installs the group adapters")
        except pytest.skip.Exception as skipped:
            raise pytest.skip.Exception(str(skipped), allow_module_level=True) from None


def first_line_before_kill(program: str, base: Path) -> str:
    """Run a program on a folder until it has printed a line, kill it with SIGKILL, and return the line."""
    running = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(base)], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    try:
        return running.stdout.readline().strip()
    finally:
        running.kill()
        running.wait()
        running.stdout.close()
