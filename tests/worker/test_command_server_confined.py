"""The command server inside a real sandbox."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from tests.sandbox.host import Session, Zygote
from tests.worker.command_host import CommandClient


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote(command_entry="carrel_guest.worker.command_server:run")
    yield made
    made.close()


@pytest.fixture
def session(zygote: Zygote) -> Iterator[Session]:
    made = zygote.session()
    yield made
    made.close()


def serve(session: Session, user: str) -> CommandClient:
    line, theirs = socket.socketpair()
    stdout, out = os.pipe()
    session.control.send({"op": "serve_commands", "id": 1, "user": user}, [theirs.fileno(), out, out])
    theirs.close()
    os.close(out)
    record, descriptors = session.hear()
    for fd in (*descriptors, stdout):
        os.close(fd)
    if record["op"] != "serving":
        line.close()
        pytest.skip(record["message"])
    return CommandClient(line)


@pytest.mark.parametrize("user", ["agent", "root"])
def test_commands_and_files_of_the_session(session: Session, user: str) -> None:
    client = serve(session, user)
    session.value("open('made', 'w').write('by the code')")
    assert client.end(client.begin("read", path="made")).data(0) == b"by the code"
    assert client.command("id -un; cat made; echo err >&2").data(1, 2).decode() == f"{user}\nby the codeerr\n"
    assert client.command("cat", os.urandom(2_000_000)).done["exit_code"] == 0  # type: ignore[index]
    assert client.command("sleep 100 & sleep 100", timeout=0.2).done["exit_code"] == 124  # type: ignore[index]
    assert client.request("processes")["processes"] == []
    client.write("back", b"by the host")
    assert session.value("answer = open('back').read()") == "by the host"
    client.request("move", path="back", to="moved")
    assert session.value("import os; answer = sorted(os.listdir())") == ["made", "moved"]
    client.socket.close()
