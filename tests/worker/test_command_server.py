"""The command server runs commands and file operations side by side, with data in pieces and bounded memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.command_host import CommandHost
from tests.worker.conftest import PYTHONS

MIB = 1 << 20


@pytest.fixture
def host() -> Iterator[CommandHost]:
    with CommandHost() as made:
        yield made


@pytest.fixture(params=PYTHONS)
def everywhere(request: pytest.FixtureRequest) -> Iterator[CommandHost]:
    """A server in each Python that is here."""
    with CommandHost(PYTHONS[request.param]) as made:
        yield made


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < until, f"{pid} lives on"
        time.sleep(0.005)


def memory_of(pid: int) -> int:
    """The peak, in bytes."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmHWM"))


# --- commands ---------------------------------------------------------------------------------------------------------


def test_output_and_exit_code(everywhere: CommandHost) -> None:
    answer = everywhere.command("echo out; echo err >&2; exit 3")
    done = answer.done
    assert done is not None
    assert (answer.data(1), answer.data(2), done["exit_code"]) == (b"out\n", b"err\n", 3)
    assert (done["timed_out"], done["cancelled"]) == (False, False)
    assert done["duration"] >= 0
    assert answer.records[0]["op"] == "started"
    assert everywhere.command(["printf", "%s|", "a b", "$x", ""]).data(1) == b"a b|$x||"
    assert everywhere.command("kill -9 $$").done["exit_code"] == 137  # type: ignore[index]
    assert everywhere.command("printf '\\377\\000'").data(1) == b"\xff\x00"


def test_output_comes_in_the_order_in_which_it_was_written(everywhere: CommandHost) -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9; do echo out $i; echo err $i >&2; echo more $i >&2; done"
    expected = "".join(f"out {i}\nerr {i}\nmore {i}\n" for i in range(1, 10)).encode()
    for _ in range(20):
        assert everywhere.command(script).data(1, 2) == expected


def test_input_that_comes_late(host: CommandHost) -> None:
    number = host.begin("command", command="read a; echo got $a; read b; echo got $b", stdin=True)
    host.send_piece(number, b"one\n")
    while host.answers[number].data(1) != b"got one\n":
        host.take()
    host.send_piece(number, b"two\n")
    assert host.end(number).data(1) == b"got one\ngot two\n"
    host.send_piece(number, b"not read by the command")
    assert host.command("echo on").data(1) == b"on\n"


def test_a_timeout_ends_the_whole_tree_and_keeps_the_output(everywhere: CommandHost) -> None:
    answer = everywhere.command(
        "echo begun; echo $$ >pids; (sleep 1000 & echo $! >>pids; wait) & setsid sleep 1000 & echo $! >>pids;"
        " (setsid sh -c 'echo $$ >>pids; sleep 1000' &) ; nohup sh -c 'echo $$ >>pids; sleep 1000' & sleep 1000",
        timeout=1.5,
    )
    assert answer.done is not None
    assert (answer.done["exit_code"], answer.done["timed_out"], answer.data(1)) == (124, True, b"begun\n")
    pids = [int(word) for word in (everywhere.home / "pids").read_text().split()]
    assert len(pids) == 5
    for pid in pids:
        wait_until_gone(pid)
    assert everywhere.request("processes")["processes"] == []


def test_cancelling_one_command_ends_its_tree_and_no_other(host: CommandHost) -> None:
    one = host.begin("command", command="sleep 1000 & setsid sleep 1000 & echo $! ready; wait")
    other = host.begin("command", command="echo $$; read line; exit 7", stdin=True)
    while not host.answers[one].data(1).endswith(b"ready\n") or not host.answers[other].data(1):
        host.take()
    pids = [int(host.answers[one].data(1).split()[0]), host.answers[one].records[0]["pid"]]
    host.send(op="cancel", id=one)
    done = host.end(one).done
    assert done is not None
    assert (done["cancelled"], done["timed_out"], done["exit_code"]) == (True, False, 137)
    for pid in pids:
        wait_until_gone(pid)
    host.send_piece(other, b"\n")
    assert host.end(other).done["exit_code"] == 7  # type: ignore[index]
    host.send(op="cancel", id=other)
    host.send(op="cancel", id=99)
    assert host.command("echo on").data(1) == b"on\n"


def test_a_background_writer_never_waits(host: CommandHost) -> None:
    command = "(i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done; touch finished) & echo started"
    assert host.command(command).data(1).startswith(b"started\n0\n"[:8])
    until = time.monotonic() + 60
    while not (host.home / "finished").exists():
        assert time.monotonic() < until, "the background process waits for its reader"
        time.sleep(0.01)


def test_many_at_once_each_with_its_own_output(host: CommandHost) -> None:
    command = "for n in 1 2 3; do echo {0}; echo {0} >&2; sleep 0.02; done"
    numbers = {host.begin("command", command=command.format(name)): name for name in range(30)}
    for number, name in numbers.items():
        answer = host.end(number)
        assert (answer.data(1), answer.data(2)) == (f"{name}\n".encode() * 3, f"{name}\n".encode() * 3)


def test_a_signal_of_a_terminal_reaches_commands_as_usual(host: CommandHost) -> None:
    os.kill(host.ready["pid"], signal.SIGINT)
    assert host.command("sh -c 'kill -INT $$'; echo $?").data(1) == b"130\n"


# --- flow control -----------------------------------------------------------------------------------------------------


def test_a_hundred_megabytes_through_a_command_in_bounded_memory(host: CommandHost) -> None:
    before = memory_of(host.ready["pid"])
    number = host.begin("command", command="head -c 100000000 /dev/zero")
    answer, size = host.answers[number], 0
    while answer.done is None:
        host.take()
        size += sum(len(data) for _, data in answer.pieces)
        answer.pieces.clear()
    assert size == 100_000_000
    assert memory_of(host.ready["pid"]) - before < 20 * MIB


def test_output_stops_at_the_window_until_more_is_allowed(host: CommandHost) -> None:
    host.grants = False
    number = host.begin("command", command="head -c 3000000 /dev/zero; echo end >&2")
    host.until(number, "started")
    assert host.command("echo beside").data(1) == b"beside\n"
    while len(host.answers[number].data(1)) < MIB - 65536:
        host.take()
    for _ in range(3):
        host.command("sleep 0.05")
    assert len(host.answers[number].data(1)) <= MIB
    host.send(op="more", id=number, bytes=len(host.answers[number].data(1)))
    host.grants = True
    answer = host.end(number)
    assert (len(answer.data(1)), answer.data(2)) == (3_000_000, b"end\n")


def test_a_timeout_passes_also_where_the_host_takes_no_output(host: CommandHost) -> None:
    host.grants = False
    number = host.begin("command", command="cat /dev/zero", timeout=0.5)
    done = host.end(number).done
    assert done is not None
    assert (done["exit_code"], done["timed_out"]) == (124, True)


def test_input_waits_in_the_host_while_the_command_does_not_read(host: CommandHost) -> None:
    before = memory_of(host.ready["pid"])
    number = host.begin("command", command="sleep 1000", stdin=True)
    host.until(number, "started")
    while host.answers[number].allowed:
        host.send_piece(number, bytes(min(1 << 18, host.answers[number].allowed)))
        host.command("sleep 0.01")
    assert memory_of(host.ready["pid"]) - before < 10 * MIB
    host.send(op="cancel", id=number)
    assert host.end(number).done["cancelled"] is True  # type: ignore[index]


def test_more_input_than_allowed_ends_the_server(host: CommandHost) -> None:
    number = host.begin("command", command="sleep 1000", stdin=True)
    pid = host.until(number, "started")["pid"]

    def send_too_much() -> None:
        for _ in range(20):
            host.send_piece(number, bytes(1 << 18))
            host.request("exists", path=".")

    with pytest.raises((EOFError, ConnectionError)):
        send_too_much()
    wait_until_gone(pid)


def test_the_end_of_the_channel_ends_what_runs(host: CommandHost) -> None:
    number = host.begin("command", command="sleep 1000 & echo $!; wait")
    while not host.answers[number].data(1):
        host.take()
    host.socket.shutdown(1)
    wait_until_gone(int(host.answers[number].data(1)))
    assert host.process.wait(60) == 0


def test_nothing_is_left_open(host: CommandHost) -> None:
    def opened() -> int:
        return len(os.listdir(f"/proc/{host.ready['pid']}/fd")) + len(os.listdir(f"/proc/{host.ready['pid']}/task"))

    before = opened()
    for _ in range(30):
        host.command("echo x; cat", b"y")
        host.command(["no-such-program"])
        host.write("f", b"x")
        host.request("read", path="f")
        host.request("read", path="missing")
    until = time.monotonic() + 60
    while opened() != before:
        assert time.monotonic() < until, f"{opened()} descriptors and threads, {before} before"
        time.sleep(0.01)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_large_file_both_ways(host: CommandHost) -> None:
    content = os.urandom(20_000_000)
    before = memory_of(host.ready["pid"])
    assert host.write("large", content)["size"] == len(content)
    answer = host.end(host.begin("read", path="large"))
    assert answer.data(0) == content
    assert answer.done is not None
    assert answer.done["size"] == len(content)
    assert memory_of(host.ready["pid"]) - before < 10 * MIB


def test_a_file_is_replaced_when_all_has_come(host: CommandHost) -> None:
    (host.home / "f").write_text("before")
    number = host.begin("write", path="f")
    host.send_piece(number, b"half")
    host.request("exists", path="f")
    assert (host.home / "f").read_text() == "before"
    host.send(op="cancel", id=number)
    assert host.end(number).done["cancelled"] is True  # type: ignore[index]
    assert (os.listdir(host.home), (host.home / "f").read_text()) == (["f"], "before")


def test_reading_can_be_cancelled(host: CommandHost) -> None:
    (host.home / "large").write_bytes(bytes(5_000_000))
    host.grants = False
    number = host.begin("read", path="large")
    host.request("exists", path="large")
    host.send(op="cancel", id=number)
    done = host.end(number).done
    assert done is not None
    assert done["cancelled"] is True
    assert len(host.answers[number].data(0)) <= MIB


def test_listing(host: CommandHost) -> None:
    (host.home / "folder" / "deep").mkdir(parents=True)
    (host.home / "folder" / "deep" / "file").write_text("abc")
    (host.home / "link").symlink_to("/nowhere")
    os.mkfifo(host.home / "pipe")
    odd = os.fsdecode(b"odd\xff")
    (host.home / odd).write_text("")
    entries = {entry["name"]: entry for entry in host.end(host.begin("list", path=".")).entries}
    kinds = {name: entry["kind"] for name, entry in entries.items()}
    assert kinds == {"folder": "folder", "link": "link", "pipe": "other", odd: "file"}
    assert entries["link"]["target"] == "/nowhere"
    below = {entry["name"]: entry for entry in host.end(host.begin("list", path=".", recursive=True)).entries}
    assert set(below) == {*entries, "folder/deep", "folder/deep/file"}
    assert below["folder/deep/file"]["size"] == 3
    for number in range(2500):
        (host.home / f"{number}").touch()
    answer = host.end(host.begin("list", path="."))
    assert len(answer.entries) == 2504
    assert len(answer.records) == 4


@pytest.mark.parametrize(
    ("op", "request_fields", "error_type", "filename"),
    [
        ("read", {"path": "missing"}, "FileNotFoundError", "missing"),
        ("read", {"path": "."}, "IsADirectoryError", "."),
        ("read", {"path": "fifo"}, "OSError", "fifo"),
        ("read", {"path": "/dev/zero"}, "OSError", "/dev/zero"),
        ("read", {"path": "file/x"}, "NotADirectoryError", "file/x"),
        ("read", {"path": "a\0b"}, "ValueError", None),
        ("read", {"path": "loop"}, "OSError", "loop"),
        ("write", {"path": "."}, "IsADirectoryError", "."),
        ("write", {"path": "fifo"}, "OSError", "fifo"),
        ("write", {"path": "file/x"}, "NotADirectoryError", "file/x"),
        ("write", {"path": "file/x/y"}, "NotADirectoryError", None),
        ("list", {"path": "missing"}, "FileNotFoundError", "missing"),
        ("list", {"path": "file"}, "NotADirectoryError", "file"),
        ("stat", {"path": "file/x"}, "NotADirectoryError", "file/x"),
        ("make_dir", {"path": "file"}, "FileExistsError", "file"),
        ("make_dir", {"path": "file/x"}, "NotADirectoryError", None),
        ("realpath", {"path": "missing"}, "FileNotFoundError", "missing"),
        ("str_replace", {"path": "fifo", "old": "a", "new": "b"}, "OSError", "fifo"),
        ("remove", {"path": "full"}, "OSError", "full"),
        ("no_such", {"path": "."}, "ValueError", None),
        ("read", {}, "ValueError", None),
    ],
)
def test_what_cannot_be_done(
    host: CommandHost, op: str, request_fields: dict[str, Any], error_type: str, filename: str | None
) -> None:
    os.mkfifo(host.home / "fifo")
    (host.home / "loop").symlink_to("loop")
    (host.home / "file").write_text("a")
    (host.home / "full").mkdir()
    (host.home / "full" / "file").touch()
    answer = host.request(op, **request_fields)
    assert answer["error_type"] == error_type, answer
    assert answer["error"]
    assert filename is None or answer["filename"] == filename
    assert host.request("exists", path="file")["exists"] is True
