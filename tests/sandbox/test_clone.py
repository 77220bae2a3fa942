"""These tests run wherever the clone lies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
TEST = "tests/sandbox/test_probe.py::test_this_machine_can_do_it_all"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start sessions of another user")
def test_below_a_folder_that_only_its_owner_may_enter(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    clone = closed / "a clone"
    leave_out = shutil.ignore_patterns("__pycache__")
    for folder in ("tests", "src/carrel/guest"):
        shutil.copytree(HERE / folder, clone / folder, ignore=leave_out)
    shutil.copy(HERE / "pyproject.toml", clone)
    closed.chmod(0o700)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}"]
    fresh = {name: value for name, value in os.environ.items() if name != "CARREL_TESTS_READABLE"}
    run = subprocess.run([*command, TEST], cwd=clone, env=fresh, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert "2 passed" in run.stdout
