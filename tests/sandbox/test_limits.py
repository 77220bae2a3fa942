"""Limits: what a session may use of the machine, and that it is stopped there without harm to others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.guest.sandbox import cgroups, namespaces
from carrel.guest.sandbox.spec import SandboxLimits
from tests.sandbox.conftest import Host
from tests.sandbox.host import Session

MIB = 1 << 20
ENOSPC, EAGAIN, EMFILE, EFBIG = 28, 11, 24, 27


def test_a_fork_bomb_ends_at_the_limit(start: Callable[..., Session]) -> None:
    session = start(limits={"processes": 40})
    code = (
        "import os, signal, time\nchildren = []\n"
        "try:\n  while True:\n    pid = os.fork()\n    if pid == 0: time.sleep(100)\n    children.append(pid)\n"
        "except OSError as error: answer = [error.errno, len(children)]\n"
        "for pid in children: os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)"
    )
    number, count = session.value(code)
    assert number == EAGAIN
    assert 30 <= count <= 40
    assert session.value("import subprocess; answer = subprocess.getoutput('echo alive')") == "alive"


def test_one_session_s_processes_are_not_another_s(start: Callable[..., Session]) -> None:
    full, other = start(limits={"processes": 20}), start(limits={"processes": 20})
    full.run("import os, time\nwhile True:\n  if os.fork() == 0: time.sleep(100)")
    assert other.value("import os; answer = [os.wait()[1] for _ in range(10) if os.fork() or os._exit(0)]") == [0] * 10


def test_a_memory_bomb_ends_the_session_s_own_processes(start: Callable[..., Session]) -> None:
    session = start(limits={"memory": 200 * MIB})
    reply = session.run("import os\npieces = [os.urandom(1 << 20) for _ in range(400)]")
    assert reply["error"] in ("MemoryError", "Gone"), reply
    assert os.path.exists(f"/proc/{session.pid}"), "init went with it"


def test_memory_of_all_processes_counts_where_a_cgroup_holds_it(start: Callable[..., Session], host: Host) -> None:
    session = start(limits={"memory": 200 * MIB})
    code = (
        "import os, signal\nr, w = os.pipe()\n"
        "def eat():\n  kept = os.urandom(120 << 20); os.write(w, b'x'); os.close(w); signal.pause()\n"
        "pids = [os.fork() or eat() for _ in range(3)]; os.close(w)\n"
        "list(iter(lambda: os.read(r, 10), b''))\n"
        "look = os.WEXITED | os.WNOHANG | os.WNOWAIT\n"
        "def dead(): return sum(os.waitid(os.P_PID, p, look) is not None for p in pids)\n"
        "import time; end = time.monotonic() + (60 if held else 0)\n"
        "while dead() < 2 and time.monotonic() < end: time.sleep(0.01)\nanswer = dead()"
    )
    held = host.user is None and "memory" in cgroups.hierarchies()
    reply = session.run(f"held = {held}\n" + code)
    if held:
        # Of three times 120 MiB one fits. The worker itself may have to go.
        assert reply.get("error") == "Gone" or reply["value"] == 2, reply
    else:
        assert reply["value"] == 0, reply


def test_the_disk_is_full_at_its_limit(start: Callable[..., Session]) -> None:
    session = start(limits={"disk": 20 * MIB})
    fill = "import os\nfor p in ('/tmp/f', '/workspace/f', '/home/agent/f', '/dev/shm/f'):\n  "
    reply = session.run(fill + "open(p, 'wb').write(bytes(6 << 20))")
    assert reply["errno"] == ENOSPC, reply
    assert session.run("open('/tmp/g', 'wb').write(bytes(30 << 20))")["errno"] in (ENOSPC, EFBIG)
    session.value("import os; [os.remove(p) for p in ('/tmp/f', '/workspace/f', '/home/agent/f') if os.path.exists(p)]")
    assert session.value("answer = open('/tmp/second', 'wb').write(bytes(5 << 20))") == 5 * MIB


def test_an_overlay_s_changes_count(start: Callable[..., Session], folder: object) -> None:
    session = start(limits={"disk": 10 * MIB}, workspace={"source": str(folder), "mode": "overlay"})
    reply = session.run("for n in range(20): open(f'/workspace/{n}', 'wb').write(bytes(1 << 20))")
    assert reply["errno"] == ENOSPC, reply


def test_the_number_of_files_has_an_end(start: Callable[..., Session]) -> None:
    session = start(limits={"files": 1000})
    reply = session.run("for n in range(5000): open(f'/tmp/{n}', 'w').close()")
    assert reply["errno"] == ENOSPC, reply
    assert start().value("answer = open('/tmp/one more', 'w').write('y')") == 1


def test_open_files(start: Callable[..., Session]) -> None:
    session = start(limits={"open_files": 64})
    reply = session.run("files = []\nwhile True: files.append(open('/dev/null'))")
    assert reply["errno"] == EMFILE, reply


def test_a_share_of_the_processor(start: Callable[..., Session], host: Host) -> None:
    if host.user is not None or "cpu" not in cgroups.hierarchies():
        pytest.skip("a share of the processor needs a cgroup that we may make")
    session = start(limits={"cpus": 0.25})
    code = "import time\nt, c = time.monotonic(), time.process_time()\nwhile time.monotonic() - t < 1: pass\n"
    assert session.value(code + "answer = time.process_time() - c") < 0.6


def test_core_files_are_not_written(inside: Session) -> None:
    assert inside.value("import resource; answer = resource.getrlimit(resource.RLIMIT_CORE)") == [0, 0]


def test_zombies_are_reaped(start: Callable[..., Session]) -> None:
    session = start()
    orphan = "  if os.fork() == 0:\n    if os.fork() == 0: os._exit(0)\n    os._exit(0)\n  os.wait()"
    session.value(f"import os\nfor _ in range(100):\n{orphan}")
    end = time.monotonic() + 60
    count = "import os; answer = len([n for n in os.listdir('/proc') if n.isdigit()])"
    while session.value(count) > 2:
        assert time.monotonic() < end, "orphans are left as zombies"


def test_the_machine_s_root_is_held_by_a_cgroup() -> None:
    """The kernel does not hold its processes to any number."""
    assert not namespaces.count_processes((0, 0))
    if os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split()[2] == "4294967295":
        mapped = "from carrel.guest.sandbox.namespaces import count_processes; print(count_processes((5, 5)))"
        for command, held in (([], "True"), (["unshare", "--map-root-user"], "False")):
            done = subprocess.run([*command, sys.executable, "-c", mapped], capture_output=True, text=True, check=True)
            assert done.stdout == f"{held}\n"


@pytest.mark.parametrize("version", [1, 2])
def test_the_files_of_a_group(version: int) -> None:
    wanted = cgroups.settings(SandboxLimits(memory=64 * MIB, cpus=0.5, processes=10), version)
    first = {controller: next(iter(files.items())) for controller, files in wanted.items()}
    assert first["pids"] == ("pids.max", "12")
    assert first["memory"] == (("memory.max" if version == 2 else "memory.limit_in_bytes"), str(64 * MIB))
    assert first["cpu"] == (("cpu.max", "50000 100000") if version == 2 else ("cpu.cfs_quota_us", "50000"))


def test_a_killed_worker_is_reported_with_its_signal(start: Callable[..., Session]) -> None:
    session = start()
    session.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    record, _ = session.hear()
    assert os.WTERMSIG(record["status"]) == signal.SIGSEGV
