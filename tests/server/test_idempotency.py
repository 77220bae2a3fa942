"""POSTs with an Idempotency-Key: done once, and forgotten after a day, beyond a size, and with their session."""

from __future__ import annotations

import time

import httpx
import pytest

from carrel.server.records import ANSWERS, MAX_ANSWER_AGE, AnswerStore, KeptAnswer
from carrel.storage.base import Stamp
from carrel.storage.memory import MemoryStore
from tests.server.conftest import NewServer
from tests.support.server_process import create_session, run_command


def an_answer(size: int = 10, age: float = 0.0) -> KeptAnswer:
    return KeptAnswer("digest", 200, b"x" * size, time.time() - age)


class AgedStore(MemoryStore):
    """A store in which some objects were written earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.ages: dict[str, float] = {}

    async def scan(self, prefix: str, names: object = ()) -> dict[str, Stamp]:
        found = await super().scan(prefix)
        return {key: stamp._replace(modified=time.time() - self.ages.get(key, 0.0)) for key, stamp in found.items()}


async def test_an_answer_ends_after_a_day() -> None:
    store = AgedStore()
    answers = AnswerStore(store)
    await answers.keep("s", "old", an_answer(age=MAX_ANSWER_AGE + 1))
    await answers.keep("s", "new", an_answer())
    assert await answers.get("s", "old") is None
    assert await answers.get("s", "new") is not None
    store.ages[f"{ANSWERS}/s/old"] = MAX_ANSWER_AGE + 1
    await answers.sweep()
    assert await store.list(ANSWERS) == [f"{ANSWERS}/s/new"]


async def test_all_answers_together_have_a_maximal_size() -> None:
    store = AgedStore()
    answers = AnswerStore(store, max_bytes=100_000)
    for number in range(100):
        await answers.keep("s", str(number), an_answer(size=10_000))
        store.ages = {f"{ANSWERS}/s/{other}": number - other for other in range(number + 1)}
        sizes = [stamp.size for stamp in (await store.scan(ANSWERS)).values()]
        assert sum(sizes) <= 150_000
    await answers.sweep()
    left = {int(key.rpartition("/")[2]) for key in await store.list(ANSWERS)}
    assert left == set(range(100 - len(left), 100)), "the newest are left"
    assert 5 <= len(left) <= 10


async def test_a_damaged_answer_is_as_if_it_were_not_there(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    await store.put(f"{ANSWERS}/s/a", b'{"content": 1}')
    assert await AnswerStore(store).get("s", "a") is None
    assert "damaged" in caplog.text


def test_retention_leaves_no_output(new_server: NewServer) -> None:
    """Neither on the disk nor for a client that repeats the request."""
    server = new_server()

    def post(client: httpx.Client, path: str, body: object, key: str) -> httpx.Response:
        return client.post(path, json=body, headers={"Idempotency-Key": key, "Prefer": "wait=55"})

    with server.client() as client:
        session = post(client, "/sessions", {}, "created").json()["session_id"]
        bodies = {
            f"/sessions/{session}/exec": {"command": "echo SECRETWORD"},
            f"/sessions/{session}/run": {"code": "'SECRETWORD'"},
        }
        for path, body in bodies.items():
            assert post(client, path, body, "k").status_code == 200
        client.delete(f"/sessions/{session}")
    server.stop()
    assert len(list((server.data / "server" / "answers" / session).iterdir())) == 3
    server.options[:] = ["--retention", "0d"]
    server.start()
    with server.client() as client:
        until = time.monotonic() + 60
        while client.get(f"/sessions/{session}").status_code != 404:
            assert time.monotonic() < until
            time.sleep(0.02)
        for path, body in bodies.items():
            assert post(client, path, body, "k").status_code == 404
        assert "idempotent-replayed" not in post(client, "/sessions", {}, "created").headers
    server.stop()
    left = [path for path in server.data.rglob("*") if path.is_file() and b"SECRETWORD" in path.read_bytes()]
    assert left == []


@pytest.mark.parametrize("requests", [1000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_many_large_answers_take_little_memory(new_server: NewServer, requests: int) -> None:
    server = new_server()

    def resident() -> int:
        with open(f"/proc/{server.pid}/statm") as pages:
            return int(pages.read().split()[1]) * 4096

    with server.client() as client:
        session = create_session(client)
        run_command(client, session, "seq 100000")
        before = resident()
        body = {"command": "head -c 100000 /dev/zero | tr '\\0' x"}
        for number in range(requests):
            headers = {"Idempotency-Key": str(number), "Prefer": "wait=55"}
            assert client.post(f"/sessions/{session}/exec", json=body, headers=headers).json()["exit_code"] == 0
        assert resident() - before < 50 * 1024 * 1024
        files = [path for path in (server.data / "server" / "answers").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 24 * 1024 * 1024
