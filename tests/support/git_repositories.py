"""Small git repositories, one for each common layout of a project.

In each, the commit after the tag `v1` fixes something and brings the test for it. As a program it writes one of them:
`python -m tests.support.git_repositories src FOLDER`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.git_repository import Repository

HALF = "def half(number):\n    return number // 2\n"
FIXED = "def half(number):\n    return number / 2\n"
TESTS = "from halves import half\n\n\ndef test_even():\n    assert half(4) == 2\n"
ODD = "\n\ndef test_odd():\n    assert half(3) == 1.5\n"

BACKEND = '''"""A build backend without requirements: an editable wheel, after compiling what C code there is."""

import os
import subprocess
import sysconfig
import zipfile

NAME = "halves-1.0"


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    source = os.path.abspath("src/halves/_fast.c")
    if os.path.exists(source):
        include = sysconfig.get_path("include")
        target = source.replace(".c", sysconfig.get_config_var("EXT_SUFFIX"))
        subprocess.run(["cc", "-shared", "-fPIC", f"-I{include}", source, "-o", target], check=True)
    about = f"{NAME}.dist-info"
    with zipfile.ZipFile(os.path.join(wheel_directory, f"{NAME}-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("halves.pth", os.path.abspath("src"))
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\\nName: halves\\nVersion: 1.0\\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{about}/RECORD", "")
    return f"{NAME}-py3-none-any.whl"
'''
PYPROJECT = """[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "halves"
version = "1.0"

[dependency-groups]
tests = ["pytest", {include-group = "more"}]
more = ["mypy", "hypothesis>=6"]
"""
C_CODE = """#include <Python.h>

static PyObject *half(PyObject *self, PyObject *number) {
    return PyFloat_FromDouble(%s);
}

static PyMethodDef methods[] = {{"half", half, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", NULL, -1, methods};

PyMODINIT_FUNC PyInit__fast(void) { return PyModule_Create(&module); }
"""


def of_commits(folder: Path, begin: dict[str, str], fix: dict[str, str]) -> Repository:
    made = Repository(folder)
    made.commit("Begin", begin)
    made.git("tag", "v1")
    made.base = made.commit("Halve odd numbers too", fix)
    return made


def src(folder: Path) -> Repository:
    """The package is in `src` and has to be installed, or found there."""
    begin = {"src/halves/__init__.py": HALF, "tests/test_halves.py": TESTS, "pyproject.toml": PYPROJECT}
    fix = {"src/halves/__init__.py": FIXED, "tests/test_halves.py": TESTS + ODD}
    return of_commits(folder, begin | {"backend.py": BACKEND}, fix)


def flat(folder: Path) -> Repository:
    """The module is at the root."""
    return of_commits(
        folder,
        {"halves.py": HALF, "tests/test_halves.py": TESTS},
        {"halves.py": FIXED, "tests/test_halves.py": TESTS + ODD},
    )


def tox(folder: Path) -> Repository:
    """The tests lie in an unusual folder, which `tox.ini` names with pytest's settings."""
    settings = (
        "[tox]\nenvlist = py3\n\n[testenv]\ncommands = python -m pytest\n\n[pytest]\n"
        "testpaths = checks\npython_files = check_*.py\n"
    )
    return of_commits(
        folder,
        {"halves.py": HALF, "checks/check_halves.py": TESTS, "tox.ini": settings},
        {"halves.py": FIXED, "checks/check_halves.py": TESTS + ODD},
    )


def many(folder: Path) -> Repository:
    """6,000 tests that pass all the time, and one that fails."""
    more = "import pytest\n" + TESTS + "\n\n@pytest.mark.parametrize('number', range(6000))\n"
    more += "def test_each(number):\n    assert half(2 * number) == number\n"
    return of_commits(
        folder,
        {"halves.py": HALF, "tests/test_halves.py": more},
        {"halves.py": FIXED, "tests/test_halves.py": more + ODD},
    )


def c_extension(folder: Path) -> Repository:
    """What is tested is compiled when the project is installed."""
    begin = {
        "src/halves/__init__.py": "from halves._fast import half as half\n",
        "src/halves/_fast.c": C_CODE % "PyLong_AsLong(number) / 2",
        "tests/test_halves.py": TESTS,
        "pyproject.toml": PYPROJECT,
        "backend.py": BACKEND,
        ".gitignore": "*.so\n",
    }
    fix = {"src/halves/_fast.c": C_CODE % "PyFloat_AsDouble(number) / 2", "tests/test_halves.py": TESTS + ODD}
    return of_commits(folder, begin, fix)


def root_test_js(folder: Path) -> Repository:
    """A module of node with its tests beside it."""
    code = "module.exports = (number) => {};\n"
    test = "const test = require('node:test');\nconst assert = require('node:assert');\nconst half = require('./');\n"
    test += "test('even', () => assert.equal(half(4), 2));\n"
    return of_commits(
        folder,
        {"index.js": code.format("Math.floor(number / 2)"), "test.js": test, "package.json": '{"name": "halves"}\n'},
        {"index.js": code.format("number / 2"), "test.js": test + "test('odd', () => assert.equal(half(3), 1.5));\n"},
    )


def flaky(folder: Path) -> Repository:
    """200 tests of which each passes every other time, by chance."""
    more = "import random\nimport pytest\n" + TESTS + "\n\n@pytest.mark.parametrize('number', range(200))\n"
    more += "def test_chance(number):\n    assert random.random() < 0.5\n"
    return of_commits(
        folder,
        {"halves.py": HALF, "tests/test_halves.py": more},
        {"halves.py": FIXED, "tests/test_halves.py": more + ODD},
    )


def not_importable(folder: Path) -> Repository:
    """The new test file imports what comes with the fix; another one can be imported all the time."""
    new = "from halves import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
    return of_commits(
        folder,
        {"halves.py": HALF, "tests/test_halves.py": TESTS},
        {"halves.py": HALF + "\n\ndef double(number):\n    return 2 * number\n", "tests/test_double.py": new},
    )


LAYOUTS: dict[str, Callable[[Path], Repository]] = {
    made.__name__: made for made in (src, flat, tox, many, c_extension, root_test_js, flaky, not_importable)
}

if __name__ == "__main__":
    LAYOUTS[sys.argv[1]](Path(sys.argv[2]))
