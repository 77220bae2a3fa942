"""Random requests from our OpenAPI schema: no 5xx, and no answer that violates it, with and without a key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.test_isolation import BODIES
from tests.support.lazy_module import LazyModule
from tests.support.server_process import ServerProcess, create_session, run_command

schemathesis = LazyModule("schemathesis")
checks = LazyModule("schemathesis.checks")
openapi_checks = LazyModule("schemathesis.specs.openapi.checks")


@pytest.fixture(scope="module")
def session(server: ServerProcess) -> Iterator[str]:
    """One with a file whose name is not UTF-8, and with a lone surrogate in its conversation."""
    with server.client() as client:
        session = create_session(client, dataset="demo", sample_id="calc-1")
        assert run_command(client, session, r"mkdir $(printf '\377'); touch $(printf '\377/\351')")["exit_code"] == 0
        half = rb'{"messages": [{"role": "user", "content": "half \ud800", "number": 100000000000000000000000}]}'
        kept = client.post(f"/sessions/{session}/conversation", content=half, headers=JSON)
        assert kept.status_code == 200
        yield session


@pytest.fixture(scope="module")
def schema(server: ServerProcess) -> Any:
    return schemathesis.openapi.from_url(server.url.replace("/api/v1", "/openapi.json"))


JSON = {"Content-Type": "application/json"}
ODD = {
    "a lone surrogate": rb'"\ud800"',
    "the same in a name": rb'{"\udc00": "\udfff"}',
    "a long integer": b"9" * 5000,
    "a longer one in a list": b"[-1%s]" % (b"0" * 20_000),
    "no number": b"NaN",
    "deep": b"[" * 900 + b"]" * 900,
    "too deep": b'{"a":' * 100_000,
    "a zero byte": rb'"\u0000"',
    "not UTF-8": b'"\xff\xfe"',
}
"""Of the JSON that Python's own parser takes, or fails on in its own way."""


def operations(schema: Any) -> list[Any]:
    return [operation.ok() for operation in schema.get_all_operations()]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("with_key", [True, False], ids=["with a key", "without one"])
def test_no_answer_breaks_the_schema(schema: Any, server: ServerProcess, session: str, with_key: bool) -> None:
    """Half of the requests are for a session that exists."""
    headers = {"Authorization": f"Bearer {server.key}"} if with_key else {}
    wanted = [
        checks.not_a_server_error,
        openapi_checks.content_type_conformance,
        openapi_checks.response_headers_conformance,
        openapi_checks.response_schema_conformance,
        openapi_checks.status_code_conformance,
    ]
    tried = 0
    for operation in operations(schema):

        @settings(
            max_examples=12 if with_key else 3,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            nonlocal tried
            tried += 1
            if tried % 2 and "session_id" in (case.path_parameters or {}) and case.method != "DELETE":
                case.path_parameters["session_id"] = session
            if case.path.endswith("/events"):
                case.query = {**(case.query or {}), "follow": "0"}
            if isinstance(case.body, dict):
                # What may take long is no mistake, and would only be waited for.
                for name in ("command_timeout", "timeout"):
                    if isinstance(case.body.get(name), int | float) and case.body[name] > 1:
                        case.body[name] = 1
            case.headers = {**(case.headers or {}), **headers}
            case.headers.pop("prefer", None)
            case.call_and_validate(checks=wanted, timeout=60)

        ask()
    assert tried > 60


@pytest.mark.timeout(300)
def test_odd_values_are_refused_by_their_field_or_carried(server: ServerProcess, session: str) -> None:
    schema = httpx.get(server.url.replace("/api/v1", "/openapi.json"), timeout=60).json()
    sent = 0
    with server.client() as client:
        for path, methods in schema["paths"].items():
            for method, about in methods.items():
                given = about.get("requestBody", {}).get("content", {}).get("application/json")
                if given is None:
                    continue
                model = json.dumps(given["schema"]).rpartition("schemas/")[2].partition('"')[0]
                whole = BODIES.get((method, path.removeprefix("/api/v1")), {})
                for field in [*schema["components"]["schemas"][model]["properties"], "unknown", "messages.0.x"]:
                    for name, odd in ODD.items():
                        sent += 1
                        body = _with(whole, field).replace(b'"@odd@"', odd)
                        answer = client.request(
                            method,
                            server.url.removesuffix("/api/v1") + path.format(session_id=session, approval_id="a"),
                            content=body,
                            headers=JSON,
                        )
                        where = (method, path, field, name, answer.text[:500])
                        assert str(answer.status_code) in about["responses"], where
                        assert answer.status_code < 500, where
                        received = answer.json()
                        if answer.status_code == 422:
                            assert received["detail"], where
        assert client.get(f"/sessions/{session}/conversation").status_code == 200
        assert client.get(f"/sessions/{session}/events?follow=0").status_code == 200
        for each in client.get("/sessions").json()["sessions"]:
            if each["session_id"] != session:
                client.delete(f"/sessions/{each['session_id']}")
    assert sent > 200


def _with(body: Any, field: str) -> bytes:
    """A body in which a field is `@odd@`."""
    changed = json.loads(json.dumps(body))
    if field == "messages.0.x" and "messages" in changed:
        changed["messages"][0]["x"] = "@odd@"
    else:
        changed[field] = "@odd@"
    return json.dumps(changed).encode()


def test_only_health_needs_no_key(server: ServerProcess) -> None:
    schema = httpx.get(f"{server.url.removesuffix('/api/v1')}/openapi.json", timeout=60).json()
    without_a_key = [
        path for path, methods in schema["paths"].items() for about in methods.values() if not about.get("security")
    ]
    assert without_a_key == ["/api/v1/health"]
