"""Approvals over HTTP: a tool call waits until a person answers; of two answers one counts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from carrel.errors import ApprovalAnswered, ApprovalNotFound
from carrel.library.tools.approval import ApprovalRequest, Approve, Refuse
from carrel.server.approvals import ApprovalQueue
from carrel.storage.memory import MemoryStore
from carrel.wire.answers import ApprovalRecord
from carrel.wire.requests import AnswerApproval
from tests.server.conftest import NewServer
from tests.support.server_process import ServerProcess, create_session, logged_in

ECHO = """
name: echo
command: echo
approval: ask
schema:
  positional:
    - {name: text, type: string, required: true}
"""
CALL = {"code": "tools.echo(text='hello')", "timeout": 60}


@pytest.fixture
def server(new_server: NewServer, tmp_path: Path) -> ServerProcess:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "echo.yaml").write_text(ECHO)
    return new_server("--tools", tmp_path / "tools")


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


class Call:
    """Code in a session that calls the tool, in a thread of its own."""

    def __init__(self, server: ServerProcess, session: str) -> None:
        self._server, self._session = server, session
        self.result: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._server.client() as client:
            try:
                self.result = client.post(f"/sessions/{self._session}/run", json=CALL).json()
            except httpx.TransportError:
                self.result = {"error_type": "TransportError"}

    def wait(self) -> dict[str, Any]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.result


def pending(client: httpx.Client, number: int = 1) -> list[dict[str, Any]]:
    """Wait until so many approvals are pending, and return them."""
    until = time.monotonic() + 60
    while True:
        approvals: list[dict[str, Any]] = client.get("/approvals?status=pending").json()["approvals"]
        if len(approvals) == number:
            return approvals
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_call_is_approved_changed_or_refused(server: ServerProcess, client: httpx.Client) -> None:
    session = create_session(client)
    answers: list[tuple[dict[str, Any], str, str]] = [
        ({"decision": "approve"}, "approved", "hello"),
        ({"decision": "approve", "arguments": {"text": "changed"}}, "approved", "changed"),
        ({"decision": "refuse", "reason": "not today"}, "refused", "not today"),
    ]
    for body, status, result in answers:
        call = Call(server, session)
        [approval] = pending(client)
        assert (approval["session_id"], approval["tool"], approval["arguments"]) == (session, "echo", {"text": "hello"})
        answered = client.post(f"/approvals/{approval['id']}", json=body)
        assert (answered.status_code, answered.json()["status"]) == (200, status)
        assert answered.json()["answered_by"] == "local"
        again = client.post(f"/approvals/{approval['id']}", json={"decision": "approve"})
        assert (again.status_code, again.json()["code"]) == (409, "ApprovalAnswered")
        result_of_call = call.wait()
        assert result in (result_of_call["value"] if status == "approved" else result_of_call["error"]), result_of_call
    assert [each["status"] for each in client.get("/approvals").json()["approvals"]] == [each[1] for each in answers]
    assert len(client.get("/approvals?status=refused").json()["approvals"]) == 1
    events = client.get(f"/sessions/{session}/events?follow=0").text
    assert events.count("event: approval") == 6


def test_an_approval_for_which_no_call_waits_any_more_is_expired(server: ServerProcess, client: httpx.Client) -> None:
    session = create_session(client)
    call = Call(server, session)
    [approval] = pending(client)
    client.delete(f"/sessions/{session}")
    call.wait()
    pending(client, 0)
    assert client.get("/approvals").json()["approvals"][0]["status"] == "expired"
    assert client.post(f"/approvals/{approval['id']}", json={"decision": "approve"}).status_code == 409


def test_who_may_answer(server: ServerProcess, client: httpx.Client) -> None:
    session = create_session(client)
    call = Call(server, session)
    [approval] = pending(client)
    body = {"decision": "approve"}
    with server.client(server.add_key("other")) as other:
        assert other.get("/approvals").json()["approvals"] == []
        assert other.post(f"/approvals/{approval['id']}", json=body).status_code == 404
    for options in (("--scope", "agent"), ("--scope", "read"), ("--session", session)):
        with server.client(server.add_key("local", *options)) as limited:
            assert limited.post(f"/approvals/{approval['id']}", json=body).status_code == 403, options
    assert client.post(f"/approvals/{approval['id']}", json=body).status_code == 200
    assert "hello" in call.wait()["value"]
    for unknown in ("a", f"{session}.{'0' * 32}", "..%2f..", f"../{'0' * 32}"):
        assert client.post(f"/approvals/{unknown}", json=body).status_code == 404


def test_an_approval_is_answered_in_the_web_page(server: ServerProcess, client: httpx.Client) -> None:
    call = Call(server, create_session(client))
    [approval] = pending(client)
    with logged_in(server, server.key) as page:
        assert "1 call waits" in page.get("/").text
        waiting = page.get("/waiting").text
        assert "hello" in waiting
        assert "Approve" in waiting
        assert page.post(f"/waiting/{approval['id']}", data={"decision": "maybe"}).status_code == 409
        refused = {"decision": "refuse", "reason": "not <b>today</b>"}
        assert page.post(f"/waiting/{approval['id']}", data=refused).status_code == 303
        assert "refused: <code>echo</code>, not &lt;b&gt;today&lt;/b&gt;" in page.get("/waiting").text
        assert page.post(f"/waiting/{approval['id']}", data={"decision": "approve"}).status_code == 409
    assert "not <b>today</b>" in call.wait()["error"]


def test_an_approval_outlives_a_restart_and_is_answered_once(server: ServerProcess, client: httpx.Client) -> None:
    session = create_session(client)
    call = Call(server, session)
    [approval] = pending(client)
    server.kill()
    call.wait()
    server.start()
    with server.client() as again:
        assert pending(again) == [approval]
        answer = again.post(f"/approvals/{approval['id']}", json={"decision": "refuse"})
        assert (answer.status_code, answer.json()["status"]) == (200, "refused")
        assert again.post(f"/approvals/{approval['id']}", json={"decision": "approve"}).status_code == 409
        pending(again, 0)


# --- the queue without a server -------------------------------------------------------------------------------------


async def ignore(record: ApprovalRecord) -> None:
    """Take note of nothing."""


async def pending_in(queue: ApprovalQueue, number: int = 1) -> list[ApprovalRecord]:
    """Wait until so many approvals of Ann's are pending, and return them."""
    for _ in range(10_000):
        if len(found := await queue.list("ann", "pending")) == number:
            return found
        await asyncio.sleep(0)
    pytest.fail("no call asked")


async def test_of_two_answers_at_once_one_counts() -> None:
    store = MemoryStore()
    here, elsewhere = ApprovalQueue(store), ApprovalQueue(store)
    for _ in range(20):
        waiting = asyncio.create_task(here.ask("ann", ApprovalRequest("t", {"a": 1}, session_id="s"), ignore))
        [record] = await pending_in(elsewhere)
        answers = await asyncio.gather(
            here.answer("ann", record.id, "ann", AnswerApproval(decision="approve")),
            elsewhere.answer("ann", record.id, "bob", AnswerApproval(decision="refuse", reason="no")),
            return_exceptions=True,
        )
        [accepted] = [each for each in answers if isinstance(each, ApprovalRecord)]
        assert [type(each) for each in answers if each is not accepted] == [ApprovalAnswered]
        assert await waiting == (Approve() if accepted.status == "approved" else Refuse("no"))
        assert await here.list("ann", "pending") == []


async def test_an_answer_given_to_another_server_arrives() -> None:
    store = MemoryStore()
    waiting = asyncio.create_task(ApprovalQueue(store).ask("ann", ApprovalRequest("t", {}, session_id="s"), ignore))
    elsewhere = ApprovalQueue(store)
    [record] = await pending_in(elsewhere)
    await elsewhere.answer("ann", record.id, "ann", AnswerApproval(decision="approve", arguments={"b": 2}))
    assert await waiting == Approve({"b": 2})


async def test_approvals_are_deleted_with_their_session() -> None:
    store = MemoryStore()
    queue = ApprovalQueue(store)
    waiting = [
        asyncio.create_task(queue.ask("ann", ApprovalRequest("t", {}, session_id=name), ignore)) for name in "ab"
    ]
    found = await pending_in(queue, 2)
    await queue.delete("ann", "a")
    assert await waiting[0] == Refuse("the approval was deleted")
    assert [each.session_id for each in await queue.list("ann", None)] == ["b"]
    with pytest.raises(ApprovalNotFound):
        await queue.answer("ann", found[0].id, "ann", AnswerApproval(decision="approve"))
    waiting[1].cancel()
    await asyncio.wait({waiting[1]})
    assert [each.status for each in await queue.list("ann", None)] == ["expired"]
