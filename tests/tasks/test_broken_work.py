"""Work that is merely broken is told as that, with its reason, and nobody is accused of anything."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from carrel.tasks.dataset import Datasets
from carrel.tasks.grading import verify
from carrel.tasks.sample import Sample
from tests.needs import skip_without
from tests.tasks.conftest import OpenPlace
from tests.tasks.small_samples import ADD, ONE

ACCUSING = re.compile(r"forged|changed the test runner|from inside|was changed")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("echo 'def (' > calc.py", "SyntaxError"),
        ("rm calc.py", "calc"),
        ("sed -i 's/def add/def plus/' calc.py", "add"),
        ("echo 'import no_such_thing' >> calc.py", "no_such_thing"),
        ("echo 'raise ValueError(5)' >> calc.py", "ValueError: 5"),
    ],
)
async def test_source_that_pytest_cannot_import(
    calc_sample: Sample, open_sample: OpenPlace, cache: Path, broken: str, said: str
) -> None:
    place = await open_sample(calc_sample)
    assert (await place.exec(broken)).success
    result = await verify(calc_sample, place, cache=cache)
    assert (result.outcome, result.suite_ran, result.missing) == ("not_solved", True, [ADD, ONE]), result
    assert said in str(result.evidence)
    assert not ACCUSING.search(str(result.evidence)), result.evidence


@pytest.mark.parametrize(
    ("name", "needs", "broken", "outcome", "said"),
    [
        ("calc-1", "python3", "echo 'def (' > calc.py", "not_solved", "SyntaxError"),
        ("calc-1", "python3", "rm calc.py", "not_solved", "calc"),
        ("cart-1", "node", "echo 'syntax error (' > cart.js", "not_solved", "cart"),
        ("ring-1", "make", "echo 'int x(' > ring.c", "tests_did_not_run", "ended with 2"),
        ("tally-1", "sh", "echo if > tally", "not_solved", ""),
    ],
)
async def test_source_that_other_runners_cannot_read(
    name: str, needs: str, broken: str, outcome: str, said: str, open_sample: OpenPlace, cache: Path
) -> None:
    if shutil.which(needs) is None or (name == "ring-1" and shutil.which("cc") is None):
        skip_without(f"{needs} is not installed here")
    sample = Datasets().get("demo").sample(name)
    place = await open_sample(sample)
    assert (await place.exec(broken)).success
    result = await verify(sample, place, cache=cache)
    assert result.outcome == outcome, result
    assert said in str(result.evidence)
    assert not ACCUSING.search(str(result.evidence)), result.evidence
