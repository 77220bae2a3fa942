"""Files are read, written, listed and changed where the code sees them; what cannot be done says why."""

import base64
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carrel.guest.worker import file_requests, writing
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("making a file system of its own needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "carrel-test", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def replaced(home: Path, name: str, old: str, new: str) -> None:
    file_requests.answer({"do": "replace", "path": name, "old": old, "new": new}, str(home))


def put(home: Path, name: str, data: bytes, **more: Any) -> dict[str, Any]:
    return file_requests.answer(
        {"do": "write", "path": name, "data": base64.b64encode(data).decode(), **more}, str(home)
    )


def test_a_full_disk_costs_nothing_of_the_file(small_disk: Path) -> None:
    before = b"A" * 400_000 + b"MARK"
    (small_disk / "f").write_bytes(before)
    (small_disk / "one").write_bytes(before)
    os.link(small_disk / "one", small_disk / "two")
    for name in ("f", "one"):
        with pytest.raises(OSError, match=f"No space left on device: .*/{name}'"):
            replaced(small_disk, name, "MARK", "C" * 700_000)
        with pytest.raises(OSError, match="No space"):
            put(small_disk, name, b"D" * 900_000)
        assert (small_disk / name).read_bytes() == before
    put(small_disk, "big", b"E" * 100_000, part="p1", first=True, more=True)
    with pytest.raises(OSError, match="No space"):
        put(small_disk, "big", b"E" * 900_000, part="p1")
    assert sorted(os.listdir(small_disk)) == ["f", "one", "two"]


def test_where_there_is_no_room_for_both_what_is_no_longer_is_written(small_disk: Path) -> None:
    (small_disk / "f").write_bytes(b"A" * 800_000 + b"MARK")
    replaced(small_disk, "f", "MARK", "mark")
    assert (small_disk / "f").read_bytes() == b"A" * 800_000 + b"mark"
    put(small_disk, "f", b"B" * 700_000)
    assert (small_disk / "f").read_bytes() == b"B" * 700_000
    assert os.listdir(small_disk) == ["f"]


def test_what_is_written_over_is_otherwise_as_it_was(tmp_path: Path) -> None:
    home = tmp_path
    (home / "run").write_text("one")
    (home / "run").chmod(0o751)
    (home / "link").symlink_to("run")
    (home / "twin").write_text("one")
    os.link(home / "twin", home / "brother")
    if os.geteuid() == 0:
        os.chown(home / "run", 1234, 4321)
    before = (home / "run").stat()
    replaced(home, "link", "one", "three")
    put(home, "brother", b"both")
    after = (home / "run").stat()
    assert ((home / "run").read_text(), (home / "link").is_symlink()) == ("three", True)
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert (home / "twin").read_text() == "both"
    (home / "to").symlink_to("new")
    put(home, "to", b"through")
    assert (home / "new").read_text() == "through"
    assert sorted(os.listdir(home)) == ["brother", "link", "new", "run", "to", "twin"]


def test_a_file_that_is_mounted_by_itself(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    (tmp_path / "source").write_text("one")
    (tmp_path / "at").write_text("")
    subprocess.run(["mount", "--bind", str(tmp_path / "source"), str(tmp_path / "at")], check=True)
    try:
        replaced(tmp_path, "at", "one", "2")
        assert (tmp_path / "source").read_text() == "2"
        put(tmp_path, "at", b"a", part="p", first=True, more=True)
        put(tmp_path, "at", b"b", part="p")
        assert (tmp_path / "source").read_text() == "ab"
    finally:
        subprocess.run(["umount", str(tmp_path / "at")], check=True)
    assert sorted(os.listdir(tmp_path)) == ["at", "source"]


def test_pieces_are_seen_when_the_last_has_come(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("before")
    assert put(tmp_path, "f", b"one ", part="p1", first=True, more=True)["beside"] is True
    assert (tmp_path / "f").read_text() == "before"
    put(tmp_path, "f", b"two", part="p1")
    assert (tmp_path / "f").read_text() == "one two"
    put(tmp_path, "f", b"three", part="p2", first=True, more=True)
    put(tmp_path, "f", b"", part="p2", forget=True)
    assert (os.listdir(tmp_path), (tmp_path / "f").read_text()) == (["f"], "one two")


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
        ({"do": "replace", "path": "fifo", "old": "a", "new": "b"}, "ValueError"),
        ({"do": "write", "path": "fifo", "data": ""}, "OSError"),
        ({"do": "write", "path": "f", "data": "", "part": "../x", "first": True}, "ValueError"),
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


DIES = """
import resource, signal, sys
from carrel.guest.worker import writing
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
writing.put(sys.argv[1], b"x" * 5000)
"""


@pytest.mark.parametrize("before", [None, "old"])
def test_who_is_killed_while_it_writes_leaves_nothing_beside_the_file(tmp_path: Path, before: str | None) -> None:
    file = tmp_path / "file"
    if before is not None:
        file.write_text(before)
    done = subprocess.run([sys.executable, "-c", DIES, str(file)], check=False)
    assert done.returncode == -signal.SIGXFSZ
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == ({} if before is None else {"file": "old"})


@pytest.mark.parametrize("mode", [0o600, 0o755])
def test_what_is_written_anew_has_the_mode_it_had(tmp_path: Path, mode: int) -> None:
    file, new = tmp_path / "file", tmp_path / "new"
    file.touch()
    file.chmod(mode)
    assert writing._put_unnamed(str(file), file.stat(), b"content", str(tmp_path / "beside"))
    assert writing._put_unnamed(str(new), None, b"content", str(tmp_path / "beside"))
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"content", mode)
    plain = tmp_path / "plain"
    plain.touch()
    assert new.stat().st_mode == plain.stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"file", "new", "plain"}
