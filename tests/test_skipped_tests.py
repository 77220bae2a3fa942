"""A test that was skipped is named at the end of the run, with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST = "tests/storage/test_suite.py::test_the_holder_is_named"


def run_pytest(folder: Path, *arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Run pytest with these environment variables, and without CARREL_TESTS_NEED unless it is one of them."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={folder / 'run'}",
        *arguments,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "CARREL_TESTS_NEED"} | settings
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize("workers", ["-n0", pytest.param("-n1", marks=pytest.mark.slow)])
def test_without_redis_its_tests_are_listed_as_not_run(tmp_path: Path, workers: str) -> None:
    run = run_pytest(tmp_path, workers, TEST, PATH=str(tmp_path))  # no redis-server in it, and no apt-get
    assert run.returncode == 0, run.stdout
    assert "NOT RUN: 1 tests" in run.stdout
    assert f"{TEST}[redis]: no Redis: redis-server is not in PATH" in run.stdout
    assert f"{TEST}[memory]" not in run.stdout


def test_a_missing_part_is_a_failure_when_all_are_required(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "-n0", TEST, PATH=str(tmp_path), CARREL_TESTS_NEED="all")
    assert run.returncode == 1, run.stdout
    assert "no Redis: redis-server is not in PATH" in run.stdout
    assert "CARREL_TESTS_NEED=all: no part may be missing" in run.stdout
    assert "1 error" in run.stdout
    assert "NOT RUN" not in run.stdout


def test_another_value_of_the_setting_is_refused(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "-n0", TEST, CARREL_TESTS_NEED="al")
    assert run.returncode == 4, run.stdout
    assert "CARREL_TESTS_NEED=al is not known; use CARREL_TESTS_NEED=all" in run.stderr


def test_nothing_is_listed_when_all_tests_run(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "-n0", f"{TEST}[memory]")
    assert run.returncode == 0, run.stdout
    assert "NOT RUN" not in run.stdout
