"""The session's second process, which serves commands and files: started by init when the host asks for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from carrel.guest.sandbox.namespaces import offers_root
from tests.sandbox.attempts import EACCES, EPERM, EROFS, RAW
from tests.sandbox.conftest import Host
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


def test_as_root_it_may_do_more_with_files_and_nothing_else(host: Host, session: Session) -> None:
    if host.user is not None or not offers_root():
        with pytest.raises(Refused, match="there is no user 'root' in this sandbox, only agent"):
            session.serve_commands("root")
        return
    session.value("import os; open('mine', 'w').write('x'); os.chmod('mine', 0); os.mkdir('of_root')")
    server = session.serve_commands("root")
    assert server.value("import os; answer = [os.getuid(), os.environ['USER'], open('mine').read()]") == [
        0,
        "root",
        "x",
    ]
    server.value("os.chown('of_root', 0, 0); open('of_root/made', 'w').write('x'); os.chmod('of_root/made', 0o600)")
    assert session.run("open('of_root/made')")["errno"] == EACCES
    assert session.run("open('of_root/other', 'w')")["errno"] == EACCES
    # What it starts is root with the same few rights.
    shell = "import subprocess; answer = subprocess.run(['sh', '-c', {!r}], capture_output=True, text=True).stdout"
    assert server.value(shell.format("id -u; grep CapEff /proc/self/status")).split() == [
        "0",
        "CapEff:",
        "00000000000004fb",
    ]
    assert server.value(shell.format("chown 1000:1000 of_root/made && chmod 644 of_root/made && echo done")) == "done\n"
    assert session.value("answer = open('of_root/made').read()") == "x"
    for attempt in (
        "os.chroot('/')",
        "os.mknod('device', 0o60600, os.makedev(8, 0))",
        "open('/usr/file', 'w')",
        "open('/proc/sys/kernel/hostname', 'w')",
        "open('/proc/1/environ').read()",
        "os.listdir('/proc/1/cwd/')",
        f"os.kill({session.ready['ready']}, 9)",
        f"open('/proc/{session.ready['ready']}/mem', 'rb')",
    ):
        code = f"try:\n    {attempt}\nexcept OSError as error:\n    answer = error.errno"
        assert server.value(code) in (EPERM, EACCES, EROFS), attempt
    server.close()


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
