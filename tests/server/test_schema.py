"""Our own OpenAPI, asked at random: no 5xx, and no answer that breaks the schema, with and without a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.late import Late
from tests.server.serving_process import Serving, ready

schemathesis = Late("schemathesis")
checks = Late("schemathesis.checks")
openapi_checks = Late("schemathesis.specs.openapi.checks")


@pytest.fixture(scope="module")
def session(server: Serving) -> Iterator[str]:
    with server.client() as client:
        yield ready(client, dataset="demo", sample_id="calc-1")


@pytest.fixture(scope="module")
def schema(server: Serving) -> Any:
    return schemathesis.openapi.from_url(server.url.replace("/api/v1", "/openapi.json"))


def operations(schema: Any) -> list[Any]:
    return [operation.ok() for operation in schema.get_all_operations()]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("with_key", [True, False], ids=["with a key", "without one"])
def test_no_answer_breaks_the_schema(schema: Any, server: Serving, session: str, with_key: bool) -> None:
    """Half of the questions are about a session that is there."""
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


def test_the_page_about_the_routes_is_there(server: Serving) -> None:
    root = server.url.removesuffix("/api/v1")
    assert httpx.get(f"{root}/docs", timeout=60).status_code == 200
    schema = httpx.get(f"{root}/openapi.json", timeout=60).json()
    without_a_key = [
        path for path, methods in schema["paths"].items() for about in methods.values() if not about.get("security")
    ]
    assert without_a_key == ["/api/v1/health"]
