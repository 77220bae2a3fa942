"""What code under test does to its tests in memory: source that is appended to `calc.py`, by what it does."""

from __future__ import annotations

CONFTEST = "import pytest\n\n\n@pytest.fixture\ndef wanted():\n    return 3\n"
TEST_ONE = "from calc import one\n\n\ndef test_one():\n    assert one() == 1\n"
TEST_ADD = """from calc import add


def check(number, right=3):
    assert number == right


def test_add(wanted):
    three = add(1, 2)
    assert three == wanted
    check(three)
"""
FILES = {"tests/conftest.py": CONFTEST, "tests/test_calc.py": TEST_ONE, "tests/z/test_z.py": TEST_ADD}
NOTHING = "def check(number):\\n    pass\\n\\n\\ndef test_add():\\n    pass\\n"

IN_PYTEST = {
    "another source is parsed": f"""
import ast
honest = ast.parse
ast.parse = lambda source, *these, **those: honest(
    "{NOTHING}" if b"three = add" in bytes(source if isinstance(source, bytes) else b"") else source, *these, **those)
""",
    "another tree is compiled": f"""
import builtins
honest = builtins.compile
builtins.compile = lambda source, file, *these, **those: honest(
    "{NOTHING}" if str(file).endswith("test_z.py") else source, file, *these, **those)
""",
    "another file is read": f"""
import pathlib
honest = pathlib.Path.read_bytes
pathlib.Path.read_bytes = lambda self: b"{NOTHING}" if self.name == "test_z.py" else honest(self)
""",
    "byte code is overwritten in place": """
import ctypes, dis, sys

def one():
    code = sys.modules["test_z"].test_add.__code__
    code.co_code
    raw = code._co_code_adaptive
    place = ctypes.string_at(id(code), code.__sizeof__()).find(raw)
    none = code.co_consts.index(None)
    ctypes.memmove(id(code) + place + 2, bytes([dis.opmap["LOAD_CONST"], none, dis.opmap["RETURN_VALUE"], 0]), 4)
    return 1
""",
    "a tracer changes a variable": """
import sys

def add(a, b):
    def change(frame, event, value):
        frame.f_locals["three"] = 3
        frame.f_trace = None
        sys.settrace(None)
    sys.settrace(lambda *these: None)
    sys._getframe(1).f_trace = change
    return a - b
""",
    "another helper in the test file": """
import sys

def one():
    sys.modules["test_z"].check = lambda number: None
    return 1
""",
    "another fixture": """
import gc
for each in gc.get_objects():
    if type(each).__name__ == "FixtureDef" and each.argname == "wanted":
        object.__setattr__(each, "func", lambda: -1)
""",
    "another default": """
import sys

def one():
    sys.modules["test_z"].check.__defaults__ = (-1,)
    return 1
""",
}
"""`test_one` runs before `test_add`, and its module is loaded before that of `test_add`."""

HELPED = TEST_ADD.replace("    assert three == wanted\n", "")
ONLY_HELPER = ("another helper in the test file", "another default")
ONLY_FIXTURE = TEST_ADD.replace("    check(three)\n", "")

CASE_ONE = (
    "import unittest\nfrom calc import one\n\n\nclass One(unittest.TestCase):\n    def test_one(self):\n"
    "        self.assertEqual(one(), 1)\n"
)
CASE_ADD = (
    "import unittest\nfrom calc import add\n\n\nclass Calc(unittest.TestCase):\n    def test_add(self):\n"
    "        self.assertEqual(add(1, 2), 3)\n"
)
CASES = {"tests/__init__.py": "", "tests/test_calc.py": CASE_ONE, "tests/test_z.py": CASE_ADD}
IN_UNITTEST = {
    "another loader object": """
import types, unittest
loader, honest = unittest.defaultTestLoader, unittest.TestLoader.loadTestsFromModule

def load(self, module, *these, **those):
    kind = vars(module).get("Calc")
    if kind is not None:
        kind.test_add = lambda self: None
    return honest(self, module, *these, **those)

loader.loadTestsFromModule = types.MethodType(load, loader)
""",
    "another method of one test": """
import gc

def one():
    for each in gc.get_objects():
        if type(each).__name__ == "Calc":
            each.test_add = lambda: None
    return 1
""",
    "an assertion of one test": """
import gc

def one():
    for each in gc.get_objects():
        if type(each).__name__ == "Calc":
            each.assertEqual = lambda *these: None
    return 1
""",
    "another file is read": """
import importlib.machinery
honest = importlib.machinery.SourceFileLoader.get_data

def get_data(self, path):
    data = honest(self, path)
    return data.replace(b"1, 2), 3", b"1, 2), -1") if path.endswith("test_z.py") else data

importlib.machinery.SourceFileLoader.get_data = get_data
""",
}
