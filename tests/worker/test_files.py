"""A file's content is replaced as a whole, and the file is otherwise as it was."""

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel.guest.worker.files import FileWriter, replace_text, write_file


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("making a file system of its own needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "carrel-test", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_costs_nothing_of_the_file(small_disk: Path) -> None:
    before = b"A" * 400_000 + b"MARK"
    (small_disk / "f").write_bytes(before)
    (small_disk / "one").write_bytes(before)
    os.link(small_disk / "one", small_disk / "two")
    for name in ("f", "one"):
        with pytest.raises(OSError, match="No space left on device"):
            replace_text(str(small_disk / name), "MARK", "C" * 700_000)
        with pytest.raises(OSError, match="No space"):
            write_file(str(small_disk / name), b"D" * 1_200_000)
        assert (small_disk / name).read_bytes() == before
    assert sorted(os.listdir(small_disk)) == ["f", "one", "two"]


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
    replace_text(str(home / "link"), "one", "three")
    write_file(str(home / "brother"), b"both")
    after = (home / "run").stat()
    assert ((home / "run").read_text(), (home / "link").is_symlink()) == ("three", True)
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert (home / "twin").read_text() == "both"
    (home / "to").symlink_to("new")
    write_file(str(home / "to"), b"through")
    assert (home / "new").read_text() == "through"
    assert sorted(os.listdir(home)) == ["brother", "link", "new", "run", "to", "twin"]


def test_a_file_that_is_mounted_by_itself(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    (tmp_path / "source").write_text("one")
    (tmp_path / "at").write_text("")
    subprocess.run(["mount", "--bind", str(tmp_path / "source"), str(tmp_path / "at")], check=True)
    try:
        replace_text(str(tmp_path / "at"), "one", "2")
        assert (tmp_path / "source").read_text() == "2"
    finally:
        subprocess.run(["umount", str(tmp_path / "at")], check=True)
    assert sorted(os.listdir(tmp_path)) == ["at", "source"]


def test_new_content_is_seen_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("before")
    writer = FileWriter(str(file))
    writer.write(b"one ")
    writer.write(b"two")
    assert file.read_text() == "before"
    writer.commit()
    assert file.read_text() == "one two"
    writer = FileWriter(str(file))
    writer.write(b"three")
    writer.abort()
    assert (os.listdir(tmp_path), file.read_text()) == (["f"], "one two")


@pytest.mark.parametrize("mode", [0o600, 0o755])
def test_what_is_written_anew_has_the_mode_it_had(tmp_path: Path, mode: int) -> None:
    file, new, plain = tmp_path / "file", tmp_path / "new", tmp_path / "plain"
    file.touch()
    file.chmod(mode)
    write_file(str(file), b"content")
    write_file(str(new), b"content")
    plain.touch()
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"content", mode)
    assert new.stat().st_mode == plain.stat().st_mode
