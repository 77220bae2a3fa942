"""What code has open when it is forked, or its moment is kept: each has its own from then on."""

from __future__ import annotations

from typing import Any

import pytest

from carrel.errors import ForkRefused
from carrel.execution.executor import Executor

SETUP = """
import os, sqlite3, tempfile

open('read', 'w').write('0123456789')
reading = open('read'); reading.read(3)
writing = open('written', 'w'); writing.write('begun '); writing.flush()
adding = open('added', 'a'); adding.write('begun '); adding.flush()
buffered = open('buffered', 'w'); buffered.write('begun ')
nameless = tempfile.TemporaryFile(); nameless.write(b'begun '); nameless.flush()
twin = os.dup(nameless.fileno())
written_only = os.open('gone', os.O_WRONLY | os.O_CREAT); os.write(written_only, b'begun '); os.unlink('gone')
os.mkdir('folder'); folder = os.open('folder', os.O_RDONLY)
memory = os.memfd_create('memory'); os.truncate(memory, 1 << 29); os.write(memory, b'begun ')
plain = sqlite3.connect('plain.db'); plain.execute('create table t (x)'); plain.execute('insert into t values (1)')

def change(word):
    reading.read(2)
    for file in (writing, adding, buffered):
        file.write(word); file.flush()
    nameless.write(word.encode()); nameless.flush(); os.write(written_only, word.encode())
    os.close(os.open(word, os.O_WRONLY | os.O_CREAT, dir_fd=folder))
    os.write(memory, word.encode())
    plain.execute('insert into t values (?)', [word]); plain.commit()

def look():
    there = [open(name).read() for name in ('written', 'added', 'buffered')]
    there += [os.pread(twin, 99, 0), os.path.getsize(f'/proc/self/fd/{written_only}'), os.listdir(folder)]
    there += [os.listdir('folder'), os.pread(memory, 99, 0)[:20].strip(b'\\0'), reading.tell()]
    for one in (plain, sqlite3.connect('plain.db')):
        there.append([row[0] for row in one.execute('select x from t')])
    return there
"""


@pytest.mark.promise("forks")
async def test_open_files_are_separate_in_a_fork(executor: Executor) -> None:
    assert (await executor.run(SETUP)).error is None

    async def look(at: Executor) -> object:
        result = await at.run("look()")
        assert result.error is None
        return result.value

    before = await look(executor)
    moment = await executor.checkpoint()
    fork = await executor.fork()
    try:
        assert await look(fork) == before
        assert (await fork.run("change('fork')")).error is None
        changed = await look(fork)
        assert changed != before
        assert await look(executor) == before
        assert (await executor.run("change('parent')")).error is None
        assert await look(fork) == changed
    finally:
        await fork.close()
    for _ in range(2):
        await executor.rewind(moment)
        assert await look(executor) == before
        assert (await executor.run("change('fork')")).error is None
        assert await look(executor) == changed


@pytest.mark.promise("forks")
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("os.mkfifo('pipe'); kept = os.open('pipe', os.O_RDWR)", "open connections"),
        ("kept = os.openpty()", "open connections"),
        ("kept = os.pipe()", "open connections.*pipe"),
        ("import socket; kept = socket.socket()", "open connections.*socket"),
        ("kept = open('secret', 'w'); os.chmod('secret', 0)", "secret cannot be opened again"),
        ("import mmap; kept = mmap.mmap(-1, 4096)", "shared memory cannot be copied"),
        ("open('f', 'wb').write(bytes(9)); import mmap; kept = mmap.mmap(os.open('f', os.O_RDWR), 9)", "memory .*/f"),
    ],
    ids=["named pipe", "terminal", "pipe", "socket", "may not be opened", "shared memory", "mapped file"],
)
async def test_what_cannot_be_had_twice_is_named_and_nothing_has_changed(
    executor: Executor, code: str, why: str
) -> None:
    await executor.run(f"import os\nx = 7\n{code}")
    for _ in range(2):
        with pytest.raises(ForkRefused, match=why):
            await executor.checkpoint()
    assert (await executor.run("x")).value == 7
    await executor.run("os.closerange(4, 100)\ndel kept")
    await (await executor.checkpoint()).close()


CHURN = """
import itertools, os, shutil
for n in itertools.count():
    try:
        os.makedirs(f'a{n % 9}/b', exist_ok=True)
        open(f'a{n % 9}/b/f{n % 7}', 'w').write('x' * 50_000)
        os.unlink(f'a{n % 9}/b/f{n % 5}')
        os.rename(f'a{n % 9}', f'c{n % 9}') if n % 4 == 0 else shutil.rmtree(f'c{n % 9}')
    except OSError:
        pass
"""


@pytest.mark.promise("forks")
async def test_files_may_come_and_go_while_they_are_copied(executor: Executor) -> None:
    await executor.write_file("churn.py", CHURN)
    await executor.write_file("kept", "kept")
    await executor.exec("python3 churn.py & echo begun")
    for _ in range(8):
        await (await executor.checkpoint()).close()
    moment = await executor.checkpoint()
    await executor.rewind(moment)
    assert await executor.processes() == []
    assert await executor.read_file("kept") == b"kept"


HELD = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
for name in ('held', 'closed', 'other', 'unlike'):
    open(name, 'w').write(name + ' 456789')
held = ctypes.c_void_p(libc.fopen(b'held', b'r'))
libc.fgetc(held)
closed, unlike = open('closed'), os.open('unlike', os.O_RDONLY)

def instead():
    os.close(unlike)
    assert os.open('other', os.O_RDONLY) == unlike

os.register_at_fork(after_in_child=instead)
os.register_at_fork(after_in_child=closed.close)
closed.read(2)
look = lambda: (chr(libc.fgetc(held)), os.pread(unlike, 5, 0), closed.closed or closed.read(2))
"""


@pytest.mark.promise("forks")
async def test_files_that_c_code_holds_and_that_a_hook_closes(executor: Executor) -> None:
    assert (await executor.run(HELD)).error is None
    # The snapshot of each run is a fork too, whose hooks run only in a child that goes on.
    forked: Any = await executor.fork()
    async with forked as fork:
        result = await fork.run("look()")
        assert result.value == ("e", b"other", True), result.error
    moment = await executor.checkpoint()
    assert (await executor.run("look()")).value == ("e", b"unlik", "os")
    await executor.rewind(moment)
    assert (await executor.run("look()")).value == ("e", b"other", True)


@pytest.mark.promise("forks")
async def test_after_a_plot_it_can_be_forked(executor: Executor) -> None:
    draw = "plt.plot([1, 2]); plt.title('words'); plt.savefig('/tmp/plot.png'); plt.close()"
    result = await executor.run(f"import matplotlib; matplotlib.use('agg')\nimport matplotlib.pyplot as plt\n{draw}")
    assert result.error is None
    moment = await executor.checkpoint()
    forked: Any = await executor.fork()
    async with forked as fork:
        assert (await fork.run(draw)).error is None
    await executor.rewind(moment)
    assert (await executor.run(draw)).error is None


LIBRARIES = {
    "polars": "import polars; polars.DataFrame({'a': [1, 2]}).lazy().select(polars.col('a').sum()).collect()",
    "duckdb": "import duckdb; database = duckdb.connect(); database.sql('select 42').fetchall()",
    "pyarrow": "import pyarrow.csv; open('a.csv', 'w').write('a,b\\n1,2\\n'); pyarrow.csv.read_csv('a.csv')",
}


@pytest.mark.promise("forks")
@pytest.mark.parametrize("name", LIBRARIES)
async def test_a_refused_fork_names_the_library(executor: Executor, name: str) -> None:
    assert (await executor.run(LIBRARIES[name])).error is None
    for branch in (executor.fork, executor.checkpoint):
        with pytest.raises(ForkRefused, match=name):
            await branch()
    assert (await executor.run("1 + 1")).value == 2
