"""The catalogue: words and vectors that are found again, and a file that nobody needs to worry about."""

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

from carrel.conversation.query import parse
from carrel.errors import CatalogueBusy, CatalogueLost
from carrel.storage import catalogue as module
from carrel.storage.catalogue import Catalogue, Document, Found, Phrase, Update

FIELDS = ("title", "said")

Opened = Callable[..., Catalogue]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalogue.sqlite3"


@pytest.fixture
def opened(path: Path) -> Iterator[Opened]:
    made: list[Catalogue] = []

    def open_(where: Path | None = path, owner: str = "tests-1") -> Catalogue:
        made.append(Catalogue(where, FIELDS, owner))
        return made[-1]

    yield open_
    for catalogue in made:
        catalogue.close()


def said(number: int, text: str) -> Document:
    return Document(number, ("", text))


def update(source: str, *texts: str, seen: int = 0, first: int = 1) -> Update:
    return Update(source, seen, b"{}", documents=[said(number, text) for number, text in enumerate(texts, first)])


def words(text: str) -> list[Phrase]:
    return parse(text).phrases


def found(catalogue: Catalogue, text: str, **more: object) -> list[tuple[str, int]]:
    return [tuple(place) for place in catalogue.find(words(text), **more)]  # type: ignore[arg-type, misc]


# --- finding --------------------------------------------------------------------------------------------------------


def test_a_document_is_found_by_its_words_and_the_newest_comes_first(opened: Opened) -> None:
    catalogue = opened()
    catalogue.write([update("a", "the cat sat", "a dog ran"), update("b", "another cat")])
    assert found(catalogue, "cat") == [("b", 1), ("a", 1)]
    assert found(catalogue, "dog") == [("a", 2)]
    assert found(catalogue, "bird") == []


@pytest.mark.parametrize(
    ("text", "asked"),
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
def test_words_are_found_whatever_the_language(opened: Opened, text: str, asked: str) -> None:
    catalogue = opened()
    catalogue.write([update("a", "something else altogether", text)])
    assert found(catalogue, asked) == [("a", 2)]


def test_a_phrase_is_found_only_where_its_words_stand_together(opened: Opened) -> None:
    catalogue = opened()
    catalogue.write([update("a", "the connection pool is empty", "the pool has a connection")])
    assert found(catalogue, '"connection pool"') == [("a", 1)]
    assert len(found(catalogue, "connection pool")) == 2
    catalogue.write([update("b", "登录模块", "模块登录")])
    assert found(catalogue, "登录模块") == [("b", 1)]


def test_fields_can_be_asked_for(opened: Opened) -> None:
    catalogue = opened()
    documents = [Document(0, ("pool", "")), Document(1, ("", "pool")), Document(2, ("", "connection"))]
    catalogue.write([Update("a", 0, b"", documents=documents)])
    assert found(catalogue, "pool", fields=["title"]) == [("a", 0)]
    assert found(catalogue, "pool", fields=["said"]) == [("a", 1)]
    assert found(catalogue, "pool connection") == []


def test_documents_with_the_weightier_words_come_first(opened: Opened) -> None:
    catalogue = opened()
    catalogue.write([update("a", "pool", "connection pool", "connection", "nothing"), update("b", "pool")])
    weights = {Phrase(("pool",)): 1.0, Phrase(("connection",)): 3.0}
    assert [tuple(place) for place in catalogue.weigh(weights)] == [("a", 2), ("a", 3), ("b", 1), ("a", 1)]
    assert [tuple(place) for place in catalogue.weigh(weights, per_source=1)] == [("a", 2), ("b", 1)]
    assert len(catalogue.weigh(weights, limit=1)) == 1
    catalogue.write([Update("a", 1, None)])
    assert [tuple(place) for place in catalogue.weigh(weights)] == [("b", 1)]


def test_one_long_source_does_not_crowd_out_the_others(opened: Opened) -> None:
    catalogue = opened()
    catalogue.write([update("short", "pool")])
    catalogue.write([update("long", *["pool"] * 500)])
    assert found(catalogue, "pool", per_source=2) == [("long", 500), ("long", 499), ("short", 1)]
    assert len(found(catalogue, "pool", limit=7, per_source=100)) == 7


def test_what_fills_many_tables_is_found_in_all_of_them(opened: Opened) -> None:
    catalogue = opened()
    many = module.SHELF // 4 + 1
    for part in range(9):
        catalogue.write([update(f"s{part}", *["common"] * many, f"rare{part}")])
    with sqlite3.connect(catalogue.file.path or "") as connection:
        assert connection.execute("SELECT count(*) FROM shelves").fetchone()[0] == 3
    assert found(catalogue, "rare0") == [("s0", many + 1)]
    assert found(catalogue, "rare8") == [("s8", many + 1)]
    assert [source for source, _ in found(catalogue, "rare", limit=100)] == [f"s{part}" for part in range(8, -1, -1)]
    assert catalogue.share(Phrase(("common",))) > 0.9
    assert catalogue.share(Phrase(("rare1",))) < 0.0001


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet='"*()-+:^{}ANDORNOTEa é登\x00', max_size=60))
def test_no_text_that_is_typed_is_taken_for_a_command(text: str) -> None:
    catalogue = _shared()
    query = parse(text)
    if query.phrases:
        catalogue.find(query.phrases)
        catalogue.find(query.phrases, fields=["said"])
        catalogue.weigh(dict.fromkeys(query.words, 1.0))
        assert 0 < catalogue.share(query.words[0]) <= 1


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab1 _-.,é登录✓🚀🫠\U00040000\x00\n", min_size=1, max_size=30))
def test_every_text_is_found_by_each_of_its_words(text: str) -> None:
    catalogue = Catalogue(None, FIELDS, "tests-1")
    catalogue.write([update("a", text)])
    for word in parse(text).words:
        assert catalogue.find([word]), word
    catalogue.close()


_kept: list[Catalogue] = []


def _shared() -> Catalogue:
    if not _kept:
        _kept.append(Catalogue(None, FIELDS, "tests-1"))
        _kept[0].write([update("a", "some words", "A AND B OR NOT NEAR", "登录模块")])
    return _kept[0]


# --- keeping --------------------------------------------------------------------------------------------------------


def test_what_was_written_is_there_after_reopening(opened: Opened, path: Path) -> None:
    catalogue = opened()
    catalogue.write([Update("a", 0, b"state", documents=[said(1, "cat")], vectors={1: b"\x01\x02"})])
    catalogue.close()
    again = opened()
    assert again.held().sources["a"] == (1, b"state")
    assert again.held().vectors == [(Found("a", 1), b"\x01\x02")]
    assert found(again, "cat") == [("a", 1)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_source_goes_on_is_forgotten_and_goes(opened: Opened) -> None:
    catalogue = opened()
    catalogue.write([Update("a", 0, b"1", documents=[said(1, "cat")], vectors={1: b"x", 2: b"y"})])
    catalogue.write([Update("a", 1, b"2", documents=[said(2, "dog")], vectors={2: None, 3: b"z"})])
    assert found(catalogue, "cat") == [("a", 1)]
    assert found(catalogue, "dog") == [("a", 2)]
    assert catalogue.held().vectors == [(Found("a", 1), b"x"), (Found("a", 3), b"z")]
    catalogue.write([Update("a", 2, b"3", forget=True, documents=[said(1, "bird")])])
    assert found(catalogue, "cat") == found(catalogue, "dog") == []
    assert found(catalogue, "bird") == [("a", 1)]
    assert catalogue.held().vectors == []
    catalogue.write([Update("a", 3, None)])
    assert found(catalogue, "bird") == []
    assert catalogue.held().sources == {}


def test_who_comes_second_is_refused_and_nothing_is_there_twice(opened: Opened) -> None:
    one, two = opened(), opened()
    assert one.write([update("a", "cat")]) == []
    assert two.write([update("a", "cat"), update("b", "cat")]) == ["a"]
    assert sorted(found(two, "cat")) == [("a", 1), ("b", 1)]


def test_others_can_tell_that_something_was_written(opened: Opened) -> None:
    one, two = opened(), opened()
    before = one.edition()
    assert one.edition() == before
    two.write([update("a", "cat")])
    assert one.edition() != before


def test_what_it_holds_is_of_one_moment_while_another_writes(opened: Opened) -> None:
    one, two = opened(), opened()
    one.held()
    writing = threading.Thread(
        target=lambda: [two.write([Update(f"s{n}", 0, b"", vectors={1: b"x" * 64})]) for n in range(300)]
    )
    writing.start()
    before = 0
    while writing.is_alive():
        held = one.held()
        assert {place.source for place, _ in held.vectors} == held.sources.keys()
        before = len(held.sources)
    writing.join()
    assert len(one.held().sources) == 300 >= before


def test_it_says_when_most_of_it_is_gone(opened: Opened) -> None:
    catalogue = opened()
    texts = ["word"] * 2_500
    catalogue.write([update("a", *texts), update("b", *texts)])
    assert not catalogue.worn()
    catalogue.write([Update("a", 1, None)])
    assert catalogue.worn()
    catalogue.file.remake()
    assert not catalogue.worn()
    assert catalogue.held().sources == {}


# --- trouble --------------------------------------------------------------------------------------------------------


def lost_then_usable(catalogue: Catalogue) -> None:
    """The first use may say that everything is lost; then it works, empty."""
    with contextlib.suppress(CatalogueLost):
        catalogue.held()
    assert catalogue.held().sources == {}
    assert catalogue.write([update("a", "cat")]) == []
    assert found(catalogue, "cat") == [("a", 1)]


@pytest.mark.parametrize(
    "damage",
    [b"", b"this is no database", b"SQLite format 3\x00" + b"\xff" * 4000, os.urandom(20_000)],
    ids=["empty", "text", "broken header", "noise"],
)
def test_a_file_that_is_no_catalogue_is_made_anew(opened: Opened, path: Path, damage: bytes) -> None:
    path.write_bytes(damage)
    catalogue = opened()
    lost_then_usable(catalogue)
    assert catalogue.file.path == path
    assert path.read_bytes()[:15] == b"SQLite format 3"


@pytest.mark.parametrize("where", [0.05, 0.3, 0.6, 0.9])
def test_a_file_with_damage_inside_never_stops_a_search(opened: Opened, path: Path, where: float) -> None:
    catalogue = opened()
    catalogue.write([update(f"s{number}", *["cat dog bird"] * 20, f"word{number}") for number in range(300)])
    catalogue.close()
    data = bytearray(path.read_bytes())
    start = int(len(data) * where)
    data[start : start + 8192] = os.urandom(min(8192, len(data) - start))
    path.write_bytes(data)
    again = opened()
    for _ in range(3):
        try:
            again.held()
            for number in range(0, 300, 10):
                again.find(words(f"word{number}"))
            again.write([update("new", "fish", seen=again.held().sources.get("new", (0,))[0])])
            assert found(again, "fish")[0] == ("new", 1)
            return
        except CatalogueLost:
            continue
    raise AssertionError("lost three times")


def test_a_file_of_another_version_is_made_anew(opened: Opened, path: Path) -> None:
    newer = opened(owner="tests-2")
    newer.write([update("a", "cat")])
    newer.close()
    lost_then_usable(opened())


def test_a_file_with_tables_missing_is_made_anew(opened: Opened, path: Path) -> None:
    catalogue = opened()
    catalogue.write([update("a", "cat")])
    catalogue.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE spans")
    connection.close()
    again = opened()
    with pytest.raises(CatalogueLost):
        again.find(words("cat"))
    lost_then_usable(again)


def test_a_database_of_another_program_is_left_alone(opened: Opened, path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE precious (thing)")
        connection.execute("INSERT INTO precious VALUES ('do not lose me')")
    connection.close()
    catalogue = opened()
    lost_then_usable(catalogue)
    assert catalogue.file.path is None
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT thing FROM precious").fetchall() == [("do not lose me",)]
    connection.close()


def test_a_file_that_was_deleted_meanwhile_is_made_again(opened: Opened, path: Path) -> None:
    catalogue = opened()
    catalogue.write([update("a", "cat")])
    catalogue.close()
    # Only the file itself, as somebody would who does not know what SQLite keeps beside it.
    keep = sqlite3.connect(path)
    keep.execute("CREATE TABLE more (x)")
    path.unlink()
    lost_then_usable(opened())
    keep.close()


def test_deleting_the_file_under_an_open_catalogue_harms_nobody(opened: Opened, path: Path) -> None:
    one = opened()
    one.write([update("a", "cat")])
    for file in path.parent.iterdir():
        file.unlink()
    assert found(one, "cat") == [("a", 1)]
    one.write([update("b", "cat")])
    assert len(found(one, "cat")) == 2
    lost_then_usable(opened())


@pytest.mark.parametrize("where", ["file/in/the/way", "proc"])
def test_where_no_file_can_be_made_it_lives_in_memory(
    opened: Opened, tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    place = Path("/proc") if where == "proc" else tmp_path / where
    with caplog.at_level(logging.WARNING):
        catalogue = opened(place / "catalogue.sqlite3")
        lost_then_usable(catalogue)
    assert catalogue.file.path is None
    assert "lives in memory" in caplog.text


def test_a_lock_held_elsewhere_is_waited_for_a_moment_and_reading_goes_on(opened: Opened, path: Path) -> None:
    catalogue = opened()
    catalogue.write([update("a", "cat")])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CatalogueBusy):
        catalogue.write([update("b", "cat")])
    assert found(catalogue, "cat") == [("a", 1)]
    other.execute("ROLLBACK")
    other.close()
    assert catalogue.write([update("b", "cat")]) == []
    assert len(found(catalogue, "cat")) == 2


def test_a_lock_that_is_given_up_in_time_is_no_trouble(opened: Opened, path: Path) -> None:
    catalogue = opened()
    catalogue.write([update("a", "cat")])
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.2, lambda: other.execute("ROLLBACK"))
    timer.start()
    assert catalogue.write([update("b", "cat")]) == []
    timer.join()
    other.close()


WRITER = """
import sys
from pathlib import Path
from carrel.storage.catalogue import Catalogue, Document, Update
path, name, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
catalogue = Catalogue(path, ("title", "said"), "tests-1")
for turn in range(rounds):
    seen = turn if turn else 0
    documents = [Document(turn * 50 + n, ("", f"{name} common word{turn}")) for n in range(1, 51)]
    refused = catalogue.write([Update(name, seen, str(turn).encode(), documents=documents)])
    assert refused == [], refused
    print(turn, flush=True)
"""


def writer(path: Path, name: str, rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(rounds)], stdout=subprocess.PIPE, text=True
    )


def test_processes_that_write_at_once_lose_nothing(opened: Opened, path: Path) -> None:
    processes = [writer(path, name, 20) for name in ("ant", "bee", "cow")]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    catalogue = opened()
    assert {name: source.version for name, source in catalogue.held().sources.items()} == {
        "ant": 20,
        "bee": 20,
        "cow": 20,
    }
    for name in ("ant", "bee", "cow"):
        places = catalogue.find([Phrase((name,))], limit=5000, per_source=5000, scan=5000)
        assert sorted(place.number for place in places) == list(range(1, 1001))


def test_a_process_killed_in_the_middle_leaves_whole_steps(opened: Opened, path: Path) -> None:
    process = writer(path, "ant", 100_000)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(12)][-1]
    process.send_signal(signal.SIGKILL)
    process.wait()
    acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
    process.stdout.close()
    catalogue = opened()
    steps = catalogue.held().sources["ant"].version
    assert steps >= acknowledged + 1
    places = catalogue.find([Phrase(("ant",))], limit=10**6, per_source=10**6, scan=10**6)
    assert sorted(place.number for place in places) == list(range(1, steps * 50 + 1))


FORKER = """
import os, sys
from pathlib import Path
from carrel.storage.catalogue import Catalogue, Document, Phrase, Update
catalogue = Catalogue(Path(sys.argv[1]), ("title", "said"), "tests-1")
catalogue.write([Update("a", 0, b"1", documents=[Document(1, ("", "cat"))])])
found = lambda: [tuple(place) for place in catalogue.find([Phrase(("cat",))])]
before = found()
child = os.fork()
if child == 0:
    os._exit(0 if found() == before == [("a", 1)] else 1)
assert os.waitpid(child, 0)[1] == 0
assert found() == before
catalogue.write([Update("b", 0, b"1", documents=[Document(1, ("", "cat"))])])
print(sorted(found()))
"""


def test_a_forked_process_opens_its_own_connection(path: Path) -> None:
    # In a program of its own: whoever runs the tests has threads, and a fork of those may find any lock held.
    done = subprocess.run([sys.executable, "-c", FORKER, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[('a', 1), ('b', 1)]\n", "")
