"""The session's second process, which serves commands and files: started by init when the host asks for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.sandbox.attempts import EPERM, RAW
from tests.sandbox.host import CommandServer, Refused, Session, Zygote

Start = Callable[..., Session]
CONFINEMENT = ("Uid", "Gid", "Groups", "Cap", "NoNew", "Seccomp", "SigIgn", "SigCgt")


@pytest.fixture(params=["session", "fork"])
def session(start: Start, request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session of its own, and a live fork of one."""
    first = start(env={"NAME": "value"})
    if request.param == "session":
        yield first
        return
    first.value("open('before', 'w').write('the fork')")
    fork = first.fork()
    yield fork
    fork.close()


@pytest.fixture
def server(session: Session) -> Iterator[CommandServer]:
    found = session.serve_commands()
    yield found
    found.close()


def confinement(status: str) -> list[str]:
    return [row for row in status.splitlines() if row.startswith(CONFINEMENT)]


def test_it_sees_the_files_and_the_environment_of_its_session(session: Session, server: CommandServer) -> None:
    session.value("open('made', 'w').write('by the worker')")
    assert server.value("answer = open('made').read()") == "by the worker"
    assert server.value("import os; answer = [os.getcwd(), os.environ['NAME']]") == ["/workspace", "value"]
    server.value("open('back', 'w').write('by the server')")
    assert session.value("answer = open('back').read()") == "by the server"


def test_it_is_confined_as_the_worker_is(session: Session, server: CommandServer) -> None:
    status = "answer = open('/proc/self/status').read()"
    ours = [row for row in confinement(server.value(status)) if not row.startswith("SigCgt")]
    assert ours == [row for row in confinement(session.value(status)) if not row.startswith("SigCgt")]
    assert server.value("import os; answer = len(os.listdir('/proc/self/fd'))") == 6
    enter = "try:\n    raw(308 if os.uname().machine == 'x86_64' else 268, 0, 0)\nexcept OSError as error:\n"
    assert server.value(RAW + enter + "    answer = error.errno") == EPERM


def test_it_is_another_process_with_its_own_end(session: Session, server: CommandServer) -> None:
    assert server.value("import os; answer = os.getpid()") == server.pid
    signal.pidfd_send_signal(server.pidfd, signal.SIGKILL)
    record, _ = session.hear()
    assert record == {"op": "exited", "pid": server.pid, "status": signal.SIGKILL}
    again = session.serve_commands()
    assert again.pid != server.pid
    assert again.value("answer = 6 * 7") == 42
    again.close()
    assert session.value("answer = 6 * 7") == 42


def test_it_lives_on_when_the_worker_is_lost(session: Session, server: CommandServer) -> None:
    signal.pidfd_send_signal(session.worker, signal.SIGKILL)
    record, _ = session.hear()
    assert record["op"] == "exited"
    assert server.value("answer = 6 * 7") == 42


def test_a_user_that_does_not_exist_is_refused(session: Session) -> None:
    with pytest.raises(Refused, match="there is no user 'www-data'"):
        session.serve_commands("www-data")
    assert session.value("answer = 1") == 1


def test_without_a_command_entry_it_is_refused() -> None:
    zygote = Zygote(command_entry=None)
    try:
        session = zygote.session()
        with pytest.raises(Refused, match="command_entry") as caught:
            session.serve_commands()
        assert caught.value.answer["id"] == 11
        session.close()
    finally:
        zygote.close()
    assert not os.path.exists(f"/proc/{zygote.pid}")
