"""TextIndex: documents are found by their words, vectors are kept, and a damaged file is built again."""

import contextlib
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.conversation.search.query import parse
from carrel.errors import CatalogueBusy, CatalogueLost
from carrel.storage.text_index import DocumentRef, Phrase, SourceUpdate, TextDocument, TextIndex

FIELDS = ("title", "text")

Opened = Callable[..., TextIndex]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite3"


@pytest.fixture
def opened(path: Path) -> Iterator[Opened]:
    made: list[TextIndex] = []

    def open_(where: Path | None = path, content_id: str = "tests-1") -> TextIndex:
        made.append(TextIndex(where, FIELDS, content_id))
        return made[-1]

    yield open_
    for index in made:
        index.close()


def document(number: int, text: str) -> TextDocument:
    return TextDocument(number, ("", text))


def update(source: str, *texts: str, first: int = 1) -> SourceUpdate:
    return SourceUpdate(source, b"{}", documents=[document(number, text) for number, text in enumerate(texts, first)])


def words(text: str) -> list[Phrase]:
    return parse(text).phrases


def found(index: TextIndex, text: str, **more: object) -> list[tuple[str, int]]:
    return [tuple(place) for place in index.find_all(words(text), **more)]  # type: ignore[arg-type, misc]


# --- finding --------------------------------------------------------------------------------------------------------


def test_a_document_is_found_by_its_words_and_the_newest_comes_first(opened: Opened) -> None:
    index = opened()
    index.write([update("a", "the cat sat", "a dog ran"), update("b", "another cat")])
    assert found(index, "cat") == [("b", 1), ("a", 1)]
    assert found(index, "dog") == [("a", 2)]
    assert found(index, "bird") == []


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Résumé café", "resume cafe"),
        ("resume", "résumé"),
        ("e\u0301te\u0301", "été"),
        ("GROSS", "gross"),
        ("foo_bar.baz-qux", "foo_bar"),
        ("see src/carrel/errors.py now", "carrel/errors.py"),
        ("don't stop", "don't"),
        ("请检查登录模块为什么失败", "登录"),
        ("请检查登录模块为什么失败", "败"),
        ("データベースの接続", "接続"),
        ("데이터베이스연결", "연결"),
        ("ตรวจสอบฐานข้อมูล", "ฐานข้อมูล"),
        ("mixed 数据库pool text", "pool"),
        ("nul\x00inside", "inside"),
        ("finishing touches", "finish"),
        ("Привет мир", "привет"),
        ("version 3.11.2", "3.11"),
    ],
)
def test_words_are_found_whatever_the_language(opened: Opened, text: str, query: str) -> None:
    index = opened()
    index.write([update("a", "something else altogether", text)])
    assert found(index, query) == [("a", 2)]


def test_a_phrase_is_found_only_where_its_words_stand_together(opened: Opened) -> None:
    index = opened()
    index.write([update("a", "the connection pool is empty", "the pool has a connection")])
    assert found(index, '"connection pool"') == [("a", 1)]
    assert len(found(index, "connection pool")) == 2
    index.write([update("b", "登录模块", "模块登录")])
    assert found(index, "登录模块") == [("b", 1)]


def test_a_search_can_be_limited_to_fields(opened: Opened) -> None:
    index = opened()
    documents = [
        TextDocument(0, ("pool", "")),
        TextDocument(1, ("", "pool")),
        TextDocument(2, ("", "connection")),
    ]
    index.write([SourceUpdate("a", b"", documents=documents)])
    assert found(index, "pool", fields=["title"]) == [("a", 0)]
    assert found(index, "pool", fields=["text"]) == [("a", 1)]
    assert found(index, "pool connection") == []


def test_documents_with_heavier_words_come_first(opened: Opened) -> None:
    index = opened()
    index.write([update("a", "pool", "connection pool", "connection", "nothing"), update("b", "pool")])
    weights = {Phrase(("pool",)): 1.0, Phrase(("connection",)): 3.0}
    assert [tuple(place) for place in index.find_any(weights)] == [("a", 2), ("a", 3), ("b", 1), ("a", 1)]
    assert [tuple(place) for place in index.find_any(weights, per_source=1)] == [("a", 2), ("b", 1)]
    assert len(index.find_any(weights, limit=1)) == 1
    index.write([SourceUpdate("a", None)])
    assert [tuple(place) for place in index.find_any(weights)] == [("b", 1)]


def test_one_long_source_does_not_crowd_out_the_others(opened: Opened) -> None:
    index = opened()
    index.write([update("short", "pool")])
    index.write([update("long", *["pool"] * 500)])
    assert found(index, "pool", per_source=2) == [("long", 500), ("long", 499), ("short", 1)]
    assert len(found(index, "pool", limit=7, per_source=100)) == 7


def test_the_frequency_of_common_and_rare_words(opened: Opened) -> None:
    index = opened()
    for part in range(9):
        index.write([update(f"s{part}", *["common"] * 2000, f"rare{part}")])
    assert found(index, "rare0") == [("s0", 2001)]
    assert [source for source, _ in found(index, "rare", limit=100)] == [f"s{part}" for part in range(8, -1, -1)]
    assert index.frequency(Phrase(("common",))) > 0.9
    assert index.frequency(Phrase(("rare1",))) < 0.0001


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet='"*()-+:^{}ANDORNOTEa é登\x00', max_size=60))
def test_no_query_is_taken_for_an_operator(text: str) -> None:
    index = _shared()
    query = parse(text)
    if query.phrases:
        index.find_all(query.phrases)
        index.find_all(query.phrases, fields=["text"])
        index.find_any(dict.fromkeys(query.words, 1.0))
        assert 0 < index.frequency(query.words[0]) <= 1


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab1 _-.,é登录✓🚀🫠\U00040000\x00\n", min_size=1, max_size=30))
def test_every_text_is_found_by_each_of_its_words(text: str) -> None:
    index = TextIndex(None, FIELDS, "tests-1")
    index.write([update("a", text)])
    for word in parse(text).words:
        assert index.find_all([word]), word
    index.close()


_kept: list[TextIndex] = []


def _shared() -> TextIndex:
    if not _kept:
        _kept.append(TextIndex(None, FIELDS, "tests-1"))
        _kept[0].write([update("a", "some words", "A AND B OR NOT NEAR", "登录模块")])
    return _kept[0]


# --- keeping --------------------------------------------------------------------------------------------------------


def test_written_documents_are_there_after_reopening(opened: Opened, path: Path) -> None:
    index = opened()
    index.write([SourceUpdate("a", b"state", documents=[document(1, "cat")], vectors={1: b"\x01\x02"})])
    index.close()
    again = opened()
    assert again.contents().sources["a"] == b"state"
    assert again.contents().vectors == [(DocumentRef("a", 1), b"\x01\x02")]
    assert found(again, "cat") == [("a", 1)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_source_is_extended_replaced_and_deleted(opened: Opened) -> None:
    index = opened()
    index.write([SourceUpdate("a", b"1", documents=[document(1, "cat")], vectors={1: b"x", 2: b"y"})])
    index.write([SourceUpdate("a", b"2", documents=[document(2, "dog")], vectors={2: None, 3: b"z"})])
    assert found(index, "cat") == [("a", 1)]
    assert found(index, "dog") == [("a", 2)]
    assert index.contents().vectors == [(DocumentRef("a", 1), b"x"), (DocumentRef("a", 3), b"z")]
    index.write([SourceUpdate("a", b"3", replace=True, documents=[document(1, "bird")])])
    assert found(index, "cat") == found(index, "dog") == []
    assert found(index, "bird") == [("a", 1)]
    assert index.contents().vectors == []
    index.write([SourceUpdate("a", None)])
    assert found(index, "bird") == []
    assert index.contents().sources == {}


def test_the_generation_changes_after_a_write_of_another_process(opened: Opened) -> None:
    one, two = opened(), opened()
    before = one.generation()
    assert one.generation() == before
    two.write([update("a", "cat")])
    assert one.generation() != before


def test_contents_are_consistent_while_another_process_writes(opened: Opened) -> None:
    one, two = opened(), opened()
    one.contents()

    def write() -> None:
        for n in range(300):
            two.write([SourceUpdate(f"s{n}", b"", vectors={1: b"x" * 64})])

    writing = threading.Thread(target=write)
    writing.start()
    before = 0
    while writing.is_alive():
        contents = one.contents()
        assert {place.source for place, _ in contents.vectors} == contents.sources.keys()
        before = len(contents.sources)
    writing.join()
    assert len(one.contents().sources) == 300 >= before


def test_an_index_with_many_deleted_documents_needs_a_rebuild(opened: Opened) -> None:
    index = opened()
    texts = ["word"] * 2_500
    index.write([update("a", *texts), update("b", *texts)])
    assert not index.needs_rebuild()
    index.write([SourceUpdate("a", None)])
    assert index.needs_rebuild()
    index.file.recreate()
    assert not index.needs_rebuild()
    assert index.contents().sources == {}


# --- trouble --------------------------------------------------------------------------------------------------------


def lost_then_usable(index: TextIndex) -> None:
    """Check that at most the first use raises `CatalogueLost`, and that the index then works."""
    with contextlib.suppress(CatalogueLost):
        index.contents()
    assert index.contents().sources == {}
    index.write([update("a", "cat")])
    assert found(index, "cat") == [("a", 1)]


@pytest.mark.parametrize(
    "damage",
    [b"", b"this is no database", b"SQLite format 3\x00" + b"\xff" * 4000, os.urandom(20_000)],
    ids=["empty", "text", "broken header", "noise"],
)
def test_a_file_that_is_no_index_is_built_again(opened: Opened, path: Path, damage: bytes) -> None:
    path.write_bytes(damage)
    index = opened()
    lost_then_usable(index)
    assert index.file.path == path
    assert path.read_bytes()[:15] == b"SQLite format 3"


@pytest.mark.parametrize("where", [0.05, 0.3, 0.6, 0.9])
def test_a_damaged_file_never_stops_a_search(opened: Opened, path: Path, where: float) -> None:
    index = opened()
    index.write([update(f"s{number}", *["cat dog bird"] * 20, f"word{number}") for number in range(300)])
    index.close()
    data = bytearray(path.read_bytes())
    start = int(len(data) * where)
    data[start : start + 8192] = os.urandom(min(8192, len(data) - start))
    path.write_bytes(data)
    again = opened()
    for _ in range(3):
        try:
            again.contents()
            for number in range(0, 300, 10):
                again.find_all(words(f"word{number}"))
            again.write([update("new", "fish")])
            assert found(again, "fish")[0] == ("new", 1)
            return
        except CatalogueLost:
            continue
    raise AssertionError("the index was lost three times")


def test_a_file_of_another_version_is_built_again(opened: Opened, path: Path) -> None:
    newer = opened(content_id="tests-2")
    newer.write([update("a", "cat")])
    newer.close()
    lost_then_usable(opened())


def test_a_file_with_missing_tables_is_built_again(opened: Opened, path: Path) -> None:
    index = opened()
    index.write([update("a", "cat")])
    index.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE documents")
    connection.close()
    again = opened()
    with pytest.raises(CatalogueLost):
        again.find_all(words("cat"))
    lost_then_usable(again)


def test_a_database_of_another_program_is_left_alone(opened: Opened, path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE precious (thing)")
        connection.execute("INSERT INTO precious VALUES ('do not lose me')")
    connection.close()
    index = opened()
    lost_then_usable(index)
    assert index.file.path is None
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT thing FROM precious").fetchall() == [("do not lose me",)]
    connection.close()


def test_a_deleted_file_is_built_again(opened: Opened, path: Path) -> None:
    index = opened()
    index.write([update("a", "cat")])
    index.close()
    # Delete only the file itself and leave SQLite's journal beside it.
    keep = sqlite3.connect(path)
    keep.execute("CREATE TABLE more (x)")
    path.unlink()
    lost_then_usable(opened())
    keep.close()


def test_an_open_index_survives_the_deletion_of_its_file(opened: Opened, path: Path) -> None:
    one = opened()
    one.write([update("a", "cat")])
    for file in path.parent.iterdir():
        file.unlink()
    assert found(one, "cat") == [("a", 1)]
    one.write([update("b", "cat")])
    assert len(found(one, "cat")) == 2
    lost_then_usable(opened())


@pytest.mark.parametrize("where", ["file/in/the/way", "proc"])
def test_an_index_without_a_writable_file_is_kept_in_memory(
    opened: Opened, tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    place = Path("/proc") if where == "proc" else tmp_path / where
    with caplog.at_level(logging.WARNING):
        index = opened(place / "index.sqlite3")
        lost_then_usable(index)
    assert index.file.path is None
    assert "keeping it in memory" in caplog.text


def test_reading_works_while_another_process_holds_the_lock(opened: Opened, path: Path) -> None:
    index = opened()
    index.write([update("a", "cat")])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CatalogueBusy):
        index.write([update("b", "cat")])
    assert found(index, "cat") == [("a", 1)]
    other.execute("ROLLBACK")
    other.close()
    index.write([update("b", "cat")])
    assert len(found(index, "cat")) == 2


def test_a_write_waits_for_a_short_lock(opened: Opened, path: Path) -> None:
    index = opened()
    index.write([update("a", "cat")])
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.2, lambda: other.execute("ROLLBACK"))
    timer.start()
    index.write([update("b", "cat")])
    timer.join()
    other.close()


WRITER = """
import sys
from pathlib import Path
from carrel.storage.text_index import TextIndex, TextDocument, SourceUpdate
path, name, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
index = TextIndex(path, ("title", "text"), "tests-1")
for turn in range(rounds):
    documents = [TextDocument(turn * 50 + n, ("", f"{name} common word{turn}")) for n in range(1, 51)]
    index.write([SourceUpdate(name, str(turn).encode(), documents=documents)])
    print(turn, flush=True)
"""


def writer(path: Path, name: str, rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(rounds)], stdout=subprocess.PIPE, text=True
    )


def test_processes_that_write_at_the_same_time_lose_nothing(opened: Opened, path: Path) -> None:
    processes = [writer(path, name, 20) for name in ("ant", "bee", "cow")]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    index = opened()
    assert index.contents().sources == {"ant": b"19", "bee": b"19", "cow": b"19"}
    for name in ("ant", "bee", "cow"):
        places = index.find_all([Phrase((name,))], limit=5000, per_source=5000, scan=5000)
        assert sorted(place.number for place in places) == list(range(1, 1001))


def test_a_killed_writer_leaves_complete_updates(opened: Opened, path: Path) -> None:
    process = writer(path, "ant", 100_000)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(12)][-1]
    process.send_signal(signal.SIGKILL)
    process.wait()
    acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
    process.stdout.close()
    index = opened()
    steps = int(index.contents().sources["ant"]) + 1
    assert steps >= acknowledged + 1
    places = index.find_all([Phrase(("ant",))], limit=10**6, per_source=10**6, scan=10**6)
    assert sorted(place.number for place in places) == list(range(1, steps * 50 + 1))


FORKER = """
import os, sys
from pathlib import Path
from carrel.storage.text_index import TextIndex, TextDocument, Phrase, SourceUpdate
index = TextIndex(Path(sys.argv[1]), ("title", "text"), "tests-1")
index.write([SourceUpdate("a", b"1", documents=[TextDocument(1, ("", "cat"))])])
found = lambda: [tuple(place) for place in index.find_all([Phrase(("cat",))])]
before = found()
child = os.fork()
if child == 0:
    os._exit(0 if found() == before == [("a", 1)] else 1)
assert os.waitpid(child, 0)[1] == 0
assert found() == before
index.write([SourceUpdate("b", b"1", documents=[TextDocument(1, ("", "cat"))])])
print(sorted(found()))
"""


def test_a_forked_process_opens_its_own_connection(path: Path) -> None:
    # In a program of its own: the test runner has threads, and a fork of those may find any lock held.
    done = subprocess.run([sys.executable, "-c", FORKER, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[('a', 1), ('b', 1)]\n", "")
