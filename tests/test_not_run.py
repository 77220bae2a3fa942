"""A test that could not be run is named at the end, with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST = "tests/storage/test_suite_locks.py::test_the_holder_is_named"


@pytest.mark.parametrize("workers", ["-n0", pytest.param("-n1", marks=pytest.mark.slow)])
def test_on_a_machine_without_redis_its_tests_are_named_as_not_run(tmp_path: Path, workers: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}"]
    bare = {**os.environ, "PATH": str(tmp_path)}  # no redis-server in it, and no apt-get
    run = subprocess.run(
        [*command, workers, TEST], env=bare, capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert run.returncode == 0, run.stdout
    assert "NOT RUN: 1 tests" in run.stdout
    assert f"{TEST}[redis]: no Redis: redis-server is not in PATH" in run.stdout
    assert f"{TEST}[memory]" not in run.stdout


def test_where_all_tests_run_nothing_is_said(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}", "-n0"]
    run = subprocess.run([*command, f"{TEST}[memory]"], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert run.returncode == 0, run.stdout
    assert "NOT RUN" not in run.stdout
