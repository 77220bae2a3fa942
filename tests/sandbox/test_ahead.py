"""The place of the next session, built ahead: who gets it, and what becomes of it when it is no good any more."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sandbox.conftest import Host, waiting_place
from tests.sandbox.host import Refused, Session


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


def test_one_that_is_killed_is_not_given_to_anybody(host: Host, ahead: int, start: Callable[..., Session]) -> None:
    os.kill(ahead, signal.SIGKILL)
    lost: dict[str, object] = {"lost": True}
    try:
        session = start()
    except Refused as refused:
        # Claimed in the moment of its death: the host is told to ask again.
        lost = refused.answer
        session = start()
    assert lost["lost"] is True
    assert session.pid != ahead
    assert session.value("answer = 6 * 7") == 42


def test_it_goes_with_the_zygote(ahead: int) -> None:
    other = Host(None if os.geteuid() else 65534)
    place = waiting_place(other)
    os.kill(other.zygote.pid, signal.SIGKILL)
    os.waitpid(other.zygote.pid, 0)
    other.zygote.control.close()
    end = time.monotonic() + 60
    while Path(f"/proc/{place}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert Path(f"/proc/{ahead}").exists()


@pytest.fixture
def mounted(folder: Path) -> Iterator[Callable[[], Path]]:
    """A mount that the host makes in the middle of the test."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount here")

    def mount() -> Path:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "of-the-host", str(folder)], check=True)
        (folder / "new.txt").write_text("new")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], check=True)


def test_mounts_made_since_are_seen(
    host: Host, ahead: int, mounted: Callable[[], Path], start: Callable[..., Session]
) -> None:
    place = str(mounted())
    session = start(mounts=[{"source": place, "at": "/data", "mode": "ro"}])
    assert session.pid != ahead
    assert session.value("answer = open('/data/new.txt').read()") == "new"


@pytest.mark.parametrize("source", ["/sys/kernel", "/tmp", "/usr/share"])
def test_a_folder_that_the_half_built_root_could_cover(start: Callable[..., Session], source: str) -> None:
    session = start(mounts=[{"source": source, "at": "/data", "mode": "ro"}])
    assert session.value("import os; answer = sorted(os.listdir('/data'))") == sorted(os.listdir(source))


def children(host: Host) -> list[str]:
    pid = host.zygote.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()


def hostname(pid: int) -> str:
    done = subprocess.run(["nsenter", f"--uts=/proc/{pid}/ns/uts", "hostname"], capture_output=True, text=True)
    return done.stdout.strip()
