"""What is remembered of POSTs with an Idempotency-Key ends: after a day, beyond a size, and with its session."""

from __future__ import annotations

import json
import time

import httpx

from carrel.server.once import DAY, LOG, Answer, Answers
from carrel.storage.memory import MemoryStore
from tests.server.conftest import NewServer
from tests.server.serving_process import executed, ready


def an_answer(name: str, *, session_id: str = "s", size: int = 10, age: float = 0.0) -> Answer:
    return Answer(name, session_id, "hash", 200, b"x" * size, time.time() - age)


async def lines(store: MemoryStore) -> list[bytes]:
    return [line async for block in store.read(LOG) for line in block.records]


async def test_an_answer_ends_after_a_day_in_memory_and_on_disk() -> None:
    store = MemoryStore()
    answers = Answers(store)
    await answers.keep(an_answer("old", age=DAY - 1))
    await answers.keep(an_answer("new"))
    assert answers.get("old") is not None
    for line in await lines(store):
        entry = json.loads(line)
        entry["at"] -= 2
        await store.append("aged.jsonl", [json.dumps(entry).encode()])
    aged = [line async for block in store.read("aged.jsonl") for line in block.records]
    await store.delete(LOG)
    await store.append(LOG, aged)
    again = Answers(store)
    await again.open({"s"})
    assert (again.get("old"), again.get("new") is not None) == (None, True)
    assert len(await lines(store)) == 1


async def test_answers_that_are_too_old_are_deleted_while_the_server_runs() -> None:
    store = MemoryStore()
    answers = Answers(store)
    await answers.keep(an_answer("new"))
    await answers.keep(an_answer("old", age=DAY + 1))
    assert answers.get("old") is None
    await answers.tidy({"s"})
    assert [json.loads(line)["name"] for line in await lines(store)] == ["new"]


async def test_all_answers_together_have_a_size() -> None:
    store = MemoryStore()
    answers = Answers(store, most=100_000)
    for number in range(100):
        await answers.keep(an_answer(str(number), size=10_000))
        assert sum(map(len, await lines(store))) <= 220_000
    assert answers.get("99") is not None
    assert answers.get("0") is None
    kept = [number for number in range(100) if answers.get(str(number)) is not None]
    assert kept == list(range(100 - len(kept), 100))
    assert 5 <= len(kept) <= 10
    again = Answers(store, most=100_000)
    await again.open({"s"})
    assert [number for number in range(100) if again.get(str(number)) is not None] == kept


async def test_answers_are_deleted_with_their_session() -> None:
    store = MemoryStore()
    answers = Answers(store, most=10_000)
    await answers.keep(an_answer("dropped already", session_id="a", size=6_000))
    await answers.keep(an_answer("mine", session_id="a"))
    await answers.keep(an_answer("another's", session_id="b", size=6_000))
    await answers.tidy({"b"})
    assert answers.get("mine") is None
    assert [json.loads(line)["name"] for line in await lines(store)] == ["another's"]


def test_retention_leaves_no_output(new_server: NewServer) -> None:
    """Neither on the disk nor for one who sends the same request again."""
    server = new_server()

    def asked(client: httpx.Client, path: str, body: object, key: str) -> httpx.Response:
        return client.post(path, json=body, headers={"Idempotency-Key": key, "Prefer": "wait=55"})

    with server.client() as client:
        session = asked(client, "/sessions", {}, "made").json()["session_id"]
        at = f"/sessions/{session}"
        bodies = {f"{at}/exec": {"command": "echo SECRETWORD"}, f"{at}/run": {"code": "1"}}
        for path, body in bodies.items():
            assert asked(client, path, body, "k").status_code == 200
        kept = ready(client)
        client.delete(f"/sessions/{session}")
    server.stop()
    log = server.data / "server" / "answers.jsonl"
    assert session in log.read_text()
    server._words[:] = ["--keep", "0"]
    server.start()
    with server.client() as client:
        for path, body in bodies.items():
            assert asked(client, path, body, "k").status_code == 404
        again = asked(client, "/sessions", {}, "made")
        assert "idempotent-replayed" not in again.headers
        assert client.get(f"/sessions/{kept}").status_code == 404, "it ended with the server, so it is forgotten too"
    server.stop()
    left = [path for path in server.data.rglob("*") if path.is_file() and b"SECRETWORD" in path.read_bytes()]
    assert left == []


def test_many_large_answers_take_little_memory(new_server: NewServer) -> None:
    server = new_server()

    def resident() -> int:
        with open(f"/proc/{server.pid}/statm") as pages:
            return int(pages.read().split()[1]) * 4096

    with server.client() as client:
        session = ready(client)
        executed(client, session, "seq 100000")
        before = resident()
        for number in range(90):
            headers = {"Idempotency-Key": str(number), "Prefer": "wait=55"}
            body = {"command": "head -c 700000 /dev/zero | tr '\\0' x"}
            assert client.post(f"/sessions/{session}/exec", json=body, headers=headers).json()["exit_code"] == 0
        assert resident() - before < 80 * 1024 * 1024
        assert (server.data / "server" / "answers.jsonl").stat().st_size < 40 * 1024 * 1024
