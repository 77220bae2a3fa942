"""Verifiers of every kind, on real commands."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from carrel.tasks.sample import Sample
from carrel.tasks.verification.changes import Changes
from carrel.tasks.verification.verifier import SHOWN_OUTPUT, grade, grade_patch, verify
from tests.support.runner_samples import CTEST, program
from tests.support.samples import ADD, COMMAND, GOLD, ONE, SOLVE, calc, written
from tests.tasks.conftest import OpenSample


def bare(folder: Path, files: dict[str, str], command: str, **more: Any) -> Sample:
    verify = {"command": command, "timeout": 60, **more.pop("verify", {})}
    return Sample(sample_id="bare-1", files=written(folder, files), verify=verify, **more)


async def judged(sample: Sample, cache: Path, patch: str = "") -> Any:
    return await grade_patch(sample, patch, cache=cache)


async def test_the_reference_solution_is_one(calc_sample: Sample, cache: Path) -> None:
    result = await judged(calc_sample, cache, GOLD)
    assert (result.outcome, result.passed, result.failed, result.total) == ("solved", 2, 0, 2)
    assert [test.name for test in result.passes] == ["tests.test_calc::test_add", "tests.test_calc::test_one"]


async def test_a_patch_that_does_not_apply(calc_sample: Sample, cache: Path) -> None:
    result = await judged(calc_sample, cache, GOLD.replace("a - b", "a * b"))
    assert result.outcome == "infrastructure_failed"
    assert "PatchRefused: the patch does not apply: error: patch failed: calc.py:1" in result.evidence[0]
    assert "PatchRefused" in (await judged(calc_sample, cache, "no patch at all")).evidence[0]


async def test_a_test_patch_that_does_not_apply(calc_sample: Sample, cache: Path) -> None:
    sample = calc_sample.model_copy(update={"test_patch": GOLD.replace("calc.py", "no.py")})
    result = await grade(sample, Changes(), cache=cache)
    assert result.outcome == "infrastructure_failed"
    assert "the sample's test_patch does not apply: error: no.py: No such file" in result.evidence[0]


async def test_a_binary_patch(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"\0\1\2")
    made = ["git", "diff", "--no-index", "--binary", "/dev/null", "data.bin"]
    patch = subprocess.run(made, cwd=tmp_path, capture_output=True, text=True, timeout=60).stdout
    assert "GIT binary patch" in patch
    sample = bare(tmp_path / "s", {"a": "a"}, "test $(wc -c < data.bin) = 3")
    assert (await judged(sample, cache, patch)).outcome == "solved"


async def test_a_sample_with_no_command_cannot_be_judged(tmp_path: Path, cache: Path) -> None:
    result = await judged(bare(tmp_path / "s", {}, ""), cache)
    assert (result.outcome, "verify has no command" in result.evidence[0]) == ("infrastructure_failed", True)


LATE = """
echo begun
printf '<testsuite><testcase classname="tests.test_calc" name="test_add"/></testsuite>' > {report}
sleep 100
"""


async def test_a_run_that_takes_too_long(tmp_path: Path, cache: Path) -> None:
    sample = calc(tmp_path / "calc", verify={"command": LATE, "timeout": 2})
    result = await judged(sample, cache, GOLD)
    assert (result.outcome, result.suite_ran) == ("tests_did_not_run", False)
    assert "did not end within 2 s" in result.evidence[0]
    assert "begun" in result.stdout


async def test_a_runner_that_is_not_there(tmp_path: Path, cache: Path) -> None:
    sample = calc(tmp_path / "calc", verify={"command": "no-such-runner --out={report}"})
    result = await judged(sample, cache, GOLD)
    assert result.outcome == "tests_did_not_run"
    assert "ended with 127 and wrote no report" in result.evidence[0]


async def test_a_flaky_test_is_repeated_in_a_new_sandbox(tmp_path: Path, cache: Path) -> None:
    # Random, and yet surely both ways in a while: of 21 runs all fail once in two million times.
    flaky = "import random\n\ndef test_add():\n    assert random.random() < 0.5\n"
    sample = calc(tmp_path / "calc", {"tests/test_calc.py": flaky}, pass_to_pass=[])
    sample.verify.retries = 20
    outcomes = {(await judged(sample, cache)).outcome for _ in range(4)}
    assert outcomes <= {"solved", "flaky"}


async def test_a_failure_that_stays_is_one_however_often_it_is_tried(calc_sample: Sample, cache: Path) -> None:
    calc_sample.verify.retries = 2
    result = await judged(calc_sample, cache)
    assert (result.outcome, result.attempts, result.flaky) == ("not_solved", 3, [])


async def test_output_is_bounded_in_the_answer_and_whole_where_it_is_kept(tmp_path: Path, cache: Path) -> None:
    sample = bare(tmp_path / "s", {}, "seq 1 200000; echo end >&2")
    result = await grade(sample, Changes(), cache=cache, keep=tmp_path / "kept")
    assert len(result.stdout) < SHOWN_OUTPUT + 100
    assert "characters left out" in result.stdout
    assert (tmp_path / "kept" / "stdout-1.txt").read_text().count("\n") == 200_000
    assert (tmp_path / "kept" / "stderr-1.txt").read_text() == "end\n"


async def test_reports_in_the_working_folder_are_of_this_run_only(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    old = '<testsuite><testcase classname="t" name="a"/></testsuite>'
    copy = "mkdir -p out/sub; cp real.xml out/sub/TEST-a.xml"
    new = '<testsuite><testcase classname="t" name="a"><failure/></testcase></testsuite>'
    files = {"out/sub/TEST-a.xml": old, "out/sub/TEST-b.xml": old, "real.xml": new}
    sample = bare(tmp_path / "s", files, copy, fail_to_pass=["t::a"], verify={"reports": ["out/**/TEST-*.xml"]})
    executor = await open_sample(sample)
    await executor.write_file("out/sub/TEST-c.xml", old)
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.total) == ("not_solved", 1)
    assert result.left_out == {"out/sub/TEST-c.xml": "protected by the sample"}


LINT = """#!/bin/sh
if grep -q 'eval(' a.py; then found='{"ruleId": "E1", "level": "error", "message": {"text": "eval"}}'; fi
echo '{"$schema": "sarif-2.1.0", "version": "2.1.0", "runs": [{"tool": {}, "results": ['$found']}]}' > $1
test -z "$found"
"""


async def test_a_linter_that_writes_sarif(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    files = {"a.py": "eval('1')\n", "lint.sh": LINT, ".flake8": "[flake8]\n"}
    sample = bare(tmp_path / "s", files, "./lint.sh {report}", verifier="linter")
    executor = await open_sample(sample)
    await executor.exec("echo ignore=all >> .flake8; echo 'exit 0' > lint.sh")
    result = await verify(sample, executor, cache=cache)
    assert (result.tool, result.outcome, result.failed, result.evidence) == ("linter", "not_solved", 1, ["1 findings"])
    assert set(result.left_out) == {".flake8", "lint.sh"}
    await executor.exec("echo 'print(1)' > a.py")
    assert (await verify(sample, executor, cache=cache)).outcome == "solved"


async def test_an_analyzer_that_has_nothing_but_its_exit_code(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    good = bare(tmp_path / "good", {"a.py": "x = 1\n"}, "python -m py_compile a.py", verifier="static_analysis")
    bad = bare(tmp_path / "bad", {"a.py": "x = \n"}, "python -m py_compile a.py", verifier="static_analysis")
    assert (await judged(good, cache)).outcome == "solved"
    result = await judged(bad, cache)
    assert (result.outcome, result.exit_code, result.score) == ("not_solved", 1, 0.0)
    executor = await open_sample(bad)
    await executor.write_file("a.py", "x = 2\n")
    assert (await verify(bad, executor, cache=cache)).outcome == "solved"


GRADER = """
import json, pathlib, sys
found = sum(word in pathlib.Path("essay.txt").read_text() for word in ("beginning", "middle", "end"))
print("reading")
print(json.dumps({"score": found / 3, "evidence": {"found": found}, "message": f"{found} of 3 parts"}))
"""


async def test_a_grader_of_the_samples_own(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    sample = bare(tmp_path / "s", {"grade.py": GRADER, "essay.txt": ""}, "python grade.py", verifier="custom")
    executor = await open_sample(sample)
    await executor.exec('echo \'print("{\\\\"score\\\\": 1}")\' > grade.py; echo beginning > essay.txt')
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, round(result.score, 2), result.details) == ("partly", 0.33, {"found": 1})
    assert result.evidence == ["1 of 3 parts"]
    await executor.exec("echo beginning middle end > essay.txt")
    assert (await verify(sample, executor, cache=cache)).outcome == "solved"
    await executor.exec("rm essay.txt")
    assert (await verify(sample, executor, cache=cache)).outcome == "tests_did_not_run"


MAKE = {
    "Makefile": "test: check\n\t./check\ncheck: add.c tests/check.c\n\t$(CC) -o check add.c tests/check.c\n",
    "add.c": "int add(int a, int b) { return a - b; }\n",
    "tests/check.c": (
        '#include <stdio.h>\nint add(int, int);\nint main(void) {\n    puts("1..1");\n'
        '    int bad = add(1, 2) != 3;\n    printf("%sok 1 - adds\\n", bad ? "not " : "");\n    return bad;\n}\n'
    ),
}


async def test_a_makefile_and_a_built_test_of_the_agents_own(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    sample = bare(tmp_path / "s", MAKE, "make -s test", fail_to_pass=["adds"], environment={"programs": ["make", "cc"]})
    executor = await open_sample(sample)
    forged = "printf 'test:\\n\\t@echo 1..1; echo ok 1 - adds\\n' > Makefile"
    built = "sed -i 's/!= 3/== 3/' tests/check.c; cc -o check add.c tests/check.c; touch -d tomorrow check"
    await executor.exec(f"{built}; {forged}")
    assert "ok 1 - adds" in (await executor.exec("make -s test")).stdout
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == "not_solved", result
    assert set(result.left_out) == {"Makefile", "check", "tests/check.c"}
    await executor.exec("sed -i 's/a - b/a + b/' add.c")
    assert (await verify(sample, executor, cache=cache)).outcome == "solved"


async def test_what_the_reference_solution_touches_is_source(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    files = {"app/test/client.py": "def one():\n    return 2\n"}
    test = "from app.test.client import one\n\n\ndef test_add():\n    assert one() == 1\n"
    path = "app/test/client.py"
    patch = f"--- a/{path}\n+++ b/{path}\n@@ -1,2 +1,2 @@\n def one():\n-    return 2\n+    return 1\n"
    sample = calc(tmp_path / "calc", {**files, "tests/test_calc.py": test}, patch=patch, pass_to_pass=[])
    assert (await judged(sample, cache, patch)).outcome == "solved"
    unknown = sample.model_copy(update={"patch": ""})
    result = await judged(unknown, cache, patch)
    assert (result.outcome, result.left_out) == ("not_solved", {"app/test/client.py": "a test"})


async def test_patterns_of_the_samples_own_are_protected(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    sample = calc(tmp_path / "calc", {"data/wanted.txt": "3", "fixtures/a/b.txt": "x"})
    sample.verify.protected = ["data/*.txt", "fixtures"]
    executor = await open_sample(sample)
    await executor.exec(f"{SOLVE}; echo 4 > data/wanted.txt; echo 5 > data/more.csv; echo y > fixtures/a/b.txt")
    result = await verify(sample, executor, cache=cache)
    assert result.left_out == dict.fromkeys(("data/wanted.txt", "fixtures/a/b.txt"), "protected by the sample")
    assert set(result.carried_over) == {"calc.py", "data/more.csv"}
    assert result.required[ADD] == "passed"


async def test_a_result_is_plain_data(calc_sample: Sample, cache: Path) -> None:
    result = await judged(calc_sample, cache)
    assert json.loads(result.model_dump_json())["failures"][0]["name"] == "tests.test_calc::test_add"


@pytest.mark.parametrize("more", ["-p xdist.plugin -n 2", "-x", "-o junit_family=legacy", "--junitprefix=all", "-s"])
async def test_recorders_accept_every_way_to_run_pytest(more: str, tmp_path: Path, cache: Path) -> None:
    sample = calc(tmp_path / "calc", verify={"command": f"{COMMAND} {more}", "timeout": 60})
    names = ["test_add", "test_one"] if "prefix" in more else [ADD, "tests/test_calc.py::test_one"]
    sample = sample.model_copy(update={"fail_to_pass": names[:1], "pass_to_pass": names[1:]})
    result = await judged(sample, cache, GOLD)
    assert result.outcome == "solved", result
    assert "carrel-" not in result.stderr


async def test_without_a_sandbox_the_verdict_says_so(
    calc_sample: Sample, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARREL_SANDBOX", "off")
    result = await judged(calc_sample, cache, GOLD)
    assert result.outcome == "solved", result
    assert "no sandbox is in force here" in result.evidence[-1]


async def test_a_real_ctest(tmp_path: Path, cache: Path) -> None:
    program("ctest")
    program("gcc")
    build = "cmake -S . -B /tmp/build && cmake --build /tmp/build"
    lists = {"fail_to_pass": ["adds"], "pass_to_pass": ["one"]}
    command = f"{build} && ctest --test-dir /tmp/build --output-junit {{report}}"
    sample = bare(tmp_path / "files", CTEST, command, **lists)
    result = await judged(sample, cache)
    assert (result.outcome, result.passed, result.failed, result.skipped) == ("not_solved", 1, 1, 1), result
    patch = "--- a/calc.c\n+++ b/calc.c\n@@ -1,2 +1,2 @@\n-int add(int a, int b) { return a - b; }\n"
    patch += "+int add(int a, int b) { return a + b; }\n int one(void) { return 1; }\n"
    assert (await judged(sample, cache, patch)).outcome == "solved"


async def test_tests_with_more_output_than_a_result_holds(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    noise = (
        "import os\n\nimport pytest\n\n\n@pytest.mark.parametrize('number', range(150))\n"
        "def test_noise(number):\n    os.write(2, b'y' * 100_000)\n"
    )
    wanted = [ONE, *(f"tests/test_noise.py::test_noise[{number}]" for number in range(150))]
    verification = {"command": COMMAND + " -s", "timeout": 100}
    sample = calc(tmp_path / "calc", {"tests/test_noise.py": noise}, pass_to_pass=wanted, verify=verification)
    executor = await open_sample(sample)
    await executor.exec(SOLVE)
    result = await verify(sample, executor, cache=cache, keep=tmp_path / "kept")
    assert result.outcome == "solved", result.evidence
    assert (tmp_path / "kept" / "stderr-1.txt").stat().st_size == 15_000_000 or "y" * 100_000 in result.stderr
    assert len(result.stderr) < 1_000_000


async def test_very_deep_folders_do_not_prevent_a_verdict(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    sample = calc(tmp_path / "calc")
    executor = await open_sample(sample)
    deep = "import os\nfor _ in range(150):\n    os.mkdir('d' * 50)\n    os.chdir('d' * 50)\nopen('x', 'w').close()\n"
    done = await executor.exec(["python", "-c", deep])
    assert done.success, done.stderr
    assert (await verify(sample, executor, cache=cache)).outcome == "not_solved"
