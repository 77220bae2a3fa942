"""Files are read, written, listed and changed where the code sees them; what cannot be done says why."""

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from tests.worker.driver import Session


def data_of(answer: dict[str, Any]) -> bytes:
    return base64.b64decode(answer["data"])


def written(session: Session, path: str, data: bytes, do: str = "write") -> dict[str, Any]:
    return session.request(op="file", do=do, path=path, data=base64.b64encode(data).decode())


def test_write_append_read(everywhere: Session) -> None:
    assert written(everywhere, "a/b/c.bin", b"\x00\xff")["bytes"] == 2
    written(everywhere, "a/b/c.bin", b"more", do="append")
    answer = everywhere.request(op="file", do="read", path="a/b/c.bin")
    assert (data_of(answer), answer["size"], answer["end"]) == (b"\x00\xffmore", 6, True)
    written(everywhere, "a/b/c.bin", b"x")
    assert everywhere.value("open('a/b/c.bin').read()") == "x"


def test_a_large_file_is_read_in_pieces(session: Session) -> None:
    content = os.urandom(40_000_000)
    (Path(session.home) / "large").write_bytes(content)
    got = b""
    while True:
        answer = session.request(op="file", do="read", path="large", offset=len(got))
        got += data_of(answer)
        if answer["end"]:
            break
    assert got == content
    assert data_of(session.request(op="file", do="read", path="large", offset=5, length=3)) == content[5:8]


def test_listing_and_looking(session: Session) -> None:
    home = Path(session.home)
    (home / "folder").mkdir()
    (home / "file").write_text("abc")
    (home / "link").symlink_to("/nowhere")
    os.mkfifo(home / "pipe")
    (home / os.fsdecode(b"odd\xff")).write_text("")
    entries = session.request(op="file", do="list", path=".")["entries"]
    kinds = {entry["name"]: entry["kind"] for entry in entries}
    odd = os.fsdecode(b"odd\xff")
    assert kinds == {"folder": "folder", "file": "file", "link": "link", "pipe": "other", odd: "file"}
    assert session.request(op="file", do="stat", path="file")["size"] == 3
    assert "error" not in session.request(op="file", do="read", path=odd)


def test_replacing(session: Session) -> None:
    home = Path(session.home)
    (home / "f").write_bytes(b"one two\r\ntwo \xff three")
    assert "2 times" in session.request(op="file", do="replace", path="f", old="two", new="x")["error"]
    assert "0 times" in session.request(op="file", do="replace", path="f", old="four", new="x")["error"]
    assert "empty" in session.request(op="file", do="replace", path="f", old="", new="x")["error"]
    assert (home / "f").read_bytes() == b"one two\r\ntwo \xff three"
    session.request(op="file", do="replace", path="f", old="one", new="öne")
    assert (home / "f").read_bytes() == "öne two\r\n".encode() + b"two \xff three"


def test_making_and_removing(session: Session) -> None:
    session.request(op="file", do="mkdir", path="a/b")
    written(session, "a/b/f", b"")
    assert session.request(op="file", do="remove", path="a")["error_type"] == "OSError"
    session.request(op="file", do="remove", path="a/b/f")
    written(session, "a/b/g", b"")
    session.request(op="file", do="remove", path="a", recursive=True)
    assert session.request(op="file", do="stat", path="a")["error_type"] == "FileNotFoundError"


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"do": "read", "path": "missing"}, "FileNotFoundError"),
        ({"do": "read", "path": "."}, "IsADirectoryError"),
        ({"do": "read", "path": "fifo"}, "ValueError"),
        ({"do": "read", "path": "/dev/zero"}, "ValueError"),
        ({"do": "read", "path": "a\0b"}, "ValueError"),
        ({"do": "write", "path": ".", "data": ""}, "IsADirectoryError"),
        ({"do": "write", "path": "f", "data": "!"}, "ValueError"),
        ({"do": "list", "path": "missing"}, "FileNotFoundError"),
        ({"do": "read", "path": "loop"}, "OSError"),
    ],
)
def test_what_cannot_be_done(session: Session, wanted: dict[str, Any], error: str) -> None:
    home = Path(session.home)
    os.mkfifo(home / "fifo")
    (home / "loop").symlink_to("loop")
    answer = session.request(op="file", **wanted)
    assert answer["error_type"] == error
    assert answer["error"]
    assert session.value("1") == 1
