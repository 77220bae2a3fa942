"""POSTs with an Idempotency-Key: done once, and forgotten after a day, beyond a size, and with their session."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from carrel.errors import StorageUnavailable
from carrel.server.answers import ANSWERS, MAX_ANSWER_AGE, AnswerStore, KeptAnswer
from carrel.server.app import create_app
from carrel.server.auth import ApiKeys
from carrel.server.session_manager import SessionManager
from carrel.server.settings import ServerSettings
from carrel.session import FileStorage
from carrel.storage.base import Expected, Guard, Stamp
from carrel.storage.memory import MemoryStore
from carrel.tasks.dataset import Datasets
from carrel.wire.requests import CreateSession
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


class BrokenStore(MemoryStore):
    """A store that cannot be reached while `is_broken`."""

    is_broken = False

    async def put(self, key: str, data: bytes, *, expect: Expected = None, guard: Guard | None = None) -> Stamp | None:
        if self.is_broken:
            raise StorageUnavailable("the store does not answer")
        return await super().put(key, data, expect=expect, guard=guard)


async def test_an_answer_that_cannot_be_kept_is_given_to_a_repeat(tmp_path: Path) -> None:
    storage, store = FileStorage(tmp_path / "store"), BrokenStore()
    settings = ServerSettings(cache=tmp_path / "cache", sandbox="off")
    manager, keys = SessionManager(storage, Datasets(None), settings), ApiKeys(storage.store)
    manager.answers = AnswerStore(store)
    await manager.start()
    try:
        await manager.create("ann", CreateSession(session_id="s"))
        await manager.wait_ready("ann", "s", 30)
        headers = {"Authorization": f"Bearer {await keys.add('ann')}", "Idempotency-Key": "k"}
        transport = httpx.ASGITransport(create_app(manager, keys), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/api/v1", headers=headers) as client:
            code = {"code": "n = globals().get('n', 0) + 1; n"}
            store.is_broken = True
            for _ in range(2):
                refused = await client.post("/sessions/s/run", json=code)
                assert (refused.status_code, refused.json()["code"]) == (503, "StorageUnavailable")
            store.is_broken = False
            answer = await client.post("/sessions/s/run", json=code)
            assert (answer.status_code, answer.json()["value"]) == (200, 1)
    finally:
        await manager.shutdown()


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
