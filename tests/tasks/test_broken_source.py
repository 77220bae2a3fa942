"""Work that is merely broken is not solved, for a stated reason, and is not called forged."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from carrel.tasks.dataset import Datasets
from carrel.tasks.sample import Sample
from carrel.tasks.verification.changes import Change, Changes
from carrel.tasks.verification.verifier import grade, verify
from tests.support.missing_parts import skip_without
from tests.support.runner_samples import program
from tests.support.samples import ADD, ONE, written
from tests.tasks.conftest import OpenSample

ACCUSING = re.compile(r"forged|changed the test runner|from inside|was changed")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("echo 'def (' > calc.py", "SyntaxError"),
        ("rm calc.py", "calc"),
        ("sed -i 's/def add/def plus/' calc.py", "add"),
        ("echo 'import no_such_thing' >> calc.py", "no_such_thing"),
        ("echo 'raise ValueError(5)' >> calc.py", "ValueError: 5"),
    ],
)
async def test_source_that_pytest_cannot_import(
    calc_sample: Sample, open_sample: OpenSample, cache: Path, broken: str, reason: str
) -> None:
    executor = await open_sample(calc_sample)
    assert (await executor.exec(broken)).success
    result = await verify(calc_sample, executor, cache=cache)
    assert (result.outcome, result.suite_ran, result.missing) == ("not_solved", True, [ADD, ONE]), result
    assert reason in str(result.evidence)
    assert not ACCUSING.search(str(result.evidence)), result.evidence


@pytest.mark.parametrize(
    ("name", "needs", "broken", "outcome", "reason"),
    [
        ("calc-1", "python3", "echo 'def (' > calc.py", "not_solved", "SyntaxError"),
        ("calc-1", "python3", "rm calc.py", "not_solved", "calc"),
        ("cart-1", "node", "echo 'syntax error (' > cart.js", "not_solved", "cart"),
        ("ring-1", "make", "echo 'int x(' > ring.c", "tests_did_not_run", "ended with 2"),
        ("tally-1", "sh", "echo if > tally", "not_solved", ""),
    ],
)
async def test_source_that_other_runners_cannot_read(
    name: str, needs: str, broken: str, outcome: str, reason: str, open_sample: OpenSample, cache: Path
) -> None:
    if shutil.which(needs) is None or (name == "ring-1" and shutil.which("cc") is None):
        skip_without(f"{needs} is not installed here")
    sample = Datasets().get("demo").sample(name)
    executor = await open_sample(sample)
    assert (await executor.exec(broken)).success
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == outcome, result
    assert reason in str(result.evidence)
    assert not ACCUSING.search(str(result.evidence)), result.evidence


TAP_TEST = """
const { add } = require('./calc.js');
console.log(`TAP version 13\\n${add(1, 2) === 3 ? 'ok' : 'not ok'} 1 - adds\\n1..1`);
"""
PYTHON_TEST = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
KILLED = "import os\n\n\ndef add(a, b):\n    os.kill(os.getpid(), 11)\n"


@pytest.mark.parametrize(
    ("command", "report", "name", "source", "reason"),
    [
        ("node tap.js", "auto", "calc.js", "exports.add = (\n", "cannot be loaded: SyntaxError"),
        ("node tap.js", "tap", "calc.js", "exports.add = (\n", "cannot be loaded: SyntaxError"),
        ("node tap.js", "tap", "calc.js", "exports.add = () => process.abort();\n", "killed by SIG"),
        ("python -m pytest --junitxml={report}", "auto", "calc.py", KILLED, "killed by SIGSEGV"),
    ],
)
async def test_source_that_ends_its_tests_has_not_solved_them(
    command: str, report: Any, name: str, source: str, reason: str, tmp_path: Path
) -> None:
    if command.startswith("node"):
        program("node")
    files = written(tmp_path / "files", {"tap.js": TAP_TEST, "test_calc.py": PYTHON_TEST, name: ""})
    verification: Any = {"command": command, "report": report}
    wanted = ["adds"] if command.startswith("node") else ["test_calc.py::test_add"]
    sample = Sample(sample_id="calc-1", files=files, fail_to_pass=wanted, verify=verification)
    work = Changes((Change(name, "file", source.encode()),))
    result = await grade(sample, work, cache=tmp_path / "cache")
    assert (result.outcome, result.suite_ran, result.score) == ("not_solved", False, 0), result
    assert reason in result.evidence[0], result.evidence
    assert result.integrity != "suspicious"
    assert not ACCUSING.search(str(result.evidence)), result.evidence
