"""The original packages from PyPI, to run one program on the original and on the compatibility module."""

import atexit
import os
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tests.support.missing_parts import skip_without

SHIM = """
import sys, types
sys.path[:0] = {paths!r}
for name in {bare!r}:  # packages whose __init__ imports what is not needed here
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [{folder!r} + "/" + name.replace(".", "/")]
"""


@cache
def downloaded(requirement: str, *more: str) -> Path:
    """Return a folder with the files of a package, and of those it needs; the test is skipped without PyPI."""
    folder = Path(mkdtemp(prefix="carrel-original-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for each in (requirement, *more):
        # `download` and not `install`: some want a newer Python than the one that runs the tests.
        words = ["-q", "--no-deps", "--ignore-requires-python", "--only-binary=:all:", "-d", str(folder / "wheels")]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *words, each], capture_output=True, text=True, timeout=200
        )
        if done.returncode:
            skip_without(f"{each} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    for wheel in (folder / "wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def python_of(version: str) -> str:
    """Return a Python of this version or newer, or skip the test."""
    if sys.version_info >= tuple(map(int, version.split("."))):
        return sys.executable
    found = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for python in map(str, filter(None, found)):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    return skip_without(f"no Python {version}")


def run(program: str, folder: Path, python: str = sys.executable, **settings: str) -> list[str]:
    """Run a program in a folder and return the lines it prints."""
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    environment = {"PYTHONPATH": os.pathsep.join(sys.path[:1]), **os.environ, **settings}
    done = subprocess.run([python, str(path)], capture_output=True, text=True, timeout=200, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def shim(package: Path, *bare: str, site: bool = False) -> str:
    """Return the lines that make an original importable, of these packages only what a program imports.

    `site`: what else it needs may come from the environment of the tests."""
    paths = [str(package)] + ([each for each in sys.path if each.endswith("site-packages")] if site else [])
    return SHIM.format(paths=paths, bare=list(bare), folder=str(package))
