"""Attacks on a verdict: each one deceives the tests that the agent runs itself, and not the verdict."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import WorkspaceLost
from carrel.execution.local_transport import LocalTransport
from carrel.tasks.environment import TaskExecutor, prepare_sample
from carrel.tasks.sample import Sample
from carrel.tasks.verification.changes import read_changes
from carrel.tasks.verification.verifier import grade, verify
from tests.support import attacks
from tests.support.attacks import FORGER, LOAD_TESTS, ONE_TEST, PATCHER, PLUGIN, RUN, SourceAttack
from tests.support.real_docker import IMAGE
from tests.support.samples import ADD, COMMAND, ONE, PYTEST_ENV, SOLVE, calc, written
from tests.tasks.conftest import OpenSample

IN_CONTAINER = pytest.mark.real


@pytest.fixture(params=["sandbox", pytest.param("container", marks=IN_CONTAINER)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the agent works and its work is judged: the same attacks are made on both."""
    if request.param == "container":
        monkeypatch.setenv("DOCKER_HOST", request.getfixturevalue("docker_engine"))
    return str(request.param)


@pytest.fixture
def open_anywhere(open_sample: OpenSample, backend: str) -> OpenSample:
    """`open_sample`, which puts the sample into a container first if its turn is to be there."""

    async def begin(sample: Sample, **more: Any) -> TaskExecutor:
        if backend == "container":
            changes = {"backend": "container", "image": IMAGE}
            sample.environment = sample.environment.model_copy(update=changes)
        return await open_sample(sample, **more)

    return begin


# --- in the agent's workspace ----------------------------------------------------------------------------------------

BYTECODE = """
cp -p tests/wanted.py /tmp/honest.py
echo 'THREE = -1' > tests/wanted.py
python -c 'import py_compile as c; c.compile("tests/wanted.py", invalidation_mode=c.PycInvalidationMode.UNCHECKED_HASH)'
cp -p /tmp/honest.py tests/wanted.py
"""

ENTRY_POINT = """
mkdir evil.egg-info
printf 'Metadata-Version: 2.1\\nName: evil\\nVersion: 1\\n' > evil.egg-info/PKG-INFO
printf '[pytest11]\\nevil = evil\\n' > evil.egg-info/entry_points.txt
"""


def planted(path: str, text: str) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}\nEND\n"


ATTACKS = {
    "a planted conftest": planted("conftest.py", PLUGIN),
    "a conftest in the tests": planted("tests/conftest.py", PLUGIN),
    "a rewritten test": "sed -i 's/add(1, 2) == 3/True/' tests/test_calc.py",
    "a test that is gone": "printf 'def test_one(): pass\\n' > tests/test_calc.py",
    "tests that are a link": "mv tests other && sed -i 's/== 3/!= 3/' other/test_calc.py && ln -s other tests",
    "a runner in the working folder": planted("pytest.py", FORGER + "sys.exit(0)"),
    "a module of the runner's": planted("pluggy.py", FORGER + "os._exit(0)"),
    "a module of Python's": planted("fractions.py", "") + planted("decimal.py", FORGER + "os._exit(0)"),
    "pytest.ini": planted("pytest.ini", "[pytest]\naddopts = -p evil") + planted("evil.py", PLUGIN),
    "pyproject.toml": planted("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '-p evil'")
    + planted("evil.py", PLUGIN),
    "an inline table": planted("pyproject.toml", "tool = {pytest = {ini_options = {addopts = '-p evil'}}}")
    + planted("evil.py", PLUGIN),
    "setup.cfg": planted("setup.cfg", "[tool:pytest]\naddopts = -p evil") + planted("evil.py", PLUGIN),
    "tox.ini": planted("tox.ini", "[pytest]\naddopts = --deselect tests/test_calc.py::test_add"),
    "os._exit in the source": "echo 'import os; os._exit(0)' >> calc.py",
    "a forged report, then the end": f"cat >> calc.py <<'END'\n{FORGER}\nos._exit(0)\nEND\n",
    "a report forged when all is over": "cat >> calc.py <<'END'\nimport atexit\n\ndef forge():\n"
    + "".join(f"    {line}\n" for line in FORGER.strip().splitlines())
    + "    sys.stdout.flush(); os._exit(0)\n\natexit.register(forge)\nEND\n",
    "a runner patched by the source": f"cat >> calc.py <<'END'\n{PATCHER}\nEND\n",
    "a folder that passes for installed": planted("site-packages/evil.py", ONE_TEST)
    + "cat >> calc.py <<'END'\nimport sys\nsys.path.insert(0, __file__.replace('calc.py', 'site-packages'))\n"
    + "try:\n    import evil\nexcept ImportError:\n    pass\nEND\n",
    "a skip in the source": "cat >> calc.py <<'END'\nimport pytest\n\ndef add(a, b):\n    pytest.skip('hard')\nEND\n",
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_in_the_workspace(
    attack: str, calc_sample: Sample, open_anywhere: OpenSample, cache: Path
) -> None:
    executor = await open_anywhere(calc_sample)
    done = await executor.exec(ATTACKS[attack])
    assert done.success, done.stderr
    own = await executor.exec(RUN)
    assert own.exit_code == 0, f"the attack does not even work: {own.stdout}{own.stderr}"
    result = await verify(calc_sample, executor, cache=cache)
    assert not result.is_success, result
    assert result.outcome in ("not_solved", "tests_did_not_run"), result
    assert result.score == 0


@pytest.mark.parametrize("attack", [name for name in ATTACKS if "source" not in name and "forged" not in name])
async def test_a_solution_beside_an_attack_is_solved(
    attack: str, calc_sample: Sample, open_anywhere: OpenSample, cache: Path
) -> None:
    executor = await open_anywhere(calc_sample)
    await executor.exec(f"{ATTACKS[attack]}\n{SOLVE}")
    result = await verify(calc_sample, executor, cache=cache)
    assert result.outcome == "solved", result
    assert "calc.py" in result.carried_over


async def test_bytecode_that_is_not_what_the_source_says(
    tmp_path: Path, open_anywhere: OpenSample, cache: Path
) -> None:
    test = "from calc import add, one\nfrom wanted import THREE\n\n\ndef test_add():\n    assert add(1, 2) == THREE\n"
    files = {"tests/wanted.py": "THREE = 3\n", "tests/test_calc.py": test}
    sample = calc(tmp_path / "calc", files, pass_to_pass=[])
    executor = await open_anywhere(sample)
    await executor.exec(BYTECODE)
    assert (await executor.exec(RUN)).exit_code == 0
    assert (await verify(sample, executor, cache=cache)).outcome == "not_solved"


@pytest.mark.parametrize("folder", ["evil.egg-info", "evil.EGG-INFO"])
async def test_a_plugin_found_by_its_metadata(
    folder: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    """Needs plugins to be looked for, so this sample does not forbid it."""
    sample = calc(tmp_path / "calc", environment={}, verify={"command": RUN_WITH_REPORT, "timeout": 100})
    executor = await open_sample(sample)
    await executor.exec(ENTRY_POINT.replace("evil.egg-info", folder) + planted("evil.py", PLUGIN))
    assert (await executor.exec(RUN + NO_OTHERS)).exit_code == 0
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == "not_solved", result
    assert result.left_out[f"{folder}/entry_points.txt"] == "it steers the test runner"


OTHERS = ("asyncio", "xdist", "xdist.looponfail", "timeout", "hypothesispytest", "anyio")
NO_OTHERS = "".join(f" -p no:{name}" for name in OTHERS)
RUN_WITH_REPORT = "python -m pytest -q --junitxml={report}" + NO_OTHERS


async def test_a_customization_of_python_where_the_sample_puts_its_sources_on_the_path(
    tmp_path: Path, open_anywhere: OpenSample, cache: Path
) -> None:
    sample = calc(tmp_path / "calc", environment={"env": {**PYTEST_ENV, "PYTHONPATH": "/workspace"}})
    executor = await open_anywhere(sample)
    await executor.exec(planted("sitecustomize.py", "import os, sys\nif 'pytest' in sys.orig_argv:\n    os._exit(0)"))
    assert (await executor.exec(RUN)).exit_code == 0
    assert (await verify(sample, executor, cache=cache)).outcome == "not_solved"


async def test_a_recorder_of_the_agents_own_is_ignored(
    calc_sample: Sample, open_anywhere: OpenSample, cache: Path
) -> None:
    executor = await open_anywhere(calc_sample)
    await executor.exec(planted("carrel_pytest.py", PLUGIN))
    result = await verify(calc_sample, executor, cache=cache)
    assert result.outcome == "not_solved"
    assert "carrel_pytest.py" in result.left_out


async def test_programs_on_the_path_and_files_elsewhere_are_not_judged(
    calc_sample: Sample, open_anywhere: OpenSample, cache: Path
) -> None:
    executor = await open_anywhere(calc_sample)
    shim = planted("$HOME/bin/python", "#!/bin/sh\nexit 0") + "chmod +x $HOME/bin/python"
    await executor.exec(f"{shim}; cp -r $HOME/bin /tmp/bin; echo 'PATH=$HOME/bin:$PATH' > $HOME/.profile")
    assert (await executor.exec(f"PATH=$HOME/bin:$PATH {RUN}")).exit_code == 0
    assert (await verify(calc_sample, executor, cache=cache)).outcome == "not_solved"


C_FILES = {
    "add.c": '#include "add.h"\nint add(int a, int b) { return a + SIGN * b; }\n',
    "add.h": "#define SIGN -1\nint add(int, int);\n",
    "verdict.c": '#include <stdio.h>\n#include "add.h"\n'
    'int main(void) { printf("1..1\\n%s 1 - adds\\n", add(1, 2) == 3 ? "ok" : "not ok"); return 0; }\n',
    "Makefile": "check: verdict\n\t./verdict\nverdict: verdict.o add.o\n\tcc -o $@ $^\n%.o: %.c\n\tcc -c -o $@ $<\n",
}


async def test_results_of_the_set_up_are_built_again(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    sample = Sample(
        sample_id="c-1",
        files=written(tmp_path / "c", C_FILES),
        fail_to_pass=["adds"],
        environment={"setup": ["make -s verdict"], "programs": ["make", "cc"]},
        verify={"command": "make -s check", "report": "tap", "protected": ["verdict.c"]},
    )
    executor = await open_sample(sample)
    await executor.exec("printf '#!/bin/sh\\necho 1..1; echo ok 1 - adds\\n' > verdict")
    assert "\nok 1" in (await executor.exec("make -s check")).stdout
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == "not_solved", result
    assert result.left_out["verdict"] == "built, not written; it is built again"
    # The Makefile does not know of the header: who changes it builds all anew, and is judged so.
    await executor.exec("sed -i 's/SIGN -1/SIGN 1/' add.h; rm *.o verdict; make -s check")
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == "solved", result


async def test_an_environment_that_the_set_up_made_in_the_workdir_stays(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    sample = calc(
        tmp_path / "calc",
        environment={"env": PYTEST_ENV, "setup": ["python -m venv --system-site-packages --without-pip env"]},
        verify={"command": "env/bin/" + COMMAND, "timeout": 100},
    )
    executor = await open_sample(sample)
    forged = "printf 'import sys; sys.exit(0)' > $(echo env/lib/python3*/site-packages)/pytest.py"
    await executor.exec(f"{forged}; rm env/bin/python; printf '#!/bin/sh\\n' > env/bin/python; chmod +x env/bin/python")
    assert (await executor.exec("env/bin/" + RUN)).exit_code == 0
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == "not_solved", result
    assert result.required == {ADD: "failed", ONE: "passed"}


# --- in the source that is judged -----------------------------------------------------------------------------------

IN_A_WORKER = [
    # Workers of pytest-xdist have the same recorder, so that most of these are slow tests.
    pytest.param(attack, marks=[pytest.mark.slow] * (number % 7 != 0), id=f"in a worker: {attack}")
    for number, attack in enumerate(attacks.on_pytest(" -p xdist.plugin -n 1"))
]
SOURCE_ATTACKS = [
    *attacks.on_pytest(),
    *attacks.on_assertions(),
    *attacks.on_plugins(),
    *attacks.on_test_files(),
    *attacks.on_tests_in_memory(),
    *attacks.on_file_names(),
    *attacks.on_unittest(),
    *attacks.on_exit_codes(),
]


@pytest.mark.parametrize(
    ("attack", "backend"),
    [
        *(pytest.param(each, "sandbox", id=str(each)) for each in SOURCE_ATTACKS),
        *(pytest.param(*each.values, "sandbox", id=each.id, marks=each.marks) for each in IN_A_WORKER),
        *(pytest.param(each, "container", id=f"container-{each}", marks=IN_CONTAINER) for each in SOURCE_ATTACKS),
    ],
    indirect=["backend"],
)
async def test_source_that_deceives_its_runner(
    attack: SourceAttack, tmp_path: Path, open_anywhere: OpenSample, cache: Path
) -> None:
    sample = attack.sample(tmp_path / "calc")
    executor = await open_anywhere(sample)
    await executor.exec(f"cp -r . /tmp/honest; cat >> calc.py <<'END'\n{attack.source}\nEND\n")
    own = await executor.exec(attack.run)
    assert own.exit_code in attack.own_exit_codes, f"the attack does not even work: {own.stdout}{own.stderr}"
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.score, result.integrity) == ("tests_did_not_run", 0, "suspicious"), result
    assert re.search(attack.evidence, result.evidence[0]), result.evidence
    await executor.exec(f"cp -r /tmp/honest/. .; {SOLVE}")
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity) == ("solved", "clean"), result
    assert "carrel-" not in result.stderr


@pytest.mark.parametrize("attack", attacks.without_certainty(), ids=str)
async def test_source_that_may_deceive_its_runner_is_not_clean(
    attack: SourceAttack, tmp_path: Path, open_anywhere: OpenSample, cache: Path
) -> None:
    sample = attack.sample(tmp_path / "calc")
    executor = await open_anywhere(sample)
    await executor.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{attack.source}\nEND\n")
    own = await executor.exec(attack.run)
    assert own.exit_code == 0, f"the attack does not even work: {own.stdout}{own.stderr}"
    result = await verify(sample, executor, cache=cache)
    assert result.integrity != "clean", result
    assert result.evidence, result
    await executor.exec(f"cp /tmp/calc.py .; {SOLVE}")
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity) == ("solved", "unknown" if "&&" in attack.run else "clean"), result


async def test_source_that_exits_with_0_is_not_a_solution(
    calc_sample: Sample, open_anywhere: OpenSample, cache: Path
) -> None:
    executor = await open_anywhere(calc_sample)
    await executor.exec("echo 'import sys; sys.exit(0)' >> calc.py")
    result = await verify(calc_sample, executor, cache=cache)
    assert (result.outcome, result.score, result.missing) == ("not_solved", 0, [ADD, ONE])
    assert "SystemExit" in str(result.evidence)


async def test_tests_that_a_source_package_hands_to_unittest(
    tmp_path: Path, open_anywhere: OpenSample, cache: Path
) -> None:
    name, command = "pkg.tests.test_x.T.test_add", "python -m unittest discover -v -t . -s ."
    test = "import unittest\nfrom pkg import add\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n"
    files = {
        "pkg/__init__.py": "def add(a, b):\n    return a - b\n",
        "pkg/tests/__init__.py": "",
        "pkg/tests/test_x.py": test + "        self.assertEqual(add(1, 2), 3)\n",
    }
    sample = calc(tmp_path / "calc", files, fail_to_pass=[name], pass_to_pass=[], verify={"command": command})
    executor = await open_anywhere(sample)
    await executor.exec(f"cp pkg/__init__.py /tmp; cat >> pkg/__init__.py <<'END'\n{LOAD_TESTS}\nEND\n")
    assert (await executor.exec(command)).exit_code == 0
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == "tests_did_not_run", result
    await executor.exec("sed 's/a - b/a + b/' /tmp/__init__.py > pkg/__init__.py")
    assert (await verify(sample, executor, cache=cache)).outcome == "solved"


VENDORED_HOOK = """
import sys

class Lazy:
    def find_spec(self, name, path=None, target=None):
        return None

sys.meta_path.append(Lazy())
"""


async def test_an_import_hook_for_other_modules_is_no_attack(
    calc_sample: Sample, open_anywhere: OpenSample, cache: Path
) -> None:
    executor = await open_anywhere(calc_sample)
    await executor.exec(f"{SOLVE}; cat >> calc.py <<'END'\n{VENDORED_HOOK}\nEND\n")
    assert (await verify(calc_sample, executor, cache=cache)).outcome == "solved"


async def test_a_script_that_is_rewritten_by_what_it_runs(
    tmp_path: Path, open_anywhere: OpenSample, cache: Path
) -> None:
    """It starts the program under test as a process of its own, which is not enough."""
    check = 'test "$(sh greet.sh)" = hello && echo "ok 1 - greets" || echo "not ok 1 - greets"\necho 1..1\n'
    files = written(tmp_path / "greet", {"greet.sh": "echo hi\n", "check.sh": check})
    verification: Any = {"command": "sh check.sh", "report": "tap"}
    sample = Sample(sample_id="greet-1", files=files, fail_to_pass=["greets"], verify=verification)
    executor = await open_anywhere(sample)
    honest = await verify(sample, executor, cache=cache)
    assert honest.outcome == "not_solved", honest
    await executor.write_file("greet.sh", "echo 'echo ok 1 - greets; echo 1..1' > check.sh\necho hello\n")
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == "tests_did_not_run", result
    await executor.write_file("greet.sh", "echo hello\n")
    assert (await verify(sample, executor, cache=cache)).outcome == "solved"


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
async def test_source_that_writes_a_conftest_before_pytest_starts(
    command: str, new: str, then: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    path, text = NEW_FILES[new]
    makefile = "check:\n\tpython -c 'import calc'\n\tpython -m pytest -q --junitxml=$(OUT)\n"
    sample = calc(tmp_path / "calc", {"Makefile": makefile}, verify={"command": command, "timeout": 60})
    executor = await open_sample(sample)
    await executor.exec(
        f"cp calc.py /tmp; cat >> calc.py <<'END'\n{(WRITES + then).format(path=path, text=text)}\nEND\n"
    )
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity) == ("tests_did_not_run", "suspicious"), result
    assert re.search(rf"{path} was written to while the tests ran|what came of tests/", result.evidence[0])
    await executor.exec(f"cp /tmp/calc.py .; {SOLVE}")
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity, len(result.evidence)) == ("solved", "unknown", 1), result
    assert "calc.py ran in another program of the test command" in result.evidence[0]


@pytest.mark.parametrize("then", ["", REMOVES], ids=["and leaves it", "and removes it"])
async def test_a_file_that_the_command_may_have_written_itself_is_named(
    then: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    sample = calc(tmp_path / "calc", verify={"command": "git apply hidden; " + FIRST + COMMAND, "timeout": 60})
    executor = await open_sample(sample)
    source = (WRITES + then).format(path="conftest.py", text="")
    await executor.exec(f"{SOLVE}; cat >> calc.py <<'END'\n{source}\nEND\n")
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity) == ("solved", "unknown"), result
    assert "conftest.py was written to while the test command ran, perhaps by the command itself" in result.evidence[1]


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
    assert "a file in the home folder that Python loads when it starts" in result.evidence[-1]


async def test_source_that_removes_the_recorders_marker(tmp_path: Path, open_anywhere: OpenSample, cache: Path) -> None:
    sample = calc(tmp_path / "calc", verify={"command": FIRST + COMMAND, "timeout": 60})
    executor = await open_anywhere(sample)
    removes = "import os\nif 'CARREL_RECORDER' in os.environ:\n    os.remove(os.environ['CARREL_RECORDER'])\n"
    await executor.exec(f"cat >> calc.py <<'END'\n{removes}{attacks.CALL}\nEND\n")
    result = await verify(sample, executor, cache=cache)
    assert (result.outcome, result.integrity) == ("tests_did_not_run", "suspicious"), result


LOOP = """
(while true; do
    sed -i 's/== 3/!= 3/' tests/test_calc.py; echo 'import os; os._exit(0)' > conftest.py
    for folder in /tmp /workspace /home/agent; do echo '<testsuites/>' > $folder/report.xml; done
done) > /dev/null 2>&1 &
"""


async def test_a_process_in_the_background_cannot_reach_the_verdict(
    calc_sample: Sample, open_anywhere: OpenSample, cache: Path
) -> None:
    executor = await open_anywhere(calc_sample)
    await executor.exec(LOOP)
    assert (await verify(calc_sample, executor, cache=cache)).outcome == "not_solved"
    await executor.exec(SOLVE)
    assert (await verify(calc_sample, executor, cache=cache)).outcome == "solved"


async def test_changes_after_the_workspace_was_read_do_not_count(
    calc_sample: Sample, open_anywhere: OpenSample, cache: Path
) -> None:
    executor = await open_anywhere(calc_sample)
    ready = await prepare_sample(calc_sample, cache)
    read = await read_changes(executor)
    judging = asyncio.create_task(grade(calc_sample, read, prepared=ready))
    await executor.exec(SOLVE)
    assert (await judging).outcome == "not_solved"
    assert (await verify(calc_sample, executor, cache=cache)).outcome == "solved"


async def test_code_that_ends_its_sandbox_has_not_solved_the_sample(
    calc_sample: Sample, open_anywhere: OpenSample, cache: Path
) -> None:
    executor = await open_anywhere(calc_sample)
    kill = "import os\nfor pid in range(2, 200):\n    try: os.kill(pid, 9)\n    except OSError: pass\n"
    await executor.exec(f"cat >> calc.py <<'END'\n{kill}END\n")
    result = await verify(calc_sample, executor, cache=cache)
    assert result.outcome == "tests_did_not_run", result


async def test_a_sandbox_that_died_is_not_judged_as_unchanged(
    calc_sample: Sample, open_sample: OpenSample, cache: Path
) -> None:
    executor = await open_sample(calc_sample)
    await executor.exec(SOLVE)
    assert executor._connection is not None
    assert isinstance(executor._connection.transport, LocalTransport)
    assert executor._connection.transport.init is not None
    os.kill(executor._connection.transport.init.pid, signal.SIGKILL)
    with pytest.raises(WorkspaceLost):
        await executor.exec("true")
    assert (await executor.exec("true")).success
    result = await verify(calc_sample, executor, cache=cache)
    assert result.outcome == "infrastructure_failed", result
    assert "what was changed in its files is gone" in result.evidence[0]


async def test_the_agents_workspace_is_unchanged(calc_sample: Sample, open_anywhere: OpenSample, cache: Path) -> None:
    sample = calc_sample.model_copy(update={"test_patch": NEW_TEST, "fail_to_pass": ["tests/test_more.py::test_more"]})
    executor = await open_anywhere(sample)
    await executor.run("x = 5")
    await executor.exec(f"{SOLVE}; echo mine > conftest.py; rm tests/test_calc.py")
    before = [await executor.changed_files(), (await executor.exec(LOOK)).stdout]
    processes = int((await executor.exec(COUNT)).stdout)
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == "solved", result
    assert [await executor.changed_files(), (await executor.exec(LOOK)).stdout] == before
    # A helper of the worker may have ended meanwhile.
    assert int((await executor.exec(COUNT)).stdout) <= processes
    assert (await executor.run("x")).value == 5
    assert "test_more" not in (await executor.exec("ls tests")).stdout


LOOK = "ls -A / /tmp $HOME"
COUNT = "ps -e 2> /dev/null | wc -l"
NEW_TEST = """diff --git a/tests/test_more.py b/tests/test_more.py
new file mode 100644
--- /dev/null
+++ b/tests/test_more.py
@@ -0,0 +1,5 @@
+from calc import add
+
+
+def test_more():
+    assert add(2, 2) == 4
"""
