"""Real workers, in this Python and in the oldest and newest ones that are on this machine."""

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.worker.driver import Session

OTHERS = ("3.9", "3.13")


@functools.cache
def python_of(version: str) -> str | None:
    """Where a Python of this version is: on the PATH, or among pyenv's."""
    candidates = [shutil.which(f"python{version}")]
    if shutil.which("pyenv"):
        listed = subprocess.run(
            ["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False
        ).stdout.split()
        for found in listed:
            if found.startswith(f"{version}."):
                prefix = subprocess.run(["pyenv", "prefix", found], capture_output=True, text=True, check=False)
                candidates.insert(0, f"{prefix.stdout.strip()}/bin/python")
    for candidate in filter(None, candidates):
        version_check = subprocess.run(
            [candidate, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True, check=False
        )
        if version_check.returncode == 0 and version_check.stdout.strip() == str(tuple(map(int, version.split(".")))):
            return candidate
    return None


PYTHONS = {"this": sys.executable, **{v: path for v in OTHERS if (path := python_of(v)) is not None}}


@pytest.fixture
def session() -> Iterator[Session]:
    """A session in this Python."""
    with Session() as made:
        yield made


@pytest.fixture(params=PYTHONS)
def everywhere(request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session in each Python that is here."""
    with Session(PYTHONS[request.param]) as made:
        yield made
