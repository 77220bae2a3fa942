"""Code objects have the digest of what was compiled, also while they are measured or traced."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess

import pytest

from carrel.tasks.verification.recorder_log import RECORDER_FOLDER

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from carrel_code_digests import digest

SOURCE = '''
def given(number):
    while number > 3:
        number -= 1
    for each in range(number):
        if each and number is not None:
            yield [part for part in range(each)]
'''

def trace(frame, event, argument):
    frame.f_trace_opcodes = sys.argv[2] == "instructions"
    return trace

def profile(frame, event, argument):
    pass

code, names = compile(SOURCE, "given.py", "exec"), {}
honest = digest(code)
functions = digest(next(each for each in code.co_consts if hasattr(each, "co_code")))
sys.settrace(trace) if sys.argv[2] != "calls" else sys.setprofile(profile)
exec(code, names)
for _ in range(50):
    list(names["given"](5))
print(digest(code) == honest, digest(names["given"].__code__) == functions)
"""


def _python(version: str) -> str:
    found = [
        shutil.which(f"python{version}") or "",
        *glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")),
    ]
    for each in filter(None, found):
        if subprocess.run([each, "-c", ""], capture_output=True, check=False).returncode == 0:
            return each
    pytest.skip(f"no Python {version} on this machine")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("way", ["lines", "instructions", "calls"])
def test_digests_of_traced_code(version: str, way: str) -> None:
    words = [_python(version), "-c", PROGRAM, str(RECORDER_FOLDER), way]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("True True\n", "")
