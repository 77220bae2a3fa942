"""Reasons for suspicion in a change, and the integrity of a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.tasks.sample import Sample
from carrel.tasks.verification.changes import Change
from carrel.tasks.verification.integrity import features_of, find_suspicious_uses
from carrel.tasks.verification.verifier import verify
from tests.support.samples import SOLVE, calc
from tests.tasks.conftest import OpenSample

BEFORE = "import ctypes\n\n\ndef add(a, b):\n    return a - b\n"


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("import _pytest.runner", "imports _pytest.runner"),
        ("from unittest import mock", "imports unittest"),
        ("import gc\ngc.get_objects()", "uses gc.get_objects"),
        ("from sys import settrace", "uses sys.settrace"),
        ("import ast\nast.parse = len", "assigns to ast.parse"),
        ("import builtins\nsetattr(builtins, 'compile', len)", "assigns to attributes of builtins"),
        ("import sys\nsys.meta_path.insert(0, 1)", "uses sys.meta_path"),
        ("import os\nos.kill(-1, 19)", "sends signals to groups of processes by os.kill"),
        ("import os\nos.killpg(os.getpgrp(), 9)", "uses os.killpg"),
        ("f.__code__ = g.__code__", "assigns to __code__"),
        ("import sys\nsys._getframe(1).f_globals['x'] = 1", "uses f_globals"),
        ("import os\nos.environ.get('PYTEST_CURRENT_TEST')", "names PYTEST_CURRENT_TEST"),
    ],
)
def test_what_honest_source_rarely_does(source: str, uses: str) -> None:
    assert uses in features_of(source)


@pytest.mark.parametrize(
    "source",
    [
        "import ast\nast.literal_eval('1')",
        "import gc\ngc.collect()",
        "import os, sys\nos.kill(pid, 15)\nsys.stdout = out\nos.environ['A'] = 'b'",
        "import inspect\ninspect.signature(f)",
        "import importlib\nimportlib.import_module('json')",
        "class A:\n    def f(self):\n        self.code = 1\n        setattr(self, 'x', 2)",
        "# it is tested by pytest and unittest\ndef run():\n    'Runs pytest.'",
        "def (",
    ],
)
def test_what_honest_source_does(source: str) -> None:
    assert features_of(source) == set()


def test_only_what_is_new_and_not_in_the_samples_own_solution_is_a_reason() -> None:
    sample = Sample(sample_id="a", patch="+sys.settrace(None)\n")

    def reasons(new: str, path: str = "calc.py") -> list[str]:
        return find_suspicious_uses([(Change(path, "file", new.encode()), BEFORE.encode())], sample)

    assert reasons("import ctypes\nimport sys\nsys.settrace(f)\n") == []
    assert reasons("import ctypes\nimport gc\ngc.get_objects()\n") == ["calc.py now uses gc.get_objects"]
    assert reasons("process.reallyExit(0);\n", "a.js") == ["a.js now uses reallyExit"]
    assert reasons("It runs under pytest and node:test.\n", "README.md") == []


async def test_a_suspicious_solution_says_why(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    sample = calc(tmp_path / "calc")
    executor = await open_sample(sample)
    await executor.exec(f"{SOLVE}; printf 'import gc\\nALL = gc.get_objects\\n' >> calc.py")
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity) == ("solved", "suspicious"), result
    assert result.evidence == ["calc.py now uses gc.get_objects"]
