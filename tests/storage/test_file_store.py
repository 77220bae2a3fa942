"""What only the file store does: paths, permissions, links, what is hidden, and disks that refuse."""

import asyncio
import os
import random
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from carrel.errors import KeyRefused, StorageReadError, StorageWriteError
from carrel.storage.base import MISSING
from carrel.storage.files import objects
from carrel.storage.files.store import FileStore
from tests.support.file_store import needs_namespaces, run, start
from tests.support.stores import everything


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def modes(root: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in [root, *root.rglob("*")]}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
async def test_only_the_owner_can_see_what_is_kept_whatever_the_umask(store: FileStore, umask: int) -> None:
    before = os.umask(umask)
    try:
        await store.put("a/b/object", b"x")
        await store.append("c/d/log.jsonl", [b"x" * 3000] * 3)
        store.root.joinpath("c/d/log.jsonl").open("ab").write(b"torn")
        await store.append("c/d/log.jsonl", [b"x"])
        await store.copy("a/b/object", "e/copy")
        lock = await store.lock("mine")
    finally:
        os.umask(before)
    assert modes(store.root) == {(True, 0o700), (False, 0o600)}
    assert lock is not None
    await lock.release()


async def test_what_the_store_keeps_for_itself_is_never_shown(store: FileStore) -> None:
    await store.append("s/log.jsonl", [b"x" * 1000] * 20)
    await store.put("s/object", b"x")
    await store.put("gone/object", b"x")
    await store.delete("gone")
    lock = await store.lock("mine")
    (store.root / "s/.DS_Store").touch()
    (store.root / ".git").mkdir()
    (store.root / ".git/config").touch()
    assert {".locks", ".trash"} <= {path.name for path in store.root.rglob(".*")}
    assert await store.list() == ["s/log.jsonl", "s/object"]
    assert await store.folders() == ["s"]
    assert lock is not None
    await lock.release()


@pytest.mark.parametrize("key", [".x", "a/.x", "a/.x/b", "x" * 256, "é" * 128, "a\ud800"])
async def test_a_key_that_can_be_no_file_name_is_refused(store: FileStore, key: str) -> None:
    for attempt in (store.get(key), store.put(key, b"x"), store.append(key, [b"x"]), store.stamp(key), store.list(key)):
        with pytest.raises(KeyRefused):
            await attempt
    assert not store.root.exists()


async def test_names_as_long_and_folders_as_deep_as_a_key_can_have_them(store: FileStore) -> None:
    log = "é" * 126 + ".b"
    assert await store.append(log, [b"x" * 3000] * 1000) == 1000
    with (store.root / log).open("ab") as file:
        file.write(b"torn")
    assert await FileStore(store.root).append(log, [b"x" * 3000] * 10) == 1010
    assert await store.list() == sorted([log, "é" * 125 + ".torn"])
    deep = "/".join("a" * 512)
    await store.put(deep, b"x")
    assert deep in await store.scan("")
    assert await store.folders() == ["a"]
    assert await store.delete("a")
    assert await store.delete(log)
    assert await store.list() == ["é" * 125 + ".torn"]


async def test_a_root_that_is_not_there_reads_as_empty_and_is_made_by_the_first_write(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "not" / "yet")
    assert await store.list() == []
    assert await store.folders() == []
    assert await store.get("a") is None
    assert await store.stamps(["a"]) == [None]
    assert await store.delete("a") is False
    assert await everything(store, "log") == []
    assert await store.lock_owner("mine") is None
    assert await store.scan("") == {}
    assert list(tmp_path.iterdir()) == []
    await store.append("log", [b"x"])
    assert await store.list() == ["log"]


async def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileStore("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await store.put("a", b"x")
    assert (tmp_path / "here/a").read_bytes() == b"x"


async def test_a_root_that_is_a_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    store = FileStore(tmp_path / "store")
    for write in (store.put("a", b"x"), store.append("a", [b"x"]), store.put("a/b", b"x"), store.lock("a")):
        with pytest.raises(StorageWriteError, match="a file stands where a folder is needed"):
            await write
    for read in (store.get("a"), store.list(), store.folders(), store.stamp("a")):
        with pytest.raises(StorageReadError, match="could not be read"):
            await read
    assert (tmp_path / "store").read_text() == "in the way"


async def test_a_file_cannot_be_a_folder_nor_a_folder_a_file(store: FileStore) -> None:
    await store.put("a", b"x")
    await store.put("b/c", b"x")
    for write in (store.put("a/below", b"y"), store.append("a/below", [b"y"]), store.put("a/b/c", b"y")):
        with pytest.raises(StorageWriteError, match="a file stands where a folder is needed"):
            await write
    for write in (store.put("b", b"y"), store.append("b", [b"y"])):
        with pytest.raises(StorageWriteError, match="a folder stands where a file is needed"):
            await write
    assert await store.get("a/below") is None
    assert await store.get("b") is None
    assert await store.stamp("b") is None
    assert await everything(store, "b") == []
    assert await store.list() == ["a", "b/c"]


# --- links and odd files --------------------------------------------------------------------------------------------


async def test_a_folder_that_is_a_link_out_of_the_root_is_refused(store: FileStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "object").write_bytes(b"private")
    await store.put("s/object", b"x")
    (store.root / "out").symlink_to(outside)
    (store.root / "s" / "in").symlink_to("../out")
    attempts = [
        store.get("out/object"),
        store.get_many(["s/object", "out/object"] * 20),
        store.get_many(["s/in/object"] * 20),
        store.put("out/object", b"x"),
        store.put("out/new", b"x", expect=MISSING),
        store.append("out/log", [b"x"]),
        store.copy("s/object", "out/copy"),
        store.copy("out/object", "s/copy"),
        store.delete("out/object"),
        store.list("out"),
        store.folders("out"),
        everything(store, "out/object"),
    ]
    for attempt in attempts:
        with pytest.raises(KeyRefused, match="leads out of"):
            await attempt
    assert await store.stamps(["s/object", "out/object", "s/in/object"]) == [await store.stamp("s/object"), None, None]
    assert await store.list() == ["s/object"]
    assert await store.folders() == ["s"]
    assert [path.name for path in outside.iterdir()] == ["object"]


async def test_to_delete_a_link_leaves_what_it_leads_to(store: FileStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "object").write_bytes(b"private")
    store.root.mkdir()
    (store.root / "out").symlink_to(outside)
    assert await store.delete("out")
    assert not (store.root / "out").is_symlink()
    assert (outside / "object").read_bytes() == b"private"


async def test_nothing_is_written_through_a_link(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"private\n")
    store.root.mkdir()
    (store.root / "linked").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageWriteError, match="symbolic link"):
        await store.append("linked", [b"x"])
    await store.put("linked", b"x")
    assert (tmp_path / "outside").read_bytes() == b"private\n"
    assert await store.get("linked") == b"x"


async def test_a_file_that_is_a_link_out_of_the_root_is_no_key_and_is_never_read(
    store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "outside").write_bytes(b"private\n")
    await store.put("s/object", b"x")
    (store.root / "s" / "linked").symlink_to(tmp_path / "outside")
    (store.root / "s" / "nowhere").symlink_to(tmp_path / "nothing")
    (store.root / "out").symlink_to(tmp_path)
    many = ["s/object", "s/linked"] * 20
    attempts = [
        store.get("s/linked"),
        store.get("s/nowhere"),
        store.get_many(["s/linked"]),
        store.get_many(many),
        store.copy("s/linked", "s/copy"),
        everything(store, "s/linked"),
        anext(store.pieces("s/linked")),
    ]
    for attempt in attempts:
        with pytest.raises(KeyRefused, match=r"leads out of .* 's/(linked|nowhere)'") as refused:
            await attempt
        assert str(tmp_path) not in str(refused.value)
    assert await store.stamp("s/linked") is None
    assert await store.stamp("out/outside") is None
    assert (await store.stamps(many))[1] is None
    assert await store.list() == ["s/object"]
    assert await store.list("s/linked") == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_what_is_behind_a_link_to_another_folder_in_the_root_is_read(store: FileStore) -> None:
    await store.put("s/deep/object", b"x")
    (store.root / "t").symlink_to("s")
    assert (
        await store.get_many(["t/deep/object", "s/deep/object", "t/deep/none", "none/deep"] * 5)
        == [
            b"x",
            b"x",
            None,
            None,
        ]
        * 5
    )
    stamp = await store.stamp("s/deep/object")
    assert await store.stamps(["t/deep/object", "s/deep/object", "t/deep/none"]) == [stamp, stamp, None]


async def test_of_many_folders_those_that_are_links_are_followed_within_the_root_only(
    store: FileStore, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "object").write_bytes(b"private")
    names = [f"s/{number:03d}" for number in range(100)]
    for name in names:
        await store.put(f"{name}/object", name.encode())
    (store.root / "s" / "in").symlink_to("007")
    (store.root / "s" / "out").symlink_to(outside)
    (store.root / "s" / "file").write_bytes(b"no folder")
    keys = [f"{name}/object" for name in [*names, "s/in", "s/none", "s/file"]]
    assert await store.get_many(keys) == [*(name.encode() for name in names), b"s/007", None, None]
    stamps = await store.stamps([*keys, "s/out/object"])
    assert None not in stamps[:100]
    assert stamps[100:] == [stamps[7], None, None, None]
    with pytest.raises(KeyRefused, match="leads out of"):
        await store.get_many([*keys, "s/out/object"])


async def test_many_keys_are_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "none")
    for odd in ("/a", "a/", "a//b", ".a", "a/.b", "a\\b", "a\x7f", ""):
        with pytest.raises(KeyRefused):
            await store.get_many(["good"] * 20 + [odd])
        with pytest.raises(KeyRefused):
            await store.stamps(["good"] * 20 + [odd])
    assert await store.get_many(["good"] * 20) == [None] * 20


async def test_a_link_to_another_file_in_the_root_is_read(store: FileStore) -> None:
    await store.put("s/object", b"x")
    (store.root / "t").mkdir()
    (store.root / "t" / "linked").symlink_to("../s/object")
    assert await store.get("t/linked") == b"x"
    assert await store.get_many(["t/linked"] * 20) == [b"x"] * 20
    assert await store.list() == ["s/object", "t/linked"]
    assert await store.stamp("t/linked") == await store.stamp("s/object")
    await store.copy("t/linked", "copy")
    assert await store.get("copy") == b"x"


@pytest.mark.parametrize("verb", ["put", "put_pieces", "copy"])
async def test_what_a_crash_left_half_written_goes_with_the_next_write(store: FileStore, verb: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"

    await store.put("a/source", b"x")
    folder = store.root / "b"
    folder.mkdir()
    old = time.time() - 7200
    for name in (".new-0123", ".new-4567", ".newer"):
        (folder / name).write_bytes(b"half")
    (folder / ".new-folder").mkdir()
    for name in (".new-0123", ".newer", ".new-folder"):
        os.utime(folder / name, (old, old))
    if verb == "put":
        await store.put("b/object", b"x")
    elif verb == "copy":
        await store.copy("a/source", "b/object")
    else:
        await store.put_pieces("b/object", pieces())
    # One that may still be written stays, and so does what is not ours.
    assert sorted(path.name for path in folder.iterdir()) == [".new-4567", ".new-folder", ".newer", "object"]


async def test_a_named_pipe_blocks_no_reader_and_is_no_key(store: FileStore) -> None:
    store.root.mkdir()
    os.mkfifo(store.root / "pipe")
    assert await store.get("pipe") is None
    assert await store.get_many(["pipe"] * 20) == [None] * 20
    assert await everything(store, "pipe") == []
    assert await store.list() == []
    with pytest.raises(StorageWriteError, match="not a regular file"):
        await store.append("pipe", [b"x"])


# --- objects --------------------------------------------------------------------------------------------------------


async def test_a_put_that_is_killed_leaves_the_old_bytes_or_the_new(store: FileStore) -> None:
    for _ in range(8):
        other = await start("put_over_and_over", store.root, "300000")
        assert await other.line() == "began"
        await asyncio.sleep(random.uniform(0, 0.05))
        await other.kill()
        data = await store.get("s/object")
        assert data is None or data in {b"%d" % digit * 300_000 for digit in range(10)}
        assert await store.list("s") in ([], ["s/object"])


class Slow(bytes):
    """Bytes that are written when the test sets an event."""

    begun: threading.Event
    go: threading.Event

    def __len__(self) -> int:
        self.begun.set()
        self.go.wait(60)
        return super().__len__()


async def test_who_is_cancelled_while_it_is_written_leaves_nothing_to_be_written_later(store: FileStore) -> None:
    data = Slow(b"first")
    data.begun, data.go = threading.Event(), threading.Event()
    lock = await store.lock("x")
    assert lock is not None

    async def put() -> None:
        try:
            await store.put("x", data)
        finally:
            await lock.release()

    putting = asyncio.create_task(put())
    await asyncio.to_thread(data.begun.wait, 60)
    for _ in range(2):
        putting.cancel()
        await asyncio.sleep(0.01)
    assert await store.lock("x", wait=False) is None
    data.go.set()
    with pytest.raises(asyncio.CancelledError):
        await putting
    other = await store.lock("x")
    assert other is not None
    await store.put("x", b"second")
    await other.release()
    assert await store.get("x") == b"second"


async def test_deleting_wins_over_a_put_of_what_was_there(store: FileStore) -> None:
    for number in range(100):
        await store.put(f"s{number}/object", b"old")
        key = f"s{number}/object" if number % 2 else f"s{number}"
        stamp = await store.stamp(f"s{number}/object")
        deleting = store.delete(key)
        deleted, _ = await asyncio.gather(deleting, store.put(f"s{number}/object", b"new", expect=stamp))
        assert deleted
        assert await store.list() == []


async def test_quick_puts_of_the_same_size_have_different_stamps(store: FileStore) -> None:
    stamps = []
    for number in range(50):
        await store.put("object", b"%02d" % number)
        stamps.append(await store.stamp("object"))
    assert len(set(stamps)) == 50


async def test_a_copy_takes_no_room_and_keeps_its_bytes_when_the_source_is_put_anew(store: FileStore) -> None:
    await store.put("a/blob", b"x" * 1000)
    await store.copy("a/blob", "b/blob")
    assert (store.root / "a/blob").samefile(store.root / "b/blob")
    await store.copy("a/blob", "b/blob")
    await store.put("a/blob", b"new")
    assert await store.get("b/blob") == b"x" * 1000
    assert await store.list() == ["a/blob", "b/blob"]
    assert sorted(os.listdir(store.root / "b")) == ["blob"]


async def test_what_a_crash_left_of_a_delete_goes_with_the_next_one(store: FileStore) -> None:
    await store.put("a/b/c", b"x")
    await store.put("d", b"x")
    (store.root / ".trash").mkdir()
    (store.root / "a").rename(store.root / ".trash/left")
    assert await store.delete("d")
    assert list((store.root / ".trash").iterdir()) == []


# --- disks that refuse ----------------------------------------------------------------------------------------------


def test_at_a_limit_on_file_sizes_the_log_stays_whole_and_goes_on_when_it_is_lifted(tmp_path: Path) -> None:
    output = run("meet_a_file_size_limit", tmp_path / "store")
    assert output[-1] == "whole"
    assert all("ulimit -f" in line for line in output[:-1])
    assert len(output) == 5


def test_on_a_full_disk_the_log_stays_whole_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    before = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    needs_namespaces(before, tmp_path)
    output = run("meet_a_full_disk", tmp_path / "store", before=before)
    assert output[-1] == "whole"
    assert all("make room" in line for line in output[:-1])
    assert len(output) >= 4


async def test_on_a_read_only_disk_reading_works_and_writing_says_why_not(store: FileStore, tmp_path: Path) -> None:
    await store.put("s/object", b"old")
    await store.append("s/log.jsonl", [b"old"])
    before = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path}"
    needs_namespaces(before, tmp_path)
    output = run("be_refused", store.root, before=before)
    assert [line.split(":")[0] for line in output] == ["StorageWriteError"] * 6 + ["done"] * 2
    assert all("read-only" in line for line in output[:6])
    assert await store.list() == ["s/log.jsonl", "s/object"]


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that everybody can go through, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


async def test_where_we_have_no_permission_every_verb_says_so(public_folder: Path) -> None:
    store = FileStore(public_folder / "store")
    await store.put("s/object", b"old")
    await store.append("s/log.jsonl", [b"old"])
    if os.getuid() != 0:
        store.root.chmod(0)
    output = run("be_refused_as_another_user", store.root)
    store.root.chmod(0o700)
    assert len(output) == 8
    assert all("Permission denied (check its owner" in line for line in output)
    assert await store.get("s/object") == b"old"


async def test_a_folder_that_may_not_be_entered_hides_no_other(public_folder: Path) -> None:
    public_folder.chmod(0o777)
    output = run("look_beside_a_forbidden_folder", public_folder / "store")
    assert output == ["['a', 'c']", "['s/a/object', 's/c/object']"]


async def test_other_content_of_the_same_size_and_time_has_another_stamp(store: FileStore) -> None:
    await store.put("object", b"one")
    before, file = await store.stamp("object"), store.root / "object"
    about = file.stat()
    time.sleep(0.02)  # the kernel's clock for files goes in steps
    file.write_bytes(b"two")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    after = await store.stamp("object")
    assert before is not None
    assert after is not None
    assert after[:2] == before[:2]
    assert after != before


@pytest.mark.parametrize("name", [b"two\nlines", b"a\\b", b"\x1b[31m", b"caf\xe9", b"/".join([b"deep" * 50] * 6)])
async def test_a_file_name_that_is_no_key_does_not_hide_other_files(
    store: FileStore, name: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await store.put("w/good", b"x")
    odd = Path(os.fsdecode(os.fsencode(store.root) + b"/w/" + name))
    odd.parent.mkdir(parents=True, exist_ok=True)
    odd.write_bytes(b"x")
    odd.with_name(f"{odd.name}.d").mkdir()
    odd.with_name(f"{odd.name}.d").joinpath("x").write_bytes(b"x")
    assert await store.list() == await store.list("w") == ["w/good"]
    assert await store.folders("w") in ([], ["deep" * 50])
    assert list(await store.scan("w")) == ["w/good"]
    assert all("is ignored" in line and line.encode() for line in caplog.messages)
    warnings = len(caplog.messages)
    await store.list()
    assert warnings == len(caplog.messages) > 0, "it is warned about once"


def test_a_file_that_others_make_and_remove_meanwhile_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As locks are: between being missing and being made it was there, and then it was not again."""
    make, tries = objects.create_file, 0

    def made(path: str, flags: int) -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise FileExistsError(path)
        return make(path, flags)

    monkeypatch.setattr(objects, "create_file", made)
    os.close(objects.open_or_create(str(tmp_path / "lock"), os.O_RDWR))
    assert tries == 2


async def test_pieces_that_are_cancelled_at_any_moment_leave_nothing(store: FileStore) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(60)

    for moment in range(60):
        putting = asyncio.create_task(store.put_pieces("folder/object", pieces()))
        for _ in range(moment % 6):
            await asyncio.sleep(0)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)
    await asyncio.sleep(0.2)  # threads that were left running would have ended by now
    assert [path.name for path in (store.root / "folder").iterdir()] == []


async def test_a_folder_is_searched_for_abandoned_files_once(store: FileStore) -> None:
    await store.put("s/first", b"x")
    await store.put("s/second", b"x")
    old = time.time() - 7200
    (store.root / "s" / ".new-0123").write_bytes(b"half")
    os.utime(store.root / "s" / ".new-0123", (old, old))
    await store.put("s/third", b"x")
    assert (store.root / "s" / ".new-0123").exists(), "writing to a folder with many files must not list them each time"
    await FileStore(store.root).put("s/fourth", b"x")
    assert not (store.root / "s" / ".new-0123").exists()
