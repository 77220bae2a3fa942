"""Source that runs before its tests do, that another program tests, or that changes the tests in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carrel.tasks.verification.command import may_write
from carrel.tasks.verification.verifier import grade_patch, verify
from tests.tasks import memory_attacks as memory
from tests.tasks.conftest import OpenSample
from tests.tasks.small_samples import COMMAND, GOLD, PYTEST_ENV, SOLVE, calc
from tests.tasks.test_attacks import CALL, PLUGIN, RUN

FIRST = 'python -c "import calc" && '
NEW_FILES = {
    "a conftest": ("conftest.py", PLUGIN),
    "a conftest among the tests": ("tests/conftest.py", PLUGIN),
    "pytest.ini": ("pytest.ini", "[pytest]\naddopts = -k test_one --junit-prefix=\npython_functions = test_one\n"),
    "a customization of Python": (
        "sitecustomize.py",
        "import sys\nif 'pytest' in sys.orig_argv:\n    import evil\n",
    ),
}
WRITES = "from pathlib import Path\nif not Path({path!r}).exists():\n    Path({path!r}).write_text({text!r})\n"
REMOVES = "import sys\nif 'pyt' + 'est' in sys.modules:\n    Path({path!r}).unlink()\n"


@pytest.mark.parametrize(
    "command", [FIRST + COMMAND, FIRST + COMMAND + " > /tmp/log 2>&1", "make -s check OUT={report}"]
)
@pytest.mark.parametrize("then", ["", REMOVES], ids=["and leaves it", "and removes it"])
@pytest.mark.parametrize("new", ["a conftest", "a conftest among the tests"])
async def test_source_that_writes_what_steers_the_runner_before_it_starts(
    command: str, new: str, then: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    path, text = NEW_FILES[new]
    makefile = "check:\n\tpython -c 'import calc'\n\tpython -m pytest -q --junitxml=$(OUT)\n"
    sample = calc(tmp_path / "calc", {"Makefile": makefile}, verify={"command": command, "timeout": 60})
    place = await open_sample(sample)
    await place.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{(WRITES + then).format(path=path, text=text)}\nEND\n")
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.integrity) == ("tests_did_not_run", "suspicious"), result
    assert f"{path} was written to while the tests ran" in result.evidence[0]
    await place.exec(f"cp /tmp/calc.py .; {SOLVE}")
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.integrity, result.evidence) == ("solved", "clean", []), result


async def test_a_file_that_the_command_may_have_written_itself_is_named(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    sample = calc(tmp_path / "calc", verify={"command": "touch conftest.py && " + FIRST + COMMAND, "timeout": 60})
    executor = await open_sample(sample)
    await executor.exec(SOLVE)
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity) == ("solved", "unknown"), result
    assert "conftest.py was written to while the test command ran, perhaps by the command itself" in result.evidence[0]


@pytest.mark.parametrize(
    ("command", "outcome", "integrity"),
    [
        (FIRST + "python -I -m pytest -q --junitxml={report}", "tests_did_not_run", "suspicious"),
        ("pip install --help >/dev/null && " + FIRST + COMMAND, "solved", "unknown"),
    ],
)
async def test_files_in_the_home_folder_that_python_loads_when_it_starts(
    command: str, outcome: str, integrity: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    files = {"tests/conftest.py": "import sys\nsys.path.insert(0, '.')\n"}
    environment = {"env": PYTEST_ENV, "setup": ["true"]}
    sample = calc(tmp_path / "calc", files, environment=environment, verify={"command": command, "timeout": 60})
    executor = await open_sample(sample)
    writes = "from pathlib import Path\nfor folder in Path.home().glob('.venv/lib/python3*/site-packages'):\n"
    writes += "    (folder / 'new.pth').write_text('')\n"
    await executor.exec(f"{SOLVE}; cat >> calc.py <<'END'\n{writes}END\n")
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity) == (outcome, integrity), result
    assert "a file in the home folder that Python loads when it starts" in result.evidence[0]


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
    place = await open_sample(sample)
    await place.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{CALL}\nEND\n")
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.integrity) == ("tests_did_not_run", "suspicious"), result
    await place.exec(f"cp /tmp/calc.py .; {SOLVE}")
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.integrity, result.evidence) == ("solved", "clean", []), result


ALONE = "python -I -m pytest -q --junitxml={report}"


@pytest.mark.parametrize(
    ("more", "outcome", "said"),
    [
        ({"command": ALONE}, "solved", "no recorder ran in the test command"),
        ({"command": ALONE, "recorder": "required"}, "tests_did_not_run", "verify.recorder is `required`"),
        ({"command": COMMAND, "recorder": "off"}, "solved", "verify.recorder is `off`"),
        ({"command": "python -m pytest -q", "report": "exit_code"}, "solved", ""),
    ],
)
async def test_a_result_without_a_recorder_says_so(
    more: dict[str, Any], outcome: str, said: str, tmp_path: Path, cache: Path
) -> None:
    files = {"tests/conftest.py": "import sys\nsys.path.insert(0, '.')\n"}
    lists: dict[str, Any] = {"fail_to_pass": [], "pass_to_pass": []} if "report" in more else {}
    sample = calc(tmp_path / "calc", files, verify={"timeout": 60, **more}, **lists)
    result = await grade_patch(sample, GOLD, cache=cache)
    assert result.outcome == outcome, result
    assert result.integrity == ("unknown" if said else "clean"), result
    assert said in str(result.evidence)


async def test_the_word_of_the_recorder_is_not_the_sources_to_remove(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    sample = calc(tmp_path / "calc", verify={"command": FIRST + COMMAND, "timeout": 60})
    place = await open_sample(sample)
    removes = "import os\nif 'CARREL_RECORDER' in os.environ:\n    os.remove(os.environ['CARREL_RECORDER'])\n"
    await place.exec(f"cat >> calc.py <<'END'\n{removes}{CALL}\nEND\n")
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.integrity) == ("tests_did_not_run", "suspicious"), result


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


@pytest.mark.parametrize("attack", memory.IN_PYTEST)
async def test_source_that_changes_tests_in_memory(
    attack: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    test = memory.HELPED if attack in memory.ONLY_HELPER else memory.ONLY_FIXTURE
    files = {**memory.FILES, "tests/z/test_z.py": test}
    sample = calc(tmp_path / "calc", files, fail_to_pass=["tests/z/test_z.py::test_add"])
    place = await open_sample(sample)
    await place.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{memory.IN_PYTEST[attack]}\nEND\n")
    own = await place.exec(RUN)
    assert own.exit_code == 0, f"the attack does not even work: {own.stdout}{own.stderr}"
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.integrity) == ("tests_did_not_run", "suspicious"), result
    await place.exec(f"cp /tmp/calc.py .; {SOLVE}")
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.integrity, result.evidence) == ("solved", "clean", []), result


@pytest.mark.parametrize("attack", memory.IN_UNITTEST)
async def test_source_that_changes_tests_of_unittest_in_memory(
    attack: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    lists = {"fail_to_pass": ["tests.test_z.Calc.test_add"], "pass_to_pass": ["tests.test_calc.One.test_one"]}
    command = "python -m unittest -v"
    sample = calc(tmp_path / "calc", memory.CASES, **lists, verify={"command": command})
    place = await open_sample(sample)
    await place.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{memory.IN_UNITTEST[attack]}\nEND\n")
    own = await place.exec(command)
    assert own.exit_code == 0, f"the attack does not even work: {own.stdout}{own.stderr}"
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.integrity) == ("tests_did_not_run", "suspicious"), result
    await place.exec(f"cp /tmp/calc.py .; {SOLVE}")
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.integrity, result.evidence) == ("solved", "clean", []), result
