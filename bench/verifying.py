"""Places and verdicts: what they take besides the work and the tests themselves."""

import statistics
import time
from pathlib import Path

from carrel.tasks.environment import open_executor, prepare_sample
from carrel.tasks.sample import Sample
from carrel.tasks.verification.verifier import verify
from measure import Line, Scale, no_more_than

TEST = "import unittest\n\nfrom calc import add\n\n\nclass Calc(unittest.TestCase):\n    def test_add(self):\n"
HOW = "a repository of {:,} files in {:,} folders, one of them changed; unittest with its recorder"


async def measure(scale: Scale) -> list[Line]:
    files = scale(5000)
    sample = Sample(
        sample_id="calc-1",
        files=_repository(scale.folder / "files", files),
        fail_to_pass=["tests.test_calc.Calc.test_add"],
        verify={"command": "python -m unittest -v", "timeout": 60},
    )
    ready = await prepare_sample(sample, scale.folder / "cache")
    opened, judged = [], []
    for turn in range(scale(40) + 2):
        start = time.perf_counter()
        executor = await open_executor(ready)
        await executor.exec("true")
        took = time.perf_counter() - start
        await executor.write_file("calc.py", "def add(a, b):\n    return a + b\n")
        result = await verify(sample, executor, prepared=ready)
        await executor.close()
        assert result.outcome == "solved", result
        if turn > 1:
            opened.append(took * 1e3)
            judged.append(result.overhead_seconds * 1e3)
    how = HOW.format(files, files // 10)
    return [
        no_more_than("a sample's executor, opened, with a first command", statistics.median(opened), 40, "ms", how=how),
        no_more_than("a verdict, without the tests", statistics.median(judged), 100, "ms", how=how),
    ]


def _repository(folder: Path, count: int) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "__init__.py").write_text("")
    (folder / "tests" / "test_calc.py").write_text(f"{TEST}        self.assertEqual(add(1, 2), 3)\n")
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    for number in range(count):
        file = folder / f"part{number // 10}" / f"module{number}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"value = {number}\n" * 50)
    return folder
