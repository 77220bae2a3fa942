"""Commands have their own process group, stdin, time limit and output, and may leave processes that are listed."""

import base64
import os
import select
import signal
import time
from pathlib import Path

import pytest

from tests.worker.driver import Session


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> None:
    until = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < until, f"{pid} lives on"
        time.sleep(0.005)


def test_output_and_exit_code(everywhere: Session) -> None:
    done = everywhere.execute("echo out; echo err >&2; exit 3")
    assert (done["stdout"], done["stderr"], done["exit_code"]) == (b"out\n", b"err\n", 3)
    assert done["timed_out"] is False
    assert done["duration"] >= 0
    assert everywhere.execute(["printf", "%s|", "a b", "$x", ""])["stdout"] == b"a b|$x||"
    assert everywhere.execute("kill -9 $$")["exit_code"] == 137
    assert everywhere.execute("printf '\\377\\000'")["stdout"] == b"\xff\x00"


def test_where_and_with_what(everywhere: Session) -> None:
    (Path(everywhere.home) / "sub").mkdir()
    assert everywhere.execute("pwd", cwd="sub")["stdout"].strip().endswith(b"/sub")
    assert everywhere.execute("pwd", cwd="/")["stdout"] == b"/\n"
    assert everywhere.execute("echo $A$B", env={"A": "1", "B": "2"})["stdout"] == b"12\n"
    assert everywhere.execute("cat")["stdout"] == b""
    everywhere.value("import os\nos.environ['FROM_CODE'] = 'seen'\nos.chdir('sub')")
    assert everywhere.execute("echo $FROM_CODE; pwd")["stdout"].decode().split() == ["seen", everywhere.home]


def test_standard_input_of_any_size(session: Session) -> None:
    assert session.execute("cat", stdin=b"hello")["stdout"] == b"hello"
    large = os.urandom(3_000_000)
    assert session.execute("cat", stdin=large)["stdout"] == large
    assert session.execute("head -c 10", stdin=large)["stdout"] == large[:10]
    assert session.execute("exit 4", stdin=large)["exit_code"] == 4


@pytest.mark.parametrize(
    ("command", "options", "code"),
    [
        (["no-such-program"], {}, 127),
        ("no-such-program", {}, 127),
        (["/etc/passwd"], {}, 126),
        (["true"], {"cwd": "missing"}, 126),
        (["a\0b"], {}, 126),
        ([], {}, 126),
        (["true"], {"env": {"A=B": "\0"}}, 126),
    ],
)
def test_what_cannot_be_started(
    session: Session, command: str | list[str], options: dict[str, object], code: int
) -> None:
    done = session.execute(command, **options)
    assert done["exit_code"] == code
    assert done.get("error") or done["stderr"]
    assert session.execute("echo on")["stdout"] == b"on\n"


def test_a_timeout_ends_the_whole_tree_and_keeps_the_output(everywhere: Session) -> None:
    done = everywhere.execute(
        "echo begun; echo $$ >pids; (sleep 1000 & echo $! >>pids; wait) & setsid sleep 1000 & echo $! >>pids;"
        " (setsid sh -c 'echo $$ >>pids; sleep 1000' &) ; nohup sh -c 'echo $$ >>pids; sleep 1000' & sleep 1000",
        timeout=2,
    )
    assert (done["exit_code"], done["timed_out"], done["stdout"]) == (124, True, b"begun\n")
    pids = [int(word) for word in (Path(everywhere.home) / "pids").read_text().split()]
    assert len(pids) == 5
    for pid in pids:
        gone(pid)
    assert everywhere.request(op="processes")["processes"] == []


def test_a_command_that_ignores_signals_is_ended_too(session: Session) -> None:
    done = session.execute("trap '' TERM INT HUP; echo on; while :; do sleep 0.05; done", timeout=1)
    assert (done["exit_code"], done["stdout"]) == (124, b"on\n")


def test_what_goes_on_in_the_background(everywhere: Session) -> None:
    done = everywhere.execute("sleep 1000 & echo started $!")
    assert done["stdout"].startswith(b"started ")
    pid = int(done["stdout"].split()[1])
    (listed,) = everywhere.request(op="processes")["processes"]
    assert (listed["pid"], listed["members"]) == (done["pid"], [pid])
    assert listed["command"] == "sleep 1000 & echo started $!"
    assert alive(pid)
    assert everywhere.request(op="kill", pid=done["pid"])["killed"] is True
    gone(pid)
    assert everywhere.request(op="kill", pid=done["pid"])["killed"] is False
    assert everywhere.request(op="processes")["processes"] == []


def test_a_background_writer_is_not_cut_off_and_blocks_nobody(session: Session) -> None:
    number = session.ask(op="exec", command="(while :; do echo tick; sleep 0.01; done) & echo started")
    done = session.result(number)
    assert done["fds"] >= 1
    (listed,) = session.request(op="processes")["processes"]
    assert listed["members"]
    # The pipe is the host's now, and what is written meanwhile comes out of it.
    assert select.select([session.left_open[0]], [], [], 60)[0], "nothing was written"
    assert b"tick" in os.read(session.left_open[0], 65536)
    session.request(op="kill", of=number)
    assert session.request(op="processes")["processes"] == []


def test_background_on_request(session: Session) -> None:
    done = session.execute("read line; echo $line >got; sleep 1000", background=True, stdin=b"hello\n")
    assert (done["exit_code"], done["fds"]) == (None, 2)
    until = time.monotonic() + 60
    while not (Path(session.home) / "got").exists() or not (Path(session.home) / "got").read_text():
        assert time.monotonic() < until
        session.request(op="processes")
        time.sleep(0.01)
    assert (Path(session.home) / "got").read_text() == "hello\n"
    assert session.request(op="kill", pid=done["pid"])["killed"] is True
    gone(done["pid"])
    assert session.request(op="processes")["processes"] == []


def test_several_at_once_each_with_its_own_output(session: Session) -> None:
    command = "for n in 1 2 3; do echo {}; sleep 0.02; done"
    numbers = {session.ask(op="exec", command=command.format(name)): name for name in ("first", "second", "third")}
    got = dict.fromkeys(numbers, b"")
    ended: set[int] = set()
    while len(ended) < 3:
        record = session.until(lambda record: record.get("op") in ("output", "done"))
        if record["op"] == "done":
            ended.add(record["id"])
        else:
            got[record["id"]] += base64.b64decode(record["data"])
    assert got == {number: f"{name}\n".encode() * 3 for number, name in numbers.items()}


def test_a_hundred_megabytes_in_bounded_memory(session: Session) -> None:
    number = session.ask(op="exec", command="head -c 100000000 /dev/zero")
    size = 0

    def ended(record: dict[str, object]) -> bool:
        nonlocal size
        if record.get("op") == "output":
            data = str(record["data"])
            size += len(data) * 3 // 4 - data.count("=", -2)
            session.records.clear()
        return record.get("op") == "done" and record.get("id") == number

    session.until(ended)
    assert size == 100_000_000
    assert session.run("1").record["usage"]["max_rss_bytes"] < 150 << 20


def test_nothing_is_left_open(session: Session) -> None:
    count = "import os\nlen(os.listdir('/proc/self/fd'))"
    before = session.value(count)
    for _ in range(30):
        session.execute("echo x; cat", stdin=b"y")
        session.execute(["no-such-program"])
    assert session.value(count) == before


def test_commands_are_no_children_that_code_could_wait_for(session: Session) -> None:
    done = session.execute("sleep 1000 & echo $!")
    session.value("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    assert session.execute("exit 5")["exit_code"] in (5, 0)
    os.killpg(done["pid"], signal.SIGKILL)
    gone(int(done["stdout"]))
