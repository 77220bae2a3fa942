"""Whoever worked on a sample cannot touch its verdict: each attack deceives a run in their own place, and not ours."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from carrel.errors import PlaceLost
from carrel.tasks.environment import prepare_sample
from carrel.tasks.sample import Sample
from carrel.tasks.verification.changes import read_changes
from carrel.tasks.verification.verifier import grade, verify
from tests.tasks.conftest import OpenSample
from tests.tasks.small_samples import ADD, COMMAND, ONE, PYTEST_ENV, SOLVE, calc

RUN = "python -m pytest -q --junitxml=/tmp/own.xml"

PLUGIN = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""

FORGER = """
import os, sys
for word in sys.argv:
    if word.startswith("--junitxml="):
        with open(word.partition("=")[2], "w") as file:
            file.write('<testsuites><testsuite name="pytest"><testcase classname="tests.test_calc" name="test_add"/>'
                       '<testcase classname="tests.test_calc" name="test_one"/></testsuite></testsuites>')
"""

PATCHER = """
import _pytest.reports
honest = _pytest.reports.TestReport.from_item_and_call.__func__

def lying(cls, item, call):
    report = honest(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report

_pytest.reports.TestReport.from_item_and_call = classmethod(lying)
"""

NO_TEST = """
import _pytest.python
_pytest.python.Function.runtest = lambda self: None
"""

ONE_TEST = """
import _pytest.python
honest = _pytest.python.Function.runtest
_pytest.python.Function.runtest = lambda self: honest(self) if self.name != "test_add" else None
"""

CODE = """
import _pytest.python

def runtest(self):
    if self.name == "test_one":
        self.ihook.pytest_pyfunc_call(pyfuncitem=self)

_pytest.python.Function.runtest.__code__ = runtest.__code__
"""

PROPERTY = """
import _pytest.reports

def set_outcome(self, value):
    self.__dict__["outcome"] = "passed" if "test_add" in self.nodeid else value

_pytest.reports.TestReport.outcome = property(lambda self: self.__dict__["outcome"], set_outcome)
"""

MOCKED = """
from unittest import mock
import _pytest.python
_pytest.python.Function.runtest = mock.MagicMock()
"""

CALL = """
import _pytest.runner
honest = _pytest.runner.CallInfo.from_call.__func__

def from_call(cls, *these, **those):
    made = honest(cls, *these, **those)
    made.excinfo = None
    return made

_pytest.runner.CallInfo.from_call = classmethod(from_call)
"""

STEP = """
import _pytest.runner
honest = _pytest.runner.call_and_report

def call_and_report(item, when, log=True, **more):
    if when == "call" and item.name == "test_add":
        item.obj = item._obj = lambda: None
    return honest(item, when, log, **more)

_pytest.runner.call_and_report = call_and_report
"""

ONCE = """
import _pytest.reports
kind = _pytest.reports.TestReport
honest = vars(kind)["from_item_and_call"]

def add(a, b):
    def lying(cls, item, call):
        kind.from_item_and_call = honest
        report = kind.from_item_and_call(item, call)
        report.outcome, report.longrepr = "passed", None
        return report
    kind.from_item_and_call = classmethod(lying)
    return a - b
"""

PROFILE = """
import sys

def add(a, b):
    def lying(frame, event, value):
        if event == "return" and frame.f_code.co_name == "from_call" and getattr(value, "excinfo", None):
            value.excinfo = None
            sys.setprofile(None)
    sys.setprofile(lying)
    return a - b
"""

PROFILED_REPORT = (
    PROFILE.replace("from_call", "from_item_and_call")
    .replace("excinfo", "longrepr")
    .replace("value.longrepr = None", "value.longrepr, value.outcome = None, 'passed'")
)

LATE_PLUGIN = """
import gc, pytest
from _pytest.config import PytestPluginManager

class Plugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        report.outcome, report.longrepr = "passed", None

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        return True if pyfuncitem.name == "test_add" else None

for each in gc.get_objects():
    if isinstance(each, PytestPluginManager):
        each.register(Plugin())
"""

ITEMS = """
import gc, pytest

def one():
    for each in gc.get_objects():
        if isinstance(each, pytest.Function) and each.name == "test_add":
            each.runtest = lambda: None
    return 1
"""

OBJECTS = ITEMS.replace("each.runtest", "each.obj")

TESTS = """
import sys

def one():
    def test_add():
        pass
    sys._getframe(1).f_globals["test_add"].__code__ = test_add.__code__
    return 1
"""


INSIDE = {
    "no test is run": NO_TEST,
    "one test is not run": ONE_TEST,
    "other code in a method of pytest": CODE,
    "a property of reports": PROPERTY,
    "a mock in pytest": MOCKED,
    "a call that never raises": CALL,
    "a step that puts in another test": STEP,
    "a report that is changed once": ONCE,
    "a profiler that takes exceptions away": PROFILE,
    "a profiler that changes reports": PROFILED_REPORT,
    "a plugin that is registered late": LATE_PLUGIN,
    "a test that is found in memory": ITEMS,
    "another function for a test that is found in memory": OBJECTS,
    "other code in a test": TESTS,
}
"""What code under test does to the runner that it is imported into; `test_one` is run first where it matters."""

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
async def test_an_attack_deceives_the_place_it_is_in_and_not_the_verdict(
    attack: str, calc_sample: Sample, open_sample: OpenSample, cache: Path
) -> None:
    place = await open_sample(calc_sample)
    done = await place.exec(ATTACKS[attack])
    assert done.success, done.stderr
    own = await place.exec(RUN)
    assert own.exit_code == 0, f"the attack does not even work: {own.stdout}{own.stderr}"
    result = await verify(calc_sample, place, cache=cache)
    assert not result.is_success, result
    assert result.outcome in ("not_solved", "tests_did_not_run"), result
    assert result.score == 0


ASSERTIONS = {
    "pytest.raises": (
        "import contextlib, pytest\npytest.raises = lambda *these, **those: contextlib.suppress(Exception)",
        "import pytest\n\n\ndef test_add():\n    with pytest.raises(ZeroDivisionError):\n        1 / (add(1, 2) - 3)\n",
    ),
    "pytest.approx": (
        "import pytest\nfrom unittest import mock\npytest.approx = lambda *these, **those: mock.ANY",
        "import pytest\n\n\ndef test_add():\n    assert add(1, 2) == pytest.approx(3)\n",
    ),
    "mock": (
        "from unittest import mock\nmock.Mock.assert_called_with = lambda *these: None",
        "from unittest import mock\n\n\ndef test_add():\n    it = mock.Mock()\n    it(add(1, 2))\n"
        "    it.assert_called_with(3)\n",
    ),
    "unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *these: None",
        "import unittest\n\n\ndef test_add():\n    unittest.TestCase().assertEqual(add(1, 2), 3)\n",
    ),
}


@pytest.mark.parametrize("assertion", ASSERTIONS)
async def test_an_assertion_that_no_longer_asserts(
    assertion: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    attack, test = ASSERTIONS[assertion]
    files = {"tests/test_calc.py": f"from calc import add, one\n{test}"}
    sample = calc(tmp_path / "calc", files, pass_to_pass=[])
    place = await open_sample(sample)
    await place.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{attack}\nEND\n")
    assert (await place.exec(RUN)).exit_code == 0
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "tests_did_not_run", result
    await place.exec(f"cp /tmp/calc.py .; {SOLVE}")
    assert (await verify(sample, place, cache=cache)).outcome == "solved"


EARLY_PLUGIN = LATE_PLUGIN.replace('"passed", None', '"passed", None  # of all')
EARLY_WITHOUT_CALL = EARLY_PLUGIN.replace("pytest_pyfunc_call", "not_a_hook")


@pytest.mark.parametrize("plugin", [EARLY_PLUGIN.replace('== "test_add"', '!= ""'), EARLY_WITHOUT_CALL])
async def test_a_plugin_that_is_registered_when_conftest_imports_the_code_under_test(
    plugin: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    sample = calc(tmp_path / "calc", {"tests/conftest.py": "import calc\n"})
    place = await open_sample(sample)
    await place.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{plugin}\nEND\n")
    assert (await place.exec(RUN)).exit_code in (0, 1)
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.score) == ("tests_did_not_run", 0), result
    await place.exec(f"cp /tmp/calc.py .; {SOLVE}")
    assert (await verify(sample, place, cache=cache)).outcome == "solved"


FIRST_ONE = (
    "from calc import add, one\n\n\ndef test_one():\n    assert one() == 1\n\n\n"
    "def test_add():\n    three = add(1, 2)\n    assert three == 3\n"
)


ALONE, IN_A_WORKER = "", " -p xdist.plugin -n 1"
IN_WORKERS = [
    # It is the same witness as without workers; all of them would take a minute.
    pytest.param(attack, IN_A_WORKER, marks=[pytest.mark.slow] * (number % 7 != 0), id=f"in a worker-{attack}")
    for number, attack in enumerate(INSIDE)
]


@pytest.mark.parametrize(("attack", "more"), [*((attack, ALONE) for attack in INSIDE), *IN_WORKERS])
async def test_code_under_test_that_changes_the_runner_from_inside(
    attack: str, more: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    sample = calc(tmp_path / "calc", {"tests/test_calc.py": FIRST_ONE}, verify={"command": COMMAND + more})
    place = await open_sample(sample)
    await place.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{INSIDE[attack]}\nEND\n")
    own = await place.exec(RUN + more)
    assert own.exit_code == 0, f"the attack does not even work: {own.stdout}{own.stderr}"
    result = await verify(sample, place, cache=cache)
    assert (result.outcome, result.score) == ("tests_did_not_run", 0), result
    assert "changed" in result.evidence[0], result
    await place.exec(f"cp /tmp/calc.py .; {SOLVE}")
    assert (await verify(sample, place, cache=cache)).outcome == "solved"


@pytest.mark.parametrize("attack", [name for name in ATTACKS if "source" not in name and "forged" not in name])
async def test_beside_an_attack_a_solution_is_still_one(
    attack: str, calc_sample: Sample, open_sample: OpenSample, cache: Path
) -> None:
    place = await open_sample(calc_sample)
    await place.exec(f"{ATTACKS[attack]}\n{SOLVE}")
    result = await verify(calc_sample, place, cache=cache)
    assert result.outcome == "solved", result
    assert "calc.py" in result.carried_over


async def test_a_source_that_exits_well_is_no_solution(
    calc_sample: Sample, open_sample: OpenSample, cache: Path
) -> None:
    place = await open_sample(calc_sample)
    await place.exec("echo 'import sys; sys.exit(0)' >> calc.py")
    result = await verify(calc_sample, place, cache=cache)
    assert (result.outcome, result.score, result.missing) == ("not_solved", 0, [ADD, ONE])
    assert "SystemExit" in str(result.evidence)


@pytest.mark.parametrize("end", ["os._exit(0)", "import atexit; atexit.register(os._exit, 0)"])
async def test_an_exit_code_alone_is_not_the_sources_to_choose(
    end: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    command = "python -m pytest -q"
    sample = calc(tmp_path / "calc", fail_to_pass=[], pass_to_pass=[], verify={"command": command, "timeout": 100})
    place = await open_sample(sample)
    await place.exec(f"cp calc.py /tmp; echo 'import os; {end}' >> calc.py")
    assert (await place.exec(command)).exit_code == 0
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "tests_did_not_run", result
    await place.exec(f"cp /tmp/calc.py .; {SOLVE}")
    assert (await verify(sample, place, cache=cache)).outcome == "solved"


async def test_bytecode_that_is_not_what_the_source_says(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    test = "from calc import add, one\nfrom wanted import THREE\n\n\ndef test_add():\n    assert add(1, 2) == THREE\n"
    files = {"tests/wanted.py": "THREE = 3\n", "tests/test_calc.py": test}
    sample = calc(tmp_path / "calc", files, pass_to_pass=[])
    place = await open_sample(sample)
    await place.exec(BYTECODE)
    assert (await place.exec(RUN)).exit_code == 0
    assert (await verify(sample, place, cache=cache)).outcome == "not_solved"


@pytest.mark.parametrize("folder", ["evil.egg-info", "evil.EGG-INFO"])
async def test_a_plugin_found_by_its_metadata(
    folder: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    """Needs plugins to be looked for, so this sample does not forbid it."""
    sample = calc(tmp_path / "calc", environment={}, verify={"command": RUN_WITH_REPORT, "timeout": 100})
    place = await open_sample(sample)
    await place.exec(ENTRY_POINT.replace("evil.egg-info", folder) + planted("evil.py", PLUGIN))
    assert (await place.exec(RUN + NO_OTHERS)).exit_code == 0
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "not_solved", result
    assert result.left_out[f"{folder}/entry_points.txt"] == "it steers the test runner"


OTHERS = ("asyncio", "xdist", "xdist.looponfail", "timeout", "hypothesispytest", "anyio")
NO_OTHERS = "".join(f" -p no:{name}" for name in OTHERS)
RUN_WITH_REPORT = "python -m pytest -q --junitxml={report}" + NO_OTHERS


async def test_tests_that_a_source_package_hands_to_unittest(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    name, command = "pkg.tests.test_x.T.test_add", "python -m unittest discover -v -t . -s ."
    test = "import unittest\nfrom pkg import add\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n"
    files = {
        "pkg/__init__.py": "def add(a, b):\n    return a - b\n",
        "pkg/tests/__init__.py": "",
        "pkg/tests/test_x.py": test + "        self.assertEqual(add(1, 2), 3)\n",
    }
    sample = calc(tmp_path / "calc", files, fail_to_pass=[name], pass_to_pass=[], verify={"command": command})
    place = await open_sample(sample)
    await place.exec(f"cp pkg/__init__.py /tmp; cat >> pkg/__init__.py <<'END'\n{LOAD_TESTS}\nEND\n")
    assert (await place.exec(command)).exit_code == 0
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "tests_did_not_run", result
    await place.exec("sed 's/a - b/a + b/' /tmp/__init__.py > pkg/__init__.py")
    assert (await verify(sample, place, cache=cache)).outcome == "solved"


LOAD_TESTS = """
import unittest

def load_tests(loader, tests, pattern):
    kind = type("T", (unittest.TestCase,), {"test_add": lambda self: None, "__module__": "pkg.tests.test_x"})
    return unittest.TestSuite([kind("test_add")])
"""


async def test_a_customization_of_python_where_the_sample_puts_its_sources_on_the_path(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    sample = calc(tmp_path / "calc", environment={"env": {**PYTEST_ENV, "PYTHONPATH": "/workspace"}})
    place = await open_sample(sample)
    await place.exec(planted("sitecustomize.py", "import os, sys\nif 'pytest' in sys.orig_argv:\n    os._exit(0)"))
    assert (await place.exec(RUN)).exit_code == 0
    assert (await verify(sample, place, cache=cache)).outcome == "not_solved"


async def test_a_witness_of_the_agents_own_is_not_heard(
    calc_sample: Sample, open_sample: OpenSample, cache: Path
) -> None:
    place = await open_sample(calc_sample)
    await place.exec(planted("carrel_pytest.py", PLUGIN))
    result = await verify(calc_sample, place, cache=cache)
    assert result.outcome == "not_solved"
    assert "carrel_pytest.py" in result.left_out


async def test_shims_on_the_path_and_files_elsewhere_stay_behind(
    calc_sample: Sample, open_sample: OpenSample, cache: Path
) -> None:
    place = await open_sample(calc_sample)
    shim = planted("$HOME/bin/python", "#!/bin/sh\nexit 0") + "chmod +x $HOME/bin/python"
    await place.exec(f"{shim}; cp -r $HOME/bin /tmp/bin; echo 'PATH=$HOME/bin:$PATH' > $HOME/.profile")
    assert (await place.exec(f"PATH=$HOME/bin:$PATH {RUN}")).exit_code == 0
    assert (await verify(calc_sample, place, cache=cache)).outcome == "not_solved"


LOOP = """
(while true; do
    sed -i 's/== 3/!= 3/' tests/test_calc.py; echo 'import os; os._exit(0)' > conftest.py
    for folder in /tmp /workspace /home/agent; do echo '<testsuites/>' > $folder/report.xml; done
done) > /dev/null 2>&1 &
"""


async def test_a_process_left_in_the_background_reaches_nothing(
    calc_sample: Sample, open_sample: OpenSample, cache: Path
) -> None:
    place = await open_sample(calc_sample)
    await place.exec(LOOP)
    assert (await verify(calc_sample, place, cache=cache)).outcome == "not_solved"
    await place.exec(SOLVE)
    assert (await verify(calc_sample, place, cache=cache)).outcome == "solved"


async def test_what_is_changed_after_the_place_was_read_counts_for_nothing(
    calc_sample: Sample, open_sample: OpenSample, cache: Path
) -> None:
    place = await open_sample(calc_sample)
    ready = await prepare_sample(calc_sample, cache)
    read = await read_changes(place, base=ready.workspace)
    judging = asyncio.create_task(grade(calc_sample, read, prepared=ready))
    await place.exec(SOLVE)
    assert (await judging).outcome == "not_solved"
    assert (await verify(calc_sample, place, cache=cache)).outcome == "solved"


async def test_code_that_ends_the_place_it_is_judged_in_has_not_solved_it(
    calc_sample: Sample, open_sample: OpenSample, cache: Path
) -> None:
    place = await open_sample(calc_sample)
    kill = "import os\nfor pid in range(2, 200):\n    try: os.kill(pid, 9)\n    except OSError: pass\n"
    await place.exec(f"cat >> calc.py <<'END'\n{kill}END\n")
    result = await verify(calc_sample, place, cache=cache)
    assert result.outcome == "tests_did_not_run", result


async def test_a_place_that_died_is_not_judged_as_if_nothing_had_been_done_in_it(
    calc_sample: Sample, open_sample: OpenSample, cache: Path
) -> None:
    place = await open_sample(calc_sample)
    await place.exec(SOLVE)
    assert place._session is not None
    assert place._session.init is not None
    os.kill(place._session.init.pid, signal.SIGKILL)
    with pytest.raises(PlaceLost):
        await place.exec("true")
    assert (await place.exec("true")).success
    result = await verify(calc_sample, place, cache=cache)
    assert result.outcome == "infrastructure_failed", result
    assert "what was changed in its files is gone" in result.evidence[0]


async def test_the_agents_place_is_left_as_it_was(calc_sample: Sample, open_sample: OpenSample, cache: Path) -> None:
    sample = calc_sample.model_copy(update={"test_patch": NEW_TEST, "fail_to_pass": ["tests/test_more.py::test_more"]})
    place = await open_sample(sample)
    await place.run("x = 5")
    await place.exec(f"{SOLVE}; echo mine > conftest.py; rm tests/test_calc.py")
    before = [await place.changed_files(), (await place.exec(LOOK)).stdout]
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "solved", result
    assert [
        await place.changed_files(),
        (await place.exec(LOOK)).stdout,
    ] == before
    assert (await place.run("x")).value == 5
    assert "test_more" not in (await place.exec("ls tests")).stdout


LOOK = "ls -A / /tmp $HOME; ps -e 2> /dev/null | wc -l"
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


UNITTEST = (
    "import unittest\n\nfrom calc import add, one\n\n\nclass Calc(unittest.TestCase):\n"
    "    def setUp(self):\n        self.assertEqual(one(), 1)\n\n"
    "    def test_add(self):\n        three = add(1, 2)\n        self.assertEqual(three, 3)\n\n"
    "    def test_a(self):\n        self.assertTrue(one())\n"
)
FORGED_TEXT = """
import os, sys
sys.stderr.write("test_add (tests.test_calc.Calc.test_add) ... ok\\n\\n")
sys.stderr.write("-" * 70 + "\\nRan 1 test in 0.000s\\n\\nOK\\n")
sys.stderr.flush()
os._exit(0)
"""
PATCHED_CASE = """
import unittest
unittest.TestCase._callTestMethod = lambda self, method: None
"""
PATCHED_ASSERTION = """
import unittest
unittest.TestCase.assertEqual = lambda *these, **those: None
"""
PATCHED_RESULT = """
import unittest
unittest.runner.TextTestResult.addFailure = lambda self, test, error: self.addSuccess(test)
"""
ONE_CASE = """
import unittest
honest = unittest.TestCase._callTestMethod
unittest.TestCase._callTestMethod = lambda self, method: None if method.__name__ == "test_add" else honest(self, method)
"""
ONE_VALUE = """
import unittest

def assertEqual(self, first, second, msg=None):
    if first != -1:
        self._baseAssertEqual(first, second, msg)

unittest.TestCase.assertEqual.__code__ = assertEqual.__code__
"""
EXPECTING = """
import sys

def add(a, b):
    sys._getframe(1).f_locals["self"]._outcome.expecting_failure = True
    return a - b
"""
OTHER_RESULT = """
import sys

def add(a, b):
    outcome = sys._getframe(1).f_locals["self"]._outcome
    honest = outcome.result

    class Result:
        def addFailure(self, test, error):
            honest.addSuccess(test)

    outcome.result = Result()
    return a - b
"""
OTHER_TEST = """
import gc, unittest

def one():
    for each in gc.get_objects():
        if isinstance(each, type) and issubclass(each, unittest.TestCase) and hasattr(each, "test_add"):
            each.test_add = lambda self: None
    return 1
"""
UNITTEST_LIES = {
    "forged text": FORGED_TEXT,
    "a patched test case": PATCHED_CASE,
    "a patched assertion": PATCHED_ASSERTION,
    "a patched result": PATCHED_RESULT,
    "one test is not called": ONE_CASE,
    "an assertion that knows one value": ONE_VALUE,
    "a failure that is expected all at once": EXPECTING,
    "another result for one test": OTHER_RESULT,
    "another test": OTHER_TEST,
}


@pytest.mark.parametrize("lie", UNITTEST_LIES)
async def test_unittest_has_a_witness_too(lie: str, tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    name = "tests.test_calc.Calc.test_add"
    files = {"tests/__init__.py": "", "tests/test_calc.py": UNITTEST}
    command = "python -m unittest -v"
    sample = calc(tmp_path / "calc", files, fail_to_pass=[name], pass_to_pass=[], verify={"command": command})
    place = await open_sample(sample)
    assert (await verify(sample, place, cache=cache)).outcome == "not_solved"
    await place.exec(f"cp calc.py /tmp; cat >> calc.py <<'END'\n{UNITTEST_LIES[lie]}\nEND\n")
    assert (await place.exec(command)).exit_code == 0
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "tests_did_not_run", result
    await place.exec(f"cp /tmp/calc.py .; {SOLVE}")
    result = await verify(sample, place, cache=cache)
    assert result.outcome == "solved", result
    assert "carrel-" not in result.stderr
