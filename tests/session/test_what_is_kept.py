"""Each row of the table in docs/continue-a-session.md: what a session that continues has, and what it has not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from carrel import FileStorage, Session, SubprocessConfig, SubprocessExecutor

PAGE = Path(__file__).parents[2] / "docs" / "continue-a-session.md"

KEPT: dict[str, tuple[str, str, Any]] = {
    "numbers, texts, bytes, dates, and containers of them": (
        "import datetime\na = [1, 2.5, 'é', b'x', 2**100, {'k': (1, {2})}, datetime.date(2026, 1, 2)]",
        "repr(a)",
        repr([1, 2.5, "é", b"x", 2**100, {"k": (1, {2})}]).rstrip("]") + ", datetime.date(2026, 1, 2)]",
    ),
    "two names for one object": ("a = [1]; b = {'same': a}; a.append(a)", "b['same'] is a and a[1] is a", True),
    "arrays and DataFrames": (
        "import numpy as np, pandas as pd\nframe = pd.DataFrame({'x': [1, 2]}); array = np.arange(4)[::2]",
        "int(frame.x.sum()), array.tolist()",
        (3, [0, 2]),
    ),
    "functions, classes and their instances": (
        "from dataclasses import dataclass\nfrom functools import lru_cache\nfrom enum import Enum\n"
        "@dataclass\nclass P:\n    x: int\n    def twice(self): return times(self.x)\n"
        "class Color(Enum):\n    RED = 1\n"
        "@lru_cache\ndef times(n): return n * factor\nfactor = 2; p = P(3); red = [Color.RED]",
        "p.twice(), type(p) is P, red[0] is Color.RED",
        (6, True, True),
    ),
    "a lambda with a name": ("half = lambda n: n / 2", "half(3)", 1.5),
    "imports": ("import json as j\nfrom os.path import join", "join('a', j.dumps(1))", "a/1"),
    "environment variables that code has set": (
        "import os; os.environ['MODE'] = 'x'; del os.environ['LANG']",
        "os.environ['MODE'], 'LANG' in os.environ",
        ("x", False),
    ),
    "the working directory": ("import os; os.makedirs('deep/er'); os.chdir('deep/er')", "os.getcwd()", None),
    "the state of `random` and `numpy.random`": (
        "import random, numpy as np\nrandom.seed(1); np.random.seed(1); random.random(); np.random.random()",
        "random.random(), float(np.random.random())",
        (0.8474337369372327, 0.7203244934421581),
    ),
    "files in the workspace and the home folder": (
        "import sqlite3, pathlib\nc = sqlite3.connect('data.db')\nc.execute('create table t (n)')\n"
        "c.execute('insert into t values (5)')\nc.commit(); c.close(); del c\n"
        "(pathlib.Path.home() / '.settings').write_text('kept')",
        "sqlite3.connect('data.db').execute('select n from t').fetchone(), "
        "(pathlib.Path.home() / '.settings').read_text()",
        ((5,), "kept"),
    ),
}
LOST: dict[str, tuple[str, str, str]] = {
    "sockets": ("import socket; s = socket.socket()", "s", "cannot pickle 'socket' object"),
    "threads and locks": ("import threading; s = threading.Lock()", "s", "lock"),
    "generators and coroutines": ("s = (n for n in range(3))", "s", "generator"),
    "open files and database connections": ("s = open('f', 'w')", "s", "TextIOWrapper"),
    "functions defined inside functions": (
        "def outer():\n    def inner(): pass\n    return inner\ns = outer()",
        "s",
        "its source is not known",
    ),
    "lambdas inside containers": ("s = {'key': lambda: 1}", "s", "s['key']: "),
}


def opened(base: Path) -> Session:
    """A session with the packages of this Python."""
    config = SubprocessConfig(env={"LANG": "C"}, default_timeout=120)
    return Session(FileStorage(base), SubprocessExecutor(config), session_id="s", owns_storage=True)


@pytest.mark.parametrize("row", KEPT)
async def test_what_is_kept(row: str, tmp_path: Path) -> None:
    assert f"| {row} |" in PAGE.read_text(encoding="utf-8")
    code, look, expected = KEPT[row]
    async with opened(tmp_path) as session:
        result = await session.run(code)
        assert result.is_ok, result.error
    async with opened(tmp_path) as session:
        assert session.resumed is not None
        assert (session.resumed.missing, session.resumed.reason) == ({}, "")
        result = await session.run(look)
        assert result.value == (expected if expected is not None else f"{session.workspace_path}/deep/er"), result.error


@pytest.mark.parametrize("row", LOST)
async def test_what_is_not_kept_is_named_and_everything_else_is_there(row: str, tmp_path: Path) -> None:
    assert f"| {row} |" in PAGE.read_text(encoding="utf-8")
    code, name, why = LOST[row]
    async with opened(tmp_path) as session:
        assert (await session.run(f"x = 5\n{code}")).is_ok
    async with opened(tmp_path) as session:
        assert session.resumed is not None
        assert list(session.resumed.missing) == [name]
        assert why in session.resumed.missing[name]
        assert (await session.run("x")).value == 5


def test_the_table_has_no_other_rows() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (?:yes|no)", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    others = {"added packages", "running commands and processes", "files in `/tmp`", "memory of a GPU"}
    assert set(rows) == {*KEPT, *LOST, *others}


async def test_processes_and_temporary_files_end_with_the_session(tmp_path: Path) -> None:
    async with opened(tmp_path) as session:
        await session.execute_command("echo kept > /tmp/file; sleep 1000 & echo started")
    async with opened(tmp_path) as session:
        assert await session.processes() == []
        assert not await session.exists("/tmp/file")


PACKAGES = {
    "numpy": ("import numpy as np\nv = np.ones((2, 3))", "float(v.sum())", 6.0),
    "pandas": ("import pandas as pd\nv = pd.DataFrame({'a': [1, 2]}).groupby('a').size()", "int(v.sum())", 2),
    "polars": ("import polars as pl\nv = pl.DataFrame({'a': [1, 2]}).lazy().sum().collect()", "v.item()", 3),
    "pyarrow": ("import pyarrow as pa\nv = pa.table({'a': [1, 2]})", "v.num_rows", 2),
    "matplotlib": (
        "import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt\n"
        "v, axes = plt.subplots(); axes.plot([1, 2]); plt.close(v)",
        "len(v.axes[0].lines)",
        1,
    ),
    "sklearn": (
        "from sklearn.linear_model import LinearRegression\nv = LinearRegression().fit([[1], [2]], [2, 4])",
        "round(float(v.predict([[3]])[0]))",
        6,
    ),
    "pydantic": (
        "import pydantic\nclass User(pydantic.BaseModel):\n    name: str\n    friends: list['User'] = []\n"
        "v = User(name='a', friends=[User(name='b')])",
        "v.friends[0].name, isinstance(v, User)",
        ("b", True),
    ),
    "networkx": (
        "import networkx as nx\nv = nx.path_graph(4, create_using=nx.DiGraph); v.add_edge(0, 3, weight=2.5)",
        "nx.shortest_path(v, 0, 3, weight='weight'), v.edges[0, 3]['weight'], v.is_directed()",
        ([0, 3], 2.5, True),
    ),
    "sympy": (
        "import sympy\nx1 = sympy.symbols('x1', positive=True)\nv = sympy.sqrt(x1**2) + sympy.Integral(x1, x1)",
        "str(v.doit()), v.free_symbols == {x1}",
        ("x1**2/2 + x1", True),
    ),
}


@pytest.mark.parametrize("package", PACKAGES)
async def test_objects_of_real_packages_are_kept_or_named(package: str, tmp_path: Path) -> None:
    code, look, expected = PACKAGES[package]
    async with opened(tmp_path) as session:
        result = await session.run(f"{code}\nx = 5")
        assert result.is_ok, result.error
    async with opened(tmp_path) as session:
        assert session.resumed is not None
        assert (await session.run("x")).value == 5, session.resumed
        assert session.resumed.missing == {}
        result = await session.run(look)
        assert result.value == expected, result.error
