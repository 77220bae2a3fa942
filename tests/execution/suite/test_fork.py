"""Live forks: the same variables and files, and from then on apart."""

from __future__ import annotations

import asyncio
import signal

import pytest

from carrel.errors import ExecutorClosed, ForkRefused
from carrel.execution.config import Limits
from carrel.execution.executor import Executor
from tests.execution.conftest import Start


async def test_where_it_cannot_fork_it_says_so_and_goes_on(executor: Executor) -> None:
    await executor.run("x = 1")
    if "fork" not in executor.supported_capabilities():
        with pytest.raises(ForkRefused):
            await executor.fork()
        with pytest.raises(ForkRefused):
            await executor.checkpoint()
    assert (await executor.run("x")).value == 1


@pytest.mark.promise("forks")
async def test_a_fork_has_the_variables_and_the_files_and_goes_its_own_way(executor: Executor) -> None:
    await executor.run("x = [1]\nopen('f', 'w').write('before')")
    fork = await executor.fork()
    try:
        for one, other in ((executor, "parent"), (fork, "fork")):
            await one.run(f"x.append({other!r})\nopen('f', 'w').write({other!r})\nprint({other!r})")
        for one, other in ((executor, "parent"), (fork, "fork")):
            result = await one.run("print(x[1])\nx, open('f').read()")
            assert (result.value, result.stdout) == (([1, other], other), f"{other}\n")
            assert (await one.exec("cat f")).stdout == other
    finally:
        await fork.close()


@pytest.mark.promise("forks")
async def test_it_goes_back_to_a_moment_as_often_as_wanted_and_leaves_nothing(executor: Executor) -> None:
    await executor.run("import random\nx = [1]\nopen('f', 'w').write('then')")
    moment = await executor.checkpoint()
    drawn = (await executor.run("random.random()")).value
    for number in range(3):
        await executor.run(f"x.append({number})\nopen('f', 'w').write('since')\nopen('g', 'w').close()")
        await executor.rewind(moment)
        assert (await executor.run("random.random()")).value == drawn
        assert (await executor.run("import os\nx, open('f').read(), os.path.exists('g')")).value == ([1], "then", False)
    other = await executor.fork()
    try:
        with pytest.raises(ForkRefused, match="not a checkpoint of this session"):
            await other.rewind(moment)
    finally:
        await other.close()
    await moment.close()
    await moment.close()
    with pytest.raises(ForkRefused, match="was dropped"):
        await executor.rewind(moment)
    await executor.checkpoint()
    await executor.close()
    with pytest.raises(ExecutorClosed):
        await executor.rewind(moment)


@pytest.mark.promise("forks")
async def test_a_fork_outlives_its_parent_and_survives_a_crash(executor: Executor) -> None:
    await executor.run("x = 7")
    fork = await executor.fork()
    try:
        await executor.close()
        assert (await fork.run("x")).value == 7
        result = await fork.run("import os; os._exit(1)")
        assert (result.error_type, result.state) == ("Crashed", "restored")
        assert (await fork.run("x")).value == 7
    finally:
        await fork.close()


@pytest.mark.promise("forks")
@pytest.mark.parametrize(
    "code",
    [
        "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (r.getrlimit(r.RLIMIT_NOFILE)[1],) * 2)\n"
        "files = [open('/dev/null') for _ in range(1100)]",
        "import select\nselect.select = select.poll = None",
        "import os\n"
        "os.register_at_fork(before=lambda: 1 / 0, after_in_parent=lambda: 1 / 0, after_in_child=lambda: 1 / 0)",
        "import os\nos.fork = None",
        "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "import resource as r\nr.setrlimit(r.RLIMIT_DATA, (0, 0))",
        "import resource as r\nr.setrlimit(r.RLIMIT_DATA, (0, 0))\n"
        "held = []\ntry:\n    while True: held.append(bytes(1000))\nexcept MemoryError: pass",
    ],
    ids=["many files", "select", "hooks that raise", "os.fork", "SIGCHLD is ignored", "no memory", "memory is full"],
)
async def test_whatever_code_has_done_its_variables_are_there_after_a_fork(executor: Executor, code: str) -> None:
    await executor.run(f"x = 7\n{code}")
    for _ in range(3):
        fork = await executor.fork()
        try:
            assert (await fork.run("x")).value == 7
        finally:
            await fork.close()
        assert (await executor.run("x")).value == 7


@pytest.mark.promise("forks")
@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
async def test_where_the_process_that_forks_is_ended_nothing_has_changed(executor: Executor, end: str) -> None:
    await executor.write_file("end", "now")
    await executor.run(
        "import ctypes, os\nx, end = 7, os.path.abspath('end')\n"
        # The hooks of C libraries run wherever fork() is called; the process in between is in no /proc that it sees.
        f"hook = ctypes.CFUNCTYPE(None)(lambda: os.path.exists('/proc/self') or open(end).read() and {end})\n"
        "ctypes.CDLL(None).__register_atfork(hook, None, None, None)"
    )
    with pytest.raises(ForkRefused, match="was killed"):
        await executor.fork()
    await executor.write_file("end", "")
    assert (await executor.run("x")).value == 7
    fork = await executor.fork()
    try:
        assert (await fork.run("x")).value == 7
    finally:
        await fork.close()


@pytest.mark.promise("forks")
async def test_hooks_of_code_run_in_the_session_s_python(executor: Executor) -> None:
    await executor.run(
        "import os, threading\nsaid, threads, worker = [], [], os.getpid()\n"
        "def hook(name):\n"
        "    said.append((name, os.getpid() == worker, len(os.listdir('/proc/self/fd')) > 0))\n"
        "    threads.append(threading.Thread(target=said.append, args=('thread',)))\n"
        "    threads[-1].start(); threads[-1].join()\n"
        "for name in ('before', 'after_in_parent'):\n"
        "    os.register_at_fork(**{name: lambda name=name: hook(name)})"
    )
    fork = await executor.fork()
    await fork.close()
    ends = "[one for one in said if one != 'thread'], said.count('thread') == len(said) / 2"
    reported, each = (await executor.run(ends)).value
    assert set(reported) == {("before", True, True), ("after_in_parent", True, True)}
    assert each


@pytest.mark.promise("forks")
async def test_a_fork_refused_for_want_of_processes_can_be_made_when_there_are_some(start: Start) -> None:
    executor = start(limits=Limits(processes=12))
    await executor.run(
        "import subprocess\nx, started = 7, []\n"
        "try:\n    while True: started.append(subprocess.Popen(['sleep', '1000']))\nexcept OSError: pass"
    )
    with pytest.raises(ForkRefused):
        await executor.fork()
    await executor.run("for process in started:\n    process.kill(); process.wait()")
    fork = await executor.fork()
    try:
        assert (await fork.run("x")).value == 7
    finally:
        await fork.close()


@pytest.mark.promise("forks")
@pytest.mark.parametrize("free", [3, 4, 6])
async def test_a_fork_refused_for_want_of_descriptors_can_be_made_when_there_are_some(start: Start, free: int) -> None:
    """The request brings three: none is left then to look at what is open, or too few for the way."""
    executor = start(snapshots=False)
    await executor.run(
        "import os, resource\nx, held = 7, []\nresource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))\n"
        "try:\n    while True: held.append(os.open('/dev/null', os.O_RDONLY))\nexcept OSError: pass\n"
        f"for _ in range({free}): os.close(held.pop())"
    )
    with pytest.raises(ForkRefused, match="a live fork was refused"):
        await executor.fork()
    assert (await executor.run("for one in held: os.close(one)\nx")).value == 7
    fork = await executor.fork()
    try:
        assert (await fork.run("x")).value == 7
    finally:
        await fork.close()


@pytest.mark.promise("forks")
async def test_forks_of_forks_and_many_of_one(executor: Executor) -> None:
    await executor.run("x = 0")
    line = [executor]
    try:
        for number in range(1, 5):
            line.append(await line[-1].fork())
            await line[-1].run(f"x = {number}")
        line += [await executor.fork() for _ in range(4)]
        assert [r.value for r in await asyncio.gather(*(one.run("x") for one in line))] == [0, 1, 2, 3, 4, 0, 0, 0, 0]
    finally:
        await asyncio.gather(*(one.close() for one in line))


@pytest.mark.promise("forks")
async def test_forks_and_crashes_in_turn_at_any_moment(executor: Executor) -> None:
    """Whether a snapshot is there already or not: it becomes the live one, and another is kept in its place."""
    for number in range(12):
        await executor.run(f"x = {number}\ny = len(str(x))")
        await asyncio.sleep((0, 0.001, 0.002, 0.05)[number % 4])
        fork = await executor.fork()
        try:
            assert (await fork.run("x")).value == number
            assert (await fork.run("import os; os._exit(1)")).state == "restored"
            assert (await fork.run("x")).value == number
        finally:
            await fork.close()
        if number % 3 == 0:
            assert (await executor.run("import os; os._exit(1)")).state == "restored"
        assert (await executor.run("x")).value == number


OTHERS = """
import os, signal, sys
for name in os.listdir("/proc"):
    if name.isdigit() and name not in ("1", str(os.getpid()), str(os.getppid()), sys.argv[1]):
        try:
            os.kill(int(name), int(sys.argv[2]))
        except OSError:
            pass
"""


@pytest.mark.promise("forks")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_code_that_has_stopped_its_snapshot_is_forked_all_the_same(executor: Executor, number: int) -> None:
    worker = (await executor.run("import os; x = 5; os.getpid()")).value
    await executor.write_file("others.py", OTHERS)
    await asyncio.sleep(0.2)
    # A command, since a run would be followed by another snapshot.
    done = await executor.exec(["python3", "others.py", str(worker), str(int(number))])
    assert (done.exit_code, done.stderr) == (0, "")
    fork = await executor.fork()
    assert (await fork.run("x")).value == 5
    await fork.close()


@pytest.mark.promise("forks")
async def test_threads_refuse_a_fork_and_nothing_changes(executor: Executor) -> None:
    await executor.run("import threading\nstop = threading.Event()\nt = threading.Thread(target=stop.wait); t.start()")
    with pytest.raises(ForkRefused, match="thread"):
        await executor.fork()
    assert (await executor.run("stop.set(); t.join(); 5")).value == 5
    fork = await executor.fork()
    assert (await fork.run("6")).value == 6
    await fork.close()


async def test_a_closed_one_cannot_be_forked(start: Start) -> None:
    executor = start()
    await executor.start()
    await executor.close()
    with pytest.raises((ForkRefused, RuntimeError)):
        await executor.fork()
