"""Which test commands have a recorder, and what a result says without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carrel.tasks.verification.command import may_write
from carrel.tasks.verification.recorder_log import parse_lines, split_recorder_lines
from carrel.tasks.verification.verifier import grade_patch, verify
from tests.support.attacks import CALL
from tests.support.samples import COMMAND, GOLD, SOLVE, calc
from tests.tasks.conftest import OpenSample


@pytest.mark.parametrize(
    "command", ["sh run.sh {report}", "make -s check OUT={report}", "PYTHONPATH=. " + COMMAND, "python run.py {report}"]
)
async def test_a_runner_that_another_program_starts_has_a_recorder(
    command: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    files = {
        "run.sh": 'python -m pytest -q --junitxml="$1"\n',
        "Makefile": "check:\n\tpython -m pytest -q --junitxml=$(OUT)\n",
        "run.py": "import sys, pytest\nsys.exit(pytest.main(['-q', '--junitxml=' + sys.argv[1]]))\n",
    }
    sample = calc(tmp_path / "calc", files, verify={"command": command, "timeout": 60, "recorder": "required"})
    executor = await open_sample(sample)
    await executor.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{CALL}\nEND\n")
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity) == ("tests_did_not_run", "suspicious"), result
    await executor.exec(f"cp /tmp/calc.py .; {SOLVE}")
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity, result.evidence) == ("solved", "clean", []), result


ALONE = "python -I -m pytest -q --junitxml={report}"


@pytest.mark.parametrize(
    ("more", "outcome", "reason"),
    [
        ({"command": ALONE}, "solved", "no recorder ran in the test command"),
        ({"command": ALONE, "recorder": "required"}, "tests_did_not_run", "verify.recorder is `required`"),
        ({"command": COMMAND, "recorder": "off"}, "solved", "verify.recorder is `off`"),
        ({"command": "python -m pytest -q", "report": "exit_code"}, "solved", ""),
    ],
)
async def test_a_result_without_a_recorder_says_so(
    more: dict[str, Any], outcome: str, reason: str, tmp_path: Path, cache: Path
) -> None:
    files = {"tests/conftest.py": "import sys\nsys.path.insert(0, '.')\n"}
    lists: dict[str, Any] = {"fail_to_pass": [], "pass_to_pass": []} if "report" in more else {}
    sample = calc(tmp_path / "calc", files, verify={"timeout": 60, **more}, **lists)
    result = await grade_patch(sample, GOLD, cache=cache)
    assert result.outcome == outcome, result
    assert result.integrity == ("unknown" if reason else "clean"), result
    assert reason in str(result.evidence)


@pytest.mark.parametrize(
    ("command", "path", "may"),
    [
        ("python -m pytest > log.txt 2>&1", "tests/test_a.py", False),
        ("pip install -e . && python -m pytest", "conftest.py", False),
        ("cp hidden/conftest.py tests/ && pytest", "tests/conftest.py", True),
        ("cp hidden/conftest.py tests/ && pytest", "conftest.py", False),
        ("sed -i s/a/b/ tests/test_a.py; pytest", "tests/test_a.py", True),
        ("sed -i s/a/b/ tests/test_a.py; pytest", "tests/test_b.py", False),
        ("git apply /hidden.patch && pytest", "tests/test_a.py", True),
        ("git log -1; pytest", "tests/test_a.py", False),
        ("echo '[pytest]' > pytest.ini; pytest", "pytest.ini", True),
        ("sh -c 'cp -r /hidden/. . && pytest'", "conftest.py", True),
        ("cp $FILE $HERE; pytest", "conftest.py", True),
        ("python -m pytest -k patch", "conftest.py", False),
    ],
)
def test_what_a_command_may_write_itself(command: str, path: str, may: bool) -> None:
    assert may_write(command, path) is may


def test_recorder_lines_in_pieces() -> None:
    text = 'noise\nword {"event": "begun"}\n\nword {"event": "finished"}\nmore\nwor'
    for size in range(1, len(text)):
        rest, lines = "", []
        for at in range(0, len(text), size):
            found, rest = split_recorder_lines(rest + text[at : at + size], "word")
            lines += found
        log = parse_lines("".join(lines), "word")[1]
        assert (len(lines), log.begun, log.finished) == (2, True, True), size
        assert len(rest) <= len("\nword ")
