"""What the code under test writes while it is judged, and what it built before: neither changes which tests are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carrel.tasks.sample import Sample
from carrel.tasks.verification.recorder_log import parse_lines, split_recorder_lines
from carrel.tasks.verification.verifier import verify
from tests.tasks.conftest import OpenSample
from tests.tasks.small_samples import ADD, COMMAND, ONE, PYTEST_ENV, SOLVE, calc, written
from tests.tasks.test_attacks import PLUGIN, RUN

TEST_ONE = "from calc import one\n\n\ndef test_one():\n    assert one() == 1\n"
TEST_ADD = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
NO_TEST = "def test_add():\n    pass\n"
# The first test imports it, and then the second is another.
OVERWRITTEN = """
from pathlib import Path
second = Path(__file__).with_name("tests") / "z" / "test_z.py"
if "calc" in second.read_text():
    second.write_text({text!r})
"""
PUT_BACK = f"import pathlib\npathlib.Path(__file__).write_text({TEST_ADD!r})\n{NO_TEST}"
NEW_CONFTEST = f"""
from pathlib import Path
(Path(__file__).with_name("tests") / "z" / "conftest.py").write_text({PLUGIN!r})
"""
IMPORT_HOOK = f"""
import importlib.machinery, importlib.util, sys

class Other(importlib.machinery.SourceFileLoader):
    def get_data(self, path):
        return {NO_TEST.encode()!r}

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "test_z":
            where = __file__.replace("calc.py", "tests/z/test_z.py")
            return importlib.util.spec_from_file_location(name, where, loader=Other(name, where))

sys.meta_path.insert(0, Finder)
"""
VENDORED_HOOK = """
import sys

class Lazy:
    def find_spec(self, name, path=None, target=None):
        return None

sys.meta_path.append(Lazy())
"""
WRITERS = {
    "another test": OVERWRITTEN.format(text=NO_TEST),
    "another test that puts the first back": OVERWRITTEN.format(text=PUT_BACK),
    "a conftest": NEW_CONFTEST,
}


@pytest.mark.parametrize("writer", WRITERS)
async def test_tests_that_the_source_writes_while_others_are_collected(
    writer: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    files = {"tests/test_calc.py": TEST_ONE, "tests/z/test_z.py": TEST_ADD}
    sample = calc(tmp_path / "calc", files, fail_to_pass=["tests/z/test_z.py::test_add"])
    place = await open_sample(sample)
    await place.exec(f"cp -r . /tmp/honest; cat >> calc.py <<'END'\n{WRITERS[writer]}\nEND\n")
    assert (await place.exec(RUN)).exit_code == 0
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "tests_did_not_run", result
    assert "while the tests ran" in result.evidence[0] or "the code of test_z" in result.evidence[0]
    await place.exec(f"cp -r /tmp/honest/. .; {SOLVE}")
    assert (await verify(sample, place, cache=cache)).outcome == "solved"


async def test_an_import_hook_that_loads_other_tests(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    files = {"tests/test_calc.py": TEST_ONE, "tests/z/test_z.py": TEST_ADD}
    sample = calc(tmp_path / "calc", files, fail_to_pass=["tests/z/test_z.py::test_add"])
    place = await open_sample(sample)
    await place.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{IMPORT_HOOK}\nEND\n")
    own = await place.exec(RUN)
    assert own.exit_code == 0, own.stdout
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "tests_did_not_run", result
    assert "the way to import test_z" in result.evidence[0]
    # A hook for something else is nobody's business.
    await place.exec(f"cp /tmp/calc.py .; {SOLVE}; cat >> calc.py <<'END'\n{VENDORED_HOOK}\nEND\n")
    assert (await verify(sample, place, cache=cache)).outcome == "solved"


async def test_a_script_that_is_rewritten_by_what_it_runs(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    """It starts the program under test as a process of its own, which is not enough."""
    check = 'test "$(sh greet.sh)" = hello && echo "ok 1 - greets" || echo "not ok 1 - greets"\necho 1..1\n'
    files = written(tmp_path / "greet", {"greet.sh": "echo hi\n", "check.sh": check})
    verification: Any = {"command": "sh check.sh", "report": "tap"}
    sample = Sample(sample_id="greet-1", files=files, fail_to_pass=["greets"], verify=verification)
    place = await open_sample(sample)
    honest = await verify(sample, place, cache=cache)
    assert honest.outcome == "not_solved", honest
    await place.write_file("greet.sh", "echo 'echo ok 1 - greets; echo 1..1' > check.sh\necho hello\n")
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "tests_did_not_run", result
    await place.write_file("greet.sh", "echo hello\n")
    assert (await verify(sample, place, cache=cache)).outcome == "solved"


C_FILES = {
    "add.c": '#include "add.h"\nint add(int a, int b) { return a + SIGN * b; }\n',
    "add.h": "#define SIGN -1\nint add(int, int);\n",
    "verdict.c": '#include <stdio.h>\n#include "add.h"\n'
    'int main(void) { printf("1..1\\n%s 1 - adds\\n", add(1, 2) == 3 ? "ok" : "not ok"); return 0; }\n',
    "Makefile": "check: verdict\n\t./verdict\nverdict: verdict.o add.o\n\tcc -o $@ $^\n%.o: %.c\n\tcc -c -o $@ $<\n",
}


async def test_what_the_set_up_has_built_is_built_again(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    sample = Sample(
        sample_id="c-1",
        files=written(tmp_path / "c", C_FILES),
        fail_to_pass=["adds"],
        environment={"setup": ["make -s verdict"], "programs": ["make", "cc"]},  # type: ignore[arg-type]
        verify={"command": "make -s check", "report": "tap", "protected": ["verdict.c"]},  # type: ignore[arg-type]
    )
    place = await open_sample(sample)
    await place.exec("printf '#!/bin/sh\\necho 1..1; echo ok 1 - adds\\n' > verdict")
    assert "\nok 1" in (await place.exec("make -s check")).stdout
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "not_solved", result
    assert result.left_out["verdict"] == "built, not written; it is built again"
    # The Makefile does not know of the header: who changes it builds all anew, and is judged so.
    await place.exec("sed -i 's/SIGN -1/SIGN 1/' add.h; rm *.o verdict; make -s check")
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "solved", result


async def test_an_environment_that_the_set_up_made_in_the_workdir_stays(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    sample = calc(
        tmp_path / "calc",
        environment={"env": PYTEST_ENV, "setup": ["python -m venv --system-site-packages --without-pip env"]},
        verify={"command": "env/bin/" + COMMAND, "timeout": 100},
    )
    place = await open_sample(sample)
    forged = "printf 'import sys; sys.exit(0)' > $(echo env/lib/python3*/site-packages)/pytest.py"
    await place.exec(f"{forged}; rm env/bin/python; printf '#!/bin/sh\\n' > env/bin/python; chmod +x env/bin/python")
    assert (await place.exec("env/bin/" + RUN)).exit_code == 0
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "not_solved", result
    assert result.required == {ADD: "failed", ONE: "passed"}


async def test_tests_that_write_more_than_a_result_holds_are_believed(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    noise = (
        "import os\n\nimport pytest\n\n\n@pytest.mark.parametrize('number', range(150))\n"
        "def test_noise(number):\n    os.write(2, b'y' * 100_000)\n"
    )
    wanted = [ONE, *(f"tests/test_noise.py::test_noise[{number}]" for number in range(150))]
    verification = {"command": COMMAND + " -s", "timeout": 100}
    sample = calc(tmp_path / "calc", {"tests/test_noise.py": noise}, pass_to_pass=wanted, verify=verification)
    place = await open_sample(sample)
    await place.exec(SOLVE)
    result = await verify(sample, place, cache=cache, keep=tmp_path / "kept")
    assert result.outcome == "solved", result.evidence
    assert (tmp_path / "kept" / "stderr-1.txt").stat().st_size == 15_000_000 or "y" * 100_000 in result.stderr
    assert len(result.stderr) < 1_000_000


def test_lines_of_a_witness_in_pieces() -> None:
    said = 'noise\nword {"event": "begun"}\n\nword {"event": "finished"}\nmore\nwor'
    for size in range(1, len(said)):
        rest, lines = "", []
        for at in range(0, len(said), size):
            found, rest = split_recorder_lines(rest + said[at : at + size], "word")
            lines += found
        told = parse_lines("".join(lines), "word")[1]
        assert (len(lines), told.begun, told.finished) == (2, True, True), size
        assert len(rest) <= len("\nword ")


async def test_folders_too_deep_to_be_named_do_not_keep_a_verdict_away(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    sample = calc(tmp_path / "calc")
    place = await open_sample(sample)
    deep = "import os\nfor _ in range(150):\n    os.mkdir('d' * 50)\n    os.chdir('d' * 50)\nopen('x', 'w').close()\n"
    done = await place.exec(["python", "-c", deep])
    assert done.success, done.stderr
    assert (await verify(sample, place, cache=cache)).outcome == "not_solved"
