"""Artifacts in every store: any data under any valid name are loaded as they were saved."""

import asyncio
import json
import math
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.conversation.messages import user_text_message
from carrel.errors import ArtifactNameRefused, ArtifactNotFoundError, ArtifactReadError, ArtifactWriteError
from carrel.library.artifact_format import (
    key_to_name,
    name_to_key,
    record_for_stamp,
    record_key,
    validate_artifact_name,
)
from carrel.library.artifacts import ArtifactStore, ChunkedUploads
from carrel.session import RedisStorage
from carrel.storage.base import Stamp
from carrel.storage.files.store import FileStore
from carrel.storage.memory import MemoryStore
from tests.support.lazy_module import LazyModule
from tests.support.real_redis import RealRedis
from tests.support.stores import Backend

redis = LazyModule("redis")


def artifacts(backend: Backend, **settings: Any) -> ArtifactStore:
    return ArtifactStore(backend.open(), **settings)


DATA: list[Any] = [
    "",
    "text",
    "ünï\r\n\tcode 🙂 \0",
    "lone \ud800 half",
    '{"looks": "like JSON"}',
    "null",
    b"",
    b"\x00\xff\xfe",
    b"looks like text",
    bytearray(b"bytes too"),
    0,
    -1,
    10**40,
    1.5,
    -0.0,
    math.inf,
    True,
    False,
    None,
    [],
    {},
    [1, "a", None, {"b": [True, {"c": 1e-300}]}],
    {"": {"deep": [[[[]]]]}},
    "x" * 3_000_000,
]


@pytest.mark.parametrize("name", ["plain", "with.json", "with.txt", "with.png"])
async def test_data_are_loaded_as_they_were_saved(backend: Backend, name: str) -> None:
    for data in DATA:
        await artifacts(backend).save(name, data)
        back = await artifacts(backend).load(name)
        assert back == data, data
        assert type(back) is (bytes if isinstance(data, bytearray) else type(data)), data
    await artifacts(backend).save(name, math.nan)
    assert math.isnan(await artifacts(backend).load(name))


UNUSUAL_NAMES = [
    "a b.txt",
    "ünï/日本/🙂.json",
    "deep/er/and/deeper/x",
    ".hidden",
    "%2e",
    ".a/.b",
    "..a",
    "a..",
    "%",
    "-",
    "~",
    "'\"",
    "a:b?*[x]",
    "x.json",
    "x.json~/y",
    "name.json/y",
    "name",
    "CON",
    "n" * 240,
]


async def test_unusual_names(backend: Backend) -> None:
    kept = artifacts(backend)
    for name in UNUSUAL_NAMES:
        await kept.save(name, name, description=f"about {name}")
    assert sorted(found["name"] for found in await artifacts(backend).list()) == sorted(UNUSUAL_NAMES)
    for name in UNUSUAL_NAMES:
        assert await artifacts(backend).load(name) == name
        assert ((await artifacts(backend).get(name)) or {})["description"] == f"about {name}"
    for name in UNUSUAL_NAMES:
        await kept.delete(name)
    assert await artifacts(backend).list() == []
    assert await backend.open().list("library/artifacts") == []


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "a\\b", "a\nb", "a\0b", "\x7f", "a/./b", "\ud800"],
)
async def test_names_that_are_not_relative_paths_are_refused(backend: Backend, name: str) -> None:
    await is_refused_by_every_method(backend, name)


@pytest.mark.parametrize("name", ["a\x85b", "a\x9b31m", "txt.\u202egnp", "a\u2028b", "a\u2029b", "\u2066a"])
async def test_names_that_a_terminal_shows_differently_are_refused(backend: Backend, name: str) -> None:
    await is_refused_by_every_method(backend, name)


async def test_names_that_are_too_long_or_not_str_are_refused(backend: Backend) -> None:
    for name in ("n" * 241, "a/" * 500 + "x", None, 5):
        await is_refused_by_every_method(backend, name)


async def is_refused_by_every_method(backend: Backend, name: Any) -> None:
    kept = artifacts(backend)
    for method in (
        lambda: kept.save(name, "x"),
        lambda: kept.load(name),
        lambda: kept.get(name),
        lambda: kept.exists(name),
    ):
        with pytest.raises(ArtifactNameRefused):
            await method()
    with pytest.raises(ValueError, match="name"):
        await kept.delete(name)
    assert await backend.open().list() == []


@given(name=st.text(alphabet="ab.%2e5~/json", min_size=1, max_size=12))
def test_keys_are_converted_back_to_names(name: str) -> None:
    try:
        validate_artifact_name(name)
    except ArtifactNameRefused:
        return
    assert key_to_name(name_to_key(name)) == name
    assert not any(part.startswith(".") for part in [*name_to_key(name).split("/"), *record_key(name).split("/")])


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({1, 2}, "data is a set"),
        ({"a": [1, object]}, r"data\['a'\]\[1\] is a type"),
        ({1: 2}, "has the key 1"),
        ([1j], r"data\[0\] is a complex"),
        ([10**5000], "not JSON data"),
    ],
)
async def test_data_that_could_not_be_loaded_are_refused(backend: Backend, data: Any, where: str) -> None:
    kept = artifacts(backend)
    await kept.save("x", "before")
    with pytest.raises(ArtifactWriteError, match=where):
        await kept.save("x", data)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ArtifactWriteError, match="contains itself"):
        await kept.save("x", endless)
    assert await kept.load("x") == "before"


async def test_entries(backend: Backend) -> None:
    kept = artifacts(backend)
    first = await kept.save("reports/a.md", "# A", description="The report", metadata={"run": 7, "tags": ["x"]})
    assert first["name"] == "reports/a.md"
    assert first["path"] == "artifacts/reports/a.md"
    assert (first["description"], first["metadata"], first["size"]) == ("The report", {"run": 7, "tags": ["x"]}, 3)
    assert first["created_at"].endswith("+00:00")
    assert await artifacts(backend).list() == [first]
    assert await artifacts(backend).get("reports/a.md") == first
    assert await kept.exists("reports/a.md")
    second = await kept.save("reports/a.md", b"bytes")
    assert second["created_at"] == first["created_at"]
    assert second["updated_at"] >= first["updated_at"]
    assert (second["description"], second["metadata"], second["kind"]) == ("", {}, "bytes")
    assert await kept.get("missing") is None
    assert not await kept.exists("missing")
    for wrong in ("text", 5, {"a": {1}}, {1: "a"}):
        with pytest.raises(ArtifactWriteError, match="metadata"):
            await kept.save("x", "y", metadata=wrong)  # type: ignore[arg-type]


async def test_a_missing_artifact_is_an_error_with_similar_names(backend: Backend) -> None:
    kept = artifacts(backend)
    await kept.save("report.md", "x")
    with pytest.raises(ArtifactNotFoundError, match=r"did you mean report\.md"):
        await kept.load("reprt.md")
    with pytest.raises(KeyError):
        await kept.load("reports")
    with pytest.raises(FileNotFoundError):
        await kept.load("x")
    await kept.delete("missing")


async def test_a_name_is_either_an_artifact_or_a_folder(backend: Backend) -> None:
    kept = artifacts(backend)
    await kept.save("a", 1)
    await kept.save("b/c", 2)
    with pytest.raises(ArtifactWriteError, match="a is an artifact"):
        await kept.save("a/x", 3)
    with pytest.raises(ArtifactWriteError, match="below b/"):
        await kept.save("b", 4)
    await kept.delete("b")
    assert await kept.load("b/c") == 2
    assert await kept.load("a") == 1


async def test_files_that_were_written_or_edited_by_hand(backend: Backend) -> None:
    store, kept = backend.open(), artifacts(backend)
    await store.put("artifacts/data.json", b'{"a": 1}')
    await store.put("artifacts/odd.json", b"{not json")
    await store.put("artifacts/notes.txt", "hällo".encode())
    await store.put("artifacts/pic.png", b"\x89PNG\r\n\x00\xff")
    assert await kept.load("data.json") == {"a": 1}
    assert await kept.load("odd.json") == "{not json"
    assert await kept.load("notes.txt") == "hällo"
    assert await kept.load("pic.png") == b"\x89PNG\r\n\x00\xff"
    assert [found["name"] for found in await kept.list()] == ["data.json", "notes.txt", "odd.json", "pic.png"]
    assert ((await kept.get("notes.txt")) or {})["created_at"]
    await kept.save("settings", {"a": 1}, description="mine")
    await store.put("artifacts/settings", b'{"a": 2}')
    assert await kept.load("settings") == {"a": 2}
    assert ((await kept.get("settings")) or {})["description"] == "mine"
    await store.put("artifacts/settings", b"no json any more")
    assert await kept.load("settings") == "no json any more"
    await kept.save("text", "{}")
    await store.put("artifacts/text", b"[1]")
    assert await kept.load("text") == "[1]"
    await store.put("library/artifacts/text.json", b"{damaged")
    assert await kept.load("text") == "[1]"


async def test_concurrent_saves_leave_one_complete_artifact(backend: Backend) -> None:
    datas: list[Any] = (
        [f"text {n}" * 10_000 for n in range(4)] + [[n] * 5000 for n in range(4)] + [b"\xff" * 40_000] * 2
    )
    kept = [artifacts(backend) for _ in datas]

    async def read() -> None:
        for _ in range(30):
            if await kept[0].exists("x"):
                assert await kept[0].load("x") in datas
            await asyncio.sleep(0)

    saving = [one.save("x", data, description=str(n)) for n, (one, data) in enumerate(zip(kept, datas, strict=True))]
    await asyncio.gather(*saving, read(), read())
    found = await artifacts(backend).load("x")
    description = ((await artifacts(backend).get("x")) or {})["description"]
    assert datas[int(description)] == found
    assert type(datas[int(description)]) is type(found)


async def test_loading_during_the_first_save_finds_nothing_or_all(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, other = artifacts(backend), artifacts(backend)
    loaded: list[Any] = []
    put = other._store.put

    async def put_and_load(*args: Any, **kwargs: Any) -> bool:
        await put(*args, **kwargs)
        loaded.append(await kept.load("x") if await kept.exists("x") else None)
        return True

    monkeypatch.setattr(other._store, "put", put_and_load)
    await other.save("x", [1, 2])
    assert loaded == [None, [1, 2]]


def test_two_versions_with_the_same_size_and_time_differ_by_version() -> None:
    first = {"size": 1, "description": "first", "stamp": [1, 5.0, 7]}
    second = {"size": 1, "description": "second", "before": first}
    assert record_for_stamp(second, Stamp(1, 5.0, 8)) is second
    assert record_for_stamp(second, Stamp(1, 5.0, 7)) is first
    longer = {"size": 2, "description": "second", "before": first}
    assert record_for_stamp(longer, Stamp(1, 5.0, 8)) is first
    assert record_for_stamp(longer, Stamp(2, 5.0, 9)) is longer


@pytest.mark.parametrize("which", ["record", "data"])
async def test_an_interrupted_save_leaves_the_old_or_the_new_artifact(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    kept, other = artifacts(backend), artifacts(backend)
    await kept.save("x", "[1]", description="text", metadata={"n": 1})
    put = other._store.put

    async def put_and_fail(key: str, *args: Any, **kwargs: Any) -> bool:
        await put(key, *args, **kwargs)
        if (key == "artifacts/x") is (which == "data"):
            raise ConnectionResetError
        return True

    monkeypatch.setattr(other._store, "put", put_and_fail)
    with pytest.raises(ConnectionResetError):
        await other.save("x", [2], description="data")
    monkeypatch.undo()
    expected = ("[1]", "text", "text", {"n": 1}) if which == "record" else ([2], "data", "json", {})

    async def current() -> tuple[Any, ...]:
        one, (listed,) = await kept.get("x"), await kept.list()
        assert one == listed
        return await kept.load("x"), listed["description"], listed["kind"], listed["metadata"]

    assert await current() == expected
    await kept.save("x", b"3", description="bytes")
    assert await current() == (b"3", "bytes", "bytes", {})


async def test_search_finds_by_name_and_description(backend: Backend) -> None:
    kept = artifacts(backend)
    await kept.save("a.csv", "x", description="sales per region")
    await kept.save("weather.json", [], description="from the station")
    assert (await kept.search("sales"))[0]["name"] == "a.csv"
    assert (await kept.search("weather"))[0]["name"] == "weather.json"


# --- large ones ------------------------------------------------------------------------------------------------------


async def test_a_file_is_saved_in_pieces(backend: Backend, tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    (tmp_path / "big.bin").write_bytes(content)
    kept = artifacts(backend)
    saved = await kept.save("big.bin", tmp_path / "big.bin", description="large")
    assert (saved["size"], saved["kind"], saved["description"]) == (len(content), "bytes", "large")
    assert await kept.load("big.bin") == content
    assert b"".join([piece async for piece in kept.pieces("big.bin")]) == content
    assert b"".join([piece async for piece in kept.pieces("big.bin", 5_000_000)]) == content[5_000_000:]
    with pytest.raises(ArtifactWriteError, match="cannot be read"):
        await kept.save("big.bin", tmp_path / "missing")
    with pytest.raises(ArtifactNotFoundError):
        [piece async for piece in kept.pieces("missing")]
    assert await kept.load("big.bin") == content


@pytest.mark.promise("memory stays flat")
async def test_a_large_artifact_is_never_in_memory_as_a_whole(backend: Backend) -> None:
    async def many() -> AsyncIterator[bytes]:
        for _ in range(60):
            yield b"x" * 1_000_000

    kept = artifacts(backend)
    tracemalloc.start()
    try:
        await kept.save("big", many())
        assert sum([len(piece) async for piece in kept.pieces("big")]) == 60_000_000
        assert tracemalloc.get_traced_memory()[1] < 15_000_000
    finally:
        tracemalloc.stop()


async def test_an_upload_is_saved_at_its_end_or_not_at_all(backend: Backend) -> None:
    kept = artifacts(backend)
    call = kept.handle
    number = await call("artifacts.begin_upload", ["x"], {"kind": "text", "description": "d"})
    for piece in (b"one ", b"two ", b"drei"):
        await call("artifacts.upload", [number, piece], {})
    assert not await kept.exists("x")
    assert (await call("artifacts.end_upload", [number], {}))["description"] == "d"
    assert await kept.load("x") == "one two drei"
    dropped = await call("artifacts.begin_upload", ["x"], {"kind": "bytes"})
    await call("artifacts.upload", [dropped, b"half"], {})
    await call("artifacts.drop_upload", [dropped], {})
    with pytest.raises(ArtifactWriteError, match="its next piece took too long"):
        await call("artifacts.upload", [dropped, b"more"], {})
    left = await call("artifacts.begin_upload", ["x"], {"kind": "bytes"})
    await call("artifacts.upload", [left, b"half"], {})
    await kept.close()
    assert await kept.load("x") == "one two drei"
    for wrong in ({"kind": "pickle"}, {"kind": ["text"]}):
        with pytest.raises((ArtifactWriteError, TypeError)):
            await call("artifacts.begin_upload", ["x"], wrong)
    with pytest.raises(ArtifactNameRefused):
        await call("artifacts.begin_upload", ["../x"], {"kind": "text"})


async def test_callers_that_wait_for_a_cancelled_upload_get_an_error() -> None:
    store = MemoryStore()
    kept = ArtifactStore(store)
    for waiting in ("upload", "end_upload"):
        lock = await store.lock("library/artifacts/x")
        assert lock is not None
        number = await kept.handle("artifacts.begin_upload", ["x"], {"kind": "bytes"})
        await kept.handle("artifacts.upload", [number, b"half"], {})
        if waiting == "upload":
            others = [asyncio.ensure_future(kept.handle("artifacts.upload", [number, b"more"], {})) for _ in range(3)]
        else:
            others = [asyncio.ensure_future(kept.handle("artifacts.end_upload", [number], {}))]
        await asyncio.sleep(0)
        await kept.close()
        with pytest.raises(ArtifactWriteError, match="its upload was cancelled"):
            await others[-1]
        await asyncio.wait(others)
        await lock.release()
    assert not await kept.exists("x")


async def test_an_upload_without_further_pieces_ends(tmp_path: Path) -> None:
    kept = ArtifactStore(FileStore(tmp_path))
    uploads = ChunkedUploads(kept._save_pieces, idle=0.05)
    number = uploads.begin(name="x", kind="text")
    await uploads.add(number, b"half")
    async with asyncio.timeout(30):
        while uploads._open:  # noqa: ASYNC110 -- the upload's own clock ends it
            await asyncio.sleep(0.01)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "half" in path.read_text()] == []
    with pytest.raises(ArtifactWriteError):
        await uploads.add(number, b"more")


async def test_methods_that_code_cannot_call(backend: Backend) -> None:
    kept = artifacts(backend)
    for verb in ("close", "_keep", "handle", "pieces", ""):
        with pytest.raises(ArtifactNotFoundError):
            await kept.handle(f"artifacts.{verb}", ["x"], {})
    with pytest.raises(ArtifactWriteError):
        await kept.handle("artifacts.keep", ["x", "text", "bytes"], {})


async def test_bytes_that_are_not_of_the_kind_they_were_saved_as(backend: Backend) -> None:
    kept = artifacts(backend)
    for kind in ("json", "text"):
        await kept.handle("artifacts.keep", ["forged", b"\xff\xfe", kind], {})
        for verb in (kept.load("forged"), kept.handle("artifacts.fetch", ["forged"], {})):
            with pytest.raises(ArtifactReadError, match=f"forged was saved as {kind}"):
                await verb
    assert [one["name"] for one in await kept.list()] == ["forged"]


async def test_what_lists_show_is_bounded(backend: Backend) -> None:
    kept = artifacts(backend)
    for about in ({"metadata": {"much": "x" * 100_000}}, {"description": "x" * 100_000}):
        with pytest.raises(ArtifactWriteError, match="description and metadata"):
            await kept.save("a", "x", **about)
    assert await kept.list() == []
    await kept.save("words.txt", "x", "A list of words")
    assert [one["name"] for one in await kept.search("words " * 200_000)] == ["words.txt"]


async def test_links_out_of_the_base_and_invalid_names_are_not_artifacts(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("secret")
    kept = ArtifactStore(FileStore(tmp_path / "base"))
    await kept.save("own.txt", "mine")
    folder = tmp_path / "base" / "artifacts"
    (folder / "notes.txt").symlink_to(tmp_path / "private")
    (folder / "same.txt").symlink_to("own.txt")
    (folder / "gnp.\u202etxt").write_text("x")
    assert [one["name"] for one in await kept.list()] == ["own.txt", "same.txt"]
    assert await kept.load("same.txt") == "mine"
    assert not await kept.exists("notes.txt")
    with pytest.raises(ArtifactReadError, match="link") as refused:
        await kept.load("notes.txt")
    assert str(tmp_path) not in str(refused.value)


async def test_artifacts_are_readable_files(tmp_path: Path) -> None:
    kept = ArtifactStore(FileStore(tmp_path))
    await kept.save("a/report.md", "# Hello\n")
    await kept.save("data.json", {"b": [1, 2]})
    assert (tmp_path / "artifacts" / "a" / "report.md").read_text() == "# Hello\n"
    assert json.loads((tmp_path / "artifacts" / "data.json").read_text()) == {"b": [1, 2]}
    assert [path.name for path in (tmp_path / "artifacts").iterdir()].count("data.json") == 1


async def test_on_a_full_server_what_fills_it_can_be_deleted(start_redis: Callable[..., RealRedis]) -> None:
    server = start_redis(maxmemory="10mb", maxmemory_policy="noeviction")
    async with RedisStorage(server.url) as storage:
        artifacts, sessions = storage.get_artifact_store(), storage.get_session_store()
        await sessions.create_session("Stars", session_id="stars")
        await sessions.append_message("stars", user_text_message("hello"))
        saved: list[str] = []

        async def fill() -> None:
            while True:
                await artifacts.save(f"a{len(saved)}", b"x" * 200_000)
                saved.append(f"a{len(saved)}")

        with pytest.raises(ArtifactWriteError, match="is full"):
            await fill()
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "1mb")
        assert saved
        await artifacts.delete(saved[0])
        assert not await artifacts.exists(saved[0])
        await sessions.delete_session("stars")
        assert await sessions.list_sessions() == []
