"""A sample's files: what comes out of a folder or an archive, and what is not let in."""

import asyncio
import gzip
import io
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carrel.errors import FilesRefused, StorageWriteError
from carrel.tasks import file_cache, unpack
from carrel.tasks.file_cache import prepared_files
from carrel.tasks.sample import Sample

PROGRAM = Path(__file__).parents[1] / "support" / "unpacking_program.py"


def member(name: str, data: bytes = b"", **more: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mtime = 1_600_000_000
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=kind, linkname=to)


def packed(file: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Sample:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return of(file)


def of(files: Path | None, base_commit: str = "") -> Sample:
    return Sample(sample_id="a", files=files, base_commit=base_commit)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): f"-> {os.readlink(path)}" if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def left_in(cache: Path) -> list[str]:
    """What is in the cache besides locks and what it remembers of digests."""
    if not (cache / "files").exists():
        return []
    return [
        path.name
        for path in (cache / "files").iterdir()
        if path.suffix not in (".lock", ".used") and path.name != "digests"
    ]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


async def test_no_files_are_an_empty_folder(cache: Path) -> None:
    files = await prepared_files(of(None), cache)
    assert list(files.folder.iterdir()) == []
    assert (files.receipt.source, files.receipt.files, files.receipt.git) == ("none", 0, None)


async def test_a_folder_is_copied_with_its_links_and_programs(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "a.txt").write_text("a")
    (source / "deep" / "er" / "run").write_text("#!/bin/sh\n")
    (source / "deep" / "er" / "run").chmod(0o4755)
    (source / "deep" / "up").symlink_to("../a.txt")
    (source / "nowhere").symlink_to("not/there")
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "x.pyc").write_text("left by running it")
    files = await prepared_files(of(source), cache)
    assert contents(files.folder) == {
        "a.txt": "a",
        "deep/er/run": "#!/bin/sh\n",
        "deep/up": "-> ../a.txt",
        "nowhere": "-> not/there",
    }
    assert (files.folder / "empty").is_dir()
    assert stat.S_IMODE((files.folder / "deep/er/run").stat().st_mode) == 0o755
    assert (files.folder / "a.txt").stat().st_mtime_ns == (source / "a.txt").stat().st_mtime_ns
    assert (files.receipt.source, files.receipt.files, files.receipt.bytes) == ("folder", 4, 11)


async def test_an_archive_is_unpacked(tmp_path: Path, cache: Path) -> None:
    sample = packed(
        tmp_path / "files.tar.gz",
        member("./", type=tarfile.DIRTYPE),
        member("./src/a.py", b"one"),
        member("src/a.py", b"two"),
        member("run", b"#!/bin/sh\n", mode=0o4755, uid=0, gid=0),
        member("secret", b"s", mode=0),
        link("again", "src/a.py", tarfile.LNKTYPE),
        link("src/link", "../run"),
        member("ünï/ \n", b"odd name"),
    )
    files = await prepared_files(sample, cache)
    assert contents(files.folder) == {
        "src/a.py": "two",
        "run": "#!/bin/sh\n",
        "secret": "s",
        "again": "two",
        "src/link": "-> ../run",
        "ünï/ \n": "odd name",
    }
    assert stat.S_IMODE((files.folder / "run").stat().st_mode) == 0o755
    assert stat.S_IMODE((files.folder / "secret").stat().st_mode) == 0o644
    assert (files.folder / "run").stat().st_uid == os.getuid()
    assert (files.folder / "again").stat().st_nlink == 1, "a change to one is no change to the other"
    assert (files.folder / "run").stat().st_mtime == 1_600_000_000


async def test_files_are_made_once_and_shared(tmp_path: Path, cache: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for source in (one, two):
        source.mkdir()
        (source / "a").write_text("same")
    first = await prepared_files(of(one), cache)
    assert await prepared_files(of(two), cache) == first, "by content, wherever it lies"
    before = first.folder.stat().st_ino
    assert (await prepared_files(of(one), cache)).folder.stat().st_ino == before
    (one / "a").write_text("else")
    changed = await prepared_files(of(one), cache)
    assert changed.folder != first.folder
    assert contents(first.folder) == {"a": "same"}
    assert len(left_in(cache)) == 2


async def test_a_copy_of_a_sample_with_other_files_has_those(tmp_path: Path, cache: Path) -> None:
    one = packed(tmp_path / "one.tar.gz", member("a", b"one"))
    await prepared_files(one, cache)
    packed(tmp_path / "two.tar.gz", member("a", b"two"))
    two = one.model_copy(update={"files": tmp_path / "two.tar.gz"})
    assert contents((await prepared_files(two, cache)).folder) == {"a": "two"}


async def test_what_was_read_once_is_known_by_its_time_of_change(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f.tar.gz"
    sample = packed(file, member("a", b"one"))
    monkeypatch.setattr(file_cache, "_SETTLED", 600)
    first = await prepared_files(sample, cache)
    # A file as young as this could change again within its time stamp.
    assert list(cache.glob("files/digests/*")) == []
    monkeypatch.setattr(file_cache, "_SETTLED", 0)
    assert await prepared_files(of(file), cache) == first
    assert len(list((cache / "files" / "digests").glob("*.json"))) == 1
    packed(file, member("a", b"two"))
    assert contents((await prepared_files(of(file), cache)).folder) == {"a": "two"}


HOSTILE: dict[str, tuple[list[tuple[tarfile.TarInfo, bytes]], str]] = {
    "a path upwards": ([member("../evil", b"x")], "leads out"),
    "a path upwards from within": ([member("a/../../evil", b"x")], "leads out"),
    "an absolute path": ([member("/tmp/carrel-evil", b"x")], "absolute path"),
    "an absolute link": ([link("a", "/etc/passwd")], "the link a leads out of the sample's folder, to /etc/passwd"),
    "a link upwards": ([link("a/b", "../../x")], "the link a/b leads out"),
    "a link through a link": (
        [member("d/x", type=tarfile.DIRTYPE), link("d/up", ".."), link("e", "d/up/../x")],
        "the link e leads out",
    ),
    "a file through a link": ([link("a", "/tmp"), member("a/carrel-evil", b"x")], "lies below a link"),
    "a link below a link": ([link("a", "."), link("a/b", "x")], "lies below a link"),
    "a hard link out": ([link("a", "/etc/passwd", tarfile.LNKTYPE)], "absolute path"),
    "a hard link upwards": ([link("a", "../../etc/passwd", tarfile.LNKTYPE)], "leads out"),
    "a hard link to a link": (
        [link("a", "b"), link("c", "a", tarfile.LNKTYPE)],
        "hard link to a, which is not an earlier file",
    ),
    "a hard link to nothing": ([link("a", "b", tarfile.LNKTYPE)], "hard link to b, which is not an earlier file"),
    "a device": ([member("a", type=tarfile.CHRTYPE, devmajor=1, devminor=3)], "is a device"),
    "a disk": ([member("a", type=tarfile.BLKTYPE, devmajor=8)], "is a device"),
    "a named pipe": ([member("a", type=tarfile.FIFOTYPE)], "is a device, a pipe"),
    "a file that is also a folder": ([member("a", b"x"), member("a/b", b"y")], "is both a folder and a file"),
    "a folder that is also a file": ([member("a/b", b"y"), member("a", b"x")], "is both a folder and a file"),
    "a folder that is also a link": ([member("a/b", b"y"), link("a", "x")], "is both a folder and a file"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_an_archive_that_wants_out_is_refused(name: str, tmp_path: Path, cache: Path) -> None:
    members, complaint = HOSTILE[name]
    sample = packed(tmp_path / "deep" / "evil.tar.gz", *members)
    with pytest.raises(FilesRefused, match=complaint) as refused:
        await prepared_files(sample, cache)
    assert "evil.tar.gz" in str(refused.value)
    assert left_in(cache) == []
    assert not os.path.exists("/tmp/carrel-evil")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["evil.tar.gz"]


async def test_an_odd_folder_is_refused(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "pipe")
    with pytest.raises(FilesRefused, match="pipe is a named pipe"):
        await prepared_files(of(source), cache)
    (source / "pipe").unlink()
    (source / "out").symlink_to(tmp_path)
    with pytest.raises(FilesRefused, match="the link out leads out"):
        await prepared_files(of(source), cache)
    assert left_in(cache) == []


async def test_links_in_a_circle_lead_nowhere_and_are_left(tmp_path: Path, cache: Path) -> None:
    sample = packed(tmp_path / "f.tar.gz", link("a", "b"), link("b", "a"), link("c", "c/d"))
    assert contents((await prepared_files(sample, cache)).folder) == {"a": "-> b", "b": "-> a", "c": "-> c/d"}


def bomb(file: Path, mib: int) -> Path:
    """Zeros, a thousand times larger unpacked."""
    info, zeros = tarfile.TarInfo("zeros"), b"\0" * (1 << 20)
    info.size = mib << 20
    with gzip.open(file, "wb", compresslevel=1) as plain:
        plain.write(info.tobuf())
        for _ in range(mib):
            plain.write(zeros)
        plain.write(b"\0" * 1024)
    return file


async def test_a_bomb_is_refused_before_it_is_written(tmp_path: Path, cache: Path) -> None:
    file = bomb(tmp_path / "bomb.tar.gz", 600)
    assert file.stat().st_size < 4 << 20
    with pytest.raises(FilesRefused, match=r"bomb.tar.gz unpacks to more than \d+ MiB"):
        await prepared_files(of(file), cache)
    assert left_in(cache) == []


async def test_an_archive_with_a_huge_header_is_refused(tmp_path: Path, cache: Path) -> None:
    """Names and attributes are read into memory whole by Python's tarfile."""
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, 200 << 20
    file = tmp_path / "header.tar.gz"
    with gzip.open(file, "wb", compresslevel=1) as plain:
        plain.write(info.tobuf())
        for _ in range(200):
            plain.write(b"\0" * (1 << 20))
    with pytest.raises(FilesRefused, match="a header of more than 8 MiB"):
        await prepared_files(of(file), cache)


async def test_a_sparse_file_is_refused(tmp_path: Path, cache: Path) -> None:
    hole = tmp_path / "hole"
    with hole.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"x")
    subprocess.run(["tar", "-czSf", "sparse.tar.gz", "hole"], cwd=tmp_path, check=True)
    hole.unlink()
    with pytest.raises(FilesRefused, match="sparse"):
        await prepared_files(of(tmp_path / "sparse.tar.gz"), cache)


async def test_too_many_files_are_refused(tmp_path: Path, cache: Path) -> None:
    sample = packed(tmp_path / "many.tar.gz", *(member(f"f{number}") for number in range(50)))
    budget = unpack.UnpackLimits(tmp_path / "many.tar.gz", most_files=40)
    budget.add(files=40)
    with pytest.raises(FilesRefused, match="more than 40 files"):
        budget.add(files=1)
    assert (await prepared_files(sample, cache)).receipt.files == 50


@pytest.mark.parametrize("damage", ["cut", "changed", "no tar", "empty"])
async def test_a_damaged_archive_is_refused(damage: str, tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "f.tar.gz"
    sample = packed(file, member("a", os.urandom(100_000)))
    data = file.read_bytes()
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "changed":
        file.write_bytes(data[:5000] + b"\xff" * 100 + data[5100:])
    elif damage == "no tar":
        file.write_bytes(gzip.compress(b"hello" * 1000))
    else:
        file.write_bytes(b"\x1f\x8b")
    with pytest.raises(FilesRefused, match=r"is not a complete \.tar\.gz"):
        await prepared_files(sample, cache)
    assert left_in(cache) == []


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"# some text"])
async def test_what_is_no_archive_is_refused(content: bytes, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(FilesRefused, match=r"is not a folder, \.tar\.gz or git bundle"):
        await prepared_files(of(tmp_path / "x"), cache)
    with pytest.raises(FilesRefused, match="does not exist"):
        await prepared_files(of(tmp_path / "y"), cache)


async def test_many_at_once_make_it_once(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(200):
        (source / f"f{number}").write_bytes(os.urandom(2000))
    found = await asyncio.gather(*(prepared_files(of(source), cache) for _ in range(20)))
    assert len({files.folder for files in found}) == 1
    assert len(list(found[0].folder.iterdir())) == 200


def another_process(files: Path, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, PROGRAM, files, cache], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def many_files(source: Path, number: int) -> Path:
    for index in range(number):
        folder = source / f"d{index % 50}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f{index}").write_text(str(index))
    return source


async def test_many_of_one_process_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_cache, "_SETTLED", -1.0)
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("one")
    seen = file_cache.Source("folder", source)
    for turn in range(20):
        answers = await asyncio.gather(
            *(asyncio.to_thread(file_cache.digest_of, seen, tmp_path / f"cache{turn}") for _ in range(8))
        )
        assert len(set(answers)) == 1
        assert [path.suffix for path in (tmp_path / f"cache{turn}" / "files" / "digests").iterdir()] == [".json"]


async def test_two_processes_at_once(tmp_path: Path, cache: Path) -> None:
    source = many_files(tmp_path / "source", 2000)
    processes = [another_process(source, cache) for _ in range(3)]
    outputs = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    folder = Path(outputs[0][0].strip())
    assert sum(1 for path in folder.rglob("*") if path.is_file()) == 2000
    assert left_in(cache) == [folder.parent.name]


async def test_killed_half_way_nothing_is_taken_for_the_files(tmp_path: Path, cache: Path) -> None:
    source = many_files(tmp_path / "source", 6000)
    process = another_process(source, cache)
    while not list(cache.glob("files/*.making/tree/d9/*")):
        assert process.poll() is None, process.communicate()
        await asyncio.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (half,) = left_in(cache)
    assert half.endswith(".making")
    files = await prepared_files(of(source), cache)
    assert files.receipt.files == 6000
    assert left_in(cache) == [files.folder.parent.name]


async def test_who_is_cancelled_leaves_nothing_and_stops_the_work(tmp_path: Path, cache: Path) -> None:
    source = many_files(tmp_path / "source", 4000)
    task = asyncio.ensure_future(prepared_files(of(source), cache))
    while not list(cache.glob("files/*.making/tree/d9/*")):
        assert not task.done()
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left_in(cache) == []
    assert (await prepared_files(of(source), cache)).receipt.files == 4000


async def test_a_receipt_that_cannot_be_read_makes_it_anew(tmp_path: Path, cache: Path) -> None:
    source = many_files(tmp_path / "source", 5)
    files = await prepared_files(of(source), cache)
    (files.folder.parent / "receipt.json").write_text("{")
    (files.folder / "d1" / "f1").unlink()
    assert (await prepared_files(of(source), cache)).receipt.files == 5


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of its own with little room, where one may be mounted."""
    mounted: list[Path] = []

    def make(kib: int) -> Path:
        folder = tmp_path / "tiny"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", folder], check=True, capture_output=True)
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small file system needs root")
async def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, tiny_disk: Callable[[int], Path]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "large").write_bytes(os.urandom(2 << 20))
    cache = tiny_disk(512)
    with pytest.raises(StorageWriteError, match="No space left"):
        await prepared_files(of(source), cache)
    assert left_in(cache) == []


async def test_a_folder_that_is_gone_again_is_made_again(tmp_path: Path, cache: Path) -> None:
    sample = of(many_files(tmp_path / "source", 3))
    files = await prepared_files(sample, cache)
    shutil.rmtree(files.folder.parent)
    assert (await prepared_files(sample, cache)).receipt.files == 3


@pytest.mark.parametrize("given", ["folder", "archive"])
async def test_files_that_changed_after_they_were_looked_at_are_not_taken_for_those(
    given: str, tmp_path: Path, cache: Path
) -> None:
    source = many_files(tmp_path / "source", 3)
    sample = of(source) if given == "folder" else packed(tmp_path / "f.tar.gz", member("a", b"one"))
    first = await prepared_files(sample, cache)
    shutil.rmtree(first.folder.parent)
    (source / "d1" / "f1").write_text("else")
    packed(tmp_path / "f.tar.gz", member("a", b"two"))
    with pytest.raises(FilesRefused, match="was changed after it was first looked at; load the dataset again"):
        await prepared_files(sample, cache)
    assert left_in(cache) == []
    assert await prepared_files(of(sample.files), cache) != first
