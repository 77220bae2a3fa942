"""Small samples, written to a folder: real files, real tests, one thing wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from carrel.tasks.sample import Sample

# The plugins of the Python that runs these tests have nothing to do with the samples.
PYTEST_ENV = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
COMMAND = "python -m pytest -q --junitxml={report}"

CALC = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef one():\n    return 1\n",
    "tests/test_calc.py": (
        "from calc import add, one\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
        "def test_one():\n    assert one() == 1\n"
    ),
}
ADD, ONE = "tests/test_calc.py::test_add", "tests/test_calc.py::test_one"
SOLVE = "sed -i 's/a - b/a + b/' calc.py"
GOLD = (
    "--- a/calc.py\n+++ b/calc.py\n@@ -1,5 +1,5 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    " \n \n def one():\n"
)


def written(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(0o755)
    return folder


def calc(folder: Path, files: dict[str, str] | None = None, **more: Any) -> Sample:
    fields: dict[str, Any] = {
        "sample_id": "calc-1",
        "problem_statement": "add() subtracts.",
        "files": written(folder, {**CALC, **(files or {})}),
        "fail_to_pass": [ADD],
        "pass_to_pass": [ONE],
        "patch": GOLD,
        "environment": {"env": PYTEST_ENV},
        "verify": {"command": COMMAND, "timeout": 60},
    }
    return Sample(**{**fields, **more})
