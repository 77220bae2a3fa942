"""`carrel run`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.preloaded_python import preloaded_python


def carrel(*words: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return preloaded_python().run(["-m", "carrel", *words], {**os.environ, **environment}, stdin=stdin)


def test_the_value_is_printed_after_the_output() -> None:
    done = carrel("run", "import sys; print('out'); print('err', file=sys.stderr); 'val' + 'ue'")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n'value'\n", "err\n")


def test_a_file_and_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("print('from the file')")
    assert carrel("run", str(file)).stdout == "from the file\n"
    assert carrel("run", "-", stdin="print('from stdin')").stdout == "from stdin\n"


def test_code_that_raises_has_its_traceback_on_stderr_and_exit_code_1() -> None:
    done = carrel("run", "def f():\n    1 / 0\nf()")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "1 / 0" in done.stderr


@pytest.mark.parametrize(("code", "ends"), [("0", 0), ("", 0), ("None", 0), ("3", 1), ("'no'", 1)])
def test_sys_exit_fails_only_with_an_exit_code(code: str, ends: int) -> None:
    done = carrel("run", f"import sys\nprint('done')\nsys.exit({code})")
    assert (done.returncode, done.stdout) == (ends, "done\n")
    assert ("SystemExit" in done.stderr) == bool(ends)


def test_a_timeout_is_exit_code_1() -> None:
    done = carrel("run", "while True: pass", "--timeout", "0.3")
    assert done.returncode == 1
    assert "0.3 s" in done.stderr


def test_json_is_one_document() -> None:
    result = json.loads(carrel("run", "--json", "print('x'); [1, (2,)]").stdout)
    assert result["value"] == [1, {"$": "tuple", "of": [2]}]
    assert (result["stdout"], result["is_ok"], result["state"]) == ("x\n", True, "kept")


def test_the_network_can_be_switched_off() -> None:
    code = "[line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]"
    assert carrel("run", "--no-network", code).stdout == "['lo']\n"


@pytest.mark.parametrize(("words", "text"), [([], "before"), (["--write"], "after")])
def test_a_workspace_is_changed_only_with_write(tmp_path: Path, words: list[str], text: str) -> None:
    (tmp_path / "f").write_text("before")
    done = carrel("run", "--workspace", str(tmp_path), *words, "open('f', 'w').write('after'); open('f').read()")
    assert done.stdout == "'after'\n"
    assert (tmp_path / "f").read_text() == text


@pytest.mark.parametrize(
    "words", [["run", "gone.py"], ["run", "1", "--memory", "much"], ["run", "1", "--sandbox", "maybe"], ["run"]]
)
def test_wrong_usage_is_exit_code_2_and_one_line(words: list[str]) -> None:
    done = carrel(*words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_carrel_sandbox_sets_the_default() -> None:
    code = "import os; os.getpid() > 10"
    assert carrel("run", code, CARREL_SANDBOX="off").stdout == "True\n"
    assert carrel("run", code, "--sandbox", "required", CARREL_SANDBOX="off").stdout == "False\n"
    wrong = carrel("run", code, CARREL_SANDBOX="please")
    assert (wrong.returncode, "CARREL_SANDBOX" in wrong.stderr) == (2, True)
