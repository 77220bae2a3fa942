"""A fork through a process in between that lives in its parent's memory; tried by itself, without namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from carrel.guest.sandbox import between
from tests.needs import skip_without

ASSEMBLERS = {"x86_64": "x86_64-linux-gnu-as", "aarch64": "aarch64-linux-gnu-as"}


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In a Python of its own, which it may break."""
    given = "import os\nfrom carrel.guest.sandbox import between, syscalls\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", given], capture_output=True, text=True, timeout=30, check=False)


def answer(code: str) -> str:
    done = run(code)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.strip()


@pytest.mark.parametrize("machine", sorted(between.THROUGH))
@pytest.mark.parametrize("listing", [between.THROUGH, between.THREAD])
def test_the_code_is_what_the_listing_says(machine: str, listing: dict[str, str], tmp_path: Path) -> None:
    assembler = shutil.which(ASSEMBLERS[machine])
    if assembler is None:
        skip_without(f"needs {ASSEMBLERS[machine]}, of the package binutils-{machine.replace('_', '-')}-linux-gnu")
    lines = [line.split(maxsplit=1)[1] for line in listing[machine].splitlines() if line.strip()]
    source, made, raw = (tmp_path / name for name in ("through.s", "through.o", "through.bin"))
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    subprocess.run([assembler, source, "-o", made], check=True)
    subprocess.run([assembler.removesuffix("as") + "objcopy", "-O", "binary", made, raw], check=True)
    assert raw.read_bytes() == between.code(listing[machine])


FORK = """
    def cross():
        global child, told
        told = os.getpid()
        child = syscalls.fork_as_it_is()
        return child == 0
"""


def test_the_child_has_a_copy_and_the_parent_what_was_written_between() -> None:
    code = """
        things = [1]
        read, write = os.pipe()
        number = between.way().fork(cross)
        if number == 0:
            things.append('child')
            os.write(write, repr((things, child, os.getpid() == told)).encode())
            os._exit(0)
        os.close(write)
        print(number == told != os.getpid(), child > 0, things, os.read(read, 100).decode())
        try:
            os.waitpid(-1, 0)
        except ChildProcessError as error:
            print(error)
    """
    lines = answer(textwrap.dedent(FORK) + textwrap.dedent(code)).splitlines()
    assert lines == ["True True [1] ([1, 'child'], 0, False)", "[Errno 10] No child processes"]


def test_descriptors_opened_between_are_the_parent_s() -> None:
    code = """
        def cross():
            global opened
            opened = os.open('/dev/null', os.O_RDONLY)
            return False
        between.way().fork(cross)
        print(os.path.samestat(os.fstat(opened), os.stat('/dev/null')))
    """
    assert answer(code) == "True"


def test_where_between_raises_the_parent_goes_on() -> None:
    code = """
        def cross():
            raise RuntimeError('between')
        number = between.way().fork(cross)
        print(number > 0, sum(range(10)))
    """
    done = run(code)
    assert done.stdout == "True 45\n"
    assert "RuntimeError: between" in done.stderr


def test_where_between_cannot_even_be_called_the_parent_goes_on() -> None:
    """Too deep a recursion, for example. What ctypes then returns for it is whatever was there."""
    code = """
        way, me = between.way(), os.getpid()
        way._crossing = type(way._crossing)(lambda needs: None)
        def fork(depth):
            return way.fork(bool) if depth == 0 else fork(depth - 1)
        for depth in range(100):
            if fork(depth) <= 0 or os.getpid() != me:
                print('went on as the child')
                os._exit(1)
        print('done')
    """
    assert run(code).stdout == "done\n"


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_where_between_ends_in_the_middle_so_does_the_parent(end: str) -> None:
    """Python in this memory is in the middle of a call that nobody will end."""
    done = run(f"""
        def cross():
            {end}
        between.way().fork(cross)
        print('went on')
    """)
    assert (done.returncode, done.stdout) == (between.BROKEN, "")


def test_a_signal_that_comes_meanwhile_is_the_parent_s() -> None:
    code = """
        import signal
        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(os.getpid()))
        me = os.getpid()
        def cross():
            os.kill(me, signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            return syscalls.fork_as_it_is() == 0
        if between.way().fork(cross) == 0:
            os._exit(len(seen))
        print(seen == [me], sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    """
    assert answer(code) == "True []"


def test_where_no_process_can_be_made_that_is_said() -> None:
    drop = "os.setgid(65534); os.setuid(65534)" if os.geteuid() == 0 else "pass"
    code = f"""
        import resource
        way = between.way()
        {drop}
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        try:
            way.fork(lambda: False)
        except OSError as error:
            print(error)
    """
    assert answer(code) == "[Errno 11] clone: Resource temporarily unavailable"


def test_many_in_a_row_leave_nothing() -> None:
    code = """
        way = between.way()
        def look():
            counts = [len(os.listdir(f'/proc/self/{kind}')) for kind in ('fd', 'task')]
            return [*counts, int(open('/proc/self/statm').read().split()[1])]
        for number in range(300):
            if way.fork(cross) == 0:
                os._exit(0)
            if number == 50:
                before = look()
        after = look()
        print(before[:2] == after[:2], after[2] - before[2] < 50)
    """
    assert answer(textwrap.dedent(FORK) + textwrap.dedent(code)) == "True True"


def test_the_kernel_knows_the_child_s_restartable_sequences() -> None:
    """libc believes that its own are registered, as in every child of a fork."""
    code = """
        from carrel.guest.sandbox.numbers import MACHINE
        way = between.way()
        def registered():
            if way._sequences is None:
                return 'no'
            try:
                syscalls.call('rseq', way._thread() + way._sequences, 32, 0, between.RSEQ_SIGNATURE[MACHINE])
            except OSError as error:
                return error.errno
        read, write = os.pipe()
        if way.fork(cross) == 0:
            os.write(write, repr(registered()).encode())
            os._exit(0)
        print(os.read(read, 10).decode() == repr(registered()))
    """
    assert answer(textwrap.dedent(FORK) + textwrap.dedent(code)) == "True"


def test_hooks_are_called_by_the_parent_and_in_the_child_as_after_any_fork() -> None:
    code = """
        import gc, signal, threading
        me, said = os.getpid(), []
        def hook(name):
            # Of the two that matter only the parent has a number that is known here.
            thread = threading.Thread(target=lambda: said.append((name, os.getpid() == me)))
            thread.start()
            thread.join()
            said.append(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        for name in ('before', 'after_in_parent', 'after_in_child'):
            os.register_at_fork(**{name: lambda name=name: hook(name)})
        read, write = os.pipe()
        if between.way().fork(cross) == 0:
            os.write(write, repr((said, gc.isenabled())).encode())
            os._exit(0)
        print((said, gc.isenabled()))
        print(os.read(read, 1000).decode())
    """
    assert answer(textwrap.dedent(FORK) + textwrap.dedent(code)).splitlines() == [
        "([('before', True), 0, ('after_in_parent', True), 0], True)",
        "([('before', True), 0, ('after_in_child', False), 0], True)",
    ]


def test_nothing_is_collected_by_who_stands_between() -> None:
    code = """
        import gc
        me, said = os.getpid(), []
        class Thing:
            def __init__(self):
                self.own = self
            def __del__(self):
                said.append(os.getpid())
        def cross():
            for _ in range(5000):
                Thing()
            return False
        between.way().fork(cross)
        gc.collect()
        print(len(said), set(said) == {me})
    """
    assert answer(code) == "5000 True"


@pytest.mark.parametrize("number", ["signal.SIG_IGN", "lambda *_: seen.append(1)"])
def test_no_signal_tells_of_who_stood_between(number: str) -> None:
    """It is no child that code has made: where code does not want to hear of its own, this one is waited for too."""
    code = f"""
        import signal
        seen = []
        signal.signal(signal.SIGCHLD, {number})
        print(between.way().fork(lambda: False) > 0, seen)
        try:
            os.waitpid(-1, 0x40000000)
        except ChildProcessError as error:
            print(error)
    """
    assert answer(code).splitlines() == ["True []", "[Errno 10] No child processes"]


@pytest.mark.parametrize("dumpable", [0, 1])
def test_who_can_look_into_the_memory_stays_as_it_was(dumpable: int) -> None:
    code = f"""
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, {dumpable})
        def change():
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, {1 - dumpable})
        between.way().fork(change)
        print(syscalls.prctl(syscalls.PR_GET_DUMPABLE))
    """
    assert answer(code) == str(dumpable)


def test_it_takes_no_memory_that_a_session_may_not_have() -> None:
    code = """
        import resource
        way = between.way()
        resource.setrlimit(resource.RLIMIT_DATA, (0, 0))
        print(way.fork(lambda: False) > 0)
    """
    assert answer(code) == "True"
