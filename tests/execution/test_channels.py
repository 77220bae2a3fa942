"""The host's end of a channel: garbage ends that channel with a reason, and costs the host nothing."""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import json
import os
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from carrel.execution.channels import AsyncChannel, Discard, OutputPipe, Record
from carrel.execution.config import SubprocessConfig
from carrel.execution.sandbox_client import InitClient
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.guest.channel import ChannelError
from tests.execution.processes import descriptors, until


class Channel:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.fds: list[int] = []
        self.reasons: list[str] = []
        self.changed = asyncio.Event()
        ours, self.peer = socket.socketpair()
        self.channel = AsyncChannel(ours, self._record, self._ended)

    def _record(self, record: Record, fds: list[int]) -> None:
        self.records.append(record)
        self.fds += fds
        self.changed.set()

    def _ended(self, reason: str) -> None:
        self.reasons.append(reason)
        self.changed.set()

    async def until(self) -> None:
        self.changed.clear()
        await asyncio.wait_for(self.changed.wait(), 60)


@pytest.fixture
async def channel() -> AsyncIterator[Channel]:
    made = Channel()
    yield made
    made.channel.close()
    made.peer.close()
    for descriptor in made.fds:
        os.close(descriptor)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


async def test_records_arrive_whole_however_they_are_cut(channel: Channel) -> None:
    records = [{"n": n, "text": "é" * n} for n in range(50)]
    data = b"".join(framed(json.dumps(record).encode()) for record in records)
    for at in range(0, len(data), 7):
        channel.peer.send(data[at : at + 7])
        await asyncio.sleep(0)
    while len(channel.records) < 50:
        await channel.until()
    assert channel.records == records


async def test_descriptors_come_with_the_record_that_names_them(channel: Channel) -> None:
    read, write = os.pipe()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write]))]
    channel.peer.sendmsg([framed(b'{"fds":1}')], ancillary)
    os.close(write)
    await channel.until()
    os.write(channel.fds[0], b"through")
    assert os.read(read, 100) == b"through"
    assert not os.get_inheritable(channel.fds[0])
    os.close(read)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (framed(b"no json"), "not JSON"),
        (framed(b"[1]"), "not a record"),
        (framed(b"\xff\xfe"), "not JSON"),
        (framed(b"[" * 100_000), "not JSON"),
        (b"\xff\xff\xff\xff", "announced"),
        (framed(b'{"fds":1}'), "descriptors"),
        (framed(b'{"fds":-1}'), "descriptors"),
        (framed(b'{"fds":true}'), "descriptors"),
        (framed(b'{"fds":"1"}'), "descriptors"),
        (framed(b""), "not JSON"),
    ],
)
async def test_what_is_not_a_record_ends_the_channel_with_a_reason(channel: Channel, data: bytes, reason: str) -> None:
    channel.peer.send(data)
    await channel.until()
    assert len(channel.reasons) == 1
    assert reason in channel.reasons[0]
    assert channel.channel.closed


async def test_descriptors_without_a_name_are_closed(channel: Channel) -> None:
    gc.collect()  # what earlier tests left for it to close is no part of this count
    before = descriptors()
    with open(os.devnull) as file:
        for _ in range(5):
            numbers = array.array("i", [file.fileno()] * 10)
            try:
                channel.peer.sendmsg([framed(b"{}")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
            except BrokenPipeError:
                break
            await asyncio.sleep(0.02)
    await until(lambda: channel.channel.closed)
    await until(lambda: descriptors() <= before)


async def test_a_peer_that_does_not_read_blocks_no_other_task(channel: Channel) -> None:
    for n in range(100):
        channel.channel.send({"n": n, "data": "x" * 100_000})
    assert not channel.channel.sent_all
    received = bytearray()
    channel.peer.setblocking(False)
    loop = asyncio.get_running_loop()
    while len(received) < 100 * 100_000:
        received += await asyncio.wait_for(loop.sock_recv(channel.peer, 1 << 20), 60)
    await until(lambda: channel.channel.sent_all)


GARBAGE = """
import os, socket, stat, struct
def lines():
    for fd in range(3, 1000):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                yield fd
        except OSError: pass
for fd in lines():
    try: os.write(fd, {data!r})
    except OSError: pass
import time; time.sleep(5)
"""


@pytest.mark.parametrize("mode", ["off", "required"])
@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        framed(b"nonsense"),
        framed(b'{"op":"nonsense"}'),
        framed(b'{"op":"done","id":999}'),
        framed(b'{"op":"done","id":[]}'),
        framed(b'{"op":"call","call":1,"name":"tools.x","arguments":{"$":"nonsense"}}'),
        framed(b'{"op":"call","call":"1","name":null}'),
        framed(b'{"op":"snapshot","fds":0}'),
    ],
)
async def test_code_that_forges_records_ends_only_its_own_worker(mode: str, data: bytes) -> None:
    async with SubprocessExecutor(SubprocessConfig(sandbox=mode)) as executor:  # type: ignore[arg-type]
        await executor.run("x = 5")
        result = await executor.run(GARBAGE.format(data=data), timeout=30)
        assert result.error_type == "Crashed"
        assert (await executor.run("1 + 1")).value == 2


async def test_a_forged_answer_is_a_value_at_worst() -> None:
    """Code can lie about its own result; it is data all the same, and the next run is its own again."""
    async with SubprocessExecutor() as executor:
        await executor.run("x = 5")
        forged = framed(b'{"op":"done","id":2,"value":{"$":"bytes","of":"aGk="}}')
        result = await executor.run(GARBAGE.format(data=forged), timeout=30)
        assert result.value == b"hi" or result.error_type == "Crashed"
        await executor.run("1")
        assert (await executor.run("1 + 1")).value == 2


async def test_an_end_that_never_reads_is_broken_before_much_waits_for_it(channel: Channel) -> None:
    sent = 0
    while not channel.reasons and sent < 100_000:
        channel.channel.send({"op": "answer", "call": sent})
        sent += 1
    assert "records were not read" in channel.reasons[0]
    assert channel.channel.closed
    channel.channel.send({"op": "answer", "call": sent})
    assert len(channel.reasons) == 1


async def test_a_record_of_odd_text_that_is_too_long_breaks_nothing(channel: Channel) -> None:
    """What is written the other way, because of a lone surrogate, has the same limit and the same error."""
    with pytest.raises(ChannelError, match="is too long"):
        channel.channel.send({"code": "\ud800" + "x" * (65 * 1024 * 1024)})
    channel.channel.send({"code": "1"})
    assert channel.peer.recv(100) == framed(b'{"code":"1"}')


async def test_what_waits_to_be_read_is_bounded_in_bytes(channel: Channel) -> None:
    answer = {"op": "answer", "value": "x" * 1_000_000}
    channel.channel.send(answer, max_unread=10)  # alone it goes, however long it is
    waiting = channel.channel.unread
    assert 0 < waiting <= 1_000_100
    with pytest.raises(ChannelError, match=r"bytes wait to be read already; 1,000,0.. more are too many"):
        channel.channel.send(answer, max_unread=1_500_000)
    assert (channel.channel.unread, channel.reasons) == (waiting, [])
    channel.channel.send({"op": "answer", "error": "short"})
    read = b""
    while not read.endswith(b'"short"}'):
        read += await asyncio.to_thread(channel.peer.recv, 1 << 16)
    assert channel.channel.unread == 0
    channel.channel.send(answer, max_unread=1_500_000)
    assert channel.channel.unread > 0


SEND_FDS = """
import array, json, os, socket, stat, struct, time
def send(record, fds):
    body = json.dumps(record).encode()
    numbers = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    (line,) = [fd for fd in numbers if fd > 3 and stat.S_ISSOCK(os.fstat(fd).st_mode) and fd not in fds]
    end = socket.socket(fileno=os.dup(line))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    end.sendmsg([struct.pack(">I", len(body))], ancillary)
    for fd in fds:
        os.close(fd)  # so that the host has it alone when the record is there
    end.sendall(body)
    end.close()
"""


async def test_a_snapshot_that_cannot_be_watched_breaks_only_its_own_worker() -> None:
    """A signal can be sent to a folder of /proc; its end cannot be waited for, which once came out of `run`."""
    async with SubprocessExecutor(SubprocessConfig(sandbox="required")) as executor:
        await executor.run("x = 5")
        forged = (
            "ends = [socket.socketpair()[0].detach(), os.open('/proc/self', os.O_RDONLY)]\n"
            "send({'op': 'snapshot', 'pid': os.getpid(), 'fds': 2}, ends)\nos._exit(3)"
        )
        assert (await executor.run(SEND_FDS + forged)).error_type == "Crashed"
        assert (await executor.run("1 + 1")).value == 2


async def test_of_what_a_session_sends_only_pipes_are_read() -> None:
    """A device that always has something to read would keep the host busy for nothing."""
    discard = Discard()
    read, write = os.pipe()
    given = [os.open("/dev/random", os.O_RDONLY), os.open(os.devnull, os.O_RDONLY), os.eventfd(1), os.memfd_create("x")]
    discard.take([*given, read])
    assert discard._open == [read]
    for descriptor in given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    os.close(write)
    await until(lambda: not discard._open)


LINGERS = """
server = socket.create_server(("127.0.0.1", 0))
end, (peer, _) = socket.create_connection(server.getsockname()), server.accept()
end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1000))
end.setblocking(False)
try:
    while True:
        end.send(bytes(65536))
except BlockingIOError:
    end.setblocking(True)
if os.fork() == 0:
    end.close()
    time.sleep(1000)
server.close(); peer.close()
fd = end.detach()
send({"op": "nonsense"}, [fd])
time.sleep(60)
"""


@pytest.mark.timeout(120)
async def test_a_socket_that_lingers_does_not_hold_up_who_closes_it() -> None:
    async with SubprocessExecutor(SubprocessConfig(sandbox="required")) as executor:
        await executor.run("x = 5")
        assert (await executor.run(SEND_FDS + LINGERS, timeout=60)).error_type == "Crashed"
        assert (await executor.run("x")).value == 5


async def test_code_may_read_its_own_output_before_the_host_does() -> None:
    """A process with the write end can open the pipe for reading as well; between a look and a read all may be gone."""
    pipe = OutputPipe()
    pipe.watch(False)
    other, over = os.open(f"/proc/self/fd/{pipe.write_end}", os.O_RDONLY | os.O_NONBLOCK), threading.Event()

    def steal() -> None:
        while not over.is_set():
            with contextlib.suppress(BlockingIOError):
                os.read(other, 1000)

    thief = threading.Thread(target=steal)
    thief.start()
    try:
        for _ in range(20_000):
            os.write(pipe.write_end, b"x")
            pipe.drain()
    finally:
        over.set()
        thief.join()
        os.close(other)
        pipe.close()


async def test_the_ends_that_init_tells_of_are_not_kept_for_ever() -> None:
    ours, init = socket.socketpair()
    init.setblocking(False)
    control = InitClient(ours, lambda descriptor, pid: None, lambda reason: None)
    try:
        for pid in range(2000):
            await asyncio.get_running_loop().sock_sendall(init, framed(b'{"op":"exited","pid":%d,"status":9}' % pid))
            await asyncio.sleep(0)
        assert await control.status_of(1999) == 9
        assert len(control._statuses) < 300
    finally:
        control.close()
        init.close()
