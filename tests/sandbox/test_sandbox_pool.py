"""The sandbox prepared in advance: which session gets it, and when it is discarded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sandbox.conftest import Host, waiting_place
from tests.sandbox.host import InitGone, Refused, Session, wait_gone


@pytest.fixture
def ahead(host: Host) -> int:
    """The first process of a place that waits for its session."""
    return waiting_place(host)


def test_one_session_alone_pays_for_no_other(host: Host) -> None:
    session = host.session(hostname="alone")
    time.sleep(0.1)
    session.close()
    assert f"{session.pid}" not in children(host)
    assert all(hostname(int(pid)) != "alone" for pid in children(host))


def test_the_next_session_finds_its_place_there(host: Host, ahead: int, start: Callable[..., Session]) -> None:
    session = start()
    assert session.pid == ahead
    assert session.value("answer = 6 * 7") == 42
    assert session.pid != start().pid


def test_what_it_is_given_comes_late_and_is_there(
    host: Host, ahead: int, start: Callable[..., Session], folder: Path
) -> None:
    (folder / "given.txt").write_text("given")
    session = start(
        workspace={"source": str(folder), "mode": "overlay"},
        env={"NAME": "of this session"},
        mounts=[{"source": str(folder), "at": f"/data/{number}", "mode": "ro"} for number in range(40)],
    )
    assert session.pid == ahead
    found = "import os; answer = [os.getcwd(), open('given.txt').read(), os.environ['NAME'], len(os.listdir('/data'))]"
    assert session.value(found) == ["/workspace", "given", "of this session", 40]


@pytest.mark.parametrize(
    "other",
    [{"hostname": "other"}, {"network": True}, {"limits": {"disk": 1 << 20}}, {"home": "/home/other"}],
    ids=lambda other: next(iter(other)),
)
def test_a_session_of_another_kind_gets_another_place(
    host: Host, ahead: int, start: Callable[..., Session], other: dict[str, object]
) -> None:
    assert start(**other).pid != ahead
    assert start().pid == ahead


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("who", ["init", "worker"])
def test_one_that_is_killed_is_not_given_to_anybody(
    host: Host, ahead: int, start: Callable[..., Session], who: str, at_once: bool
) -> None:
    killed = ahead if who == "init" else worker_of(ahead)
    if at_once:
        # The zygote hears of the death and of the wish for a session in the same moment.
        os.kill(host.zygote.pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (host.zygote.pid, signal.SIGCONT)).start()
    kill_if_there(killed)  # it is replaced by itself where a test beside this one mounts something
    session = start_as_host_does(start)
    assert session.pid != ahead
    assert session.value("answer = 6 * 7") == 42
    assert start_as_host_does(start, hostname="another").value("answer = 6 * 7") == 42


def test_a_prepared_sandbox_without_its_worker_is_replaced(host: Host, ahead: int) -> None:
    os.kill(worker_of(ahead), signal.SIGKILL)
    wait_gone(ahead)
    assert waiting_place(host) != ahead


@pytest.mark.parametrize("who", ["init", "worker"])
def test_whenever_it_is_killed_the_next_session_starts(host: Host, start: Callable[..., Session], who: str) -> None:
    """Also in the middle of its building, or while it is being given away."""
    many = [{"source": "/usr", "at": f"/data/{number}"} for number in range(20)]
    for number in range(40):
        place = waiting_place(host)
        try:
            victim = place if who == "init" else worker_of(place)
        except FileNotFoundError:
            continue  # It was replaced meanwhile: something was mounted on this machine.
        threading.Timer(number / 20_000, kill_if_there, (victim,)).start()
        try:
            session = start_as_host_does(host.session, mounts=many)
        except (json.JSONDecodeError, InitGone):
            continue  # It was killed when it had just begun.
        session.run("answer = 1")
        session.close()
    assert host.session().value("answer = 6 * 7") == 42


def test_it_goes_with_the_zygote() -> None:
    other = Host(None if os.geteuid() else 65534)
    place = waiting_place(other)
    os.kill(other.zygote.pid, signal.SIGKILL)
    os.waitpid(other.zygote.pid, 0)
    other.zygote.control.close()
    end = time.monotonic() + 60
    while Path(f"/proc/{place}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def mount(host: Host, folder: Path) -> Callable[[], None]:
    """What the host mounts in the middle of the test, where its zygote sees it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount here")
    (folder / "new").mkdir()
    (folder / "old").mkdir()
    (folder / "new" / "new.txt").write_text("new")
    mounting = ["mount", "--bind", str(folder / "new"), str(folder / "old")]
    command = ["nsenter", f"--mount=/proc/{host.zygote.pid}/ns/mnt", *mounting]

    def make() -> None:
        subprocess.run(command, check=True)

    return make


def test_mounts_made_since_are_seen(
    ahead: int, mount: Callable[[], None], start: Callable[..., Session], folder: Path
) -> None:
    mount()
    session = start(mounts=[{"source": str(folder / "old"), "at": "/data", "mode": "ro"}])
    assert session.pid != ahead
    assert session.value("answer = open('/data/new.txt').read()") == "new"


OF_THE_NETWORK = """
import os, sys
from tests.sandbox.conftest import Host, waiting_place
host = Host({user!r})
found = []
for name in ("first", "second"):
    for path, text in (("/etc/resolv.conf", "search {{}}.example"), ("/etc/ld.so.cache", "{{}}")):
        with open(path + "~", "w") as file:
            file.write(text.format(name))
        os.chmod(path + "~", 0o644)
        os.rename(path + "~", path)
    session = host.session(network=True)
    found += session.value("answer = [open('/etc/resolv.conf').read(), open('/etc/ld.so.cache').read()]")
    waiting_place(host, network=True)
print(*found)
"""


def test_files_of_the_host_that_were_replaced_since(host: Host) -> None:
    """With an /etc that this test has for itself."""
    if os.geteuid() != 0:
        pytest.skip("only root can have an /etc for itself here")
    own = "mount -t tmpfs none /mnt && mkdir /mnt/u /mnt/w"
    own += " && mount -t overlay none -o lowerdir=/etc,upperdir=/mnt/u,workdir=/mnt/w /etc"
    command = ["unshare", "-m", "sh", "-c", f'{own} && exec "$0" -c "$1"', sys.executable]
    here = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, OF_THE_NETWORK.format(user=host.user)], cwd=here, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["search", "first.example", "first", "search", "second.example", "second"], done


def test_the_whole_file_system_is_given_without_what_is_half_built(
    ahead: int, start: Callable[..., Session], host: Host
) -> None:
    session = start(mounts=[{"source": "/", "at": "/data", "mode": "ro"}])
    assert session.pid == ahead
    assert "usr" in session.value("import os; answer = os.listdir('/data')")
    # With root it is one mount, without those below it.
    expected = sorted(os.listdir("/sys")) if host.user is not None or os.geteuid() else []
    assert session.value("answer = sorted(os.listdir('/data/sys'))") == expected


@pytest.mark.parametrize("source", ["/sys/kernel", "/tmp", "/usr/share"])
def test_a_folder_that_the_half_built_root_could_cover(start: Callable[..., Session], source: str) -> None:
    session = start(mounts=[{"source": source, "at": "/data", "mode": "ro"}])
    assert session.value("import os; answer = sorted(os.listdir('/data'))") == sorted(os.listdir(source))


def test_its_processes_hold_no_more_than_they_need(ahead: int, start: Callable[..., Session]) -> None:
    """Nothing of the zygote's, of other sessions or of the groups."""
    for session in (start(), start(hostname="other")):
        worker = worker_of(session.pid)
        assert held_by(worker) == ["socket", "socket"]
        assert Path(f"/proc/{worker}/oom_score_adj").read_text(encoding="ascii") == "500\n"
        # Two ends of the wake-up pipe, what the zygote's death closes, the host, the worker, the filter's questions.
        end = time.monotonic() + 60
        while held_by(session.pid) != ["anon_inode", "pipe", "pipe", "pipe", "socket", "socket"]:
            assert time.monotonic() < end, held_by(session.pid)
            time.sleep(0.01)


def held_by(pid: int) -> list[str]:
    """The kinds of what a process has open beyond its standard streams."""
    names = [name for name in os.listdir(f"/proc/{pid}/fd") if int(name) > 2]
    return sorted(os.readlink(f"/proc/{pid}/fd/{name}").partition(":")[0] for name in names)


def children(host: Host) -> list[str]:
    pid = host.zygote.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()


def worker_of(init: int) -> int:
    """Which is started while the place is being built."""
    end = time.monotonic() + 60
    while not (found := Path(f"/proc/{init}/task/{init}/children").read_text(encoding="ascii").split()):
        assert time.monotonic() < end, "no worker"
        time.sleep(0.002)
    return int(found[0])


def kill_if_there(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def start_as_host_does(start: Callable[..., Session], **settings: object) -> Session:
    """A prepared sandbox that dies when it is assigned is reported as lost, and the host spawns again."""
    try:
        return start(**settings)
    except Refused as refused:
        if not refused.answer.get("lost"):
            raise
        return start(**settings)


def hostname(pid: int) -> str:
    done = subprocess.run(["nsenter", f"--uts=/proc/{pid}/ns/uts", "hostname"], capture_output=True, text=True)
    return done.stdout.strip()
