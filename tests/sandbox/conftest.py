"""Sessions of both sorts: of a zygote that is root, and of one that is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.host import OTHER_USER, Session, Zygote


def python_for(user: int | None) -> tuple[str, list[str]]:
    """An interpreter which that user can start, and its folders: ours may lie in a home that is closed to it."""
    drop = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    code = "import os, sys; [(os.listdir(path), print(path)) for path in (sys.prefix, sys.base_prefix)]"
    for python in (sys.executable, os.path.realpath(sys.executable), "/usr/bin/python3"):
        found = subprocess.run([*drop, python, "-I", "-c", code], capture_output=True, check=False, text=True)
        folders = found.stdout.splitlines()
        if found.returncode == 0 and os.path.realpath(python).startswith(folders[-1]):
            return python, folders
    raise AssertionError(f"no Python here that user {user} can run; install the distribution's python3")


class Host:
    """Starts sessions of one host and closes them all."""

    def __init__(self, user: int | None) -> None:
        self.user = user
        self.python, self.readonly = python_for(user)
        self.zygote = Zygote(user=user, python=self.python)
        self.pids: set[str] = set()

    def session(self, **settings: Any) -> Session:
        session = Session(self.zygote, {"readonly": self.readonly, **settings})
        self.pids.add(str(session.pid))
        return session


def waiting_place(host: Host, **settings: Any) -> int:
    """Start sessions until a place is built ahead; its first process."""
    end = time.monotonic() + 60
    children = Path(f"/proc/{host.zygote.pid}/task/{host.zygote.pid}/children")
    while True:
        session = host.session(**settings)
        pause = time.monotonic() + 1
        while time.monotonic() < pause:
            found = set(children.read_text(encoding="ascii").split()) - host.pids
            if found:
                session.close()
                return int(found.pop())
            time.sleep(0.002)
        session.close()
        assert time.monotonic() < end, "no place was built ahead"


def hosts() -> list[str]:
    return ["root", "rootless"] if os.geteuid() == 0 else ["rootless"]


@pytest.fixture(scope="module", params=hosts())
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A zygote; the tests of a file share it, as sessions of a host do."""
    made = Host(OTHER_USER if request.param == "rootless" and os.geteuid() == 0 else None)
    yield made
    made.zygote.close()


@pytest.fixture
def start(host: Host) -> Iterator[Callable[..., Session]]:
    """`start(network=True, …)` gives a session; all are closed after the test."""
    with ExitStack() as stack:

        def begin(**settings: Any) -> Session:
            session = host.session(**settings)
            stack.callback(session.close)
            return session

        yield begin


@pytest.fixture(scope="module")
def inside(host: Host) -> Iterator[Session]:
    """One session for many attempts that leave nothing behind, in a place that was built ahead."""
    waiting_place(host)
    session = host.session()
    yield session
    session.close()


@pytest.fixture
def folder(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the host that belongs to the user whose sessions these are, and that it can reach."""
    path = tmp_path_factory.mktemp("given")
    if host.user is not None:
        os.chown(path, host.user, host.user)
        for above in path.parents:
            if above.stat().st_uid == os.geteuid() and len(above.parts) > 2:
                above.chmod(above.stat().st_mode | 0o011)
    return path
