"""Between cells a snapshot is kept: when the worker dies, the session goes on from it with its variables."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.worker.driver import Session

DEATHS = {
    "exit": "import os; os._exit(1)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "the line closed": "import os; os.closerange(3, 5000)",
    "the line forged": (
        "import os, socket\n"
        "for fd in range(3, 1000):\n"
        "    try: os.write(fd, b'\\xff' * 8)\n"
        "    except OSError: pass\n"
        "import time; time.sleep(1000)"
    ),
}


def snapshots_of(session: Session) -> list[int]:
    """The worker's children that are alive or waiting to be buried."""
    found = []
    for task in Path(f"/proc/{session.pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _until(held: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not held():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("death", DEATHS)
def test_the_variables_are_as_before_the_cell_that_died(session: Session, death: str) -> None:
    session.value("import math\nx = [1, 2]\ndef f(): return x\nclass C: pass\nc = C()\nc.y = f")
    number = session.ask(op="run", code=f"x.append(3)\n{DEATHS[death]}")
    with pytest.raises(Exception, match=r"channel|announced"):
        session.result(number)
    session.process.kill()
    session.wake()
    assert session.value("c.y(), math.sqrt(4)") == ([1, 2], 2.0)
    assert session.run("print('heard')").stdout == "heard\n"
    assert "line 1" in (session.run("f.no").error or "")


def test_again_and_again_in_every_python(everywhere: Session) -> None:
    for turn in range(3):
        everywhere.value(f"turns = globals().get('turns', []) + [{turn}]")
        # At once: the fork is made before the cell, when there was no time after the last.
        everywhere.crash("import os\nturns.append('lost')\nos._exit(1)")
        everywhere.wake()
    assert everywhere.value("turns") == [0, 1, 2]
    assert everywhere.value("tools.a(1)") == ["tools.a", [1], {}]
    assert everywhere.value("await tools.a.call_async(1)") == ["tools.a", [1], {}]


def test_a_value_with_a_repr_that_kills_is_shown_after_a_fork(session: Session) -> None:
    session.value("import os\nclass K:\n    def __repr__(self): os._exit(1)\nk = K()")
    session.value("late = 5")
    session.crash("k")
    session.wake()
    assert session.value("late") == 5


def test_expressions_do_not_make_forks(session: Session) -> None:
    session.value("x = 1")
    session.wait_for_snapshot()
    before = len([record for record in session.records if record.get("op") == "snapshot"])
    for _ in range(5):
        session.value("1 + 1")
        time.sleep(0.01)
    session.value("1")
    assert len([record for record in session.records if record.get("op") == "snapshot"]) == before


def test_only_one_is_kept_and_none_piles_up(session: Session) -> None:
    for n in range(30):
        session.value(f"x = len([{n}])")
    session.wait_for_snapshot()
    _until(lambda: len(snapshots_of(session)) == 1)
    before = session.value("import os\nlen(os.listdir('/proc/self/fd'))")
    for n in range(30):
        session.value(f"x = len([{n}])")
    assert session.value("len(os.listdir('/proc/self/fd'))") == before
    # And none outlives its session.
    session.wait_for_snapshot()
    _until(lambda: len(snapshots_of(session)) == 1)
    (kept,) = snapshots_of(session)
    session.close()
    _until(lambda: not Path(f"/proc/{kept}").exists())


def test_code_that_takes_all_children_does_no_harm(session: Session) -> None:
    session.value("import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    session.value("x = 1")
    session.wait_for_snapshot()
    session.value("x = len([1])")
    session.wait_for_snapshot()
    session.crash("os._exit(1)")
    session.wake()
    assert session.value("x") == 1


def test_with_threads_none_is_kept_and_the_reason_is_reported(everywhere: Session) -> None:
    everywhere.value("import threading\nstop = threading.Event()")
    everywhere.value("t = threading.Thread(target=stop.wait, name='mine')\nt.start()")
    everywhere.wait_for_snapshot()
    assert everywhere.snapshot == []
    assert "mine" in (everywhere.why_not or "")
    assert "1 other thread " in everywhere.run("1").record["snapshot"]
    everywhere.value("stop.set()\nt.join()\nx = 6")
    everywhere.wait_for_snapshot()
    assert everywhere.run("1").record["snapshot"] == "kept"
    everywhere.crash("import os; os._exit(1)")
    everywhere.wake()
    assert everywhere.value("x") == 6


def test_those_before_are_buried_also_where_nothing_pauses(session: Session) -> None:
    numbers = [session.ask(op="run", code="print(1)") for _ in range(200)]
    last = session.ask(
        op="run", code="len(open(f'/proc/self/task/{__import__(\"os\").getpid()}/children').read().split())"
    )
    for number in numbers:
        session.result(number)
    assert session.ran(last).value < 100


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_where_nearly_all_descriptors_are_taken_the_worker_lives_on(session: Session, left: int) -> None:
    assert (
        session.value(
            "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))\ntaken = []\n"
            "try:\n    while True: taken.append(os.open('/dev/null', os.O_RDONLY))\nexcept OSError: pass\n"
            f"for _ in range({left}): os.close(taken.pop())\nx = 5"
        )
        is None
    )
    session.wait_for_snapshot()
    assert session.value("x") == 5


def test_with_native_threads_none_is_kept(session: Session) -> None:
    session.value(
        "import ctypes, time\n"
        "libc = ctypes.CDLL(None)\n"
        "thread = ctypes.c_ulong()\n"
        "libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)"
    )
    session.wait_for_snapshot()
    assert "1 native thread" in (session.why_not or "")
    assert session.value("1 + 1") == 2
    _until(lambda: snapshots_of(session) == [])


def test_above_the_ceiling_none_is_kept() -> None:
    with Session(max_snapshot_bytes=100 << 20) as session:
        session.value("x = bytearray(1 << 20)")
        session.wait_for_snapshot()
        assert session.snapshot
        session.value("x = bytearray(200 << 20)")
        session.wait_for_snapshot()
        assert "more than is kept twice (100 MiB)" in (session.why_not or "")
        assert session.snapshot == []
        session.value("del x")
        session.wait_for_snapshot()
        assert session.snapshot
    with Session(snapshots=False) as session:
        assert session.run("x = 1").record["snapshot"] == "snapshots are switched off"
        session.value("1")
        assert session.snapshot == []


def test_loops_tasks_and_databases_go_on(everywhere: Session) -> None:
    everywhere.value(
        "import asyncio, sqlite3\n"
        "db = sqlite3.connect('d.db')\n"
        "db.execute('create table t (x)')\ndb.execute('insert into t values (1)')\ndb.commit()\n"
        "lock, queue = asyncio.Lock(), asyncio.Queue()\n"
        "async def later():\n    await asyncio.sleep(0.01)\n    return 'done'\n"
    )
    everywhere.value("task = asyncio.create_task(later())\nawait asyncio.sleep(0)\nawait queue.put(1)")
    everywhere.crash("import os\nawait asyncio.sleep(0)\nos._exit(1)")
    everywhere.wake()
    assert everywhere.value("await task, await queue.get(), db.execute('select * from t').fetchall()") == (
        "done",
        1,
        [(1,)],
    )
    assert everywhere.value("async with lock: got = await asyncio.sleep(0, 3)\ngot") == 3


LIBRARIES = {
    "numpy": (
        "import numpy as np\na = np.random.default_rng(0).random((300, 300))\nb = float((a @ a).sum())",
        "float((a @ a).sum()) == b",
    ),
    "pandas": (
        "import pandas as pd\nd = pd.DataFrame({'k': list('abab'), 'v': range(4)})\ng = d.groupby('k').v.sum()",
        "d.groupby('k').v.sum().tolist() == g.tolist() == [2, 4]",
    ),
    "matplotlib": (
        "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nline = ax.plot([1, 2])",
        "import io\nax.plot([2, 1])\nout = io.BytesIO()\nfig.savefig(out)\nlen(out.getvalue()) > 1000",
    ),
    "pyarrow": (
        "import pyarrow as pa\nt = pa.table({'x': [1, 2, 3]})",
        "import pyarrow.compute as pc\npc.sum(t['x']).as_py() == 6",
    ),
    "duckdb": (
        "import duckdb\nc = duckdb.connect()\nn = c.sql('select 1 as x').fetchall()",
        "c.sql('select 41 + 1').fetchall() == [(42,)]",
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_go_on_in_a_woken_fork_or_none_is_kept(session: Session, library: str) -> None:
    code, check = LIBRARIES[library]
    assert session.run(code).error is None
    session.wait_for_snapshot()
    if library in ("numpy", "pandas", "matplotlib"):
        assert session.snapshot, session.why_not
    if session.snapshot:
        session.crash("import os; os._exit(1)")
        session.wake()
    else:
        assert "native thread" in (session.why_not or "")
    assert session.value(check) is True


@pytest.mark.parametrize(
    "code",
    [
        "import polars as pl\nx = pl.DataFrame({'x': [1, 2]}).lazy().group_by('x').len().collect().height",
        "from sklearn.ensemble import HistGradientBoostingClassifier as H\n"
        "x = int(H(max_iter=2).fit([[n] for n in range(50)], [0, 1] * 25).predict([[1]]).shape[0])",
        "from concurrent.futures import ThreadPoolExecutor as T\npool = T(2)\nx = pool.submit(abs, -1).result()",
    ],
)
def test_libraries_that_would_hang_in_a_fork_keep_none(session: Session, code: str) -> None:
    assert session.run(code).error is None
    session.wait_for_snapshot()
    assert session.snapshot == []
    assert "thread" in (session.why_not or "")
    assert session.value("x") >= 1
