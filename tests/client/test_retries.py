"""What is asked again after a failure, what is not, and for how long."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from carrel.client import AsyncClient, Client
from carrel.errors import (
    ConfigurationError,
    KeyNotAccepted,
    NotNow,
    RemoteError,
    ServerFailed,
    ServerUnreachable,
    TooMany,
    WaitedTooLong,
)
from carrel.wire.verification import Job
from tests.client.conftest import got
from tests.support.faulty_server import Answer, FaultyServer, ReceivedRequest, reply

NOW = "2026-01-01T00:00:00Z"
SESSION = {"session_id": "s", "status": "ready", "expires_at": NOW, "requested_at": NOW, "dataset": "", "sample_id": ""}
COMMAND = {"interaction_id": "i", "session_id": "s", "created_at": NOW, "exit_code": 0, "stdout": "out"}
JOB = {"job_id": "j", "session_id": "s", "created_at": NOW, "status": "completed"}
HEALTH = {"service": "carrel", "status": "healthy", "timestamp": NOW, "version": "1"}


@pytest.fixture(params=[Client, AsyncClient])
def client_class(request: pytest.FixtureRequest) -> Any:
    return request.param


async def send(
    client_class: Any, server: FaultyServer, what: str, *, retries: int = 4, key: str = "k", **more: Any
) -> Any:
    """`sessions.close`, with arguments, of a client of this class."""
    client = client_class(base_url=server.url, api_key=key, max_retries=retries)
    call = client
    for name in what.split("."):
        call = getattr(call, name)
    try:
        return await got(call(**more))
    finally:
        await got(client.close())


IDEMPOTENT: list[tuple[str, dict[str, Any], Any]] = [
    ("health.check", {}, HEALTH),
    ("sessions.retrieve", {"session_id": "s"}, SESSION),
    ("sessions.close", {"session_id": "s"}, {"message": "closed", "duration_seconds": 1.0}),
    ("sessions.extend", {"session_id": "s", "ttl_minutes": 5}, SESSION),
    ("sessions.write_file", {"session_id": "s", "path": "a", "data": b"x"}, {}),
    ("sessions.create", {"dataset": "d", "sample_id": "x"}, SESSION),
    ("sessions.fork", {"session_id": "s"}, SESSION),
    ("sessions.execute_command", {"session_id": "s", "command": "ls"}, COMMAND),
    ("sessions.verify.start", {"session_id": "s"}, JOB),
]
FAILURES: list[Answer] = [
    reply({"detail": "x"}, 500),
    reply({}, 502),
    reply({}, 503),
    reply({}, 504),
    reply({}, 429),
]


@pytest.mark.parametrize(
    ("what", "arguments", "answer", "failing"),
    [*((*call, None) for call in IDEMPOTENT), *((*IDEMPOTENT[-2], failing) for failing in FAILURES)],
)
async def test_repeatable_requests_are_retried(
    client_class: Any, what: str, arguments: dict[str, Any], answer: Any, failing: Answer
) -> None:
    with FaultyServer([failing, failing, reply(answer)]) as server:
        await send(client_class, server, what, **arguments)
    assert len(server.seen) == 3
    assert len({(seen.method, seen.path, seen.body) for seen in server.seen}) == 1


async def test_retries_of_a_post_have_the_same_idempotency_key(client_class: Any) -> None:
    with FaultyServer([None, None, reply(COMMAND)]) as server:
        for _ in range(2):
            await send(client_class, server, "sessions.execute_command", session_id="s", command="ls")
    keys = [seen.headers["idempotency-key"] for seen in server.seen]
    assert keys[0] == keys[1] == keys[2] != keys[3]


@pytest.mark.parametrize("failing", [None, reply({"detail": "x"}, 500), reply({}, 502), reply({}, 504)])
async def test_code_that_may_have_run_is_not_retried(client_class: Any, failing: Answer) -> None:
    with FaultyServer([failing]) as server:
        with pytest.raises((ServerUnreachable, ServerFailed)):
            await send(client_class, server, "sessions.run", session_id="s", code="1")
        with pytest.raises((ServerUnreachable, ServerFailed)):
            await send(client_class, server, "sessions.execute_command", session_id="s", command="ls", on_output=print)
    assert len(server.seen) == 2


async def test_code_that_was_not_started_is_retried(client_class: Any) -> None:
    result = b'event: result\ndata: {"value": 2}\n\n'
    with FaultyServer([reply({}, 503), reply({}, 429), (200, {"content-type": "text/event-stream"}, result)]) as server:
        assert (await send(client_class, server, "sessions.run", session_id="s", code="1 + 1")).value == 2
    assert len(server.seen) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
async def test_refusals_are_not_retried(client_class: Any, status: int) -> None:
    with FaultyServer([reply({"detail": "no"}, status)]) as server, pytest.raises(RemoteError, match="no"):
        await send(client_class, server, "sessions.retrieve", session_id="s")
    assert len(server.seen) == 1


async def test_max_retries(client_class: Any) -> None:
    for retries in (0, 2):
        with (
            FaultyServer([reply({"detail": "broken"}, 500)]) as server,
            pytest.raises(ServerFailed, match="broken"),
        ):
            await send(client_class, server, "health.check", retries=retries)
        assert len(server.seen) == retries + 1


async def test_retry_after_is_respected(client_class: Any) -> None:
    began = time.monotonic()
    with FaultyServer([reply({}, 429, retry_after="1"), reply(HEALTH)]) as server:
        await send(client_class, server, "health.check")
    assert time.monotonic() - began >= 1
    assert len(server.seen) == 2


async def test_retry_after_beyond_the_timeout_is_not_awaited(client_class: Any) -> None:
    with FaultyServer([reply({"detail": "full"}, 429, retry_after="30")]) as server:
        with pytest.raises(TooMany, match="full") as refused:
            await send(client_class, server, "health.check", timeout=25)
        with pytest.raises(TooMany):
            await send(client_class, server, "sessions.retrieve", session_id="s", timeout=25)
    assert refused.value.retry_after == 30
    assert len(server.seen) == 2


async def test_no_server(client_class: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = client_class(base_url=f"http://127.0.0.1:{port}/api/v1", api_key="secret-key", max_retries=1)
    with pytest.raises(ServerUnreachable, match=f"no answer from 127.0.0.1:{port}: .*; check base_url") as problem:
        await got(client.sessions.create(dataset="demo", sample_id="calc-1"))
    assert isinstance(problem.value, ConnectionError)
    assert "create a session of demo/calc-1" in str(problem.value)
    assert "secret-key" not in f"{problem.value!r}{client!r}{vars(client)}"
    await got(client.close())


@pytest.mark.parametrize(
    "answer",
    [
        (200, {}, b"<html>"),
        (200, {}, b"null"),
        (200, {}, b"[]"),
        (200, {}, b'{"session_id": "s"}'),
        (200, {}, b'{"session_id": 1, "status": "new", "expires_at": 3}'),
        (302, {"location": "http://127.0.0.1:9/"}, b""),
    ],
)
async def test_invalid_answers_are_errors_of_the_server(client_class: Any, answer: Answer) -> None:
    with FaultyServer([answer]) as server, pytest.raises(ServerFailed, match="get session s"):
        await send(client_class, server, "sessions.retrieve", session_id="s")
    assert len(server.seen) == 1


@pytest.mark.parametrize("what", ["sessions.list", "datasets.list", "samples.list", "health.check"])
@pytest.mark.parametrize("body", [b"7", b'{"sessions": [1]}', b'{"sessions": {}}', b'[{"x": 1}]'])
async def test_invalid_lists_are_errors_of_the_server(client_class: Any, what: str, body: bytes) -> None:
    with FaultyServer([(200, {}, body)]) as server, pytest.raises(ServerFailed):
        await send(client_class, server, what)


async def test_fields_of_a_newer_server_are_kept(client_class: Any) -> None:
    with FaultyServer([reply(SESSION | {"mood": "good"})]) as server:
        found = await send(client_class, server, "sessions.retrieve", session_id="s")
    assert found.mood == "good"
    assert found.model_dump()["mood"] == "good"


async def test_a_server_that_hangs_is_left_at_the_timeout(client_class: Any) -> None:
    over = threading.Event()

    def slow(_: ReceivedRequest) -> Answer:
        over.wait(60)
        return reply(HEALTH)

    with FaultyServer([slow]) as server:
        with pytest.raises(WaitedTooLong, match="check the health of the server") as problem:
            await send(client_class, server, "health.check", timeout=0.3)
        over.set()
    assert isinstance(problem.value, TimeoutError)


async def test_waiting_ends_at_the_timeout(client_class: Any) -> None:
    with (
        FaultyServer([reply(COMMAND | {"exit_code": None})]) as server,
        pytest.raises(WaitedTooLong, match="it goes on"),
    ):
        await send(client_class, server, "sessions.execute_command", session_id="s", command="x", timeout=1.5)
    assert [seen.method for seen in server.seen[:2]] == ["POST", "GET"]


async def test_polling_slows_down_if_the_server_does_not_hold_answers(client_class: Any) -> None:
    with FaultyServer([reply(JOB | {"status": "running"})]) as server, pytest.raises(WaitedTooLong):
        await send(client_class, server, "sessions.verify.start", session_id="s", timeout=2)
    assert len(server.seen) < 15


async def test_poll_interval(client_class: Any) -> None:
    states = [
        reply(COMMAND | {"exit_code": None}),
        reply(COMMAND | {"exit_code": None}),
        reply(COMMAND),
    ]
    began = time.monotonic()
    with FaultyServer(states) as server:
        await send(client_class, server, "sessions.execute_command", session_id="s", command="x", poll_interval=0.3)
    assert time.monotonic() - began >= 0.6
    assert len(server.seen) == 3


async def test_answers_with_only_the_fields_of_the_public_wire(client_class: Any) -> None:
    begun = {"interaction_id": "i", "status": "pending"}
    with FaultyServer([reply(begun), reply(COMMAND)]) as server:
        assert (
            await send(client_class, server, "sessions.execute_command", session_id="s", command="x")
        ).stdout == "out"
    assert [seen.path for seen in server.seen] == ["/api/v1/sessions/s/exec", "/api/v1/sessions/s/interactions/i"]
    created = {"session_id": "s", "status": "creating", "expires_at": NOW}
    with FaultyServer([reply(created), reply(SESSION | {"status": "creating"}), reply(SESSION)]) as server:
        session = await send(client_class, server, "sessions.create", dataset="d", sample_id="x")
    assert session.status == "ready"
    with FaultyServer([reply({"job_id": "j", "status": "pending", "started_at": NOW}), reply(JOB)]) as server:
        assert (await send(client_class, server, "sessions.verify.start", session_id="s")).is_finished


async def test_without_waiting_there_is_one_request(client_class: Any) -> None:
    running = COMMAND | {"exit_code": None}
    with FaultyServer([reply(running)]) as server:
        state = await send(
            client_class, server, "sessions.execute_command", session_id="s", command="x", wait_for_completion=False
        )
    assert not state.is_finished
    assert [seen.headers["prefer"] for seen in server.seen] == ["wait=0"]


async def test_progress_is_reported(client_class: Any) -> None:
    heard: list[str] = []

    def note(job: Job) -> None:
        heard.append(job.status)

    states = [reply(JOB | {"status": state}) for state in ("pending", "running", "completed")]
    with FaultyServer(states) as server:
        await send(
            client_class,
            server,
            "sessions.verify.start",
            session_id="s",
            on_progress=lambda job: heard.append(job.status),
        )
    assert heard == ["pending", "running", "completed"]


async def test_extra_headers_query_and_body_are_sent(client_class: Any) -> None:
    more: dict[str, Any] = {
        "extra_headers": {"X-A": "1", "Idempotency-Key": "mine"},
        "extra_query": {"q": "2"},
        "extra_body": {"b": 3},
    }
    with FaultyServer([reply(SESSION)]) as server:
        await send(
            client_class, server, "sessions.create", key=" key ", dataset="d", sample_id="x", ttl_minutes=7, **more
        )
    (seen,) = server.seen
    assert seen.path == "/api/v1/sessions?q=2"
    assert json.loads(seen.body) == {"dataset": "d", "sample_id": "x", "ttl_minutes": 7, "b": 3}
    assert (seen.headers["x-a"], seen.headers["idempotency-key"]) == ("1", "mine")
    assert seen.headers["authorization"] == "Bearer key"


@pytest.mark.parametrize("odd", ["a/b", "..", ".", "a b", "ä", "x?y#z", "%2e%2e", "\n"])
async def test_odd_ids_are_quoted(client_class: Any, odd: str) -> None:
    with FaultyServer([reply(SESSION)]) as server:
        await send(client_class, server, "sessions.retrieve", session_id=odd)
    parts = server.seen[0].path.split("/")
    assert len(parts) == 5
    assert parts[:4] == ["", "api", "v1", "sessions"]
    assert parts[4] not in (".", "..")
    assert httpx2.URL(f"http://x/{parts[4]}").path == f"/{odd}"


@pytest.mark.parametrize("wrong", ["", None, 3])
async def test_an_empty_id_is_refused_without_a_request(client_class: Any, wrong: Any) -> None:
    with FaultyServer([reply(SESSION)]) as server:
        for what in ("sessions.retrieve", "sessions.close", "sessions.diff", "sessions.verify.start"):
            with pytest.raises(ValueError, match="session_id: expected a name"):
                await send(client_class, server, what, session_id=wrong)
    assert server.seen == []


async def test_an_interrupted_upload_is_repeated_from_the_start(client_class: Any, tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * 10_000)
    with FaultyServer([reply({}, 503), reply({})]) as server:
        await send(client_class, server, "sessions.write_file", session_id="s", path="a/b c", data=path.read_bytes())
    assert [seen.body for seen in server.seen] == [path.read_bytes()] * 2
    assert server.seen[0].path == "/api/v1/sessions/s/files/a/b%20c"


async def test_an_incomplete_download_leaves_no_file(client_class: Any, tmp_path: Path) -> None:
    half = (200, {"content-type": "application/gzip", "content-length": "100"}, b"half")
    with FaultyServer([half]) as server, pytest.raises(ServerUnreachable):
        await send(
            client_class, server, "samples.download_to", to=tmp_path / "x", sample_id="s", dataset="d", retries=0
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["", "127.0.0.1:8765", "ftp://x/", "http://", "http://[::1", "file:///etc"])
def test_invalid_base_urls(client_class: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARREL_BASE_URL", url or "nowhere")
    with pytest.raises(ConfigurationError, match="base_url"):
        client_class(base_url=url)


@pytest.mark.parametrize("key", ["", "a\nb", "ä", "   "])
def test_an_invalid_key_is_refused_and_not_shown(client_class: Any, key: str) -> None:
    with pytest.raises(ConfigurationError, match="api_key: expected a line"):
        client_class(api_key=key)


async def test_settings_come_from_the_environment(client_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyServer([reply(HEALTH)]) as server:
        monkeypatch.setenv("CARREL_BASE_URL", server.url)
        monkeypatch.setenv("CARREL_API_KEY", "from-there")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        client = client_class()
        await got(client.health.check())
        await got(client.close())
    assert server.seen[0].headers["authorization"] == "Bearer from-there"


async def test_a_wrong_key_and_a_wrong_state(client_class: Any) -> None:
    with (
        FaultyServer([reply({"detail": "no key"}, 401)]) as server,
        pytest.raises(KeyNotAccepted, match="CARREL_API_KEY"),
    ):
        await send(client_class, server, "sessions.list")
    with (
        FaultyServer([reply({"detail": "it is closed"}, 409)]) as server,
        pytest.raises(NotNow, match="it is closed"),
    ):
        await send(client_class, server, "sessions.verify.start", session_id="s")


async def test_the_base_url_of_a_passed_http_client_is_used(client_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    http_class: Any = httpx2.Client if client_class is Client else httpx2.AsyncClient
    with FaultyServer([reply(HEALTH), reply(HEALTH)]) as server:
        http = http_class(base_url="http://elsewhere.example/root", trust_env=False)
        client = client_class(base_url=server.url, http_client=http)
        await got(client.health.check())
        assert http.base_url == "http://elsewhere.example/root/"
        await got(client.close())
        monkeypatch.setenv("CARREL_BASE_URL", "http://elsewhere.example/")
        client = client_class(http_client=http_class(base_url=server.url, trust_env=False))
        await got(client.health.check())
        await got(client.close())
    assert [seen.path for seen in server.seen] == ["/api/v1/health"] * 2


@pytest.mark.parametrize("ending", ["", "/", "/api/v1", "/api/v1/"])
async def test_the_version_of_the_api_may_be_left_out(client_class: Any, ending: str) -> None:
    with FaultyServer([reply(HEALTH)]) as server:
        client = client_class(base_url=server.url.removesuffix("/api/v1") + ending)
        await got(client.health.check())
        await got(client.close())
    assert server.seen[0].path == "/api/v1/health"
