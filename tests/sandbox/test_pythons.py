"""The room runs in foreign interpreters: every Python from 3.9 on that this machine has."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess

import pytest

from tests.sandbox.host import Session, Zygote

VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13"]


def find(version: str) -> str | None:
    candidates = [
        shutil.which(f"python{version}"),
        *glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")),
    ]
    candidates += glob.glob(os.path.expanduser(f"~/.local/share/uv/python/cpython-{version}.*/bin/python3"))
    for python in candidates:
        if python and subprocess.run([python, "-I", "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_a_session_and_a_fork_of_it(version: str) -> None:
    python = find(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    code = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
    folders = subprocess.check_output([python, "-I", "-c", code], text=True).splitlines()
    zygote = Zygote(python=python)
    try:
        session = Session(zygote, {"readonly": folders})
        assert session.value("import sys; answer = '%d.%d' % sys.version_info[:2]") == version
        fork = session.fork()
        assert fork.value("answer = '%d.%d' % sys.version_info[:2]") == version
        fork.close()
        session.close()
    finally:
        zygote.close()
