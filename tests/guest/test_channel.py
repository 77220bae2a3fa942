"""Channel: records of bounded length, whole or an error, with descriptors attached."""

import os
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.guest.channel import MAX_RECORD, Channel, ChannelError, RecordTooLong, encode_record
from tests.worker.driver import Session

json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def close(*channels: Channel) -> None:
    for channel in channels:
        channel.socket.close()


@given(st.lists(st.dictionaries(st.text().filter(lambda key: key != "fds"), json_data, max_size=4), max_size=5))
def test_records_arrive_as_they_were_sent(records: list[dict[str, object]]) -> None:
    here, there = pair()
    for record in records:
        here.send(record)
    assert [there.read()[0] for _ in records] == records
    close(here, there)


def test_several_in_one_piece_are_all_given_out() -> None:
    here, there = pair()
    here.socket.sendall(encode_record({"n": 1}) + encode_record({"n": 2}) + encode_record({"n": 3})[:5])
    assert [record["n"] for record, _ in there.receive()] == [1, 2]
    assert there.receive(wait=False) == []
    here.socket.sendall(encode_record({"n": 3})[5:])
    assert [record["n"] for record, _ in there.receive()] == [3]
    close(here, there)


def test_descriptors_belong_to_the_record_that_names_them() -> None:
    here, there = pair()
    read_end, write_end = os.pipe()
    here.send({"n": 1})
    here.send({"n": 2}, (write_end,))
    here.send({"n": 3})
    os.close(write_end)
    assert there.read() == ({"n": 1}, [])
    record, (fd,) = there.read()
    assert record["n"] == 2
    assert not os.get_inheritable(fd)
    os.write(fd, b"through")
    assert os.read(read_end, 10) == b"through"
    assert there.read()[1] == []
    for left in (fd, read_end):
        os.close(left)
    close(here, there)


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        struct.pack(">I", MAX_RECORD + 1),
        struct.pack(">I", 3) + b"abc",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 4) + b"null",
        struct.pack(">I", 0),
        struct.pack(">I", 200_000) + b"[" * 200_000,
        struct.pack(">I", 11) + b'{"fds": 99}',
        struct.pack(">I", 13) + b'{"fds": "no"}',
        struct.pack(">I", 11) + b'{"fds": -1}',
        struct.pack(">I", 100) + b"{}",
    ],
)
def test_garbage_is_an_error_at_once(sent: bytes) -> None:
    here, there = pair()

    def write() -> None:
        here.socket.sendall(sent)
        here.socket.close()

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(ChannelError):
        there.read()
    writer.join()
    close(there)


def test_a_record_that_is_too_long_is_not_begun() -> None:
    here, there = pair()
    with pytest.raises(RecordTooLong):
        here.send({"a": "x" * MAX_RECORD})
    here.send({"n": 1})
    assert there.read()[0] == {"n": 1}
    close(here, there)


def test_threads_send_whole_records() -> None:
    here, there = pair()

    def send() -> None:
        for _ in range(100):
            here.send({"a": "x" * 3000})

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all(there.read()[0] == {"a": "x" * 3000} for _ in range(400))
    for thread in threads:
        thread.join()
    close(here, there)


def test_garbage_from_the_host_ends_the_worker() -> None:
    with Session() as session:
        session.line.socket.sendall(b"\xff" * 100)
        assert session.process.wait(60) == 0
